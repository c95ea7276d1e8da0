"""The notation of rules: names with placeholders, and the axes of tensors as words.

    "layers.{n}.experts.{e}.w1"      a name: {n} and {e} stand for a segment each, {*rest} for one or more
    "(g r d) i"                      axes: a dimension is an axis, or a product of several, the last one fastest
    "(g r+1+1 d) i"                  sections of a dimension: r of the first tensor, 1 each of the next two
    "v+_pad i"                       the same, with a section that no other tensor has
    "o ..."                          any further dimensions

The size of an axis that stands in several places is the same in all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple

from shardopt.checkpoint.rearrange.geometry import Digit
from shardopt.state.paths import Path, join

PAD = "_"
"""The prefix of axes that only one side has: new ones are zeros, stored ones are dropped."""
REST = "..."
_TOKEN = re.compile(r"\s*([A-Za-z_]\w*|\d+|\.\.\.|[()+])")
_PLACEHOLDER = re.compile(r"\{(\*?[A-Za-z]\w*)\}")


class Axis(NamedTuple):
    """An axis by its name; None is an axis of size 1."""

    name: str | None

    def __str__(self) -> str:
        return self.name or "1"


class Product(NamedTuple):
    """Axes that form one dimension together, the slowest first."""

    items: tuple[Item, ...]

    def __str__(self) -> str:
        return f"({' '.join(map(str, self.items))})"


class Sections(NamedTuple):
    """Axes that follow one another in one dimension."""

    items: tuple[Item, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.items))


Item = Axis | Product | Sections
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Axes:
    """The axes of a tensor, one item per dimension; one of the items may have several sections."""

    items: tuple[Item, ...]

    def __str__(self) -> str:
        return " ".join(map(str, self.items))

    @cached_property
    def sections(self) -> tuple[Item, ...] | None:
        """The sections of one of the dimensions; None if there are none."""
        return next((each.items for each in _walk(self.items) if isinstance(each, Sections)), None)

    @property
    def count(self) -> int:
        """The number of sections, each of which is matched with one on the other side."""
        return len(self.sections) if self.sections else 1

    def names(self, section: int) -> list[str]:
        """Returns the names of the axes of one section, including those shared by all sections."""
        return [each.name for each in _walk(self.items, section) if isinstance(each, Axis) and each.name]

    def is_pad(self, section: int) -> bool:
        """Whether a section has no counterpart on the other side."""
        chosen = self.sections[section] if self.sections else None
        return isinstance(chosen, Axis) and (chosen.name or "").startswith(PAD)

    def with_rest(self, count: int) -> Axes:
        """Returns the axes with "..." replaced by so many axes."""
        rest = tuple(Axis(f"{REST}{i}") for i in range(count))
        return Axes(tuple(one for each in self.items for one in (rest if each == Axis(REST) else (each,))))

    @property
    def has_rest(self) -> bool:
        return Axis(REST) in self.items

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Returns the shape of these axes, whose sizes must all be known."""
        return tuple(_known_size(item, sizes) for item in self.items)

    def digits(self, section: int, sizes: Sizes, fixed: Sizes) -> tuple[tuple[Digit, ...], ...]:
        """Returns one section as digits, for each dimension.

        Args:
            fixed: the indices of axes that are not free.
        """
        return tuple(tuple(_digits(item, section, sizes, fixed)) for item in self.items)


def _walk(items: Sequence[Item], section: int | None = None) -> Iterator[Item]:
    """Yields all items; of sections, all of them or a single one with its contents."""
    for item in items:
        yield item
        if isinstance(item, Product):
            yield from _walk(item.items, section)
        elif isinstance(item, Sections):
            yield from _walk(item.items if section is None else item.items[section : section + 1], section)


def size_of(item: Item, sizes: Sizes) -> int | None:
    """Returns the size of an item; None if it is not known yet."""
    if isinstance(item, Axis):
        return sizes.get(item.name) if item.name else 1
    each = [size_of(one, sizes) for one in item.items]
    known = [size for size in each if size is not None]
    if len(known) < len(each):
        return None
    return prod(known) if isinstance(item, Product) else sum(known)


def _known_size(item: Item, sizes: Sizes) -> int:
    size = size_of(item, sizes)
    assert size is not None  # the binding has asked for all of them
    return size


def infer(item: Item, size: int, sizes: dict[str, int]) -> bool:
    """Computes the size of an axis from that of its item; returns False if the sizes contradict it.

    Where more than one is unknown nothing is learned.
    """
    if isinstance(item, Axis):
        return size == 1 if item.name is None else sizes.setdefault(item.name, size) == size
    unknown = [one for one in item.items if size_of(one, sizes) is None]
    if not unknown:
        return size_of(item, sizes) == size
    known = [size_of(one, sizes) or 0 for one in item.items if one not in unknown]
    if any(one != unknown[0] for one in unknown):
        return True
    if isinstance(item, Sections):
        left = size - sum(known)
        return left >= 0 and left % len(unknown) == 0 and infer(unknown[0], left // len(unknown), sizes)
    factor = prod(known)
    return size == 0 if factor == 0 else size % factor == 0 and infer(unknown[0], size // factor, sizes)


def _digits(item: Item, section: int, sizes: Sizes, fixed: Sizes) -> Iterator[Digit]:
    if isinstance(item, Product):
        for one in item.items:
            yield from _digits(one, section, sizes, fixed)
    elif isinstance(item, Sections):
        each = [_known_size(one, sizes) for one in item.items]
        inner = tuple(_digits(item.items[section], section, sizes, fixed))
        yield Digit(sum(each), sum(each[:section]), each[section], None, inner)
    elif item.name is not None:
        size = sizes[item.name]
        if item.name in fixed:
            yield Digit(size, fixed[item.name], 1, None, ())
        else:
            yield Digit(size, 0, size, item.name, ())


def parse_side(text: str) -> tuple[Axes, ...]:
    """Parses the axes of one side: its tensors, separated by commas. Raises ValueError."""
    return tuple(_parse(each) for each in text.split(","))


def _parse(text: str) -> Axes:
    tokens, at = [], 0
    text = text.rstrip()
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError(f"{text[at:].strip()!r}, which is no axis")
        # A plus joins what stands right beside it or not, alike.
        tokens.append(found[1])
        at = found.end()
    items, rest = _items(tokens, 0)
    if rest < len(tokens):
        raise ValueError("a ')' without its '('")
    axes = Axes(tuple(items))
    if sum(isinstance(each, Sections) for each in _walk(items)) > 1:
        raise ValueError("sections ('+') in two places of one tensor")
    if Axis(REST) in _walk([each for each in items if each != Axis(REST)]) or list(items).count(Axis(REST)) > 1:
        raise ValueError("a '...' that is not a dimension of its own, or one of two")
    for section in range(axes.count):
        names = axes.names(section)
        if len(set(names)) < len(names):
            raise ValueError("an axis that stands twice in one tensor")
    pads = [each.name for each in _walk(items) if isinstance(each, Axis) and (each.name or "").startswith(PAD)]
    if any(Axis(name) not in (axes.sections or ()) for name in pads):
        raise ValueError(f"an axis that begins with {PAD!r} and is no section of its own")
    return axes


def _items(tokens: Sequence[str], at: int) -> tuple[list[Item], int]:
    """Parses items up to the end or a closing bracket; returns them and the end position."""
    items: list[Item] = []
    while at < len(tokens) and tokens[at] != ")":
        item, at = _one(tokens, at)
        sections = [item]
        while at < len(tokens) and tokens[at] == "+":
            item, at = _one(tokens, at + 1)
            sections.append(item)
        items.append(sections[0] if len(sections) == 1 else Sections(tuple(sections)))
    return items, at


def _one(tokens: Sequence[str], at: int) -> tuple[Item, int]:
    token = tokens[at] if at < len(tokens) else ""
    if token == "(":
        items, at = _items(tokens, at + 1)
        if at == len(tokens):
            raise ValueError("a '(' without its ')'")
        return (items[0] if len(items) == 1 else Product(tuple(items))), at + 1
    if token in ("", "+", ")"):
        raise ValueError("a '+' with nothing beside it")
    if token.isdigit() and token != "1":
        raise ValueError(f"the number {token}: an axis has a name, and its size stands in `sizes`")
    return Axis(None if token == "1" else token), at + 1


class Found(NamedTuple):
    """A key that contains a name: the text before the name, its placeholders, and which entry of its state it is."""

    before: str
    fields: Mapping[str, str]
    after: str
    name: str


@dataclass(frozen=True)
class Name:
    """The name of a parameter, with placeholders. Raises ValueError for an invalid name."""

    text: str

    def __post_init__(self) -> None:
        fields = _PLACEHOLDER.findall(self.text)
        plain = _PLACEHOLDER.sub("x", self.text)
        if not self.text or any(not each for each in plain.split(".")) or "{" in plain or "}" in plain:
            raise ValueError(f"the name {self.text!r}")
        if len(set(fields)) < len(fields):
            raise ValueError(f"a placeholder that stands twice in {self.text!r}")

    @cached_property
    def fields(self) -> tuple[str, ...]:
        return tuple(_PLACEHOLDER.findall(self.text))

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        pattern = "".join(
            (r"(.+)" if part.startswith("*") else r"([^.]+)") if i % 2 else re.escape(part)
            for i, part in enumerate(_PLACEHOLDER.split(self.text))
        )
        return re.compile(pattern)

    @cached_property
    def _literal(self) -> str:
        """The longest text that every such name contains, for a quick check of a key."""
        return max(_PLACEHOLDER.split(self.text)[::2], key=len)

    def find(self, key: str, path: Path) -> Found | None:
        """Finds the name at the end of a key, or between "state" and an entry.

        It begins where a part of the path does; within a path of one part, as those have that tell nothing, where any
        segment does.
        """
        if self._literal not in key:
            return None
        begins, in_state = _begins(key, path), False
        for begin in begins:
            in_state = in_state or key.endswith("state.", 0, begin)
            for end in _ends(key, begin, begins, len(path) == 1) if in_state else (len(key),):
                found = self._pattern.fullmatch(key, begin, end)
                if found is not None:
                    return Found(key[:begin], dict(zip(self.fields, found.groups(), strict=True)), key[end:], found[0])
        return None

    def fill(self, fields: Mapping[str, str]) -> str:
        """Returns the name with these texts in place of its placeholders."""
        return _PLACEHOLDER.sub(lambda found: fields[found[1]], self.text)


def _begins(key: str, path: Path) -> list[int]:
    if len(path) == 1:
        return [0, *(i + 1 for i, character in enumerate(key) if character == ".")]
    return [*accumulate((len(str(part)) + 1 for part in path[:-1]), initial=0)]


def _ends(key: str, begin: int, begins: Sequence[int], is_flat: bool) -> list[int]:
    """Returns where a name below "state" may end, the likeliest first, as {*rest} takes all that is before.

    What follows is an entry: further parts of the path, or the last segment of a path of one part.
    """
    segments = [i for i in range(len(key) - 1, begin, -1) if key[i] == "."]
    if is_flat:
        return [*segments, len(key)]
    return [*(each - 1 for each in begins if each > begin), len(key), *segments]


def renamed_path(path: Path, begin: int, length: int, name: str) -> Path:
    """Returns the path of a key after a name in it, of so many characters from `begin` on, was replaced.

    The name stays one part of the path where it was one, as in the state of modules and optimizers.
    """
    at, end = 0, begin + length
    for i, part in enumerate(path):
        text = str(part)
        if begin <= at + len(text):
            if isinstance(part, str) and end <= at + len(text):
                return (*path[:i], text[: begin - at] + name + text[end - at :], *path[i + 1 :])
            key = join(path)
            return (*path[:i], *(key[at:begin] + name + key[end:]).split("."))
        at += len(text) + 1
    raise AssertionError("a name that is not within its key")
