"""Generated lives of a root that is published to and followed, with kills, damage and losses.

Whatever happens, each update has one of three outcomes: the bits of the step that its report names, the weights as they
were, or an error with a name. Only an error may leave weights torn, and then nobody serves them.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from shardopt import checkpoint
from shardopt.checkpoint.rearrange import Rule
from shardopt.errors import CheckpointError, ShardoptError, StateError
from tests.harness import Fault, RanksFailed, run_ranks_outcomes
from tests.support.streams import copied, flip, full_load, same_bits, train

SHAPES = {"a.w": (60, 130), "b.w": (90, 130), "table": (500, 64), "bias": (4000,), "few": (3,), "scalar": ()}
HALF = ("table", "bias")
CALLS = ("os:open", "os:writev", "os:link", "os:unlink", "os:listdir", "os:rename", "os:makedirs", "os:preadv")
KINDS = ("plain", "columns", "transposed", "renamed", "fused", "cast")
MEMORIES = (0, 3 << 10, 100 << 10, 1 << 30)


def new_weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    whole = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: each.bfloat16() if name in HALF else each for name, each in whole.items()}


class Following:
    """A follower with its app, of one kind."""

    def __init__(self, root: str, kind: str, memory_bytes: int) -> None:
        self.kind, self.options = kind, dict[str, Any]()
        zeros = {name: torch.zeros_like(each) for name, each in new_weights(0).items()}
        if kind == "columns":
            zeros = {
                n: each.new_zeros(each.shape[0], 200)[:, 9 : 9 + each.shape[1]] if each.dim() == 2 else each
                for n, each in zeros.items()
            }
        elif kind == "transposed":
            zeros = {n: each.t().contiguous().t() if each.dim() == 2 else each for n, each in zeros.items()}
        elif kind == "renamed":
            self.options = {"rename": {r"^": "model.", r"\.w$": ".weight"}}
        elif kind == "fused":
            self.options = {"rearrange": [Rule(("a.w", "b.w"), "ab", "p i, q i -> p+q i")]}
        elif kind == "cast":
            self.options = {"strict": checkpoint.Strictness(dtype="cast")}
        self.app = self.of(zeros)
        self.follower = checkpoint.Follower(root, self.app, memory_bytes=memory_bytes, **self.options)

    def of(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Published weights as those of the app."""
        if self.kind == "renamed":
            return {f"model.{name.replace('.w', '.weight')}": each for name, each in weights.items()}
        if self.kind == "fused":
            fused = {"ab": torch.cat([weights["a.w"], weights["b.w"]])}
            return fused | {name: each for name, each in weights.items() if not name.endswith(".w")}
        if self.kind == "cast":
            return {name: each.float() for name, each in weights.items()}
        return dict(weights)


def publish_steps(root: str, weights: dict[str, Tensor], steps: list[int], options: dict[str, Any]) -> None:
    """What a publisher does that may be killed."""
    with checkpoint.Publisher(root, durable=False, deadline_seconds=5.0, **options) as publisher:
        for step in steps:
            change(weights, step)
            publisher.publish(step, weights).result()


def follow_steps(root: str, kind: str, memory_bytes: int) -> None:
    """What a follower does that may be killed."""
    following = Following(root, kind, memory_bytes)
    following.follower.update()


def change(weights: Mapping[str, Tensor], step: int) -> None:
    """A step of the training: few elements, rows, or all of a tensor change, or none does."""
    draw = Random(step)
    for name, each in weights.items():
        way = draw.choice(["few", "few", "few", "rows", "all", "none"])
        if way == "few":
            train({name: each}, step, draw.choice([0.0, 0.001, 0.03]))
        elif way == "rows" and each.dim():
            each[draw.randrange(len(each)) :][:7] += 1
        elif way == "all":
            each += 0.5


class Life:
    """A life of a root; what it is told and does is drawn from a seed."""

    def __init__(self, root: str, seed: int) -> None:
        self.root, self.seed, self.draw = root, seed, Random(seed)
        self.told: list[str] = []
        self.seen: Counter[str] = Counter()
        self.weights, self.step = new_weights(seed), 0
        self.published: dict[str, dict[str, Tensor]] = {}  # by the name of the directory
        self.is_damaged = False
        self.options = {"anchor_every": self.draw.choice([2, 3, 5, 50]), "keep": self.draw.choice([1, 2, 4, None])}
        self.publisher: checkpoint.Publisher | None = None
        self.followings = [self.new_following(), self.new_following()]

    def live(self, events: int) -> Counter[str]:
        names = ["publish"] * 6 + ["update"] * 8 + ["older", "join", "restart", "back", "by_hand", "poll"]
        names += ["kill_publisher", "kill_follower", "flip", "lose"] if self.draw.random() < 0.7 else []
        try:
            self.publish()
            for _ in range(events):
                name = self.draw.choice(names)
                self.told.append(f"{name}@{self.step}")
                self.seen[name] += 1
                getattr(self, name)()
            self.end()
        except BaseException as error:
            error.add_note(f"seed {self.seed}: {' '.join(self.told)}")
            raise
        finally:
            self.close()
        return self.seen

    def new_following(self) -> Following:
        return Following(self.root, self.draw.choice(KINDS), self.draw.choice(MEMORIES))

    def close(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None

    def committed(self, step: int) -> Path | None:
        """The directory of a step, on the branch that was begun last."""
        found = [each.parent for each in Path(self.root).glob(f"step-{step:08d}*/manifest.json")]
        return max(found, key=lambda each: int(each.name.partition("-b")[2] or 0), default=None)

    def publish(self) -> None:
        if self.publisher is None:
            self.publisher = checkpoint.Publisher(self.root, durable=False, **self.options)
        for _ in range(self.draw.randint(1, 3)):
            for attempt in range(3):
                self.step += 1
                change(self.weights, self.step)
                try:
                    url = self.publisher.publish(self.step, self.weights).result().url
                    break
                except CheckpointError:  # what it refers to was lost: the next one does not refer to it
                    assert self.is_damaged and attempt < 2
            self.published[Path(url).name] = copied(self.weights)

    def update(self) -> None:
        self.check(self.draw.choice(self.followings))

    def check(self, each: Following, step: int | None = None) -> None:
        before, was = copied(each.app), each.follower.step
        try:
            report = each.follower.update(step)
        except CheckpointError as error:
            assert self.is_damaged or step is not None, f"an error without damage: {error}"
            if each.follower.step is None:
                try:
                    with each.follower.serving():
                        raise AssertionError("torn weights are served")
                except StateError:
                    return
            report = None
        if report is None:
            assert each.follower.step == was and same_bits(each.app, before)
            if not self.is_damaged and step is None:
                assert was == self.step, f"at {was}, and {self.step} is published"
            return
        assert each.follower.step == report.step and (step is None or report.step == step)
        assert same_bits(each.app, each.of(self.published[Path(report.url).name]))
        if not self.is_damaged:
            assert step is not None or report.step == self.step
            assert same_bits(each.app, full_load(report.url, each.app, **each.options))

    def poll(self) -> None:
        each = self.draw.choice(self.followings).follower
        found = each.poll()
        assert self.is_damaged or found == self.step or (found is None and each.step == self.step)

    def older(self) -> None:
        self.check(self.draw.choice(self.followings), self.draw.randint(max(self.step - 4, 1), max(self.step, 1)))

    def join(self) -> None:
        self.followings[self.draw.randrange(2)] = self.new_following()

    def by_hand(self) -> None:
        each = self.draw.choice(self.followings)
        name = self.draw.choice(["table", "bias"])
        tensor = each.app[f"model.{name}" if each.kind == "renamed" else name]
        before = tensor.clone()
        tensor.data[self.draw.randrange(len(tensor))] += 3.0
        self.publish()
        self.check(each)
        if self.is_damaged:  # it may have found nothing to take
            tensor.copy_(before)
            self.followings.remove(each)
            self.followings.append(self.new_following())

    def restart(self) -> None:
        self.close()
        self.publish()

    def back(self) -> None:
        """A training that starts again from an earlier step, and goes another way."""
        self.close()
        self.step = self.draw.randint(max(self.step - 3, 0), self.step)
        self.weights = new_weights(self.seed + 1000 + self.step)
        self.publish()

    def killed(self, function: Any, *args: Any) -> None:
        fault = Fault(0, self.draw.choice(CALLS), self.draw.randint(1, 25), "kill")
        try:
            run_ranks_outcomes(1, function, self.root, *args, faults=[fault], backend=None)
        except RanksFailed as error:
            if "no fault was reached" not in str(error):
                raise

    def kill_publisher(self) -> None:
        self.close()
        steps = list(range(self.step + 1, self.step + 5))
        self.killed(publish_steps, copied(self.weights), steps, self.options)
        weights, has_failed = copied(self.weights), False
        for step in steps:
            change(weights, step)
            directory = self.committed(step)
            if directory is None:
                has_failed = self.options["keep"] is None or has_failed
                continue
            assert not has_failed, "a step after one that was not committed"
            self.published[directory.name] = copied(weights)
            self.step, self.weights = step, copied(weights)

    def kill_follower(self) -> None:
        self.killed(follow_steps, self.draw.choice(KINDS), self.draw.choice(MEMORIES))

    def files(self) -> list[Path]:
        found: list[Path] = []
        for directory in Path(self.root).glob("step-*"):
            with suppress(FileNotFoundError):  # it is just being removed
                found += [path for path in directory.iterdir() if path.stat().st_size]
        return sorted(found, key=lambda path: (path.parent.name, path.name[12:]))  # after what is drawn for each save

    def flip(self) -> None:
        if files := self.files():
            path = self.draw.choice(files)
            flip(path, self.draw.randrange(path.stat().st_size))
            self.is_damaged = True

    def lose(self) -> None:
        if files := self.files():
            path = self.draw.choice(files)
            if self.draw.random() < 0.5:
                path.unlink(missing_ok=True)
            else:
                shutil.rmtree(path.parent, ignore_errors=True)  # the publisher may be removing it too
            self.is_damaged = True

    def end(self) -> None:
        """After any life all followers take what a new publisher publishes, and then its changes."""
        self.close()
        for _ in range(2):
            self.publish()
            for each in self.followings:
                try:
                    each.follower.update()
                except ShardoptError as error:
                    raise AssertionError(f"a whole step is not taken: {error}") from error
                assert each.follower.step == self.step
                assert same_bits(each.app, each.of(self.weights))


def play(root: str, seeds: Any, events: int) -> Counter[str]:
    """Plays lives; returns how often each event was seen."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        seen += Life(f"{root}/{seed}", seed).live(events)
        shutil.rmtree(f"{root}/{seed}", ignore_errors=True)
    return seen
