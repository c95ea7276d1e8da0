"""`shardopt diff`: what differs, across shardings, dtypes and names."""

import json
import math
from argparse import Namespace

import numpy as np
import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.cli import difference, main
from shardopt.sharding.layout import Layout
from shardopt.sharding.mesh import Mesh, Split, mesh_layout


@pytest.fixture
def compared(tmp_path, capsys):
    """Compares two states, or checkpoints that are there; returns the status, the JSON document, and the text."""

    def compare(a, b, *options):
        paths = []
        for side, given in (("a", a), ("b", b)):
            path = given
            if isinstance(given, dict):
                path = tmp_path / f"{side}{len(list(tmp_path.iterdir()))}"
                checkpoint.save(path, given)
            paths.append(str(path))
        capsys.readouterr()
        status = main(["diff", *paths, *options])
        text = capsys.readouterr().out
        assert main(["diff", *paths, *options, "--json"]) == status
        document = json.loads(capsys.readouterr().out)
        assert document["equal"] == (status == 0)
        return status, document, text

    return compare


def resharded(tmp_path, source, name, splits, ranks=(2, 2)):
    mesh = Mesh(ranks, tuple(range(math.prod(ranks))))

    def choose(key, stored):
        if len(stored.shape) < 2:
            return Layout.replicated(stored.shape)
        return mesh_layout(stored.shape, mesh, tuple(Split(*split) for split in splits))

    checkpoint.reshard(source, tmp_path / name, layout=choose)
    return tmp_path / name


def test_equal_checkpoints_by_their_checksums_alone(tmp_path, compared, monkeypatch):
    state = {"w": torch.randn(30, 20), "e": torch.empty(0, 3), "s": torch.tensor(2.0), "n": math.nan, "t": (1, "x")}
    monkeypatch.setattr(difference, "_compare", None)  # which is not to be called
    monkeypatch.setattr(checkpoint.CheckpointReader, "read", _values_only(checkpoint.CheckpointReader.read))
    status, document, text = compared(state, state)
    assert status == 0 and text.splitlines()[-1] == "equal: 3 tensors equal (3 by checksum)"
    assert all(each["by_checksum"] and each["kind"] == "equal" for each in document["tensors"].values())


def _values_only(read):
    def refusing(reader, key, box=None):
        assert key in reader.manifest.values
        return read(reader, key, box)

    return refusing


def test_equal_across_shardings(tmp_path, compared):
    checkpoint.save(tmp_path / "one", {"w": torch.randn(30, 20), "b": torch.randn(7).bfloat16(), "step": 3})
    grid = resharded(tmp_path, tmp_path / "one", "grid", [(0, 0), (1, 1)])
    columns = resharded(tmp_path, tmp_path / "one", "columns", [(0, 1)], (3,))
    for a, b in ((tmp_path / "one", grid), (grid, columns), (columns, tmp_path / "one")):
        status, document, _ = compared(a, b)
        assert status == 0
        assert {key: each["by_checksum"] for key, each in document["tensors"].items()} == {"w": False, "b": True}


def test_one_changed_element_is_found_across_shardings(tmp_path, compared):
    w = torch.randn(30, 20, dtype=torch.float64)
    changed = w.clone()
    changed[29, 19] += 0.25
    changed[3, 4] -= 0.5
    checkpoint.save(tmp_path / "one", {"w": w, "v": w})
    checkpoint.save(tmp_path / "other", {"w": changed, "v": w})
    grid = resharded(tmp_path, tmp_path / "other", "grid", [(0, 0), (1, 1)])
    status, document, text = compared(tmp_path / "one", grid)
    found = document["tensors"]["w"]
    assert status == 1 and document["tensors"]["v"]["kind"] == "equal"
    assert (found["kind"], found["differing"], found["elements"]) == ("values", 2, 600)
    assert found["maximum"] == pytest.approx(0.5) and found["norm"] == pytest.approx(math.hypot(0.25, 0.5))
    assert found["relative"] == pytest.approx(found["norm"] / w.norm().item(), rel=1e-12)
    assert "w  max 0.5, norm 0.559" in text and text.splitlines()[-1].startswith("different: 1 tensor equal")


def test_all_kinds_of_differences(compared):
    a = {"shape": torch.ones(3), "dtype": torch.ones(3), "gone": torch.ones(1), "x": 1, "kind": 1, "v": [1, 2.0]}
    b = {
        "shape": torch.ones(4),
        "dtype": torch.ones(3).bfloat16(),
        "new": 5,
        "x": True,
        "kind": torch.ones(1),
        "v": [1, 2],
    }
    status, document, text = compared(a, b)
    assert status == 1
    assert {key: each["kind"] for key, each in document["tensors"].items()} == {"shape": "shape", "dtype": "dtype"}
    assert document["tensors"]["dtype"]["differing"] == 0
    assert (document["only_in_a"], document["only_in_b"]) == (["gone"], ["new"])
    values = {each["key"]: (each["a"], each["b"]) for each in document["values"]}
    assert values == {"x": (1, True), "kind": ("a value", "a tensor"), "v": ([1, 2.0], [1, 2])}
    assert "float32 [3] → float32 [4]" in text and "float32 [3] → bfloat16 [3], equal values" in text
    assert "only in A: gone" in text and "only in B: new" in text and "x  1 → True" in text


CASES = {
    "NaN is equal to itself": ([math.nan, 1.0], [math.nan, 1.0], ("equal", 0, 0.0)),
    "NaN on one side": ([math.nan, 1.0], [2.0, 1.0], ("values", 1, math.nan)),
    "infinity on both": ([math.inf, 1.0], [math.inf, 3.0], ("values", 1, 2.0)),
    "infinity on one": ([math.inf, 1.0], [1.0, 1.0], ("values", 1, math.inf)),
    "the sign of zero": ([0.0, 1.0], [-0.0, 1.0], ("bits", 0, 0.0)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e5m2, torch.complex64])
def test_numbers_that_are_no_numbers(tmp_path, name, dtype):
    a, b, expected = CASES[name]
    for side, numbers in (("a", a), ("b", b)):
        checkpoint.save(tmp_path / side, {"w": torch.tensor(numbers).to(dtype)})
    with checkpoint.open(tmp_path / "a") as one, checkpoint.open(tmp_path / "b") as other:
        found = difference.difference_of(one, "w", other, "w", lambda nbytes: None)
    assert (found.kind, found.differing, str(found.maximum)) == (*expected[:2], str(expected[2]))


LARGE = 2**63
INTEGERS = {
    "int64": ([-LARGE, LARGE - 1, 5], [LARGE - 1, LARGE - 2, 5], 2.0**64),
    "uint64": ([2**64 - 1, 0, 1], [2**64 - 2, 0, 1], 1.0),
    "int8": ([-128, 0], [127, 0], 255.0),
    "bool": ([True, False], [False, False], 1.0),
}


@pytest.mark.parametrize("differs", [False, True])
def test_other_bits_of_equal_elements_are_counted_and_no_difference(compared, differs):
    w = torch.tensor([0.0, 1.0, math.nan, 2.0, 5.0])
    other = torch.tensor([-0.0, 1.0, math.nan, 2.0, 6.0 if differs else 5.0])
    other.view(torch.int32)[2] = 0x7FC00001
    status, document, text = compared({"w": w}, {"w": other})
    found = document["tensors"]["w"]
    assert (status, found["differing"], found["other_bits"]) == (int(differs), int(differs), 2)
    assert "2 equal elements with other bits" in text
    if not differs:
        assert "equal: 1 tensor equal (0 by checksum)" in text and "in 2 of 5 elements" in text


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_do_not_wrap_around(compared, dtype):
    a, b, maximum = INTEGERS[dtype]
    kind = getattr(torch, dtype)
    status, document, _ = compared({"w": torch.tensor(a, dtype=kind)}, {"w": torch.tensor(b, dtype=kind)})
    found = document["tensors"]["w"]
    differing = sum(x != y for x, y in zip(a, b, strict=True))
    assert (status, found["differing"], found["maximum"]) == (1, differing, maximum)


def test_signed_and_unsigned_integers(compared):
    a, b = [2**53 + 1, 7, -1, -(2**63), 2**63 - 1], [2**53, 7, 2**64 - 1, 2**63, 2**63 - 1]
    a, b = torch.tensor(a), torch.tensor(b, dtype=torch.uint64)
    for one, other in ((a, b), (b, a)):
        found = compared({"w": one}, {"w": other})[1]["tensors"]["w"]
        assert (found["kind"], found["differing"], found["maximum"]) == ("dtype", 3, 2.0**64)
    assert compared({"w": a[:1]}, {"w": b[:1]})[1]["tensors"]["w"]["maximum"] == 1.0


def optimizer_of(names, lr):
    parameters = {name: torch.nn.Parameter(torch.ones(3)) for name in names}
    optimizer = shardopt.keyed("adamw", parameters, lr=lr)
    optimizer.init_state()
    return {"model": {name: each.detach() for name, each in parameters.items()}, "optimizer": optimizer}


def test_options_that_changed_alike_are_one_line(compared):
    names = [f"layers.{i}.w" for i in range(12)]
    status, document, text = compared(optimizer_of(names, 1e-3), optimizer_of(names, 1e-4))
    (line,) = (line for line in text.splitlines() if line.startswith("optimizer"))
    assert status == 1 and "lr 0.001 → 0.0001" in line and line.endswith("of 12 parameters: layers.{0..11}.w")
    assert "betas" not in line and len(document["values"]) == 12


def test_renamed_as_a_load_renames(compared):
    """State, options and parameters; `select` is of names after that."""
    a, b = optimizer_of(["layers.0.w", "head.w"], 1e-3), optimizer_of(["blocks.0.weight", "head.weight"], 1e-3)
    rules = ["--rename", r"layers\.=blocks.", "--rename", r"\.w(?=\.|$)=.weight"]
    status, document, _ = compared(a, b, *rules)
    assert status == 0 and len(document["tensors"]) == 8
    status, document, _ = compared(a, b, *rules[:2], "--select", "blocks")
    assert status == 1 and {*document["only_in_a"], *document["only_in_b"]} and "head" not in str(document)


def test_two_keys_of_one_name_are_refused(tmp_path, capsys):
    checkpoint.save(tmp_path / "c", {"a": 1, "b": 2})
    assert main(["diff", str(tmp_path / "c"), str(tmp_path / "c"), "--rename", "a=b"]) == 1
    assert "one name" in capsys.readouterr().err


def test_a_regex_that_no_key_of_either_has_is_refused(tmp_path, capsys):
    """Nothing compared is not equal; two that are empty are."""
    for name, app in (("a", {"w": torch.ones(2), "n": 1}), ("empty", {"n": {}})):
        checkpoint.save(tmp_path / name, app)
    a, empty = str(tmp_path / "a"), str(tmp_path / "empty")
    for b in (a, empty):
        assert main(["diff", a, b, "--select", "nothing", "--json"]) == 1
        error = json.loads(capsys.readouterr().out)["error"]
        assert error["code"] == "nothing-selected" and "A has w, n" in error["problems"][0]["required"]
    assert main(["diff", empty, empty]) == 0


def test_values_per_rank(tmp_path, compared):
    """Compared rank by rank; of other numbers of ranks they cannot be."""
    same, other = {"seed": checkpoint.PerRank(3)}, {"seed": checkpoint.PerRank(4)}
    assert compared(same, same)[0] == 0
    status, document, text = compared(same, other)
    assert status == 1 and document["values"] == [{"key": "seed", "a": 3, "b": 4, "ranks": [0]}]
    assert "seed of rank 0  3 → 4" in text
    checkpoint.save(tmp_path / "none", {"x": 1})
    status, document, _ = compared(tmp_path / "none", same, "--select", "seed")
    assert (status, document["only_in_b"]) == (1, ["seed"])


def test_many_differences_are_cut_short(compared):
    names = ["".join(chr(ord("a") + int(digit)) for digit in f"{i:03}") for i in range(130)]
    a, b = ({name: torch.full((1,), float(shift)) for name in names} for shift in (0, 1))
    assert len(compared(a, b)[2].splitlines()) == 104
    assert len(compared(a, b, "--all")[2].splitlines()) == 133


def test_damage_is_an_error_and_no_difference(tmp_path, capsys):
    for side in ("a", "b"):
        checkpoint.save(tmp_path / side, {"w": torch.arange(5000.0) + (side == "b")})
    (file,) = (tmp_path / "b").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    output = capsys.readouterr()
    assert "fail their checksum" in output.err and output.out == ""


def test_layers_that_differ_alike_are_one_line(compared):
    """As in `show`; `--all` has a line for each."""
    a = {"layers": {str(i): {"w": torch.zeros(4), "b": torch.zeros(2)} for i in range(12)}}
    b = {"layers": {str(i): {"w": torch.full((4,), i + 1.0), "b": torch.zeros(2)} for i in range(12)}}
    text = compared(a, b)[2]
    (line,) = [line for line in text.splitlines() if line.startswith("layers.")]
    assert line.startswith("layers.{0..11}.w  max 12, norm ") and line.endswith("48 of 48 elements  12 ×")
    assert f"norm {math.sqrt(4 * sum(i * i for i in range(1, 13))):.4g} (up to " in line
    assert sum(line.startswith("layers.") for line in compared(a, b, "--all")[2].splitlines()) == 12


def test_opaque_state_only_differs(compared):
    a = {"raw": b"ab", "long": "a" * 99, "note": "a", "own": checkpoint.PerRank({"n": 1, "numpy": np.arange(4)})}
    b = {"raw": b"cd", "long": "b" * 99, "note": "b", "own": checkpoint.PerRank({"n": 2, "numpy": np.arange(5)})}
    text = compared(a, b)[2]
    assert text.splitlines()[2:-1] == [
        "long  differs",
        "note  'a' → 'b'",
        "own of rank 0  n 1 → 2, numpy differs",
        "raw  differs",
    ]
    assert "a" * 99 in compared(a, b, "--all")[2]


def test_what_cannot_be_read_is_not_equal(tmp_path, compared, capsys):
    """Such keys of torch.save's files may differ; `show` has them too."""
    for side, lr in (("a", 1), ("b", 2)):
        torch.save({"w": torch.ones(2), "args": Namespace(lr=lr)}, tmp_path / f"{side}.pt")
    status, document, text = compared(tmp_path / "a.pt", tmp_path / "b.pt")
    assert (status, document["unread"], document["only_in_a"]) == (1, ["args"], [])
    assert text.splitlines()[2:] == [
        "not compared: args: an object of argparse.Namespace",
        "unknown: 1 tensor equal (0 by checksum), 1 key not compared",
    ]
    assert compared(tmp_path / "a.pt", tmp_path / "b.pt", "--select", "w")[0] == 0
    status, _, text = compared(tmp_path / "a.pt", {"w": torch.zeros(2), "args": 1}, "--rename", "args=other")
    assert status == 1 and "only in B: args" in text and "not compared: other: " in text and "different: " in text
    for arguments in ([], ["args"]):
        assert main(["show", str(tmp_path / "a.pt"), *arguments]) == 0
        assert "not read: args: an object of argparse.Namespace\n" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "a.pt"), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["unread"]) == ["args"]
