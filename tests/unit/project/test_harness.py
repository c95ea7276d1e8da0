"""The harness proves itself: whatever a rank can do, the test that started it must be told the truth."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import (
    Fault,
    Outcome,
    RankException,
    RanksFailed,
    each_operation,
    ranks,
    run_ranks,
    run_ranks_outcomes,
)
from tests.harness.faults import watched

ROOT = Path(__file__).resolve().parents[3]


# What the ranks do. At module level, since they import it.


def all_reduce(scale):
    ones = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(ones)
    return ones * scale


def environment():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "FROM_THE_TEST")
    return {name: os.environ.get(name) for name in names}, torch.get_num_threads(), dist.is_initialized()


def loaded_modules():
    return {name for name in ("torch._dynamo", "torch.distributed.fsdp", "shardopt") if name in sys.modules}


def left_of_the_servers_use():
    """What ranks find of the use of torch in the server: numbers drawn, groups, threads."""
    state, groups = torch.get_rng_state(), len(dist.distributed_c10d._world.pg_map)
    torch.manual_seed(torch.initial_seed())
    return torch.equal(state, torch.get_rng_state()), groups, threading.active_count()


def fail_on(bad_rank):
    if dist.get_rank() == bad_rank:
        print("a word before the end")
        raise ValueError("the root of it")
    dist.barrier()


def fail_after_seconds(seconds):
    dist.barrier()
    time.sleep(seconds[dist.get_rank()])
    raise ValueError(f"from rank {dist.get_rank()}")


def is_failed_peer_there():
    pid = torch.tensor(os.getpid())
    dist.broadcast(pid, src=0)
    if dist.get_rank() == 0:
        raise ValueError("rank 0 is done")
    time.sleep(0.1)
    return _is_running(str(pid.item()))


def wait_for_all():
    """Until all ranks are here: one that is still connecting would meet a closed connection, or wait for ever."""
    store = dist.distributed_c10d._get_default_store()
    store.add("here", 1)
    while store.add("here", 0) < dist.get_world_size():
        time.sleep(0.01)


def killed_in_collective(bad_rank):
    wait_for_all()
    if dist.get_rank() == bad_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def exit_quietly():
    wait_for_all()
    os._exit(3)


def a_place_to_hang_in():
    while True:
        time.sleep(60)


def hang_on(bad_ranks):
    if dist.get_rank() in bad_ranks:
        a_place_to_hang_in()
    return "done"


def leave_a_thread(bad_rank):
    if dist.get_rank() == bad_rank:
        threading.Thread(target=a_place_to_hang_in).start()


def return_what_cannot_be_pickled():
    return lambda: None


class Stubborn(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def raise_what_cannot_be_pickled():
    raise Stubborn("this", "that")


def warn():
    warnings.warn("look out", UserWarning, stacklevel=1)


class Disk:
    """Something to break: a method, a static and a class method."""

    def write(self, data):
        return len(data)

    @staticmethod
    def sync():
        return "synced"

    @classmethod
    def name(cls):
        return cls.__name__


class NetworkDisk(Disk):
    pass


DISK = "tests.unit.project.test_harness:Disk"


def use_disk(times=2):
    return [(Disk().write(b"12345678"), Disk.sync(), Disk.name()) for _ in range(times)]


def catch_errors(times):
    answers = []
    for _ in range(times):
        try:
            answers.append(str(Disk().write(b"12")))
        except OSError as error:
            answers.append(str(error.errno))
    return answers


def write_and_sync(path):
    with open(f"{path}-{os.environ['RANK']}", "wb") as file:
        written = os.writev(file.fileno(), [b"abc", b"defgh"])
        os.fsync(file.fileno())
    return written


def inherited():
    return NetworkDisk().write(b"12"), Disk().write(b"12")


def forever_with_pid(folder):
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    a_place_to_hang_in()


# What the test is told.


def test_each_rank_has_its_result():
    results = run_ranks(4, all_reduce, scale=2.0)
    assert [result.tolist() for result in results] == [[20.0] * 3] * 4


def test_ranks_have_the_environment_of_the_test_and_their_own(monkeypatch):
    monkeypatch.setenv("FROM_THE_TEST", "yes")
    for rank, (names, threads, has_group) in enumerate(run_ranks(3, environment)):
        assert list(names.values()) == [str(rank), str(rank), "3", "3", "yes"]
        assert threads == 1
        assert has_group


def test_ranks_without_a_process_group():
    assert [has_group for *_, has_group in run_ranks(2, environment, backend=None)] == [False, False]


def test_ranks_find_torch_loaded():
    assert run_ranks(1, loaded_modules, backend=None) == [{"torch._dynamo", "torch.distributed.fsdp", "shardopt"}]


def test_ranks_find_nothing_of_a_job_in_the_server():
    """Which has used torch once: see preloaded.py. A thread is that of `die_with_parent`."""
    assert run_ranks(1, left_of_the_servers_use, backend=None) == [(True, 0, 2)]


def test_four_ranks_are_quick():
    run_ranks(1, loaded_modules)  # the server is warm from here on
    start = time.monotonic()
    run_ranks(4, all_reduce, 1.0)
    assert time.monotonic() - start < 2.0


def test_jobs_run_side_by_side():
    results = {}
    jobs = [
        threading.Thread(target=lambda scale=scale: results.update({scale: run_ranks(2, all_reduce, scale)}))
        for scale in (1.0, 2.0, 3.0)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert {scale: float(result[1][0]) for scale, result in results.items()} == {1.0: 3.0, 2.0: 6.0, 3.0: 9.0}


def test_first_failing_rank_is_the_failure():
    with pytest.raises(RanksFailed) as failure:
        run_ranks(3, fail_on, bad_rank=1)
    lines = str(failure.value).splitlines()
    assert lines[0] == "rank 1 raised ValueError: the root of it (first of 3 ranks)"
    assert any("in fail_on" in line for line in lines)
    assert "a word before the end" in lines
    assert [line[:13] for line in lines[-2:]] == ["rank 0 raised", "rank 2 raised"]  # their connection was closed


def test_first_means_first_in_time():
    with pytest.raises(RanksFailed, match=r"^rank 2 raised ValueError: from rank 2"):
        run_ranks(3, fail_after_seconds, (0.5, 0.4, 0.0))


def test_all_ranks_that_raise_are_heard():
    outcomes = run_ranks_outcomes(3, fail_after_seconds, (0.0, 0.05, 0.1))
    assert [str(outcome) for outcome in outcomes] == [f"rank {r} raised ValueError: from rank {r}" for r in range(3)]
    assert all(
        isinstance(outcome.error, ValueError) and "fail_after_seconds" in outcome.traceback for outcome in outcomes
    )


def test_failed_rank_stays_until_its_peers_can_have_ended(monkeypatch):
    """Ranks that fail together do not end together: the last must not meet closed connections instead."""
    monkeypatch.setattr(ranks, "_SETTLE_SECONDS", 30.0)  # the default is short for a loaded machine
    assert run_ranks_outcomes(2, is_failed_peer_there)[1].value is True


def test_killed_rank_is_reported_as_such():
    with pytest.raises(RanksFailed, match=r"^rank 1 was killed by SIGKILL \(first of 3 ranks\)"):
        run_ranks(3, killed_in_collective, 1)
    outcomes = run_ranks_outcomes(3, killed_in_collective, 1)
    assert outcomes[1].signal == signal.SIGKILL
    assert isinstance(outcomes[0].error, RuntimeError) and isinstance(outcomes[2].error, RuntimeError)


def test_exit_without_a_result_is_reported_as_such():
    outcomes = run_ranks_outcomes(2, exit_quietly)
    assert [str(outcome) for outcome in outcomes] == [f"rank {r} exited with code 3 and no result" for r in range(2)]


def test_deadline_names_the_ranks_that_hang_with_their_stacks():
    start = time.monotonic()
    with pytest.raises(RanksFailed) as failure:
        run_ranks(3, hang_on, (0, 2), deadline_seconds=2.0)
    assert time.monotonic() - start < 10.0
    message = str(failure.value)
    assert message.startswith("rank 0, 2 of 3 did not finish within 2 s\nrank 1 returned\n--- stack of rank 0\n")
    assert message.count("in a_place_to_hang_in") == 2
    assert "die_with_parent" not in message


def test_a_thread_left_running_is_a_hang():
    with pytest.raises(RanksFailed, match=r"^rank 1 of 2 returned, but did not end\n(.*\n)*.*a_place_to_hang_in"):
        run_ranks(2, leave_a_thread, 1, deadline_seconds=2.0)


def test_what_cannot_be_pickled_is_said():
    with pytest.raises(RanksFailed, match="the result of the rank cannot be pickled"):
        run_ranks(1, return_what_cannot_be_pickled)
    (outcome,) = run_ranks_outcomes(1, raise_what_cannot_be_pickled)
    assert isinstance(outcome.error, RankException)
    assert str(outcome) == "rank 0 raised Stubborn: this and that"


def test_warnings_of_ranks_are_errors_where_the_tests_are():
    (outcome,) = run_ranks_outcomes(1, warn, backend=None)
    assert isinstance(outcome.error, UserWarning)


@pytest.mark.filterwarnings("ignore:look out")
def test_warnings_of_ranks_are_ignored_where_the_tests_are():
    assert run_ranks(1, warn, backend=None) == [None]


@pytest.mark.parametrize("operation", ["write", "sync", "name"])
def test_fault_kills_one_rank_at_the_kth_call(operation):
    outcomes = run_ranks_outcomes(2, use_disk, faults=[Fault(1, f"{DISK}.{operation}", at=2)], backend=None)
    assert outcomes[0].value == [(8, "synced", "Disk")] * 2
    assert outcomes[1].signal == signal.SIGKILL


@pytest.mark.parametrize(("action", "number"), [("ENOSPC", "28"), (OSError(5, "io"), "5")])
def test_fault_raises_for_as_many_calls_as_it_says(action, number):
    fault = Fault(0, f"{DISK}.write", at=2, action=action, times=2)
    assert run_ranks(1, catch_errors, 4, faults=[fault], backend=None) == [["2", number, number, "2"]]


def test_fault_cuts_a_write_short(tmp_path):
    fault = Fault(0, "os:writev", action="short")
    assert run_ranks(2, write_and_sync, str(tmp_path / "file"), faults=[fault], backend=None) == [4, 8]
    assert (tmp_path / "file-0").read_bytes() == b"abcd"
    assert (tmp_path / "file-1").read_bytes() == b"abcdefgh"


def test_fault_delays():
    start = time.monotonic()
    run_ranks(1, use_disk, faults=[Fault(0, f"{DISK}.sync", action="delay", seconds=0.5)], backend=None)
    assert time.monotonic() - start >= 0.5


def test_fault_on_an_inherited_method_leaves_the_base_alone():
    fault = Fault(0, "tests.unit.project.test_harness:NetworkDisk.write", action="short")
    assert run_ranks(1, inherited, faults=[fault], backend=None) == [(1, 2)]


def test_operations_are_put_back():
    names = [f"{DISK}.{name}" for name in ("write", "sync", "name")] + [
        "tests.unit.project.test_harness:NetworkDisk.write"
    ]
    before = dict(vars(Disk)), dict(vars(NetworkDisk))
    with watched([], names) as watch:
        assert use_disk(1) == [(8, "synced", "Disk")]
    assert watch.calls == names[:3]
    assert (dict(vars(Disk)), dict(vars(NetworkDisk))) == before


def test_fault_that_is_never_reached_is_a_failure():
    with pytest.raises(RanksFailed, match=r"no fault was reached.*at=3.*'rank 1': \{'tests.*write': 2\}"):
        run_ranks(2, use_disk, faults=[Fault(1, f"{DISK}.write", at=3)], backend=None)


def test_fault_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="expected one of"):
        Fault(0, "os:fsync", action="explode")
    with pytest.raises(ValueError, match="counted from 1"):
        Fault(0, "os:fsync", at=0)
    with pytest.raises(ValueError, match="not one of 2"):
        run_ranks(2, use_disk, faults=[Fault(2, "os:fsync")])
    with pytest.raises(RanksFailed, match=r"expected 'module:qualified\.name'"):
        run_ranks(1, use_disk, faults=[Fault(0, "fsync")], backend=None)


def test_every_traced_operation_can_be_a_fault(tmp_path):
    operations = ["os:writev", "os:fsync"]
    outcomes = run_ranks_outcomes(2, write_and_sync, str(tmp_path / "file"), trace=operations, backend=None)
    assert [outcome.calls for outcome in outcomes] == [("os:writev", "os:fsync")] * 2
    faults = each_operation(outcomes)
    assert faults == [Fault(rank, operation) for rank in range(2) for operation in operations]
    for fault in faults:
        outcomes = run_ranks_outcomes(2, write_and_sync, str(tmp_path / "file"), faults=[fault], backend=None)
        assert [outcome.rank for outcome in outcomes if outcome.signal == signal.SIGKILL] == [fault.rank]


def test_faults_are_counted_per_operation():
    calls = ("a", "b", "a")
    assert each_operation([Outcome(3, calls=calls)], "EIO") == [
        Fault(3, "a", 1, "EIO"),
        Fault(3, "b", 1, "EIO"),
        Fault(3, "a", 2, "EIO"),
    ]


INTERRUPTED_THEN_KILLED = f"""
from tests.harness import run_ranks
from {__name__} import forever_with_pid
try:
    run_ranks(2, forever_with_pid, "FOLDER/interrupted")
except KeyboardInterrupt:
    run_ranks(2, forever_with_pid, "FOLDER/killed")
"""


@pytest.mark.exhaustive
def test_no_rank_outlives_its_test(tmp_path):
    program = INTERRUPTED_THEN_KILLED.replace("FOLDER", str(tmp_path))
    (tmp_path / "interrupted").mkdir()
    (tmp_path / "killed").mkdir()
    killed_leaves_its_folder = {**os.environ, "TMPDIR": str(tmp_path)}
    test = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=killed_leaves_its_folder)
    for name, number in (("interrupted", signal.SIGINT), ("killed", signal.SIGKILL)):
        pids = [_wait_for(lambda path=tmp_path / name / str(rank): path.read_text()) for rank in range(2)]
        test.send_signal(number)
        for pid in pids:
            _wait_for(lambda pid=pid: not _is_running(pid))
    assert test.wait() == -signal.SIGKILL


def _is_running(pid):
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_for(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if answer := condition():
                return answer
        except FileNotFoundError:
            pass  # not yet
        time.sleep(0.02)
    pytest.fail("it did not come about")
