"""How the directories of a run's checkpoints are called: `step-00000500`, and `step-00000500-b2` on a branch."""

from __future__ import annotations

import re
from typing import NamedTuple

_NAME = re.compile(r"step-(\d{8,})(?:-b([1-9]\d*))?", re.ASCII)


class Place(NamedTuple):
    """Where a checkpoint of a run is: its step, and the branch that the run was on. The run begins on branch 0."""

    step: int
    branch: int = 0

    @property
    def name(self) -> str:
        """What its directory is called."""
        return f"step-{self.step:08d}" + (f"-b{self.branch}" if self.branch else "")


def place_of(name: str) -> Place | None:
    """Where a directory of that name is; None if it is none of a checkpoint."""
    found = _NAME.fullmatch(name)
    place = Place(int(found[1]), int(found[2] or 0)) if found else None
    return place if place is not None and place.name == name else None


def in_order(name: str) -> tuple[tuple[int, int | str], ...]:
    """A key by which names are sorted as their numbers are: "step-9" before "step-10"."""
    parts = re.split(r"([0-9]+)", name)
    return tuple((1, part) if i % 2 == 0 else (0, int(part)) for i, part in enumerate(parts) if part)
