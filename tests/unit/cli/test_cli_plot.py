"""`shardopt plot`: what is drawn, by its data; that pictures are written."""

import json
import logging

import pytest
import torch

from shardopt import checkpoint
from shardopt.cli import main
from shardopt.sharding.layout import Layout
from shardopt.sharding.mesh import Mesh, Split, mesh_layout

pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
SIGNATURES = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


def choose(key, stored):
    if len(stored.shape) < 2:
        return Layout.replicated(stored.shape)
    return mesh_layout(stored.shape, Mesh((2, 2), (0, 1, 2, 3)), (Split(0, 0), Split(1, 1)))


@pytest.mark.parametrize(
    "kind", ["png", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("svg", "pdf"))]
)
def test_layouts_before_and_after(tmp_path, capsys, kind):
    state = {f"$layers_{i}^$.w": torch.ones(8, 6) for i in range(3)} | {"b": torch.ones(5), "cube": torch.ones(2, 3, 4)}
    checkpoint.save(tmp_path / "one", state | {"empty": torch.empty(0, 4), "s": torch.tensor(1.0)})
    checkpoint.reshard(tmp_path / "one", tmp_path / "four", layout=choose)
    picture = tmp_path / f"layout.{kind}"
    assert main(["plot", "layout", str(tmp_path / "four"), "--world-size", "3", "-o", str(picture), "--json"]) == 0
    assert picture.read_bytes().startswith(SIGNATURES[kind])
    document = json.loads(capsys.readouterr().out)
    first = document["layouts"][0]
    assert (first["keys"], first["shape"]) == ([f"$layers_{i}^$.w" for i in range(3)], [8, 6])
    quarters = [([0, 0], 0), ([0, 3], 1), ([4, 0], 2), ([4, 3], 3)]
    assert [(each["offsets"], *each["ranks"]) for each in first["stored"]] == quarters
    thirds = [(each["offsets"], each["sizes"], each["ranks"]) for each in first["afterwards"]]
    assert thirds == [([0, 0], [3, 6], [0]), ([3, 0], [3, 6], [1]), ([6, 0], [2, 6], [2])]
    stored, afterwards = document["bytes_by_rank"]["stored"], document["bytes_by_rank"]["afterwards"]
    assert sum(stored) == 4 * (3 * 48 + 5 + 24 + 1) and len(stored) == 4
    whole_on_each = 4 * (5 + 1)
    assert sum(afterwards) == 4 * (3 * 48 + 24) + 3 * whole_on_each and len(afterwards) == 3


def test_a_run_and_the_seconds_of_its_saves(tmp_path, capsys, caplog):
    with caplog.at_level(logging.INFO, "shardopt"):
        manager = checkpoint.Manager(tmp_path / "run")
        for step in (1, 2, 3):
            manager.save(step, {"w": torch.ones(3)}, metrics={"loss": 1 / step, "$x^": step})
    log = tmp_path / "log.txt"
    slower = f"INFO save url={tmp_path}/run/step-00000002 save_id=x tensors=1 seconds=99 stall_seconds=7.5\n"
    branch = "shardopt: saved step 4 of branch 1: 2.2 MB in 0.16 s (training waited 3 ms)\n"
    log.write_text("noise\n" + "\n".join(caplog.messages) + "\n" + slower + branch)
    manager.restore({"w": torch.zeros(3)}, step=2)
    picture = tmp_path / "run.svg"
    assert main(["plot", "run", str(tmp_path / "run"), "--log", str(log), "-o", str(picture), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [each["metrics"]["loss"] for each in document["checkpoints"]] == [1.0, 0.5, 1 / 3]
    assert document["saves"]["2"] == {"seconds": 99.0, "stall_seconds": 7.5}
    assert document["saves"]["1"]["seconds"] > 0 and set(document["saves"]) == {"1", "2", "3", "4"}
    assert document["saves"]["4"] == {"seconds": 0.16, "stall_seconds": 0.003}
    assert picture.read_bytes().startswith(b"<?xml")


def test_nothing_to_draw(tmp_path, capsys):
    checkpoint.save(tmp_path / "c", {"n": 1})
    assert main(["plot", "layout", str(tmp_path / "c"), "-o", str(tmp_path / "x.png")]) == 1
    assert main(["plot", "run", str(tmp_path / "c"), "-o", str(tmp_path / "x.png")]) == 1
    assert capsys.readouterr().err.count("there is nothing to draw") == 2 and not (tmp_path / "x.png").exists()


def test_without_matplotlib_the_error_is_how_to_install_it(tmp_path, capsys, monkeypatch):
    import sys

    for name in [name for name in sys.modules if name.startswith(("matplotlib", "shardopt.cli.plot"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", "run", str(tmp_path), "-o", "x.png"]) == 1
    assert "pip install 'shardopt[plot]'" in capsys.readouterr().err
