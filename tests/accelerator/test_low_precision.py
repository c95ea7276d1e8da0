"""State in fewer bits on accelerators: its bits depend on no mesh, and it is stepped by torch's fused kernel."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

import shardopt
from shardopt.algorithms.low_precision.inner import InnerSteps
from shardopt.algorithms.registry import find_spec
from tests.accelerator.support import each_kind, needs_standin, on_accelerator

STEPS = 3
SHAPES = {"blocks": (24, 300), "whole blocks": (16, 512), "short rows": (70, 100), "small": (6, 5)}
FORMS = {
    "8 bits": {"state_dtype": torch.uint8},
    "8 bits at random": {"state_dtype": torch.uint8, "rounding": "stochastic", "dtype": torch.bfloat16},
    "8 bits, master": {"state_dtype": torch.uint8, "master_dtype": torch.float32, "dtype": torch.bfloat16},
    "bf16": {"state_dtype": torch.bfloat16},
    "of SGD": {"algorithm": "sgd", "momentum": 0.9, "state_dtype": torch.uint8},
}


def randoms(seed, shapes, dtype):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(SHAPES[name], generator=generator).to(dtype) for name in shapes}


def trained(place, algorithm="adamw", dtype=torch.float32, shapes=SHAPES, last=lambda step: step(), **form):
    """Returns all that parameters and state are after some steps.

    Args:
        place: puts a tensor to where it is trained.
        shapes: names of parameters; one alone is stepped in its own memory.
        last: runs the last step.
    """
    parameters = {name: nn.Parameter(place(value)) for name, value in randoms(0, shapes, dtype).items()}
    optimizer = shardopt.keyed(algorithm, parameters, lr=0.1, **form)
    for number in range(STEPS):
        for name, value in randoms(number + 1, shapes, dtype).items():
            parameters[name].grad = place(value)
        last(optimizer.step) if number == STEPS - 1 else optimizer.step()
    state = optimizer.state_dict()["state"]
    entries = {f"{name}.{entry}": value for name, each in state.items() for entry, value in each.items()}
    return {**parameters, **entries}, optimizer


def whole(value):
    return value.full_tensor().detach().cpu() if isinstance(value, DTensor) else torch.as_tensor(value).detach().cpu()


def unlike_one_rank(standin):
    mesh = init_device_mesh(standin.KIND, (2,))
    unlike = []
    for (label, form), shapes in itertools.product(FORMS.items(), (tuple(SHAPES), ("whole blocks",))):
        expected, _ = trained(lambda value: value.to(standin.KIND), shapes=shapes, **form)
        for placement in (Shard(0), Shard(1), Replicate()):

            def place(value, placement=placement):
                return distribute_tensor(value.to(standin.KIND), mesh, [placement], src_data_rank=None)

            found, _ = trained(place, shapes=shapes, **form)
            assert found.keys() == expected.keys()
            unlike += [
                (label, len(shapes), str(placement), key)
                for key in found
                if not torch.equal(whole(found[key]), whole(expected[key]))
            ]
    return unlike


@each_kind
def test_two_ranks_have_the_bits_of_one_on_any_placement(kind):
    assert on_accelerator(2, unlike_one_rank, kind=kind) == [[], []]


def with_a_kernel(standin):
    """Gives the stand-in a fused AdamW, and steps with it and without; and once by the algorithm's own class alone."""
    without, _ = trained(lambda value: value.to("standin"), **FORMS["8 bits"])
    calls = []

    def kernel(*columns, **options):
        calls.append({tensor.device.type for column in columns for tensor in column})
        copies = [[tensor.cpu() for tensor in column] for column in columns]
        torch._fused_adamw_(*copies, **options)
        for column, of_host in zip(columns, copies, strict=True):
            for tensor, copy in zip(column, of_host, strict=True):
                tensor.copy_(copy)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_adamw_", kernel, "PrivateUse1")
    shardopt.runtime.torch_private.has_fused_kernel.cache_clear()
    found, optimizer = trained(lambda value: value.to("standin"), **FORMS["8 bits"])
    counters = {(each["step"].device.type, each["step"].item()) for each in optimizer.state.values()}
    far = max((whole(found[name]) - whole(without[name])).abs().max().item() for name in SHAPES)
    inner = InnerSteps(find_spec(torch.optim.AdamW), {})
    values = [torch.ones(64, device="standin") for _ in range(4)]
    state = {"step": torch.tensor(1.0), "exp_avg": values[2], "exp_avg_sq": values[3]}
    counter = inner.step(inner.defaults, values[0], values[1], state).state["step"]
    return calls[:-1], {*counters, (counter.device.type, counter.item() + 1)}, far


@needs_standin
def test_the_fused_kernel_of_the_device_takes_the_step_and_counters_stay_on_the_host():
    ((calls, counters, far),) = on_accelerator(1, with_a_kernel)
    assert len(calls) == STEPS * 3 and set(map(frozenset, calls)) == {frozenset({"standin"})}  # lists
    assert counters == {("cpu", float(STEPS))}
    assert far < 0.02, far  # a fifth of a step: a moment at the border of two codes gets one or the other


def after_a_failure(standin):
    """Steps of an algorithm with torch's loop, the second of which fails in the middle and is repeated."""
    unlike = []
    for form in (FORMS["8 bits"], {"algorithm": "nadam", "weight_decay": 0.5, "state_dtype": torch.uint8}):

        def last(step):
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(torch.Tensor, "sqrt", failing)
                with pytest.raises(torch.OutOfMemoryError):
                    step()
            step()

        def failing(tensor):
            raise torch.OutOfMemoryError("planted")

        wanted, _ = trained(lambda value: value.to("standin"), shapes=("whole blocks",), **form)
        found, _ = trained(lambda value: value.to("standin"), shapes=("whole blocks",), last=last, **form)
        unlike += [(form, key) for key in wanted if not torch.equal(whole(wanted[key]), whole(found[key]))]
    return unlike


@needs_standin
def test_a_step_that_fails_in_the_middle_can_be_repeated():
    assert on_accelerator(1, after_a_failure) == [[]]


def gradients_alive(standin):
    parameter = nn.Parameter(torch.randn(64, 256, device=standin.KIND))
    optimizer = shardopt.keyed("adamw", {"w": parameter}, lr=0.1, state_dtype=torch.uint8)
    parameter.grad = torch.randn_like(parameter)
    memory = StorageWeakRef(parameter.grad.untyped_storage())
    optimizer.step()
    assert not memory.expired()
    optimizer.zero_grad()
    return memory.expired()


@each_kind
def test_no_gradient_is_kept_after_a_step(kind):
    assert on_accelerator(1, gradients_alive, kind=kind) == [True]


def last_step_waits(standin):
    waits = {}

    def last(step):
        with standin.no_waits():
            step()

    for label, form in FORMS.items():
        try:
            trained(lambda value: value.to(standin.KIND), last=last, **form)
        except RuntimeError as error:
            waits[label] = str(error)
    return waits


@each_kind
def test_no_step_waits_for_the_device(kind):
    assert on_accelerator(1, last_step_waits, kind=kind) == [{}]
