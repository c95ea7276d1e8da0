"""Optimizers that are half changed, by a load or an outer step that did not end well.

Optimizers of an app are marked, with all of their parts, as soon as some of their state or of what else the app has may
be changed and the rest not, until a load that leaves out none of that: nothing of their state, and no memory of their
parameters, or of its own app, that may be changed. The marked are not stepped, nor saved: by themselves, by a view of
them, or within a composite.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardopt.errors import PartialLoadError, Problem
from shardopt.runtime.torch_private import running_hooks

_AGAIN_ALONE = "load it again, whole, by load_state_dict or checkpoint.load"
_AGAIN_WITH_APP = (
    "load it again, whole, with the rest of its app (checkpoint.load, restore): load_state_dict does not do"
)


@dataclass(frozen=True)
class _Mark:
    """Why an optimizer is marked.

    Args:
        what: did not end well.
        left_out: the keys of state that it cannot have changed, as the next load names them.
        written: the addresses of what it may have changed besides state of optimizers; with 0, which stands for shards
            without an element here, so that all ranks refuse the same.
    """

    what: str
    left_out: frozenset[str] = frozenset()
    written: frozenset[int] = frozenset()


_marks: weakref.WeakKeyDictionary[Optimizer, _Mark] = weakref.WeakKeyDictionary()
_hooks: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()
"""Of the steps of those that are marked."""


class PartialLoad:
    """A load that changes an optimizer: marked while it may have changed only a part.

    Args:
        optimizer: is loaded, or what it is a view of.
        what: the load, in errors.
        left_out, late: the keys of this optimizer's state, on this rank, that it leaves out, and that it changes once
            all is read.
        written: the addresses of what else of its app it reads.
        kept: returns the addresses of this optimizer's parameters, and of what else its app has, that it does not read.
            None: it is of the optimizer alone, and reads nothing else.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        what: str,
        left_out: Iterable[str] = (),
        late: Iterable[str] = (),
        written: Iterable[int] = (),
        kept: Callable[[], set[int]] | None = None,
    ) -> None:
        self._mark = _Mark(what, frozenset(left_out), frozenset(written))
        self._while_reading = replace(self._mark, left_out=self._mark.left_out.union(late))
        self._kept = kept
        self._before = {node: _marks.get(node) for node in _nodes(optimizer)}

    @property
    def mends(self) -> bool:
        """Whether it replaces all that earlier ones may have changed; local to the rank."""
        marks = list(filter(None, self._before.values()))
        written = frozenset[int]().union(*(mark.written for mark in marks))
        keeps = written if self._kept is None or not written else written & self._kept()
        return not keeps and all(self._mark.left_out <= mark.left_out for mark in marks)

    def begin(self) -> None:
        """Marks the optimizer, which may refuse the hook that this takes, as tensors are read into the app."""
        for node in self._before:
            _put(node, self._while_reading)

    def begin_late(self) -> None:
        """Notes that what is changed only once all is read may be changed, too; puts back marks that went meanwhile."""
        for node, before in self._before.items():
            for mark in filter(None, (before, self._mark)):
                _put(node, mark)

    def end(self, mends: bool) -> None:
        """Takes its mark back, as it has ended well on all ranks.

        Args:
            mends: whether it takes earlier ones back, too: whether it `mends` on all ranks.
        """
        for node, mark in self._before.items():
            if _marks.pop(node, None) is not None:
                _hooks.pop(node).remove()
            if mark is not None and not mends:
                _put(node, mark)


def mark_half_stepped(optimizer: Optimizer, what: str, written: Iterable[int] = ()) -> None:
    """Makes steps and saves of an optimizer raise PartialLoadError, until a whole load of it.

    Args:
        written: the addresses of what may be changed besides its state.
    """
    PartialLoad(optimizer, what, written=written).begin()


def is_partly_loaded(optimizer: Optimizer) -> bool:
    """Whether an optimizer, or a part of it, is marked."""
    return bool(_marks) and any(node in _marks for node in _nodes(optimizer))


def refuse_partly_loaded(optimizers: Iterable[tuple[str, Optimizer]]) -> None:
    """Raises PartialLoadError if one of these optimizers, or a part of one, is marked.

    Args:
        optimizers: each with its key in the error.
    """
    found = [(key, mark) for key, each in optimizers for node in _nodes(each) if (mark := _marks.get(node))]
    if found:
        problems = [
            Problem(key, "an optimizer that may be half changed", "a whole one", _remedy(mark))
            for key, mark in dict(found).items()
        ]
        what = found[0][1].what
        raise PartialLoadError(f"{what} did not end well, and may have left an optimizer half changed", problems)


def refuse_backward_of_partly_loaded(optimizer: Optimizer) -> None:
    """Raises PartialLoadError if an optimizer to be stepped in backward, or what it is part of, is marked."""
    if _marks:
        refuse_partly_loaded((type(each).__name__, each) for each in _with_owners(optimizer))


@contextmanager
def loading_alone(optimizer: Optimizer, left_out: Iterable[str] = ()) -> Iterator[None]:
    """Marks an optimizer whose own load, in the block, fails or is interrupted; a whole one takes such marks back.

    Args:
        left_out: the keys that the load leaves out.
    """
    load = PartialLoad(optimizer, "load_state_dict", left_out)
    try:
        yield
    except BaseException:
        load.begin()
        raise
    load.end(load.mends)


def _nodes(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yields an optimizer, or what it is a view of, and the parts of composites, at any depth."""
    optimizer = getattr(optimizer, "viewed", optimizer)
    yield optimizer
    for part in getattr(optimizer, "_children", ()):
        yield from _nodes(part)


def _with_owners(optimizer: Any) -> Iterator[Optimizer]:
    yield optimizer
    for owner in optimizer._owners_of():
        yield from _with_owners(owner)


def _put(node: Optimizer, mark: _Mark) -> None:
    """Marks a node; where it is marked already, what mends it has to mend both."""
    earlier = _marks.get(node)
    if earlier is None:
        _hooks[node] = running_hooks(node).register_step_pre_hook(_refuse_step)
    else:
        mark = _Mark(mark.what, mark.left_out & earlier.left_out, mark.written | earlier.written)
    _marks[node] = mark


def _refuse_step(optimizer: Optimizer, *unused: Any) -> None:
    refuse_partly_loaded([(type(optimizer).__name__, optimizer)])


def _remedy(mark: _Mark) -> str:
    return _AGAIN_WITH_APP if mark.written else _AGAIN_ALONE
