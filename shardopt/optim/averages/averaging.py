"""Averages of a model's weights over training, plain or sharded; `EMA` and `SWA` are its kinds.

    opt = shardopt.keyed("adamw", model.named_parameters())
    ema = shardopt.EMA(model, decay=0.999)
    ema.attach(opt)                              # an update after each step
    with ema.swap():
        evaluate(model)                          # with the averages; afterwards all is as it was
    checkpoint.save(url, {"model": model, "optimizer": opt, "ema": ema})

Averages are sharded like their weights: an update neither communicates nor waits, but for averages on another device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardopt.algorithms.communicating import refuse_capture
from shardopt.errors import Problem, StateError
from shardopt.optim.averages.swapping import AveragesInModel, Places, Swapped, refuse_replaced
from shardopt.optim.averages.tensors import (
    Pair,
    buckets,
    by_own_names,
    by_plain_name,
    copied,
    names_of_averages,
    refuse_other_shapes,
    refuse_unaveraged,
    refuse_uncounted,
)
from shardopt.optim.state_dict.load_plan import LoadPlan, Unmatched
from shardopt.optim.state_dict.saved_form import plan_keys
from shardopt.runtime.companions import companions_of, part, step_along
from shardopt.runtime.signals import CHANGING, is_part_of
from shardopt.runtime.staging_fence import wait_for_copies
from shardopt.runtime.torch_gradients import reshard
from shardopt.runtime.torch_private import out_of_inference_mode
from shardopt.sharding.gradients import is_added_up
from shardopt.sharding.swapped import refuse_swapped
from shardopt.sharding.view import assemble, local_tensors, view_of
from shardopt.state.param_groups import AVERAGING, N_AVERAGED
from shardopt.state.paths import STATE
from shardopt.state.trainer_optimizers import constructed

AvgFn = Callable[[Tensor, Tensor, Tensor], Tensor]
MultiAvgFn = Callable[[list[Tensor], list[Tensor], Tensor], Any]


class Averaging:
    """Averages of a model's weights by name; the base of `EMA` and `SWA`.

    The first update copies the weights, later ones move the averages towards them. A tensor that is not floating or
    complex (counters, masks, positions) has no average: its last value stands for it. What is made of codes and scales
    (a frozen NF4 weight) is left out.

    Everything here is local to the rank; ranks stay together because they update at the same steps.

    Args:
        model: sharded already, or plain. Its parameters are averaged, tied ones once, by the names that
            `named_parameters()` gives, without those of wrappers for checkpointed activations, torch.compile and
            DistributedDataParallel.
        dtype: of the averages of real floating-point weights, torch.float32 for bf16 weights, in which small changes
            are lost; None for that of each weight.
        use_buffers: whether buffers are averaged as well, as far as they are floating-point.
        device: where averages are kept, such as "cpu" for those of a model on a GPU: an update then waits for the
            copies of the weights. None: beside each weight, also when that moves.
        avg_fn: the formula, as torch's `AveragedModel` takes it: (average, weight, n_averaged) → new average, from the
            second update on. Of sharded weights it is given local tensors, so that it has to be elementwise. It is
            code, and not saved.
        multi_avg_fn: the same for lists of averages, which it changes in place, and weights, of one device and dtype.

    Raises:
        LayoutError: a weight is sharded in a way that cannot be described, or has no memory yet.
        StateError: the dtype is not a floating-point one, both formulas are given, or the model is in
            FullyShardedDataParallel.
    """

    _entry: ClassVar[str]
    """The name of an average in state, which keeps kinds from being loaded as one another."""

    @out_of_inference_mode()
    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        use_buffers: bool = False,
        *,
        device: torch.device | str | int | None = None,
        avg_fn: AvgFn | None = None,
        multi_avg_fn: MultiAvgFn | None = None,
    ) -> None:
        if avg_fn is not None and multi_avg_fn is not None:
            problem = Problem("avg_fn", "avg_fn and multi_avg_fn", "one formula", "leave one of them out")
            raise StateError("averages cannot be made", [problem], code="averages")
        if dtype is not None and not dtype.is_floating_point:
            problem = Problem("dtype", str(dtype), "a floating-point dtype", "pass torch.float32")
            raise StateError("averages cannot be made", [problem], code="averages")
        if not isinstance(model, nn.Module):
            required, remedy = "a module, whose parameters have names", "pass the model itself"
            problem = Problem("model", f"a {type(model).__name__}", required, remedy)
            raise StateError("averages cannot be made", [problem], code="averages")
        self._model, self._use_buffers = model, use_buffers
        self._device = None if device is None else torch.device(device)
        self._avg_fn, self._multi_avg_fn = avg_fn, multi_avg_fn
        reshard(model.modules())
        self._params = by_plain_name(model, model.named_parameters())
        refuse_unaveraged(self._params)
        self._places = Places(model, self._params)
        for name, tensor in self._tensors().items():
            view_of(tensor, name)  # refuses a tensor that could not be saved
        self._averages = {
            name: [copied(local, dtype, self._device) for local in local_tensors(tensor)]
            for name, tensor in self._tensors().items()
        }
        self._n_averaged = torch.zeros((), dtype=torch.int64, device="cpu")
        self._in_model: AveragesInModel | None = None

    @property
    def module(self) -> nn.Module:
        """The model, while it holds the averages; torch's `AveragedModel.module` is such a model, too.

        Raises:
            AttributeError: they do not stand in it, and a state_dict() of it would be that of its own weights.
        """
        if not self.swapped:
            raise AttributeError(
                f"{type(self).__name__} keeps averages beside the model, and has no module with them; put them in the "
                "model for a while: `with ema.swap(): weights = model.state_dict()`"
            )
        return self._model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's forward with the averages, without gradients; restores its own weights on return.

        This is `AveragedModel`'s call, but it costs a swap and back. For more than one batch `with ema.swap():` is
        cheaper; within it this call is the model's forward alone. Every rank must call.

        Raises:
            StateError: as `swap`.
        """
        if self.swapped:
            return self._model(*args, **kwargs)
        with torch.no_grad(), self.swap():
            return self._model(*args, **kwargs)

    @property
    def n_averaged(self) -> int:
        """The number of updates."""
        return int(self._n_averaged)

    @property
    def swapped(self) -> bool:
        """Whether the model holds the averages."""
        return self._in_model is not None

    @is_part_of(CHANGING)
    def update(self) -> None:
        """Updates the averages with the model's current weights; waits for no device if both are on the same one.

        Where averages have another dtype or device than weights, up to 64 MiB (or one weight) are converted at a time.

        Raises:
            AlgorithmError: it is captured into a graph.
            StateError: the model holds the averages, it has another parameter in the place of one (`fully_shard`, or
                `load_state_dict(assign=True)`, since), or a decay is out of its range. Nothing was changed.
        """
        refuse_capture(type(self).__name__, "do not attach the averages; call their update() after each replay")
        self._refuse_swapped("averages cannot be updated")
        refuse_swapped("averages of other averages cannot be made", self._params.values())
        n = self.n_averaged
        own = self._avg_fn is None and self._multi_avg_fn is None
        step_size = self._step_size(n) if n and own else 1.0
        with torch.no_grad():
            for averages, weights in buckets(list(self._pairs())):
                if n == 0 or not (averages[0].is_floating_point() or averages[0].is_complex()):
                    torch._foreach_copy_(averages, weights)
                else:
                    converted = [weight.detach().to(averages[0].device, averages[0].dtype) for weight in weights]
                    if own:
                        torch._foreach_lerp_(averages, converted, step_size)  # as torch's: one weight for all
                    else:
                        self._apply(averages, converted)
        self._n_averaged += 1

    def update_parameters(self, model: nn.Module) -> None:
        """Calls `update`, under the name that torch's `AveragedModel` has for it.

        Args:
            model: the one that is averaged, or a wrapper around it.

        Raises:
            StateError: it has other parameters, which would not be looked at; or as `update`.
        """
        given = {id(parameter) for parameter in model.parameters()}
        if given != {id(parameter) for parameter in self._params.values()}:
            found, required = "a model with other parameters", "the one that the averages were made of"
            problem = Problem("model", found, required, f"pass that, or make {type(self).__name__}(model) of this one")
            raise StateError("averages follow one model", [problem], code="averages")
        self.update()

    def modules(self) -> Iterator[nn.Module]:
        """Raises, as averages are no module: torch's `update_bn` asks for modules, and would do half of its work.

        Raises:
            StateError: names what to call.
        """
        remedy = "call shardopt.optim.update_bn(loader, model) within `with averages.swap():`, and evaluate there"
        problem = Problem(type(self).__name__, "averages beside a model", "a module", remedy)
        raise StateError("averages have no modules of their own", [problem], code="averages")

    def _apply(self, averages: list[Tensor], weights: list[Tensor]) -> None:
        """Updates averages by the user's formula."""
        if self._multi_avg_fn is not None:
            self._multi_avg_fn(averages, weights, self._n_averaged.clone())
            return
        assert self._avg_fn is not None
        for average, weight in zip(averages, weights, strict=True):
            average.copy_(self._avg_fn(average, weight, self._n_averaged.clone()))

    def attach(self, optimizer: Optimizer) -> Callable[[], None]:
        """Updates after each step of `optimizer`, which then refuses to step while the model holds the averages.

        Steps that a GradScaler skips do not count; to know it of torch's fused optimizers waits for the device.
        Attached twice is once. Of several optimizers attach to the one that steps last: each counts. Copies are not.
        These replace averages of this model before its parameters changed; of another decay, only if some are gone.

        Returns:
            A function that ends this.
        """
        optimizer = constructed(optimizer)
        for other in companions_of(optimizer):
            are_alike = type(other) is type(self) and vars(other).get("decay") == vars(self).get("decay")
            if isinstance(other, Averaging) and other._model is self._model and other._places.are_left(are_alike):
                part(optimizer, other, other._before_step, other._after_step)
        return step_along(optimizer, self, AVERAGING, self._before_step, self._after_step)

    def _before_step(self, *unused: Any) -> None:
        refuse_capture(type(self).__name__, "do not attach the averages; call their update() after each replay")
        self._refuse_swapped("a step would train the averages, and be lost")

    def _after_step(self, optimizer: Optimizer, *unused: Any) -> None:
        if not getattr(optimizer, "found_inf", None):  # which torch's GradScaler sets where the kernel is to skip
            self.update()

    @is_part_of(CHANGING)
    def swap(self) -> Swapped:
        """Puts the averages into the model's own memory; called again, restores the weights, bit for bit.

        All parameters and buffers come back as they were, so batch-norm statistics may be recomputed in between
        (`update_bn`). Before the first update the averages are the weights. While the averages stand in the model its
        own weights are kept beside it: memory for one more copy of this rank's shards. Until then nothing here can be
        updated, saved or loaded. Keyed and attached optimizers refuse to step and to change their mode. Other averages
        of these weights refuse to be updated or put in. The model alone can be saved, and is then that of the averages;
        `checkpoint.load` into it is refused. If somebody else writes into its parameters, as torch's `load_state_dict`
        does, they are not put back until swap() is called again. The unsharded parameters that a forward of
        `fully_shard` has left are freed. Local, but every rank must swap.

        Returns:
            A context that puts the weights back at its end: `with ema.swap(): evaluate(model)`.

        Raises:
            StateError: the model has other parameters than when the averages were made, a weight is sharded in another
                way, or the model holds other averages. Or somebody wrote into the averages before the weights are put
                back, also at the end of the context. Nothing was changed.
        """
        if not self.swapped:
            refuse_swapped("averages cannot be put in the model", self._params.values())
        self._swap(lose=False)
        return Swapped(lambda: self.swapped, self._swap)

    def state_dict(self) -> dict[str, Any]:
        """Returns `{"state": {fqn: {"ema" or "swa": average}, "__averaging": {"n_averaged": int64 scalar}}}`.

        Averages are placed like their weights, and are the live ones: writing into them changes them. The decay is an
        argument, and not saved.

        Raises:
            StateError: the averages stand in the model, where a checkpoint would take them for its weights; or the
                model has other parameters than when the averages were made.
        """
        self._refuse_swapped("averages cannot be saved or loaded")
        return {STATE: self._state()}

    def averages_of_buffers(self) -> list[Tensor]:
        """Returns the averages of buffers. Those of batch norm differ between ranks; a save stores the first rank's."""
        return [each for name, averages in self._averages.items() if name not in self._params for each in averages]

    def names_of_averaged_model(self, names: Iterable[str]) -> dict[str, tuple[str, str]]:
        """Maps names in the state of torch's `AveragedModel` over such a model to the names and entries used here.

        Args:
            names: as in its `state_dict()`, "n_averaged" and "module.…".
        """
        own = names_of_averages(self._model, names, self._averages.keys()).items()
        return {N_AVERAGED: (AVERAGING, N_AVERAGED), **{name: (short, self._entry) for name, short in own}}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, convert_dtype: bool = False
    ) -> Unmatched:
        """Loads averages in place and all or nothing, as a keyed optimizer loads its state.

        Args:
            state_dict: as from `state_dict()`, or that of torch's `AveragedModel` over the same model.
            strict: whether names on one side only are errors; otherwise they are passed over, and returned.
            convert_dtype: whether averages of another floating-point dtype are converted to the one that is here.
                Numbers that it cannot hold are errors.

        Raises:
            MismatchError: lists what does not fit, also averages without a count where none is; nothing was changed.
            StateError: the averages stand in the model.
        """
        plan = LoadPlan(strict, convert_dtype, into="averaging")
        self._plan(plan, state_dict)
        plan.apply()
        return plan.unmatched

    def check_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, convert_dtype: bool = False) -> None:
        """Raises what `load_state_dict` would raise, and changes nothing. Meta tensors stand for stored ones.

        Raises:
            MismatchError: lists everything that does not fit.
            StateError: the averages stand in the model.
        """
        plan = LoadPlan(strict, convert_dtype, descriptions=True, into="averaging")
        self._plan(plan, state_dict)
        plan.check()

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {len(self._averages)} tensors after {self.n_averaged} updates"

    def _step_size(self, n: int) -> float:  # the weight of the next model in averages of n >= 1 models
        raise NotImplementedError

    def _plan(self, plan: LoadPlan, offered: Mapping[str, Any]) -> None:
        self._refuse_swapped("averages cannot be saved or loaded")
        offered = self._of_averaged_model(offered)
        plan_keys(plan, saves_groups=False, offered=offered)
        if STATE in offered:
            own, state = self._state(), by_own_names(offered[STATE], self._averages)
            remedy = "load what was saved from the same model and kind of average, or pass strict=False"
            plan.mapping(STATE, own, refuse_uncounted(plan, own, state), remedy)

    def _of_averaged_model(self, offered: Mapping[str, Any]) -> Mapping[str, Any]:
        """Converts the state of torch's `AveragedModel` to our form; returns any other unchanged."""
        if STATE in offered or not isinstance(offered.get(N_AVERAGED), Tensor):
            return offered
        named = self.names_of_averaged_model(offered).items()
        taken = [each for each in named if each[1][0] == AVERAGING or is_added_up(offered[each[0]])]
        return {STATE: {own: {entry: offered[name]} for name, (own, entry) in taken}}

    def _state(self) -> dict[str, Any]:
        self._places.refuse_others()
        list(self._pairs())  # averages follow their weights
        tensors = self._tensors()
        state = {name: {self._entry: assemble(tensors[name], each)} for name, each in self._averages.items()}
        return {**state, AVERAGING: {N_AVERAGED: self._n_averaged}}

    def _tensors(self, whole: bool = False) -> dict[str, Tensor]:
        """Returns the tensors to average, or all of the model. Looks up buffers each time: modules replace some."""
        buffers = self._model.named_buffers() if whole or self._use_buffers else ()
        return {**self._params, **by_plain_name(self._model, buffers)}

    def _pairs(self) -> Iterator[Pair]:
        """Yields each average with its local tensor. Averages follow weights that moved to another device."""
        refuse_replaced(dict.fromkeys(self._places.replaced(also_modules=self.n_averaged == 0), ""))
        tensors = self._tensors()
        for name, averages in self._averages.items():
            weights = local_tensors(tensors[name]) if name in tensors else ()
            refuse_other_shapes(name, weights, averages, "when the averages were made")
            for i, local in enumerate(weights):
                if self._device is None and averages[i].device != local.device:
                    averages[i] = averages[i].to(local.device)
                yield averages[i], local

    def _swap(self, lose: bool) -> None:
        """Swaps averages into the model, or its own weights back; `lose` as for `AveragesInModel`."""
        reshard(self._model.modules())
        wait_for_copies()  # a save in the background may still be taking the weights
        now = by_plain_name(self._model, self._model.named_parameters())
        with torch.no_grad():
            if self._in_model is None:
                self._places.refuse_others()
                for averages, weights in () if self.n_averaged else buckets(list(self._pairs())):  # not as once made
                    torch._foreach_copy_(averages, weights)
                self._in_model = AveragesInModel(self, self._params, self._tensors(whole=True), list(self._pairs()))
                self._in_model.put_in()
            else:
                self._in_model.put_back(self._tensors(whole=True), now, lose)
                self._in_model = None

    def _refuse_swapped(self, why: str) -> None:
        if self.swapped:
            texts = "averages in the model", "its own weights", "call swap() to put them back"
            raise StateError(why, [Problem(type(self).__name__, *texts)], code="averages")
