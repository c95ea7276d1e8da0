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
