"""Tracks parameters that temporarily hold averages, so that nobody takes them for weights to train.

Who puts averages into a model calls `note_swapped`, and `note_swapped_back` once its own weights are there again. Who
is to change weights in place, or to keep them, calls `refuse_swapped` first. Tensors are known by themselves, and by
their memory: a model's state_dict has others over the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from shardopt.errors import Problem, StateError
from shardopt.sharding.view import local_tensors

LOAD_IN_SWAP = "a load into the place of averages would be lost when the weights are put back"
STEP_IN_SWAP = "a step would train the averages, and be lost"
MODE_IN_SWAP = "the mode cannot be changed while averages of the weights stand in the model"

_swapped: WeakKeyDictionary[object, Mapping[str, Tensor]] = WeakKeyDictionary()
"""The parameters with averages, by the object that keeps the weights; if it is gone, the averages are the weights."""


def note_swapped(holder: object, named: Mapping[str, Tensor]) -> None:
    """Notes that a model's parameters and buffers hold averages, and who keeps their own values."""
    _swapped[holder] = named


def note_swapped_back(holder: object) -> None:
    """Notes that the parameters have their own values again."""
    _swapped.pop(holder, None)


def refuse_swapped(why: str, tensors: Iterable[Tensor]) -> None:
    """Raises StateError if one of these tensors holds averages. Local; fast if none does.

    Args:
        why: what cannot be done.
        tensors: parameters or buffers, or others over their memory; not their local tensors.
    """
    if not _swapped:
        return
    names = {mark: name for named in _swapped.values() for name, tensor in named.items() for mark in _marks(tensor)}
    found = [names[mark] for tensor in tensors for mark in islice(filter(names.__contains__, _marks(tensor)), 1)]
    if found:
        others = f", and of {len(found) - 1} others" if len(found) > 1 else ""
        remedy = "end `with ema.swap():` before, or call swap() to put them back"
        problem = Problem(found[0], f"averages in the place of it{others}", "its own weights", remedy)
        raise StateError(why, [problem], code="averages")


def params_in(groups: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the parameters of groups; nothing of what somebody has put in their place, which steps refuse."""
    for group in groups:
        if isinstance(group, Mapping):
            yield from (each for each in group.get("params", ()) if isinstance(each, Tensor))


def _marks(tensor: Tensor) -> Iterator[tuple[object, int]]:
    """Yields the identities of a tensor: itself, and the start of its elements on this rank."""
    yield None, id(tensor)
    yield from ((local.device, local.data_ptr()) for local in local_tensors(tensor) if local.numel())
