"""Where nobody names an implementation: the fastest one that computes what the for-loop computes, whatever comes."""

import pytest
import torch
from torch.distributed.tensor import Shard

import shardopt
from shardopt.algorithms import algorithms, spec_of
from shardopt.sharding.view import local_tensors
from tests.support.cases import FUSED_SGD_IS_ASTRAY, option_sets
from tests.support.fake_rank import fake_rank, shard

STEPS = 8
FUSED = [spec.name for spec in algorithms() if spec.fused_agrees]
CASES = [
    pytest.param(
        name, {key: value for key, value in options.items() if key not in ("foreach", "fused")}, id=f"{name}-{i}"
    )
    for name in FUSED
    for i, (_, options) in enumerate(option_sets(name))
]
MOMENTUM = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}


def fresh(dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    shapes = {"matrix": (33, 17), "vector": (5,), "long": (1000,)}
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for name, shape in shapes.items()
    }


def gradients(step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 + step)
    return {
        name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, tensor in fresh().items()
    }


def train(optimizer, params, steps=range(STEPS), absent=(), dtype=torch.float32):
    for step in steps:
        for name, gradient in gradients(step, dtype).items():
            params[name].grad = None if (name, step) in absent else gradient
        optimizer.step()


def trained(name, dtype=torch.float32, absent=(), **options):
    """Local parameters and state after eight steps with a keyed optimizer."""
    params = fresh(dtype)
    train(shardopt.keyed(name, params, **options), params, absent=absent, dtype=dtype)
    return params


def torch_trained(name, dtype=torch.float32, **options):
    params = fresh(dtype)
    train(getattr(torch.optim, name)(params.values(), **options), params, dtype=dtype)
    return params


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def furthest(one, other):
    """The largest difference between two runs, by the largest element of each tensor."""
    return max(
        ((one[name].double() - other[name].double()).abs().max() / other[name].double().abs().max()).item()
        for name in one
    )


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_fused_implementation_where_it_agrees(name, options, dtype):
    loop = torch_trained(name, dtype, **options, foreach=False)
    fused = torch_trained(name, dtype, **options, fused=True)
    default = trained(name, dtype, **options)
    if dtype not in spec_of(name).fused_agrees:
        assert same(default, loop)
        return
    assert same(default, fused)
    # Each operation rounds to half a unit in the last place, and the for-loop rounds more often than a fused kernel.
    assert furthest(fused, loop) <= 2 * STEPS * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fused_sgd_in_half_precision_does_not_agree(dtype):
    """Why the registry leaves it out; once no torch has the fault that is followed, the entry can grow."""
    buffers = []
    for how in ({"foreach": False}, {"fused": True}):
        params = fresh(dtype)
        optimizer = torch.optim.SGD(params.values(), **MOMENTUM, **how)
        train(optimizer, params, range(2), dtype=dtype)
        buffers.append([optimizer.state[parameter]["momentum_buffer"] for parameter in params.values()])
    loop, fused = buffers
    off = max((one - other).abs().max().item() for one, other in zip(loop, fused, strict=True))
    assert (off > 0.5) == FUSED_SGD_IS_ASTRAY


def test_groups_stay_as_they_were_given_and_save_nothing():
    params = fresh()
    optimizer = shardopt.keyed("adamw", params)
    train(optimizer, params, range(1))
    (group,) = optimizer.param_groups
    assert (group["foreach"], group["fused"]) == (None, None)
    assert not {"foreach", "fused"} & optimizer.state_dict()["param_groups"][0].keys()


@pytest.mark.parametrize("name", FUSED)
def test_it_can_be_overridden(name):
    options = MOMENTUM if name == "SGD" else {"lr": 0.1}
    loop = torch_trained(name, foreach=False, **options)
    assert not same(trained(name, **options), loop)  # or these inputs would show nothing
    assert same(trained(name, foreach=False, **options), loop)
    assert same(trained(name, fused=False, **options), loop)
    params = fresh()
    optimizer = shardopt.keyed(name, params, **options)
    optimizer.param_groups[0]["foreach"] = False
    train(optimizer, params)
    assert same(params, loop)


def test_a_factorys_optimizer_steps_as_it_was_made():
    params = fresh()
    train(shardopt.optim.KeyedOptimizerWrapper(params, lambda tensors: torch.optim.AdamW(tensors, lr=0.1)), params)
    assert same(params, torch_trained("AdamW", foreach=False, lr=0.1))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("how", [{}, {"fused": True}], ids=["default", "fused"])
def test_sgd_with_a_parameter_whose_first_gradient_comes_late(how, sharded):
    """torch's fused implementation fails at that step, which the for-loop takes instead."""
    absent = {("vector", 0), ("vector", 1), ("long", 4)}
    with fake_rank(0, 2) as mesh:
        place = (lambda tensor: shard(tensor, mesh, Shard(0))) if sharded else torch.clone
        runs = []
        for options in (how, {"foreach": False}):
            params = {name: torch.nn.Parameter(place(tensor.detach())) for name, tensor in fresh().items()}
            optimizer = shardopt.keyed("sgd", params, **MOMENTUM, **options)
            for step in range(STEPS):
                for name, gradient in gradients(step).items():
                    params[name].grad = None if (name, step) in absent else place(gradient)
                optimizer.step()
            runs.append({name: local_tensors(parameter)[0].detach() for name, parameter in params.items()})
        assert furthest(*runs) <= 1e-6
    late = fresh()
    with pytest.raises(TypeError, match="NoneType"):
        train(torch.optim.SGD(late.values(), **MOMENTUM, fused=True), late, absent=absent)


def test_fused_again_once_no_parameter_can_be_late():
    late = {("vector", 0)}
    params, twin = fresh(), fresh()
    optimizer = shardopt.keyed("sgd", params, **MOMENTUM)
    train(optimizer, params, range(2), absent=late)
    saved = optimizer.state_dict()
    with torch.no_grad():
        for name in twin:
            twin[name].copy_(params[name])
    reference = torch.optim.SGD(twin.values(), **MOMENTUM, fused=True)
    for name, parameter in twin.items():
        reference.state[parameter]["momentum_buffer"] = saved["state"][name]["momentum_buffer"].clone()
    train(optimizer, params, range(2, STEPS))
    train(reference, twin, range(2, STEPS))
    assert same(params, twin)


def test_a_buffer_that_was_dropped_makes_its_parameter_late_again():
    params = fresh()
    optimizer = shardopt.keyed("sgd", params, **MOMENTUM)
    train(optimizer, params, range(2))
    del optimizer.state[params["vector"]]
    train(optimizer, params, range(2, 4))
    assert len(optimizer.state) == 3


@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_sparse_gradients_are_stepped_with(name):
    runs = []
    for how in ({}, {"foreach": False}):
        table = torch.nn.Parameter(torch.ones(6, 2))
        optimizer = shardopt.keyed(name, {"table": table}, lr=0.1, **how)
        for step in range(3):
            with torch.sparse.check_sparse_tensor_invariants():
                sparse = torch.sparse_coo_tensor([[1, step]], torch.ones(2, 2), (6, 2)).coalesce()
            table.grad = torch.ones(6, 2) if step == 1 else sparse
            optimizer.step()
        runs.append(table)
    assert torch.allclose(*runs)


@pytest.mark.parametrize("name", FUSED)
def test_a_group_of_mixed_dtypes_steps(name):
    """One that the fused implementation cannot step takes the for-loop; the others stay with the fused one."""

    def run(extra, **how):
        params = fresh() | {key: torch.nn.Parameter(torch.ones(5, dtype=torch.complex64)) for key in extra}
        optimizer = shardopt.keyed(name, params, lr=0.1, **how)
        for step in range(3):
            for key, parameter in params.items():
                parameter.grad = gradients(step)[key].to(parameter.dtype)
            optimizer.step()
        return params

    mixed, fused, loop = run(["vector"]), run([]), run(["vector"], foreach=False)
    assert same(mixed, {**fused, "vector": loop["vector"]})


def test_options_that_are_tensors_are_left_to_the_for_loop():
    options = {"lr": 0.1, "weight_decay": torch.tensor(0.1)}
    assert same(trained("SGD", **options), torch_trained("SGD", foreach=False, **options))


@pytest.mark.parametrize(
    ("options", "refusal"),
    [({"capturable": True}, AssertionError), ({"differentiable": True}, RuntimeError)],
    ids=["capturable", "differentiable"],
)
def test_what_the_for_loop_refuses_is_not_let_through(options, refusal):
    with pytest.raises(refusal) as wanted:
        torch_trained("Adam", **options)
    with pytest.raises(refusal) as actual:
        trained("Adam", **options)
    assert str(actual.value) == str(wanted.value)


def test_counters_have_the_dtype_that_they_have_with_the_for_loop():
    torch.set_default_dtype(torch.float64)
    try:
        params = fresh(torch.float32)
        optimizer = shardopt.keyed("adam", params)
        train(optimizer, params, range(1))
        assert optimizer.state[params["long"]]["step"].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
