"""The example of tables at its smallest: half of it on four ranks, the rest on three under another plan."""

import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from compare_runs import compare_losses
from grams import Config, tables_of
from program import read_config
from spool import records
from train_tables import train

from tests.harness import run_ranks

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = (
    "steps=8",
    "data.batch=32",
    "rows.letters=20000",
    "rows.words=20000",
    "model.width=32",
    "model.hidden=8",
    "checkpoints.every=2",
    "checkpoints.full_every=4",
)


def tiny_config(out: Path, memory_bytes: int = 4_000_000) -> Config:  # less than a table in fp64
    changes = tomllib.loads("\n".join([*TINY, f"plan.memory_bytes={memory_bytes}"]))
    return read_config(Config, REPOSITORY / "configs" / "tables.toml", changes | {"out": str(out)})


def train_tiny(out: Path) -> None:
    torch.set_default_dtype(torch.float64)
    train(tiny_config(out), torch.device("cpu"), resume=True)


@pytest.fixture(scope="module")
def whole_and_resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of four ranks; and the same as it lay there when a rank was lost after step 5, resumed by three."""
    whole, resumed = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("runs") / "resumed"
    run_ranks(4, train_tiny, whole)
    shutil.copytree(whole, resumed)
    for step in (6, 8):
        shutil.rmtree(resumed / "checkpoints" / f"step-{step:08d}")
    shutil.rmtree(resumed / "full")
    losses = (resumed / "loss.jsonl").read_text().splitlines(keepends=True)
    (resumed / "loss.jsonl").write_text("".join(losses[:5]))
    run_ranks(3, train_tiny, resumed)
    return whole, resumed


def test_it_resumes_on_three_ranks_under_another_plan(whole_and_resumed: tuple[Path, Path]) -> None:
    comparison = compare_losses(*whole_and_resumed)
    assert [line.ranks for line in comparison.differences] == [4] * 5 + [3] * 4
    assert comparison.holds(1e-12)
    config = tiny_config(whole_and_resumed[0], memory_bytes=2_000_000)  # tables are in fp32 here
    cuts = [[table.cut for table in tables_of(config, "planned", ranks)] for ranks in (4, 3)]
    assert cuts[0] != cuts[1]


def test_saves_between_full_ones_write_few_bytes(whole_and_resumed: tuple[Path, Path]) -> None:
    saves = records(whole_and_resumed[0], "saves")
    (full, *_) = (save["bytes"] for save in saves if save["writes"] == "full")
    first, *later = (save["bytes"] for save in saves if save["writes"] == "touched")
    assert [save["step"] for save in saves if save["writes"] == "full"] == [4, 8]
    assert first == pytest.approx(full, rel=0.01)
    assert len(later) == 3 and max(later) < full / 4
