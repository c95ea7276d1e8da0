"""Loading state in place, all or nothing: find everything that does not fit, and only then change anything.

A `LoadPlan` walks what is there (`into`) and what is offered (`offered`) side by side. It collects problems, copies
between local tensors, and replacements of plain values; `apply` carries the last two out if there is no problem.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardopt.errors import LayoutError, MismatchError, Problem
from shardopt.sharding.view import leaves_of, view_of


class Unmatched(NamedTuple):
    """What a load that is not strict passed over: keys that were not offered, and offered keys without a place."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class LoadPlan:
    """What a load would change, and what speaks against it.

    Args:
        strict: whether names on one side only are problems; otherwise they are only kept in `unmatched`.
        descriptions: whether tensors on the meta device may stand for what will be read later; such a tensor is
            compared by shape and dtype, and nothing is copied from it.
    """

    def __init__(self, strict: bool = True, descriptions: bool = False) -> None:
        self.strict = strict
        self.descriptions = descriptions
        self.problems: list[Problem] = []
        self.unmatched = Unmatched([], [])
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._values: list[tuple[MutableMapping[Any, Any], Any, Any]] = []

    def problem(self, key: str, found: str, required: str, remedy: str) -> None:
        """Notes one thing that does not fit."""
        self.problems.append(Problem(key, found, required, remedy))

    def missing(self, key: str, remedy: str) -> None:
        """Notes that nothing was offered for `key`."""
        self.unmatched.missing_keys.append(key)
        if self.strict:
            self.problem(key, "nothing", "a value, as this optimizer has one", remedy)

    def unexpected(self, key: str, remedy: str) -> None:
        """Notes that there is no place for what was offered as `key`."""
        self.unmatched.unexpected_keys.append(key)
        if self.strict:
            self.problem(key, "a value", "nothing, as this optimizer has no such key", remedy)

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
            raise MismatchError("the state does not fit this optimizer; nothing was changed", problems)

    def apply(self) -> None:
        """Carries the plan out: copies into tensors where they lie, replaces plain values."""
        self.check()
        with torch.no_grad():
            for into, offered in self._copies:
                into.copy_(offered)
        for mapping, name, value in self._values:
            mapping[name] = value

    def _merged(self, key: str, into: Any, offered: Any, remedy: str) -> Any:
        """What stands in the place of `into` afterwards: a tensor or mapping itself, or a plain value."""
        if _kind(into) != _kind(offered):
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
                return into if all(new is old for new, old in zip(merged, into, strict=True)) else type(into)(merged)
        else:
            return deepcopy(offered)
        return into

    def _tensor(self, key: str, into: Tensor, offered: Tensor) -> None:
        mine, theirs = leaves_of(into), leaves_of(offered)
        if len(mine) == len(theirs) and all(a is b for a, b in zip(mine, theirs, strict=True)):
            return  # handed its own tensor back: it is loaded already
        try:
            here, there = view_of(into, key), view_of(offered, key)
        except LayoutError as error:
            self.problems.extend(error.problems)
            return
        # A rank without local tensors may not know their dtype; the others see whether it differs.
        if mine and here.dtype != there.dtype:
            self.problem(key, f"dtype {there.dtype}", f"{here.dtype}", "convert it before it is loaded")
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
        self._copies.extend(zip((p.tensor for p in here.pieces), (p.tensor for p in there.pieces), strict=True))


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, Sequence) and any(isinstance(element, Tensor) for element in value):
        return "a sequence with tensors"
    return "a plain value"
