"""Islands of ranks that step by themselves and meet: against one process, and killed between two meetings."""

import signal

import pytest

from tests.harness import run_ranks, run_ranks_outcomes
from tests.support.islands import assert_close, simulate, train

WHOLE = {"every": 10}
FRAGMENTS = {"every": 10, "fragments": 2, "delay": 3, "alpha": 0.5}
STEPS = 26


def assert_simulated(outcomes, islands, steps, options):
    models, anchors = simulate(islands, steps, **options)
    for rank, (_, weights, own_anchors) in enumerate(outcomes):
        assert_close(weights, models[rank * islands // len(outcomes)])
        assert_close(own_anchors, anchors)


@pytest.mark.parametrize("options", [WHOLE, FRAGMENTS], ids=["whole", "fragments"])
def test_islands_train_what_one_process_simulates(options):
    assert_simulated(run_ranks(4, train, "rows", 2, STEPS, **options), 2, STEPS, options)


@pytest.mark.parametrize(
    ("options", "save_at", "layout", "ranks"),
    [
        (WHOLE, 14, "tensor parallel", 4),
        (FRAGMENTS, 16, "columns", 4),  # fragment 0 is under way, whose mean was there at 15
    ],
    ids=["whole", "fragments"],
)
def test_killed_between_two_meetings(tmp_path, options, save_at, layout, ranks):
    root = str(tmp_path / "run")
    outcomes = run_ranks_outcomes(4, train, "rows", 2, STEPS, root, (3, save_at), killed=(2, save_at + 1), **options)
    print("\n".join(map(str, outcomes)))
    assert outcomes[2].signal == signal.SIGKILL
    resumed = run_ranks(ranks, train, layout, 2, STEPS, root, **options)
    assert {step for step, *_ in resumed} == {save_at}
    assert_simulated(resumed, 2, STEPS, options)
