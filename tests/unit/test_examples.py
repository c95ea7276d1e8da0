"""The examples' own parts: which bytes a rank is given, and what counts as the same run."""

import json
import subprocess
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from compare_runs import compare_losses, differing_keys, read_losses
from kill_and_resume import pid_of_rank
from train_embeddings import Pairs
from train_lm import Batches, learning_rate_factor, override

from shardopt import checkpoint


def write_run(run: Path, losses: list[tuple[int, float]]) -> Path:
    run.mkdir()
    lines = [json.dumps({"step": step, "loss": loss, "ranks": 2}) + "\n" for step, loss in losses]
    (run / "loss.jsonl").write_text("".join(lines))
    return run


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    return write_run(tmp_path / "reference", [(1, 4.0), (2, 3.0), (3, 2.0)])


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7])
def test_ranks_share_the_same_global_batch(ranks: int) -> None:
    whole, _ = Batches("", batch=7, context=5, seed=3).next_slice(0, 1)
    slices = [Batches("", batch=7, context=5, seed=3).next_slice(rank, ranks)[0] for rank in range(ranks)]
    assert all(len(part) for part in slices)
    assert sorted(torch.cat(slices).tolist()) == sorted(whole.tolist())


def test_batches_go_on_from_a_loaded_position_and_differ_from_step_to_step() -> None:
    first, second = (Batches("", batch=4, context=5, seed=0) for _ in range(2))
    beginning = first.next_slice(0, 1)[0]
    second.load_state_dict(first.state_dict())
    following = first.next_slice(0, 1)[0]
    assert torch.equal(second.next_slice(0, 1)[0], following)
    assert not torch.equal(beginning, following)
    assert not torch.equal(Batches("", batch=4, context=5, seed=1).next_slice(0, 1)[0], beginning)


def test_targets_are_the_bytes_that_follow(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(100)))
    inputs, targets = Batches(str(tmp_path / "text"), batch=4, context=5, seed=0).next_slice(0, 1)
    assert inputs.shape == (4, 5)
    assert torch.equal(targets, inputs + 1)


def test_the_corpus_may_be_at_any_url_of_fsspec() -> None:
    with fsspec.open("memory://corpus", "wb") as file:
        file.write(b"to be or not to be")
    assert bytes(Batches("memory://corpus", batch=1, context=4, seed=0).text.tolist()) == b"to be or not to be"


def test_learning_rate_warms_up_then_falls_to_a_tenth() -> None:
    factors = [learning_rate_factor(step, steps=10, warmup_steps=4) for step in range(11)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[10] == pytest.approx(0.1)


def test_overrides_reach_into_tables_and_refuse_unknown_names() -> None:
    config: dict[str, Any] = {"steps": 1, "model": {"width": 2, "layers": 3}}
    override(config, {"steps": 5, "model": {"width": 6}})
    assert config == {"steps": 5, "model": {"width": 6, "layers": 3}}
    with pytest.raises(SystemExit, match=r"'depth'.*width, layers"):
        override(config, {"model": {"depth": 1}})


def test_runs_compare_by_relative_difference(tmp_path: Path, reference: Path) -> None:
    comparison = compare_losses(reference, write_run(tmp_path / "run", [(1, 4.0), (2, 3.0), (3, 2.0 + 2e-5)]))
    assert comparison.worst == pytest.approx(1e-5)
    assert comparison.holds(1.1e-5)
    assert not comparison.holds(0.9e-5)


def test_every_line_of_a_step_that_was_done_twice_counts(tmp_path: Path, reference: Path) -> None:
    again = write_run(tmp_path / "run", [(1, 4.0), (2, 9.0), (2, 3.0), (3, 2.0)])
    assert not compare_losses(reference, again).holds(1e-5)


@pytest.mark.parametrize("losses", [[(1, 4.0), (3, 2.0)], [(1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)], []])
def test_runs_of_different_steps_are_not_the_same(
    tmp_path: Path, reference: Path, losses: list[tuple[int, float]]
) -> None:
    assert not compare_losses(reference, write_run(tmp_path / "run", losses)).holds(1e-5)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_loss_that_is_not_a_number_is_not_the_same(tmp_path: Path, reference: Path, step: int) -> None:
    losses = {1: 4.0, 2: 3.0, 3: 2.0} | {step: float("nan")}
    assert not compare_losses(reference, write_run(tmp_path / "run", list(losses.items()))).holds(1e-5)


def test_checkpoints_are_compared_by_their_bits(tmp_path: Path) -> None:
    values = {"same": torch.tensor([1.0, float("nan")]), "zero": torch.tensor(0.0), "one": 1, "count": 3}
    others = {"same": torch.tensor([1.0, float("nan")]), "zero": torch.tensor(-0.0), "one": 1.0, "more": 3}
    for name, app in (("left", values), ("right", others)):
        checkpoint.save(tmp_path / name, app)
    left, right = (str(tmp_path / name) for name in ("left", "right"))
    assert differing_keys(left, left) == ([], 4)
    assert differing_keys(left, right) == (["count", "more", "one", "zero"], 5)


def test_a_line_still_being_written_is_left_out(reference: Path) -> None:
    with open(reference / "loss.jsonl", "a") as log:
        log.write('{"step": 4, "lo')
    assert [record.step for record in read_losses(reference)] == [1, 2, 3]


def test_a_rank_is_found_among_the_children_of_its_agent() -> None:
    rank = "bash -c 'echo $RANK $$; read' <&0 &"  # lives until its input is closed
    agent = ["bash", "-c", f"RANK=11 {rank} RANK=1 {rank} wait"]
    with subprocess.Popen(agent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        pids = dict(process.stdout.readline().split() for _ in range(2))
        found = {rank: str(pid_of_rank(int(rank), process.pid)) for rank in pids}
        with pytest.raises(SystemExit, match="no process of rank 2"):
            pid_of_rank(2, process.pid)
        process.stdin.close()
    assert sorted(pids) == ["1", "11"]
    assert found == pids


def test_pairs_of_words_are_near_each_other_and_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    text = " ".join(f"w{letter}" for letter in "abcdefghij" * 30) + " once"
    (tmp_path / "text").write_text(text)
    settings = {"batch": 50, "window": 2, "negatives": 3, "min_count": 2, "seed": 5}

    def data() -> Pairs:
        return Pairs(str(tmp_path / "text"), **settings)

    assert sorted(data().words) == [f"w{letter}" for letter in "abcdefghij"]
    words, near = data().next_slice(0, 1)
    assert words.shape == (50,) and near.shape == (50, 4)
    slices = [data().next_slice(rank, 3) for rank in range(3)]
    for part in (0, 1):
        whole = torch.cat([(words, near)[part][rank::3] for rank in range(3)])
        assert torch.equal(torch.cat([its[part] for its in slices]), whole)
    pairs = data()
    positions = {int(word): set() for word in pairs.text.tolist()}
    for at, word in enumerate(pairs.text.tolist()):
        positions[word].update(pairs.text[max(at - 2, 0) : at + 3].tolist())
    assert all(int(other) in positions[int(word)] for word, other in zip(words, near[:, 0], strict=True))
    again = data()
    again.next_slice(0, 1)
    pairs.load_state_dict(again.state_dict())
    assert torch.equal(pairs.next_slice(0, 1)[1], again.next_slice(0, 1)[1])
