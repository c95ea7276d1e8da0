"""What makes torchtitan 0.3.0, written for GPUs, train on CPUs with gloo. Called before torchtitan is imported."""

import importlib
import types
import warnings

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle


def step_on_microbatches(schedule, *, arg_mbs, kwarg_mbs, target_mbs, losses, loss_kwargs, return_outputs):
    """A step of a pipeline on inputs that are cut already, which torchtitan 0.3.0 asks for and torch 2.13 has not.

    As torch's own step, without the cutting: torch 2.13's would take the lists for keyword arguments of the model.
    """
    for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
        stage.has_backward = schedule._has_backward
        stage.clear_runtime_states()
    schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs=loss_kwargs)


def on_cpu():
    """Imports torchtitan with stand-ins for what torch.cpu has not; returns its trainer's module."""
    warnings.simplefilter("ignore")
    torch.autograd.set_multithreading_enabled(False)  # as it does itself where it makes the process group
    torch._utils._get_available_device_type = lambda: "cpu"
    stand_ins = {
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": lambda device=None: types.SimpleNamespace(total_memory=1 << 30),
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "memory_stats": lambda device=None: {},
        "set_device": lambda device: None,
    }
    for name, stand_in in stand_ins.items():
        if not hasattr(torch.cpu, name) or name == "set_device":
            setattr(torch.cpu, name, stand_in)
    # gloo has no sum of products: torchtitan divides its losses, and has FSDP add up gradients times 1.
    collectives = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives")
    factors = collectives._get_gradient_divide_factors
    collectives._get_gradient_divide_factors = lambda *given: factors(*given[:5], True)
    for kind in (PipelineScheduleSingle, PipelineScheduleMulti):
        kind.step = step_on_microbatches
    utils = importlib.import_module("torchtitan.tools.utils")
    utils.get_local_device = lambda: torch.device("cpu")
    importlib.import_module("torchtitan.distributed.utils").get_local_device = utils.get_local_device
    trainer = importlib.import_module("torchtitan.trainer")
    trainer.dist_utils.set_pg_timeouts = lambda **_: None  # which gloo cannot
    return trainer
