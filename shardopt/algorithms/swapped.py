"""Parameters in which averages stand for a while, for those who would take them for weights to train.

Who puts averages into a model calls `note_swapped`, and `note_swapped_back` once its own weights are there again. Who
is to change weights in place, or to keep them, calls `refuse_swapped` first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from weakref import WeakKeyDictionary

from torch import Tensor

from shardopt.errors import Problem, StateError

STEP_IN_SWAP = "a step would train the averages, and be lost"
MODE_IN_SWAP = "the mode cannot be changed while averages of the weights stand in the model"

_swapped: WeakKeyDictionary[object, Mapping[str, Tensor]] = WeakKeyDictionary()
"""By what has the weights in the meantime; without it nobody can put them back, and the averages are the weights."""


def note_swapped(holder: object, named: Mapping[str, Tensor]) -> None:
    """Notes that averages stand in parameters, and who has their own values."""
    _swapped[holder] = named


def note_swapped_back(holder: object) -> None:
    """Notes that the parameters have their own values again."""
    _swapped.pop(holder, None)


def refuse_swapped(why: str, tensors: Iterable[Tensor]) -> None:
    """Raises StateError where averages stand in one of these; at once where they stand in none. Local.

    Args:
        why: what cannot be done.
        tensors: parameters, not their local tensors.
    """
    if not _swapped:
        return
    names = {id(tensor): name for named in _swapped.values() for name, tensor in named.items()}
    found = [names[id(tensor)] for tensor in tensors if id(tensor) in names]
    if found:
        others = f", and of {len(found) - 1} others" if len(found) > 1 else ""
        remedy = "end `with ema.swap():` before, or call swap() to put them back"
        raise StateError(why, [Problem(found[0], f"averages in the place of it{others}", "its own weights", remedy)])
