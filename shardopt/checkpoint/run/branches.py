"""The checkpoints of a run by step and branch, and which belong to it after it was taken back to an earlier step.

    step-00000500, step-00000500-b2       the directories of a step on branch 0 and on branch 2
    branch-00001.json    {"format": "shardopt-branch", "branch": 1, "of": 0, "from_step": 200, "beyond": "set_aside", …}

A run begins on branch 0. Taken back to step 200 it resumes on a branch of its own, whose record says what it was
taken back from. What was saved beyond that step stays where it is, and is no longer part of the run. So to take a run
back is to write one small file that is never changed again: it has happened or it has not, on any storage, and whoever
still saves for the run as it was before saves beside it.

Branch b with the record (of a, from step n) has all that a has up to step n, and what was saved on b beyond it. The run
is on the branch with the greatest number.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, Literal, NamedTuple

from shardopt.checkpoint.format.constants import (
    damaged,
    pack_record,
    read_size,
    unpack_record,
)
from shardopt.checkpoint.storage import Storage
from shardopt.checkpoint.text import how_steps_rise
from shardopt.errors import CheckpointError, CheckpointExistsError, CorruptionError, Problem

Newer = Literal["abandon", "remove"]

_log = logging.getLogger("shardopt.checkpoint")
_FORMAT = "shardopt-branch"
_MOST_LOOKED_INTO = 50  # directories, for a hint
_RECORD = re.compile(r"branch-(\d{5,})\.json", re.ASCII)
_NAME = re.compile(r"step-(\d{8,})(?:-b([1-9]\d*))?", re.ASCII)
_AS_STORED: Mapping[Newer, str] = {"abandon": "set_aside", "remove": "remove"}


class CheckpointId(NamedTuple):
    """A checkpoint of a run: its step, and the branch it was saved on. A run begins on branch 0."""

    step: int
    branch: int = 0

    @property
    def name(self) -> str:
        """The name of the checkpoint's directory."""
        return f"step-{self.step:08d}" + (f"-b{self.branch}" if self.branch else "")


def parse_id(name: str) -> CheckpointId | None:
    """Parses the name of a checkpoint's directory; None for any other name."""
    match = _NAME.fullmatch(name)
    found = CheckpointId(int(match[1]), int(match[2] or 0)) if match else None
    return found if found is not None and found.name == name else None


def ids_in(names: Iterable[str]) -> list[CheckpointId]:
    """Returns the checkpoints whose directories have these names, ascending; leaves out other names."""
    return sorted(id for id in map(parse_id, names) if id is not None)


def is_a_checkpoint(url: str, of: str) -> CheckpointError:
    """Returns the error for the root of a run that is a checkpoint itself; `of` is by whom, for the message."""
    parent, is_step = os.path.dirname(url), parse_id(os.path.basename(url)) is not None
    remedy = f"give Manager {parent}, of which this is a step" if is_step else "give Manager another directory"
    remedy += "; to begin with what it holds, checkpoint.load(url, app) where restore has returned 0"
    required = "the directory that a run's checkpoints are in, or are to be in"
    problem = Problem(url, f"a checkpoint{of}", required, remedy)
    return CheckpointError("a run cannot be kept in a checkpoint", [problem], code="run-root")


def runs_near(root: str, but: Collection[str]) -> list[str]:
    """Returns the local directories beside or within a path that hold a run, one level up or down, but some.

    That are its own directories, the one that it is in, and those there whose names differ from its own by little.
    """
    root = os.path.abspath(root)
    parent, own = os.path.split(root)

    def within(path: str) -> list[str]:
        return [*islice(sorted(each.name for each in os.scandir(path) if each.is_dir()), _MOST_LOOKED_INTO)]

    found, near = list[str](), list[str]()
    with suppress(OSError):
        found += [os.path.join(root, name) for name in within(root)]
    with suppress(OSError):
        near = [parent, *(os.path.join(parent, name) for name in within(parent) if name != own and _like(name, own))]
    steps: list[str] = []
    for path in [each for each in (*found, *near) if each not in but]:
        with suppress(OSError):
            steps += [path] if ids_in(os.listdir(path)) else []
    return steps


def _like(name: str, other: str) -> bool:
    """Whether names differ only in case, dashes and an s at the end: "checkpoint" and "checkpoints"."""
    one, two = (each.lower().replace("-", "_").rstrip("s") for each in (name, other))
    return one == two


def record_file(branch: int) -> str:
    """Returns the name of a branch's record."""
    return f"branch-{branch:05d}.json"


def by_numbers(name: str) -> tuple[tuple[int, int | str], ...]:
    """Returns a sort key that orders names by the numbers in them: "step-9" before "step-10"."""
    sections = re.split(r"([0-9]+)", name)
    return tuple((1, text) if i % 2 == 0 else (0, int(text)) for i, text in enumerate(sections) if text)


class Branch(NamedTuple):
    """The record of a branch of a run, which says where it begins.

    Args:
        number: of the branch, from 1 on.
        of: the branch from which the run was taken back.
        from_step: up to which step it has what that one has; -1 where it has nothing of that: a stream began again
            with step 0, or a run of which hosts were away.
        newer: what becomes of checkpoints that were saved there after it: "abandon" leaves them.
    """

    number: int
    of: int
    from_step: int
    newer: Newer = "abandon"

    @property
    def file_name(self) -> str:
        return record_file(self.number)

    def pack(self) -> bytes:
        """Returns the record's bytes."""
        beyond = _AS_STORED[self.newer]
        return pack_record(_FORMAT, branch=self.number, of=self.of, from_step=self.from_step, beyond=beyond)

    def warn_of(self, left: Collection[int], removed: Collection[int] = ()) -> None:
        """Logs which steps leave the run as it continues on this branch, if any: who only looks at one loads it.

        Args:
            left: of the branch that the run was on, the one before this.
            removed: of `of`.
        """
        for steps in filter(None, (removed, left)):
            first, last = min(steps), max(steps)
            which = f"step {last}" if first == last else f"{len(steps)} steps from {first} to {last}"
            then = f"restore(app, step={last}, branch={self.number - 1}) would go on from there"
            then = "to be removed" if steps is removed else then
            _log.warning("the run goes back to step %d, and leaves %s behind: %s", self.from_step, which, then)


class Branches(dict[int, Branch]):
    """The branches of a run by number, except branch 0, which has no record. Pure."""

    @property
    def current(self) -> int:
        """The branch that the run is on."""
        return max(self, default=0)

    def id_of(self, step: int, seen_from: int | None = None) -> CheckpointId:
        """Returns the checkpoint id of a step, whether or not it exists.

        Args:
            seen_from: the branch to look from; None for the one that the run is on.
        """
        branch = self.current if seen_from is None else seen_from
        while branch and step <= self[branch].from_step:
            branch = self[branch].of
        return CheckpointId(step, branch)

    def has(self, id: CheckpointId, seen_from: int | None = None) -> bool:
        """Whether a checkpoint belongs to a branch."""
        return self.id_of(id.step, seen_from) == id

    def is_removed(self, id: CheckpointId) -> bool:
        """Whether a checkpoint left the run, to be removed, when the run was taken back."""
        return not self.has(id) and any(
            each.newer == "remove" and id.step > each.from_step and self.has(id, each.of) for each in self.values()
        )


def branches_of(records: Iterable[Branch], ids: Iterable[CheckpointId] = (), where: str = "the run") -> Branches:
    """Returns the branches in these records, in any order; each must begin on an earlier branch.

    Args:
        ids: checkpoints that were listed with the records, or before: of the branch of each there is a record.
        where: the run's URL.

    Raises:
        CorruptionError: a record is missing, as in a copy of the directories of steps alone. Nobody knows then which
            steps are of the run.
    """
    branches = Branches({record.number: record for record in records})
    newest = max(ids, key=lambda id: (id.branch, id.step), default=CheckpointId(0))
    last = max(branches.current, newest.branch)
    for number in range(1, last + 1):
        if number not in branches:
            begin = "begin a run in another directory"
            if newest.branch:
                begin += f", with checkpoint.load of {newest.name} or another step"
            if number > branches.current:
                begin += f"; or move {newest.name} away, with all others above branch {branches.current}"
            remedy = f"copy {record_file(number)} from where the steps are from; if it is lost, {begin}"
            problem = Problem(where, f"no record of branch {number} of {last}", record_file(number), remedy)
            raise CorruptionError("nobody knows which steps are of the run", [problem])
    return branches


def read_records(root: Storage, names: Iterable[str], known: Mapping[str, Branch]) -> dict[str, Branch]:
    """Reads the records under a root; returns them by file name.

    Args:
        names: of all files and directories under the root.
        known: those that have been read before; they never change.

    Raises:
        CorruptionError: one is not what was written.
    """
    return {name: known.get(name) or _read(root, name) for name in names if _RECORD.fullmatch(name)}


def _read(root: Storage, name: str) -> Branch:
    where = f"{root.url}/{name}"
    record = decode_branch(unpack_record(root.read_record(name), where), where)
    if record.file_name != name:
        raise damaged(where, f"the record of branch {record.number}")
    return record


def decode_branch(wire: Mapping[str, Any], where: str) -> Branch:
    """Decodes a record from untrusted JSON. Raises CorruptionError."""
    try:
        newer: Newer = {stored: newer for newer, stored in _AS_STORED.items()}[wire["beyond"]]
        from_step = -1 if wire["from_step"] == -1 else read_size(wire["from_step"])
        record = Branch(read_size(wire["branch"]), read_size(wire["of"]), from_step, newer)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(where, f"no record of a branch ({error})") from None
    if wire.get("format") != _FORMAT or not record.of < record.number:
        raise damaged(where, "no record of a branch")
    return record


def merge_records(by_root: Mapping[str, Mapping[str, Branch]], ids: Iterable[CheckpointId] = ()) -> Branches:
    """Merges the records in the roots of a run, by their URLs; each root may lack some.

    Args:
        ids: the checkpoints in the roots, as for `branches_of`.

    Raises:
        CheckpointError: they contradict each other.
        CorruptionError: a record is missing in all of them.
    """
    merged: dict[str, Branch] = {}
    where = " and ".join(by_root)
    for name, record in (each for records in by_root.values() for each in records.items()):
        if merged.setdefault(name, record) != record:
            found = f"{merged[name]} and {record}"
            problem = Problem(name, found, "one run in both roots", "give each run roots of its own")
            raise CheckpointError(
                f"the records of branches contradict each other in {where}", [problem], code="run-root"
            )
    return branches_of(merged.values(), ids, where)


def not_rising(last: CheckpointId, url: str) -> CheckpointExistsError:
    """Returns the error of a save below the last saved or restored step, which all ranks raise: one may be astray.

    Args:
        url: of the lower step.
    """
    found, remedy = f"a save after step {last.step} was saved or restored", how_steps_rise(f"delete({last.step}), and")
    return CheckpointExistsError("steps must rise", [Problem(url, found, f"a step from {last.step} on", remedy)])


def not_restored(above: CheckpointId, id: CheckpointId, url: str) -> CheckpointError:
    """Returns the error of a first save below a checkpoint of a root that no restore has looked into.

    Args:
        url: of the root.
    """
    remedy = (
        "call restore(app) before the first save, which resumes the run; restore(app, step=...) for an earlier step; "
        "to begin a new run give Manager another root, or remove this one. A second Manager of a job that resumes: "
        "restore the first one before, and delete(step) what is above the step that it resumed"
    )
    found, required = f"step {above.step}, which this job neither saved nor restored", f"no step above {id.step}"
    return CheckpointError(
        "a run that was not restored would be mixed with this one",
        [Problem(url, found, required, remedy)],
        code="run-root",
    )
