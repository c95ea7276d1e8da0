"""The changes of a step, by torch's counters: they show whether loads have replaced them since."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer

from shardopt.sharding.view import local_tensors, versions_of


class Stepped:
    """Parameters and their state as a step has left them. Keeps none of them alive.

    Args:
        optimizer: has the state.
        parameters: of the step, as far as this rank has elements of them.
    """

    def __init__(self, optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
        self._optimizer = ref(optimizer)
        self._seen = [(ref(each), versions_of(each), self._versions_of_state(each)) for each in parameters]

    def are_replaced(self) -> bool:
        """Whether each parameter was changed since, and something of its state, as far as torch counts changes."""
        for reference, versions, of_state in self._seen:
            parameter = reference()
            if parameter is None:
                continue
            if (versions and versions_of(parameter) == versions) or (
                of_state and self._versions_of_state(parameter) == of_state
            ):
                return False
        return True

    def _versions_of_state(self, parameter: Tensor) -> list[tuple[int, list[int]]]:
        optimizer = self._optimizer()
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        tensors = (each for each in state.values() if isinstance(each, Tensor) and not _is_number(each))
        return [(id(each), versions) for each in tensors if (versions := versions_of(each))]


def _is_number(tensor: Tensor) -> bool:
    return not any(local.ndim for local in local_tensors(tensor))
