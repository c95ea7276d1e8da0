"""The branches of a run: which of its checkpoints are part of it, after it was taken back to an earlier step.

    branch-00001.json    {"format": "shardopt-branch", "branch": 1, "of": 0, "from_step": 200, "beyond": "set_aside", …}

A run begins on branch 0. Taken back to step 200 it goes on upon a branch of its own, whose record says what it was
taken back from. What was saved beyond that step stays where it is, and is no longer part of the run. So to take a run
back is to write one small file that is never changed again: it has happened or it has not, on any storage, and whoever
still saves for the run as it was before saves beside it.

Branch b with the record (of a, from step n) has all that a has up to step n, and what was saved on b beyond it. The run
is on the branch with the greatest number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from shardopt.checkpoint.format.constants import damaged, is_sealed, load_json, read_size, seal, without_duplicates
from shardopt.checkpoint.run.steps import Place
from shardopt.checkpoint.storage import Storage
from shardopt.errors import CheckpointError, Problem

Beyond = Literal["set_aside", "remove"]

_FORMAT = "shardopt-branch"
_RECORD = re.compile(r"branch-(\d{5,})\.json", re.ASCII)


class Branch(NamedTuple):
    """The record of a branch of a run: where it begins.

    Args:
        number: of the branch, from 1 on.
        of: the branch from which the run was taken back.
        from_step: up to which step it has what that one has.
        beyond: "set_aside" or "remove": the fate of checkpoints that were saved there after it.
    """

    number: int
    of: int
    from_step: int
    beyond: Beyond = "set_aside"

    @property
    def file_name(self) -> str:
        return f"branch-{self.number:05d}.json"

    def pack(self) -> bytes:
        """Returns the record's bytes."""
        members = {"branch": self.number, "of": self.of, "from_step": self.from_step, "beyond": self.beyond}
        return seal(json.dumps({"format": _FORMAT, **members})[:-1].encode())


class Branches(dict[int, Branch]):
    """The branches of a run by their numbers, but for branch 0, which has no record. Pure."""

    @property
    def current(self) -> int:
        """The branch that the run is on."""
        return max(self, default=0)

    def place(self, step: int, seen_from: int | None = None) -> Place:
        """Returns the place of the checkpoint of a step, whether there is one or not.

        Args:
            seen_from: the branch to look from; None for the one that the run is on.
        """
        branch = self.current if seen_from is None else seen_from
        while branch and step <= self[branch].from_step:
            branch = self[branch].of
        return Place(step, branch)

    def has(self, place: Place, seen_from: int | None = None) -> bool:
        """Whether a checkpoint at this place is part of a branch."""
        return self.place(place.step, seen_from) == place

    def is_removed(self, place: Place) -> bool:
        """Whether a place is no part of the run, and was to be removed when the run was taken back."""
        return not self.has(place) and any(
            each.beyond == "remove" and place.step > each.from_step and self.has(place, each.of)
            for each in self.values()
        )

    def taken_back(self, step: int, seen_from: int, beyond: Beyond) -> Branch:
        """Returns the record by which the run goes on from a step of a branch."""
        return Branch(self.current + 1, seen_from, step, beyond)


def branches_of(records: Iterable[Branch]) -> Branches:
    """Returns branches by their records, given in any order; each has to begin on an earlier one.

    Raises:
        CorruptionError: a record is missing.
    """
    branches = Branches({record.number: record for record in records})
    for number in range(1, branches.current + 1):
        if number not in branches:
            raise damaged("the run", f"no record of branch {number} of {branches.current}")
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
    where, data = f"{root.url}/{name}", root.read_record(name)
    if not is_sealed(data):
        raise damaged(where, "bytes that fail the seal at their end")
    record = decode_record(load_json(data, where, without_duplicates), where)
    if record.file_name != name:
        raise damaged(where, f"the record of branch {record.number}")
    return record


def decode_record(wire: Mapping[str, Any], where: str) -> Branch:
    """Decodes a record from untrusted JSON. Raises CorruptionError."""
    try:
        record = Branch(read_size(wire["branch"]), read_size(wire["of"]), read_size(wire["from_step"]), wire["beyond"])
    except (KeyError, ValueError) as error:
        raise damaged(where, f"no record of a branch ({error})") from None
    if wire.get("format") != _FORMAT or not record.of < record.number or record.beyond not in ("set_aside", "remove"):
        raise damaged(where, "no record of a branch")
    return record


def merge_records(local: Mapping[str, Branch], copies: Mapping[str, Branch], where: str) -> Branches:
    """Merges the records in the two roots of a run, of which either may lack some.

    Raises:
        CheckpointError: they contradict each other.
        CorruptionError: a record is missing in both.
    """
    for name in local.keys() & copies.keys():
        if local[name] != copies[name]:
            contradiction = f"{local[name]} and {copies[name]}"
            problem = Problem(name, contradiction, "one run in both roots", "give each run roots of its own")
            raise CheckpointError(f"the records of branches contradict each other in {where}", [problem])
    return branches_of({**local, **copies}.values())
