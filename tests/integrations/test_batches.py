"""Batches do not divide the epoch: runs that are stopped anywhere, and resumed, see what one run sees."""

import pytest

from tests.harness import RanksFailed, run_ranks
from tests.integrations import batch_jobs, jobs
from tests.integrations.batch_jobs import STEPS

DEADLINE_SECONDS = 140.0
# In the middle of an epoch, before and behind its last batch, behind the first one of the next, and later.
STOPS = [(5,), (10,), (11,), (12,), (3, 10, 14, 21, 22, 30)]
NEEDS_TRANSFORMERS = pytest.mark.skipif(not jobs.is_installed("transformers"), reason="transformers is not installed")


def see(ranks, framework, out, stops, **options):
    stops = [STEPS] if stops is None else stops
    return run_ranks(ranks, batch_jobs.see, framework, str(out), stops, deadline_seconds=DEADLINE_SECONDS, **options)[0]


def see_each(ranks, framework, runs, **options):
    """As `see`, for each folder and its stops: on the same ranks, where no framework leaves anything behind in them."""
    if framework != "loop":
        return [see(ranks, framework, out, stops, **options) for out, stops in runs]
    runs = [(str(out), stops) for out, stops in runs]
    return run_ranks(ranks, batch_jobs.see_each, framework, runs, deadline_seconds=DEADLINE_SECONDS, **options)[0]


def samples(seen):
    """The samples of each step in any order: ranks share a batch in one way or another."""
    return {step: [sorted(numbers) for numbers, _ in batches] for step, batches in seen.items()}


@NEEDS_TRANSFORMERS
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_trainer_sees_what_the_plain_one_sees(tmp_path, ranks):
    plain = see(ranks, "trainer", tmp_path / "plain", None, resumable=False)
    assert [*plain] == [*range(1, STEPS + 1)]
    for stops in STOPS:
        assert see(ranks, "trainer", tmp_path / str(stops), [*stops, STEPS]) == plain, stops


@NEEDS_TRANSFORMERS
def test_a_trainer_that_accumulates_sees_what_the_plain_one_sees(tmp_path):
    options = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 3}  # 21 batches of 6, filled up by one
    plain = see(2, "trainer", tmp_path / "plain", [21], resumable=False, **options)
    assert {len(batches) for batches in plain.values()} == {3}
    assert see(2, "trainer", tmp_path / "parts", [6, 7, 9, 21], **options) == plain


@NEEDS_TRANSFORMERS
def test_a_trainer_on_one_rank_fills_up_the_last_batch_of_a_run_that_several_began(tmp_path):
    plain = see(2, "trainer", tmp_path / "plain", None, resumable=False)
    begun = see(2, "trainer", tmp_path / "run", [5])
    # Of another seed, which would be another order.
    went_on = see(1, "trainer", tmp_path / "run", [16, STEPS], seed=2)
    assert samples(begun | went_on) == samples(plain)
    for step, ((_, loss),) in went_on.items():
        assert loss == pytest.approx(plain[step][0][1], abs=0.01)  # of this rank's half there


@NEEDS_TRANSFORMERS
def test_a_trainer_on_several_ranks_says_that_it_fills_up_batches_that_were_not(tmp_path):
    see(1, "trainer", tmp_path / "run", [5])
    assert (
        "the last batch of each epoch had fewer samples"
        in see(2, "trainer", tmp_path / "run", [STEPS], logged=True)["logged"]
    )


@NEEDS_TRANSFORMERS
def test_the_results_of_a_resumed_trainer_are_of_its_own_steps_and_all_operations(tmp_path):
    options = {"logging_steps": 4, "max_steps": 8}  # 3 and 5 are between two logs
    outcomes = run_ranks(2, batch_jobs.results_of_trainer, str(tmp_path), [3, 5, 8, 8], **options)
    losses = {step: sum(each[step] for _, each in outcomes) / 2 for step in range(1, 9)}
    for results, own in outcomes:
        found, operations = zip(*results, strict=True)
        assert found[0] == pytest.approx(sum(own[step] for step in (1, 2, 3)) / 3)  # not logged: of this rank
        assert found[2] == pytest.approx(sum(losses[step] for step in (6, 7, 8)) / 3)
        assert found[3] == 0.0
        assert operations == (36, 60, 96, 96)


@NEEDS_TRANSFORMERS
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dataset": batch_jobs.Numbers(120)},
            r"train_dataset: found 120 samples; required 125.*ignore_data_skip=True",
        ),
        ({"dataset": batch_jobs.Stream(), "max_steps": 9}, "train_dataset: found data without a sampler"),
        ({"train_sampling_strategy": "group_by_length"}, "found a LengthGroupedSampler, which draws the order"),
        ({"accelerator_config": {"use_seedable_sampler": False}}, "found a RandomSampler, which draws the order"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches: found True; required each rank"),
    ],
)
def test_an_order_that_cannot_be_resumed_is_refused_unless_the_data_begins_anew(tmp_path, options, message):
    see(2, "trainer", tmp_path, [2])
    with pytest.raises(RanksFailed, match=message):
        see(2, "trainer", tmp_path, [3], **options)
    if "accelerator_config" not in options or "dispatch_batches" not in options["accelerator_config"]:
        assert [*see(2, "trainer", tmp_path, [3], ignore_data_skip=True, **options)] == [3]


def check_parts(tmp_path, framework, ranks, steps=STEPS, **options):
    """Runs in one, and in parts, on these ranks; and begun on others."""
    runs = [("whole", [steps]), *((str(stops), sorted({*stops, steps})) for stops in STOPS)]
    whole, *parts = see_each(ranks, framework, [(tmp_path / name, stops) for name, stops in runs], **options)
    assert [*whole] == [*range(1, steps + 1)]
    for stops, seen in zip(STOPS, parts, strict=True):
        assert seen == whole, stops
    begun = see(3 - ranks, framework, tmp_path / "begun", [5, 12], **options)
    assert samples(begun | see(ranks, framework, tmp_path / "begun", [steps], **options)) == samples(whole)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
@pytest.mark.parametrize(
    ("kind", "drop_last"),
    [
        ("ResumableLoader", False),
        ("mixture", True),
        pytest.param("ResumableLoader", True, marks=pytest.mark.exhaustive),
        pytest.param("mixture", False, marks=pytest.mark.exhaustive),
        *(
            pytest.param(
                "ResumableStatefulLoader",
                drop_last,
                marks=pytest.mark.skipif(not jobs.is_installed("torchdata"), reason="torchdata is not installed"),
            )
            for drop_last in (False, True)
        ),
    ],
)
def test_a_loop_over_a_loader_resumes_with_what_one_run_sees(tmp_path, kind, drop_last, ranks):
    check_parts(tmp_path, "loop", ranks, 30 if drop_last else STEPS, kind=kind, drop_last=drop_last)


@pytest.mark.skipif(not jobs.is_installed("accelerate"), reason="accelerate is not installed")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_accelerate_resumes_with_what_one_run_sees(tmp_path, drop_last, ranks):
    check_parts(tmp_path, "accelerate", ranks, 30 if drop_last else STEPS, drop_last=drop_last)


@pytest.mark.skipif(not jobs.is_installed("accelerate"), reason="accelerate is not installed")
@pytest.mark.parametrize("options", [{}, {"sets_epoch": True}, {"dispatch_batches": True, "drop_last": True}])
def test_a_loader_that_accelerate_prepared_resumes_where_batches_are_skipped(tmp_path, options):
    options, steps = {"prepared": True, **options}, 30 if "drop_last" in options else STEPS
    whole = see(2, "accelerate", tmp_path / "whole", [steps], **options)
    at_ends = (10, 11, 22, 30) if "sets_epoch" in options else ()
    for stops in [(5,), (3, 12, 14, 21, *at_ends)]:  # (5,): two more epochs behind the one that is resumed
        assert see(2, "accelerate", tmp_path / str(stops), sorted({*stops, steps}), **options) == whole, stops


@pytest.mark.skipif(not jobs.is_installed("lightning"), reason="lightning is not installed")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_lightning_resumes_with_what_one_run_sees(tmp_path, drop_last, ranks):
    check_parts(tmp_path, "lightning", ranks, 30 if drop_last else STEPS, drop_last=drop_last)
