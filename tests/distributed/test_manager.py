"""A Manager on several ranks: what one of them finds damaged, none of them takes."""

import errno
import io
import logging
import os
import shutil
import signal
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.storage import LocalStorage
from shardopt.errors import CheckpointError, CheckpointExistsError, ShardoptError
from tests.harness import run_ranks

RANKS_STAY = True

RANKS = 3


def app_of(step):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = distribute_tensor(torch.full((60, 5), float(step)), mesh, [Shard(0)], src_data_rank=None)
    weight = torch.nn.Parameter(rows)
    optimizer = shardopt.keyed("adamw", [("weight", weight)], lr=0.1)
    return {"weight": weight, "optimizer": optimizer, "step": step}


def save_three(root):
    with checkpoint.Manager(root) as manager:
        for step in (1, 2, 3):
            app = app_of(step)
            app["optimizer"].init_state()
            manager.save(step, app, metrics={"rank": dist.get_rank()})


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A run with three steps, to be copied."""
    root = tmp_path_factory.mktemp("three")
    run_ranks(RANKS, save_three, str(root))
    return root


def restore(root):
    app = app_of(0)
    with checkpoint.Manager(root, keep=1) as manager:
        step = manager.restore(app)
        state = app["optimizer"].state_dict()["state"]["weight"]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert app["weight"].full_tensor().unique().tolist() == [step] == [app["step"]]
        manager.save(3, app)
    return step


@pytest.mark.parametrize("writer", range(RANKS))
def test_damage_that_one_rank_meets_is_known_to_all(three, tmp_path, writer):
    shutil.copytree(three, tmp_path, dirs_exist_ok=True)
    assert checkpoint.Manager(tmp_path).metrics(2) == {"rank": 0.0}
    (file,) = (tmp_path / "step-00000003").glob(f"*-r{writer:05d}.safetensors")
    data = bytearray(file.read_bytes())
    data[4096] ^= 1  # in the rows that this rank wrote, which on as many ranks it alone reads
    file.write_bytes(data)
    assert run_ranks(RANKS, restore, str(tmp_path)) == [2] * RANKS
    assert checkpoint.Manager(tmp_path).steps() == [2, 3]
    assert checkpoint.verify(checkpoint.Manager(tmp_path).path(3)).ok


def test_a_manifest_that_is_damaged(three, tmp_path):
    shutil.copytree(three, tmp_path, dirs_exist_ok=True)
    (tmp_path / "step-00000003" / "manifest.json").write_bytes(b'{"format": "shardopt"')
    assert run_ranks(2, restore, str(tmp_path)) == [2] * 2
    assert checkpoint.Manager(tmp_path).steps() == [2, 3]


def signalled_after_a_failure(root, kind, code):
    """The last chance of a job whose save or copy before has failed; its log."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("shardopt").addHandler(handler)
    options = (
        {"destinations": [checkpoint.Mirror(f"{root}/copies")]}
        if kind == "copy"
        else {"stage": "now"}
        if kind == "background"
        else {}
    )
    manager = checkpoint.Manager(
        f"{root}/run", stop_on=checkpoint.Preemption(signal.SIGUSR2, exit_code=code, seconds=50.0), **options
    )
    app = app_of(1)
    manager.save(1, app)
    if kind == "another":
        pending = checkpoint.async_save(f"{root}/run/step-00000002", app)
    else:
        manager.save(2, app)
        pending = manager._steps.background.pending if kind == "background" else None
    if pending is not None:
        assert pending.done.wait(30)
    if manager._run.mirror is not None:
        manager._run.mirror.finish()
    os.kill(os.getpid(), signal.SIGUSR2)  # on every rank, so that none gets to another step first
    dist.barrier()
    with pytest.raises(SystemExit) as left:
        manager.save(3, app_of(3))
    manager.close()
    return left.value.code, [line for line in lines if "failed before the stop was requested" in line]


@pytest.mark.parametrize("kind", ["background", "another", "copy"])
def test_the_last_save_is_made_although_one_before_has_failed(tmp_path, kind):
    for path in ("run", "copies") if kind == "copy" else ("run",):
        (tmp_path / path).mkdir()
    (tmp_path / ("copies" if kind == "copy" else "run") / "step-00000002").write_text("in the way")
    outcomes = run_ranks(2, signalled_after_a_failure, str(tmp_path), kind, 85)
    assert [code for code, _ in outcomes] == [85] * 2
    assert all(any("step-00000002" in line for line in lines) for _, lines in outcomes)
    assert checkpoint.Manager(tmp_path / "run").steps()[-1] == 3
    assert checkpoint.verify(checkpoint.Manager(tmp_path / "run").path(3)).ok


def save_again(root, stage):
    """Saves a step twice, by force, and what the second gives; then in another Manager that was restored from it."""
    outcomes = []
    with checkpoint.Manager(root, every=10, stage=stage) as manager:
        app = app_of(10)
        first = manager.save(10, app)
        again = manager.save(10, app, force=True)
        outcomes.append(again is first)
        manager.save(11, app, force=True)
        outcomes += [manager.save(11, app, force=True) is not None, manager.steps()]
        with pytest.raises(CheckpointExistsError, match="steps must rise"):
            manager.save(10, app)
            manager.wait()
    with checkpoint.Manager(root, every=10, stage=stage) as manager:
        app = app_of(0)
        manager.restore(app)
        outcomes += [manager.save(11, app, force=True), manager.steps()]
        try:
            outcomes.append(manager.save(10, app))
            outcomes.append(outcomes.pop().result())  # in the background it is found there
        except CheckpointExistsError:
            outcomes.append("exists")
    return outcomes


def save_again_in_stages(root):
    return [save_again(f"{root}/{stage}", stage) for stage in (None, "now")]


def test_the_step_that_this_manager_has_committed_or_restored_last_is_not_saved_again(tmp_path):
    expected = [True, True, [10, 11], None, [10, 11], "exists"]
    assert run_ranks(2, save_again_in_stages, str(tmp_path)) == [[expected] * 2] * 2


def roll_back(root):
    app = app_of(0)
    with checkpoint.Manager(root, keep=1) as manager:
        assert manager.restore(app, step=2, newer="remove" if dist.get_world_size() == 2 else "abandon") == 2
        manager.save(3, app_of(30))
    dist.barrier()  # rank 0 removes what is no longer wanted
    return manager.steps(), manager.abandoned_steps(), manager.path(3)


@pytest.mark.parametrize(("ranks", "aside"), [(2, {}), (3, {0: [3]})])
def test_a_run_is_taken_back_on_all_ranks(three, tmp_path, ranks, aside):
    shutil.copytree(three, tmp_path, dirs_exist_ok=True)
    path = str(tmp_path / "step-00000003-b1")
    assert run_ranks(ranks, roll_back, str(tmp_path)) == [([2, 3], aside, path)] * ranks


def restore_what_one_cannot_read(root):
    sound = os.preadv

    def preadv(fd, *args):
        if "step-00000003" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, "Input/output error")
        return sound(fd, *args)

    with pytest.MonkeyPatch.context() as monkeypatch:
        if dist.get_rank() == 1:
            monkeypatch.setattr(os, "preadv", preadv)
        return checkpoint.Manager(root).restore(app_of(0))


def test_what_one_rank_cannot_read_from_its_disk_none_takes(three, tmp_path):
    shutil.copytree(three, tmp_path, dirs_exist_ok=True)
    assert run_ranks(2, restore_what_one_cannot_read, str(tmp_path)) == [2] * 2


def restore_where_one_sees_no_root(root):
    """One rank's disk is not mounted."""
    messages, names, exists = [], LocalStorage.names, LocalStorage.exists
    for which in (0, 1):
        if dist.get_rank() == which:
            LocalStorage.names = lambda self: [] if self.url == root else names(self)
            LocalStorage.exists = lambda self, name: not self.url.startswith(f"{root}/") and exists(self, name)
        mirrors = [checkpoint.Mirror(f"{root}-{name}") for name in ("mirror-of-older", "empty-mirror")]
        tier = checkpoint.Tier(f"{root}-tier-{which}-{dist.get_rank()}", every=100)
        for destinations in ([], *([each] for each in (*mirrors, tier))):
            with pytest.raises(CheckpointError) as caught:
                checkpoint.Manager(root, every=100, destinations=destinations).restore(app_of(0), required=True)
            messages.append((which, str(caught.value)))
        LocalStorage.names, LocalStorage.exists = names, exists
    return messages


def test_a_root_that_is_not_mounted_on_one_rank(three, tmp_path):
    shutil.copytree(three, tmp_path / "run")
    shutil.copytree(tmp_path / "run" / "step-00000002", tmp_path / "run-mirror-of-older" / "step-00000002")
    messages = run_ranks(2, restore_where_one_sees_no_root, str(tmp_path / "run"))
    assert messages[0] == messages[1] and len(messages[0]) == 8
    for which, message in messages[0]:
        assert f"checkpoints on rank {1 - which}, and none on rank {which}" in message


def restore_and_look(root):
    return capture_stderr(lambda: checkpoint.Manager(root).restore(app_of(0)))


def capture_stderr(call):
    sys.stderr.flush()
    kept, sys.stderr = sys.stderr, io.StringIO()
    try:
        call()
        return sys.stderr.getvalue()
    finally:
        sys.stderr = kept


def test_rank_0_alone_tells_what_was_restored(three, tmp_path):
    shutil.copytree(three, tmp_path, dirs_exist_ok=True)
    first, *others = run_ranks(2, restore_and_look, str(tmp_path))
    assert others == [""]
    assert f"shardopt: resumed step 3 from {tmp_path}/step-00000003, saved by 3 ranks on " in first


def keep_the_best_of_the_last_stage(root, stage):
    """A run whose last rank alone knows the loss, as with a pipeline."""
    rules = checkpoint.Retention(last=1, best=("loss", "min", 1))
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with checkpoint.Manager(root, keep=rules, stage=stage) as manager:
        for step, loss in enumerate([3.0, 1.0, 2.0, 4.0], start=1):
            metrics = {"loss": loss, "both": 2} if is_last else {"both": 1} if step % 2 else None
            manager.save(step, {"step": step}, metrics=metrics)
        manager.save(4, {"step": 4}, metrics={"late": 5} if is_last else None)
        manager.wait()
        manager.add_metrics(4, {"after": 6} if is_last else None)
        return manager.steps(), manager.metrics(2), manager.metrics(4)


@pytest.mark.parametrize("stage", [None, "now"])
def test_metrics_of_any_rank_count_and_of_one_name_the_lowest_ranks(tmp_path, stage):
    expected = [2, 4], {"loss": 1.0, "both": 2.0}, {"loss": 4.0, "both": 2.0, "late": 5.0, "after": 6.0}
    assert run_ranks(2, keep_the_best_of_the_last_stage, str(tmp_path / "run"), stage) == [expected] * 2


def change_what_is_there(root):
    app = {"x": torch.ones(4), "rank": checkpoint.PerRank(dist.get_rank()), "step": 0}
    errors = []
    with checkpoint.Manager(root, stage="now", options=checkpoint.SaveOptions(durable=False)) as manager:
        for step in (1, 2, 3):
            app["step"] = step
            manager.save(step, app)
            manager.add_metrics(step, {"loss": 1.0 / step + dist.get_rank()})
        for call in (
            lambda: manager.add_metrics(1, {"loss": "low" if dist.get_rank() else 1.0}),
            lambda: manager.add_metrics(7, {"loss": 1.0}),
            lambda: manager.delete(7),
        ):
            with pytest.raises(ShardoptError) as caught:
                call()
            errors.append(type(caught.value).__name__)
        manager.delete(3)
        return errors, manager.latest_step, manager.metrics(2), manager.restore(app)


def test_metrics_are_added_and_steps_deleted_by_all_ranks(tmp_path):
    errors = ["StateError", "CheckpointNotFoundError", "CheckpointNotFoundError"]
    assert run_ranks(2, change_what_is_there, str(tmp_path)) == [(errors, 2, {"loss": 0.5}, 2)] * 2


def one_is_astray(root, stage, on_tier):
    tiers = [checkpoint.Tier(f"{root}-tier", every=1)] if on_tier else []
    texts, rank = [], dist.get_rank()
    options = checkpoint.SaveOptions(deadline_seconds=20)
    with checkpoint.Manager(root, every=1, stage=stage, destinations=tiers, options=options) as manager:
        manager.save(6, app_of(6))
        for own in (4, 6, 5, 7) if rank else (7, 6, 5, 7):
            try:
                manager.save(own, app_of(own))
                manager.wait()
            except ShardoptError as error:
                texts.append(str(error).split("\n")[0].split("; all")[0])
        return texts


@pytest.mark.parametrize(("stage", "on_tier"), [("now", False), (None, True), ("now", True)])
def test_all_ranks_are_told_that_one_is_at_a_lower_step(tmp_path, stage, on_tier):
    first, second = run_ranks(2, one_is_astray, str(tmp_path / "run"), stage, on_tier)
    assert first == second and len(first) == 2
    assert first[0] == "ranks are in different calls: saving step-00000007 on rank 0; saving step-00000004 on rank 1"
    assert first[1].endswith("/step-00000005 failed: steps must rise [path-taken]")
