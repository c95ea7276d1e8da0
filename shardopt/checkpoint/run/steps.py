"""Names of the directories of a run's checkpoints: `step-00000500`, and `step-00000500-b2` on a branch."""

from __future__ import annotations

import re
from typing import NamedTuple

_NAME = re.compile(r"step-(\d{8,})(?:-b([1-9]\d*))?", re.ASCII)


class Place(NamedTuple):
    """The place of a checkpoint in a run: its step, and the branch that the run was on. The run begins on branch 0."""

    step: int
    branch: int = 0

    @property
    def name(self) -> str:
        """The name of its directory."""
        return f"step-{self.step:08d}" + (f"-b{self.branch}" if self.branch else "")


def place_of(name: str) -> Place | None:
    """Parses the name of a checkpoint's directory; None for any other name."""
    match = _NAME.fullmatch(name)
    place = Place(int(match[1]), int(match[2] or 0)) if match else None
    return place if place is not None and place.name == name else None


def by_numbers(name: str) -> tuple[tuple[int, int | str], ...]:
    """Returns a key that sorts names as the numbers in them: "step-9" before "step-10"."""
    sections = re.split(r"([0-9]+)", name)
    return tuple((1, text) if i % 2 == 0 else (0, int(text)) for i, text in enumerate(sections) if text)
