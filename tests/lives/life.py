"""Lives: runs of a job over many starts, whose program, folder and ranks change, beside torch in one process.

Each start either comes to what the plain side has, or is refused by an error whose remedy, followed, then works.
"""

from __future__ import annotations

import copy
import logging
import os
import random
import re
import shutil
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardopt import checkpoint
from shardopt.checkpoint import Strictness
from shardopt.errors import MismatchError
from tests.lives.plain import Plain
from tests.lives.program import Program, same
from tests.lives.script import ALGORITHMS, GROUPS, SCHEDULES, Script

STEMS = ("layers", "blocks", "stages")


class Failed(AssertionError):
    """An event came to something else on a rank; the same error on all of them."""


class Life:
    """One job over all its starts.

    Args:
        seed: all choices follow from it, on every rank the same.
        root: a folder that all ranks see.
        meshes: by ranks; `groups`: the process group of the first so many ranks.
    """

    def __init__(self, seed: int, root: str, meshes: dict, groups: dict[int, object], seen: Counter[str]):
        self.draw, self.meshes, self.groups, self.seen = random.Random(seed), meshes, groups, seen
        self.home, self.moves, self.made, self.cycled = root, 0, 0, False
        self.root = f"{root}/run0"
        self.saved: dict[int, Plain] = {}
        self.told: list[str] = []  # every event, for the message of a failure
        draw = self.draw
        self.script = Script(
            draw.choice(sorted(ALGORITHMS)),
            draw.choice(["keyed", "keyed", "torch"]),
            draw.choice(sorted(GROUPS)),
            draw.choice(sorted(SCHEDULES)),
            averages=draw.random() < 0.3,
            ranks=draw.choice(sorted(groups)),
            layout=draw.randrange(99),
            ways=self.some_ways(),
        )

    def some_ways(self) -> dict[str, object]:
        return {"stage": self.draw.choice([None, "now", "lazy"]), "incremental": self.draw.random() < 0.4}

    # --- events ------------------------------------------------------------------------------------------------------

    def live(self, starts: int) -> None:
        self.start(fresh=True)
        for _ in range(starts):
            for _ in range(self.draw.randint(1, 3)):
                self.agreed(getattr(self, self.draw.choice(["train", "train", "record", "export", "aside", "back"])))
            self.agreed(self.train)
            self.agreed(self.end)
            for _ in range(self.draw.randint(0, 2)):
                getattr(self, self.draw.choice(CHANGES))()
            self.start()
        self.agreed(self.train)
        self.agreed(self.end)

    def agreed(self, event: Callable[[], None], *to_tell: object) -> list[object]:
        """Runs an event; if it failed on a rank all raise, so that nobody waits. Returns what rank 0 has `to_tell`."""
        failure = ""
        try:
            event()
        except Exception:
            failure = traceback.format_exc()
        said: list[object] = [(failure, *to_tell)]
        if dist.get_world_size() > 1:
            said *= dist.get_world_size()
            dist.all_gather_object(said, (failure, *to_tell))
        failures = [f"rank {rank}: {failure}" for rank, (failure, *_) in enumerate(said) if failure]
        if failures:
            raise Failed("\n".join(failures))
        return said[0][1:]

    @property
    def here(self) -> bool:
        """Whether this rank is one of the program's."""
        return dist.get_rank() < self.script.ranks

    def tell(self, text: str) -> None:
        self.told.append(text)
        self.seen[text.split()[0]] += 1

    def train(self) -> None:
        steps = self.draw.randint(1, 3)
        self.tell(f"train {steps}")
        for _ in range(steps):
            self.plain.step()
            if self.here:
                self.program.step()
                self.manager.save(self.program.app["step"], self.program.app)
            self.saved[self.plain.step_number] = self.plain.copied()
        self.check()

    def check(self) -> None:
        if self.here:
            self.program.check(self.plain)

    def record(self) -> None:
        """Puts into the app what grows: values and tensors of the program's own."""
        self.tell("record")
        number = float(self.plain.step_number)
        kind = self.draw.choice(["best", "list", "none"])
        for records in (self.plain.records, *([self.program.app["records"]] if self.here else ())):
            if kind == "best":
                records["best"] = {"step": number, "weights": torch.full((2, 3), number)}
            elif kind == "list":
                records.setdefault("losses", []).append(torch.tensor([number, 1.0]))
            else:
                records["note"] = None if number % 2 else {}

    def aside(self) -> None:
        """Saves beside the run, and loads that at once into a new process."""
        way = self.draw.choice(["save", "async now", "async lazy"])
        self.tell(f"aside {way}")
        path = self.another("aside")
        if self.here:
            if way == "save":
                checkpoint.save(path, self.program.app, process_group=self.group)
            else:
                checkpoint.async_save(path, self.program.app, process_group=self.group, stage=way.split()[1]).result()
            other = Program(self.script, self.meshes)
            checkpoint.load(path, other.app, init_state=True, process_group=self.group)
            other.check(self.plain)

    def another(self, name: str) -> str:
        """Returns a path for one more folder."""
        self.made += 1
        return f"{self.home}/{name}{self.made}"

    def export(self) -> None:
        """Converts the newest checkpoint of the run, and loads what came of it into a new process."""
        to = self.draw.choice(["shardopt", "dcp", "torch", "huggingface"])
        self.tell(f"export {to}")
        path = self.another("export")  # on all ranks, so that all give the next one the same name
        if not self.saved or not self.here:
            return
        self.manager.wait()
        step = max(self.saved)
        options = {"select": r"^model\."} if to == "huggingface" else {}
        checkpoint.convert(self.manager.path(step), path, to, process_group=self.group, durable=False, **options)
        program = copy.copy(self.saved[step].script)  # an earlier start's, if this one has not saved yet
        program.ranks, program.layout = self.script.ranks, self.script.layout
        other = Program(program, self.meshes)
        if to == "huggingface":
            checkpoint.load(path, {"model": other.model}, process_group=self.group)
            for name, param in other.params.items():
                same(param, self.saved[step].params[name], name)
        else:
            checkpoint.load(path, other.app, init_state=True, process_group=self.group)
            expected = self.saved[step].copied()
            if to == "dcp" and expected.records.get("note") == {}:  # which has no form for what is empty
                del expected.records["note"]
            other.check(expected)

    def back(self) -> None:
        """Takes the run back to an earlier step of this start's program, in the process as it is."""
        steps = sorted(self.saved)[-4:-1]
        if not steps or any(self.saved[s].script != self.plain.script for s in steps):
            return
        step = self.draw.choice(steps)
        self.tell(f"back {step}")
        if self.here:
            self.program.app["records"] = {}  # as at a start: what has grown is the program's own, and would be kept
            assert self.manager.restore(self.program.app, step=step, rename=self.script.rename) == step
        self.plain = self.saved[step].copied()
        self.saved = {each: plain for each, plain in self.saved.items() if each <= step}
        self.check()

    def end(self) -> None:
        if self.here:
            self.manager.close()

    def start(self, fresh: bool = False) -> None:
        """Starts the program as it is written now, and resumes the newest step."""
        self.tell(f"start {self.script}")
        self.cycled |= self.script.schedule == "one cycle"
        old = None if fresh else self.saved[max(self.saved)]
        self.group = self.groups[self.script.ranks]
        plain = Plain(self.script)
        followed: dict[str, object] = {}
        self.agreed(lambda: self.resume(old, plain, followed) if self.here else None)
        # What the remedies have changed, on ranks that have no part in the program too.
        followed, self.script = self.agreed(lambda: None, followed, self.script)
        late = "late" in followed
        plain = Plain(self.script)
        if old is not None:
            plain.resume(old, followed.get("keep", ()), without_schedule=late)
        if late:
            plain.make_schedule(last_epoch(old))
        self.plain = plain
        self.agreed(self.check)

    def resume(self, old: Plain | None, plain: Plain, followed: dict[str, object]) -> None:
        self.program = Program(self.script, self.meshes)
        self.manager = checkpoint.Manager(self.root, process_group=self.group, **self.script.ways)
        for attempt in range(4):
            options = {key: each for key, each in followed.items() if key in ("strict",)}
            try:
                step = self.manager.restore(self.program.app, rename=self.script.rename or None, **options)
                break
            except MismatchError as error:
                assert attempt < 3, f"refused although its remedies were followed: {followed}: {error}"
                expected = old is not None and self.may_be_refused(old, plain)
                assert expected, f"refused although nothing speaks against it: {error}"
                self.seen["refused"] += 1
                self.follow(error, followed, old)
        assert step == (0 if old is None else old.step_number), step
        assert old is None or attempt or plain.options_fit(old), "loaded, though options of one group differ"
        if "late" in followed:
            self.program.make_schedule(last_epoch(old))

    def may_be_refused(self, old: Plain, plain: Plain) -> bool:
        return (
            old.params.keys() != plain.params.keys()
            or old.script.averages != plain.script.averages
            or old.script.schedule != plain.script.schedule
            or (old.script.groups != plain.script.groups and plain.schedule is not None)
            or not plain.options_fit(old)
            # What another schedule had added goes along with torch's optimizers, and ours know nothing of it.
            or (self.cycled and old.script.optimizer != plain.script.optimizer)
        )

    def follow(self, error: MismatchError, followed: dict[str, object], old: Plain) -> None:
        """Does what the error advises, as a user would."""
        assert error.problems, error
        for problem in error.problems:
            remedy = problem.remedy
            self.told.append(f"  refused: {problem}")
            if "leave the schedule out of the app" in remedy:
                followed["late"] = True
                self.program = Program(self.script, self.meshes, late=True)
            choices = dict(re.findall(r'(missing|unexpected)="(ignore)"', remedy))
            if choices:
                if followed.get("strict") is not False:
                    followed["strict"] = replace(followed.get("strict") or Strictness(), **choices)
            elif "keep_options" in remedy:
                named = re.search(r'keep_options\("(\w+)"\)', remedy)
                option = named[1] if named else problem.key.rsplit(".", 1)[-1].removeprefix("initial_")
                self.program.optimizer.keep_options(option)
                followed.setdefault("keep", []).extend([option, f"initial_{option}"])
            elif "groups that were saved" in remedy or "as they were saved: " in remedy:
                self.script.groups = old.script.groups
                self.program = Program(self.script, self.meshes)
            elif "strict=False" in remedy:
                followed["strict"] = False
            else:
                raise AssertionError(f"no remedy to follow: {problem}") from error

    # --- what the author changes between two starts ------------------------------------------------------------------

    def renames(self) -> None:
        """Gives the layers' list another name, with a rule for older checkpoints."""
        at = STEMS.index(self.script.stem)
        if at + 1 < len(STEMS):
            self.script.rename = {**self.script.rename, rf"\b{STEMS[at]}\.": f"{STEMS[at + 1]}."}
            self.script.stem = STEMS[at + 1]
            self.tell("renames")

    def swaps(self) -> None:
        """Lets two layers change their names, with rules for older checkpoints."""
        stem, places = self.script.stem, self.script.places
        if any("\\.0\\." in rule for rule in self.script.rename):
            return
        rules = {rf"\b{stem}\.0\.": f"{stem}.x.", rf"\b{stem}\.1\.": f"{stem}.0.", rf"\b{stem}\.x\.": f"{stem}.1."}
        self.script.rename = {**self.script.rename, **rules}
        self.script.places = {**places, "l0": places["l1"], "l1": places["l0"]}
        self.tell("swaps")

    def reorders(self) -> None:
        """Lets the model make its parameters in another order."""
        self.script.params = tuple(self.draw.sample(self.script.params, len(self.script.params)))
        self.tell("reorders")

    def adds(self) -> None:
        if "l2" not in self.script.params:
            at = self.draw.randint(0, len(self.script.params))
            self.script.params = (*self.script.params[:at], "l2", *self.script.params[at:])
            self.tell("adds")

    def freezes(self) -> None:
        name = self.draw.choice(self.script.params)
        self.script.frozen = self.script.frozen ^ {name}
        self.tell(f"freezes {name}")

    def regroups(self) -> None:
        self.script.groups = self.draw.choice(sorted(GROUPS))
        self.tell(f"regroups {self.script.groups}")

    def reschedules(self) -> None:
        self.script.schedule = self.draw.choice(sorted(SCHEDULES))
        self.tell(f"reschedules {self.script.schedule}")

    def averages(self) -> None:
        self.script.averages = not self.script.averages
        self.tell("averages")

    def exchanges(self) -> None:
        """Takes torch's own optimizer in place of ours, or ours in place of torch's."""
        self.script.optimizer = "torch" if self.script.optimizer == "keyed" else "keyed"
        self.tell(f"exchanges {self.script.optimizer}")

    def resizes(self) -> None:
        self.script.ranks = self.draw.choice(sorted(self.groups))
        self.script.layout = self.draw.randrange(99)
        self.tell(f"resizes {self.script.ranks}")

    def saves_otherwise(self) -> None:
        self.script.ways = self.some_ways()
        self.tell("saves_otherwise")

    def moves_the_folder(self) -> None:
        dist.barrier()
        self.moves += 1
        moved = f"{self.home}/run{self.moves}"
        if dist.get_rank() == 0:
            os.rename(self.root, moved)
        dist.barrier()
        self.root = moved
        self.tell("moves_the_folder")


def last_epoch(old: Plain | None) -> int:
    """Returns what a schedule is begun again with: the steps that it had made, less one."""
    return -1 if old is None or old.schedule is None else old.schedule.last_epoch - 1


CHANGES = [
    name
    for name in (
        *("renames", "swaps", "reorders", "adds", "freezes", "regroups", "reschedules", "averages", "exchanges"),
        *("resizes", "saves_otherwise", "moves_the_folder"),
    )
]


def play(root: str, seeds: Sequence[int], starts: int = 3) -> Counter[str]:
    """Lives so many lives on the ranks of this job; returns how often what happened."""
    size = dist.get_world_size()
    groups: dict[int, object] = {n: dist.new_group(range(n)) for n in range(1, size)} | {size: None}
    meshes = {tuple(range(n)): DeviceMesh("cpu", list(range(n))) for n in range(1, size + 1)}
    seen: Counter[str] = Counter()
    log = logging.getLogger("shardopt")
    level = log.level
    with ExitStack() as stack:
        stack.enter_context(mock.patch("os.fsync"))  # no machine goes down here
        stack.enter_context(warnings.catch_warnings())
        stack.callback(log.setLevel, level)
        log.setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        for seed in seeds:
            life = Life(seed, f"{root}/{seed}", meshes, groups, seen)
            os.makedirs(life.home, exist_ok=True)
            try:
                life.live(starts)
            except Exception as error:
                raise AssertionError("\n".join([f"life {seed}: {error!r}", *life.told])) from error
            finally:
                if dist.get_rank() == 0:
                    shutil.rmtree(life.home, ignore_errors=True)
    return seen
