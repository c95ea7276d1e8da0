"""Descriptions: fingerprints of geometry and values that distinguish states, and the errors where ranks differ."""

import copy
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardopt import checkpoint
from shardopt.checkpoint.saving.planning.describe import describe
from shardopt.checkpoint.saving.planning.merge import merge_geometry, merge_values
from shardopt.errors import MismatchError, StateError
from shardopt.state.flatten import flatten
from shardopt.state.paths import join

TENSOR = torch.ones(2)


def described(app):
    return describe(flatten(app), "none")


class Holder:
    """An object whose state is what it was given."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state_dict):
        self.state = state_dict


# Each group has one key, spelled by other paths.
OF_ONE_KEY = [
    [{"x": [TENSOR]}, {"x": {0: TENSOR}}, {"x": {"0": TENSOR}}, {"x.0": TENSOR}],
    [{"a": {"b.c": TENSOR}}, {"a.b": {"c": TENSOR}}, {"a": {"b": {"c": TENSOR}}}, {"a.b.c": TENSOR}],
    [{"x": [checkpoint.PerRank(1)]}, {"x": {0: checkpoint.PerRank(1)}}, {"x": {"0": checkpoint.PerRank(1)}}],
    [{"x": [TENSOR, 1]}, {"x": {0: TENSOR, 1: 1}}, {"x": {"0": TENSOR, "1": 1}}],
    [{"x": [0, TENSOR]}, {"x": (0, TENSOR)}],
]


@pytest.mark.parametrize("apps", OF_ONE_KEY[:4], ids=["list", "cut elsewhere", "per rank", "plain value"])
def test_every_path_of_a_key_has_a_fingerprint_of_its_own(apps):
    assert len({tuple(sorted(flatten(app).leaves)) for app in apps}) == 1
    prints = [(described(app).geometry_fingerprint(), described(app).values_fingerprint()) for app in apps]
    assert len(set(prints)) == len(apps)


def test_a_tuple_is_a_list():
    first, second = OF_ONE_KEY[4]
    assert described(first).geometry_fingerprint() == described(second).geometry_fingerprint()


def test_tensors_that_a_load_could_not_fill_are_refused_before_anything_is_written(tmp_path):
    """Those whose elements share memory: of the stored ones a load could keep one. Others need not be contiguous."""
    app = {
        "model": torch.nn.Linear(2, 2),
        "shared": {"expanded": torch.zeros(1).expand(3), "overlaps": torch.zeros(4).as_strided((2, 3), (1, 1))},
        "apart": [torch.zeros(1).expand(1, 1), torch.zeros(2, 3).T, torch.zeros(4, 4)[1:3, ::2], torch.ones(0, 2).T],
    }
    app["model"].register_buffer("scale", torch.ones(1, 2).expand(2, 2))
    for save in (checkpoint.save, lambda *args: checkpoint.async_save(*args).result()):
        with pytest.raises(StateError, match="call contiguous") as raised:
            save(tmp_path / "c", app)
        assert {each.key for each in raised.value.problems} == {"model.scale", "shared.expanded", "shared.overlaps"}
    assert not (tmp_path / "c").exists()
    app["model"].scale = app["model"].scale.contiguous()
    app["shared"] = {name: each.contiguous() for name, each in app["shared"].items()}
    checkpoint.save(tmp_path / "c", app)
    checkpoint.load(tmp_path / "c", app)


parts = st.one_of(st.integers(0, 2), st.text(st.sampled_from("a0.\0\1\2"), max_size=3))


@given(st.lists(parts, min_size=1, max_size=4), st.lists(parts, min_size=1, max_size=4))
def test_no_two_paths_share_a_fingerprint(one, other):
    def nested(path):
        state = TENSOR
        for part in reversed(path):
            state = {part: state}
        return state

    assert (described(nested(one)).geometry_fingerprint() == described(nested(other)).geometry_fingerprint()) == (
        [(type(part), part) for part in one] == [(type(part), part) for part in other]
    ), (join(tuple(one)), join(tuple(other)))


def test_a_kept_plan_is_not_used_for_another_nesting(tmp_path):
    apps = [app for group in OF_ONE_KEY[:2] for app in group]
    for number, app in enumerate(apps):
        checkpoint.save(tmp_path / str(number), app)
        with checkpoint.open(tmp_path / str(number)) as reader:
            (tensor,) = reader.manifest.tensors.values()
            (leaf,) = flatten(app).leaves.values()
            assert list(zip(map(type, tensor.path), tensor.path, strict=True)) == list(
                zip(map(type, leaf.path), leaf.path, strict=True)
            )


def wires(apps, kind):
    return [json.loads(json.dumps(getattr(described(app), kind)())) for app in apps]


@pytest.mark.parametrize("number", [0, 2, 3])
def test_ranks_that_nest_otherwise_are_told(number):
    apps = OF_ONE_KEY[number]
    for one, other in [(apps[0], apps[1]), (apps[1], apps[2]), (apps[2], apps[0])]:
        with pytest.raises(StateError, match=r"app\['x'\]\['?[01]'?\] \(.*\) on rank 0, app"):
            geometry = merge_geometry([(0,), (1,)], wires([one, other], "geometry_json")).geometry
            merge_values(dict(enumerate(wires([one, other], "values_json"))), geometry)
    same = merge_geometry([(0, 1)], wires([apps[0]], "geometry_json")).geometry
    merge_values(dict(enumerate(wires([apps[0], apps[0]], "values_json"))), same)


@pytest.mark.parametrize("choice", [{}, {"strict": False}, {"select": "."}, {"rename": {"y": "x"}}], ids=str)
def test_a_load_finds_out_what_was_nested_otherwise(tmp_path, choice):
    for group in OF_ONE_KEY:
        for number, saved in enumerate(group):
            path = tmp_path / f"{OF_ONE_KEY.index(group)}-{number}"
            checkpoint.save(path, saved)
            for other, app in enumerate(copy.deepcopy(group)):
                # Where a key is cut into parts is no matter: a module has one part for what dicts have several for.
                # Nor is whether a dict's key is 0 or "0": DCP knows no ints.
                dicts = all(isinstance(each.get("x"), dict) for each in (saved, app))
                if other == number or dicts or group in (OF_ONE_KEY[1], OF_ONE_KEY[4]) or "x.0" in [*saved, *app]:
                    checkpoint.load(path, app, **choice)
                else:
                    with pytest.raises(MismatchError, match=r"x\.0: found app\['x'\]\['?0'?\] \(.*\); required app"):
                        checkpoint.load(path, app, **choice)
