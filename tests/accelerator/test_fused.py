"""keyed's default on accelerators: torch's fused step where it has the kernel for the device, else foreach."""

import sys

import pytest
import torch
from torch import nn

import shardopt
from shardopt.runtime.torch_private import has_fused_kernel
from tests.accelerator.support import needs_standin, on_accelerator

CASES = {
    "adamw": {"lr": 0.1, "weight_decay": 0.1},
    "adam": {"lr": 0.1, "amsgrad": True},
    "sgd": {"lr": 0.1, "momentum": 0.9},
    "adagrad": {"lr": 0.1},
}
STEPS = 4


def trained(name, device, *, dtype=torch.float32, state=None, before=lambda number, parameters, optimizer: None, **how):
    """Returns what parameters are after some steps, and the optimizer."""
    made = {f"p{i}": torch.randn(6, 4 + i, generator=torch.Generator().manual_seed(i)) for i in range(3)}
    parameters = {key: nn.Parameter(each.to(device, dtype)) for key, each in made.items()}
    optimizer = shardopt.keyed(name, parameters, **CASES[name], **how)
    if state is not None:
        optimizer.init_state()
        optimizer.load_state_dict(state)
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(device, dtype)
        before(number, parameters, optimizer)
        optimizer.step()
    return {key: parameter.detach().cpu() for key, parameter in parameters.items()}, optimizer


def counters_of(optimizer):
    return {entries["step"].device.type for entries in optimizer.state_dict()["state"].values() if "step" in entries}


def far(one, other):
    return max((one[key].double() - other[key].double()).abs().max().item() for key in one)


def with_a_kernel(standin):
    """Gives the device a fused AdamW, as a backend from outside would; returns what is stepped with it, and how."""
    calls = []

    def kernel(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, **options):
        calls.append(len(params))
        lists = params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps
        for each in (tensor for column in lists for tensor in column):
            assert each.device.type == "standin", "the kernel reads memory of the device alone"
        copies = [[tensor.cpu() for tensor in column] for column in lists]
        torch._fused_adamw_(*copies, **options)
        for column, of_host in zip(lists, copies, strict=True):
            for tensor, copy in zip(column, of_host, strict=True):
                tensor.copy_(copy)

    functions = sys.modules["torch.optim.adam"]
    foreach = functions._multi_tensor_adam

    def counted(*args, **kwargs):
        calls.append("foreach")
        foreach(*args, **kwargs)

    functions._multi_tensor_adam = counted
    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_adamw_", kernel, "PrivateUse1")
    found = {}

    def run(case, name="adamw", **options):
        calls.clear()
        there, optimizer = trained(name, "standin", **options)
        fused, of_all = [call for call in calls if call != "foreach"], len(calls)
        options.pop("before", None)
        here, _ = trained(name, "cpu", **options)
        found[case] = len(fused), far(here, there), counters_of(optimizer), of_all - len(fused), optimizer
        return optimizer

    def turn(number, parameters, optimizer):
        if number == 2:
            gradient = parameters["p1"].grad
            parameters["p1"].grad = gradient.t().contiguous().t()

    first = run("default")
    saved = first.state_dict()
    run("loaded", state={**saved, "state": {k: {n: t.cpu() for n, t in e.items()} for k, e in saved["state"].items()}})
    run("foreach", foreach=True)
    run("turned", before=turn)
    run("sgd", name="sgd")
    run("half", dtype=torch.float16)
    options = {case: each.param_groups[0]["fused"] for case, (*_, each) in found.items()}
    return {case: each[:4] for case, each in found.items()}, options


@needs_standin
def test_the_fused_kernel_is_taken_where_the_device_has_it():
    ((found, options),) = on_accelerator(1, with_a_kernel)
    assert found["default"][0] == found["loaded"][0] == STEPS
    assert found["default"][1] == found["loaded"][1] == 0.0  # it is the CPU's
    assert found["default"][2] == found["loaded"][2] == {"standin"}
    assert found["foreach"][0] == found["sgd"][0] == found["half"][0] == 0
    assert found["foreach"][2] == {"cpu"} and found["foreach"][3] == found["half"][3] == STEPS
    # The one that is turned takes foreach for a step; the two others stay with the kernel.
    assert found["turned"][0] == STEPS and found["turned"][1] <= 1e-6 and found["turned"][3] == 1
    assert set(options.values()) == {None}


def without_a_kernel(standin):
    found = {}
    for name in CASES:
        there, optimizer = trained(name, "standin")
        here, _ = trained(name, "cpu", foreach=False)
        found[name] = far(here, there), counters_of(optimizer) - {"cpu"}, has_fused_kernel(name, "standin")
    return found


@needs_standin
def test_a_device_without_the_kernel_steps_as_torch_does():
    (found,) = on_accelerator(1, without_a_kernel)
    for name, (distance, counters, has_it) in found.items():
        assert distance <= 1e-6 and not counters and not has_it, name


def test_torch_says_for_which_devices_it_has_kernels():
    assert all(has_fused_kernel(name, "cpu") for name in CASES)
    assert not has_fused_kernel("adamw", "meta") and not has_fused_kernel("lion", "cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_and_foreach_agree_on_a_gpu(name, dtype):
    default, optimizer = trained(name, "cuda", dtype=dtype)
    foreach, _ = trained(name, "cuda", dtype=dtype, foreach=True)
    loop, _ = trained(name, "cpu", dtype=dtype, foreach=False)
    bound = 16 * STEPS * torch.finfo(dtype).eps
    assert far(default, loop) <= bound and far(foreach, loop) <= bound
    if has_fused_kernel(name, "cuda") and not (name == "sgd" and dtype == torch.bfloat16):
        assert counters_of(optimizer) <= {"cuda"}
