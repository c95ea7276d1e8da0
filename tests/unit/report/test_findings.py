"""What a report has at its top: steps that are lost, slow saves, jumps, layers that exploded, what is not finite."""

import math
import random

import pytest

from shardopt.report.findings import findings_of


def step(number, **others):
    known = {"branch": 0, "seconds": 1.0, "stall_seconds": None, "complete": True, "in_run": True, "left": None}
    return {"step": number, "places": [], "alone": None, "metrics": None, **known, **others}


def within(place, condition, *problems):
    named = [dict(zip(("key", "found", "required"), each, strict=True)) for each in problems]
    return {"place": place, "condition": condition, "complete": condition == "committed", "problems": named}


def losses(values):
    return document([step(number, metrics={"loss": value}) for number, value in enumerate(values)])


def document(steps=(), tensors=(), changes=None):
    places = [{"kind": kind, "name": kind, "url": f"/{kind}"} for kind in ("root", "mirror")]
    run = {"places": places, "steps": [*steps], "metrics": ["loss"]}
    return {"runs": [run], "checkpoint": {"tensors": [*tensors]}, "against": changes}


def tensor(key, rms, nan=0):
    return {"key": key, "elements": 4, "statistics": {"rms": rms, "nan": nan}}


def test_a_save_of_three_times_the_median_is_slow():
    found = findings_of(document([*(step(i) for i in range(9)), step(9, seconds=3.5), step(10, seconds=2.9)]))
    assert [(each["kind"], each["step"], each["text"]) for each in found] == [
        ("slow save", 9, "step 9 took 3.5 s, 3.5 times the median of 1 s")
    ]


def test_short_saves_are_not_slow():
    assert not findings_of(document([*(step(i, seconds=0.001) for i in range(9)), step(9, seconds=0.05)]))


def test_a_layer_that_exploded_is_compared_with_the_same_tensor_of_other_layers():
    tensors = [tensor(f"layers.{i}.{name}", size) for i in range(4) for name, size in (("w", 1.0), ("norm", 50.0))]
    tensors[4] = tensor("layers.2.w", 11.0)
    (found,) = findings_of(document(tensors=tensors))
    assert (found["kind"], found["tensor"]) == ("large values", "layers.2.w")
    assert found["text"] == "layers.2.w has a root mean square of 11, 11 times the median of w over 4 layers (1)"


def test_layers_may_differ_beyond_the_range_of_numbers():
    tensors = [tensor(f"layers.{i}.w", size) for i, size in enumerate([1e-200, 1e150, 1e150, 1e150])]
    assert not findings_of(document(tensors=tensors))
    tensors = [tensor(f"layers.{i}.w", size) for i, size in enumerate([1e200, 1e-150, 1e-150, 1e-150])]
    (found,) = findings_of(document(tensors=tensors))
    assert found["tensor"] == "layers.0.w"


def test_layers_that_differ_by_nature_did_not_explode():
    assert not findings_of(document(tensors=[tensor(f"layers.{i}.w", 3.0**-i) for i in range(12)]))


def test_state_of_optimizers_follows_gradients_and_did_not_explode():
    tensors = [tensor(f"optimizer.state.layers.{i}.w.exp_avg_sq", 1.0 if i else 50.0) for i in range(12)]
    assert not findings_of(document(tensors=tensors))


def test_tensors_that_are_not_finite_are_named():
    (found,) = findings_of(document(tensors=[tensor("a", 1.0), tensor("b", 1.0, nan=2)]))
    assert found["text"] == "b has 2 NaN among 4 elements"


@pytest.mark.parametrize("why", [{"in_run": False}, {"left": "removed"}])
def test_what_left_the_run_need_not_be_complete(why):
    assert not findings_of(document([step(1, complete=False, **why)]))


def test_many_findings_of_a_kind_are_counted():
    found = findings_of(document([step(i, complete=False) for i in range(20)]))
    assert [each.get("step") for each in found] == [*range(19, 11, -1), None]
    assert found[-1]["text"] == "and 12 more"


def test_a_step_that_no_place_has_gives_the_reason_of_each_place():
    places = [
        within(0, "files missing", ("/root/step-1/a", "no such file", "what was written")),
        within(1, "damaged", ("/mirror/step-1/a", "3 bytes", "4"), ("/mirror/step-1/b", "3 bytes", "4")),
    ]
    (found,) = findings_of(document([step(1, complete=False, places=places)]))
    assert found["text"] == (
        "step 1 cannot be restored from anywhere. root: files missing (step-1/a); "
        "mirror: damaged (step-1/a: found 3 bytes, required 4, and 1 more)"
    )


def test_a_step_that_one_place_only_has_is_named_with_what_the_others_lack():
    lost = within(0, "files missing", ("/root/step-2/a", "no such file", "what was written"))
    steps = [step(1), step(2, alone=1, places=[lost, within(1, "committed")]), step(3)]
    (found,) = findings_of(document(steps))
    assert (found["kind"], found["run"], found["step"]) == ("one place", 0, 2)
    assert found["text"] == "step 2 is complete only in the mirror. root: files missing (step-2/a)"


def test_steps_that_one_place_only_has_for_the_same_reason_are_one_finding():
    steps = [step(i, alone=0, places=[within(0, "committed")]) for i in range(20)]
    (found,) = findings_of(document(steps))
    assert found["text"] == "20 steps from step 0 to step 19 are complete only in the root. mirror: not there"
    assert found["step"] == 19


def test_a_metric_that_goes_to_another_level_and_stays_is_a_jump():
    (found,) = findings_of(losses([0.75, 0.61, 0.54, 0.5, 1.46, 1.44, 1.42]))
    assert (found["kind"], found["step"]) == ("jump", 4)
    assert (
        found["text"] == "loss went from 0.5 to 1.46 between steps 3 and 4, 6.9 times the largest other change near it"
    )


random.seed(1)
QUIET = {
    "noise": [2 + random.gauss(0, 0.3) for _ in range(500)],
    "noise with outliers": [2 + random.gauss(0, 0.3) / abs(random.gauss(0, 1)) for _ in range(500)],
    "a fast fall at first": [11.0, 4.0, 3.5, 3.3, *(3.2 - i / 100 for i in range(50))],
    "a peak": [1 - i / 100 + (i == 20) for i in range(40)],
    "a schedule in steps": [0.1 ** (i // 10) for i in range(40)],
    "the last digits": [1.0, 1.0 + 1e-12, 1.0, 1.0 + 1e-12, 1.001, 1.001, 1.001],
}


@pytest.mark.parametrize("values", QUIET.values(), ids=QUIET.keys())
def test_a_metric_does_not_jump_by(values):
    assert not findings_of(losses(values))


def test_a_metric_that_is_not_finite_is_named_once():
    (found,) = findings_of(losses([1.0, 0.9, math.nan, math.inf, math.nan]))
    assert (found["kind"], found["step"]) == ("not finite", 2)
    assert found["text"] == "loss is not finite in 3 steps from step 2 to step 4"
