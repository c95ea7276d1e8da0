"""All private API that shardopt uses of torch.autograd, torch.amp and modules.

Each is present in torch 2.11, 2.12, 2.13 and 2.15; a test of each fails by name where a later torch differs.
"""

from __future__ import annotations

import copy
import gc
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, FSDPStateContext
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from shardopt.runtime.live_objects import instances_of, none_frozen

BatchNorm = _BatchNorm
"""All batch-norm layers, including users' own, as torch's `update_bn` looks for them."""


def backward_under_way() -> int:
    """Returns a number unique to the running backward; -1 outside of backwards.

    `fully_shard` finishes some gradients in a callback at the end of backward, which has the number of that backward.
    """
    return torch._C._current_graph_task_id()


def gradient_hooks(parameter: Tensor) -> list[Callable[[Tensor], None]]:
    """Returns the hooks of `register_post_accumulate_grad_hook`, which torch's autograd and `fully_shard` call."""
    hooks: Mapping[int, Callable[[Tensor], None]] | None = parameter._post_accumulate_grad_hooks
    return list((hooks or {}).values())


def is_flattened(parameter: Tensor) -> bool:
    """Whether a parameter is, or is a piece of, a flat parameter of FullyShardedDataParallel (FSDP1)."""
    # Not by getattr: what a ShardedTensor does not have goes through `__torch_function__`, which warns.
    return vars(parameter).get("_fsdp_flattened", False) is True


def in_forward_of_ddp() -> bool:
    """Whether DistributedDataParallel is running the forward of a module."""
    return DistributedDataParallel._active_ddp_module is not None


def in_pipeline_schedule() -> bool:
    """Whether a schedule of torch.distributed.pipelining with several micro-batches is running.

    It looks at the stacks of all threads, as on accelerators backward has threads of its own.
    """
    package = "torch.distributed.pipelining"
    return package in sys.modules and any(
        str(frame.f_globals.get("__name__")).startswith(f"{package}.")
        and getattr(frame.f_locals.get("self"), "_n_microbatches", 1) > 1
        for frame in _frames()
    )


def _frames() -> Iterator[FrameType]:
    """Yields what all threads are running, each from its innermost call."""
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            yield frame
            frame = frame.f_back


def reduced_by_ddp(parameters: Iterable[Tensor]) -> bool:
    """Whether a DistributedDataParallel of this process averages the gradients of any of these parameters."""
    if not dist.is_initialized():
        return False  # DistributedDataParallel needs a process group
    wanted = set(map(id, parameters))
    with none_frozen():
        if not _reducing(wanted):
            return False
        gc.collect()  # one that nobody has any more
        return bool(_reducing(wanted))


def states_of_communication_hooks(parameters: Iterable[Tensor]) -> list[Any]:
    """Returns what communication hooks of a DistributedDataParallel of these parameters were registered with.

    Also within tuples. Not what is the same in each run, such as process groups and plain values, nor torch's own
    states for mixed precision and steps in backward. The search takes long, and is made only in programs that have
    imported torch's hooks.
    """
    if "torch.distributed.algorithms.ddp_comm_hooks" not in sys.modules or not dist.is_initialized():
        return []
    with none_frozen():
        # Without hooks is one whose constructor has failed.
        hooks = [hook for each in _reducing(set(map(id, parameters))) for hook in vars(each).get("_comm_hooks", ())]
    states = [each for _, state in hooks for each in (state if isinstance(state, tuple) else (state,))]
    return [each for each in states if not (isinstance(each, _CONSTANT) or _is_torchs_own(each))]


_CONSTANT = (
    *(type(None), int, float, str, bytes, torch.dtype, torch.device, type, FunctionType),
    *(dist.ProcessGroup, DeviceMesh, DistributedDataParallel),
)


def _is_torchs_own(state: Any) -> bool:
    return type(state).__name__.startswith("_") and type(state).__module__.startswith("torch.")


def _reducing(wanted: set[int]) -> list[Any]:
    """Returns the instances of DistributedDataParallel that have any of the parameters with these ids.

    Parameters do not know, and DistributedDataParallel keeps no list of its own.
    """
    found = instances_of(DistributedDataParallel)
    return [each for each in found if any(id(own) in wanted for own in vars(each).get("_module_parameters", ()))]


def groups_of_parameters(state: FSDPState) -> list[FSDPParamGroup]:
    """Returns the groups in which a `fully_shard` module gathers its parameters: at most one before torch 2.12."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def reshard(modules: Iterable[nn.Module]) -> None:
    """Makes `fully_shard` modules use their sharded parameters. Local.

    A forward without a backward leaves unsharded copies (the root's always), and `unshard(async_op=True)` those that it
    is gathering still. The next forward would take them although the shards have changed since.
    """
    sharded = [module for module in modules if isinstance(module, FSDPModule)]
    _end_forwards({module._get_fsdp_state() for module in sharded})
    in_backward = backward_under_way() != -1
    for module in sharded:
        groups = groups_of_parameters(module._get_fsdp_state())
        if in_backward and any(each._training_state is TrainingState.PRE_BACKWARD for each in groups):
            continue  # the rest of the backward needs the copies, and frees them
        for group in groups:
            group.wait_for_unshard()  # `reshard` frees no gather under way; a no-op without one
        module.reshard()


def _end_forwards(states: Iterable[FSDPState]) -> None:
    """Ends forwards of `fully_shard` that nothing will end.

    Those are of a module that is in one group with others and was called alone, as a validation calls the head, and
    those that raised an error. Until the next backward, `reshard` frees nothing there, and gathers of a next forward do
    not wait for the current stream, so that they take weights from before what is queued on it. Not by torch's
    `reset_iter_state`, which also drops gradients that are accumulated.
    """
    contexts = {
        context
        for context in {state._state_ctx for state in states}
        # Also of modules above these, as of a root without parameters of its own.
        if any(state._training_state is TrainingState.FORWARD for state in context.all_states)
    }
    if not contexts or backward_under_way() != -1:  # which ends them, or runs forwards itself
        return
    for context in contexts.difference(_contexts_in_forward()):
        for state in context.all_states:
            for of_forward in (state, *groups_of_parameters(state)):
                if of_forward._training_state is TrainingState.FORWARD:
                    of_forward._training_state = TrainingState.IDLE
            state._modules_to_run_forward.clear()
        context.iter_forward_root = None


_FORWARDS = (
    nn.Module._call_impl.__code__,
    # What that makes of a method.
    *(each for each in register_fsdp_forward_method.__code__.co_consts if isinstance(each, CodeType)),
)


def _contexts_in_forward() -> Iterator[FSDPStateContext[FSDPState]]:
    """Yields what `fully_shard` has for all modules of a model, of those that some thread is calling."""
    for frame in _frames():
        if frame.f_code in _FORWARDS and isinstance(module := frame.f_locals["self"], FSDPModule):
            yield module._get_fsdp_state()._state_ctx


def reshard_before_writing(tensors: Iterable[Tensor]) -> None:
    """Makes the `fully_shard` modules on the meshes of these tensors use their sharded parameters. Local.

    The next forward gathers again: only what is the same on all ranks of a mesh may decide that, so neither the memory
    of this rank, which may have no element of a shard, nor tensors that a rank may write alone.

    Args:
        tensors: that are written; only DTensors can be such parameters.
    """
    meshes = {tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)}
    if meshes:  # parameters do not know their modules, but torch has a list
        reshard([module for module in list(_module_state_mapping) if not meshes.isdisjoint(_meshes_of(module))])


def named_shards_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the shards of a module's parameters under `fully_shard`, by all names that each has, in its order.

    Until they are resharded the module itself has gathered copies in their place. Other modules have none.
    """
    at: dict[nn.Module, dict[str, Tensor]] = {}
    for sharded in list(_module_state_mapping):  # also one above this module that has it in its group
        if isinstance(sharded, FSDPModule):
            for group in groups_of_parameters(sharded._get_fsdp_state()):
                for each in group.fsdp_params:
                    info = each._module_info
                    at.setdefault(info.module, {})[info.param_name] = each.sharded_param
                    for shared, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                        at.setdefault(shared, {})[name] = each.sharded_param
    for prefix, inner in module.named_modules() if at else ():
        for name, shard in at.get(inner, {}).items():
            yield f"{prefix}.{name}" if prefix else name, shard


def _meshes_of(module: nn.Module) -> Iterator[DeviceMesh]:
    if isinstance(module, FSDPModule):
        for group in groups_of_parameters(module._get_fsdp_state()):
            yield from (cast(DTensor, each.sharded_param).device_mesh for each in group.fsdp_params)


class ScalerStages:
    """The stages of optimizers in a torch.amp.GradScaler since its last update: ready, unscaled, stepped.

    Args:
        scaler: torch's, or a subclass.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._states = scaler._per_optimizer_states

    def stage(self, optimizer: object) -> OptState:
        """Returns the stage of an optimizer; READY if the scaler does not know it."""
        state = self._states.get(id(optimizer))  # which does not make one, as looking up would
        return OptState.READY if state is None else state["stage"]

    def found_inf(self, optimizer: object) -> dict[torch.device, Tensor]:
        """Returns, by device, whether an element was not finite: above 0."""
        found_inf: dict[torch.device, Tensor] = self._states[id(optimizer)]["found_inf_per_device"]
        return found_inf

    def set(self, optimizer: object, stage: OptState, found_inf: Mapping[torch.device, Tensor] | None = None) -> None:
        """Records in the scaler that an optimizer was unscaled or stepped."""
        state = self._states[id(optimizer)]
        state["stage"] = stage
        if found_inf is not None:
            state["found_inf_per_device"] = dict(found_inf)


def inverse_scale(scaler: torch.amp.GradScaler) -> Tensor:
    """Returns the factor that unscales gradients: fp32, one element, on the device of the scale, which must be made."""
    scale = scaler._scale
    assert scale is not None
    return scale.double().reciprocal().float()


def scaler_that_steps() -> torch.amp.GradScaler | None:
    """Returns the GradScaler whose `step` looks up an attribute of an optimizer; only for that property.

    torch hands an optimizer no scaler, so that it has to be taken from the caller's caller.
    """
    frame = inspect.currentframe()
    frame = frame and frame.f_back and frame.f_back.f_back
    if frame is None or frame.f_code is not torch.amp.GradScaler.step.__code__:
        return None
    scaler = frame.f_locals.get("self")
    return scaler if isinstance(scaler, torch.amp.GradScaler) else None


def scale_and_look(tensors: list[Tensor], factor: Tensor, found_inf: Tensor) -> None:
    """Multiplies tensors in place, and sets `found_inf` to 1 if an element was not finite. Waits for no device.

    The product is taken in fp32 and rounded once, so that bf16 and fp16 tensors get the whole of `factor`.

    Args:
        tensors: strided, of one floating dtype, on one device.
        factor: fp32, one element, on that device.
        found_inf: fp32, one element, on that device; left as it is where all elements are finite.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, factor)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Runs `call` at the end of the running backward, which then raises the errors of `call`.

    It is not run if that backward fails before.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)


def loads_other_shape(module: nn.Module, name: str, value: Tensor) -> bool:
    """Whether a class of module has a hook by which it loads this value, of another shape than its own tensor.

    A buffer takes the shape of the value. A parameter keeps its own, as where position embeddings are interpolated.
    A copy of the module tries it, and may raise errors of any kind.
    """
    if type(module)._load_from_state_dict is nn.Module._load_from_state_dict:
        return False
    errors, missing = list[str](), list[str]()
    if name in module._buffers:
        trial = copy.deepcopy(module)
        place: dict[str, Any] = trial._buffers
    else:
        trial = copy.copy(module)  # a parameter may be of a whole model
        place = {**module._parameters, name: copy.deepcopy(module._parameters[name])}
        trial._parameters, trial._modules = place, {**module._modules}
        trial._buffers = {at: None if own is None else own.detach().clone() for at, own in module._buffers.items()}
    own = place[name]
    with torch.no_grad():
        trial._load_from_state_dict({name: value}, "", {}, True, missing, [], errors)
    taken = place[name].shape == value.shape if name in module._buffers else trial._parameters[name] is own
    return taken and not errors and name not in missing
