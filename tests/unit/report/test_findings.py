"""What a report has at its top: slow saves, layers that exploded, tensors that are not finite."""

import pytest

from shardopt.report.findings import findings_of


def step(number, **others):
    known = {"branch": 0, "seconds": 1.0, "stall_seconds": None, "complete": True, "in_run": True, "left": None}
    return {"step": number, "places": [], **known, **others}


def document(steps=(), tensors=(), changes=None):
    run = {"places": [{"kind": "root", "url": "r"}], "steps": [*steps]}
    return {"runs": [run], "checkpoint": {"tensors": [*tensors]}, "against": changes}


def tensor(key, rms, nan=0):
    return {"key": key, "elements": 4, "statistics": {"rms": rms, "nan": nan}}


def test_a_save_of_three_times_the_median_is_slow():
    found = findings_of(document([*(step(i) for i in range(9)), step(9, seconds=3.5), step(10, seconds=2.9)]))
    assert [(each["kind"], each["step"], each["text"]) for each in found] == [
        ("slow save", 9, "step 9 took 3.5 s; the median is 1 s")
    ]


def test_short_saves_are_not_slow():
    assert not findings_of(document([*(step(i, seconds=0.001) for i in range(9)), step(9, seconds=0.05)]))


def test_a_layer_that_exploded_is_compared_with_the_same_tensor_of_other_layers():
    tensors = [tensor(f"layers.{i}.{name}", size) for i in range(4) for name, size in (("w", 1.0), ("norm", 50.0))]
    tensors[4] = tensor("layers.2.w", 11.0)
    (found,) = findings_of(document(tensors=tensors))
    assert (found["kind"], found["tensor"]) == ("large values", "layers.2.w")


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
