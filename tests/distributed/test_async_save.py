"""Saves in the background on real ranks: beside what the program's ranks do, under faults, 200 in a row, to the end."""

import gc
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.saving.async_save import AsyncSaver
from shardopt.checkpoint.saving.options import SaveTerms
from shardopt.checkpoint.saving.writing import staging
from shardopt.errors import CheckpointError, RankError, ShardoptError
from tests.distributed import test_faults
from tests.harness import Fault, each_operation, run_ranks, run_ranks_outcomes

REPOSITORY = Path(__file__).resolve().parents[2]
RANKS = 3
DEADLINE_SECONDS = 3.0
STAGES = ("now", "lazy")


def sharded_job(width=24):
    """A model sharded by rows, its optimizer after one step, and what a loop keeps besides."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 4))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=0.1)
    replicated = distribute_tensor(torch.arange(50.0), mesh, [Replicate()], src_data_rank=None)
    app = {"model": model, "optimizer": optimizer, "step": 1, "seen": torch.zeros(3), "replicated": replicated}
    train_step(app)
    return app | {"mine": checkpoint.PerRank([dist.get_rank()])}


def train_step(app):
    app["optimizer"].zero_grad()
    app["model"](torch.randn(8, app["model"][0].in_features)).square().sum().backward()
    app["optimizer"].step()


def whole(app):
    """Every tensor of the app, put together and copied. Collective."""
    tensors = {f"model.{name}": each for name, each in app["model"].state_dict().items()}
    for name, entries in app["optimizer"].state_dict()["state"].items():
        tensors |= {f"optimizer.state.{name}.{entry}": each for entry, each in entries.items()}
    tensors |= {"seen": app["seen"], "replicated": app["replicated"]}
    return {
        key: (each.full_tensor() if hasattr(each, "full_tensor") else each).clone() for key, each in tensors.items()
    }


def hold(gate):
    """Copies in the background wait for `gate`."""
    unheld = staging.copy_on_host

    def held(host, source):
        if threading.current_thread() is not threading.main_thread():
            assert gate.wait(30)
        unheld(host, source)

    staging.copy_on_host = held


def save_beside_training(root):
    """While the copies of a lazy save are held the program saves, runs models and communicates in the foreground."""
    app, fresh = sharded_job(), sharded_job()
    gate = threading.Event()
    hold(gate)
    expected = whole(app)
    pending = checkpoint.async_save(f"{root}/lazy", app, stage="lazy", deadline_seconds=20)
    checkpoint.save(f"{root}/beside", app)
    fresh["model"](
        torch.randn(8, fresh["model"][0].in_features)
    ).sum().backward()  # a step of any keyed optimizer would wait
    app["mine"].value.append("later")
    app["seen"] += 1
    app["step"] = 2
    for _ in range(20):
        dist.all_reduce(torch.ones(1))
    with pytest.raises(CheckpointError, match="one at a time"):
        checkpoint.async_save(f"{root}/refused", app, in_flight="refuse")
    assert not pending.staged
    gate.set()
    train_step(app)
    assert pending.staged
    pending.result(30)
    with checkpoint.open(f"{root}/lazy") as reader:
        assert reader.read("step") == 1
        assert reader.per_rank(dist.get_rank())["mine"] == [dist.get_rank()]
        differing = [key for key, tensor in expected.items() if not torch.equal(reader.read(key), tensor)]
    dist.barrier()
    checkpoint.load(f"{root}/lazy", fresh)
    train_step(app)
    return differing


def test_a_save_runs_beside_what_the_ranks_do_in_the_foreground(tmp_path):
    assert run_ranks(2, save_beside_training, str(tmp_path)) == [[], []]
    assert checkpoint.verify(tmp_path / "lazy").ok and checkpoint.verify(tmp_path / "beside").ok


def fail_then_continue(root, stage):
    """The error that each rank raises at the step after a save that failed; the one after that must go well."""
    app = sharded_job()
    saver = AsyncSaver()
    checkpoint.save(f"{root}/first", app)
    pending = saver.save(f"{root}/second", app, SaveTerms(deadline_seconds=DEADLINE_SECONDS), stage=stage)
    assert pending.done.wait(30)
    message = ""
    try:
        train_step(app)
    except ShardoptError as error:
        message = f"{type(error).__name__}: {error}"
    dist.barrier()
    saver.save(f"{root}/third", app, stage=stage)
    saver.close()
    return message


def save_without_threads(root):
    """The error of each rank if rank 1 can start no thread for a save; the next one goes well."""
    start, saver, terms = threading.Thread.start, AsyncSaver(), SaveTerms(deadline_seconds=DEADLINE_SECONDS)

    def refuse(self):
        if self.name == "shardopt-save":
            raise RuntimeError("can't start new thread")
        start(self)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(CheckpointError) as caught:
            saver.save(f"{root}/first", {"x": torch.ones(3)}, terms).result(30)
    saver.save(f"{root}/second", {"x": torch.ones(3)}, terms).result(30)
    saver.close()
    return str(caught.value)


def test_a_rank_that_can_start_no_thread_says_so_on_all(tmp_path):
    for text in run_ranks(2, save_without_threads, str(tmp_path)):
        assert "a save in the background cannot begin [save-in-flight]" in text and "ulimit -u" in text
    assert [path.name for path in tmp_path.iterdir() if list(path.iterdir())] == ["second"]


COPY = "shardopt.checkpoint.saving.writing.staging:copy_on_host"


@pytest.mark.parametrize(
    ("stage", "fault", "error"),
    [
        ("now", Fault(1, COPY, at=3, action="ENOMEM"), "RankError: .* on rank 1: OSError"),
        ("lazy", Fault(2, COPY, at=4, action="EIO"), "RankError: .* on rank 2: OSError"),
        ("lazy", Fault(2, "os:writev", at=2, action="ENOSPC"), "NoSpaceError: .* on rank 2: .*No space left"),
        ("now", Fault(0, "os:link", at=2, action="EIO"), "CheckpointError: .* on rank 0: cannot commit"),
    ],
    ids=["copying", "copying later", "writing", "committing"],
)
def test_a_failure_on_one_rank_is_told_on_all(tmp_path, stage, fault, error):
    messages = run_ranks(RANKS, fail_then_continue, str(tmp_path), stage, faults=[fault])
    assert len(set(messages)) == 1 and re.match(error, messages[0]), messages
    assert not (tmp_path / "second" / "manifest.json").exists()
    for name in ("first", "third"):
        assert checkpoint.verify(tmp_path / name).ok
        assert len(list((tmp_path / name).glob("*.safetensors"))) == RANKS


def save_and_die(root, stage):
    app = sharded_job()
    checkpoint.save(f"{root}/first", app)
    pending = checkpoint.async_save(f"{root}/second", app, stage=stage, deadline_seconds=DEADLINE_SECONDS)
    begin = time.monotonic()
    try:
        pending.result(60)
    except ShardoptError as error:
        took = time.monotonic() - begin
        train_alone = app["seen"] + 1  # what a survivor does is its own affair: nothing here hangs
        assert train_alone.sum() == 3
        with pytest.raises(RankError, match="lost step"):
            checkpoint.async_save(f"{root}/third", app).result(60)
        return took, type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    ("stage", "fault"),
    [
        ("now", Fault(1, COPY, at=3)),
        ("lazy", Fault(0, COPY, at=5)),
        ("lazy", Fault(2, "os:writev", at=2)),
        ("now", Fault(0, "os:link", at=2)),
    ],
    ids=["copying", "copying later", "writing", "committing"],
)
def test_a_rank_that_dies_is_named_to_the_others(tmp_path, stage, fault):
    outcomes = run_ranks_outcomes(RANKS, save_and_die, str(tmp_path), stage, faults=[fault])
    assert outcomes[fault.rank].signal is not None
    for outcome in outcomes:
        if outcome.rank != fault.rank:
            took, kind, message = outcome.value
            assert kind == "RankError" and f"rank {fault.rank} died" in message
            assert took < DEADLINE_SECONDS + 6
    assert checkpoint.verify(tmp_path / "first").ok
    assert not (tmp_path / "second" / "manifest.json").exists()


def save_second_beside(root):
    """As `test_faults.save_second`, in the background, with state that is copied there."""
    weight = torch.nn.Parameter(torch.arange(9.0))
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
    app = test_faults.state(2) | {"weight": weight, "optimizer": optimizer}
    path = f"{root}/step-00000002"  # not `Manager.path`, which is local: what it meets is its own rank's affair
    checkpoint.async_save(path, app, stage="lazy", deadline_seconds=test_faults.DEADLINE_SECONDS).result()


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("action", ["kill", "EIO"])
def test_every_fault_at_every_operation(tmp_path_factory, action):
    root = str(tmp_path_factory.mktemp("sound") / "root")
    run_ranks(test_faults.RANKS, test_faults.save_first, root)
    calls = run_ranks_outcomes(test_faults.RANKS, save_second_beside, root, trace=(COPY, *test_faults.CALLS))
    steps = Counter()
    for fault in each_operation(calls, action):
        steps[test_faults.survive(tmp_path_factory.mktemp("fault"), fault, save_second_beside)] += 1
    print(f"{action}: {sum(steps.values())}, of which {steps[2]} left the new checkpoint")
    assert steps[1] > 0


def save_many(root, count, settled):
    """The resources that this process holds after `settled` saves, and how much more after `count`."""
    app = {"w": torch.arange(1000.0), "step": 0}
    model = torch.nn.Linear(30, 30)
    optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=0.1)
    optimizer.init_state()
    app |= {"model": model, "optimizer": optimizer}
    store = dist.group.WORLD.get_group_store()
    saver = AsyncSaver()
    held = []
    for number in range(count):
        app["step"] = number
        saver.save(f"{root}/{number}", app, SaveTerms(durable=False), stage=STAGES[number % 2])
        model(torch.ones(2, 30)).sum().backward()
        optimizer.step()
        if number + 1 in (settled, count):
            saver.wait()
            gc.collect()
            dist.barrier()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            held.append(
                {
                    "descriptors": len(os.listdir("/proc/self/fd")),
                    "threads": len(os.listdir("/proc/self/task")),
                    "hooks": len(optimizer._optimizer_step_pre_hooks),
                    "keys": store.num_keys(),
                    "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
                }
            )
    return held


def test_200_saves_leave_memory_descriptors_and_threads_flat(tmp_path):
    for before, after in run_ranks(2, save_many, str(tmp_path), 200, 50):
        grown = after.pop("rss_bytes") - before.pop("rss_bytes")
        assert after.pop("keys") - before.pop("keys") <= 2  # the heartbeats, which begin with the first long wait
        assert after == before
        assert grown <= 2 << 20, grown
    assert checkpoint.verify(tmp_path / "199").ok


PROGRAM = """
import atexit, pathlib, sys, threading, torch
atexit.register(lambda: pathlib.Path(url + ".before").touch())
from shardopt import checkpoint
atexit.register(lambda: pathlib.Path(url + ".after").touch())
from shardopt.checkpoint.saving.writing import staging

url, case = sys.argv[1:]
model = torch.nn.Linear(3, 3)
app = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
if case == "in flight":
    copy = staging.copy_on_host
    late = threading.Event()
    threading.Timer(1, late.set).start()
    staging.copy_on_host = lambda host, source: late.wait() and copy(host, source)
    pending = checkpoint.async_save(url, app, stage="lazy")
else:
    if case == "failed":
        checkpoint.save(url, app)
    pending = checkpoint.async_save(url, app)
    pending.done.wait()
log = open(url + ".log", "w")
log.write("a line that nobody flushes")
class Ends:
    def __del__(self, write=print):
        write("ends")
ends = Ends()
print("the last line")
"""


@pytest.mark.parametrize(
    ("case", "code", "says"),
    [
        ("in flight", 1, "under way, which was committed all the same; call result"),
        pytest.param(
            "failed",
            1,
            "ended before it was reported that saving .* failed: the path is taken",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("done", 0, "", marks=pytest.mark.exhaustive),
    ],
)
def test_a_program_that_ends_without_waiting_fails_and_says_why(tmp_path, case, code, says):
    url = str(tmp_path / "it")
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, url, case], capture_output=True, text=True, env=environment, timeout=100
    )
    assert (ended.returncode, ended.stdout) == (code, "the last line\nends\n"), ended.stderr
    assert re.search(says, ended.stderr) and (says or not ended.stderr)
    assert checkpoint.verify(url).ok
    assert (tmp_path / "it.log").read_text() == "a line that nobody flushes"
    assert (tmp_path / "it.before").exists() and (tmp_path / "it.after").exists()
