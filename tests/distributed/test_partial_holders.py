"""Parameters of which some ranks hold no part: state is where its parameter is, and no counter drifts.

Every job has its own ranks and layouts, resumes from the checkpoint of the previous one, and must come to what one
process computes that never stopped. Some parameters have no gradient in some steps, and one has none until the end.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardopt
from shardopt import checkpoint
from shardopt.sharding.view import is_held, local_tensors, view_of
from tests.harness import run_ranks
from tests.sub_meshes import give_gradient, lacks, part, placed

RANKS_STAY = True

SHAPES = {"expert": (4, 6), "plain": (3, 2), "sub": (5, 4), "table": (7, 3), "uneven": (2, 3), "unused": (4, 4)}
ALGORITHMS = {
    "adamw": {"weight_decay": 0.1},
    "sgd": {"momentum": 0.9, "dampening": 0.5},  # without dampening it is the same whether a buffer is the first
    "asgd": {},
    "rprop": {},
    "adagrad": {"initial_accumulator_value": 0.1},
    "rowwiseadagrad": {},
    "rowwiseadam": {},
    "adafactor": {},
    "muon": {},
}
LR = 0.05
# For each parameter the mesh it is on and how (Shard(0), Shard(1), ...), or the rows of each shard with their ranks.
FIRST = {
    "expert": ([2], Shard(0)),
    "sub": ([0, 1], Shard(0)),
    "table": [(3, 0), (0, 1), (4, 2)],
    "uneven": ([0, 1, 2], Shard(0)),
    "unused": ([1, 2], Shard(0)),
}
SECOND = {
    "expert": ([0, 1], Shard(1)),
    "sub": ([1], Replicate()),
    "table": [(7, 1)],
    "uneven": [(2, 0)],
    "unused": ([0], Shard(0)),
}
FOURTH = {
    "expert": ([3], Shard(0)),
    "sub": [(2, 3), (1, 0), (2, 1)],
    "table": ([1, 2, 3], Shard(0)),
    "uneven": ([0, 3], Shard(1)),
    "unused": ([0, 1], Replicate()),
}
JOBS = ((3, FIRST, 4), (2, SECOND, 3), (1, {}, 2), (4, FOURTH, 5))


def value(name, salt):
    """Known numbers for the whole of a parameter."""
    generator = torch.Generator().manual_seed(97 * sorted(SHAPES).index(name) + 1009 * salt)
    return torch.randn(SHAPES[name], dtype=torch.float64, generator=generator)


LAST = sum(steps for *_, steps in JOBS)


def has_gradient(name, step):
    return step == LAST if name == "unused" else (step + sorted(SHAPES).index(name)) % 3 != 0


def give_gradients(params, step):
    for name, param in params.items():
        give_gradient(param, value(name, step) if has_gradient(name, step) else None)


def optimizers(layout, algorithms):
    meshes, groups = {}, [{"match": "sub|unused", "lr": 0.02}]
    params = {each: {name: placed(value(name, 0), layout.get(name), meshes) for name in SHAPES} for each in algorithms}
    made = {each: shardopt.keyed(each, params[each], lr=LR, groups=groups, **ALGORITHMS[each]) for each in algorithms}
    return params, made


def train(layout, algorithms, source, target, first, last, early):
    """One job; of which parameters ranks hold a part, and of which they have state.

    Args:
        early: whether the parameter that has no gradient until the end has state before.
    """
    params, made = optimizers(layout, algorithms)
    for algorithm, optimizer in made.items() if early or source else ():
        params[algorithm]["unused"].requires_grad_(early)
        optimizer.init_state()
        params[algorithm]["unused"].requires_grad_()
    app = {"params": params, "optimizers": made}
    if source:
        checkpoint.load(source, app)
    for step in range(first, last):
        for algorithm, optimizer in made.items():
            give_gradients(params[algorithm], step)
            optimizer.step()
    for optimizer in made.values():
        optimizer.check_agreement()
    checkpoint.save(target, app, check_replicas="all")
    held = {name: is_held(param) for name, param in params["sgd"].items()}
    return held, {algorithm: sorted(optimizer.state_dict()["state"]) for algorithm, optimizer in made.items()}


FEW = ["adamw", "sgd", "rowwiseadagrad"]


@pytest.mark.parametrize(
    ("algorithms", "early"),
    [
        pytest.param(FEW, True, id="few"),
        pytest.param([*ALGORITHMS], True, id="init_state", marks=pytest.mark.exhaustive),
        pytest.param([*ALGORITHMS], False, id="from the first step", marks=pytest.mark.exhaustive),
    ],
)
def test_several_resumes_come_to_what_one_process_computes(tmp_path, algorithms, early):
    step, source = 1, None
    for number, (ranks, layout, steps) in enumerate(JOBS):
        target = str(tmp_path / f"c{number}")
        outcomes = run_ranks(ranks, train, layout, algorithms, source, target, step, step + steps, early)
        for rank, (held, states) in enumerate(outcomes):
            assert {name for name, here in held.items() if not here} == lacking(layout, rank)
            for names in states.values():
                assert lacking(layout, rank).isdisjoint(names)
        step, source = step + steps, target
    params, made = optimizers({}, algorithms)
    for i in range(1, step):
        for algorithm, optimizer in made.items():
            give_gradients(params[algorithm], i)
            optimizer.step()
    with checkpoint.open(source) as reader:
        for algorithm, optimizer in made.items():
            for name, param in params[algorithm].items():
                stored = reader.read(f"params.{algorithm}.{name}")
                torch.testing.assert_close(stored, param.detach(), rtol=1e-11, atol=1e-12)
            for name, entries in optimizer.state_dict()["state"].items():
                for entry, there in entries.items():
                    stored = reader.read(f"optimizers.{algorithm}.state.{name}.{entry}")
                    torch.testing.assert_close(stored, there, rtol=1e-11, atol=1e-12)


def lacking(layout, rank):
    """The parameters of which a rank has no part."""
    return {name for name, where in layout.items() if lacks(where, rank)}


def own_nothing(path, wrapped):
    """Rank 0 holds no part of anything; before and after the first step."""
    mesh = DeviceMesh("cpu", [1])
    here = mesh.get_coordinate() is not None

    def made():
        params = {}
        for name in ("a", "b"):
            local = torch.ones(3, 2) if here else torch.empty(0)
            spec = {"run_check": False, "shape": (3, 2), "stride": (2, 1)}
            params[name] = torch.nn.Parameter(DTensor.from_local(local, mesh, [Replicate()], **spec))
            if here:
                params[name].grad = DTensor.from_local(torch.ones(3, 2), mesh, [Replicate()], **spec)
        adamw = shardopt.keyed("adamw", {"a": params["a"]})
        sgd = shardopt.keyed("sgd", {"b": params["b"]}, momentum=0.9)
        both = shardopt.optim.CombinedOptimizer([("x", adamw), ("y", sgd)])
        if not wrapped:
            return both
        warm = shardopt.WarmupOptimizer(both, [shardopt.WarmupStage(max_iters=4)], lr=0.1)
        return shardopt.GradientClippingOptimizer(warm, shardopt.GradientClipping.NORM, max_gradient=1e9)

    names = []
    optimizer = made()
    for number in range(3):
        names.append(sorted(optimizer.state_dict()["state"]))
        checkpoint.save(f"{path}-{number}", {"optimizer": optimizer}, check_replicas="all")
        optimizer = made()
        if number:
            optimizer.init_state()
        checkpoint.load(f"{path}-{number}", {"optimizer": optimizer})
        optimizer.step()
        optimizer.check_agreement()
    if not here:  # what is offered for what it does not hold is for others
        saved = optimizer.state_dict()
        saved["state"]["x.a"] = {"exp_avg": "anything"}
        optimizer.check_state_dict(saved)
        assert optimizer.load_state_dict(saved) == ([], [])
        assert sorted(optimizer.state_dict()["state"]) == names[0]
    assert [group["params"] for group in optimizer.state_dict()["param_groups"]] == [["x.a"], ["y.b"]]
    return names


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_rank_that_holds_nothing_saves_and_loads_with_the_others(tmp_path, wrapped):
    first, second = run_ranks(2, own_nothing, str(tmp_path / "c"), wrapped)
    own = ["__warmup"] if wrapped else []
    assert first == [own] * 3
    assert second == [own, [*own, "x.a", "y.b"], [*own, "x.a", "y.b"]]


def minimize(layout, path, steps):
    """L-BFGS on a sum of squares, the loss of which all ranks have; resumed once."""
    meshes = {}
    params = {name: placed(value(name, 0), layout.get(name), meshes) for name in SHAPES}

    def made():
        return shardopt.keyed("lbfgs", params, lr=0.5, max_iter=3, history_size=4)

    def closure():
        total = torch.zeros((), dtype=torch.float64)
        for name, param in params.items():
            weight = value(name, 1).abs() + 0.5
            layout = view_of(param, name).layout
            first = {
                box: min(holders)
                for box, holders in zip(layout.boxes, layout.holders or (), strict=bool(layout.holders))
            }
            for local_tensor, piece in zip(
                local_tensors(param) if is_held(param) else (), view_of(param, name).pieces, strict=False
            ):
                pull = part(weight, piece)
                if isinstance(param, DTensor):
                    spec = {"run_check": False, "shape": param.shape, "stride": param.stride()}
                    param.grad = DTensor.from_local(
                        pull * local_tensor.detach(), param.device_mesh, param.placements, **spec
                    )
                else:
                    local_tensor.grad = pull * local_tensor.detach()
                if first.get(piece.box, 0) == dist.get_rank():
                    total += (pull * local_tensor.detach().square()).sum() / 2
            if isinstance(param, DTensor) and is_held(param) and not view_of(param, name).pieces:
                param.grad = torch.zeros_like(param.detach())
        dist.all_reduce(total)
        return total

    optimizer = made()
    for step in range(steps):
        if step == 2:
            checkpoint.save(path, {"optimizer": optimizer}, check_replicas="all")
            optimizer = made()
            optimizer.init_state()
            checkpoint.load(path, {"optimizer": optimizer})
        loss = optimizer.step(closure)
    state = optimizer.state_dict()["state"]
    return float(loss), {name for name in state if name in SHAPES}


def test_lbfgs_where_ranks_hold_different_parameters(tmp_path):
    ((alone, names),) = run_ranks(1, minimize, {}, str(tmp_path / "one"), 4)
    assert names == set(SHAPES)
    outcomes = run_ranks(3, minimize, FIRST, str(tmp_path / "c"), 4)
    for rank, (loss, names) in enumerate(outcomes):
        assert loss == pytest.approx(alone, rel=1e-9)
        assert names == SHAPES.keys() - lacking(FIRST, rank)
