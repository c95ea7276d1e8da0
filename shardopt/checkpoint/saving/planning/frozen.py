"""Finds the frozen parameters of optimizers, and layers in `eval()` while the rest of their module trains.

No state says which they are, so a save notes them. A resumed run whose script forgets one would train otherwise without
an error. A warning says so: of parameters at its first step, as a script may restore first, and freeze afterwards.

Layers are looked at in calls of `save`. That may come within an evaluation, or after one that has ended otherwise than
it began. So a module counts only where it is the same at two calls, one after the other, of which the first need not
save anything: both where it is noted and where it is compared. A module that is in `eval()` as a whole does not count.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any
from weakref import ref

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.checkpoint.reports import LoadReport
from shardopt.checkpoint.saving.planning.app_tensors import children_of, names_of
from shardopt.runtime.torch_private import in_eval, running_hooks
from shardopt.sharding.gradients import is_moved_by_backward, requires_gradient
from shardopt.sharding.view import local_tensors
from shardopt.state.names import ParameterNames, plain_names_in
from shardopt.state.paths import PARAM_GROUPS, Path, join
from shardopt.state.state import FlatState
from shardopt.state.trainer_optimizers import constructed

Layers = tuple[str, ...]
"""The names of layers within a module, without wrappers' parts; one name stands for all that is in it."""

_Named = list[tuple[str, Tensor]]
_AGAIN = "again before the loop; requires_grad is not saved [optimizer-state]"
_LINE = (
    "%d layers are in %s that were in %s when this step was saved, such as %s: if the run put them there, call their "
    "%s again, %s; the modes of layers are not saved [optimizer-state]"
)
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


def layers_in_eval(root: Module) -> Layers | None:
    """Returns the layers of a module that are in `eval()`; None if all are.

    Layers are modules without others in them: the mode of what wraps them or holds them says nothing.
    """
    found = in_eval(root)
    if found is None:
        return None
    plain = plain_names_in(root, found)
    return tuple(plain.get(name, name) for name in found)


class LayersInEval:
    """The layers in `eval()` at the saves of one run. On rank 0."""

    def __init__(self) -> None:
        self.looks = 0  # at so many calls of `save` from now on
        self._seen = dict[str, Layers | None]()  # at the last look, by the key of their module
        self._stored = dict[str, Layers]()  # of the restored checkpoint, until they are compared

    def restored(self, report: LoadReport | None) -> None:
        """Begins to compare with a checkpoint.

        Args:
            report: of its load; None for none.
        """
        noted = (report is not None and report.in_eval) or {}
        loaded = () if report is None else report.loaded
        self._stored = {key: own for key, own in noted.items() if any(each.startswith(f"{key}.") for each in loaded)}
        self.looks = 2

    def look(self, objects: Iterable[tuple[Path, Any]], is_saved: bool) -> dict[str, Layers]:
        """Returns the layers by the key of their module, of those that are as at the last look; warns of others.

        Args:
            objects: of the app, by path.
            is_saved: whether this call of `save` saves.
        """
        self.looks = 1 if is_saved else self.looks - 1
        found = dict[str, Layers]()
        for path, root in objects:
            if not isinstance(root, Module):
                continue
            key, layers = join(path), layers_in_eval(root)
            if layers is not None and self._seen.get(key) == layers:
                found[key] = layers
                if key in self._stored:
                    _tell(key, root, layers, self._stored.pop(key))
            self._seen[key] = layers
        return found


def _tell(key: str, root: Module, layers: Layers, stored: Layers) -> None:
    """Logs a warning of layers of a module that are in another mode than they were saved in, if any are."""
    names = {f"{name}.": name for name, _ in root.named_modules(remove_duplicate=False)}
    plain = plain_names_in(root, names)
    known = {plain.get(name, name).removesuffix(".") for name in names}
    trains = [each for each in stored if not _is_among(each, layers) and each in known]
    evaluates = [each for each in layers if not _is_among(each, stored)] if known.issuperset(stored) else []
    if trains:
        where = join((key, trains[0]))
        _log.warning(_LINE, len(trains), "train()", "eval()", where, "eval()", "after each train() of the model")
    if evaluates:
        where = join((key, evaluates[0]))
        _log.warning(_LINE, len(evaluates), "eval()", "train()", where, "train()", "before the loop")


def _is_among(name: str, layers: Layers) -> bool:
    """Whether a layer is one of some, or within one."""
    return any(f"{name}.".startswith(f"{each}.") for each in layers)
