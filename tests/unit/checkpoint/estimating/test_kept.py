"""What a run keeps: as retention itself keeps it, save by save."""

import itertools

import pytest

from shardopt.checkpoint.estimating.kept import Kept, kept_over_run
from shardopt.checkpoint.run.retention import Retention, reasons_to_keep
from shardopt.errors import OptionError

RULES = [
    Retention(),
    *(Retention(last=last, every=every) for last, every in itertools.product((1, 2, 5), (None, 20, 30))),
    Retention(seconds=25),
    Retention(seconds=25, every=30),
]


@pytest.mark.parametrize("steps", [9, 10, 30, 65, 200])
@pytest.mark.parametrize("rules", RULES, ids=str)
def test_the_total_is_that_of_a_run_save_by_save(rules, steps):
    saved = range(10, steps + 1, 10)

    def run(restored):
        committed, peak = set(), 0
        for step in saved:
            committed.add(step)
            peak = max(peak, len(committed))
            pinned = {restored: "pinned"} if restored in committed else {}
            committed = {*reasons_to_keep(committed, rules, {}, pinned, {each: step - each for each in committed})}
        return len(committed), peak

    peak = max(run(restored)[1] for restored in saved) if saved else 0  # the best place for a restart
    kept, _ = run(None)
    assert kept_over_run(7, rules, steps, 10, 1.0) == Kept(len(saved), kept, 7 * kept, 7 * peak)


def test_the_best_count_as_if_no_other_rule_kept_them():
    rules = Retention(last=2, best=("loss", "min", 3))
    assert kept_over_run(1, rules, 100).checkpoints == 5
    assert kept_over_run(1, rules, 4).checkpoints == 4  # never more than there are


@pytest.mark.parametrize(
    ("arguments", "key"),
    [((0, 1), "steps"), ((5, 0), "every"), ((True, 1), "steps"), ((10**12, 1), "steps")],
)
def test_arguments_out_of_range_are_refused(arguments, key):
    with pytest.raises(OptionError, match=key):
        kept_over_run(1, Retention(), *arguments)


def test_rules_by_age_ask_for_the_length_of_a_step():
    with pytest.raises(OptionError, match="seconds_per_step"):
        kept_over_run(1, Retention(seconds=60), 100)
