"""A Trainer that has ended, and goes on for longer, ends as one that was longer from the beginning."""

import pytest

from tests.harness import RanksFailed, run_ranks
from tests.integrations import jobs, trainer_job

DEADLINE_SECONDS = 140.0
pytestmark = pytest.mark.skipif(not jobs.is_installed("transformers"), reason="transformers is not installed")


def test_a_run_that_has_ended_goes_on_from_its_last_step(tmp_path):
    evaluates = {"eval_strategy": "steps", "eval_steps": 1}
    best = {**evaluates, "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True}
    runs = [
        *(("whole", {"max_steps": 10}), ("evaluated", {"max_steps": 10, **evaluates})),
        *(("ended with an epoch", {"max_steps": steps}) for steps in (8, 10)),
        *(
            ("ended with the best step", {"max_steps": 6, **best}),
            ("ended with the best step", {"max_steps": 10, **evaluates}),
        ),
    ]
    whole, evaluated, ended, longer, best, longer_than_best = run_ranks(
        1, trainer_job.run_each, str(tmp_path), runs, deadline_seconds=DEADLINE_SECONDS
    )[0]
    assert ended[0] != whole[0] and longer == whole
    assert best[1] == [6, 600] and longer_than_best == evaluated
    assert whole[1] == [10, 1000]  # of two callbacks of one class


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size: found True; .*per_device_train_batch_size that fits"),
        (
            {"resume": True},
            "resume_from_checkpoint: found step 2 of a checkpoint .*leave that option",
        ),
        ({"resume": True, "save_only_model": True}, "resume_from_checkpoint: found step 2 "),
    ],
)
def test_options_by_which_a_resume_would_be_another_run_are_refused(tmp_path, options, message):
    saves = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    first = {name: value for name, value in options.items() if name == "save_only_model"}
    runs = [("run", {**saves, **first})] if "resume" in options else []
    with pytest.raises(RanksFailed, match=message):
        run_ranks(
            1,
            trainer_job.run_each,
            str(tmp_path),
            [*runs, ("run", {**saves, **options, "max_steps": 4})],
            deadline_seconds=DEADLINE_SECONDS,
        )


def run_longer(out, *ends_with_options):
    """Returns, for each number of steps and options, how a run of 9 ends, and one that ended before and goes on."""
    runs = [
        (f"{number}{name}", {"max_steps": steps, **options})
        for number, (ends, options) in enumerate(ends_with_options)
        for name, steps in (("whole", 9), ("", ends), ("", 9))
    ]
    found = run_ranks(1, trainer_job.run_each, str(out), runs, deadline_seconds=DEADLINE_SECONDS)[0]
    return found[::3], found[2::3]


def test_an_evaluation_that_only_the_end_of_a_run_has_leaves_dropout_as_it_is_without(tmp_path):
    by_epoch = {"eval_strategy": "epoch"}  # of 4 steps
    by_steps = {"eval_strategy": "steps", "eval_steps": 5}
    whole, longer = run_longer(tmp_path, (6, by_epoch), (6, by_steps), (8, by_steps))
    assert longer == whole


@pytest.mark.exhaustive
def test_workers_that_stay_have_one_seed_from_the_first_epoch_on(tmp_path):
    whole, longer = run_longer(tmp_path, (8, {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}))
    assert longer == whole


def test_of_callbacks_of_one_class_the_last_has_the_state_that_earlier_versions_saved(tmp_path):
    found = run_ranks(1, trainer_job.run_as_saved_earlier, str(tmp_path), 1, 2, deadline_seconds=DEADLINE_SECONDS)
    assert found[0][1] == [1, 200]
