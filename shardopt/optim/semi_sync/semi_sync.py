"""Semi-synchronous training: islands step independently, and meet after a number of steps (DiLoCo)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.communicating import refuse_capture
from shardopt.errors import OptionError, Problem, StateError
from shardopt.optim.core.base import KeyedOptimizer
from shardopt.optim.core.by_position import ByPosition
from shardopt.optim.core.combined import CombinedOptimizer
from shardopt.optim.keyed import keyed
from shardopt.optim.semi_sync.islands.islands import Islands
from shardopt.optim.semi_sync.islands.schedule import SyncSchedule
from shardopt.optim.semi_sync.outer import OuterOptimizer
from shardopt.optim.semi_sync.weights import refuse_unfit
from shardopt.optim.state_dict.groups import named
from shardopt.ranks import Group, SharedGroup
from shardopt.sharding.swapped import STEP_IN_SWAP, refuse_swapped
from shardopt.state.param_groups import PARAMS

__all__ = ["SemiSync"]

DILOCO = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
"""The outer options published for DiLoCo (arXiv:2311.08105)."""
ISLANDS, GLOBAL = "islands", "global"

Factory = Callable[[Mapping[str, Tensor]], KeyedOptimizer]


class SemiSync(CombinedOptimizer):
    """Takes local steps on each island, and at intervals an outer step by the islands' mean change.

    An island is some ranks of the job that train a whole model by themselves (`fully_shard`, tensor parallel, …), on
    data of their own. All islands begin with the same weights and are laid out alike. Each step is one of `inner`, on
    this island alone. After `every` of them, the islands average the change since they last met. The negative of that
    mean is the gradient of one step of `outer` on the weights of then, the *anchors*. All islands get the result.
    Source: Douillard et al., DiLoCo (2023), arXiv:2311.08105.

    With `fragments` the parameters are exchanged in so many parts, one after the other over the interval. With `delay`
    the exchange runs during that many further local steps. `alpha` is the share that the weights then keep of these:
    alpha · weight + (1 - alpha) · anchor. Source: Streaming DiLoCo (2025), arXiv:2501.18512.

    **State.** What belongs to one island has the names "islands.<number>.<fqn>" (its inner state and groups). What all
    share has "global.<fqn>" (outer state), "global.anchors.<fqn>" and "global.__semi_sync" (the position in the
    interval). Parameters that differ between islands are saved for each of them: put the model under `own`. Anchors are
    in fp32 where parameters have fewer bits. `param_groups` are those of `inner`, which schedules and scalers so drive;
    those of the outer optimizer are in `outer`.

    Args:
        inner: the optimizer of the parameters, or a wrapper of it. This island must be its group (`keyed(...,
            process_group=mesh["island"])`), so that norms and agreement stay within it. It lives on inside.
        outer: an algorithm's name or class, or a function that makes a keyed optimizer of {name: anchor}.
        every: local steps from one exchange of a parameter to its next.
        process_group: the ranks that have the same shards, one of each island: a process group, or a device mesh
            (`mesh["across"]`). What islands exchange goes over it alone. None where this is the only island.
        outer_options: of the algorithm; by default DiLoCo's for "sgd" (lr 0.7, Nesterov momentum 0.9), else the
            algorithm's own.
        fragments: how many, at most `every`.
        delay: local steps behind which an exchange runs, less than `every`.
        alpha: 0 (weights become the anchor) to below 1.

    Every rank of every island must make it, step it and add groups to it, as often and in the same order. An exchange
    holds the outer gradients of one fragment, in the anchors' dtype, in buffers of 64 MiB.

    Raises:
        StateError: `inner` is not a keyed optimizer.
        OptionError: an option is out of its range, or islands overlap.
        AlgorithmError: an algorithm has weights that are not only the parameters (Schedule-Free), evaluates the model
            itself (L-BFGS), or is not known.
        LayoutError: a parameter is not of real floating-point numbers, or of a registered kind.
        MismatchError: parameters or options are not alike on all islands. Every rank raises.
    """

    def __init__(
        self,
        inner: KeyedOptimizer,
        outer: str | type[Optimizer] | Factory = "sgd",
        *,
        every: int,
        process_group: Group | None,
        outer_options: Mapping[str, Any] | None = None,
        fragments: int = 1,
        delay: int = 0,
        alpha: float = 0.0,
    ) -> None:
        schedule = SyncSchedule(every, fragments, delay)
        if not isinstance(alpha, int | float) or not 0 <= alpha < 1:
            problem = Problem("alpha", repr(alpha), "0, or more and below 1", "pass what weights keep of themselves")
            raise OptionError("invalid arguments of a semi-synchronous optimizer", [problem], code="semi-sync")
        if not isinstance(inner, KeyedOptimizer):
            problem = Problem("inner", f"a {type(inner).__name__}", "a KeyedOptimizer", "build it with shardopt.keyed")
            raise StateError("invalid arguments of a semi-synchronous optimizer", [problem], code="semi-sync")
        refuse_unfit(inner, "inner")
        islands = Islands(process_group, SharedGroup(inner.process_group))
        make_outer = partial(_make_outer, outer, outer_options, inner.process_group)
        made = OuterOptimizer(inner, make_outer, islands, schedule, float(alpha))
        self._inner, self._outer, self._islands = inner, made, islands
        super().__init__([(f"{ISLANDS}.{islands.number}", inner), (GLOBAL, made)])

    @property
    def inner(self) -> KeyedOptimizer:
        """The optimizer of the parameters."""
        return self._inner

    @property
    def outer(self) -> KeyedOptimizer:
        """The optimizer of the anchors; change its options only right after a merge."""
        return self._outer._optimizer

    @property
    def anchors(self) -> Mapping[str, Tensor]:
        """FQN → the live weights at the islands' last meeting, placed like the parameter."""
        return dict(self._outer._anchors)

    @property
    def at_sync_point(self) -> bool:
        """Whether all islands have the same weights now: none has taken a local step since they met.

        With fragments, a delay or alpha that is only before the first step, and after `sync`.
        """
        return self._outer.at_sync_point

    def own(self, app: Mapping[str, Any]) -> dict[str, Any]:
        """Returns this island's own part of an app, under the island's number: `{"islands": {"0": app}}`.

            app = {"optimizer": optimizer, "step": 0, **optimizer.own({"model": model, "data": sampler})}

        That is the model, whose weights differ between islands from a local step to the next meeting, and its buffers.
        It is also what each island has by itself: positions in its data, random states.
        """
        return {ISLANDS: {self._number: dict(app)}}

    @contextmanager
    def as_island(self, number: int) -> Iterator[SemiSync]:
        """Within this context, loads read what island `number` saved as this island's own, from any number of islands.

        So a run resumes with more or fewer islands. What was saved at a sync point has the same weights for all; each
        island takes the inner state of one of the former islands. `own` has that number, too.

            with optimizer.as_island(optimizer_number % 2):
                checkpoint.load(url, {"optimizer": optimizer, **optimizer.own({"model": model})}, init_state=True)

        Where there are fewer islands than before, pass `strict=checkpoint.Strictness(unexpected="ignore")`.
        """
        before = self._keys[0]
        self._rename(f"{ISLANDS}.{number}")
        self._outer.take_any_islands(True)
        try:
            yield self
        finally:
            self._rename(before)
            self._outer.take_any_islands(False)

    def sync(self) -> None:
        """Makes the islands meet now: takes an outer step on all changes, and begins an interval. Collective over all.

        What is under way is merged first. Nothing happens at a sync point. It is one more outer step, so training
        continues differently.

        The hooks before a step run, as weights are changed here too. It waits for saves in the background. It is
        refused after a load that failed halfway, and while the model holds averages.
        """
        refuse_swapped(STEP_IN_SWAP, self._inner.params.values())
        self._before_backward()
        self._outer.sync()

    def unshared_tensors(self) -> list[tuple[tuple[str, ...], list[Tensor]]]:
        """Returns the parameters whose values now belong only to this island, and their place in an app."""
        return [] if self.at_sync_point else [((ISLANDS, self._number), list(self._inner.params.values()))]

    @property
    def param_groups(self) -> Any:
        """The groups of `inner`."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: Any) -> None:
        self._inner.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of `inner`."""
        return self._inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._inner.defaults = defaults

    @property
    def process_group(self) -> Group | None:
        """The ranks of this island."""
        return self._inner.process_group

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to `inner`, and anchors with the outer optimizer's defaults. Collective over all islands.

        Raises:
            StateError: islands are in the middle of an interval, or as that of `inner`; nothing was changed.
            MismatchError: islands do not add the same parameters with the same values; nothing was changed.
        """
        params = named(param_group[PARAMS], dropped="")
        put = self._outer.add(params)
        self._inner.add_param_group({**param_group, PARAMS: params})
        put()
        self._index()

    def as_torch(self) -> ByPosition:
        """Raises, as positions are for a model's parameters, and anchors are none.

        Raises:
            StateError: always.
        """
        remedy = "save through shardopt.checkpoint; inner.as_torch() has only the inner state"
        problem = Problem("as_torch", "state of parameters and of anchors", "only of parameters", remedy)
        raise StateError("a semi-synchronous optimizer has no positions", [problem], code="semi-sync")

    def __repr__(self) -> str:
        position = self._outer._position
        return (
            f"SemiSync of {self._inner!r} on island {self._islands.number} of {self._islands.count}, every "
            f"{position['every']} steps by {self.outer!r}"
        )

    @property
    def _stepped(self) -> tuple[KeyedOptimizer, ...]:
        return (self._inner,)

    def _before_step(self) -> None:
        refuse_capture(type(self).__name__, "capture forward and backward alone")
        self._outer.begin()

    def _after_step(self) -> None:
        self._outer.after_local_step()

    def _atoms(self) -> tuple[Optimizer, ...]:
        """Returns the innermost optimizers of `inner`, as anchors have no gradients for a scaler."""
        return self._inner._atoms()

    @property
    def _number(self) -> str:
        """The number under which this island is saved and loaded."""
        return self._keys[0].removeprefix(f"{ISLANDS}.")

    def _rename(self, key: str) -> None:
        self._keys[0] = key
        self._index()


def _make_outer(
    outer: Any, options: Mapping[str, Any] | None, island: Group | None, anchors: Mapping[str, Tensor]
) -> KeyedOptimizer:
    """Makes the outer optimizer of anchors."""
    if isinstance(outer, str) or (isinstance(outer, type) and issubclass(outer, Optimizer)):
        if options is None and isinstance(outer, str) and outer.lower() == "sgd":
            options = DILOCO
        return keyed(outer, dict(anchors), process_group=island, **(options or {}))
    if not callable(outer) or isinstance(outer, Optimizer) or options is not None:
        found = f"a {type(outer).__name__}" + ("" if options is None else " and outer_options")
        required = "an algorithm's name or class, or a function of {name: anchor} alone"
        remedy = 'pass outer="adamw" with outer_options, or lambda anchors: shardopt.keyed("adamw", anchors, lr=0.1)'
        raise OptionError("there is no outer optimizer", [Problem("outer", found, required, remedy)], code="semi-sync")
    made = outer(dict(anchors))
    if not isinstance(made, KeyedOptimizer) or {*made.params} != {*anchors}:
        found = f"a {type(made).__name__}" + (f" of {len(made.params)}" if isinstance(made, KeyedOptimizer) else "")
        required = f"a KeyedOptimizer of all {len(anchors)} anchors, by their names"
        remedy = 'return shardopt.keyed("adamw", anchors, ...)'
        problem = Problem("outer", found, required, remedy)
        raise StateError("the outer optimizer cannot be made", [problem], code="semi-sync")
    return made
