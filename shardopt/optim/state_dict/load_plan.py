"""Loading state in place, all or nothing: find everything that does not fit, and only then change anything.

A `LoadPlan` walks what is there (`into`) and what is offered (`offered`) side by side. It collects problems, copies
between local tensors, and replacements of plain values; `apply` carries the last two out if there is no problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from copy import copy, deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardopt.casts import lost_in_cast
from shardopt.errors import LayoutError, MismatchError, Problem
from shardopt.sharding.view import local_tensors, view_of

_PLAIN = "a plain value"


class Unmatched(NamedTuple):
    """What a load that is not strict passed over: keys that were not offered, and offered keys without a place."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class LoadPlan:
    """What a load would change, and what speaks against it.

    Args:
        strict: whether names on one side only are problems; otherwise they are only kept in `unmatched`.
        convert_dtype: whether floating-point values may be offered in another dtype.
        descriptions: whether tensors on the meta device may stand for what will be read later; such a tensor is
            compared by shape and dtype, and nothing is copied from it.
        into: what is loaded into, in errors.
    """

    def __init__(
        self,
        strict: bool = True,
        convert_dtype: bool = False,
        descriptions: bool = False,
        into: str = "optimizer",
    ) -> None:
        self._into = into
        self.strict = strict
        self.convert_dtype = convert_dtype
        self.descriptions = descriptions
        self.problems: list[Problem] = []
        self.unmatched = Unmatched([], [])
        self.loaded_groups: list[dict[str, Any]] = []  # whose options are all taken from what is offered
        self.overridden: list[Any] = []  # options that the code gives otherwise, `options.Overridden`
        self.algorithms: list[str] = []  # what was said of groups that another algorithm has saved
        self.opt_key = ""
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._values: list[tuple[MutableMapping[Any, Any], Any, Any]] = []
        self._afterwards: list[Callable[[], None]] = []

    def part(self, opt_key: str) -> LoadPlan:
        """A view of this plan for a part whose names have "opt_key." before them in the whole; "" for none."""
        part = copy(self)  # shares the lists
        part.opt_key = ".".join(filter(None, (self.opt_key, opt_key)))
        return part

    def seen_as(self, name: str) -> str:
        """A parameter's name in the whole, or that of another key under "state" or "param_groups"."""
        return f"{self.opt_key}.{name}" if self.opt_key else name

    def section(self, key: str) -> str:
        """The key under which all of "state" or "param_groups" stands in the whole."""
        return f"{key}.{self.opt_key}" if self.opt_key else key

    def problem(self, key: str, found: str, required: str, remedy: str) -> None:
        """Notes one thing that does not fit."""
        self.problems.append(Problem(key, found, required, remedy))

    def missing(self, key: str, remedy: str) -> None:
        """Notes that nothing was offered for `key`."""
        self.unmatched.missing_keys.append(key)
        if self.strict:
            self.problem(key, "nothing", f"a value, as this {self._into} has one", remedy)

    def unexpected(self, key: str, remedy: str) -> None:
        """Notes that there is no place for what was offered as `key`."""
        self.unmatched.unexpected_keys.append(key)
        if self.strict:
            self.problem(key, "a value", f"nothing, as this {self._into} has no such key", remedy)

    def mapping(self, key: str, into: MutableMapping[Any, Any], offered: Any, remedy: str) -> None:
        """Plans to load a mapping into another, which keeps its tensors, inner mappings and lists.

        Args:
            key: what stands before the names of the entries in errors.
            into: what is to be changed.
            offered: what the values are taken from; a problem if it is not a mapping.
            remedy: the advice for names on one side only.
        """
        if not isinstance(offered, Mapping):
            self.problem(key, _kind(offered), "a mapping", "offer what state_dict() gives")
            return
        for name in into.keys() - offered.keys():
            self.missing(f"{key}.{name}", remedy)
        for name in offered.keys() - into.keys():
            self.unexpected(f"{key}.{name}", remedy)
        for name in [name for name in into if name in offered]:
            old = into[name]
            new = self._merged(f"{key}.{name}", old, offered[name], remedy)
            if new is not old:
                self._values.append((into, name, new))

    def check(self) -> None:
        """Raises what was found.

        Raises:
            MismatchError: lists every problem; nothing was changed.
        """
        if self.problems:
            problems = sorted(self.problems, key=lambda problem: problem.key)
            raise MismatchError(f"the state does not fit this {self._into}; nothing was changed", problems)

    def apply(self) -> None:
        """Carries the plan out: copies into tensors where they lie, replaces plain values."""
        self.check()
        with torch.no_grad():
            for into, offered in self._copies:
                into.copy_(offered)
        for mapping, name, value in self._values:
            mapping[name] = value
        for call in self._afterwards:
            call()

    def then(self, call: Callable[[], None]) -> None:
        """Plans a call for when tensors and values are in place."""
        self._afterwards.append(call)

    def _merged(self, key: str, into: Any, offered: Any, remedy: str) -> Any:
        """What stands in the place of `into` afterwards: a tensor, mapping or object itself, or a plain value."""
        if is_stateful(into):
            self._by_itself(key, into, offered, remedy)
        elif _kind(into) != _kind(offered):
            self.problem(key, _kind(offered), _kind(into), "load a checkpoint of the same optimizer and options")
        elif isinstance(into, Tensor):
            self._tensor(key, into, offered)
        elif isinstance(into, MutableMapping):
            self.mapping(key, into, offered, remedy)
        elif _kind(into) == "a sequence with tensors":
            if len(into) != len(offered):
                self.problem(key, f"{len(offered)} elements", f"{len(into)}", "load a checkpoint of the same options")
            else:
                merged = [self._merged(f"{key}.{i}", *pair, remedy) for i, pair in enumerate(zip(into, offered))]  # noqa: B905  # lengths are equal here
                return into if all(new is old for new, old in zip(merged, into, strict=True)) else like(into, merged)
        else:
            return deepcopy(offered)
        return into

    def _by_itself(self, key: str, into: Any, offered: Any, remedy: str) -> None:
        """Plans a load of what has the form of an object's state, which the object then takes itself."""
        mine = dict(into.state_dict())
        self.mapping(key, mine, offered, remedy)
        self.then(lambda: into.load_state_dict(mine))

    def _tensor(self, key: str, into: Tensor, offered: Tensor) -> None:
        mine, theirs = local_tensors(into), local_tensors(offered)
        if len(mine) == len(theirs) and all(a is b for a, b in zip(mine, theirs, strict=True)):
            return  # handed its own tensor back: it is loaded already
        try:
            here, there = view_of(into, key), view_of(offered, key)
        except LayoutError as error:
            self.problems.extend(error.problems)
            return
        # A rank without local tensors may not know their dtype; the others see whether it differs.
        if mine and here.dtype != there.dtype and not (self.convert_dtype and _both_floating(here.dtype, there.dtype)):
            self.problem(key, f"dtype {there.dtype}", f"{here.dtype}", "convert it first, or pass convert_dtype=True")
        if here.shape != there.shape:
            self.problem(
                key,
                f"shape {there.shape}",
                f"{here.shape}",
                "load what was saved for a parameter of this global shape; shapes are never broadcast",
            )
            return
        if any(leaf.is_meta for leaf in theirs):
            if not self.descriptions:
                self.problem(key, "a tensor on the meta device", "one with values", "read its values first")
            return
        held, given = ([str(piece.box) for piece in view.pieces] for view in (here, there))
        if held != given:
            self.problem(
                key,
                f"the elements {', '.join(given) or 'none'} on this rank",
                f"{', '.join(held) or 'none'}",
                "load through shardopt.checkpoint, which reshards, or redistribute it first",
            )
            return
        for mine_piece, their_piece in zip(here.pieces, there.pieces, strict=True):
            self._check_cast(key, mine_piece.tensor, their_piece.tensor)
            self._copies.append((mine_piece.tensor, their_piece.tensor))

    def _check_cast(self, key: str, into: Tensor, offered: Tensor) -> None:
        """Notes a number that the dtype of `into` cannot hold."""
        if into.dtype == offered.dtype or not _both_floating(into.dtype, offered.dtype):
            return
        lost = lost_in_cast(offered, into.dtype)
        if lost is not None:
            largest = torch.finfo(into.dtype).max
            self.problem(
                key,
                f"{lost} in {offered.dtype}",
                f"numbers that {into.dtype} can hold, of at most {largest}",
                "keep this state in a wider dtype",
            )


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple) and any(_kind(element) != _PLAIN for element in value):
        return "a sequence with tensors"
    return _PLAIN


def is_stateful(value: Any) -> bool:
    """Whether it is an object that gives and takes state of its own."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def like(sequence: Any, elements: Iterable[Any]) -> Any:
    """A list or (named) tuple of the same kind with other elements."""
    return type(sequence)(*elements) if hasattr(sequence, "_fields") else type(sequence)(elements)


def _both_floating(here: torch.dtype, there: torch.dtype) -> bool:
    return here.is_floating_point and there.is_floating_point
