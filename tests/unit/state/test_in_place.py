"""Containers of an app, which a program has by other names, too, are the same objects after a load."""

from collections import Counter, OrderedDict, defaultdict

import pytest
import torch

from shardopt import checkpoint

FRESH = [
    ([], [1, 2]),
    ([3, 4, 5], [1, 2]),
    ([3], [{"a": 1}, torch.ones(2)]),
    ({3}, {1, 2}),
    ({}, {"a": 1}),
    ({"a": 0, "gone": 1}, {"a": 1}),
    (defaultdict(list), {"a": [1]}),
    (OrderedDict(b=1), {"a": torch.ones(2)}),
    (Counter(b=2), Counter(a=1)),
]


@pytest.mark.parametrize(("fresh", "stored"), FRESH, ids=repr)
def test_a_container_stays_the_same_object(tmp_path, fresh, stored):
    checkpoint.save(tmp_path / "c", {"records": stored, "within": [stored, 1]})
    kind, app = type(fresh), {"records": fresh, "within": None}
    checkpoint.load(tmp_path / "c", app)
    assert app["records"] is fresh and type(fresh) is kind
    assert str(app["records"]) == str(kind(list, stored) if kind is defaultdict else kind(stored))


def test_so_do_containers_within_containers(tmp_path):
    def app_of(*values):
        train, valid, best, seen = values
        return {"losses": [train, {"valid": valid}], "pair": (best, seen), "table": {"train": train}}

    checkpoint.save(tmp_path / "c", app_of([1.0], [2.0, 3.0], {"step": 5}, {7}))
    parts = [], [], {"step": 0, "of": None}, set()
    app = app_of(*parts)
    checkpoint.load(tmp_path / "c", app)
    assert parts == ([1.0], [2.0, 3.0], {"step": 5}, {7}) and app == app_of(*parts)
    assert app["losses"][0] is app["table"]["train"] is parts[0] and app["losses"][1]["valid"] is parts[1]
    assert app["pair"][0] is parts[2] and app["pair"][1] is parts[3]


def test_one_list_in_two_places_does_not_take_two_values(tmp_path):
    checkpoint.save(tmp_path / "c", {"losses": [[1], [2], [1]], "other": [1]})
    losses = [[]] * 3
    app = {"losses": losses, "other": losses[0]}
    checkpoint.load(tmp_path / "c", app)
    assert app == {"losses": [[1], [2], [1]], "other": [1]}
    assert app["losses"] is losses and losses[0] is losses[2] is app["other"]


@pytest.mark.parametrize(("fresh", "stored"), [([1], {1}), ({}, Counter("a")), (Counter(), {"a": 1}), ([], "ab")])
def test_another_kind_takes_its_place(tmp_path, fresh, stored):
    checkpoint.save(tmp_path / "c", {"value": stored})
    app = {"value": fresh}
    checkpoint.load(tmp_path / "c", app)
    assert app["value"] == stored and type(app["value"]) is type(stored)


class _Bank:
    def __init__(self, *parts):
        self.parts = parts

    def state_dict(self):
        return {"rows": [torch.ones(1), *self.parts], "parts": self.parts}

    def load_state_dict(self, state):
        self.before, self.parts = [str(part) for part in self.parts], state["parts"]


def test_what_an_object_has_changes_only_in_its_load_state_dict(tmp_path):
    checkpoint.save(tmp_path / "c", {"bank": _Bank([1], {2}, {"a": [3]})})
    bank = _Bank([0], {0}, {"a": [0]})
    checkpoint.load(tmp_path / "c", {"bank": bank})
    assert bank.before == ["[0]", "{0}", "{'a': [0]}"] and bank.parts == ([1], {2}, {"a": [3]})
