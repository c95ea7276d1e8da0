"""Tells of what in a run's app would make a resume train otherwise than the run did.

A step that is not the saved one. Parameters that nothing in the app holds, such as a criterion's or SAC's log_alpha
(`unheld.py`): their moments are saved, and their values are not, so that a resume would give the moments to new values.
And parameters that are frozen and were not, or were and are not, and likewise layers in `eval()`: what the script
freezes or unfreezes once, at a step before the restored one, a resumed run has as it was made.

Only rank 0 looks, while the others go on to what all ranks do: what it stumbles over ends no training.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch.nn import Module
from torch.optim import Optimizer

from shardopt.checkpoint.reports import LoadReport
from shardopt.checkpoint.saving.planning.app_tensors import children_of, names_of
from shardopt.checkpoint.saving.planning.frozen import Layers, LayersInEval, Otherwise, frozen_otherwise
from shardopt.checkpoint.saving.planning.in_loop import LoopWarnings
from shardopt.checkpoint.saving.planning.mid_step import MidStep
from shardopt.checkpoint.saving.planning.unheld import (
    Found,
    may_hold_others,
    note_optimizers,
    objects_in,
    optimizers_in,
    warn_of_forgotten,
    warn_of_hidden_optimizers,
    warn_of_unheld,
)
from shardopt.data.workers import warn_of_workers
from shardopt.state.fused_kernels import counts_steps, has_counted, has_other_rate, kernels_in
from shardopt.state.names import ParameterNames
from shardopt.state.paths import PARAM_GROUPS, join
from shardopt.state.state import RestoreTarget

# Names that programs give to the count of their steps; max_steps, best_step or skipped_steps may well stay.
_COUNTER = re.compile(
    r"((global|current|cur|train|training|total|completed|num|n|optimizer|opt)_?)?"
    r"(step|iter|iteration|it|update)s?(_?(num|number|count|counter|done|idx|index))?",
    re.IGNORECASE,
)

_saves_rates: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
"""Whether an optimizer saved its groups when it was saved last: its `state_dict` may communicate, so none is made."""

_log = logging.getLogger("shardopt.checkpoint")


@contextmanager
def _harmless() -> Iterator[None]:
    """Logs an error instead of raising it: a look that stumbles over an object of the program's ends no training."""
    try:
        yield
    except Exception as error:
        _log.debug("the app was not looked at for what a resume would lack: %r", error)


def note_rates(optimizers: Iterable[RestoreTarget]) -> None:
    """Notes which optimizers save their groups, and so their rates."""
    for each in optimizers:
        optimizer: Any = each.object
        _saves_rates[optimizer] = PARAM_GROUPS in each.state


class AppWarnings:
    """Warns of what does not fit in the app of one run. On rank 0."""

    def __init__(self) -> None:
        self._told_of_step = self._told_of_workers = self._told_of_hidden = False
        self._has_saved = self._has_stored = False
        self._told = set[_Check]()
        self._unheld = set[str]()  # the optimizers of which it was said that the app lacks what they step
        self._began = 0  # the step at which this job began
        self._counted: tuple[int, dict[str, int]] | None = None  # the first saved step, its counters
        self._rates: dict[str, list[Any]] = {}  # of optimizers by names, as they were when first seen; [] once told of
        self._frozen: list[Otherwise] = []  # to be told of at the next step, or save
        self._in_eval = LayersInEval()
        self._in_loop = LoopWarnings()
        self._mid_step = MidStep()

    def of_passed(self, app: Mapping[str, Any]) -> None:
        """Looks at the app at some calls of `save` that save nothing."""
        if self._in_eval.looks:  # on no rank but 0
            with _harmless():
                self._in_eval.look(objects_in({**app}), is_saved=False)

    @_harmless()
    def of_saved(self, step: int, app: Any) -> dict[str, Layers] | None:
        """Warns once if the app has another step than the saved one, as in a loop that counts differently.

        Returns: the layers in `eval()` by the key of their module, as far as known.
        """
        is_first, self._has_saved = not self._has_saved, True
        counted = app.get("step")
        if type(counted) is int and counted != step and not self._told_of_step:
            self._told_of_step = True
            _log.warning(
                'app["step"] is %d, and the step that is saved %d: after a restore the loop would resume from %d. Set '
                'app["step"] before the save, or call it otherwise in the app if it counts something else [run-root]',
                *(counted, step, counted),
            )
        self._compare_counters(step, app)
        self._told_of_workers = self._told_of_workers or warn_of_workers()
        for each in self._frozen:  # of what no step was seen
            each.tell()
        self._end_frozen()
        found = objects_in({**app})
        for check in _CHECKS:
            is_due = check.library in sys.modules and (is_first or check.at_each_save) and check not in self._told
            if is_due and check.warns(found, step):
                self._told.add(check)
        self._compare_rates(found, warns=True)
        with _harmless():  # not all that gradients may be has each operation
            self._mid_step.look(optimizers_in(found))
        return self._in_eval.look(found, is_saved=True) or None

    @_harmless()
    def of_stored(self, step: int, app: Mapping[str, Any]) -> None:
        """Warns of what is not held, once a save has asked the objects of the app for their states.

        A save before any step is looked at, too, and does not count: optimizers have no state yet.
        """
        is_first, self._has_stored = not self._has_stored, step > self._began
        found = objects_in({**app})
        if is_first or self._may_be_stale(found):  # optimizers by names refuse to be saved with what was replaced
            self._unheld |= warn_of_unheld(found, but=self._unheld)
        if step > self._began:
            self._in_loop.of_saved(found)
        if is_first:
            warn_of_forgotten(found)
            if not (self._began or self._told_of_hidden):  # a restore had a place for all that there is
                self._told_of_hidden = warn_of_hidden_optimizers(found)

    def _end_frozen(self) -> None:
        for each in self._frozen:
            each.end()
        self._frozen = []

    def _may_be_stale(self, found: Found) -> bool:
        """Whether an optimizer without names may step what the model has replaced since the last save."""
        return any(
            names_of(child) is None
            for key, each in optimizers_in(found).items()
            if key not in self._unheld
            for child in children_of(each)
        )

    def _compare_counters(self, step: int, app: Mapping[str, Any]) -> None:
        """Warns at the second save of a higher step of counters in the app that are where the job began.

        A loop that counts in a variable of its own saves the same number each time. Within epochs counts begin again.
        """
        if any("epoch" in str(key).lower() for key in list(app)):
            return
        here = {
            key: value
            for key, value in list(app.items())
            if type(value) is int and value in (0, self._began) and _COUNTER.fullmatch(str(key)) and key != "step"
        }
        first, counters = self._counted or (step, here)
        self._counted = first, counters
        stayed = [key for key, value in counters.items() if here.get(key) == value]
        if step > first and counters:
            self._counted = first, {}  # once
            for key in stayed:
                _log.warning(
                    "app[%r] is %d, as at step %d, and step %d is saved: after a restore the loop would begin from %d. "
                    "Count in the app (app[%r] += 1), or set it before each save; call it otherwise if it counts "
                    "something else [run-root]",
                    *(key, counters[key], first, step, counters[key], key),
                )

    def _compare_rates(self, found: Found, warns: bool) -> None:
        """Notes the rates of optimizers by names, and warns once of those that have changed and are not saved."""
        for key, optimizer in optimizers_in(found).items():
            rates = [group["lr"] for group in optimizer.param_groups if isinstance(group.get("lr"), float | int)]
            first = self._rates.setdefault(key, rates)
            if not (warns and first and rates != first and isinstance(getattr(optimizer, "params", None), Mapping)):
                continue
            if (saves_rates := _saves_rates.get(optimizer)) is None:  # not saved yet
                continue
            self._rates[key] = []
            has_schedule = any("initial_lr" in group for group in optimizer.param_groups)  # torch's, or our warm-up
            may_be_set = has_schedule or any(may_hold_others(each) for _, each in found)
            if not (may_be_set or saves_rates):
                _log.warning(
                    "the rates of %s have changed, and it does not save them: a resumed run would begin with those of "
                    "the code. Call its save_param_groups(True) before the restore, unless the loop sets them anew "
                    "before each step [optimizer-state]",
                    key,
                )

    @_harmless()
    def of_restored(self, step: int | None, app: Mapping[str, Any], report: LoadReport | None, is_whole: bool) -> None:
        """Warns if the app was restored with another step than the checkpoint has, as after its directory was renamed.

        Args:
            step: that was restored; None for none.
            report: of its load; None for none.
            is_whole: whether the app is all that the run saves.
        """
        self._began, self._counted = step or 0, None
        counted = app.get("step") if report is not None and "step" in report.loaded else None
        if type(counted) is int and counted != step:
            _log.warning(
                'app["step"] is %d, and the step that was restored %d: its directory was renamed, or it was saved so. '
                'Name it as before, or set app["step"] to what restore returns: %d [run-root]',
                *(counted, step, step),
            )
        found = objects_in({**app})
        self._compare_rates(found, warns=False)
        note_optimizers(found)
        self._end_frozen()
        self._in_eval.restored(report)
        if report is not None:
            optimizers = [(path, each) for path, each in found if isinstance(each, Optimizer)]
            self._frozen = frozen_otherwise(optimizers, ParameterNames(app), report)
        if is_whole and not (self._has_saved or self._unheld):
            self._unheld = warn_of_unheld(found)


def _warn_of_collisions(found: Found, _: int) -> bool:
    """Logs a warning of managed-collision modules, whose state_dict lacks some of what they count."""
    kind = ("MCHManagedCollisionModule", "torchrec")
    for path, model in [(path, each) for path, each in found if isinstance(each, Module)]:
        bases = (each for module in model.modules() for each in type(module).__mro__)
        if any((each.__name__, each.__module__.partition(".")[0]) == kind for each in bases):
            _log.warning(
                "%s has managed-collision tables of torchrec's, whose state_dict() leaves out the ids that they have "
                "seen since they last evicted some: a resumed run may give ids other rows than the run did "
                "[cannot-store]",
                join(path),
            )
    return False


def _warn_of_counts(found: Found, step: int) -> bool:
    """Logs a warning of fused tables whose kernels count steps, and began anew where a run resumed."""
    for key, optimizer in optimizers_in(found).items():
        if any(counts_steps(kernel) and not has_counted(kernel, step) for _, kernel in kernels_in(optimizer)):
            _log.warning(
                "%s has fused tables whose steps depend on FBGEMM's count of them, which is in no state, and is less "
                "than %d here: a resumed run begins it anew. Call set_optimizer_step(steps) of the fused optimizer "
                "after a restore [cannot-store]",
                *(key, step),
            )
    return False


def _warn_of_kernel_rates(found: Found, _: int) -> bool:
    """Logs a warning of fused tables whose kernel has another rate than their group."""
    optimizers = optimizers_in(found).items()
    others = [key for key, each in optimizers if any(has_other_rate(*pair) for pair in kernels_in(each))]
    if others:
        _log.warning(
            "%s has fused tables that the next backward moves by another rate than that of their group, by which a "
            "resumed run would move them: torchrec sets it in step() and zero_grad(). Call zero_grad() of the fused "
            "optimizer after each change of the rate [optimizer-state]",
            others[0],
        )
    return bool(others)


class _Check(NamedTuple):
    """A check that only programs with some library need.

    Args:
        warns: of the objects of an app and the step that is saved; returns whether that is enough.
    """

    library: str
    warns: Callable[[Found, int], bool]
    at_each_save: bool = False


_CHECKS = (
    _Check("torchrec", _warn_of_collisions),
    _Check("fbgemm_gpu", _warn_of_counts),
    _Check("fbgemm_gpu", _warn_of_kernel_rates, at_each_save=True),
)
