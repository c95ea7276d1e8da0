"""Merges tables of layouts by kinds of ranks, which have equal tables. Has no tensors.

K kinds, each with all of its ranks; a table: key → layout, each distinct layout written once
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from shardopt.sharding.layout import Layout


class LayoutWriter:
    """Numbers layouts, and writes each distinct one once."""

    def __init__(self) -> None:
        self._number_of: dict[int, int] = {}  # by identity: thousands of tensors share one object
        self._number_of_text: dict[str, int] = {}
        self._written: list[Layout] = []  # alive, as long as they are known by identity

    def number(self, layout: Layout) -> int:
        """Returns the number of a layout in `texts`."""
        number = self._number_of.get(id(layout))
        if number is None:
            text = json.dumps(layout.to_json(), separators=(",", ":"))
            number = self._number_of_text.setdefault(text, len(self._number_of_text))
            self._number_of[id(layout)] = number
            self._written.append(layout)
        return number

    @property
    def texts(self) -> list[str]:
        """The layouts, by number, as texts, which a reader compares before it parses any."""
        return list(self._number_of_text)


class LayoutReader:
    """Reads layouts that several ranks wrote, equal ones as one object."""

    def __init__(self) -> None:
        self._layouts: dict[str, Layout] = {}

    def read(self, texts: Iterable[str]) -> list[Layout]:
        """Reads the `texts` of one writer."""
        for text in texts:
            if text not in self._layouts:
                self._layouts[text] = Layout.from_json(json.loads(text))
        return [self._layouts[text] for text in texts]


class KindMerger:
    """Merges the layouts that kinds of ranks have of one tensor; caches results, as thousands of tensors share layouts.

    Args:
        kinds: the ranks of each kind, ascending.
    """

    def __init__(self, kinds: Sequence[tuple[int, ...]]) -> None:
        self.kinds = kinds
        self._ranks_of: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._sets: dict[tuple[int, ...], frozenset[int]] = {}
        self._holders: dict[int, tuple[Layout, frozenset[int]]] = {}
        self._held: dict[tuple[int, tuple[int, ...]], tuple[Layout, Layout]] = {}
        self._merged: dict[tuple[tuple[int, int], ...], tuple[Sequence[Layout], Layout]] = {}

    def ranks_of(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Returns all ranks of some kinds, ascending; the same object for the same kinds."""
        ranks = self._ranks_of.get(numbers)
        if ranks is None:
            ranks = tuple(sorted(chain.from_iterable(self.kinds[number] for number in numbers)))
            self._ranks_of[numbers] = ranks
            self._sets[numbers] = frozenset(ranks)
        return ranks

    def first_holder(self, layout: Layout, number: int) -> int | None:
        """Returns the first rank of a kind that holds a part of a tensor with this layout; None if none does."""
        ranks = self.kinds[number]
        if layout.holders is None:
            return ranks[0]
        holders = self._holders_in(layout)
        return next((rank for rank in ranks if rank in holders), None)

    def merge(self, layouts: Mapping[int, Layout], key: str) -> Layout:
        """Merges the layouts that kinds, by number, have for one key.

        Raises:
            LayoutError: as `Layout.merge`.
        """
        case = tuple((number, id(layout)) for number, layout in layouts.items())
        if case not in self._merged:
            kinds = [(layout, self.kinds[number]) for number, layout in layouts.items()]
            self._merged[case] = list(layouts.values()), Layout.merge_kinds(kinds, key)
        return self._merged[case][1]

    def held_by(self, layout: Layout, numbers: tuple[int, ...]) -> Layout:
        """Returns the layout without holders of other kinds, and without boxes that only those hold."""
        case = id(layout), numbers
        if case not in self._held:
            self._held[case] = layout, self._held_by(layout, numbers)
        return self._held[case][1]

    def _held_by(self, layout: Layout, numbers: tuple[int, ...]) -> Layout:
        self.ranks_of(numbers)
        ranks = self._sets[numbers]
        if layout.holders is None or self._holders_in(layout) <= ranks:
            return layout
        holders = {
            box: [rank for rank in by if rank in ranks] for box, by in zip(layout.boxes, layout.holders, strict=True)
        }
        return Layout.from_holders(layout.shape, {box: by for box, by in holders.items() if by})

    def _holders_in(self, layout: Layout) -> frozenset[int]:
        known = self._holders.get(id(layout))
        if known is None:
            known = self._holders[id(layout)] = layout, frozenset(chain.from_iterable(layout.holders or ()))
        return known[1]


def components_of(groups: Iterable[tuple[int, ...]], count: int) -> list[int]:
    """Returns the component of each of `count` kinds; kinds of one group, such as those that share a key, are in one.

    Components are numbered from 0, in the order of their first kinds.
    """
    parent = list(range(count))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    for group in groups:
        for number in group[1:]:
            one, other = root(group[0]), root(number)
            parent[max(one, other)] = min(one, other)
    numbers: dict[int, int] = {}
    return [numbers.setdefault(root(number), len(numbers)) for number in range(count)]
