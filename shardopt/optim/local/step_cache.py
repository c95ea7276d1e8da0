"""Cache of the lists that torch's `_init_group` gathers of a group, kept for the next steps.

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
    """The result of `_init_group`, and the lists that it filled, but for the gradients.

    Args:
        options: those that it may have gone by, of `deciding_options`.
        present: for each local tensor of the group whether it had a gradient.
        local_tensors: those that had one.
        state: lists of their state, in the order of `_init_group`'s arguments.
        init_result: the result of `_init_group`.
    """

    options: Options
    present: list[bool]
    local_tensors: list[Tensor]
    state: list[list[Tensor]]
    init_result: Any

    def holds(self, options: Options, gradients: Sequence[Tensor | None]) -> bool:
        """Whether `_init_group` would gather the same now, given that nobody but it makes or replaces state.

        Args:
            options: `deciding_options` of the group.
            gradients: of all local tensors, dense.
        """
        return self.options == options and self.present == [gradient is not None for gradient in gradients]

    def lists_with(self, gradients: Sequence[Tensor | None]) -> list[list[Any]]:
        """Returns lists as `_init_group` would fill them: local tensors, gradients, and those of `state`.

        Args:
            gradients: of the local tensors of the group, present where they were.
        """
        return [self.local_tensors, list(compress(gradients, self.present)), *self.state]


def make_cache(
    options: Options, local_tensors: Sequence[Tensor], lists: Sequence[list[Any]], init_result: Any
) -> StepCache | None:
    """Makes a cache of a call of `_init_group`; None where the step that follows makes state, or rows are updated.

    Args:
        options: `deciding_options` of the group.
        local_tensors: of the group.
        lists: as `_init_group` filled them, before the step went on with them.
        init_result: the result of `_init_group`.
    """
    stepped, gradients, *state = lists
    if any(gradient.layout is not torch.strided for gradient in gradients):
        return None
    if any(value is None for each in state for value in each):
        return None
    here = set(map(id, stepped))
    present = [id(local) in here for local in local_tensors]
    return StepCache(options, present, list(stepped), [list(each) for each in state], init_result)


def deciding_options(group: Mapping[str, Any]) -> Options:
    """Extracts the options on which a group's state may depend, and which gradients or options are refused.

    Of numbers that is whether they are 0: schedules change them in every step. No tensor is looked into, which could
    wait for a device: of learning rates the class alone matters, and another tensor (or a NumPy number,
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
