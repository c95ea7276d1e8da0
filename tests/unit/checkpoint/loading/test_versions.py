"""Classes whose `_version` was raised since a save convert the stored values, as in torch.load."""

import json
from collections import OrderedDict

import pytest
import torch
from torch import nn

from shardopt import checkpoint
from shardopt.errors import MismatchError
from tests.harness import run_ranks

SEEN = {}


class Scaled(nn.Module):
    """Of version 1, as all classes are at first."""

    def __init__(self, value=1.0):
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), value))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        SEEN["version"] = local_metadata.get("version")
        if (local_metadata.get("version") or 9) < self._version:
            state_dict[prefix + "scale"] = state_dict[prefix + "scale"] * 10
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Scaled2(Scaled):
    _version = 2


class Scaled3(Scaled):
    _version = 3


class Holder:
    """An object of a program's own, whose state has a module's within."""

    def __init__(self, module):
        self.module = module

    def state_dict(self):
        return {"net": self.module.state_dict(), "n": 1}

    def load_state_dict(self, state):
        self.module.load_state_dict(state["net"])


def model(kind):
    return nn.Sequential(nn.Sequential(kind()), nn.BatchNorm1d(2))


def value(module):
    return module[0][0].scale[0].item()


WAYS = ["save", "manager", "torch", "converted", "renamed", "holder", "compiled", "root"]


@pytest.mark.parametrize(
    ("way", "old", "new"),
    [*((way, Scaled, Scaled2) for way in WAYS), ("save", Scaled2, Scaled3), ("torch", Scaled2, Scaled2)],
)
def test_stored_versions_reach_the_hook(tmp_path, way, old, new):
    before, after, url, rename = model(old), model(new), tmp_path / "c", {}
    app = {"model": after}
    if way == "manager":
        with checkpoint.Manager(tmp_path / "run", every=1) as manager:
            manager.save(1, {"model": before, "step": 1})
        with checkpoint.Manager(tmp_path / "run", every=1) as manager:
            assert manager.restore({**app, "step": 0}) == 1
    else:
        if way in ("torch", "converted"):
            torch.save({"model": before.state_dict()}, tmp_path / "model.pt")
            url = tmp_path / "model.pt"
        elif way == "holder":
            app = {"holder": Holder(after)}
            checkpoint.save(url, {"holder": Holder(before)})
        elif way == "compiled":
            app = {"model": torch.compile(after, backend="eager")}
            checkpoint.save(url, {"model": before})
        elif way == "root":
            checkpoint.save(url, before.state_dict())
            rename = {"^": "model."}
        else:
            checkpoint.save(url, {"old" if way == "renamed" else "model": before})
        if way == "converted":
            checkpoint.convert(url, tmp_path / "c", to="shardopt", rename={"^model": "net"})
            url, app = tmp_path / "c", {"net": after}
        elif way == "renamed":
            rename = {"^old": "model"}
        checkpoint.load(url, app, rename=rename or None)
    assert value(after) == (1.0 if old is new else 10.0)
    assert SEEN["version"] == old._version


def test_what_is_not_loaded_is_not_converted(tmp_path):
    checkpoint.save(tmp_path / "c", {"model": nn.ModuleList([Scaled2(), Scaled2()])})
    app = {"model": nn.ModuleList([Scaled3(2.0), Scaled3(2.0)])}
    checkpoint.load(tmp_path / "c", app, select=r"model\.0\.")
    assert [each.scale[0].item() for each in app["model"]] == [10.0, 2.0]


def test_without_notes_values_are_of_the_version_here(tmp_path):
    checkpoint.save(tmp_path / "c", {"model": dict(model(Scaled2).state_dict()), "other": nn.Linear(1, 1)})
    after = model(Scaled3)
    checkpoint.load(tmp_path / "c", {"model": after, "other": nn.Linear(1, 1)})
    assert value(after) == 1.0 and SEEN["version"] == 3


def test_a_state_of_an_app_itself_gets_the_stored_notes(tmp_path):
    checkpoint.save(tmp_path / "c", {"model": model(Scaled2).state_dict()})
    state = model(Scaled3).state_dict()
    checkpoint.load(tmp_path / "c", {"model": state})
    after = model(Scaled3)
    after.load_state_dict(state)
    assert value(after) == 10.0


def manifest_of(url):
    return json.loads((url / "manifest.json").read_bytes())


def test_manifests_have_what_is_not_the_first_version_alone(tmp_path):
    checkpoint.save(tmp_path / "a", {"step": 1, "x": torch.ones(1)})
    checkpoint.save(tmp_path / "b", {"model": nn.Linear(1, 1)})
    checkpoint.save(tmp_path / "c", {"model": model(Scaled3)})
    noted = [manifest_of(tmp_path / name).get("module_versions") for name in "abc"]
    assert noted == [None, {"model": {}}, {"model": {"0.0": 3, "1": 2}}]


def stages(path):
    rank = torch.distributed.get_rank()
    checkpoint.save(f"{path}/c", {"model": nn.ModuleDict({str(rank): Scaled2()})})
    app = {"model": nn.ModuleDict({str(1 - rank): Scaled3()})}
    checkpoint.load(f"{path}/c", app)
    assert app["model"][str(1 - rank)].scale[0].item() == 10.0


def test_versions_of_all_stages_are_stored(tmp_path):
    run_ranks(2, stages, str(tmp_path))


def test_followers_refuse_values_that_nothing_would_convert(tmp_path):
    with checkpoint.Publisher(tmp_path) as publisher:
        publisher.publish(1, model(Scaled2)).result()
    after = model(Scaled3)
    with pytest.raises(MismatchError, match=r"0\.0: found values by version 2 of its class; required version 3"):
        checkpoint.Follower(tmp_path, after).update()
    assert checkpoint.Follower(tmp_path, model(Scaled2)).update().step == 1


class Renamed(nn.Linear):
    """A class that has raised its version, and loads all values as they are."""

    _version = 4


class Converting(nn.Sequential):
    """Converts in its own `load_state_dict`, which a Follower does not call."""

    def load_state_dict(self, state, *args, **options):
        return super().load_state_dict({name: 2 * each for name, each in state.items()}, *args, **options)


@pytest.mark.parametrize("way", ["class", "hook", "state", "own load"])
def test_followers_take_other_versions_of_what_converts_nothing(tmp_path, way):
    with checkpoint.Publisher(tmp_path) as publisher:
        publisher.publish(1, nn.Sequential(nn.Linear(2, 2))).result()
    app = after = (Converting if way == "own load" else nn.Sequential)(Renamed(2, 2))
    if way == "hook":
        after[0].register_load_state_dict_pre_hook(lambda *args: None)
    elif way == "state":
        app = after.state_dict()
    follower = checkpoint.Follower(tmp_path, app)
    if way == "class":
        assert follower.update().step == 1
        return
    with pytest.raises(MismatchError, match=r"0: found values by version 1 of its class; required version 4"):
        follower.update()


@pytest.mark.parametrize("notes", [7, {"0": 7}, {"0": {"version": "x"}}, {3: {"version": 1}}])
def test_notes_that_are_none_are_left_out(tmp_path, notes):
    state = OrderedDict(weight=torch.ones(1, 1))
    state._metadata = notes
    torch.save({"model": state}, tmp_path / "model.pt")
    checkpoint.load(tmp_path / "model.pt", {"model": nn.Linear(1, 1, bias=False)})


@pytest.mark.parametrize("version", ["0.0.5", True, 1.5])
@pytest.mark.parametrize("by_torch", [False, True])
def test_a_version_that_is_no_number_is_none_and_those_beside_it_count(tmp_path, version, by_torch):
    strange = type("Strange", (Scaled,), {"_version": version})
    before = nn.Sequential(strange(), Scaled2(), Scaled())
    if by_torch:
        torch.save({"model": before.state_dict()}, tmp_path / "c")
    else:
        checkpoint.save(tmp_path / "c", {"model": before})
    after = nn.Sequential(Scaled2(), Scaled3(), Scaled2())
    checkpoint.load(tmp_path / "c", {"model": after})
    assert [each.scale[0].item() for each in after] == [1.0, 10.0, 10.0]


class Joined(nn.Module):
    """Of version 2, with children of version 1."""

    _version = 2

    def __init__(self, **sizes):
        super().__init__()
        for name, size in sizes.items():
            self.add_module(name, nn.Linear(2, size, bias=False))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        SEEN["version"] = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Pair(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block, self.out = block, nn.Linear(2, 2)


def test_a_module_is_not_of_the_first_version_because_its_neighbours_keep_their_names(tmp_path):
    checkpoint.save(tmp_path / "c", {"model": Pair(Joined(q=2, k=2))})
    rule = checkpoint.rearrange.Rule(("{*b}.q.weight", "{*b}.k.weight"), "{*b}.qk.weight", "q i, k i -> q+k i")
    checkpoint.load(tmp_path / "c", {"model": Pair(Joined(qk=4))}, rearrange=[rule])
    assert SEEN["version"] == 2
    checkpoint.save(tmp_path / "named", {"model": nn.Sequential(Scaled2(3.0), nn.Linear(2, 2))})
    checkpoint.convert(tmp_path / "named", tmp_path / "renamed", to="shardopt", rename={r"0\.scale$": "0.factor"})
    again = nn.Sequential(Scaled2(), nn.Linear(2, 2))
    checkpoint.load(tmp_path / "renamed", {"model": again}, rename={r"0\.factor$": "0.scale"})
    assert SEEN["version"] == 2 and again[0].scale[0] == 3


def test_what_the_notes_of_a_state_leave_out_is_as_here(tmp_path):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.critic = nn.BatchNorm1d(2), Scaled2()

    state = nn.ModuleDict({"norm": nn.BatchNorm1d(2)}).state_dict()
    state["critic.scale"] = torch.full((2,), 3.0)
    checkpoint.save(tmp_path / "c", {"model": state})
    both = Both()
    checkpoint.load(tmp_path / "c", {"model": both})
    assert SEEN["version"] == 2 and both.critic.scale[0] == 3
