"""The example that trains and serves at once, at its smallest; and its check, on runs that were tampered with."""

import json

import check_stream
import pytest
import torch.distributed as dist
import train_and_serve
from spool import Spool, note, records

from tests.harness import run_ranks

STEPS, SAVED = 3, 2


def train_and_serve_here(root):
    """Both jobs on the same ranks, in turn; the trainers are made anew after a step that no checkpoint has."""
    train_and_serve.SAVE_EVERY = SAVED
    sampler = train_and_serve.Sampler(root)
    for last in (STEPS, STEPS + 1):
        trainer = train_and_serve.Trainer(root)
        while trainer.app["step"] < last:
            trainer.publisher.wait()
            sampler.turn()
            trainer.turn()
        trainer.close()
    dist.barrier()
    return sampler.follower.step


def test_samples_are_of_published_steps_also_after_a_resume(tmp_path):
    assert run_ranks(2, train_and_serve_here, tmp_path) == [STEPS, STEPS]
    batches = records(tmp_path, "batches")
    assert [each["step"] for each in batches] == [1, 2, 3, 3, 4]
    assert [each["step"] for each in records(tmp_path, "published")] == [0, 1, 2, 3, 2, 3, 4]
    findings = [
        check_stream.check_published(tmp_path),
        check_stream.check_samples(tmp_path),
        check_stream.check_batches(tmp_path, batches, STEPS + 1),
    ]
    assert all(finding.holds for finding in findings), findings

    path = tmp_path / "published.jsonl"
    *others, last = path.read_text().splitlines()
    path.write_text("\n".join([*others, json.dumps(json.loads(last) | {"weights": "0" * 32})]) + "\n")
    assert "(not [4])" in str(check_stream.check_published(tmp_path))


def run_of(root, **changes):
    """A run of five steps, as its records tell it, with two words a batch. Changes are of its last sample."""
    spool = Spool(root)
    check_stream.BATCH = 2
    for step in range(5):
        note(root, "published", step=step, weights=f"hash {step}", life=int(step > 2))
        sample = {"step": step, "weights": f"hash {step}", "letters": [0, 1, 2, 3, 4, 5, 6, 7, 8]}
        if step == 2:
            note(root, "kills", role="trainer", rank=0, step=2)
            note(root, "published", step=2, weights="hash 2", life=1)
        if step == 4:
            sample |= changes
        spool.put(sample["step"], sample["weights"], [sample["letters"], [0] * 9])
        names = spool.waiting()
        for name in names:
            spool.take(name, True)
        batch = {
            "step": step + 1,
            "life": int(step > 2),
            "samples": names,
            "steps_old": [0, 0],
            "seconds_old": [0.1, 0.1],
        }
        note(root, "batches", **batch, reward=step / 4, dropped=0, text="")
    return records(root, "batches")


@pytest.fixture(autouse=True)
def keep_the_size_of_batches(monkeypatch):
    monkeypatch.setattr(check_stream, "BATCH", check_stream.BATCH)


def test_a_run_as_it_should_be_holds(tmp_path):
    batches = run_of(tmp_path)
    assert check_stream.check_samples(tmp_path).holds
    assert check_stream.check_batches(tmp_path, batches, 5).holds
    assert check_stream.check_kill(tmp_path, "trainer", batches).holds


@pytest.mark.parametrize(
    "changes",
    [{"weights": "hash 3"}, {"weights": "torn"}, {"step": 3}, {"step": 9, "weights": "hash 9"}, {"letters": [0, 1]}],
    ids=str,
)
def test_a_sample_of_other_weights_than_it_says_is_found(tmp_path, changes):
    run_of(tmp_path, **changes)
    finding = check_stream.check_samples(tmp_path)
    assert not finding.holds and "DOES NOT HOLD" in str(finding)


def test_a_hash_of_two_steps_proves_nothing(tmp_path):
    run_of(tmp_path)
    note(tmp_path, "published", step=5, weights="hash 4", life=1)
    assert not check_stream.check_samples(tmp_path).holds


@pytest.mark.parametrize(
    "spoil",
    [
        lambda batches: batches.pop(),
        lambda batches: batches[1]["steps_old"].append(9),
        lambda batches: batches[1]["samples"].pop(),
        lambda batches: batches[1].update(samples=batches[0]["samples"]),
        lambda batches: batches[1].update(samples=["a", "b"]),
    ],
    ids=["a step is missing", "old", "too few", "used twice", "no such samples"],
)
def test_a_batch_that_breaks_a_rule_is_found(tmp_path, spoil):
    batches = run_of(tmp_path)
    spoil(batches)
    assert not check_stream.check_batches(tmp_path, batches, 5).holds


def test_a_resume_to_other_weights_is_found(tmp_path):
    batches = run_of(tmp_path)
    path = tmp_path / "published.jsonl"
    path.write_text(path.read_text().replace("hash 2", "other weights", 1))
    assert not check_stream.check_kill(tmp_path, "trainer", batches).holds


def test_no_rise_and_no_kill_are_found(tmp_path):
    batches = run_of(tmp_path)
    assert not check_stream.check_reward([*batches, *batches]).holds
    assert not check_stream.check_kill(tmp_path, "sampler", batches).holds
    note(tmp_path, "kills", role="sampler", rank=1, step=5)
    assert not check_stream.check_kill(tmp_path, "sampler", batches).holds  # it did not come back
