"""Loads state in place, all or nothing: first finds everything that does not fit, and only then changes anything.

A `LoadPlan` walks the live state (`into`) and the loaded one (`offered`) side by side. It collects problems, copies
between local tensors, and replacements of plain values; `apply` carries the last two out if there is no problem.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, MutableMapping
from copy import copy, deepcopy
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from shardopt.errors import LayoutError, MismatchError, Problem
from shardopt.runtime.signals import LOADING, is_part_of
from shardopt.sharding.view import local_tensors, view_of
from shardopt.state.casts import lost_in_cast
from shardopt.state.state import is_stateful, like

_PLAIN = "a plain value"


class Unmatched(NamedTuple):
    """Keys that a non-strict load skipped: missing keys, and offered keys without a place."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(slots=True)
class LoadPlan:
    """The changes that a load will make, and its problems.

    Args:
        strict: whether names on one side only are problems; otherwise they are only kept in `unmatched`.
        convert_dtype: whether floating-point values may be offered in another dtype.
        descriptions: whether tensors on the meta device may stand for values that will be read later; such a tensor is
            compared by shape and dtype, and nothing is copied from it.
        into: the kind of object that is loaded into, in errors.
        convert_state: whether state that is stored in another form is made into the one that is here.
        conversions: changes of entries, `low_precision.conversion.Conversion`.
        loaded_options: groups, and what loads, with its full value.
        overridden: options to which the code gives other values, `options.Overridden`.
        algorithms: notes on groups that another algorithm has saved.
        rounded_anew: parameters whose state an earlier version rounded to nearest.
        filled: for `options.replaced`.
        opt_key: the prefix of the names in the whole; "" for none.
    """

    strict: bool = True
    convert_dtype: bool = False
    descriptions: bool = False
    into: str = "optimizer"
    convert_state: bool = False
    conversions: list[Any] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    unmatched: Unmatched = field(default_factory=lambda: Unmatched([], []))
    loaded_options: list[tuple[dict[str, Any], set[str]]] = field(default_factory=list)
    overridden: list[Any] = field(default_factory=list)
    algorithms: list[str] = field(default_factory=list)
    rounded_anew: list[str] = field(default_factory=list)
    filled: dict[int, Any] = field(default_factory=dict)
    opt_key: str = ""
    _copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _values: list[tuple[MutableMapping[Any, Any], Any, Any]] = field(default_factory=list)
    _afterwards: list[Callable[[], None]] = field(default_factory=list)

    def child(self, opt_key: str) -> LoadPlan:
        """Returns this plan for a child whose names have the prefix "opt_key." in the whole; "" for no prefix."""
        child = copy(self)  # shares the lists
        child.opt_key = ".".join(filter(None, (self.opt_key, opt_key)))
        return child

    def seen_as(self, name: str) -> str:
        """Returns a parameter's name in the whole, or the name of another key under "state" or "param_groups"."""
        return f"{self.opt_key}.{name}" if self.opt_key else str(name)

    def section(self, key: str) -> str:
        """Returns the key of the whole section "state" or "param_groups" in the whole."""
        return f"{key}.{self.opt_key}" if self.opt_key else key

    def problem(self, key: str, found: str, required: str, remedy: str) -> None:
        """Notes one thing that does not fit."""
        self.problems.append(Problem(key, found, required, remedy))

    def missing(self, key: str, remedy: str) -> None:
        """Notes that nothing was offered for `key`."""
        self.unmatched.missing_keys.append(key)
        if self.strict:
            self.problem(key, "nothing", f"a value, as this {self.into} has one", remedy)

    def unexpected(self, key: str, remedy: str) -> None:
        """Notes that there is no place for the value offered as `key`."""
        self.unmatched.unexpected_keys.append(key)
        if self.strict:
            self.problem(key, "a value", f"nothing, as this {self.into} has no such key", remedy)

    def unmatched_names(self, prefix: str, into: Collection[Any], offered: Collection[Any], remedy: str) -> None:
        """Notes the names that only one side has.

        Args:
            prefix: stands before the names in errors.
            into: names that have a place.
            offered: names that have a value.
            remedy: the advice for names on one side only.
        """
        for name in sorted(set(into).difference(offered), key=str):
            self.missing(f"{prefix}{name}", remedy)
        for name in sorted(set(offered).difference(into), key=str):
            self.unexpected(f"{prefix}{name}", remedy)

    def mapping(self, key: str, into: MutableMapping[Any, Any], offered: Any, remedy: str) -> None:
        """Plans to load a mapping into another one, which keeps its tensors, inner mappings and lists.

        Args:
            key: stands before the names of the entries in errors.
            into: the mapping that is to be changed.
            offered: the values; a problem if it is not a mapping.
            remedy: the advice for names on one side only.
        """
        if not isinstance(offered, Mapping):
            self.problem(key, _kind(offered), "a mapping", "offer what state_dict() gives")
            return
        if {*into} != {*offered}:
            self.unmatched_names(f"{key}.", into.keys(), offered.keys(), remedy)
        for name in [name for name in into if name in offered]:
            old = into[name]
            new = self._merge(f"{key}.{name}", old, offered[name], remedy)
            if new is not old:
                self._values.append((into, name, new))

    def check(self) -> None:
        """Raises the problems found.

        Raises:
            MismatchError: lists every problem; nothing was changed.
        """
        if self.problems:
            problems = sorted(self.problems, key=lambda problem: problem.key)
            raise MismatchError(
                f"the state does not fit this {self.into}; nothing was changed", problems, code="optimizer-state"
            )

    @is_part_of(LOADING)
    def apply(self) -> None:
        """Carries out the plan: copies into tensors in place, replaces plain values."""
        self.check()
        written = {_memory(into) for into, _ in self._copies}
        with torch.no_grad():
            # Clones of what is offered from memory that is loaded into, so that the copies' order does not matter.
            copies = [
                (into, offered.clone() if _memory(offered) in written and not _is_same(into, offered) else offered)
                for into, offered in self._copies
            ]
            for into, offered in copies:
                into.copy_(offered)
        for mapping, name, value in self._values:
            mapping[name] = value
        for call in self._afterwards:
            call()

    def then(self, call: Callable[[], None]) -> None:
        """Plans a call for after tensors and values are loaded."""
        self._afterwards.append(call)

    def _merge(self, key: str, into: Any, offered: Any, remedy: str) -> Any:
        """Plans to load one value; returns what to store: the same tensor, mapping or object, or a new plain value."""
        if isinstance(into, Tensor):
            # As torch before 1.12 stored counters and rates.
            is_number = type(offered) is int or (type(offered) is float and into.is_floating_point())
            if is_number and view_of(into).shape == ():
                offered = torch.tensor(offered, dtype=into.dtype, device="cpu")
            if isinstance(offered, Tensor):
                self._tensor(key, into, offered)
            else:
                self.problem(key, _kind(offered), "a tensor", "load a checkpoint of the same optimizer and options")
        elif is_stateful(into):
            state = dict(into.state_dict())
            self.mapping(key, state, offered, remedy)
            self.then(lambda: into.load_state_dict(state))
        elif _kind(into) != _kind(offered):
            self.problem(key, _kind(offered), _kind(into), "load a checkpoint of the same optimizer and options")
        elif isinstance(into, MutableMapping):
            self.mapping(key, into, offered, remedy)
        elif _kind(into) == "a sequence with tensors":
            if len(into) != len(offered):
                self.problem(key, f"{len(offered)} elements", f"{len(into)}", "load a checkpoint of the same options")
            else:
                pairs = zip(into, offered, strict=True)
                merged = [self._merge(f"{key}.{i}", *pair, remedy) for i, pair in enumerate(pairs)]
                return into if all(new is old for new, old in zip(merged, into, strict=True)) else like(into, merged)
        else:
            return deepcopy(offered)
        return into

    def _tensor(self, key: str, into: Tensor, offered: Tensor) -> None:
        plain = _is_plain(into) and _is_plain(offered) and into.dtype == offered.dtype and into.shape == offered.shape
        if not plain or into.is_meta or (offered.is_meta and not self.descriptions):
            self._tensor_by_pieces(key, into, offered)
        elif into is not offered and not offered.is_meta:
            self._copies.append((into, offered))

    def _tensor_by_pieces(self, key: str, into: Tensor, offered: Tensor) -> None:
        """Plans to load a tensor that is sharded, or that does not fit."""
        own, given = local_tensors(into), local_tensors(offered)
        if len(own) == len(given) and all(map(is_, own, given)):
            return  # it is offered itself: it is loaded already
        try:
            here, there = view_of(into, key), view_of(offered, key)
        except LayoutError as error:
            self.problems.extend(error.problems)
            return
        # A rank without local tensors may not know their dtype; the others see whether it differs.
        if own and here.dtype != there.dtype and not (self.convert_dtype and _both_floating(here.dtype, there.dtype)):
            self.problem(
                key,
                f"dtype {there.dtype}",
                f"{here.dtype}",
                "convert it first, or pass convert_dtype=True; to a load of a checkpoint Strictness(dtype='cast')",
            )
        if here.shape != there.shape:
            self.problem(
                key,
                f"shape {there.shape}",
                f"{here.shape}",
                "load what was saved for a parameter of this global shape; shapes are never broadcast. Or begin "
                f'without it: checkpoint.load(..., skip=r"{re.escape(key.rpartition(".")[0])}\\.")',
            )
            return
        if any(local.is_meta for local in given):
            if not self.descriptions:
                self.problem(key, "a tensor on the meta device", "one with values", "read its values first")
            return
        held, boxes = ([str(piece.box) for piece in view.pieces] for view in (here, there))
        if held != boxes:
            self.problem(
                key,
                f"the elements {', '.join(boxes) or 'none'} on this rank",
                f"{', '.join(held) or 'none'}",
                "load through shardopt.checkpoint, which reshards, or redistribute it first",
            )
            return
        for into_piece, piece in zip(here.pieces, there.pieces, strict=True):
            self._check_cast(key, into_piece.tensor, piece.tensor)
            self._copies.append((into_piece.tensor, piece.tensor))

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


def _memory(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _is_same(into: Tensor, offered: Tensor) -> bool:
    """Whether both are the same elements, of tensors of one shape and memory."""
    return into.data_ptr() == offered.data_ptr() and into.stride() == offered.stride() and into.dtype == offered.dtype


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is plain memory, or meta, so that shape and dtype describe it; no other class is asked further."""
    return type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple) and any(_kind(element) != _PLAIN for element in value):
        return "a sequence with tensors"
    return _PLAIN


def _both_floating(here: torch.dtype, there: torch.dtype) -> bool:
    return here.is_floating_point and there.is_floating_point
