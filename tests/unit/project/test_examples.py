"""The examples' own code: which bytes a rank is given, and what counts as the same run."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import fsspec
import grams
import language_model
import pytest
import torch
import train_embeddings
import train_lm
import train_moe
from common import Windows, learning_rate_factor
from compare_runs import compare_losses, differing_keys, read_losses
from grams import Grams
from kill_and_resume import pid_of_rank
from lose_a_host import Loss, collect
from moe import TIED, MixtureOfExperts
from program import override, read_config
from train_embeddings import Pairs
from train_moe import make_meshes

from shardopt import checkpoint
from tests.support.fake_rank import as_rank

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
PROGRAMS = {
    "lm": train_lm,
    "language_model": language_model,
    "embeddings": train_embeddings,
    "moe": train_moe,
    "tables": grams,
}


def write_run(run: Path, losses: list[tuple[int, float]]) -> Path:
    run.mkdir()
    lines = [json.dumps({"step": step, "loss": loss, "ranks": 2}) + "\n" for step, loss in losses]
    (run / "loss.jsonl").write_text("".join(lines))
    return run


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    return write_run(tmp_path / "reference", [(1, 4.0), (2, 3.0), (3, 2.0)])


def test_targets_are_the_bytes_that_follow(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(100)))
    windows = Windows(str(tmp_path / "text"), context=5)
    assert len(windows) == 95
    for start in range(len(windows)):
        inputs, targets = windows[start]
        assert inputs.tolist() == list(range(start, start + 5))
        assert torch.equal(targets, inputs + 1)


def test_the_corpus_may_be_at_any_url_of_fsspec() -> None:
    with fsspec.open("memory://corpus", "wb") as file:
        file.write(b"to be or not to be")
    assert bytes(Windows("memory://corpus", context=4).text.tolist()) == b"to be or not to be"


def test_learning_rate_warms_up_then_falls_to_a_tenth() -> None:
    factors = [learning_rate_factor(step, steps=10, warmup_steps=4) for step in range(11)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[10] == pytest.approx(0.1)


def test_overrides_reach_into_tables() -> None:
    config: dict[str, Any] = {"steps": 1, "model": {"width": 2, "layers": 3}}
    assert override(config, {"steps": 5, "model": {"width": 6}}) == {"steps": 5, "model": {"width": 6, "layers": 3}}
    assert config == {"steps": 1, "model": {"width": 2, "layers": 3}}


@pytest.mark.parametrize(("name", "program"), PROGRAMS.items())
def test_each_program_has_settings_that_its_file_fits(name: str, program: Any) -> None:
    read_config(program.Config, CONFIGS / f"{name}.toml", {})
    changes = {"seed": "zero", "steps": "5", "data": {"corpse": 1}, "model": 3}
    with pytest.raises(SystemExit) as caught:
        read_config(program.Config, CONFIGS / f"{name}.toml", changes)
    for wrong in ("seed: found 'zero'", "steps: found '5'", "data.corpse: found 1", "model: found 3"):
        assert f"{name}.toml: {wrong}: " in str(caught.value)


def test_pages_that_comments_name_are_there() -> None:
    files = (CONFIGS.parent / "examples").rglob("*.py")
    pages = {page for file in files for page in re.findall(r"# (docs/\S+\.md)\n", file.read_text())}
    assert len(pages) > 5 and all((CONFIGS.parent / page).exists() for page in pages), pages


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
        by_rank = {rank: str(pid_of_rank(int(rank), process.pid)) for rank in pids}
        with pytest.raises(SystemExit, match="no process of rank 2"):
            pid_of_rank(2, process.pid)
        process.stdin.close()
    assert sorted(pids) == ["1", "11"]
    assert by_rank == pids


def test_pairs_of_words_are_all_those_that_are_near_each_other(tmp_path: Path) -> None:
    text = " ".join(f"w{letter}" for letter in "abcdefghij" * 30) + " once"
    (tmp_path / "text").write_text(text)
    pairs = Pairs(str(tmp_path / "text"), window=2, min_count=2, seed=5)
    assert sorted(pairs.words) == [f"w{letter}" for letter in "abcdefghij"]
    words, near = pairs.read(list(range(len(pairs))))
    expected = [
        (int(pairs.text[at]), int(pairs.text[other]))
        for at in range(2, len(pairs.text) - 2)
        for other in (at - 2, at - 1, at + 1, at + 2)
    ]
    assert list(zip(words.tolist(), near.tolist(), strict=True)) == expected
    assert set(pairs.others(1000, torch.Generator().manual_seed(0)).tolist()) == set(range(10))


def test_equal_grams_have_equal_rows_and_others_have_others(tmp_path: Path) -> None:
    text = "the cat and the dog and the cat sat on the mat " * 3
    (tmp_path / "text").write_text(text)
    grams = Grams(str(tmp_path / "text"), {"letters": 3, "words": 2}, {"letters": 2**40, "words": 2**40})
    rows, letters = grams.read(list(range(len(grams))))
    assert bytes(letters.tolist()).decode() == text[3:]
    strings: dict[str, list[list[str]]] = {"letters": [], "words": []}
    for end in range(3, len(text)):
        begins = [0] * 2 + [at for at in range(1, end) if text[at - 1] == " " != text[at]]
        strings["letters"].append([text[end - n : end] for n in (1, 2, 3)])
        strings["words"].append([text[begins[-n] : end] for n in (1, 2)])
    for name, of_ends in strings.items():
        pairs = set(zip([each for of_end in of_ends for each in of_end], rows[name].flatten().tolist(), strict=True))
        assert len(pairs) == len({gram for gram, _ in pairs}) == len({row for _, row in pairs}) > 10


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_stages_have_each_parameter_once_under_its_name_in_the_whole_model(stages: int) -> None:
    def names_of(stage: int, stages: int) -> list[str]:
        model = MixtureOfExperts(layers=5, context=4, width=4, heads=2, experts=2, chosen=1, hidden=3)
        model.keep_stage(stage, stages)
        return [TIED.get(name, name) for name, _ in model.named_parameters()]

    names = [name for stage in range(stages) for name in names_of(stage, stages)]
    assert sorted(set(names)) == sorted(names_of(0, 1))
    assert len(names) == len(set(names)) + (stages > 1)  # the tied one is on two
    assert all(any(name.startswith("blocks.") for name in names_of(stage, stages)) for stage in range(stages))


@pytest.mark.parametrize(
    ("pipeline", "experts", "batch", "said"),
    [
        (4, 1, 24, "6 ranks cannot be split: 4 "),
        (2, 2, 24, "6 ranks cannot be split: 4 "),
        (8, 1, 24, "6 ranks cannot be split: 8 "),
        (1, 6, 24, "8 experts cannot be split: 6 "),
        (2, 1, 10, "10 windows of a batch cannot be split: 6 "),
    ],
)
def test_splits_that_do_not_divide_are_refused(pipeline: int, experts: int, batch: int, said: str) -> None:
    changes = {"split": {"pipeline": pipeline, "experts": experts}, "data": {"batch": batch, "micro_batches": 2}}
    config = read_config(train_moe.Config, CONFIGS / "moe.toml", changes)
    with as_rank(0, 6), pytest.raises(SystemExit, match=said):
        make_meshes(torch.device("cpu"), config)


def test_what_the_loss_of_a_host_costs_is_counted_from_what_was_done_before(tmp_path: Path) -> None:
    lines = [(1, 4.0), (2, 3.5), (3, 3.0), (2, 3.5), (3, 3.0), (4, 2.0)]
    loss = Loss(write_run(tmp_path / "run", lines), times=[-3.0, -2.0, -1.0, 10.0, 11.0, 12.0])
    assert (loss.restored, loss.steps_lost) == (1, 2)
    assert (loss.seconds_to_next, loss.seconds_to_new) == (10.0, 12.0)


class OneHost:
    def __init__(self, memory: Path) -> None:
        self.memory = memory


def test_what_hosts_have_is_put_together_to_a_checkpoint(tmp_path: Path) -> None:
    url = tmp_path / "first/run/step-00000007"
    checkpoint.save(url, {"x": torch.arange(9), "step": 7})
    (url / "manifest.json").rename(url / "prepared.json")
    other = tmp_path / "second/run/step-00000007"
    other.mkdir(parents=True)
    (file,) = url.glob("*.safetensors")
    file.rename(other / file.name)
    hosts: list[Any] = [OneHost(tmp_path / "first"), OneHost(tmp_path / "second")]
    assert collect(hosts[:1], tmp_path / "half") == []
    assert collect(hosts, tmp_path / "found") == ["step-00000007"]
    assert checkpoint.verify(tmp_path / "found/step-00000007").ok
