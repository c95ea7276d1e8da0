"""Finds the frozen parameters of optimizers: a save notes them, as no state says which they are.

A resumed run whose script forgets to freeze a layer again, or to unfreeze it, would train otherwise without an error. A
warning says so at its first step: a script may restore first, and freeze afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer

from shardopt.checkpoint.reports import LoadReport
from shardopt.checkpoint.saving.planning.app_tensors import children_of, names_of
from shardopt.runtime.torch_private import running_hooks
from shardopt.sharding.gradients import is_moved_by_backward, requires_gradient
from shardopt.sharding.view import local_tensors
from shardopt.state.names import ParameterNames
from shardopt.state.paths import PARAM_GROUPS, Path, join
from shardopt.state.state import FlatState
from shardopt.state.trainer_optimizers import constructed

_Named = list[tuple[str, Tensor]]
_AGAIN = "again before the loop; requires_grad is not saved [optimizer-state]"
_log = logging.getLogger("shardopt.checkpoint")


def is_untrained(parameter: Tensor) -> bool:
    """Whether nothing trains a parameter."""
    return not requires_gradient(parameter) and not is_moved_by_backward(parameter)


def members_of(path: Path, optimizer: Any, names: ParameterNames) -> Iterator[tuple[str, str, Tensor]]:
    """Yields each parameter of an optimizer: the key of its options, what a line may call it, and the parameter.

    Where neither the optimizer nor the app has names for them, their keys have positions.

    Args:
        names: of parameters in the app.
    """
    named = names_of(optimizer)
    if named is None:
        params = [each for group in optimizer.param_groups for each in group["params"]]
        found = names.of(params, [""] * len(params))
        if found is None:
            for number, each in enumerate(params):
                yield join((*path, PARAM_GROUPS, str(number))), f"one of shape {tuple(each.shape)}", each
            return
        named = dict(zip(found, params, strict=True))
    yield from ((join((*path, PARAM_GROUPS, name)), name, each) for name, each in named.items())


def frozen_in(flat: FlatState) -> list[str]:
    """Returns the keys of the frozen parameters of an app's optimizers, as `members_of`. Local."""
    optimizers = [(each.path, each.object) for each in flat.targets if isinstance(each.object, Optimizer)]
    return [
        key
        for path, optimizer in optimizers
        if not all(requires_gradient(each) for group in optimizer.param_groups for each in group["params"])
        for key, _, own in members_of(path, optimizer, flat.names)
        if is_untrained(own)
    ]


class Otherwise:
    """The parameters of an optimizer that are frozen and were not when it was saved, or reversely, by name.

    Args:
        key: of the optimizer.
    """

    def __init__(self, key: str, optimizer: Any, froze: _Named, thawed: _Named) -> None:
        self._key = key
        self._froze, self._thawed = ([(name, ref(each)) for name, each in those] for those in (froze, thawed))
        self._told = False
        self._handle = running_hooks(constructed(optimizer)).register_step_pre_hook(self._before_step)

    def _before_step(self, *unused: Any) -> None:
        with suppress(Exception):  # a line of rank 0 alone is no reason to end a training
            self.tell()  # and it stays: no hook can be removed while hooks run

    def tell(self) -> None:
        """Logs a warning of those that still are, if none was logged yet."""
        if self._told:
            return
        self._told = True
        froze = [name for name, each in self._froze if (own := each()) is not None and is_untrained(own)]
        thawed = [name for name, each in self._thawed if (own := each()) is not None and not is_untrained(own)]
        if froze:
            _log.warning(
                "%s has trained %d parameters that are frozen now, such as %s: if the run unfroze them at a step, call "
                "requires_grad_(True) %s",
                *(self._key, len(froze), froze[0], _AGAIN),
            )
        if thawed:
            _log.warning(
                "%s trains %d parameters that were frozen when this step was saved, such as %s: if the run froze them "
                "at a step, call requires_grad_(False) %s",
                *(self._key, len(thawed), thawed[0], _AGAIN),
            )

    def end(self) -> None:
        """Has nothing be logged at a step any more."""
        self._handle.remove()


def frozen_otherwise(
    optimizers: Iterable[tuple[Path, Any]], names: ParameterNames, report: LoadReport
) -> list[Otherwise]:
    """Returns what is frozen in optimizers, and was not when they were saved, or reversely; warns at their next step.

    Of a checkpoint that does not say which were, these are frozen ones that have made steps. Local.

    Args:
        names: of parameters in the app.
        report: of the load; only what was loaded is compared.
    """
    members = {join(path): (each, list(members_of(path, each, names))) for path, each in optimizers}
    if report.frozen is None:
        frozen = ((place, each, _frozen_with_steps(each, names)) for place, (each, _) in members.items())
        return [Otherwise(*each, []) for each in frozen if each[-1]]
    stored = {key: report.renamed.get(key, key) for _, own in members.values() for key, _, _ in own}
    noted, found = set(report.frozen), list[Otherwise]()
    are_known = noted.issubset(stored.values())  # else they may be these under other names, and were frozen too
    for place, (optimizer, own) in members.items():
        if any(key.startswith(f"{place}.") for key in report.loaded):
            froze = [(name, each) for key, name, each in own if stored[key] not in noted and is_untrained(each)]
            thawed = [(name, each) for key, name, each in own if stored[key] in noted and not is_untrained(each)]
            if all(stored[key] in noted for key, _, _ in own):  # a network that is frozen while another has its turn
                thawed = []
            froze = froze if are_known else []
            if froze or thawed:
                found.append(Otherwise(place, optimizer, froze, thawed))
    return found


def _frozen_with_steps(optimizer: Any, names: ParameterNames) -> _Named:
    return [
        (name, own)
        for each in children_of(optimizer)
        for _, name, own in members_of((), each, names)
        if _has_stepped(each.state.get(own)) and is_untrained(own)
    ]


def _has_stepped(state: Mapping[str, Any] | None) -> bool:
    step = (state or {}).get("step")
    if isinstance(step, Tensor):
        return any(bool((local > 0).any()) for local in local_tensors(step))
    return bool(state) if step is None else step > 0
