"""Checkpoints of formats 1 and 2 in the form of the present one: options of each parameter under a key of its own."""

import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.format import manifest
from shardopt.checkpoint.format.earlier_versions import with_options_by_member

GROUPS = {
    "a": {"params": ["a", "c.d"], "lr": 0.5, "untouched": ["a"]},
    "b": {"params": ["b"], "lr": 0.25, "given": {}},
}


def entry(*path, value):
    return ".".join(map(str, path)), (path, value)


def options(values):
    return {path: value for path, value in values.values()}


WANTED = {
    ("x", "optimizer", "param_groups", "a"): {"lr": 0.5, "untouched": True},
    ("x", "optimizer", "param_groups", "c.d"): {"lr": 0.5, "untouched": False},
    ("x", "optimizer", "param_groups", "b"): {"lr": 0.25, "given": {}},
    ("x", "step"): 3,
}
STEP = entry("x", "step", value=3)


def test_groups_become_options_by_member():
    whole = dict([entry("x", "optimizer", "param_groups", value=GROUPS), STEP])
    assert options(with_options_by_member(whole, {})[0]) == WANTED
    apart = [
        entry("x", "optimizer", "param_groups", least, name, value=value)
        for least, group in GROUPS.items()
        for name, value in group.items()
    ]
    assert options(with_options_by_member(dict([*apart, STEP]), {})[0]) == WANTED
    one_value = entry("x", "optimizer", value={"state": {"a": {"n": 1}}, "param_groups": GROUPS})
    values, _ = with_options_by_member(dict([one_value, STEP]), {})
    assert options(values) == WANTED | {("x", "optimizer", "state", "a"): {"n": 1}}


@pytest.mark.parametrize(
    "groups",
    [
        [{"params": ["a"]}],
        {"b": {"params": ["a"]}},
        {"a": {"params": [0]}},
        {"a": {}},
        {"a": {"params": []}},
        3,
        {"a": 3},
    ],
)
def test_what_is_no_form_of_groups_stays(groups):
    values = dict([entry("x", "param_groups", value=groups)])
    assert with_options_by_member(values, {}) == (values, {})


def test_state_of_no_parameter_gets_its_name():
    values = dict(
        [
            entry("o", "param_groups", value={"a": {"params": ["a", "global.b"]}, "k.a": {"params": ["k.a"]}}),
            entry("o", "state", "k.global.k.a", "t", value=1),
            entry("o", "state", "k.global.a", "t", value=2),
        ]
    )
    tensors = {
        "o.state.global.a.n": (("o", "state", "global.a", "n"),),
        "o.state.global.b.n": (("o", "state", "global.b", "n"),),
        "m.state.global.a.n": (("m", "state", "global.a", "n"),),
    }
    values, moved = with_options_by_member(values, tensors)
    assert moved == {"o.state.global.a.n": ("o", "state", "__global__", "n")}
    assert values["o.state.k.__global__.t"] == (("o", "state", "k.__global__", "t"), 2)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("algorithm", ["adamw", "lbfgs"])
def test_a_checkpoint_of_an_earlier_version_is_loaded_and_resharded(tmp_path, monkeypatch, algorithm, version):
    def made():
        params = {name: torch.nn.Parameter(torch.ones(3)) for name in ("a", "b")}
        return params, shardopt.keyed(algorithm, params, lr=0.125)

    class Earlier:
        """The state of an optimizer as earlier versions gave it."""

        def __init__(self, optimizer):
            self.saved = optimizer.state_dict()
            state = self.saved["state"]
            if "__global__" in state:
                state["global.a"] = state.pop("__global__")
            self.saved["param_groups"] = {group["params"][0]: group for group in self.saved["param_groups"]}

        def state_dict(self):
            return self.saved

        def load_state_dict(self, state_dict):
            raise AssertionError

    params, trained = made()
    for step in range(3):

        def loss(step=step):
            trained.zero_grad()
            total = sum((parameter * (step + i)).sin().sum() for i, parameter in enumerate(params.values()))
            total.backward()
            return total

        trained.step(loss)
    trained.param_groups[0]["lr"] = 0.0625
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT_VERSION", version)
        checkpoint.save(tmp_path / "old", {"optimizer": Earlier(trained)})
    assert checkpoint.verify(tmp_path / "old").ok
    checkpoint.reshard(tmp_path / "old", tmp_path / "new", world_size=2)
    assert checkpoint.verify(tmp_path / "new").ok
    for path in (tmp_path / "old", tmp_path / "new"):
        _, resumed = made()
        checkpoint.load(path, {"optimizer": resumed}, init_state=True)
        assert repr(resumed.state_dict()) == repr(trained.state_dict())
