"""The outer half of a semi-synchronous optimizer: anchors, exchanges between islands, and steps by the mean change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from shardopt.errors import Problem, StateError
from shardopt.optim.core.base import KeyedOptimizer, StateDict
from shardopt.optim.core.composite import OptimizerWrapper
from shardopt.optim.core.node import OwnState
from shardopt.optim.semi_sync.islands.buckets import Buckets
from shardopt.optim.semi_sync.islands.islands import Islands
from shardopt.optim.semi_sync.islands.schedule import SyncSchedule, fragments_by_name
from shardopt.optim.semi_sync.weights import Weights, anchor_of, refuse_unfit, step_by
from shardopt.optim.state_dict.groups import first_names
from shardopt.optim.state_dict.load_plan import LoadPlan
from shardopt.optim.state_dict.options import as_number
from shardopt.runtime.accelerator import wait_for_reads
from shardopt.runtime.deferred_checks import is_taking_state
from shardopt.runtime.partial_loads import is_partly_loaded, mark_half_stepped, refuse_partly_loaded
from shardopt.runtime.signals import is_part_of
from shardopt.runtime.staging_fence import wait_for_copies
from shardopt.runtime.torch_gradients import reshard_before_writing
from shardopt.sharding.gradients import is_frozen
from shardopt.sharding.view import addresses_of, is_held, local_tensors
from shardopt.state.param_groups import PARAMS, SAVED_BY
from shardopt.state.paths import STATE

ANCHORS = "anchors."
"""The prefix of a parameter's name in state, for its anchor."""
ANCHOR = "anchor"
POSITION = "__semi_sync"
"""The name in state of the position within the interval, and the options that give it a meaning."""
STEPS, BEGUN, ISLANDS = "steps", "begun", "islands"

MakeOuter = Callable[[Mapping[str, Tensor]], KeyedOptimizer]


class OuterOptimizer(OptimizerWrapper):
    """An optimizer of anchors, the weights that all islands had when they last met.

    R ranks of an island have an anchor as they have the parameter, all islands the same. After H local steps
    the outer gradient of a parameter is its anchor minus its weights, as a mean over the islands; the wrapped optimizer
    steps the anchor by it, and the weights are set to (or mixed with) the anchor.

    State of its own: the anchors, and the position in the interval. A mean that is under way is no state: what looks
    at the state first takes the outer step that it is for, which is the same step then and later.

    Args:
        inner: the optimizer of the parameters.
        make_outer: makes the optimizer of the anchors, which it gets by the parameters' names.
        islands: who meets.
        schedule: when.
        alpha: what the weights keep of themselves in a merge, 0 to below 1.

    Raises:
        AlgorithmError, LayoutError, MismatchError, OptionError: as `SemiSync`.
    """

    steps_own_tensors = True
    """Tells saves, which look for optimizers of other tensors than their model's, that this is intended."""

    def __init__(
        self, inner: KeyedOptimizer, make_outer: MakeOuter, islands: Islands, schedule: SyncSchedule, alpha: float
    ) -> None:
        self._inner, self._islands, self._schedule, self._alpha = inner, islands, schedule, alpha
        self._params_by_name = {name: param for param, name in first_names(inner.params).items()}
        self._anchors = {name: anchor_of(name, param) for name, param in self._params_by_name.items()}
        self._exchanges: dict[int, tuple[list[str], Buckets]] = {}
        self._takes_any_islands = False
        self._position: dict[str, Any] = {
            STEPS: 0,
            BEGUN: False,
            "every": schedule.every,
            "fragments": schedule.fragments,
            "delay": schedule.delay,
            "alpha": alpha,
            ISLANDS: islands.count,
        }
        self._entries = {name: {ANCHOR: anchor} for name, anchor in self._anchors.items()}
        super().__init__(make_outer(self._anchors))
        refuse_unfit(self, "outer")
        self._fragment_of = self.agree()

    def agree(self, new: Mapping[str, Tensor] | None = None) -> dict[str, int]:
        """Finds differences between islands; returns name → fragment. Collective over all islands.

        Raises:
            MismatchError: parameters or options differ.
            OptionError: islands overlap.
        """
        options = {name: repr(value) for name, value in self._position.items() if name not in (STEPS, BEGUN, ISLANDS)}
        groups = [
            {name: as_number(value) for name, value in group.items() if name != PARAMS}
            for group in self._optimizer.param_groups
        ]
        options["outer"] = f"{type(self._optimizer).__name__} {groups}"
        numels = self._islands.agree_on({**self._params_by_name, **(new or {})}, options)
        return fragments_by_name(numels, self._schedule.fragments)

    @property
    def at_sync_point(self) -> bool:
        """Whether all islands have the same weights: none has taken a local step since they met."""
        return bool(self._position[STEPS] == 0)

    @torch.no_grad()
    def begin(self) -> None:
        """Copies the weights before the first local step to anchors. Collective over all islands, the first time.

        Raises:
            MismatchError: islands begin with other weights.
        """
        if self._position[BEGUN]:
            return
        self._take_weights()
        self._islands.refuse_other_weights(self._anchors)
        self._position[BEGUN] = True

    @torch.no_grad()
    def after_local_step(self) -> None:
        """Begins the exchanges that are due after this local step, and merges fragments that are due."""
        self._position[STEPS] += 1
        step = self._position[STEPS]
        due, merged = self._schedule.due(step), self._schedule.merged(step)
        if due is not None:
            self._begin_exchange(due, self._names_in(due))
        if merged is not None:
            self._merge(merged, self._alpha)
        if merged is not None and self._schedule.fragments == 1 and self._schedule.delay == 0 and self._alpha == 0:
            self._position[STEPS] = 0

    @torch.no_grad()
    @is_part_of("the sync of islands")
    def sync(self) -> None:
        """Makes all islands meet now: merges running exchanges, and takes an outer step on the rest. Collective."""
        if self.at_sync_point:
            return
        wait_for_copies()
        for fragment in self._schedule.in_flight(self._position[STEPS]):
            self._merge(fragment, self._alpha)
        self._begin_exchange(_ALL, list(self._anchors))
        self._merge(_ALL, 0.0)
        self._position[STEPS] = 0

    def settle(self) -> None:
        """Takes the outer steps of running exchanges, without merging them. Local, but waits for the means.

        Raises:
            PartialLoadError: this optimizer may be half changed. Not within `taking_state`: there a save refuses it by
                itself, on all ranks, and a load looks at what it replaces.
        """
        if is_partly_loaded(self):
            if not is_taking_state():
                refuse_partly_loaded([(type(self).__name__, self)])
            return
        if self._exchanges:
            wait_for_copies()
        for fragment in list(self._exchanges):
            self._outer_step(fragment)

    def add(self, params: Mapping[str, Tensor]) -> Callable[[], None]:
        """Prepares anchors for further parameters; the returned function adds them. Collective over all islands.

        Raises:
            StateError: islands are in the middle of an interval.
            MismatchError: parameters differ, or their values do.
        """
        if not self.at_sync_point:
            found, required = f"{self._position[STEPS]} local steps since islands met", "none"
            problem = Problem("add_param_group", found, required, "call sync() on all ranks before it")
            raise StateError("parameters are added in the middle of an interval", [problem], code="semi-sync")
        anchors = {name: anchor_of(name, param) for name, param in params.items()}
        fragment_of = self.agree(params)
        if self._position[BEGUN]:
            self._islands.refuse_other_weights(anchors)

        def put() -> None:
            self._optimizer.add_param_group({PARAMS: anchors})
            self._fragment_of = fragment_of
            self._params_by_name.update(params)
            self._anchors.update(anchors)
            self._entries.update({name: {ANCHOR: anchor} for name, anchor in anchors.items()})

        return put

    def take_any_islands(self, take: bool) -> None:
        """Sets whether loads accept state saved by another number of islands, at a sync point."""
        self._takes_any_islands = take

    def init_state(
        self, sparse_grad_parameter_names: Iterable[str] | None = None, *, names: Iterable[str] | None = None
    ) -> None:
        """Makes the wrapped optimizer's state; for all anchors if no names are given, since they take no gradients."""
        super().init_state(sparse_grad_parameter_names, names=self._anchors if names is None else names)

    def held_state_names(self) -> set[str]:
        """Returns the wrapped optimizer's names, the position, and the anchors of which this rank holds a part."""
        return {*self._optimizer.held_state_names(), *self._own_state()}

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return super().__getstate__()

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {len(self._anchors)} anchors, by {self._optimizer!r}"

    def _own_state(self) -> OwnState:
        anchors = {f"{ANCHORS}{name}": self._entries[name] for name in self._anchors if is_held(self._anchors[name])}
        return {POSITION: self._position, **anchors}

    def _gather(self) -> StateDict:
        if not self._position[BEGUN]:
            wait_for_copies()
            with torch.no_grad():
                self._take_weights()
        self.settle()
        return super()._gather()

    def _plan(self, plan: LoadPlan, offered: Mapping[str, Any]) -> None:
        state = offered.get(STATE)
        stored = state.get(POSITION) if isinstance(state, Mapping) else None
        if isinstance(state, Mapping) and isinstance(stored, Mapping):
            self._plan_position(plan, stored)
            config = {name: value for name, value in self._position.items() if name not in (STEPS, BEGUN)}
            offered = {**offered, STATE: {**state, POSITION: {**stored, **config}}}
            plan.then(self._forget_exchanges)
        super()._plan(plan, offered)

    def _plan_position(self, plan: LoadPlan, stored: Mapping[str, Any]) -> None:
        """Notes options saved with the position that differ here; at a sync point any interval may begin."""
        steps, key = stored.get(STEPS), f"{plan.section(STATE)}.{POSITION}"
        other_islands = stored.get(ISLANDS) != self._islands.count
        sync = "save where islands have just met (after sync(), or at the end of an interval)"
        if other_islands and not self._takes_any_islands:
            remedy = (
                f"resume with {stored.get(ISLANDS)}; or {sync}, and load within optimizer.as_island(...), which says "
                "whose inner state each island takes"
            )
            then = f"{stored.get(ISLANDS)} islands, {SAVED_BY}"
            plan.problem(f"{key}.{ISLANDS}", then, str(self._islands.count), remedy)
        if self._takes_any_islands and steps != 0:
            apart = f"{steps} local steps since islands met, and weights of each island"
            plan.problem(f"{key}.{STEPS}", apart, "0, to begin from another island's state", sync)
        for name in ("every", "fragments", "delay", "alpha"):
            here = self._position[name]
            if steps != 0 and stored.get(name) != here:
                found = f"{stored.get(name)!r}, in the middle of an interval"
                same = f"resume with {name}={stored.get(name)!r}; or {sync}: then any may follow"
                plan.problem(f"{key}.{name}", found, repr(here), same)

    def _forget_exchanges(self) -> None:
        """Drops running exchanges, whose weights a load has replaced."""
        for _, buckets in self._exchanges.values():
            buckets.end_mean()
        self._exchanges.clear()

    def _names_in(self, fragment: int) -> list[str]:
        return [name for name in self._anchors if self._fragment_of[name] == fragment]

    def _begin_exchange(self, fragment: int, names: list[str]) -> None:
        # In one order, so that ranks of a column agree, whatever groups they have. Without frozen ones: none of these
        # has changed, and an outer optimizer with weight decay steps on a gradient of zeros, too.
        names = sorted(name for name in names if not is_frozen(self._params_by_name[name]))
        buckets = self._islands.buckets_of([self._anchors[name] for name in names])
        views = iter(buckets.views)
        for name in names:
            anchors = local_tensors(self._anchors[name])
            weights = Weights(self._inner, self._params_by_name[name])
            weights.subtract_from(anchors, [next(views) for _ in anchors])
        buckets.begin_mean(self._islands.column)
        self._exchanges[fragment] = names, buckets

    def _outer_step(self, fragment: int) -> None:
        names, buckets = self._exchanges[fragment]
        buckets.wait()  # an interrupt in here has changed nothing
        with self._marked_if_changed(lambda: [flat._version for flat in buckets.flats]):
            buckets.end_mean()
        with self._marked_if_changed(self._steps_begun):
            step_by(self._optimizer, {name: self._anchors[name] for name in names}, buckets.views)
            del self._exchanges[fragment]  # not before: a step that has failed is not one that was taken

    @contextmanager
    def _marked_if_changed(self, seen: Callable[[], Any], weights: Iterable[Tensor] = ()) -> Iterator[None]:
        """Marks this optimizer if the block fails, or is interrupted, and what is seen is no longer as before.

        Args:
            weights: those that the block sets.
        """
        before = seen()
        try:
            yield
        except BaseException as error:  # also in a save, after which a program may go on
            if seen() != before:
                mark_half_stepped(self, f"an outer step ({type(error).__name__})", addresses_of(weights))
            raise

    def _steps_begun(self) -> list[Any]:
        """Returns how many steps of each leaf have begun; of one of the user's own nobody knows."""
        return [getattr(leaf._home, "steps_begun", object()) for leaf in self._optimizer._leaves()]

    def _merge(self, fragment: int, alpha: float) -> None:
        """Takes a fragment's outer step, unless a look at the state has taken it, and sets the weights."""
        names = list(self._anchors) if fragment == _ALL else self._names_in(fragment)
        if fragment in self._exchanges:
            self._outer_step(fragment)
        params = self._params_by_name.values()
        wait_for_reads(chain.from_iterable(map(local_tensors, params)))
        reshard_before_writing(params)
        with self._marked_if_changed(object, params):  # the anchors have changed already
            for name in names:
                weights = Weights(self._inner, self._params_by_name[name])
                weights.mix(local_tensors(self._anchors[name]), alpha)

    def _take_weights(self) -> None:
        for name, param in self._params_by_name.items():
            Weights(self._inner, param).copy_to(local_tensors(self._anchors[name]))


_ALL = -1
"""Means all fragments."""
