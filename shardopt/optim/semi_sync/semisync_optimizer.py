"""Semi-synchronous training under torchrec's name and signature."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardopt.algorithms.communicating import refuse_capture
from shardopt.errors import OptionError, Problem, StateError
from shardopt.optim.core.base import KeyedOptimizer
from shardopt.optim.core.combined import CombinedOptimizer
from shardopt.optim.semi_sync.islands.islands import Islands
from shardopt.optim.semi_sync.weights import Weights, refuse_unfit, step_by
from shardopt.optim.state_dict.groups import first_names
from shardopt.ranks import Group, SharedGroup
from shardopt.runtime.accelerator import wait_for_reads
from shardopt.runtime.partial_loads import mark_half_stepped
from shardopt.runtime.staging_fence import wait_for_copies
from shardopt.runtime.torch_gradients import reshard_before_writing
from shardopt.sharding.view import addresses_of, assemble, is_held, local_tensors
from shardopt.state.param_groups import PARAMS

__all__ = ["SemisyncOptimizer"]

SEMI_SYNC_LOCAL_OPTIM_KEY = "semi_sync_local_optim"
SEMI_SYNC_GLOBAL_OPTIM_KEY = "semi_sync_global_optim"
SEMI_SYNC_LOCAL_STATE_KEY = "semi_sync_local_"
SEMI_SYNC_GLOBAL_STATE_KEY = "semi_sync_global_"
SEMISYNC_GLOBAL_STEP_COUNTER_KEY = "__semisync_global_step_counter__"
SEMISYNC_LOCAL_STEP_COUNTER_KEY = "__semisync_local_step_counter__"
_OWN_KEY = "semi_sync"
_COUNT, _ANCHOR = "count", "anchor"


class SemisyncOptimizer(CombinedOptimizer):
    """Takes local steps, and after every `num_local_steps` a step of a global optimizer on the same parameters.

    If the global optimizer, or the torch optimizer in it, has a method `global_step(local_step_counter, closure)`, that
    is called instead, as in torchrec. Any other keyed optimizer makes the outer step of DiLoCo. The parameters get the
    values of the last meeting. Their gradients are these minus their own values, as a mean over `process_group`. Then
    the global optimizer steps. It computes in the parameters' own dtype: `SemiSync` keeps fp32 anchors of bf16
    parameters, overlaps, and saves all islands in one checkpoint.

    Names in `state_dict()` have "semi_sync_local_optim.", "semi_sync_global_optim." or "semi_sync." (counters and the
    values of the last meeting) before them. Islands that differ are saved each by itself: `checkpoint.save(url of the
    island, app, process_group=its ranks)`.

    Args:
        global_params: parameters, or groups of them, that the global optimizer has; in `global_optimizer.params`.
        optimizer: the local one.
        global_optimizer: the global one.
        num_local_steps: local steps before each global one, at least 1.
        semi_sync_worker_shard_group: makes no difference; torchrec logs by it.
        offload_global_model, non_blocking: make no difference, as in torchrec.
        process_group: the ranks that have the same shards, one of each island; not torchrec's. Without it there is
            nobody to meet, but in a `global_step` of its own.

    Raises:
        MismatchError: at the first step, islands begin with other weights; nothing was changed.
        IndexError: there are no global parameters.
        StateError: an optimizer is not a keyed one, two parameters have one name, or a global parameter is none.
        OptionError: `num_local_steps` is out of its range.
        AlgorithmError: an algorithm has weights that are not only the parameters, or evaluates the model itself.
    """

    def __init__(
        self,
        global_params: Iterable[Tensor] | Iterable[dict[str, Any]],
        optimizer: KeyedOptimizer,
        global_optimizer: KeyedOptimizer,
        num_local_steps: int = 16,
        semi_sync_worker_shard_group: ProcessGroup | None = None,
        offload_global_model: bool = False,
        non_blocking: bool = False,
        *,
        process_group: Group | None = None,
    ) -> None:
        given: list[Any] = list(global_params)
        if not given:
            raise IndexError("global_params: found none; required the parameters that global_optimizer has; pass them")
        if not isinstance(num_local_steps, int) or num_local_steps < 1:
            problem = Problem("num_local_steps", repr(num_local_steps), "a whole number, at least 1", "pass 16")
            raise OptionError("a semi-synchronous optimizer cannot be made", [problem], code="semi-sync")
        self._worker_model_params: list[Tensor] = (
            [param for each in given for param in each[PARAMS]] if isinstance(given[0], dict) else given
        )
        self._num_local_steps = num_local_steps
        self._local_step_counter = torch.zeros((), dtype=torch.int64, device="cpu")
        self._global_step_counter = torch.zeros((), dtype=torch.int64, device="cpu")
        self._own_defaults: dict[str, Any] = {"_save_param_groups": False}
        self._group = None if process_group is None else SharedGroup(process_group)
        self._own = KeyedOptimizer({}, {}, [])
        super().__init__(
            [
                (SEMI_SYNC_LOCAL_OPTIM_KEY, optimizer),
                (SEMI_SYNC_GLOBAL_OPTIM_KEY, global_optimizer),
                (_OWN_KEY, self._own),
            ]
        )
        self._optimizer_global_step = _global_step_of(global_optimizer)
        counters = {
            SEMISYNC_GLOBAL_STEP_COUNTER_KEY: self._global_step_counter,
            SEMISYNC_LOCAL_STEP_COUNTER_KEY: self._local_step_counter,
        }
        self._own.state.update({name: {_COUNT: counter} for name, counter in counters.items()})
        if self._optimizer_global_step is None:
            refuse_unfit(optimizer, "optimizer")
            refuse_unfit(global_optimizer, "global_optimizer")
            self._make_anchors()

    @property
    def _optimizer(self) -> KeyedOptimizer:
        return self._children[0]

    @property
    def _global_optimizer(self) -> KeyedOptimizer:
        return self._children[1]

    @property
    def param_groups(self) -> Any:
        """The groups of the local optimizer, and then of the global one; a new list of the live groups."""
        return [*self._optimizer.param_groups, *self._global_optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, param_groups: Any) -> None:
        self._refuse_replacing("param_groups")

    @property
    def params(self) -> Mapping[str, Tensor]:
        """FQN → parameter of either optimizer, and the two step counters."""
        return {
            **self._optimizer.params,
            **self._global_optimizer.params,
            SEMISYNC_GLOBAL_STEP_COUNTER_KEY: self._global_step_counter,
            SEMISYNC_LOCAL_STEP_COUNTER_KEY: self._local_step_counter,
        }

    @property
    def state(self) -> Any:
        """Parameter → its local and global state, with prefixes, and the counters; a new dict."""
        self._refuse_torchs_getters()
        local, outer = self._optimizer.state, self._global_optimizer.state
        merged: dict[Any, dict[str, Any]] = {
            key: {f"{SEMI_SYNC_LOCAL_STATE_KEY}{name}": value for name, value in local[key].items()} for key in local
        }
        for key in outer:
            entries = merged.setdefault(key, {})
            entries.update({f"{SEMI_SYNC_GLOBAL_STATE_KEY}{name}": value for name, value in outer[key].items()})
            entries[SEMISYNC_GLOBAL_STEP_COUNTER_KEY] = self._global_step_counter
            entries[SEMISYNC_LOCAL_STEP_COUNTER_KEY] = self._local_step_counter
        return merged

    @state.setter
    def state(self, state: Any) -> None:
        self._refuse_replacing("state")

    @property
    def defaults(self) -> dict[str, Any]:
        """Whether groups are saved, under "_save_param_groups"."""
        return self._own_defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._refuse_replacing("defaults")

    def save_param_groups(self, save: bool) -> None:
        """Sets whether `state_dict` has the groups of both, and `load_state_dict` needs them."""
        self._own_defaults["_save_param_groups"] = save
        self._optimizer.save_param_groups(save)
        self._global_optimizer.save_param_groups(save)

    def set_optimizer_step(self, step: int) -> None:
        """Passes a step number to each optimizer that takes one."""
        self._hand_on("set_optimizer_step", step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Passes options to each optimizer that takes them this way."""
        self._hand_on("update_hyper_parameters", params_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises, as a group has options for one optimizer only.

        Raises:
            StateError: always.
        """
        remedy = "add it to the optimizer that is meant, before this one is made"
        problem = Problem("add_param_group", "a group for two optimizers", "none", remedy)
        raise StateError("a semi-synchronous optimizer takes no further groups", [problem], code="semi-sync")

    def __repr__(self) -> str:
        local, outer = self._optimizer, self._global_optimizer
        return f"{SEMI_SYNC_LOCAL_OPTIM_KEY}: {local!r}, {SEMI_SYNC_GLOBAL_OPTIM_KEY}: {outer!r}"

    @property
    def _stepped(self) -> tuple[KeyedOptimizer, ...]:
        return (self._optimizer,)

    def _before_step(self) -> None:
        refuse_capture(type(self).__name__, "capture forward and backward alone")
        if self._optimizer_global_step is None and not self._local_step_counter:
            self._take_anchors()
            islands = self._islands()
            islands.agree_on(self._global_params, {"num_local_steps": str(self._num_local_steps)})
            islands.refuse_other_weights(self._anchors)

    def _after_step(self) -> None:
        self._local_step_counter += 1
        if int(self._local_step_counter) % self._num_local_steps:
            return
        self._global_step_counter += 1
        self._global_optimizer.zero_grad()
        wait_for_reads(chain.from_iterable(map(local_tensors, self._worker_model_params)))
        reshard_before_writing(self._worker_model_params)
        try:
            if self._optimizer_global_step is not None:
                self._optimizer_global_step(self._local_step_counter, None)
            else:
                self._step_globally()
            self._set_masters()
        except BaseException as error:  # an interrupt, too, behind which a program may go on
            changed = addresses_of(self._worker_model_params)
            mark_half_stepped(self, f"a global step ({type(error).__name__})", changed)
            raise

    @torch.no_grad()
    def _step_globally(self) -> None:
        """Steps the global optimizer from the values at the last meeting, by the mean change since."""
        wait_for_copies()
        names = sorted(self._anchors)
        islands = self._islands()
        buckets = islands.buckets_of([self._global_params[name] for name in names])
        views = iter(buckets.views)
        for name in names:
            anchors = local_tensors(self._anchors[name])
            weights = Weights(self._optimizer, self._global_params[name])
            weights.subtract_from(anchors, [next(views) for _ in anchors])
            weights.mix(anchors, 0.0)
        buckets.begin_mean(islands.column)
        buckets.end_mean()
        step_by(self._global_optimizer, {name: self._global_params[name] for name in names}, buckets.views)
        self._take_anchors()

    @torch.no_grad()
    def _set_masters(self) -> None:
        """Sets the masters of the local optimizer, which its next step uses, to what the global step has made."""
        for param in self._worker_model_params:
            Weights(self._optimizer, param).mix(local_tensors(param), 0.0)

    @torch.no_grad()
    def _take_anchors(self) -> None:
        for name, anchor in self._anchors.items():
            for into, weight in zip(local_tensors(anchor), local_tensors(self._global_params[name]), strict=True):
                into.copy_(weight)

    def _make_anchors(self) -> None:
        names = first_names(self._global_optimizer.params)
        strangers = [tuple(param.shape) for param in self._worker_model_params if param not in names]
        if strangers:
            found = f"{len(strangers)} that it has not, of shapes {strangers[:5]}"
            problem = Problem("global_params", found, "parameters of global_optimizer", "pass its parameters")
            raise StateError("a semi-synchronous optimizer cannot be made", [problem], code="semi-sync")
        self._global_params = {names[param]: param for param in self._worker_model_params}
        self._anchors = {
            name: assemble(param, [local.detach().clone() for local in local_tensors(param)])
            for name, param in self._global_params.items()
        }
        held = {name: anchor for name, anchor in self._anchors.items() if is_held(anchor)}
        self._own.state.update({name: {_ANCHOR: anchor} for name, anchor in held.items()})

    def _islands(self) -> Islands:
        group = None if self._group is None else self._group.process_group
        return Islands(group, SharedGroup(self._optimizer.process_group))

    def _index(self) -> None:
        """Indexes the parameters, which both children may have under one name, as they never step at once."""
        own, outer = self._optimizer.params, self._global_optimizer.params
        twice = [name for name in own.keys() & outer.keys() if own[name] is not outer[name]]
        if twice:
            both, remedy = "a parameter of each optimizer", "make both of one model's named_parameters()"
            problems = [Problem(name, both, "one tensor", remedy) for name in sorted(twice)]
            raise StateError("two parameters have one name", problems, code="semi-sync")
        self._params, self._owners = {}, {}

    def _hand_on(self, method: str, value: Any) -> None:
        for child in (self._optimizer, self._global_optimizer):
            call: Callable[[Any], Any] | None = getattr(child, method, None)
            if call is not None:
                call(value)

    @staticmethod
    def _extract_prefixed_state(param_state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """Returns the entries whose names begin with a prefix, with the prefix removed."""
        return {name.removeprefix(prefix): value for name, value in param_state.items() if name.startswith(prefix)}


def _global_step_of(optimizer: KeyedOptimizer) -> Callable[[Tensor, Any], Any] | None:
    """Returns the `global_step` of an optimizer, or of one of its parts; None if there is none.

    torchrec asks what is under `_optimizer`, as a keyed optimizer of somebody's own may have it.
    """
    inside = getattr(optimizer, "_optimizer", None), *optimizer._atoms()
    found = (getattr(each, "global_step", None) for each in (optimizer, *inside))
    return next((each for each in found if callable(each)), None)
