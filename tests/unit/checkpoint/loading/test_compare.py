"""A load refuses what does not fit, all of it at once and before anything has changed."""

from itertools import pairwise

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import Shard

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint import Strictness
from shardopt.checkpoint.saving.planning.describe import describe
from shardopt.checkpoint.sources.reading.checking import _SIZES
from shardopt.errors import CorruptionError, MismatchError, PartialLoadError, StateError
from shardopt.sharding.layout import Layout
from shardopt.state.flatten import flatten
from tests.support.fake_rank import fake_rank, shard


class Holder:
    def __init__(self, state):
        self.state, self.loaded = state, None

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.loaded = state


def refused(path, app, **options):
    """The problems of a load that is refused, by key; nothing in the app's own tensors and values has changed."""
    tensors = {key: value.clone() for key, value in app.items() if type(value) is torch.Tensor and not value.is_meta}
    plain = {key: value for key, value in app.items() if not isinstance(value, torch.Tensor)}
    with pytest.raises(MismatchError, match="nothing was changed") as caught:
        checkpoint.load(path, app, **options)
    assert all(torch.equal(app[key], value) for key, value in tensors.items())
    assert all(app[key] is value for key, value in plain.items())
    assert len({problem.key for problem in caught.value.problems}) == len(caught.value.problems)
    return {problem.key: problem for problem in caught.value.problems}


def test_every_difference_is_told_at_once(tmp_path):
    stored = {
        "same": torch.ones(2),
        "shape": torch.ones(2, 3),
        "dtype": torch.ones(2),
        "plain now": torch.ones(1),
        "tensor now": 3,
        "object now": [1],
        "per rank now": 3,
        "unexpected": torch.ones(1),
        "unexpected value": 3,
    }
    checkpoint.save(tmp_path / "c", stored)
    app = {
        "same": torch.zeros(2),
        "shape": torch.zeros(3, 2),
        "dtype": torch.zeros(2, dtype=torch.int64),
        "plain now": 0,
        "tensor now": torch.zeros(1),
        "object now": Holder({"n": 1}),
        "per rank now": checkpoint.PerRank(0),
        "missing": torch.zeros(1),
        "missing value": 0,
        "no memory": torch.zeros(1, device="meta"),
    }
    problems = refused(tmp_path / "c", app)
    assert set(problems) == (set(stored) | set(app)) - {"same"}
    assert "[2, 3]" in problems["shape"].found and "[3, 2]" in problems["shape"].required
    assert "float32" in problems["dtype"].found and "int64" in problems["dtype"].required
    assert (
        problems["plain now"].found == "a tensor of float32 [1]"
        and "plain value (int)" in problems["plain now"].required
    )
    assert problems["tensor now"].required == "a tensor of float32 [1]"
    assert problems["object now"].required == "the state of an object"
    assert problems["per rank now"].required == "a value per rank"
    assert problems["unexpected"].required == "nothing under this key"
    assert problems["missing value"].found == "nothing in the checkpoint"
    lenient = refused(tmp_path / "c", app, strict=False)
    assert set(lenient) == {"shape", "dtype", "plain now", "tensor now", "object now", "per rank now"}


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.zeros(4, device="meta"), "the meta device"),
        (torch.zeros(1).expand(4), "elements that share memory"),
        (nn.Parameter(torch.zeros(4, device="meta")), "the meta device"),
    ],
    ids=["meta", "expanded", "parameter"],
)
def test_tensors_without_a_place_for_each_element_are_refused(tmp_path, tensor, said):
    checkpoint.save(tmp_path / "c", {"x": torch.ones(4), "y": torch.ones(1)})
    assert said in refused(tmp_path / "c", {"x": tensor, "y": torch.zeros(1)})["x"].found


def test_a_meta_shard_is_refused_and_an_expanded_dimension_of_one_is_none(tmp_path):
    checkpoint.save(tmp_path / "c", {"x": torch.ones(4, 1)})
    app = {"x": torch.zeros(4).unsqueeze(1).expand(4, 1)}
    checkpoint.load(tmp_path / "c", app)
    assert app["x"].sum() == 4
    with fake_rank(1, 2) as mesh:
        sharded = shard(torch.zeros(4, 1), mesh, Shard(0))
        with pytest.raises(StateError, match="the meta device"):
            describe(flatten({"x": sharded.to("meta")}), "none")


def test_what_cannot_be_saved_is_told_at_once(tmp_path):
    app = {"a": torch.ones(1, device="meta"), "b": object(), "c": torch.eye(2).to_sparse(), "d": lambda: 0, "e": 1}
    with pytest.raises(StateError) as caught:
        checkpoint.save(tmp_path / "c", app)
    assert [problem.key for problem in caught.value.problems] == ["a", "b", "c", "d"]
    assert not list(tmp_path.glob("c/*"))


# Tensors that are one.


def tied(number, rows=3):
    model = nn.Module()
    model.a = nn.Linear(2, rows, bias=False)
    model.b = nn.Linear(2, rows, bias=False)
    model.b.weight = model.a.weight
    nn.init.constant_(model.a.weight, number)
    return model


def test_tied_tensors_are_read_once(tmp_path):
    checkpoint.save(tmp_path / "c", {"m": tied(7.0)})
    model = tied(0.0)
    report = checkpoint.load(tmp_path / "c", {"m": model})
    assert model.b.weight is model.a.weight and (model.a.weight == 7).all()
    assert report.loaded == ("m.a.weight", "m.b.weight")
    assert report.bytes_read == report.bytes_wanted == 24


@pytest.mark.parametrize("rows", [3, 40, _SIZES.batch // 4])
@pytest.mark.parametrize("where", [0, -1])
def test_untied_values_do_not_load_into_tied_tensors(tmp_path, rows, where):
    """Neither of the two may win, and the bytes are not corrupt."""
    stored = torch.ones(rows, 2)
    other = stored.clone()
    other[where, 1] = 2
    checkpoint.save(tmp_path / "c", {"a": stored, "b": other})
    t = torch.zeros(rows, 2)
    problem = refused(tmp_path / "c", {"a": t, "b": t})["b"]
    assert problem.found == "other values than a in the checkpoint"
    checkpoint.load(tmp_path / "c", {"a": t, "b": t[:]}, select="^b$")
    assert torch.equal(t, other)


def test_tied_values_may_be_cut_in_other_places(tmp_path):
    """The ranks that share the writing of a replica cut it where it suits them: here the file of many ranks."""
    value = torch.arange(600_000, dtype=torch.float32).reshape(3000, 200)
    value[5] = float("nan")
    checkpoint.save(tmp_path / "c", {"a": value, "b": value.clone(), "c": value.clone()})

    def other_cuts(key, stored):
        boxes = {"a": (1,), "b": (1000, 2000), "c": (1500,)}[key]
        cuts = [0, *boxes, 3000]
        holders = {checkpoint.Box((i, 0), (j - i, 200)): (0,) for i, j in pairwise(cuts)}
        return Layout.from_holders((3000, 200), holders)

    checkpoint.reshard(tmp_path / "c", tmp_path / "d", layout=other_cuts)
    t = torch.zeros(3000, 200)
    checkpoint.load(tmp_path / "d", {"a": t, "b": t, "c": t})
    assert torch.equal(t.nan_to_num(), value.nan_to_num()) and t[5].isnan().all()


def test_parts_of_one_memory_are_no_twins(tmp_path):
    t, stored = torch.zeros(4, 2), torch.arange(8.0).reshape(4, 2)
    app = {"whole": t, "head": t[:2], "turned": t.T, "empty": t[:0], "also empty": t[:0]}
    checkpoint.save(
        tmp_path / "c", {key: stored[: len(value)] if key != "turned" else stored.T for key, value in app.items()}
    )
    checkpoint.load(tmp_path / "c", app)
    assert torch.equal(t, stored)


# Conversions, values per rank, optimizers.


def test_a_conversion_never_loses_imaginary_parts_or_digits_of_integers(tmp_path):
    stored = {"c": torch.ones(2, dtype=torch.complex64), "f": torch.ones(2), "i": torch.ones(2, dtype=torch.int64)}
    checkpoint.save(tmp_path / "c", stored)
    app = {"c": torch.zeros(2), "f": torch.zeros(2, dtype=torch.int32), "i": torch.zeros(2)}
    assert set(refused(tmp_path / "c", app, strict=Strictness(dtype="cast"))) == {"c", "f", "i"}
    fitting = {
        "c": torch.zeros(2, dtype=torch.complex128),
        "f": torch.zeros(2, dtype=torch.complex64),
        "i": stored["i"],
    }
    report = checkpoint.load(tmp_path / "c", fitting, strict=Strictness(dtype="cast"))
    assert report.cast == ("c", "f") and fitting["f"].tolist() == [1, 1]


def test_a_value_that_this_rank_did_not_save_is_refused_before_anything_changes(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / "c", {"mine": checkpoint.PerRank(3), "x": torch.ones(1)})
    monkeypatch.setattr(checkpoint.CheckpointReader, "per_rank", lambda reader, rank: {})
    problems = refused(tmp_path / "c", {"mine": checkpoint.PerRank(0), "x": torch.zeros(1)})
    assert problems["mine"].found == "no value of rank 0"


def optimizer_of(kind, stepped):
    model = nn.Linear(2, 2)
    optimizer = (
        torch.optim.Adam(model.parameters()) if kind == "torch" else shardopt.keyed("adam", model.named_parameters())
    )
    if stepped:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("kind", ["torch", "keyed"])
@pytest.mark.parametrize("saved", [True, False])
def test_state_on_one_side_only_is_one_problem_that_names_init_state(tmp_path, kind, saved):
    model, optimizer = optimizer_of(kind, saved)
    checkpoint.save(tmp_path / "c", {"o": optimizer, "m": model})
    model, optimizer = optimizer_of(kind, not saved)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(MismatchError) as caught:
        checkpoint.load(tmp_path / "c", {"o": optimizer, "m": model})
    (problem,) = caught.value.problems
    assert problem.key == "o.state" and "init_state()" in problem.remedy
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    optimizer.step()  # it was not torn


def test_a_torn_optimizer_steps_again_after_a_whole_load(tmp_path):
    saved = optimizer_of("keyed", True)
    checkpoint.save(tmp_path / "c", {"m": saved[0], "o": saved[1]})
    (file,) = tmp_path.glob("c/*.safetensors")
    sound = file.read_bytes()
    at = checkpoint.open(tmp_path / "c").source.open_file(0).entries["o.state.weight.exp_avg"].begin
    model, optimizer = optimizer_of("keyed", True)
    other = optimizer_of("torch", True)[1]
    app = {"m": model, "o": optimizer}
    for _ in range(2):
        file.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        for _ in range(2):
            with pytest.raises(CorruptionError, match=r"segment 0 of 'o\.state"):
                checkpoint.load(tmp_path / "c", app)
            with pytest.raises(PartialLoadError, match="did not end well"):
                optimizer.step()
        other.step()
        with pytest.raises(MismatchError):
            checkpoint.load(tmp_path / "c", {**app, "more": 1})
        with pytest.raises(PartialLoadError):  # a load that changed nothing did not mend it
            optimizer.step()
        file.write_bytes(sound)
        checkpoint.load(tmp_path / "c", app)
        optimizer.step()


@pytest.mark.parametrize("kind", ["torch", "keyed"])
def test_a_torn_model_keeps_its_optimizer_from_stepping_though_that_was_not_selected(tmp_path, kind):
    model, optimizer = optimizer_of(kind, True)
    app = {"m": model, "o": optimizer}
    checkpoint.save(tmp_path / "c", app)
    (file,) = tmp_path.glob("c/*.safetensors")
    sound = file.read_bytes()
    at = checkpoint.open(tmp_path / "c").source.open_file(0).entries["m.weight"].begin
    file.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
    for refused_as_well in (optimizer.step, lambda: checkpoint.save(tmp_path / "d", app)):
        with pytest.raises(CorruptionError, match="optimizers in it refuse to step"):
            checkpoint.load(tmp_path / "c", app, select=r"^m\.")
        with pytest.raises(PartialLoadError):
            refused_as_well()
    file.write_bytes(sound)
    checkpoint.load(tmp_path / "c", app, select=r"^m\.")
    optimizer.step()


def renamed_model(name, count=30):
    return torch.nn.ModuleDict({f"{name}{i:02}": torch.nn.Linear(2, 2) for i in range(count)})


def test_a_mismatch_names_rename_first_and_weights_first_in_twenty_lines_and_a_count(tmp_path):
    model = renamed_model("layer")
    optimizer = shardopt.keyed("adamw", model.named_parameters())
    optimizer.init_state()
    # The optimizer comes first in the app, as its problems would.
    checkpoint.save(tmp_path / "c", {"optimizer": optimizer, "model": model})
    model = renamed_model("block")
    optimizer = shardopt.keyed("adamw", model.named_parameters())
    optimizer.init_state()
    with pytest.raises(MismatchError) as caught:
        checkpoint.load(tmp_path / "c", {"optimizer": optimizer, "model": model})
    _, *lines, count = str(caught.value).splitlines()
    assert len(lines) == 20 and all(line.startswith("  - model.block") for line in lines)
    assert all(line.index("rename=") < line.index("Strictness") for line in lines)
    problems = caught.value.problems
    assert count == f"  ... and {len(problems) - 20} more (see .problems)"
    assert len(problems) > 120
    weights = [problem.key.startswith("model.") for problem in problems]
    assert weights == sorted(weights, reverse=True) and sum(weights) == 120
    assert all(
        problem.remedy.find("rename=") < problem.remedy.find("Strictness")
        for problem in problems
        if "rename" in problem.remedy
    )
    rename = {r"layer": "block"}
    checkpoint.load(tmp_path / "c", {"optimizer": optimizer, "model": model}, rename=rename)


@pytest.mark.parametrize(
    ("begun", "saved"), [(float("inf"), torch.tensor(0.5)), (torch.tensor(torch.inf), 0.5)], ids=repr
)
def test_none_takes_what_has_become_of_another_kind(tmp_path, begun, saved):
    checkpoint.save(tmp_path / "c", {"best": saved, "step": 1})
    with pytest.raises(MismatchError, match=r"best: .* or None, which takes any"):
        checkpoint.load(tmp_path / "c", {"best": begun, "step": 0})
    app = {"best": None, "step": 0}
    checkpoint.load(tmp_path / "c", app)
    assert repr(app) == repr({"best": saved, "step": 1})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_int_keys_of_dicts_are_those_of_the_app_where_dcp_made_texts_of_them(tmp_path):
    def app_of(key, fill):
        return {"seen": {key(0): fill, key(1): fill}, "buffers": {key(0): torch.full((2,), fill)}}

    checkpoint.save(tmp_path / "ints", app_of(int, 3.0))
    dcp.save(app_of(int, 3.0), checkpoint_id=tmp_path / "dcp", no_dist=True)
    checkpoint.convert(tmp_path / "dcp", tmp_path / "own")
    checkpoint.reshard(tmp_path / "dcp", tmp_path / "own2", world_size=2)
    for url in ("ints", "dcp", "own", "own2"):
        for key in (int, str):
            app = app_of(key, 0.0)
            checkpoint.load(tmp_path / url, app)
            assert repr(app) == repr(app_of(key, 3.0))
    for url in ("ints", "own"):
        problems = refused(tmp_path / url, app_of(int, 0.0) | {"buffers": [torch.zeros(2)]})
        assert {each.key for each in problems.values()} == {"buffers.0"}
