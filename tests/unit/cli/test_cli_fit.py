"""`shardopt fit`: what checkpoints like a stored one would cost, as text and JSON; wrong calls."""

import json

import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.cli import main


def save(path, **options):
    model = torch.nn.Sequential(torch.nn.Embedding(100, 16), torch.nn.Linear(16, 100))
    model[1].weight = model[0].weight
    optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=0.1)
    optimizer.init_state()
    return checkpoint.save(path, {"model": model, "optimizer": optimizer, "step": 5}, **options)


def printed(capsys, *arguments):
    assert main(["fit", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_as_many_ranks_as_saved_it_write_the_same_bytes(tmp_path, capsys):
    report = save(tmp_path / "c")
    found = printed(capsys, tmp_path / "c", "--measure", 0)
    assert found["bytes_by_rank"] == [report.bytes_total] and found["tensors"] == report.tensors
    assert abs(found["manifest_bytes"] - (tmp_path / "c" / "manifest.json").stat().st_size) <= 8
    assert found["save_seconds"] is None and found["kept"] is None


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_a_number_of_ranks_writes_what_a_reshard_writes(tmp_path, capsys, ranks):
    save(tmp_path / "c")
    checkpoint.reshard(tmp_path / "c", tmp_path / "resharded", world_size=ranks)
    found = printed(capsys, tmp_path / "c", "--ranks", ranks, "--measure", 0)
    files = sorted((tmp_path / "resharded").glob("*.safetensors"))
    assert [nbytes for nbytes in found["bytes_by_rank"] if nbytes] == [file.stat().st_size for file in files]


def test_the_newest_checkpoint_of_a_run_counts_and_its_root_is_measured(tmp_path, capsys):
    for step in (5, 10):
        save(tmp_path / f"step-{step:08d}")
    before = sorted(tmp_path.rglob("*"))
    found = printed(capsys, tmp_path, "--measure", 0.3, "--steps", 100, "--every", 10, "--keep-last", 3)
    assert found["url"] == str(tmp_path / "step-00000010") and sorted(tmp_path.rglob("*")) == before
    assert found["save_seconds"] > 0 and found["load_seconds"] > 0
    assert found["kept"]["checkpoints"] == 3 and found["kept"]["nbytes"] == 3 * found["nbytes"]


def test_it_prints_a_table(tmp_path, capsys):
    save(tmp_path / "c")
    arguments = ["--ranks", "4", "--measure", "0.1", "--steps", "20", "--keep-last", "1"]
    assert main(["fit", str(tmp_path / "c"), *arguments]) == 0
    text = capsys.readouterr().out
    assert "(4 ranks)" in text and "1 of 20 checkpoints" in text and "measured by 1 process: 4 ranks" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "0"], "--ranks: found 0"),
        (["--steps", "0"], "--steps: found 0"),
        (["--measure", "-1"], "--measure: found -1"),
        (["--steps", "9", "--keep-seconds", "60"], "--seconds-per-step"),
        (["--keep-last", "2", "--every", "3"], "--every, --keep-last: found no --steps"),
        (["--steps", "9", "--keep-every", "3"], "--keep-last, --keep-seconds: found neither"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_call_says_what_is_wrong(arguments, words, tmp_path, capsys):
    save(tmp_path / "c")
    assert main(["fit", str(tmp_path / "c"), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_nothing_stored_is_an_error(tmp_path, capsys):
    assert main(["fit", str(tmp_path / "none")]) == 1
    assert "there is no checkpoint" in capsys.readouterr().err
