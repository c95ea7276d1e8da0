"""The times at which islands exchange fragments of the parameters, and the parameters of each fragment.

    H local steps of an interval (`every`), K fragments, d steps of delay

Fragment k of 0..K-1 is due after local steps t with t mod H = (k + 1)·H // K, so that the last one is due at the end
of the interval, and with K = 1 all is. What is due at t is merged after step t + d. Source: Douillard et al.,
Streaming DiLoCo with overlapping communication (2025), arXiv:2501.18512; with K = 1 and d = 0 DiLoCo, arXiv:2311.08105.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from shardopt.errors import OptionError, Problem


@dataclass(frozen=True, slots=True)
class SyncSchedule:
    """The steps at which fragments are due, and at which they are merged; steps count from 1.

    Args:
        every: local steps from one exchange of a fragment to its next, at least 1.
        fragments: into how many the parameters are cut, 1 to `every`: at most one is due after a step.
        delay: local steps from the step at which a fragment is due to its merge, less than `every`.

    Raises:
        OptionError: one of them is out of its range.
    """

    every: int
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        ranges = {"every": (1, None), "fragments": (1, self.every), "delay": (0, self.every)}
        problems = []
        for name, (least, bound) in ranges.items():
            value = getattr(self, name)
            is_number = isinstance(value, int) and not isinstance(value, bool)
            inside = is_number and value >= least
            if bound is not None and inside and isinstance(bound, int):
                inside = value < bound if name == "delay" else value <= bound
            if not inside:
                required = f"a whole number, at least {least}"
                if bound is not None:
                    required += f", {'below' if name == 'delay' else 'at most'} every={bound!r}"
                problems.append(Problem(name, repr(value), required, "pass the number of local steps, or of fragments"))
        if problems:
            raise OptionError("invalid arguments of a semi-synchronous optimizer", problems, code="semi-sync")

    def due(self, step: int) -> int | None:
        """Returns the fragment whose exchange begins after this local step; None if there is none."""
        if step < 1:
            return None
        place = step % self.every or self.every
        candidate = -(-place * self.fragments // self.every) - 1
        return candidate if (candidate + 1) * self.every // self.fragments == place else None

    def merged(self, step: int) -> int | None:
        """Returns the fragment that is merged after this local step; None if there is none."""
        return self.due(step - self.delay)

    def in_flight(self, step: int) -> Iterator[int]:
        """Yields the fragments that are due but not merged by the end of this local step, oldest first."""
        for earlier in range(max(1, step - self.delay + 1), step + 1):
            fragment = self.due(earlier)
            if fragment is not None:
                yield fragment


def fragments_by_name(numels: Mapping[str, int], fragments: int) -> dict[str, int]:
    """Assigns parameters to fragments of about equal numbers of elements; returns name → fragment.

    Each is a run of neighbours by name (numbers in names count as numbers), so that it depends on names and global
    shapes alone, and is the same on any layout, whatever order and groups the parameters have.

    Args:
        numels: name → number of elements of the whole parameter, of all parameters of an island.
        fragments: how many; some get none where there are fewer parameters.
    """
    names = sorted(numels, key=_with_numbers)
    sizes = [max(1, numels[name]) for name in names]
    total = sum(sizes)
    middles = (end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True))
    return {name: int(middle * fragments / total) for name, middle in zip(names, middles, strict=True)}


def _with_numbers(name: str) -> list[tuple[int, int, str]]:
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part) for part in parts]
