"""Where CPython's dicts and sets look for a key: whether keys from a file were chosen to be looked for over and over.

Hashes of texts are salted; those of ints, and of tuples of them, anyone can work out, and choose keys such that each
comes upon all the places that those before it have taken. Then n keys take a time of n². Here the places are walked
without them, and counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_MOST_PER_KEY, _SPARE = 32, 4096  # jumps from place to place; a few are made on average
_SIDE_BY_SIDE = 10  # places of a set that are looked at after one jump
_LARGE_SET = 50_000
_WORD = (1 << 64) - 1


class KeyProbes:
    """The table of one dict or set as it grows.

    Args:
        is_set: which of the two; their rules differ.
        keys: that are in it already.
    """

    def __init__(self, is_set: bool = False, keys: Iterable[Any] = ()) -> None:
        self._is_set = is_set
        self._slots: list[int | None] = [None] * 8
        self._used, self._left = 0, _SPARE
        self.add(keys)

    def add(self, keys: Iterable[Any]) -> None:
        """Adds keys, of which texts count for nothing. Raises ValueError where they were chosen to be slow."""
        for key in keys:
            if type(key) is str or type(key) is bytes:
                continue
            hashed = hash(key) & _WORD
            if self._slots[hashed & (len(self._slots) - 1)] == hashed:
                continue  # found at once
            self._left += _MOST_PER_KEY
            if self._insert(hashed):
                self._used += 1
                self._grow()

    def _insert(self, hashed: int) -> bool:
        """Puts a hash into its place; returns whether it is new."""
        slots, mask, width = self._slots, len(self._slots) - 1, _SIDE_BY_SIDE if self._is_set else 1
        at, perturb = hashed & mask, hashed
        for jump in range(self._left):
            for place in range(at, at + (width if at + width <= mask + 1 else 1)) if self._is_set else (at,):
                found = slots[place]
                if found is None or found == hashed:
                    self._left -= jump
                    slots[place] = hashed
                    return found is None
            perturb >>= 5
            at = (5 * at + perturb + 1) & mask
        raise ValueError("keys that were chosen to collide")

    def _grow(self) -> None:
        size = len(self._slots)
        if self._is_set:
            if self._used * 5 < (size - 1) * 3:
                return
            least = 1 + self._used * (2 if self._used > _LARGE_SET else 4)
        else:
            if self._used < 2 * size // 3:
                return
            least = 3 * self._used
        before = self._slots
        self._slots = [None] * max(1 << (least - 1).bit_length(), 8)
        for hashed in before:
            if hashed is not None:
                self._left += _MOST_PER_KEY
                self._insert(hashed)


def refuse_slow_keys(keys: list[Any], is_set: bool = False) -> None:
    """Raises ValueError where all keys of a dict or set were chosen to collide."""
    if any(type(key) is not str and key != number for number, key in enumerate(keys)):
        KeyProbes(is_set, keys)
