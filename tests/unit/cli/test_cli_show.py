"""`shardopt show`: the tree and its sums, keys of any kind, the statistics of one tensor."""

import json
import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardopt
from shardopt import checkpoint
from shardopt.cli import main, output
from shardopt.cli.statistics import statistics_of
from shardopt.cli.tree import Leaf, patterns_of, ranges_text, rows_of, tree_of
from shardopt.sharding.mesh import Mesh, Split, mesh_layout
from shardopt.world import utc_text


def shown(capsys, *arguments, status=0):
    capsys.readouterr()
    assert main(["show", *map(str, arguments)]) == status
    return capsys.readouterr().out


@pytest.fixture
def model(tmp_path):
    """A model of 40 layers with its optimizer, of which two layers are unlike the others."""
    names = {f"layers.{i}.{name}": torch.zeros(8, 8 if i != 7 else 16) for i in range(40) for name in ("wq", "wo")}
    names["embed.weight"] = torch.zeros(100, 8, dtype=torch.bfloat16)
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in names.items()}
    groups = [{"match": "wo", "weight_decay": 0.0}]
    optimizer = shardopt.keyed("adamw", parameters, lr=1e-3, groups=groups)
    optimizer.init_state()
    model = torch.nn.ParameterDict({name.replace(".", "/"): each for name, each in parameters.items()})
    app = {"model": {name: each.detach() for name, each in parameters.items()}, "optimizer": optimizer, "step": 7}
    assert len(model) == 81
    checkpoint.save(tmp_path / "c", app | {"seed": checkpoint.PerRank(3)})
    return tmp_path / "c"


def test_show_is_a_tree_in_which_repeated_layers_are_one(model, capsys):
    lines = shown(capsys, model).splitlines()
    assert lines[0].startswith(f"{model}: saved by 1 rank as ")
    of_model = [
        line.strip().split("  ", 1) for line in lines[lines.index(next(x for x in lines if x[:5] == "model")) :]
    ]
    assert [name for name, _ in of_model[:6]] == ["model", "embed.weight", "layers", "{0..6,8..39}", "wo", "wq"]
    sums = {name: text.split("  ") for name, text in of_model[:4]}
    assert [each.strip() for each in sums["layers"] if each.strip()] == ["float32", "5.25 K", "21 kB", "80 tensors"]
    assert [each.strip() for each in sums["{0..6,8..39}"] if each.strip()][-1] == "39 ×, 78 tensors"
    sets = [i for i, line in enumerate(lines) if line.strip().startswith("set ")]
    assert [lines[i].rstrip().endswith(f"of {n} parameters") for i, n in zip(sets, (41, 40), strict=True)] == [True] * 2
    assert "weight_decay=0.01," in "".join(lines[sets[0] : sets[1]])
    assert "weight_decay=0.0," in "".join(lines[sets[1] : sets[1] + 4])
    assert "      of layers.{0..39}.wo" in lines
    assert any(line.startswith("step") and line.endswith("= 7") for line in lines)
    assert any(line.startswith("seed") and line.endswith("a value of each rank") for line in lines)


def test_show_of_a_choice_of_keys(model, capsys):
    assert "embed" not in shown(capsys, model, "model.layers")
    assert len(shown(capsys, model, "--flat", "--glob", "model.*.wq").splitlines()) == 41
    assert len(shown(capsys, model, "--flat", "--regex", r"^model\.layers\.1\d\.").splitlines()) == 21
    assert [line.split()[0] for line in shown(capsys, model, "--depth", "1").splitlines()[2:]] == [
        *("model", "optimizer", "seed", "step")
    ]
    assert shown(capsys, model, "step") == "7\n" and shown(capsys, model, "seed") == "rank 0: 3\n"
    assert main(["show", str(model), "--glob", "nothing"]) == 1
    assert main(["show", str(model), "model.layer"]) == 1
    assert "model.layer: found nothing" in capsys.readouterr().err


def test_ten_thousand_tensors_stay_readable(tmp_path, capsys):
    unlike = {f"table_{i}x": torch.zeros(i % 97 + 1) for i in range(3000)}
    layers = {f"layers.{i}.{j}.w": torch.zeros(1) for i in range(70) for j in range(100)}
    checkpoint.save(
        tmp_path / "c", {"tables": unlike, "model": layers, **{f"m{i}.x{'yz'[i % 2]}": i for i in range(500)}}
    )
    lines = shown(capsys, tmp_path / "c").splitlines()
    assert len(lines) < 200 and any("{0..69}.{0..99}.w" in line and line.endswith("7,000 ×") for line in lines)
    assert "(--all)" in "\n".join(lines)
    assert len(shown(capsys, tmp_path / "c", "--all").splitlines()) > 10_500
    assert len(json.loads(shown(capsys, tmp_path / "c", "--json"))["tensors"]) == 10_000


HOSTILE = ["[red]x[/red]", "a\x1b[2Jb", "new\nline", "k" * 2000, "ключ.日本", "..", "\u202eabc", "x" * 50 + ".y" * 100]


@pytest.mark.parametrize("columns", ["40", "200"])
@pytest.mark.parametrize("rich", [True, False])
def test_keys_are_text_and_neither_markup_nor_commands(tmp_path, capsys, monkeypatch, columns, rich):
    checkpoint.save(tmp_path / "c", {**{key: torch.ones(1) for key in HOSTILE}, "value": "\x1b[31m[bold]\n"})
    monkeypatch.setenv("COLUMNS", columns)
    if rich:
        console = pytest.importorskip("rich.console").Console
        monkeypatch.setattr(output, "_terminal", lambda: console(force_terminal=True, markup=False, no_color=True))
    text = shown(capsys, tmp_path / "c", "--flat")
    lines = text.replace("\x1b[1m", "").replace("\x1b[0m", "").splitlines()
    for key in HOSTILE:
        assert any(line.startswith(f"{output.escaped(key)}  float32 [1]") for line in lines), key
    assert "\x1b" not in "".join(lines) and "value  = '\\x1b[31m[bold]\\n'" in lines
    assert set(json.loads(shown(capsys, tmp_path / "c", "--json"))["tensors"]) == set(HOSTILE)
    for key in HOSTILE:
        assert output.escaped(key) in shown(capsys, tmp_path / "c", key)


def test_json_tells_where_every_box_is(tmp_path, capsys):
    checkpoint.save(tmp_path / "one", {"w": torch.arange(12.0).view(4, 3), "n": {"lr": math.inf, "t": (1, 2)}})
    checkpoint.reshard(
        tmp_path / "one",
        tmp_path / "two",
        layout=lambda key, stored: mesh_layout(stored.shape, Mesh((2,), (0, 1)), (Split(0, 0),)),
    )
    document = json.loads(shown(capsys, tmp_path / "two", "--json"))
    assert document["world_size"] == 2 and document["values"] == {"n.lr": {"float": "inf"}, "n.t": {"tuple": [1, 2]}}
    files = [file["name"] for file in document["files"]]
    w = document["tensors"]["w"]
    assert (w["dtype"], w["shape"], w["elements"], w["bytes"], w["tied_to"]) == ("float32", [4, 3], 12, 48, None)
    assert w["boxes"] == [
        {"offsets": [0, 0], "sizes": [2, 3], "file": files[0]},
        {"offsets": [2, 0], "sizes": [2, 3], "file": files[1]},
    ]
    assert f"  [2:4, 0:3] in {files[1]}" in shown(capsys, tmp_path / "two", "w").splitlines()
    assert "in 2 boxes" in shown(capsys, tmp_path / "two")


def test_show_lists_a_run(tmp_path, capsys):
    manager = checkpoint.Manager(tmp_path)
    for step in (100, 200, 300):
        manager.save(step, {"step": step})
    manager.restore({"step": 0}, step=200)
    manager.save(250, {"step": 250})
    lines = shown(capsys, tmp_path).splitlines()
    assert lines[0].startswith(f"{tmp_path}: a run of 3 checkpoints, on branch 1, ")
    assert [line.split()[0] for line in lines[2:5]] == ["100", "200", "250"]
    assert lines[3].endswith("branch 1 begins here") and lines[4].endswith("newest")
    assert lines[5:] == ["abandoned, of branch 0: step 300, committed, in step-00000300"]


def test_show_prints_one_small_tensor(tmp_path, capsys):
    checkpoint.save(tmp_path / "c", {"w": torch.arange(6.0).view(2, 3)})
    assert str(torch.arange(6.0).view(2, 3)) in shown(capsys, tmp_path / "c", "w")
    assert "tensor(" not in shown(capsys, tmp_path / "c", "w", "--no-stats")


FLOATS = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
]
INTEGERS = ["int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"]


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "complex128", "complex64", "complex32", "float8_e8m0fnu"])
def test_statistics_of_every_dtype(tmp_path, dtype):
    """Against NumPy, of a tensor of several boxes."""
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that complex32 is experimental
        tensor = (torch.randn(60, 50, dtype=torch.complex64) if kind.is_complex else torch.randn(60, 50) * 20).abs()
        tensor = (tensor if dtype in (*INTEGERS, "float8_e8m0fnu") else tensor * torch.randn(60, 50).sign()).to(kind)
        tensor = tensor * (1 + 2j) if dtype in ("complex128", "complex64") else tensor
        checkpoint.save(tmp_path / "c", {"w": tensor})
        halves = mesh_layout((60, 50), Mesh((2, 2), (0, 1, 2, 3)), (Split(0, 0), Split(1, 1)))
        checkpoint.reshard(tmp_path / "c", tmp_path / "d", layout=lambda key, stored: halves)
        with checkpoint.open(tmp_path / "d") as reader:
            found = statistics_of(reader, "w")
        wide = torch.complex128 if kind.is_complex else tensor.dtype if dtype in INTEGERS else torch.float64
        numbers = np.abs(tensor.to(wide).numpy()) if kind.is_complex else tensor.to(wide).numpy()
    finite = numbers[np.isfinite(numbers)]
    assert found.elements == 3000 and found.magnitudes == kind.is_complex
    assert found.nan == np.isnan(numbers).sum() and found.zeros == (numbers == 0).sum()
    assert (found.minimum, found.maximum) == (finite.min(), finite.max())
    assert isinstance(found.minimum, int) == (dtype in INTEGERS)
    assert found.mean == pytest.approx(finite.astype(float).mean(), rel=1e-12)
    assert found.std == pytest.approx(finite.astype(float).std(), rel=1e-12)
    assert sum(found.counts) == finite.size and len(found.edges) == len(found.counts) + 1 <= 21
    width = found.edges[-1] - found.edges[0]
    for i, count in enumerate(found.counts):  # but for elements that stand on an edge, by rounding
        low, high = found.edges[i] - 1e-9 * width, found.edges[i + 1] + 1e-9 * width
        assert count <= ((finite >= low) & (finite <= high)).sum()


EXTREMES = {
    "of what is not finite": [math.nan, math.inf, -math.inf, 1.0, 3.0, 0.0, -0.0],
    "of nothing finite": [math.nan, math.inf],
    "of nothing": [],
    "of one number": [2.5, 2.5, math.nan],
    "over all of fp64": [1.7e308, -1.7e308],
    "of large numbers": [1e200, -1e200, 1e200, 3.0],
    "of the least numbers": [5e-324, 1e-323, 0.0],
}


@pytest.mark.parametrize("name", EXTREMES)
def test_statistics(tmp_path, capsys, name):
    numbers = EXTREMES[name]
    checkpoint.save(tmp_path / "c", {"w": torch.tensor(numbers, dtype=torch.float64)})
    found = json.loads(shown(capsys, tmp_path / "c", "w", "--json"))["statistics"]
    finite = [each for each in numbers if math.isfinite(each)]
    assert found["nan"] == sum(map(math.isnan, numbers)) and found["positive_infinity"] == numbers.count(math.inf)
    assert found["zeros"] == numbers.count(0.0) and sum(found["counts"]) == len(finite)
    assert found["minimum"] == min(finite, default=None) and found["maximum"] == max(finite, default=None)
    assert found["edges"] == sorted(found["edges"])
    if finite:
        mean = sum(map(Fraction, finite)) / len(finite)
        variance, unit = sum((Fraction(each) - mean) ** 2 for each in finite) / len(finite), max(map(abs, finite))
        assert found["mean"] == pytest.approx(float(mean))
        assert found["std"] == pytest.approx(math.sqrt(variance / Fraction(unit) ** 2) * unit)
    assert "NaN" in shown(capsys, tmp_path / "c", "w")


def test_integers_are_exact_at_their_limits(tmp_path, capsys):
    limits = {"i": torch.tensor([-(2**63), 2**63 - 1]), "u": torch.tensor([2**64 - 1, 0], dtype=torch.uint64)}
    checkpoint.save(tmp_path / "c", limits)
    found = [json.loads(shown(capsys, tmp_path / "c", key, "--json"))["statistics"] for key in "iu"]
    assert [(each["minimum"], each["maximum"]) for each in found] == [(-(2**63), 2**63 - 1), (0, 2**64 - 1)]


@pytest.mark.parametrize("numbers", [[2**62, 2**62 + 3], [0.0, 5e-324, 5e-324]], ids=str)
def test_numbers_between_which_fp64_has_none_share_a_bin(tmp_path, capsys, numbers):
    checkpoint.save(tmp_path / "c", {"w": torch.tensor(numbers, dtype=torch.int64 if numbers[0] else torch.float64)})
    found = json.loads(shown(capsys, tmp_path / "c", "w", "--json"))["statistics"]
    assert (found["counts"], found["edges"]) == ([len(numbers)], [float(numbers[0]), float(numbers[1])])


def test_a_damaged_checkpoint_is_named(tmp_path, capsys):
    checkpoint.save(tmp_path / "c", {"w": torch.ones(5000)})
    (file,) = (tmp_path / "c").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    assert main(["show", str(tmp_path / "c")]) == 0  # which reads no bytes of tensors
    assert main(["show", str(tmp_path / "c"), "w"]) == 1
    assert file.name in capsys.readouterr().err
    (tmp_path / "c" / "manifest.json").write_text("{}")
    assert main(["show", str(tmp_path / "c")]) == 1
    assert "manifest.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([0, 1, 2, 3], "0..3"),
        ([0, 2, 4], "0..4..2"),
        ([0, 1, 5], "0..1,5"),
        ([3, 9], "3,9"),
        ([1, 2, 3, 7, 8], "1..3,7..8"),
    ],
)
def test_ranges(numbers, text):
    assert ranges_text(numbers) == text


def test_patterns():
    names = ["e", *(f"l.{i}.{n}" for i in range(5) for n in ("a.w", "b.w")), *(f"h{i}" for i in range(3)), "h07"]
    assert patterns_of(names) == ["e", "h{0..2}", "h07", "l.{0..4}.{a,b}.w"]


NAMES = st.sampled_from(["0", "1", "2", "10", "a", "b", "w0", "w1", ""])


@given(st.dictionaries(st.lists(NAMES, min_size=1, max_size=4).map(".".join), st.integers(0, 2), max_size=40))
def test_a_tree_shows_each_leaf_and_sums_all(leaves):
    root = tree_of(Leaf(key, size, "", dtype="d", elements=size, nbytes=2 * size) for key, size in leaves.items())
    assert root.sums[:3] == (len(leaves), sum(leaves.values()), 2 * sum(leaves.values()))
    every = rows_of(root, collapse=False)
    assert sorted(row.node.leaf.key for row in every if row.node.leaf is not None) == sorted(leaves)
    collapsed, stack = rows_of(root), []
    total = 0
    for row in collapsed:
        del stack[row.level :]
        stack.append(row.copies if not stack else row.copies * stack[-1])
        total += stack[-1] if row.node.leaf is not None else 0
    assert total == len(leaves)


def test_times_are_text():
    assert [utc_text(0), utc_text(1e300)] == ["1970-01-01 00:00:00Z", "1e+300 s"]


def test_the_version_that_wrote_a_checkpoint_is_shown(tmp_path, capsys):
    checkpoint.save(tmp_path / "a", {"step": 1})
    assert main(["show", str(tmp_path / "a")]) == 0
    assert f", written by shardopt {shardopt.__version__}\n" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "a"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written_by"] == f"shardopt {shardopt.__version__}"
