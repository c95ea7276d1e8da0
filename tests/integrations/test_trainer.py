"""A Trainer that has ended, and goes on for longer, ends as one that was longer from the beginning."""

import pytest

from tests.harness import run_ranks
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
