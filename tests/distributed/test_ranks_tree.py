"""Two levels of ranks, as processes: six in blocks of two, led by 0, 2 and 4. Who dies or stops is named by all."""

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardopt import checkpoint
from shardopt.errors import RankError
from shardopt.ranks import Ranks, ranks_of
from shardopt.ranks.connections import node, tree
from tests.distributed.test_ranks import stop_for
from tests.harness import Fault, run_ranks, run_ranks_outcomes

SIZE = 6


def of_three_blocks():
    tree.RANKS_PER_BLOCK = 2
    return ranks_of()


def heard(here, what, work=lambda: None, deadline_seconds=30.0):
    """The reports of all as this rank gets them; or the error, and after how many seconds."""
    begin = time.monotonic()
    try:
        return here.with_deadline(deadline_seconds).agree(what, work, lambda _: here.rank, lambda reports: reports)[1]
    except RankError as error:
        return str(error), time.monotonic() - begin


def rounds_of_six():
    here = of_three_blocks()
    connected = [heard(here, "x") for _ in range(3)]
    sections = [bytes([block]) * (1 + (3 << 20) * (block == 1)) for block in range(3)]
    _, _, section = here.agree_in_sections(
        "y", lambda: None, lambda _: None, lambda _: (None, sections), lambda _, rank: rank // 2
    )
    side = heard(here.side_channel("beside"), "z")
    links = here.channel.node.hub.links
    return connected, side, section == sections[here.rank // 2], sorted(links)


def test_leaders_stand_between():
    links = [[1, 2, 4], [0], [0, 3], [2], [0, 5], [4]]
    for rank, outcome in enumerate(run_ranks(SIZE, rounds_of_six)):
        assert outcome == ([list(range(SIZE))] * 3, list(range(SIZE)), True, links[rank])


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def one_goes(victim, how, when, deadline_seconds):
    """A round, and one in which a rank is killed or stopped, before or after it reports."""
    here = of_three_blocks()
    if when != "at first":
        assert heard(here, "first") == list(range(SIZE))

    def work():
        go = kill if how == "killed" else lambda: stop_for(2 * deadline_seconds + 3)
        if here.rank == victim and when == "after its report":
            threading.Timer(0.3, go).start()
        elif here.rank == victim:
            time.sleep(0.5 if when == "at first" else 0.0)  # until it is connected
            go()
        elif when == "after its report" and here.rank == (victim + 3) % SIZE:
            time.sleep(1.0)  # so that there is no answer yet

    return heard(here, "second", work, deadline_seconds)


def check(victim, how, when):
    # A rank looks for rank 0 again until its first round is answered, so that then the error comes at the deadline.
    deadline_seconds = 30.0 if how == "killed" and when != "at first" else 1.0
    outcomes = run_ranks_outcomes(SIZE, one_goes, victim, how, when, deadline_seconds)
    if how == "killed":
        assert outcomes[victim].signal == signal.SIGKILL
    survivors = [outcome.value for outcome in outcomes if outcome.rank != victim]
    if when == "after its report" and victim != 0:  # all that it had to say is said: a rank with the answer continues
        assert all(value == list(range(SIZE)) or "rank" in value[0] for value in survivors)
        return
    texts = {text for text, _ in survivors}
    assert len(texts) == 1, texts
    (text,) = texts
    if how == "killed":
        assert text == f"second: rank {victim} died, or ended before this call [rank-lost]"
    else:
        assert text.startswith(f"second: rank {victim} gave no sign of life for 1 s")
    if how == "stopped" and when != "at first":
        assert text.endswith("; its process does not answer: stopped, or cut off [rank-lost]")
    # At once; or after the deadline, and the time in which the others are asked where they are.
    assert max(seconds for _, seconds in survivors) < (10 if deadline_seconds == 30 else 1 + 1 + 6)


MEMBER, LEADER = 3, 2


@pytest.mark.parametrize(
    ("victim", "how", "when"),
    [(LEADER, "killed", "before its report"), (LEADER, "stopped", "before its report")],
)
def test_the_loss_of_a_leader_is_named_by_all(victim, how, when):
    check(victim, how, when)


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", [0, LEADER, MEMBER])
@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("when", ["at first", "before its report", "after its report"])
def test_every_loss_is_named_by_all(victim, how, when):
    check(victim, how, when)


def first_round_of_six(deadline_seconds):
    return heard(of_three_blocks(), "first", deadline_seconds=deadline_seconds)


def test_a_leader_that_dies_before_its_members_have_come():
    """Rank 0 sees it at once; the member learns it from what rank 0 has written down."""
    fault = Fault(LEADER, "shardopt.ranks.connections.node:publish", 1)
    outcomes = run_ranks_outcomes(SIZE, first_round_of_six, 2.0, faults=[fault])
    assert outcomes[LEADER].signal == signal.SIGKILL
    survivors = {outcome.rank: outcome.value for outcome in outcomes if outcome.rank != LEADER}
    assert {text for text, _ in survivors.values()} == {
        f"first: rank {LEADER} died, or ended before this call [rank-lost]"
    }
    assert max(seconds for rank, (_, seconds) in survivors.items() if rank != MEMBER) < 1.8
    assert survivors[MEMBER][1] < 2 + 5


def in_a_function_of_its_own(seconds):
    """At one line or another, so that who asks later would hear something else."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.003)
        time.sleep(0.004)
        time.sleep(0.005)


def one_is_elsewhere(absent):
    here = of_three_blocks()
    heard(here, "first")
    if here.rank == absent:
        in_a_function_of_its_own(4.0)
        return "", 0.0
    return heard(here, "second", deadline_seconds=1.0)


@pytest.mark.parametrize("absent", [pytest.param(0, marks=pytest.mark.exhaustive), MEMBER])
def test_where_a_rank_is_that_is_not_in_the_call_is_told_by_all(absent):
    outcomes = run_ranks(SIZE, one_is_elsewhere, absent)
    del outcomes[absent]
    (text,) = {text for text, _ in outcomes}
    assert text.startswith(f"second: rank {absent} gave no sign of life for 1 s: dead, cut off, or not in this call")
    assert f"rank {absent} is elsewhere: [rank-lost]\n" in text and "in_a_function_of_its_own" in text
    assert len(text.splitlines()) <= 25


def one_dies_and_leaves_a_child():
    """A process that was forked, as workers of a DataLoader are, has all that its parent has open."""
    here = ranks_of()
    heard(here, "first")
    if here.rank == 1:
        if os.fork() == 0:
            time.sleep(8)
            os._exit(0)
        kill()
    return heard(here, "second", deadline_seconds=60.0)


def test_a_forked_child_does_not_hide_its_parents_death():
    outcomes = run_ranks_outcomes(3, one_dies_and_leaves_a_child)
    for rank in (0, 2):
        text, seconds = outcomes[rank].value
        assert text == "second: rank 1 died, or ended before this call [rank-lost]" and seconds < 5


def rank_0_leaves(nbytes):
    here = of_three_blocks()
    _, answer = here.agree("x", lambda: None, decide=lambda _: "x" * nbytes)
    if here.rank in (0, LEADER):
        os._exit(0)
    return len(answer)


@pytest.mark.parametrize("nbytes", [pytest.param(10, marks=pytest.mark.exhaustive), 32 << 20])
def test_an_answer_is_with_all_when_rank_0_and_leaders_are_gone(nbytes):
    outcomes = run_ranks_outcomes(SIZE, rank_0_leaves, nbytes)
    assert [outcome.value for outcome in outcomes if outcome.rank not in (0, LEADER)] == [nbytes] * 4


def one_is_late_after_its_section(late):
    """One rank dies; its leader and others are told so in the next call, and leave, before one comes to it."""
    here = of_three_blocks()
    sections = [b"a", b"b", b"c"]
    got = here.agree_in_sections(
        "x", lambda: None, lambda _: None, lambda _: (None, sections), lambda _, rank: rank // 2
    )[2]
    if here.rank == 1:
        kill()
    if here.rank == late:
        time.sleep(2.0)
    return got, heard(here, "y")[0]


@pytest.mark.parametrize("late", [pytest.param(LEADER, marks=pytest.mark.exhaustive), MEMBER])
def test_who_is_late_has_its_section_and_hears_why_the_others_left(late):
    outcomes = run_ranks_outcomes(SIZE, one_is_late_after_its_section, late)
    for rank in set(range(SIZE)) - {1}:
        got, text = outcomes[rank].value
        assert got == [b"a", b"b", b"c"][rank // 2] and "rank 1 died" in text
        assert rank == late or text == "y: rank 1 died, or ended before this call [rank-lost]"


def held_by_this_process():
    """Counts of open files and threads: the least in half a second, as the kernel has a thread longer than Python."""
    counts = []
    for _ in range(50):
        counts.append([len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")])
        time.sleep(0.01)
    return [min(each) for each in zip(*counts, strict=True)]


def many_sessions(count, settled):
    here, job, seen = ranks_of(), dist.group.WORLD, []
    for number in range(count):
        heard(here.side_channel("beside"), "x")
        heard(Ranks.meeting(job, (0, 1), f"meeting-{number}"), "y")
        heard(Ranks(job), "z")
        if number + 1 in (settled, count):
            while len(node._nodes) > 1:  # threads that are about to end
                time.sleep(0.001)
            dist.barrier()
            seen.append(
                (*held_by_this_process(), job.get_group_store().num_keys(), len(here.channel.node.hub.sessions))
            )
            dist.barrier()
    return seen


def over_a_server(folder):
    """Begins the job of these ranks anew, with a store that a server has; the harness gives them one in a file."""
    rank, size, port = dist.get_rank(), dist.get_world_size(), Path(folder) / "port"
    dist.destroy_process_group()
    if rank == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port.with_suffix(".new").write_text(str(store.port))
        port.with_suffix(".new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("localhost", int(port.read_text()), is_master=False)
    for attempt in range(5):  # on a busy machine gloo's own connections fail at times; what is judged comes later
        own = dist.PrefixStore(f"attempt-{attempt}", store)
        try:
            dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timedelta(seconds=120))
            failed = ""
        except (RuntimeError, dist.DistError) as error:
            failed = str(error)
        own.set(f"failed-{rank}", failed)
        if not any(own.get(f"failed-{each}") for each in range(size)):
            return
        if dist.is_initialized():
            dist.destroy_process_group()
    raise ConnectionError(f"gloo has not connected: {failed or 'on another rank'}")


def with_store(kind, folder, function, *args):
    if kind == "server":
        over_a_server(folder)
    return function(*args)


@pytest.mark.timeout(7500)  # 10,000 take minutes, and hours beside other work; the suite grants a test 150 s
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("file", 40),
        pytest.param("file", 10_000, marks=pytest.mark.exhaustive),
        pytest.param("server", 10_000, marks=pytest.mark.exhaustive),
    ],
)
def test_sessions_leave_nothing(tmp_path, kind, count):
    outcomes = run_ranks(2, with_store, kind, str(tmp_path), many_sessions, count, 20, deadline_seconds=7200.0)
    for early, late in outcomes:
        assert early[:3] == late[:3]
        assert max(early[3], late[3]) <= 3


def many_managers(root, count, settled):
    """Managers, each for one save, in turn in the call and in the background."""
    job, here, seen = dist.group.WORLD, ranks_of(), []
    for number in range(1, count + 1):
        with checkpoint.Manager(root, keep=1, stage=("now", None)[number % 2]) as manager:
            app = {"x": torch.zeros(3)}
            manager.restore(app)  # by which retention counts the other Managers' steps
            app["x"] += 1
            manager.save(number, app)
        if number in (settled, count):
            while any(thread.name.startswith(("shardopt-save", "shardopt-tidy")) for thread in threading.enumerate()):
                time.sleep(0.001)
            dist.barrier()
            seen.append(
                (*held_by_this_process(), job.get_group_store().num_keys(), len(here.channel.node.hub.sessions))
            )
            dist.barrier()
    return seen


@pytest.mark.timeout(7500)
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("server", 8),
        pytest.param("file", 10_000, marks=pytest.mark.exhaustive),
        pytest.param("server", 10_000, marks=pytest.mark.exhaustive),
    ],
)
def test_managers_and_their_saves_leave_nothing(tmp_path, kind, count):
    root, settled = str(tmp_path / "run"), min(20, count // 2)
    outcomes = run_ranks(
        2, with_store, kind, str(tmp_path), many_managers, root, count, settled, deadline_seconds=7200.0
    )
    for early, late in outcomes:
        assert early[:3] == late[:3]
        assert max(early[3], late[3]) <= 4
    assert checkpoint.Manager(root).steps() == [count - 1, count]


def two_jobs_in_one_store():
    """A job whose rank 0 still waits for its last rank, and another one in the same store, in the same processes."""
    here, old, errors = of_three_blocks(), Ranks(dist.group.WORLD), []

    def go_on():
        try:
            old.with_deadline(3.0).agree("old", lambda: None)
        except RankError as error:
            errors.append(str(error))

    thread = threading.Thread(target=go_on)
    if here.rank != SIZE - 1:
        thread.start()
    dist.barrier()
    time.sleep(0.5)
    if here.rank == 0:
        time.sleep(0.5)  # until then the store has the old one's session
    new = here if here.rank == SIZE - 1 else Ranks(dist.group.WORLD)
    if here.rank == SIZE - 1:
        time.sleep(1.0)  # a rank that the old job still waits for is taken for that one
    result = heard(new, "new")
    if here.rank != SIZE - 1:
        thread.join()
    return result, errors


@pytest.mark.exhaustive
def test_a_job_is_not_disturbed_by_one_before_it_that_still_waits():
    *others, last = run_ranks(SIZE, two_jobs_in_one_store)
    assert last == (list(range(SIZE)), [])
    lost = f"old: rank {SIZE - 1} gave no sign of life for 3 s"
    assert all(result == list(range(SIZE)) and error.startswith(lost) for result, (error,) in others)
