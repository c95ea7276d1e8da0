"""Muon on real ranks: the same bits as torch's Muon on whole matrices in one process, however they are sharded."""

import math
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import shardopt
from shardopt import checkpoint
from shardopt.algorithms.gathering.optimizer import Team
from shardopt.algorithms.muon.muon import Muon
from shardopt.errors import GradientError
from shardopt.sharding.gradients import takes_gradient
from shardopt.sharding.view import is_held, local_tensors, view_of
from tests.harness import run_ranks
from tests.numerics.test_muon import OPTION_SETS
from tests.support.matrices import SHAPES, matrices, value
from tests.support.placement import give_gradient, same

STEPS = 6
ABSENT = {2: {"plain", "rows", "table", "grid"}, 4: SHAPES.keys() - {"uneven"}}
OPTIONS = {"lr": 0.03, "momentum": 0.9}


def gradient(name, step, dtype=torch.float32):
    return None if name in ABSENT.get(step, ()) else value(name, step + 1, dtype)


def alone(options, make, dtype=torch.float32):
    """Parameters and momentum after steps on whole matrices, with an optimizer that is not told of any ranks."""
    whole = {name: torch.nn.Parameter(value(name, 0, dtype)) for name in SHAPES if 0 not in SHAPES[name]}
    optimizer = make(whole, **options)
    for step in range(STEPS):
        for name, parameter in whole.items():
            parameter.grad = gradient(name, step, dtype)
        optimizer.step()
    return whole, {name: optimizer.state[parameter]["momentum_buffer"] for name, parameter in whole.items()}


def torchs(parameters, **options):
    return torch.optim.Muon(parameters.values(), **options)


def ours(parameters, **options):
    return shardopt.keyed("muon", parameters, **options)


def train(optimizer, parameters, steps=range(STEPS), dtype=torch.float32):
    for step in steps:
        for name, parameter in parameters.items():
            give_gradient(parameter, gradient(name, step, dtype))
        optimizer.step()


def differing(options, make=torchs, dtype=torch.float32):
    """The names of parameters and momenta on this rank that differ from those of whole matrices."""
    parameters = matrices(dtype)
    optimizer = ours(parameters, **options)
    train(optimizer, parameters, dtype=dtype)
    whole, momentum = alone(options, make, dtype)
    state = optimizer.state_dict()["state"]
    held = [name for name in whole if is_held(parameters[name])]
    assert state.keys() - {"empty"} == set(held)
    actual = [name for name in whole if not same(parameters[name], whole[name].detach())]
    return actual + [f"{name}.momentum" for name in held if not same(state[name]["momentum_buffer"], momentum[name])]


@pytest.mark.parametrize("ranks", [*(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 2, 3)), 4])
def test_same_bits_as_torch_on_whole_matrices(ranks):
    assert run_ranks(ranks, differing, OPTIONS) == [[]] * ranks


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({**OPTIONS, "ns_dtype": "float32"}, torch.float32),
        pytest.param(OPTIONS, torch.bfloat16, marks=pytest.mark.exhaustive),
        pytest.param(
            {**OPTIONS, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
            torch.bfloat16,
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["float32", "bfloat16", "bfloat16-adjusted"],
)
def test_same_bits_on_any_number_of_ranks(options, dtype):
    assert run_ranks(4, differing, options, ours, dtype) == [[]] * 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(("what", "options"), OPTION_SETS, ids=[what.replace(" ", "_") for what, _ in OPTION_SETS])
def test_every_option_set_on_every_number_of_ranks(what, options, ranks):
    assert run_ranks(ranks, differing, options) == [[]] * ranks


def differing_in_rounds():
    Muon.round_bytes = 600
    with CommDebugMode() as counted:
        actual = differing(OPTIONS)
    return actual, counted.get_total_counts()


def test_large_matrices_take_several_rounds():
    """All matrices together have 5 kB in bfloat16."""
    for actual, collectives in run_ranks(4, differing_in_rounds):
        assert actual == []
        assert collectives > STEPS * 10


def differing_in_groups():
    """Groups differ in how they orthogonalise, and parameters come in another order on each rank."""
    groups = [
        {"match": "rows|table", "ns_dtype": "float32", "lr": 0.5},
        {"match": "uneven|cut", "ns_steps": 3, "weight_decay": 0.0},
    ]
    parameters = matrices()
    names = sorted(parameters, reverse=dist.get_rank() % 2 == 1)
    optimizer = shardopt.keyed("muon", {name: parameters[name] for name in names}, groups=groups, **OPTIONS)
    train(optimizer, parameters)
    options = {
        name: {k: v for group in groups if re.search(group["match"], name) for k, v in group.items()} for name in names
    }
    actual = []
    for name in SHAPES.keys() - {"empty"}:
        whole = {name: torch.nn.Parameter(value(name, 0))}
        owned = {**OPTIONS, **options[name]}
        owned.pop("match", None)
        by_itself = ours(whole, **owned)
        for step in range(STEPS):
            whole[name].grad = gradient(name, step)
            by_itself.step()
        if not same(parameters[name], whole[name].detach()):
            actual.append(name)
    return actual


def test_groups_and_the_order_of_parameters():
    assert run_ranks(4, differing_in_groups) == [[]] * 4


def differing_on_a_part_of_the_ranks():
    """A mesh that is no group of the job, and one rank that has nothing to do with it."""
    inside = dist.get_rank() != 2
    everyone = init_device_mesh("cpu", (5,))
    part = DeviceMesh("cpu", [[0, 1], [3, 4]])
    places = {
        "rows": (everyone, [Shard(0)]),
        "grid": (part, [Shard(0), Shard(1)]),
        "hsdp": (part, [Replicate(), Shard(0)]),
    }
    parameters = {}
    for name, (mesh, placements) in places.items():
        full = value(name, 0)
        parameters[name] = torch.nn.Parameter(distribute_tensor(full, mesh, placements, src_data_rank=None))
    optimizer = ours(parameters, **OPTIONS)
    for step in range(STEPS):
        for name, parameter in parameters.items():
            give_gradient(parameter, value(name, step + 1) if inside or name == "rows" else None)
        optimizer.step()
    whole = {name: torch.nn.Parameter(value(name, 0)) for name in places}
    reference = torchs(whole, **OPTIONS)
    for step in range(STEPS):
        for name, parameter in whole.items():
            parameter.grad = value(name, step + 1)
        reference.step()
    assert set(optimizer.state_dict()["state"]) == (places.keys() if inside else {"rows"})
    return [name for name in places if not same(parameters[name], whole[name].detach())]


def test_meshes_over_a_part_of_the_ranks():
    assert run_ranks(5, differing_on_a_part_of_the_ranks) == [[]] * 5


def with_init_state(calls_at):
    parameters = matrices()
    optimizer = shardopt.keyed("muon", parameters, **OPTIONS)
    names = []
    for step in range(STEPS):
        if step in calls_at:
            optimizer.init_state()
            names = list(optimizer.state_dict()["state"])
        train(optimizer, parameters, [step])
    whole, momentum = alone(OPTIONS, torchs)
    state = optimizer.state_dict()["state"]
    assert all(same(parameters[name], whole[name].detach()) for name in whole)
    held = [name for name in SHAPES if is_held(parameters[name])]
    assert all(same(state[name]["momentum_buffer"], momentum[name]) for name in held if name in whole)
    return names == held


@pytest.mark.parametrize("calls_at", [pytest.param((0,), marks=pytest.mark.exhaustive), (1, 3)], ids=str)
def test_init_state_is_invisible(calls_at):
    assert run_ranks(2, with_init_state, calls_at) == [True] * 2


# --- gradients that only some ranks have -----------------------------------------------------------------------------


def table_with_one_gradient(holders):
    """Shards without a gradient have zeros where any has one."""
    tables = {name: matrices()["table"] for name in ("partly", "wholly", "never")}
    full = value("table", 1)
    for name, parameter in tables.items():
        give_gradient(parameter, full if name == "wholly" else None)
    gradient = torch.zeros_like(full)
    for position, piece in enumerate(view_of(tables["partly"]).pieces):
        if dist.get_rank() in holders and position == 0:
            rows = slice(piece.box.offsets[0], piece.box.ends[0])
            local_tensors(tables["partly"])[0].grad = full[rows].clone()
            gradient[rows] = full[rows]
    dist.all_reduce(gradient)
    shardopt.keyed("muon", tables, **OPTIONS).step()
    whole = {name: torch.nn.Parameter(value("table", 0)) for name in tables}
    whole["partly"].grad, whole["wholly"].grad = gradient, full
    torchs(whole, **OPTIONS).step()
    return [name for name, parameter in whole.items() if not same(tables[name], parameter.detach())]


@pytest.mark.parametrize(
    "holders", [*(pytest.param(each, marks=pytest.mark.exhaustive) for each in ([0], [0, 1])), [1]], ids=str
)
def test_one_shard_with_a_gradient_is_enough(holders):
    assert run_ranks(3, table_with_one_gradient, holders) == [[]] * 3


def gradient_on_one_rank():
    parameters = {name: matrices()[name] for name in ("rows", "columns")}
    optimizer = shardopt.keyed("muon", parameters)
    give_gradient(parameters["rows"], value("rows", 1))
    give_gradient(parameters["columns"], value("columns", 1) if dist.get_rank() == 1 else None)
    with pytest.raises(GradientError, match=r"columns\.grad: found one on 1 of its ranks, none on 1"):
        optimizer.step()
    assert all(same(parameter, value(name, 0)) for name, parameter in parameters.items())


def test_a_gradient_on_some_ranks_only_is_refused_by_all():
    run_ranks(2, gradient_on_one_rank)


def gradient_that_one_rank_refuses():
    parameters = {name: matrices()[name] for name in ("rows", "columns")}
    optimizer = shardopt.keyed("muon", parameters)
    for name, parameter in parameters.items():
        give_gradient(parameter, value(name, 1))
    if dist.get_rank() == 1:
        parameters["columns"].grad = torch.ones(SHAPES["columns"])  # no DTensor, as the parameter is one
    with pytest.raises(GradientError) as caught:
        optimizer.step()
    assert all(same(parameter, value(name, 0)) for name, parameter in parameters.items())
    assert not optimizer.state_dict()["state"]
    return str(caught.value)


def test_a_gradient_that_one_rank_refuses_is_told_by_all():
    other, own = run_ranks(2, gradient_that_one_rank_refuses)
    assert "columns.grad: found one that a rank refuses" in other
    assert "columns.grad: found Tensor of shape" in own


# As on an accelerator, where to ask before the step would be to wait for it.


def never_asking(monkeypatch):
    """Ranks send flags of their gradients with the exchange, where they would have to wait for an answer."""
    made = Team.__init__

    def make(self, ranks, steps):
        made(self, ranks, steps)
        self.checks_first = ranks.size == 1 or any(not takes_gradient(step.parameter) for step in steps)

    monkeypatch.setattr(Team, "__init__", make)


def differing_without_asking(round_bytes):
    Muon.round_bytes = round_bytes
    with pytest.MonkeyPatch.context() as monkeypatch:
        never_asking(monkeypatch)
        return differing(OPTIONS)


@pytest.mark.parametrize(("ranks", "round_bytes"), [(4, 600), pytest.param(3, 1 << 20, marks=pytest.mark.exhaustive)])
def test_same_bits_where_ranks_do_not_ask_each_other(ranks, round_bytes):
    assert run_ranks(ranks, differing_without_asking, round_bytes) == [[]] * ranks


def found_later(what):
    """Of four steps the second goes wrong on one rank; the others hear of it in the fourth."""
    reported = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        never_asking(monkeypatch)
        parameters = {name: matrices()[name] for name in ("rows", "columns", "copies")}
        optimizer = shardopt.keyed("muon", parameters)
        for step in range(4):
            for name, parameter in parameters.items():
                give_gradient(parameter, value(name, step + 1))
            if step == 1 and dist.get_rank() == 1:
                parameters["columns"].grad = None if what == "absent" else torch.ones(SHAPES["columns"])
            try:
                optimizer.step()
                reported.append("")
            except GradientError as error:
                reported.append(str(error))
                assert [problem.key for problem in error.problems] == ["columns.grad"]
    return reported


def test_what_goes_wrong_where_nobody_asks_is_told_by_all_two_steps_later():
    for reported in run_ranks(3, found_later, "absent"):
        assert reported[:3] == ["", "", ""]
        assert "columns.grad: found a gradient on ranks [0, 2], none on [1]" in reported[3]
    for rank, reported in enumerate(run_ranks(3, found_later, "refused")):
        assert reported[0] == "" and ("found Tensor of shape" in reported[1]) == (rank == 1)
        assert "columns.grad: found one that ranks [1] refuse" in reported[3]


def refused_where_another_team_asks():
    """Returns the errors of a step in which rank 0 refuses a gradient that all exchange, and two ranks ask first."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        made = Team.__init__

        def make(self, ranks, steps):
            made(self, ranks, steps)
            self.checks_first = ranks.size < 3

        monkeypatch.setattr(Team, "__init__", make)
        meshes = {"all": DeviceMesh("cpu", [0, 1, 2]), "two": DeviceMesh("cpu", [0, 1])}
        placed = {name: DTensor.from_local(torch.eye(2, 6), mesh, [Shard(0)]) for name, mesh in meshes.items()}
        parameters = {
            name: torch.nn.Parameter(placed[name]) for name in list(meshes)[: 2 if dist.get_rank() < 2 else 1]
        }
        optimizer = shardopt.keyed("muon", parameters)
        for name, parameter in parameters.items():
            parameter.grad = placed[name]
        if dist.get_rank() == 0:
            parameters["all"].grad = torch.ones(6, 6)
        try:
            optimizer.step()
        except GradientError as error:
            return [problem.key for problem in error.problems]
        return []


def test_a_gradient_that_is_refused_where_another_team_asks_keeps_nobody_waiting():
    assert run_ranks(3, refused_where_another_team_asks) == [["all.grad"], ["two.grad"], []]


# --- costs -----------------------------------------------------------------------------------------------------------


def collectives_of_a_step(make):
    """Over twelve matrices."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameters = {}
    for i in range(12):
        full = torch.randn(16, 8, generator=torch.Generator().manual_seed(i))
        placed = distribute_tensor(full, mesh, [Shard(i % 2)], src_data_rank=None)
        parameters[f"w{i}"] = torch.nn.Parameter(placed)
        parameters[f"w{i}"].grad = placed.clone()
    optimizer = make(parameters)
    optimizer.step()
    with CommDebugMode() as counted:
        optimizer.step()
    return counted.get_total_counts()


def collectives_of_ours():
    asking = collectives_of_a_step(ours)
    with pytest.MonkeyPatch.context() as monkeypatch:
        never_asking(monkeypatch)
        return asking, collectives_of_a_step(ours)


def test_a_quarter_of_torchs_collectives_at_most():
    (torchs_count, other) = run_ranks(2, collectives_of_a_step, torchs)  # as many on any number of ranks
    assert torchs_count == other
    for asking, without_asking in run_ranks(4, collectives_of_ours):
        assert asking == 3  # who has gradients, to the owners, and back
        assert asking <= torchs_count / 4
        assert without_asking == 2  # who has gradients is told in the exchange that there is


def state_bytes():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameters = {
        f"w{i}": torch.nn.Parameter(
            distribute_tensor(torch.zeros(64, 48 + i), mesh, [Shard(i % 2)], src_data_rank=None)
        )
        for i in range(4)
    }
    optimizer = shardopt.keyed("muon", parameters)
    optimizer.init_state()
    held = [
        local
        for owned in optimizer.state_dict()["state"].values()
        for t in owned.values()
        for local in local_tensors(t)
    ]
    return sum(local.nbytes for local in held)


def test_state_is_sharded():
    (alone_bytes,) = run_ranks(1, state_bytes)
    assert all(each <= 0.26 * alone_bytes for each in run_ranks(4, state_bytes))


# --- through a checkpoint --------------------------------------------------------------------------------------------


def save_halfway(folder):
    parameters = matrices()
    optimizer = shardopt.keyed("muon", parameters, **OPTIONS)
    train(optimizer, parameters, range(STEPS // 2))
    checkpoint.save(folder, {"model": parameters, "optimizer": optimizer})


def resume(folder):
    """The rest of the steps after loading into an optimizer over another order of parameters."""
    parameters = dict(reversed(matrices().items()))
    optimizer = shardopt.keyed("muon", parameters, lr=7.0)
    optimizer.init_state()
    checkpoint.load(folder, {"model": parameters, "optimizer": optimizer})
    train(optimizer, parameters, range(STEPS // 2, STEPS))
    whole, momentum = alone(OPTIONS, torchs)
    state = optimizer.state_dict()["state"]
    held = [name for name in whole if is_held(parameters[name])]
    actual = [name for name in whole if not same(parameters[name], whole[name].detach())]
    return actual + [name for name in held if not same(state[name]["momentum_buffer"], momentum[name])]


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [(4, 2), *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in [(2, 2), (1, 3), (3, 4)])],
)
def test_resume_is_exact_on_any_number_of_ranks(saved, resumed, tmp_path):
    run_ranks(saved, save_halfway, str(tmp_path / "half"))
    assert run_ranks(resumed, resume, str(tmp_path / "half")) == [[]] * resumed


# --- as users have it ------------------------------------------------------------------------------------------------


def model():
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 24), torch.nn.Tanh(), torch.nn.Linear(24, 9, bias=False), torch.nn.Linear(9, 3)
    )


def train_model(net, ranks=1, rank=0):
    """Hidden matrices to Muon, the first layer, the last one and the biases to AdamW."""
    hidden = [{"match": r"^2\.weight", "algorithm": "muon", "lr": 0.02, "ns_dtype": "float32"}]
    optimizer = shardopt.keyed("adamw", net.named_parameters(), lr=1e-3, groups=hidden)
    for step in range(STEPS):
        batch = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(batch.chunk(ranks)[rank]).square().mean().backward()
        optimizer.step()
    entries = {name: set(owned) for name, owned in optimizer.state_dict()["state"].items()}
    assert entries == {
        name: {"momentum_buffer"} if name == "2.weight" else {"step", "exp_avg", "exp_avg_sq"}
        for name, _ in net.named_parameters()
    }
    return {name: getattr(p, "full_tensor", p.clone)().detach() for name, p in net.named_parameters()}


def train_sharded_model(shape):
    net = model()
    names = ("replicate", "shard")[2 - len(shape) :]
    fully_shard(net, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    return train_model(net, dist.get_world_size(), dist.get_rank())


@pytest.mark.parametrize(
    "shape", [*(pytest.param(each, marks=pytest.mark.exhaustive) for each in [(2,), (3,)]), (2, 2)]
)
def test_a_fully_sharded_model_with_muon_for_its_hidden_matrices(shape):
    alone = train_model(model())
    for result in run_ranks(math.prod(shape), train_sharded_model, shape):
        for name, expected in alone.items():
            torch.testing.assert_close(result[name], expected, rtol=2e-5, atol=2e-6)


# --- several matrices in one parameter -------------------------------------------------------------------------------

STACKS = {  # shape, the dimension along which it is cut
    "experts": ((5, 6, 4), 0),
    "inner": ((2, 7, 5), 1),
    "columns": ((3, 4, 7), 2),
    "fused": ((12, 7), 0),
    "fused-columns": ((9, 8), 1),
    "heads": ((2, 8, 5), 1),
    "one-each": ((4, 6, 3), None),
}
STACK_OPTIONS = {
    "lr": 0.05,
    "adjust_lr_fn": "match_rms_adamw",
    "groups": [{"match": "fused", "split": 3}, {"match": "heads", "split": [5, 2, 1]}],
}


def stack_value(name, seed, dtype):
    generator = torch.Generator().manual_seed(100 * seed + sorted(STACKS).index(name))
    return torch.randn(STACKS[name][0], generator=generator).to(dtype)


def stacks(dtype):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    places = {name: Replicate() if dim is None else Shard(dim) for name, (_, dim) in STACKS.items()}
    return {
        name: torch.nn.Parameter(distribute_tensor(stack_value(name, 0, dtype), mesh, [where], src_data_rank=None))
        for name, where in places.items()
    }


def train_stacks(optimizer, parameters, steps, dtype):
    for step in steps:
        for name, parameter in parameters.items():
            whole = stack_value(name, step + 1, dtype)
            if not isinstance(parameter, torch.distributed.tensor.DTensor):
                parameter.grad = whole
            else:
                spec = parameter.device_mesh, parameter.placements
                parameter.grad = distribute_tensor(whole, *spec, src_data_rank=None)
        optimizer.step()


def differing_stacks(dtype, round_bytes, load=None, save=None):
    """The names of stacks on this rank that differ from those of whole ones; from a checkpoint, or into one."""
    Muon.round_bytes = round_bytes
    parameters = stacks(dtype)
    optimizer = shardopt.keyed("muon", parameters, **STACK_OPTIONS)
    begin = 0
    if load is not None:
        checkpoint.load(load, {"model": parameters, "optimizer": optimizer}, init_state=True)
        begin = STEPS // 2
    train_stacks(optimizer, parameters, range(begin, STEPS // 2), dtype)
    if save is not None:
        checkpoint.save(save, {"model": parameters, "optimizer": optimizer})
    train_stacks(optimizer, parameters, range(STEPS // 2, STEPS), dtype)
    whole = {name: torch.nn.Parameter(stack_value(name, 0, dtype)) for name in STACKS}
    alone = shardopt.keyed("muon", whole, **STACK_OPTIONS)
    train_stacks(alone, whole, range(STEPS), dtype)
    state, expected = (each.state_dict()["state"] for each in (optimizer, alone))
    moments = [(state[name]["momentum_buffer"], expected[name]["momentum_buffer"]) for name in STACKS]
    actual = [name for name in STACKS if not same(parameters[name], whole[name].detach())]
    return actual + [name for name, (one, other) in zip(STACKS, moments, strict=True) if not same(one, other)]


@pytest.mark.parametrize(
    ("ranks", "dtype", "round_bytes"),
    [
        (3, torch.float32, 1 << 20),
        pytest.param(2, torch.bfloat16, 400, marks=pytest.mark.exhaustive),
        *(
            pytest.param(ranks, dtype, size, marks=pytest.mark.exhaustive)
            for ranks in (1, 2, 3, 4, 6)
            for dtype in (torch.float32, torch.bfloat16)
            for size in (200, 1 << 20)
        ),
    ],
)
def test_stacks_have_the_same_bits_on_any_number_of_ranks(tmp_path, ranks, dtype, round_bytes):
    half = str(tmp_path / "half")
    assert run_ranks(ranks, differing_stacks, dtype, round_bytes, save=half) == [[]] * ranks
    others = ranks % 3 + 1
    assert run_ranks(others, differing_stacks, dtype, 1 << 20, load=half) == [[]] * others
