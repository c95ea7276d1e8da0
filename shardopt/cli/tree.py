"""Arranges keys in a tree of modules, with sums, and shows repeated layers once. Pure: no I/O, no text except names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from shardopt.checkpoint.run.branches import by_numbers
from shardopt.cli.output import runs_of

_DEEPEST = 64  # levels; a key of more dots keeps the rest in its last name
_MOST_NAMES = 8  # between braces
_NUMBERED = re.compile(r"(\D*)(0|[1-9][0-9]{0,17})(\D.*)?", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Leaf:
    """The tensor or value of one key, as it is shown.

    Args:
        key: the whole of it.
        alike: equal for keys that are shown as one where they repeat.
        text: what is shown beside the name.
        notes: what is shown at the end of the line.
        dtype: of a tensor; "" for a value, which has no sums either.
        elements, nbytes: of a tensor; 0 for one that is tied to another, whose bytes are counted there.
        details: lines below.
    """

    key: str
    alike: Hashable
    text: str
    notes: str = ""
    dtype: str = ""
    elements: int = 0
    nbytes: int = 0
    details: tuple[str, ...] = ()


class Sums(NamedTuple):
    """The sums over all tensors below a module."""

    tensors: int = 0
    elements: int = 0
    nbytes: int = 0
    dtypes: tuple[str, ...] = ()

    def times(self, count: int) -> Sums:
        """Returns the sums of this many such modules."""
        return Sums(self.tensors * count, self.elements * count, self.nbytes * count, self.dtypes)


@dataclass(slots=True)
class Node:
    """A name in the tree: a module, a leaf, or both."""

    leaf: Leaf | None = None
    children: dict[str, Node] = field(default_factory=dict)
    sums: Sums = field(default_factory=Sums)
    alike: int = 0
    """Equal for nodes with equal leaves under equal names."""


class Row(NamedTuple):
    """A line of the tree.

    Args:
        level: of indentation.
        name: below the row that it stands under; "layers.{0..31}" for 32 of them.
        copies: how many nodes it stands for.
        node: the first of them.
        left_out: how many rows of its kind are not shown; then `node` says nothing.
    """

    level: int
    name: str
    copies: int
    node: Node
    left_out: int = 0


def tree_of(leaves: Iterable[Leaf]) -> Node:
    """Returns the root of the tree of all keys."""
    root = Node()
    for leaf in leaves:
        node = root
        for name in leaf.key.split(".", _DEEPEST - 1):
            node = node.children.setdefault(name, Node())
        node.leaf = leaf
    _sum(root, {})
    return root


def _sum(node: Node, numbers: dict[Hashable, int]) -> None:
    """Computes sums, and which nodes are alike, from below."""
    node.children = dict(sorted(node.children.items(), key=lambda item: by_numbers(item[0])))
    for child in node.children.values():
        _sum(child, numbers)
    of_all = [child.sums for child in node.children.values()]
    if node.leaf is not None and node.leaf.dtype:
        of_all.insert(0, Sums(1, node.leaf.elements, node.leaf.nbytes, (node.leaf.dtype,)))
    dtypes = dict.fromkeys(dtype for each in of_all for dtype in each.dtypes)
    node.sums = Sums(
        sum(each.tensors for each in of_all),
        sum(each.elements for each in of_all),
        sum(each.nbytes for each in of_all),
        tuple(dtypes),
    )
    within = tuple((name, child.alike) for name, child in node.children.items())
    node.alike = numbers.setdefault((node.leaf and node.leaf.alike, within), len(numbers))


def rows_of(root: Node, depth: int | None = None, most_children: int | None = None, collapse: bool = True) -> list[Row]:
    """Returns the lines of a tree.

    Args:
        depth: how many levels are shown; None for all.
        most_children: how many lines are shown below one node, those with the most bytes; None for all.
        collapse: whether neighbours that differ in a number of their names alone, and are alike, are one line.
    """
    return [*_rows(root, 0, depth, most_children, collapse)]


def _rows(node: Node, level: int, depth: int | None, most: int | None, collapse: bool) -> Iterator[Row]:
    if depth is not None and level >= depth:
        return
    entries = [_chained(*entry, collapse) for entry in _entries(node, collapse)]
    shown = entries
    if most is not None and len(entries) > most:
        largest = sorted(range(len(entries)), key=lambda i: -entries[i][1] * entries[i][2].sums.nbytes)
        shown = [entries[i] for i in sorted(largest[: most - 1])]
    for name, count, child in shown:
        yield Row(level, name, count, child)
        yield from _rows(child, level + 1, depth, most, collapse)
    if len(shown) < len(entries):
        yield Row(level, "", 0, node, len(entries) - len(shown))


def _chained(name: str, count: int, node: Node, collapse: bool) -> tuple[str, int, Node]:
    """Joins a module with its only child: "attn.wq.weight"."""
    while node.leaf is None and len(entries := _entries(node, collapse)) == 1:
        ((child_name, child_count, node),) = entries
        name, count = f"{name}.{child_name}", count * child_count
    return name, count, node


def _entries(node: Node, collapse: bool) -> list[tuple[str, int, Node]]:
    """Returns the children of a node with their names; merges those that are alike."""
    if not collapse:
        return [(name, 1, child) for name, child in node.children.items()]
    return [(_name_of_all(names), len(names), node.children[names[0]]) for names in _alike_children(node)]


def _alike_children(node: Node) -> Iterable[list[str]]:
    """Returns the names of a node's children, grouped if they are alike.

    Names in a group differ only in a number, or the children are modules.
    """
    alike: defaultdict[Hashable, list[str]] = defaultdict(list)
    for name, child in node.children.items():
        match = _NUMBERED.fullmatch(name)
        around = (match[1], match[3]) if match else name if child.leaf is not None else None
        alike[around, child.alike].append(name)
    return alike.values()


def _name_of_all(names: list[str]) -> str:
    """Returns one name for several: "layer{0..31}", "{wk,wq,wv}"."""
    if len(names) == 1:
        return names[0]
    matches = [match for name in names if (match := _NUMBERED.fullmatch(name))]
    if matches:
        numbers = ranges_text([int(match[2]) for match in matches])
        return f"{matches[0][1]}{{{numbers}}}{matches[0][3] or ''}"
    shown = (
        names if len(names) <= _MOST_NAMES else [*names[: _MOST_NAMES - 1], f"… {len(names) - _MOST_NAMES + 1} more"]
    )
    return f"{{{','.join(shown)}}}"


def ranges_text(numbers: Sequence[int]) -> str:
    """Returns ascending numbers in a shell's brace form: "0..31", "0..30..2", "0..3,7"."""
    step = numbers[1] - numbers[0] if len(numbers) > 2 else 1
    if step > 1 and all(after - before == step for before, after in pairwise(numbers)):
        return f"{numbers[0]}..{numbers[-1]}..{step}"
    return ",".join(str(first) if first == last else f"{first}..{last}" for first, last in runs_of(numbers))


def patterns_of(names: Iterable[str]) -> list[str]:
    """Returns names as a few patterns: "layers.{0..31}.norm.weight"."""
    return [*names_by_pattern(dict.fromkeys(names))]


def names_by_pattern(names: Mapping[str, Hashable]) -> dict[str, list[str]]:
    """Returns a few patterns, each with the names that it matches.

    Args:
        names: each with what those of one pattern have in common.
    """
    root = tree_of(Leaf(name, alike, "") for name, alike in names.items())

    def walk(group: Sequence[tuple[str, Node]], before: str) -> Iterator[tuple[str, list[str]]]:
        for alike in _alike_children(group[0][1]):  # all of the group have the same
            pattern = before + _name_of_all(alike)
            inner = [(f"{path}{name}", node.children[name]) for path, node in group for name in alike]
            if inner[0][1].leaf is not None:
                yield pattern, [path for path, _ in inner]
            yield from walk([(f"{path}.", node) for path, node in inner], f"{pattern}.")

    return dict(walk([("", root)], ""))
