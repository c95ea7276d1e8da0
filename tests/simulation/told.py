"""What ranks were told by their calls, and which of it must be alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Told:
    """What a rank was told by one call.

    Args:
        call: which of the job's calls; the same on all ranks.
        text: the result, or the error.
        ok: whether it was a result.
    """

    job: int
    rank: int
    call: str
    begin: float
    end: float
    ok: bool
    text: str
    disturbed: bool


def have_left(all_told: Sequence[Told], told: Told) -> set[int]:
    """Returns the ranks of which a call has no word, or none before this one, as an error had them leave."""
    words = [each for each in all_told if (each.job, each.call) == (told.job, told.call)]
    came = {each.rank for each in words if not (_UNNAMED.search(each.text) and each.end <= told.end)}
    return {each.rank for each in all_told if each.job == told.job and not each.ok and not each.disturbed} - came


_UNNAMED = re.compile("did not say for")
"""What a rank says that wants to stop and has no answer; whoever is silent is known to those alone who wait for it."""
_LOST = re.compile(r"ranks? ([0-9, and]+?) (?:died|gave no sign of life|has ended|have ended)")


def meaning(told: Told, left: set[int]) -> str:
    """Returns what ranks must have been told alike: a result, or an error, or who was lost.

    That a rank is lost may be seen in different ways: its process has ended, where that is seen, or it is silent. Of
    several that have left on their own, each rank names the one that it was connected with.
    """
    if told.ok:
        return told.text
    kind, _, text = told.text.partition(": ")
    if _UNNAMED.search(text):
        return f"{kind}: lost some that had left"
    lost = _LOST.findall(text)
    if lost and left.issuperset(map(int, re.findall(r"\d+", " ".join(lost)))):
        return f"{kind}: lost some that had left"
    return f"{kind}: lost {lost}" if lost else re.sub(r"\S*/", "", told.text)
