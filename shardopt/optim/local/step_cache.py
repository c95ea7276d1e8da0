"""What torch's `_init_group` gathers of a group in a step, kept for the steps after.

On small parameters most of a step's time goes into asking each of them for its gradient and its state, although from
one step to the next only the gradients are others. Where that is so, an algorithm is handed the lists of the step
before with the new gradients in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

Options = tuple[Any, ...]

_NUMBERS = (bool, int, float)
_OTHERS = (type(None), str, tuple, list)


class StepCache(NamedTuple):
    """What `_init_group` gave and filled in, but for the gradients.

    Args:
        options: those that it may have gone by, of `deciding_options`.
        present: for each leaf of the group whether it had a gradient.
        leaves: those that had one.
        state: lists of their state, in the order of `_init_group`'s arguments.
        told: what it returned.
    """

    options: Options
    present: list[bool]
    leaves: list[Tensor]
    state: list[list[Tensor]]
    told: Any

    def holds(self, options: Options, gradients: Sequence[Tensor | None]) -> bool:
        """Whether `_init_group` would gather the same now, given that nobody but it makes or replaces state.

        Args:
            options: `deciding_options` of the group.
            gradients: of all leaves, dense.
        """
        return self.options == options and self.present == [gradient is not None for gradient in gradients]

    def again(self, gradients: Sequence[Tensor | None]) -> list[list[Any]]:
        """What `_init_group` would fill its lists with: leaves, gradients, and those of `state`.

        Args:
            gradients: of the leaves of the group, present where they were.
        """
        return [self.leaves, list(compress(gradients, self.present)), *self.state]


def gathered(options: Options, leaves: Sequence[Tensor], lists: Sequence[list[Any]], told: Any) -> StepCache | None:
    """What can be kept of a call of `_init_group`; None where the step that follows makes state, or rows are updated.

    Args:
        options: `deciding_options` of the group.
        leaves: of the group.
        lists: as `_init_group` filled them, before the step went on with them.
        told: what it returned.
    """
    stepped, gradients, *state = lists
    if any(gradient.layout is not torch.strided for gradient in gradients):
        return None
    if any(value is None for each in state for value in each):
        return None
    here = set(map(id, stepped))
    present = [id(leaf) in here for leaf in leaves]
    return StepCache(options, present, list(stepped), [list(each) for each in state], told)


def deciding_options(group: Mapping[str, Any]) -> Options:
    """What may decide about the state that a group's parameters have, and about what is refused.

    Of numbers that is whether they are 0: schedules change them in every step. No tensor is looked into, which could
    be to wait for a device: of learning rates nobody asks more than the class, and another tensor (or a NumPy number,
    or whatever else there may be) is equal to nothing.
    """
    return tuple(
        [
            (name, bool(value))
            if type(value) in _NUMBERS
            else (name, type(value) if type(value) in _OTHERS or name.endswith("lr") else object())
            for name, value in group.items()
            if name != "params"
        ]
    )
