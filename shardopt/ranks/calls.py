"""The name of a call that ranks make together, as errors print it and rounds compare it."""

from __future__ import annotations

import os
from dataclasses import dataclass

_PREPOSITIONS = ("of", "from", "in", "to", "with")


@dataclass(frozen=True, slots=True)
class Call:
    """The call that a round belongs to.

    Args:
        text: for error messages: "saving /runs/7/step-00000010".
        same: what must be equal on all ranks, as hosts may have a disk under other paths: "saving step-00000010".
    """

    text: str
    same: str

    def __str__(self) -> str:
        return self.text


def call_on(doing: str, url: str | os.PathLike[str]) -> Call:
    """Makes the call for a path or URL; only its last segment is the same on all ranks."""
    path = os.fspath(url)
    return Call(f"{doing} {path}", f"{doing} {path.rstrip('/').rpartition('/')[2]}")


def as_call(what: str | Call) -> Call:
    """Makes a call from a text. Words with a slash (paths, URLs) are not compared, nor a preposition before one."""
    if isinstance(what, Call):
        return what
    same: list[str] = []
    for word in what.split():
        if "/" not in word:
            same.append(word)
        elif same and same[-1] in _PREPOSITIONS:
            same.pop()
    return Call(what, " ".join(same))
