"""Ranks stay in step, or are told at once that they are not: failures heard on one rank, other calls, other objects."""

import importlib
import json
import os
import time

import pytest
import torch
import torch.distributed as dist

from shardopt import checkpoint
from shardopt.checkpoint.run.context import Run
from shardopt.checkpoint.run.mirror import MirrorCopier
from shardopt.checkpoint.run.root import Root
from shardopt.checkpoint.saving.async_save import AsyncSaver
from shardopt.checkpoint.saving.options import SaveTerms
from shardopt.checkpoint.storage import marker, storage_of
from shardopt.errors import CheckpointExistsError, ShardoptError
from shardopt.ranks import SharedGroup
from tests.harness import Fault, run_ranks
from tests.unit.checkpoint.saving.test_async_failures import Injected, each_call, first_of_each, small_app

RANKS_STAY = True

RANKS = 2
NEVER = 300.0  # a deadline that no test waits for


def raised(call):
    """The error that a call raises, as its type and text; None where it raises none."""
    try:
        call()
    except ShardoptError as error:
        return type(error).__name__, str(error)
    return None


def all_alike(outcomes):
    assert len({str(outcome) for outcome in outcomes}) == 1, outcomes
    return outcomes[0]


# A save in the background has failed, and not every rank has heard of it.

NEXT_CALLS = {
    "async_save": lambda manager, app, root: manager._steps.background.save(f"{root}/next", app),
    "save": lambda manager, app, root: checkpoint.save(f"{root}/next", app),
    "Manager.save": lambda manager, app, root: manager.save(7, app),
    "Manager.restore": lambda manager, app, root: manager.restore(app),
    "Manager.close": lambda manager, app, root: manager.close(),
}


HEARD = {"on 0 by result": ((0,), "result"), "on 1 by a step": ((1,), "step"), "on both": ((0, 1), "result")}


def hear_of_failures(root):
    """For each way and each next call: what that raises on this rank, and what the save after it does."""
    return {
        (heard, name): hear_of_a_failure(f"{root}/{heard}-{name}", *HEARD[heard], call)
        for heard in HEARD
        for name, call in NEXT_CALLS.items()
    }


def hear_of_a_failure(root, heard_by, how, next_call):
    rank, app = dist.get_rank(), small_app()
    manager = checkpoint.Manager(root, stage="now", options=checkpoint.SaveOptions(deadline_seconds=NEVER))
    manager.save(1, app).result()
    checkpoint.save(manager.path(2), app)
    failed = manager.save(2, app)
    assert failed.done.wait(30)
    dist.barrier()
    if rank in heard_by:
        outcome = raised(failed.result) if how == "result" else raised(app["optimizer"].step)
        assert outcome[0] == "CheckpointExistsError"
    outcome = raised(lambda: next_call(manager, app, root))
    dist.barrier()
    if manager._closed:
        manager = checkpoint.Manager(root, stage="now", options=checkpoint.SaveOptions(deadline_seconds=NEVER))
    after = raised(lambda: manager.save(8, app))
    manager.close()
    return outcome and outcome[0], after, checkpoint.verify(manager.path(8)).ok


def test_a_failure_that_not_all_have_heard_of_is_raised_by_all(tmp_path):
    outcomes = all_alike(run_ranks(RANKS, hear_of_failures, str(tmp_path)))
    for (heard, name), (outcome, after, is_whole) in outcomes.items():
        assert outcome == (None if heard == "on both" else "CheckpointExistsError"), (heard, name)
        assert after is None and is_whole, (heard, name, after)


def leave_alone(root):
    """Rank 1 leaves with an error of its own while a failure is still to be told; nobody is asked."""
    app, begin = small_app(), time.monotonic()
    with (
        pytest.raises(ZeroDivisionError),
        checkpoint.Manager(root, stage="now", options=checkpoint.SaveOptions(deadline_seconds=NEVER)) as manager,
    ):
        checkpoint.save(manager.path(2), app)
        assert manager.save(2, app).done.wait(30)
        if dist.get_rank() == 1:
            raise ZeroDivisionError
        dist.barrier()
        raise ZeroDivisionError
    took = time.monotonic() - begin
    if dist.get_rank() == 1:
        dist.barrier()
    return took


def test_a_rank_that_leaves_with_an_error_of_its_own_asks_nobody(tmp_path):
    assert max(run_ranks(RANKS, leave_alone, str(tmp_path))) < 30


def communicates_in_its_state(root):
    """A failure that one rank has not heard of, at a save of something whose `state_dict` is a collective."""
    app, saver = small_app(), AsyncSaver()
    checkpoint.save(f"{root}/taken", app)
    failed = saver.save(f"{root}/taken", app)
    assert failed.done.wait(30)
    dist.barrier()
    if dist.get_rank() == 0:
        raised(failed.result)
    outcome = raised(lambda: checkpoint.save(f"{root}/next", app | {"sum": Summed()}))
    saver.close()
    return outcome and outcome[0]


class Summed:
    def state_dict(self):
        one = torch.ones(1)
        dist.all_reduce(one)
        return {"ranks": int(one)}

    def load_state_dict(self, state):
        pass


def test_a_failure_is_raised_once_the_state_was_asked_for(tmp_path):
    assert run_ranks(RANKS, communicates_in_its_state, str(tmp_path)) == ["CheckpointExistsError"] * RANKS


# Failures on the way into a save in the background, on one rank of two.


def fail_on_the_way(root, stage, everywhere):
    """At each call of interest rank 1 fails; what the save after it does on this rank, by the number of the call."""
    rank, app, sound = dist.get_rank(), small_app(), AsyncSaver()
    options = SaveTerms(durable=False, deadline_seconds=0.7)
    calls = []

    def note(n, frame):
        calls.append((frame.f_code.co_qualname, frame.f_back.f_code.co_qualname, frame.f_back.f_lineno))

    for number in range(2):
        calls.clear()
        with each_call(note):
            sound.save(f"{root}/sound-{number}", app, options, stage=stage)
        sound.wait()
    numbers = range(1, len(calls) + 1)
    if not everywhere:  # once this rank can tell the others; before that they wait for it, and name it
        first = next(n for n, call in enumerate(calls, 1) if call[0] == "PendingSave.__init__")
        callers = ("AsyncSaver.save", "AsyncSaver._stage", "hold_steps", "copying_until", "Staging.__init__")
        numbers = [n for n in first_of_each(calls) if n > first + 1 and calls[n - 1][1] in callers]
    dist.barrier()
    results, next_ = {}, "ok"
    saver = sound
    for n in numbers:
        if next_ != "ok":
            saver = AsyncSaver()
            saver.save(f"{root}/{n}-before", app, options, stage=stage)

        def visit(count, frame, n=n):
            if count == n and rank == 1:
                raise Injected

        first = next_ = "ok"
        try:
            saver.wait()
            with each_call(visit):
                pending = saver.save(f"{root}/{n}-first", app, options, stage=stage)
            pending.result(30)
        except Injected:
            first = "raised in the call"
        except ShardoptError as error:
            first = type(error).__name__
        dist.barrier()
        try:
            saver.save(f"{root}/{n}-next", app, options, stage=stage).result(30)
        except ShardoptError as error:
            next_ = type(error).__name__
            saver.close(alone=True)
        results[n] = (*calls[n - 1][:2], first, next_)
    return results


def check_ways(outcomes):
    """Both ranks are told alike of the failure, and alike of the next save; how many of these were made."""
    alive = 0
    for n, (name, caller, first, next_) in outcomes[0].items():
        of_rank_1 = outcomes[1][n][2:]
        assert next_ == of_rank_1[1], (name, caller, first, next_, of_rank_1)
        # An interrupt that comes once all is handed over leaves the save to continue.
        assert first == "ok" or of_rank_1[0] != "ok", (name, caller, first, of_rank_1)
        alive += next_ == "ok"
    print(f"{alive} of {len(outcomes[0])} next saves were made")
    return alive


def test_after_a_failure_on_the_way_in_the_next_save_is_made(tmp_path):
    outcomes = run_ranks(RANKS, fail_on_the_way, str(tmp_path), "lazy", False)
    assert check_ways(outcomes) == len(outcomes[0]) >= 10, outcomes


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stage", ["now", "lazy"])
def test_a_failure_at_any_call_on_the_way_in_leaves_nobody_waiting(tmp_path, stage):
    check_ways(run_ranks(RANKS, fail_on_the_way, str(tmp_path), stage, True, deadline_seconds=1500))


# Ranks that have made different numbers of objects, and ranks that are new.


def with_other_objects(root):
    """Rank 0 has looked at an old run before, and has saved by a saver that others have not."""
    app = {"x": torch.arange(8.0), "step": 1}
    if dist.get_rank() == 0:
        kept = [
            checkpoint.Manager(f"{root}/old", destinations=[checkpoint.Mirror(f"{root}/old-copies")]) for _ in range(2)
        ]
        assert kept[0].steps() == []
        kept += [AsyncSaver(), AsyncSaver()]
    with checkpoint.Manager(
        f"{root}/run",
        destinations=[checkpoint.Mirror(f"{root}/copies")],
        stage="now",
        options=checkpoint.SaveOptions(deadline_seconds=10),
    ) as manager:
        manager.save(1, app)
    with MirrorCopier(f"{root}/run", f"{root}/more", deadline_seconds=10) as mirror:
        mirror.upload("step-00000001")
    return [checkpoint.Manager(f"{root}/{name}").steps() for name in ("run", "copies", "more")]


def test_nothing_depends_on_how_many_objects_a_process_has_made(tmp_path):
    assert run_ranks(RANKS, with_other_objects, str(tmp_path)) == [[[1]] * 3] * RANKS


def continue_with_a_new_process(root):
    """Three processes; the first two are a job, then the first and the third."""
    number = int(os.environ["RANK"])

    def begin(rank, job):
        dist.init_process_group("gloo", init_method=f"file://{root}/{job}", rank=rank, world_size=2)

    def end():
        dist.barrier()
        dist.destroy_process_group()

    app, failed = small_app(), False
    if number < 2:
        begin(number, "first")
        checkpoint.save(f"{root}/taken", app)
        checkpoint.async_save(f"{root}/1", app).result(30)
        failed = checkpoint.async_save(f"{root}/taken", app, deadline_seconds=10).done.wait(30)
        end()
    open(f"{root}/done-{number}", "w").close()
    while not all(os.path.exists(f"{root}/done-{each}") for each in range(3)):
        time.sleep(0.01)
    if number == 1:
        with pytest.raises(CheckpointExistsError):  # nobody else is asked: this process is alone
            importlib.import_module("shardopt.checkpoint.saving.async_save")._default.wait()
        return True
    begin(0 if number == 0 else 1, "second")
    pending = checkpoint.async_save(f"{root}/2", app, deadline_seconds=10)
    pending.result(30)
    end()
    return failed == (number < 2)


def test_a_job_continues_in_its_processes_with_a_new_one_among_them(tmp_path):
    assert run_ranks(3, continue_with_a_new_process, str(tmp_path), backend=None) == [True] * 3
    assert checkpoint.verify(tmp_path / "2").ok


# Ranks in different calls, and those that pass different things.


def in_different_calls(root):
    """The errors that all raise where rank 1 makes another call, by that call; and that they are in step afterwards."""
    app, rank = small_app(), dist.get_rank()
    checkpoint.save(f"{root}/there", app)
    saver, options = AsyncSaver(), SaveTerms(deadline_seconds=NEVER)
    saver.save(f"{root}/beside", app, options).result()
    manager = checkpoint.Manager(root, options=checkpoint.SaveOptions(deadline_seconds=NEVER))
    run = Run(Root(storage_of(root)), SharedGroup(None, NEVER))
    pairs = {
        "load": (lambda: checkpoint.save(f"{root}/1", app), lambda: checkpoint.load(f"{root}/there", app)),
        "step": (lambda: manager.save(10, app), lambda: manager.save(11, app)),
        "restore": (lambda: checkpoint.load(f"{root}/there", app), lambda: manager.restore(app)),
        "another round": (lambda: run.agree_on_branches(needs_copies=True), lambda: run.candidates(0)),
        "init_state": (
            lambda: checkpoint.load(f"{root}/there", app),
            lambda: checkpoint.load(f"{root}/there", app, init_state=True),
        ),
        "check": (lambda: checkpoint.save(f"{root}/1", app), app["optimizer"].check_agreement),
        "verify": (
            lambda: checkpoint.load(f"{root}/there", app),
            lambda: checkpoint.load(f"{root}/there", app, transactional=True),
        ),
        "background": (
            lambda: saver.save(f"{root}/a-1", app, options).result(),
            lambda: saver.save(f"{root}/a-2", app, options).result(),
        ),
    }
    errors, begin = {}, time.monotonic()
    for name, calls in pairs.items():
        errors[name] = raised(calls[rank])
        if name == "verify":  # the load was under way
            checkpoint.load(f"{root}/there", app)
    for step in (20, 21):
        manager.save(step, app)
    failed = saver.save(f"{root}/there", app, options)
    assert failed.done.wait(30)
    errors["close"] = raised((lambda: saver.save(f"{root}/next", app, options), saver.close)[rank])
    return errors, manager.steps(), time.monotonic() - begin < 60


def test_ranks_in_different_calls_are_told_at_once(tmp_path):
    outcomes = run_ranks(RANKS, in_different_calls, str(tmp_path))
    errors, steps, at_once = all_alike(outcomes)
    assert steps == [20, 21] and at_once
    expected = {
        "load": "saving 1 on rank 0; loading on rank 1",
        "step": "saving step-00000010 on rank 0; saving step-00000011 on rank 1",
        "restore": "loading on rank 0; restoring on rank 1",
        "another round": "restoring on rank 0; restoring the newest on rank 1",
        "init_state": "loading on rank 0; loading with init_state on rank 1",
        "check": "saving 1 on rank 0; comparing optimizers between ranks on rank 1",
        "verify": "loading on rank 0; loading (transactional) on rank 1",
        "background": "saving a-1 on rank 0; saving a-2 on rank 1",
        "close": "saving next, after a save that failed on rank 0; "
        "closing what saves in the background, after a save that failed on rank 1",
    }
    for name, (kind, text) in errors.items():
        assert kind == "RankError" and f"ranks are in different calls: {expected[name]}; " in text, (name, text)


def save_metrics(root, stage):
    rank, app = dist.get_rank(), {"x": torch.ones(2)}
    manager = checkpoint.Manager(f"{root}/{stage}", stage=stage, options=checkpoint.SaveOptions(deadline_seconds=NEVER))

    def save(step, metrics):
        saved = manager.save(step, app, metrics=metrics)
        return saved if stage is None else saved.result()

    outcome = raised(lambda: save(1, {"loss": "n/a" if rank == 0 else 0.5}))
    save(2, {"loss": 0.25})
    manager.close()
    return outcome, manager.steps(), manager.metrics(2)


def save_metrics_in_both_ways(root):
    return [save_metrics(root, stage) for stage in (None, "now")]


def test_metrics_that_are_no_numbers_on_one_rank_fail_the_save_on_all(tmp_path):
    for (kind, text), steps, kept in all_alike(run_ranks(RANKS, save_metrics_in_both_ways, str(tmp_path))):
        assert kind == "StateError" and "on rank 0" in text and "metrics.loss: found 'n/a'" in text
        assert (steps, kept) == ([2], {"loss": 0.25})


# Processes and disks that are not what they look like.


def save_alone(root):
    url = f"{root}/{os.environ['RANK']}"
    calls = [lambda app: checkpoint.save(url, app), lambda app: checkpoint.async_save(url, app)]
    return [raised(lambda call=call: call({"x": 1})) for call in [*calls, checkpoint.Manager(url).restore]]


def test_processes_of_a_launcher_without_a_process_group_do_not_save_or_restore_each_for_itself(tmp_path):
    for errors in run_ranks(RANKS, save_alone, str(tmp_path), backend=None):
        for kind, text in errors:
            assert kind == "RankError" and "WORLD_SIZE: found 2, and no process group" in text
            assert "init_process_group" in text
    assert not list(tmp_path.iterdir())


def save_in_a_child(root):
    checkpoint.save(f"{root}/before", {"x": 1})
    said = None
    if dist.get_rank() == 0:
        receiver, sender = os.pipe()
        if os.fork() == 0:
            errors = [raised(lambda: checkpoint.save(f"{root}/child", {"x": 1}))]
            errors.append(raised(lambda: checkpoint.load(f"{root}/before", {"x": 0})))
            os.write(sender, json.dumps(errors).encode())
            os._exit(0)
        said = json.loads(os.read(receiver, 1 << 16))
        os.wait()
    checkpoint.save(f"{root}/after", {"x": 1})
    return said


def test_a_forked_child_is_refused_at_once_and_its_parent_goes_on(tmp_path):
    said, _ = run_ranks(RANKS, save_in_a_child, str(tmp_path))
    for kind, text in said:
        assert kind == "RankError" and "the other ranks do not know this process [process-group]" in text
        assert "found a child that rank 0 has forked" in text
    assert sorted(os.listdir(tmp_path)) == ["after", "before"]


def save_to_own_disks(root):
    """Where the directories are there, and where they are not; and then to one that is shared."""
    errors = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(marker, "_LOOK_SECONDS", 0.3)
        for name in ("there", "new"):
            url = f"{root}/disk-{dist.get_rank()}/{name}"
            if name == "there":
                os.makedirs(url)
            errors.append(raised(lambda url=url: checkpoint.save(url, {"x": torch.ones(3)})))
        checkpoint.save(f"{root}/shared", {"x": torch.ones(3)})
    return errors


def test_disks_that_ranks_do_not_share_are_named_before_anything_is_written(tmp_path):
    there, new = all_alike(run_ranks(RANKS, save_to_own_disks, str(tmp_path)))
    for name, (kind, text) in (("there", there), ("new", new)):
        assert kind == "CheckpointError" and "failed on rank 1: ranks do not share the storage" in text
        assert f"{tmp_path}/disk-1/{name}: found not what rank 0 has made there" in text
    assert [path for path in tmp_path.glob("disk-*/*/*")] == []
    assert sorted(path.suffix for path in (tmp_path / "shared").iterdir()) == [".json", ".safetensors"]  # and no mark


def save_where_names_come_late(root):
    """A client of NFS sees a little later what another has made."""
    checkpoint.save(f"{root}/run", {"x": torch.ones(3)})


def test_what_rank_0_has_made_may_be_seen_a_little_later(tmp_path):
    late = Fault(1, "shardopt.checkpoint.storage.local:LocalStorage.size", action="ENOENT", times=3)
    run_ranks(RANKS, save_where_names_come_late, str(tmp_path), faults=[late])
    assert checkpoint.verify(tmp_path / "run").ok


# Life between rounds.

PLANNING = "shardopt.checkpoint.saving.agree_plan:SavePlan"
DEADLINE = 0.6


def save_and_load(root, how):
    app = small_app()
    saver = AsyncSaver()
    if how == "save":
        checkpoint.save(f"{root}/run", app, deadline_seconds=DEADLINE)
        checkpoint.load(f"{root}/run", app, deadline_seconds=DEADLINE)
    elif how == "async_save":
        saver.save(f"{root}/run", app, SaveTerms(deadline_seconds=DEADLINE)).result(30)
    else:
        manager = checkpoint.Manager(root, options=checkpoint.SaveOptions(deadline_seconds=DEADLINE))
        manager.save(1, app)
        manager.restore(app)


BETWEEN_ROUNDS = [
    ("save", PLANNING),
    ("async_save", "shardopt.checkpoint.saving.async_save:Staging"),
    pytest.param("save", "shardopt.checkpoint.loading.load:fill", marks=pytest.mark.exhaustive),
    pytest.param("async_save", PLANNING, marks=pytest.mark.exhaustive),
    pytest.param("Manager", "shardopt.checkpoint.run.context:Run.candidates", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("how", "operation"), BETWEEN_ROUNDS, ids=lambda each: each.rpartition(":")[2])
def test_a_rank_that_is_busy_between_rounds_is_not_called_dead(tmp_path, how, operation):
    busy = Fault(1, operation, action="delay", seconds=3 * DEADLINE)
    run_ranks(RANKS, save_and_load, str(tmp_path), how, faults=[busy])


def fail_in_planning(root):
    outcome = raised(lambda: checkpoint.save(f"{root}/run", small_app(), deadline_seconds=NEVER))
    checkpoint.save(f"{root}/next", small_app(), deadline_seconds=NEVER)
    return outcome


def test_a_failure_of_one_rank_between_rounds_is_everybodys(tmp_path):
    fault = Fault(1, PLANNING, action=MemoryError("no more"))
    kind, text = all_alike(run_ranks(RANKS, fail_in_planning, str(tmp_path), faults=[fault]))
    assert kind == "RankError" and "failed on rank 1: MemoryError: no more" in text
    assert not (tmp_path / "run").exists()
