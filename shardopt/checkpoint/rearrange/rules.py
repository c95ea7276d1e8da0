"""Rules that turn the tensors of a checkpoint into those of an app that lays them out differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from shardopt.checkpoint.rearrange.notation import Axes, Name, parse_side
from shardopt.errors import OptionError, Problem


class Section(NamedTuple):
    """One section on one side of a rule: the number of its tensor, and its number in that."""

    tensor: int
    section: int


@dataclass(frozen=True)
class Rule:
    """Maps stored tensors to new ones: renamed, transposed, permuted, joined, split, stacked, padded or sliced.

        Rule("h.{n}.mlp.c_fc.weight", "layers.{n}.up.weight", "i o -> o i")
        Rule("layers.{n}.experts.{e}.w1", "layers.{n}.experts.w1", "o i -> e o i")
        Rule(("q", "k", "v"), "qkv", "(g r d) i, (g d) i, (g d) i -> (g r+1+1 d) i", {"g": 8, "d": 128})
        Rule("embed.weight", "embed.weight", "v i -> v+_pad i", {"v": 50257, "_pad": 47})

    Each is as good the other way round (`inverse`). It holds for what stands under the name of a parameter, whatever is
    before it ("model.", "optimizer.param_groups."), and for state of optimizers that has the parameter's shape. Where
    the checkpoint tells where names of parameters begin, as ours do, a name is all of one; else it may be its end.

    Args:
        old: names of stored parameters, or the only one. `{n}` is one segment of a name, and has the same text in all
            names of a rule; `{*rest}` is one segment or more. One that stands on one side alone is an axis of the other
            side: the numbers from 0 on.
        new: the names that they get, likewise.
        axes: the axes of the old tensors, in their order, and of the new ones (`notation`). Sections, of which the axes
            of a tensor have one where there is no "+", are matched in their order. Sections whose axis begins with "_"
            are matched with nothing: new ones are zeros, old ones are left out. "" renames tensors of any shape.
        sizes: of axes that do not follow from the shapes of the old tensors. Those that are needed the other way round
            may stand here, too; all are checked.

    Raises:
        OptionError: the names or axes do not fit together.
    """

    old: str | tuple[str, ...]
    new: str | tuple[str, ...]
    axes: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            fault = self._fault()
        except ValueError as error:
            fault = str(error)
        if fault:
            problem = Problem(str(self), fault, "names and axes that fit together", "see shardopt.checkpoint.rearrange")
            raise OptionError("a rule for rearranging does not work", [problem], code="bad-rules")

    def inverse(self) -> Rule:
        """Returns the rule that maps the new tensors back to the old ones."""
        old, arrow, new = self.axes.partition("->")
        return Rule(self.new, self.old, f"{new.strip()} {arrow} {old.strip()}" if arrow else "", self.sizes)

    def __str__(self) -> str:
        old, new = (each if isinstance(each, str) else " and ".join(each) for each in (self.old, self.new))
        return f"the rule {old} -> {new}" + (f" ({self.axes})" if self.axes else "")

    @cached_property
    def old_names(self) -> tuple[Name, ...]:
        return _names(self.old)

    @cached_property
    def new_names(self) -> tuple[Name, ...]:
        return _names(self.new)

    @cached_property
    def old_axes(self) -> tuple[Axes, ...]:
        return parse_side(self.axes.partition("->")[0])

    @cached_property
    def new_axes(self) -> tuple[Axes, ...]:
        return parse_side(self.axes.partition("->")[2])

    @cached_property
    def free_fields(self) -> tuple[str, ...]:
        """The placeholders that all names have; the rule is applied once for each set of their texts."""
        fields = [set(name.fields) for name in (*self.old_names, *self.new_names)]
        return tuple(each for each in self.old_names[0].fields if all(each in some for some in fields))

    def axes_in(self, name: Name) -> tuple[str, ...]:
        """Returns the placeholders of a name that are axes on the other side."""
        return tuple(each for each in name.fields if each not in self.free_fields)

    @cached_property
    def matches(self) -> tuple[tuple[Section, Section], ...]:
        """The pairs of old and new sections that are equal."""
        return tuple(zip(_matched(self.old_axes), _matched(self.new_axes), strict=True))

    @cached_property
    def pads(self) -> tuple[Section, ...]:
        """The new sections that are zeros."""
        return _sections(self.new_axes, are_pads=True)

    @cached_property
    def dropped(self) -> tuple[Section, ...]:
        """The old sections that are left out."""
        return _sections(self.old_axes, are_pads=True)

    def _fault(self) -> str:
        """Returns what is wrong with the rule, or nothing; may raise ValueError instead."""
        names = (*self.old_names, *self.new_names)
        if not (self.old_names and self.new_names):
            return "no name on one side"
        if any(type(size) is not int or size < 0 for size in self.sizes.values()):
            return f"the sizes {dict(self.sizes)}"
        if not self.axes.strip():
            one_each = len(names) == 2 and set(names[0].fields) == set(names[1].fields)
            return "" if one_each else "no axes, and more than one name, or other placeholders, on a side"
        if self.axes.count("->") != 1:
            return f"the axes {self.axes!r}"
        for side, axes in ((self.old_names, self.old_axes), (self.new_names, self.new_axes)):
            if len(side) != len(axes):
                return f"{len(side)} names with the axes of {len(axes)} tensors"
        if len(_matched(self.old_axes)) != len(_matched(self.new_axes)):
            return f"{len(_matched(self.old_axes))} old sections for {len(_matched(self.new_axes))} new ones"
        for old, new in self.matches:
            old_name, new_name = self.old_names[old.tensor], self.new_names[new.tensor]
            sides = []
            for name, axes, section in ((old_name, self.old_axes, old), (new_name, self.new_axes, new)):
                sides.append(sorted([*self.axes_in(name), *axes[section.tensor].names(section.section)]))
            if sides[0] != sides[1] or len(set(sides[0])) < len(sides[0]):
                return f"the old axes {sides[0]} for the new ones {sides[1]}"
        if any(field.startswith("*") for name in names for field in self.axes_in(name)):
            return "a {*...} that is an axis"
        return ""


@dataclass(frozen=True)
class Tie:
    """A parameter that is also another one: stored once, loaded under both names. Both names are new ones.

    The other way round, the second is left out where it is equal to the first, and refused where it is not; unless
    another rule names it. Optimizer state has just the first name, as optimizers have it of tied parameters.

    Args:
        name: of the parameter that there is.
        also: the other name; where there is such a parameter already, nothing is changed.
        reverse: made by `inverse`; both are old names then.
    """

    name: str
    also: str
    reverse: bool = False

    def __post_init__(self) -> None:
        Rule(self.name, self.also)  # raises where one of them is none

    def inverse(self) -> Tie:
        return replace(self, reverse=not self.reverse)

    def __str__(self) -> str:
        return f"the tie {self.name} = {self.also}"


@dataclass(frozen=True)
class Drop:
    """Drops a stored parameter or buffer, with its state and options: one that can be recomputed, or a mask.

    Args:
        name: as in `Rule`.
    """

    name: str

    def __post_init__(self) -> None:
        Rule(self.name, self.name)

    def __str__(self) -> str:
        return f"dropping {self.name}"


AnyRule = Rule | Tie | Drop


def inverse(rules: Sequence[AnyRule]) -> list[AnyRule]:
    """Returns the rules that map the new tensors back to the old ones, except dropped ones.

    Args:
        rules: as for `load(rearrange=)`.
    """
    return [rule.inverse() for rule in reversed(rules) if not isinstance(rule, Drop)]


def _names(names: str | tuple[str, ...]) -> tuple[Name, ...]:
    return tuple(map(Name, (names,) if isinstance(names, str) else names))


def _sections(axes: Sequence[Axes], are_pads: bool) -> tuple[Section, ...]:
    return tuple(
        Section(tensor, section)
        for tensor, each in enumerate(axes)
        for section in range(each.count)
        if each.is_pad(section) == are_pads
    )


def _matched(axes: Sequence[Axes]) -> tuple[Section, ...]:
    return _sections(axes, are_pads=False)
