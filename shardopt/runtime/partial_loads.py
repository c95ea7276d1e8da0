"""Optimizers that are half changed, by a load or an outer step that did not end well.

One is marked, with all of its parts, as soon as something of it, or of its parameters, may be changed and the rest not,
until a load that leaves out nothing of what may be changed. The marked are not stepped, nor saved: by themselves, by a
view of them, or within a composite.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardopt.errors import PartialLoadError, Problem

_AGAIN_ALONE = "load it again, whole, by load_state_dict or checkpoint.load"
_AGAIN_WITH_APP = (
    "load it again, whole, with the rest of its app (checkpoint.load, restore): load_state_dict does not do"
)


@dataclass(frozen=True)
class _Mark:
    """Why an optimizer is marked.

    Args:
        what: did not end well.
        is_of_app: whether it was of more than optimizers, so that only another load of that kind mends it.
        left_out: the keys that it cannot have changed, as the next load names them.
        params: the ids of parameters that it may have changed, which their optimizer keeps.
    """

    what: str
    is_of_app: bool = False
    left_out: frozenset[str] = frozenset()
    params: frozenset[int] = frozenset()


_marks: weakref.WeakKeyDictionary[Optimizer, tuple[_Mark, RemovableHandle]] = weakref.WeakKeyDictionary()
"""Those that are marked, and the hooks of their steps."""


class PartialLoad:
    """A load of an app that changes an optimizer of it: marked while it may have changed only a part.

    Args:
        optimizer: is loaded, or what it is a view of.
        what: the load, in errors.
        left_out, late: the keys of this optimizer's state, on this rank, that it leaves out, and that it changes once
            all is read.
        params: the ids of this optimizer's parameters that it reads.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        what: str,
        left_out: Iterable[str] = (),
        late: Iterable[str] = (),
        params: Iterable[int] = (),
    ) -> None:
        self._mark = _Mark(what, True, frozenset(left_out), frozenset(params))
        self._while_reading = _Mark(what, True, self._mark.left_out.union(late), self._mark.params)
        self._before = {node: _mark_of(node) for node in _nodes(optimizer)}

    @property
    def mends(self) -> bool:
        """Whether it replaces all that earlier ones may have changed; local to the rank."""
        return all(
            mark is None or (self._mark.left_out <= mark.left_out and mark.params <= self._mark.params)
            for mark in self._before.values()
        )

    def begin(self) -> None:
        """Marks the optimizer, which may refuse the hook that this takes, as tensors are read into the app."""
        for node in self._before:
            _put(node, self._while_reading)

    def begin_late(self) -> None:
        """Notes that what is changed only once all is read may be changed, too."""
        for node in self._before:
            _put(node, self._mark)

    def end(self, mends: bool) -> None:
        """Takes its mark back, as it has ended well on all ranks.

        Args:
            mends: whether it takes earlier ones back, too: whether it `mends` on all ranks.
        """
        for node, mark in self._before.items():
            _unmark(node)
            if mark is not None and not mends:
                _put(node, mark)


def mark_half_stepped(optimizer: Optimizer, what: str) -> None:
    """Makes steps and saves of an optimizer raise PartialLoadError, until a whole load of it."""
    for node in _nodes(optimizer):
        _put(node, _Mark(what))


def is_partly_loaded(optimizer: Optimizer) -> bool:
    """Whether an optimizer, or a part of it, is marked."""
    return bool(_marks) and any(node in _marks for node in _nodes(optimizer))


def refuse_partly_loaded(optimizers: Iterable[tuple[str, Optimizer]]) -> None:
    """Raises PartialLoadError if one of these optimizers, or a part of one, is marked.

    Args:
        optimizers: each with its key in the error.
    """
    found = [(key, mark) for key, each in optimizers for node in _nodes(each) if (mark := _mark_of(node))]
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

    A mark of a load of an app stays, as the rest of that may not be loaded yet.

    Args:
        left_out: the keys that the load leaves out.
    """
    mark = _Mark("load_state_dict", False, frozenset(left_out))
    try:
        yield
    except BaseException:
        for node in _nodes(optimizer):
            _put(node, mark)
        raise
    marked = [(node, earlier) for node in _nodes(optimizer) if (earlier := _mark_of(node))] if _marks else ()
    if all(mark.left_out <= earlier.left_out for _, earlier in marked):
        for node, earlier in marked:
            if not earlier.is_of_app:
                _unmark(node)


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


def _mark_of(node: Optimizer) -> _Mark | None:
    return _marks[node][0] if node in _marks else None


def _put(node: Optimizer, mark: _Mark) -> None:
    """Marks a node; where it is marked already, what mends it has to mend both."""
    earlier = _mark_of(node)
    if earlier is None:
        _marks[node] = mark, node.register_step_pre_hook(_refuse_step)
        return
    if earlier.is_of_app and not mark.is_of_app:
        mark, earlier = earlier, mark
    left_out, params = mark.left_out & earlier.left_out, mark.params | earlier.params
    _marks[node] = _Mark(mark.what, mark.is_of_app, left_out, params), _marks[node][1]


def _unmark(node: Optimizer) -> None:
    if node in _marks:
        _marks.pop(node)[1].remove()


def _refuse_step(optimizer: Optimizer, *unused: Any) -> None:
    refuse_partly_loaded([(type(optimizer).__name__, optimizer)])


def _remedy(mark: _Mark) -> str:
    return _AGAIN_WITH_APP if mark.is_of_app else _AGAIN_ALONE
