"""Check a run of train_and_serve.py from what it has left: of which weights each sample is, and what the kills cost."""

import argparse
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import policy
from spool import Spool, records
from train_and_serve import BATCH, MOST_STEPS_OLD

from shardopt import checkpoint

RISE = 0.25  # of the mean reward, at least
AVERAGED = 5  # batches, for the reward at the begin and at the end


class Finding(NamedTuple):
    """Whether something that was promised holds, and what was seen."""

    holds: bool
    text: str

    def __str__(self) -> str:
        return f"{self.text}: {'holds.' if self.holds else 'DOES NOT HOLD.'}"


def check(root: Path, steps: int) -> list[Finding]:
    """Returns what was found, in the order of what is promised.

    Args:
        steps: that training was to take.
    """
    batches = records(root, "batches")
    return [
        check_published(root),
        check_samples(root),
        check_batches(root, batches, steps),
        check_reward(batches),
        *(check_kill(root, role, batches) for role in ("trainer", "sampler")),
    ]


def check_published(root: Path) -> Finding:
    """The hashes that trainers noted are those of the bytes that they published, for all steps that are still there."""
    noted = {each["step"]: each["weights"] for each in records(root, "published")}  # the last life's count
    model = policy.Policy()
    follower = checkpoint.Follower(root / "weights", model)
    kept, wrong = checkpoint.Manager(root / "weights").steps(), list[int]()
    for step in kept:
        follower.update(step)
        if policy.hash_of_weights(model) != noted.get(step):
            wrong.append(step)
    said = f"published steps {', '.join(map(str, kept))}, read again, have the hashes that the trainers noted"
    return Finding(bool(kept) and not wrong, said + (f" (not {wrong})" if wrong else ""))


def check_samples(root: Path) -> Finding:
    """Each sample names one published step, and has the hash of its weights and of no other step's."""
    steps_of: dict[str, set[int]] = defaultdict(set)
    for each in records(root, "published"):
        steps_of[each["weights"]].add(each["step"])
    wrong, steps, count = list[str](), set[int](), 0
    for sample in Spool(root).all():
        count += 1
        steps.add(sample.step)
        is_word = len(sample.letters) == policy.LENGTH + 1 and set(sample.letters) <= set(range(len(policy.LETTERS)))
        if steps_of.get(sample.weights) != {sample.step} or not is_word:
            wrong.append(f"{sample.name} of step {sample.step}")
    said = f"{count} samples, of {len(steps)} steps: each has the hash of exactly the published step that it names"
    return Finding(count > 0 and not wrong, said + (f" ({len(wrong)} have not, such as {wrong[0]})" if wrong else ""))


def check_batches(root: Path, batches: list[dict[str, Any]], steps: int) -> Finding:
    """All steps were done, each on a whole batch of fresh samples, none of which was used twice in a life."""
    done = {each["step"] for each in batches}
    old = [number for each in batches for number in each["steps_old"]]
    used = Counter(name for each in batches for name in each["samples"])
    there = {sample.name for sample in Spool(root).all()}
    holds = (
        done == set(range(1, steps + 1))
        and all(len(each["samples"]) == BATCH for each in batches)
        and all(0 <= number <= MOST_STEPS_OLD for number in old)
        and set(used) <= there
        and max(used.values(), default=2) == 1
    )
    dropped = sum(each["dropped"] for each in batches)
    mean = sum(old) / max(len(old), 1)
    seconds = sorted(number for each in batches for number in each["seconds_old"])
    median = seconds[len(seconds) // 2] if seconds else 0.0
    said = f"{steps} steps on fresh samples: weights {mean:.1f} steps old on average, {max(old, default=0)} at most"
    return Finding(holds, f"{said} ({MOST_STEPS_OLD} allowed), {median:.2f} s at the median; {dropped} samples dropped")


def check_reward(batches: list[dict[str, Any]]) -> Finding:
    """The reward has risen."""
    first, last = (
        sum(each["reward"] for each in some) / max(len(some), 1) for some in (batches[:AVERAGED], batches[-AVERAGED:])
    )
    return Finding(
        last >= first + RISE, f"the reward rose from {first:.2f} to {last:.2f} (means of {AVERAGED} batches)"
    )


def check_kill(root: Path, role: str, batches: list[dict[str, Any]]) -> Finding:
    """A rank was killed, and its job went on by itself: trainers from a checkpoint, samplers from an anchor."""
    kill = next((each for each in records(root, "kills") if each["role"] == role), None)
    if kill is None:
        return Finding(False, f"a {role} was killed")
    begin = f"{role} {kill['rank']} was killed after step {kill['step']}"
    if role == "trainer":
        return _resume(root, kill, begin, batches)
    updates = [each for each in records(root, "updates") if each["life"] > 0]
    if not updates:
        return Finding(False, f"{begin}, and the job went on")
    first = updates[0]
    later = {sample.name for sample in Spool(root).all() if sample.made_at > first["at"]}
    used = sum(name in later for each in batches for name in each["samples"])
    seconds = first["at"] - kill["at"]
    said = f"{begin}; all joined again at step {first['step']} after {seconds:.1f} s; {used} samples were used since"
    is_whole = first["previous"] is None and first["whole"] == first["parts"] and first["at"] > kill["at"]
    return Finding(is_whole and used > 0, said)


def _resume(root: Path, kill: dict[str, Any], begin: str, batches: list[dict[str, Any]]) -> Finding:
    """Trainers published the step that they resumed from with the same weights, and samplers went back to it."""
    before, again = (
        [each for each in records(root, "published") if bool(each["life"]) == is_later] for is_later in (0, 1)
    )
    after = [each for each in batches if each["life"] > 0]
    if not again or not after:
        return Finding(False, f"{begin}, and the job went on")
    resumed, seconds = again[0]["step"], after[0]["at"] - kill["at"]
    back = [
        each for each in records(root, "updates") if each["previous"] is not None and each["step"] < each["previous"]
    ]
    said = (
        f"{begin}; all resumed from step {resumed}, published it again bit for bit, and trained after {seconds:.1f} s"
    )
    is_same = {each["step"]: each["weights"] for each in before}.get(resumed) == again[0]["weights"]
    if resumed < before[-1]["step"]:
        said += "; samplers went back to it"
        is_same = is_same and bool(back) and back[0]["at"] > kill["at"]
    return Finding(is_same and resumed <= kill["step"] and kill["at"] < again[0]["at"] < after[0]["at"], said)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=32)
    options = parser.parse_args()
    findings = check(options.out, options.steps)
    print(*findings, sep="\n")
    sys.exit(not all(finding.holds for finding in findings))
