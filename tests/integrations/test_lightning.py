"""Lightning with accumulation, validation within epochs, and loaders that have a state."""

import copy
import logging
import pickle
import shutil
import signal

import pytest
import torch

from tests.harness import RanksFailed, run_ranks, run_ranks_outcomes
from tests.integrations import jobs, lightning_job

pytestmark = pytest.mark.skipif(not jobs.is_installed("lightning"), reason="lightning is not installed")
DEADLINE = 300
NEEDS_TORCHDATA = pytest.mark.skipif(not jobs.is_installed("torchdata"), reason="torchdata is not installed")


def run(tmp_path, kind, dies_at):
    """Runs without a fault, and with one; returns the first's losses."""
    whole = run_ranks(2, lightning_job.train, str(tmp_path / "whole"), kind, deadline_seconds=DEADLINE)[0]
    assert len(whole[0]) == 15 and [*whole[1]] == [1, 2, 4, 5, 7, 8]
    killed = run_ranks_outcomes(
        2, lightning_job.train, str(tmp_path / "killed"), kind, dies_at, deadline_seconds=DEADLINE
    )
    assert killed[1].signal == signal.SIGKILL and not killed[0].ok
    return whole


@pytest.mark.parametrize("dies_at", [(1, 3), (2, 0)], ids=["in accumulation", "at an epoch's begin"])
@pytest.mark.parametrize("kind", ["ResumableLoader", pytest.param("ResumableStatefulLoader", marks=NEEDS_TORCHDATA)])
def test_accumulation_and_validation_within_epochs_resume(tmp_path, kind, dies_at):
    losses, validated = run(tmp_path, kind, dies_at)
    begin = (1, 2) if dies_at == (1, 3) else (2, 0)  # behind the last step: a batch before it is not resumed
    left = {at: loss for at, loss in losses.items() if at >= begin}
    # A step is saved after its validation: none is lost, and none is done twice.
    later = {step: loss for step, loss in validated.items() if step >= (5 if dies_at == (1, 3) else 7)}
    for ranks in (2, 1, 3):
        resumed = tmp_path / f"on {ranks}"
        shutil.copytree(tmp_path / "killed", resumed)
        found = run_ranks(ranks, lightning_job.train, str(resumed), kind, deadline_seconds=DEADLINE)[0]
        if ranks == 2:
            assert found == (left, later)
        else:
            assert found[0] == pytest.approx(left, rel=1e-5) and found[1] == pytest.approx(later, rel=1e-5), ranks


@NEEDS_TORCHDATA
def test_a_stateful_loader_resumes_on_as_many_ranks_and_is_refused_on_others(tmp_path):
    losses, validated = run(tmp_path, "StatefulDataLoader", (1, 3))
    for ranks in (1, 2):
        shutil.copytree(tmp_path / "killed", tmp_path / f"on {ranks}")
    found = run_ranks(2, lightning_job.train, str(tmp_path / "on 2"), "StatefulDataLoader", deadline_seconds=DEADLINE)[
        0
    ]
    assert found[0] == {at: loss for at, loss in losses.items() if at >= (1, 2)}
    assert found[1] == {step: loss for step, loss in validated.items() if step >= 5}
    with pytest.raises(RanksFailed, match="positions of data loaders on another number of ranks"):
        run_ranks(1, lightning_job.train, str(tmp_path / "on 1"), "StatefulDataLoader", deadline_seconds=DEADLINE)


# Options of the Trainer, and the batches in which a fit is interrupted: of epochs with 7, or fewer if they are limited.
SMALL = {
    "validation at an epoch's end": ({"plateau": True}, (7, 8, 9)),
    "validation within epochs": ({"plateau": True, "val_check_interval": 3}, (4, 7, 8)),
    "validation twice an epoch": ({"val_check_interval": 0.5}, (4, 7, 8)),
    "validation every second epoch": ({"check_val_every_n_epoch": 2}, (8, 15)),
    "validation across epochs": ({"check_val_every_n_epoch": None, "val_check_interval": 4}, (5, 8, 9)),
    "no validation": ({"limit_val_batches": 0}, (7, 8)),
    "accumulation": ({"plateau": True, "accumulate_grad_batches": 2, "val_check_interval": 3}, (4, 7, 8)),
    "accumulation that changes": ({"accumulated": {0: 2, 2: 3}}, (4, 6, 8, 9, 20)),
    "steps": ({"plateau": True, "max_steps": 17, "max_epochs": -1}, (7, 8, 15)),
    "short epochs": ({"plateau": True, "limit_train_batches": 5}, (5, 6, 7, 11)),
    "short epochs by a fraction": ({"limit_train_batches": 0.5, "val_check_interval": 2}, (3, 4, 5)),
}


@pytest.mark.parametrize(("options", "dies"), SMALL.values(), ids=SMALL)
def test_a_resume_goes_on_behind_validation_and_epochs_as_if_nothing_had_happened(tmp_path, options, dies):
    (outcome, batches, validated), resumed = run_ranks(
        1, lightning_job.resume_small, str(tmp_path), dies, deadline_seconds=DEADLINE, **options
    )[0]
    length = {5: 5, 0.5: 3}.get(options.get("limit_train_batches"), 7)
    assert [batch for _, batch, _ in batches] == [i % length for i in range(len(batches))]
    if options.get("limit_train_batches") == 0.5:  # two epochs of three batches from one of seven
        assert len({total for *_, total in batches[:6]}) == 6
    for at, (found, seen, again) in resumed.items():
        assert found == outcome, at
        accumulated = options.get("accumulated", {0: options.get("accumulate_grad_batches", 1)})
        assert len(seen) <= len(batches) - at + max(accumulated.values()), at
        assert seen == batches[len(batches) - len(seen) :] and again == validated[len(validated) - len(again) :], at


def test_a_fit_that_max_steps_has_ended_within_an_epoch_goes_on_in_it(tmp_path):
    ((outcome, batches, validated), parts) = run_ranks(
        1, lightning_job.extend_small, str(tmp_path), 3, 9, 17, deadline_seconds=DEADLINE
    )[0]
    assert parts[-1][0] == outcome
    assert [each for _, seen, _ in parts for each in seen] == batches
    assert [each for *_, again in parts for each in again] == validated


def test_metrics_of_schedules_that_differ_between_ranks_are_saved_as_their_means():
    found = run_ranks(2, lightning_job.means_of_metrics, [["bad", "other"], ["bad", "worse"]])
    assert found == [{"bad": 1.5, "worse": 2.0}] * 2


@pytest.mark.parametrize("drops", ["frozen", "bias"])
def test_hooks_see_the_weights_which_are_saved_as_they_are(tmp_path, drops):
    found, lines = run_ranks(1, with_log, lightning_job.fit_with_hooks, str(tmp_path / "run"), drops)[0]
    assert found == ["network.weight", "network.bias"]
    told = [line for line in lines if 'a hook has changed checkpoint["state_dict"], which has no effect' in line]
    assert len(told) == (drops == "bias")  # once, of three saves


@pytest.mark.parametrize("averaging", [("EMAWeightAveraging", {}), ("StochasticWeightAveraging", {"swa_lrs": 0.5})])
def test_callbacks_with_averages_that_are_not_the_modules_are_refused_when_a_fit_begins(tmp_path, averaging):
    with pytest.raises(RanksFailed, match=rf"{averaging[0]}: found a callback .*AveragedModel an attribute"):
        run_ranks(1, lightning_job.fit_with_hooks, str(tmp_path / "run"), "frozen", averaging)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("saved_by", ["strategy", "callback"])
def test_a_checkpoint_is_validated_tested_and_predicted_with(tmp_path, saved_by):
    for found in run_ranks(
        2, lightning_job.fit_and_evaluate, str(tmp_path / "run"), saved_by, deadline_seconds=DEADLINE
    ):
        assert {verb: (len(seen), same) for verb, (seen, same) in found.items()} == dict.fromkeys(
            ("validate", "test", "predict", "test after fit"), (2, True)
        )


@pytest.mark.parametrize("by", ["strategy", "callback"])
def test_ranks_of_tensor_parallelism_get_the_same_samples(tmp_path, by):
    shared = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    job = lightning_job.samples_of_tensor_parallelism
    assert run_ranks(2, job, str(tmp_path / "a"), by, deadline_seconds=DEADLINE) == [shared * 2] * 2
    with pytest.raises(RanksFailed, match="rank: found rank 0 of 2; required rank 0 of 1"):
        run_ranks(2, job, str(tmp_path / "b"), by, ranks=2, deadline_seconds=DEADLINE)


def deal_and_copy():
    from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, SingleDeviceStrategy

    from shardopt.data.sampler import ResumableSampler
    from shardopt.integrations.lightning_state import begin_dealing, deal_as, end_dealing

    class OneNode(DDPStrategy):  # as a strategy of a program's own that leaves this to ParallelStrategy
        distributed_sampler_kwargs = ParallelStrategy.distributed_sampler_kwargs

    strategy = SingleDeviceStrategy("cpu")
    for _ in range(2):  # the first fit failed
        begin_dealing(strategy)
    for copied in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        dealing = copied.process_dataloader
        assert dealing.strategy is copied and dealing.process == type(copied).process_dataloader.__get__(copied)
        assert dealing([1]) == [1]
    end_dealing(strategy)
    assert "process_dataloader" not in vars(strategy)
    strategy.process_dataloader = own = len
    begin_dealing(strategy)
    assert strategy.process_dataloader([1, 2]) == 2
    for _ in range(2):
        end_dealing(strategy)
        assert strategy.process_dataloader is own
    sampler = ResumableSampler(8, batch_size=4)
    deal_as(OneNode(parallel_devices=[torch.device("cpu")] * 2), sampler)
    assert sampler.ranks == 1  # of the job


def test_loaders_are_dealt_by_the_strategy_that_a_copied_or_pickled_one_is_and_once():
    run_ranks(1, deal_and_copy, deadline_seconds=DEADLINE)


def random_numbers_of_fits(folder, at, end):
    """Those of a fit without a break, and of one that was resumed, for a loader of a program's own class."""
    whole = lightning_job.random_numbers_of(f"{folder}/a", end, own_class=True)
    return whole, lightning_job.random_numbers_of(f"{folder}/b", at, end, own_class=True)


@NEEDS_TORCHDATA
def test_a_begun_epoch_goes_on_with_the_random_numbers_of_a_fit_without_a_break(tmp_path):
    whole = run_ranks(1, lightning_job.random_numbers_of, str(tmp_path / "a"), 4, deadline_seconds=DEADLINE)[0]
    resumed = run_ranks(1, lightning_job.random_numbers_of, str(tmp_path / "b"), 2, 4, deadline_seconds=DEADLINE)[0]
    assert len(whole) == 4 and resumed == whole[2:]


@NEEDS_TORCHDATA
def test_a_new_epoch_of_a_loader_derived_from_torchdatas_has_them_too(tmp_path):
    (found,) = run_ranks(1, random_numbers_of_fits, str(tmp_path), 4, 6, deadline_seconds=DEADLINE)
    assert found[1] == found[0][4:]


def test_a_rank_that_alone_removes_a_checkpoint_waits_for_none_and_goes_on_where_it_cannot(tmp_path):
    first, second = run_ranks(2, with_log, lightning_job.remove_on_rank_0, str(tmp_path))
    assert first[0] == second[0] == ["b"]
    lines = [line for line in first[1] + second[1] if "could not be removed" in line]
    assert lines == [
        f"{tmp_path}/b could not be removed, and stays: it is in use; make it writable, or move it away "
        "[storage-failed]"
    ]


def with_log(function, *args):
    """Calls, and returns the result with the log lines of shardopt."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("shardopt").addHandler(handler)
    return function(*args), lines
