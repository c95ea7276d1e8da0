"""Real frameworks: a rank is killed, or gets a signal, and other ranks resume as if nothing had happened."""

import shutil
import signal

import pytest
import torch
from compare_runs import compare_losses, differing_keys, read_losses

from shardopt import checkpoint
from tests.harness import Fault, RanksFailed, run_ranks, run_ranks_outcomes
from tests.integrations import jobs

RANKS, STEPS, DIES_AT, EVERY = 2, 15, 8, 2
FORWARD = "integrations.task:Network.forward"
PUBLISH = "shardopt.checkpoint.storage.local:LocalStorage.publish_new"
DEADLINE_SECONDS = 140.0
ALL = [
    pytest.param(name, marks=pytest.mark.skipif(not jobs.is_installed(needs), reason=f"{needs} is not installed"))
    for name, needs in jobs.NEEDS.items()
]
NEEDS_ACCELERATE = pytest.mark.skipif(not jobs.is_installed("accelerate"), reason="accelerate is not installed")
STOPPING = [each for each in ALL if each.values[0] != "lightning strategy"]  # which has no Manager


def last(run):
    """The URL of a run's newest checkpoint."""
    newest = jobs.newest(run / "checkpoints")
    if newest is not None:
        return str(newest)
    manager = checkpoint.Manager(run / "checkpoints")
    return manager.path(manager.steps()[-1])


def of_optimizer(url):
    with checkpoint.open(url) as reader:
        return {
            key: reader.read(key) for key in sorted(reader.keys()) if key.startswith(("model", "optimizer", "schedule"))
        }


@pytest.mark.parametrize("framework", ALL)
def test_a_killed_rank_costs_the_steps_since_the_last_save(tmp_path, framework):
    reference = tmp_path / "uninterrupted"
    logged = run_ranks(RANKS, jobs.run, framework, str(reference), deadline_seconds=DEADLINE_SECONDS)[0]
    assert [record.step for record in read_losses(reference)] == [*range(1, STEPS + 1)]

    killed = tmp_path / "killed"
    outcomes = run_ranks_outcomes(
        RANKS,
        jobs.run,
        framework,
        str(killed),
        faults=[Fault(1, FORWARD, DIES_AT)],
        deadline_seconds=DEADLINE_SECONDS,
    )
    assert outcomes[1].signal == signal.SIGKILL and not outcomes[0].ok, outcomes
    assert [record.step for record in read_losses(killed)] == [*range(1, DIES_AT)]
    for ranks in (1, 2, 3):
        resumed = tmp_path / f"on {ranks}"
        shutil.copytree(killed, resumed)
        again = run_ranks(ranks, jobs.run, framework, str(resumed), deadline_seconds=DEADLINE_SECONDS)[0]
        lines = read_losses(resumed)[DIES_AT - 1 :]
        assert lines[0].step in (DIES_AT - 1, DIES_AT) and lines[0].ranks == ranks  # it did not begin anew
        comparison = compare_losses(reference, resumed)
        assert comparison.holds(0.0 if ranks == RANKS else 1e-5), (ranks, comparison)
        here, there = of_optimizer(last(resumed)), of_optimizer(last(reference))
        assert here.keys() == there.keys() and any(".exp_avg_sq" in key for key in here)
        rates = {value["lr"] for key, value in here.items() if ".param_groups." in key}
        assert rates == {*here["schedule"]["_last_lr"]}  # the schedule is this optimizer's
        within = {"rtol": 0, "atol": 0} if ranks == RANKS else {"rtol": 1e-4, "atol": 1e-5}
        for key, value in there.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(here[key], value, **within)
            else:
                assert here[key] == value, key
        if logged is not None:  # the losses that the Trainer itself logs: the first one spans the kill
            assert [step for step, _ in again] == [step for step, _ in logged] == [4, 8, 12]
            assert [loss for _, loss in again] == pytest.approx([loss for _, loss in logged], rel=1e-5)


@pytest.mark.parametrize(("ranks", "others"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("framework", STOPPING)
def test_what_a_run_killed_in_a_save_has_committed_goes_to_other_ranks(tmp_path, framework, ranks, others):
    reference, killed = str(tmp_path / "uninterrupted"), tmp_path / "killed"
    run_ranks(ranks, jobs.run, framework, reference, deadline_seconds=DEADLINE_SECONDS)
    outcomes = run_ranks_outcomes(
        ranks, jobs.run, framework, str(killed), faults=[Fault(0, PUBLISH, 4)], deadline_seconds=DEADLINE_SECONDS
    )
    assert outcomes[0].signal == signal.SIGKILL and not any(each.ok for each in outcomes), outcomes
    steps = checkpoint.Manager(killed / "checkpoints").steps()
    assert steps == [2, 4, 6] and (killed / "checkpoints" / "step-00000008").is_dir()  # torn
    newest, seen = last(killed), str(tmp_path / "seen")
    run_ranks(others, jobs.restore, framework, str(killed), seen, deadline_seconds=DEADLINE_SECONDS)
    there, here = of_optimizer(newest), of_optimizer(seen)
    assert sum(isinstance(value, torch.Tensor) for value in here.values()) == 6 * 4  # a weight, two moments, a count
    for key, value in here.items():
        same = torch.equal if isinstance(value, torch.Tensor) else lambda one, other: one == other
        assert same(value, there[key]), key
    run_ranks(others, jobs.run, framework, str(killed), deadline_seconds=DEADLINE_SECONDS)
    assert compare_losses(tmp_path / "uninterrupted", killed).holds(1e-5)
    assert not [path for path in (killed / "checkpoints").glob("step-*") if not (path / "manifest.json").exists()]


@pytest.mark.parametrize("framework", STOPPING)
def test_one_rank_gets_a_signal_and_all_save_and_exit(tmp_path, framework):
    run = tmp_path / "run"
    outcomes = run_ranks_outcomes(
        RANKS, jobs.run_and_tell, framework, str(run), 1, DIES_AT, deadline_seconds=DEADLINE_SECONDS
    )
    assert [getattr(each.error, "code", None) for each in outcomes] == [128 + signal.SIGTERM] * RANKS, outcomes
    (*due, stopped) = checkpoint.Manager(run / "checkpoints").steps()
    assert due == [*range(EVERY, stopped, EVERY)] and stopped in (DIES_AT - 1, DIES_AT, DIES_AT + 1)
    assert checkpoint.verify(checkpoint.Manager(run / "checkpoints").path(stopped)).ok
    before = len(read_losses(run))
    run_ranks(1, jobs.run, framework, str(run), deadline_seconds=DEADLINE_SECONDS)
    assert [record.step for record in read_losses(run)[before:]] == [*range(stopped + 1, STEPS + 1)]


@pytest.mark.parametrize("framework", ALL)
def test_saved_in_a_framework_and_loaded_in_plain_torch(tmp_path, framework):
    run_ranks(RANKS, jobs.run, framework, str(tmp_path / "run"), deadline_seconds=DEADLINE_SECONDS)
    rates = run_ranks(3, jobs.load_in_plain_torch, last(tmp_path / "run"), deadline_seconds=DEADLINE_SECONDS)
    assert all(rate != 0.5 for rate in rates)  # that of the checkpoint


@pytest.mark.parametrize("framework", STOPPING)
def test_saved_in_plain_torch_and_resumed_in_a_framework(tmp_path, framework):
    url = str(tmp_path / "plain")
    run_ranks(1, jobs.save_in_plain_torch, url, framework == "lightning")
    (tmp_path / "run").mkdir()
    run_ranks(RANKS, jobs.start_from, framework, str(tmp_path / "run"), url, deadline_seconds=DEADLINE_SECONDS)
    seen = str(tmp_path / "run" / "seen")
    differing, compared = differing_keys(url, seen)
    # A group also has what the code here gave, which a checkpoint tells apart from what was in force.
    assert compared > 20 and all(key == "step" or ".param_groups." in key for key in differing), differing
    with checkpoint.open(url) as there, checkpoint.open(seen) as here:
        groups = [key for key in sorted(there.keys()) if ".param_groups." in key]
        for key in groups:
            saved, found = there.read(key), here.read(key)
            assert {name: found[name] for name in ("lr", "betas", "eps", "weight_decay", "initial_lr")} == {
                name: saved[name] for name in ("lr", "betas", "eps", "weight_decay", "initial_lr")
            }
    assert len(groups) == 6 and saved["lr"] == 0.3


@NEEDS_ACCELERATE
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_states_of_accelerate_go_to_other_ranks(tmp_path, sharded):
    folder = str(tmp_path)
    expected, rate = run_ranks(2, jobs.save_states, folder, sharded, 7, deadline_seconds=DEADLINE_SECONDS)[0]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_5", "checkpoint_6"]
    (tmp_path / "checkpoints" / "checkpoint_7").mkdir()  # of a save that died: no checkpoint
    for ranks in (1, 2, 3):
        again = run_ranks(ranks, jobs.save_states, folder, sharded, 0, deadline_seconds=DEADLINE_SECONDS)
        assert all(loss == pytest.approx(expected, rel=1e-5) and lr == rate == 0.005 for loss, lr in again)


@NEEDS_ACCELERATE
def test_a_schedule_that_goes_by_the_ranks_is_refused_on_others(tmp_path):
    folder = str(tmp_path / "state")
    run_ranks(2, jobs.schedule_by_ranks, folder, deadline_seconds=DEADLINE_SECONDS)
    run_ranks(2, jobs.schedule_by_ranks, folder, deadline_seconds=DEADLINE_SECONDS)
    with pytest.raises(RanksFailed, match=r"schedule: found 1 steps of a schedule.*required 2.*split_batches=True"):
        run_ranks(1, jobs.schedule_by_ranks, folder, deadline_seconds=DEADLINE_SECONDS)


@NEEDS_ACCELERATE
@pytest.mark.parametrize("by_steps", [True, False])
def test_a_save_between_the_batches_of_a_step_warns_once(tmp_path, by_steps):
    lines, steps = run_ranks(1, jobs.accumulate, str(tmp_path / "run"), by_steps, deadline_seconds=DEADLINE_SECONDS)[0]
    assert steps == ([2, 5, 8] if by_steps else [*range(9)])
    assert len([line for line in lines if "the gradients accumulated so far are not in it" in line]) == (not by_steps)


@NEEDS_ACCELERATE
@pytest.mark.parametrize("batches", [4, 5])
def test_what_accelerate_does_otherwise_at_the_end_of_an_epoch_and_with_its_folders_is_told(tmp_path, batches):
    (lines,) = run_ranks(1, jobs.tell_of_epochs, str(tmp_path), batches, deadline_seconds=DEADLINE_SECONDS)
    rest = [line for line in lines if "an epoch has 5 batches, and a step accumulates 2" in line]
    assert len(rest) == (batches == 5)
    assert len([line for line in lines if "a state at the last batch of an epoch" in line]) == 1
    (line,) = [line for line in lines if "is a folder of Accelerate's own" in line]
    assert "of which optimizer.bin, random_states_0.pkl, scheduler.bin are not read" in line


@NEEDS_ACCELERATE
def test_states_under_automatic_names_go_on_behind_those_that_are_there(tmp_path):
    found = run_ranks(2, jobs.save_states_after, str(tmp_path), deadline_seconds=DEADLINE_SECONDS)
    names = [f"checkpoint_{number}" for number in range(1, 5)]
    assert found == [(names[:3], names[2:])] * 2


@NEEDS_ACCELERATE
@pytest.mark.skipif(not jobs.is_installed("torchdata"), reason="torchdata is not installed")
def test_loaders_with_a_state_of_accelerates_are_refused_when_they_are_prepared():
    with pytest.raises(RanksFailed, match=r"use_stateful_dataloader: found True; .*skip_first_batches\(loader, "):
        run_ranks(1, jobs.prepare_stateful_loader, deadline_seconds=DEADLINE_SECONDS)


@NEEDS_ACCELERATE
def test_accelerate_refuses_a_loader_that_gives_ranks_of_tensor_parallelism_other_samples():
    shared = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert run_ranks(2, jobs.app_under_tensor_parallelism) == [shared] * 2
