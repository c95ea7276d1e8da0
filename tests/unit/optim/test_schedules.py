"""The orders that a test of schedules goes through: each one once, and all there are within the bound."""

import math

import pytest

from tests.harness.schedules import orders

OPERATION = "tests.unit.optim.test_schedules:operation"


def operation(log, name):
    log.append(name)


def tasks(logs, counts):
    """Tasks of so many operations each; what they do is in the last of `logs`."""

    def make():
        log = []
        logs.append(log)

        def task(name, count):
            for i in range(count):
                operation(log, f"{name}{i}")
            return name

        return [lambda name=name, count=count: task(name, count) for name, count in zip("abc", counts, strict=False)]

    return make


@pytest.mark.parametrize("counts", [(1, 1), (3, 2), (2, 2, 1)])
def test_all_orders_are_run_once(counts):
    logs = []
    runs = list(orders(tasks(logs, counts), [OPERATION], preemptions=100))
    steps = [count + 1 for count in counts]  # the first, up to the first operation, is one too
    expected = math.factorial(sum(steps)) // math.prod(map(math.factorial, steps))
    chosen = {tuple(step.chosen for step in run.steps) for run in runs}
    assert len(chosen) == len(runs) == expected
    of_operations = math.factorial(sum(counts)) // math.prod(map(math.factorial, counts))
    assert len(set(map(tuple, logs))) == of_operations
    assert all(sorted(log) == sorted(logs[0]) for log in logs)
    assert [each.result for each in runs[-1].ended] == list("abc")[: len(counts)]


def test_preemptions_are_bounded():
    counts = [len(list(orders(tasks([], (3, 3)), [OPERATION], preemptions=bound))) for bound in range(4)]
    assert counts[0] == 2  # one after the other
    assert counts[1] == 2 + 2 * 3
    assert counts == sorted(set(counts))


def test_what_is_killed_does_nothing_more():
    logs = []
    runs = list(orders(tasks(logs, (2, 1)), [OPERATION], preemptions=0, kills=1))
    # The first is of a run before the orders.
    killed = [(run, log) for run, log in zip(runs, logs[1:], strict=True) if any(each.killed for each in run.ended)]
    assert sorted(log for run, log in killed if run.ended[0].killed and not run.steps[0].chosen.task) == [
        ["a0", "b0"],
        ["b0"],
    ]
    assert all(not each.killed or not each.result for run, _ in killed for each in run.ended)
    assert all(sum(each.killed for each in run.ended) <= 1 for run in runs)


def test_an_error_ends_a_task_and_not_the_others():
    def fail():
        raise ValueError("mine")

    (run, *_) = orders(lambda: [fail, lambda: 3], [OPERATION], preemptions=0)
    assert isinstance(run.ended[0].error, ValueError)
    assert run.ended[1].result == 3
    assert "task 0 ended" in str(run)
