"""Islands of ranks that step by themselves and meet: against one process, and killed between two meetings."""

import re
import signal

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import shardopt
from shardopt import checkpoint
from shardopt.errors import ShardoptError
from shardopt.sharding.view import local_tensors
from tests.harness import run_ranks, run_ranks_outcomes
from tests.support.islands import Island, assert_close, simulate, train, whole

RANKS_STAY = True

WHOLE, SHORT = {"every": 10}, {"every": 4}
FRAGMENTS = {"every": 10, "fragments": 2, "delay": 3, "alpha": 0.5}
STEPS = 26


def assert_simulated(outcomes, islands, steps, options):
    models, anchors = simulate(islands, steps, **options)
    for rank, (_, weights, own_anchors) in enumerate(outcomes):
        assert_close(weights, models[rank * islands // len(outcomes)])
        assert_close(own_anchors, anchors)


@pytest.mark.parametrize(
    "options", [WHOLE, pytest.param(FRAGMENTS, marks=pytest.mark.exhaustive)], ids=["whole", "fragments"]
)
def test_islands_train_what_one_process_simulates(options):
    assert_simulated(run_ranks(4, train, "rows", 2, STEPS, **options), 2, STEPS, options)


@pytest.mark.parametrize(
    ("options", "save_at", "layout", "ranks"),
    [
        (WHOLE, 14, "tensor parallel", 4),
        (FRAGMENTS, 16, "columns", 4),  # fragment 0 is under way, whose mean was there at 15
    ],
    ids=["whole", "fragments"],
)
def test_killed_between_two_meetings(tmp_path, options, save_at, layout, ranks):
    root = str(tmp_path / "run")
    outcomes = run_ranks_outcomes(4, train, "rows", 2, STEPS, root, (3, save_at), killed=(2, save_at + 1), **options)
    assert outcomes[2].signal == signal.SIGKILL
    resumed = run_ranks(ranks, train, layout, 2, STEPS, root, **options)
    assert {step for step, *_ in resumed} == {save_at}
    assert_simulated(resumed, 2, STEPS, options)


def replicas_beside_uneven_shards():
    """Trains a replicated parameter beside one of which the two ranks of an island have 2 rows and 1; returns it."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("across", "own"))
    torch.manual_seed(0)
    replicated = torch.nn.Parameter(torch.randn(1000))
    rows = torch.nn.Parameter(distribute_tensor(torch.randn(3, 600), mesh["own"], [Shard(0)]))
    params = {"a": rows, "b": replicated}
    inner = shardopt.keyed("sgd", params, lr=0.1, process_group=mesh["own"])
    optimizer = shardopt.SemiSync(inner, every=1, process_group=mesh["across"])
    torch.manual_seed(mesh.get_local_rank("across"))
    for _ in range(2):
        replicated.grad = torch.randn(1000)
        rows.grad = distribute_tensor(torch.randn(3, 600), mesh["own"], [Shard(0)])
        optimizer.step()
    return replicated.detach()


def test_replicas_within_an_island_stay_equal_bit_for_bit():
    first, *others = run_ranks(6, replicas_beside_uneven_shards)
    assert all(torch.equal(first, other) for other in others)


def shards_of_several_islands(root):
    """Trains a ShardedTensor that one rank of each island has none of, saves in the middle, and resumes twice."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "own"))
    rank, island = dist.get_rank(), mesh.get_local_rank("across")
    local = torch.arange(12.0).view(3, 4)
    held = mesh.get_local_rank("own") == 0
    metadata = ShardMetadata([0, 0], [3, 4], f"rank:{rank}/cpu")
    group = mesh["own"].get_group()
    table = init_from_local_shards([LocalShard(local, metadata)] if held else [], [3, 4], process_group=group)
    inner = shardopt.keyed("adamw", {"table": table}, lr=0.1, process_group=mesh["own"])
    optimizer = shardopt.SemiSync(inner, every=3, delay=1, process_group=mesh["across"])
    app = {"optimizer": optimizer, **optimizer.own({"table": table})}

    def train(steps):
        for step in steps:
            local.grad = torch.full_like(local, 1.0 + island + step) if held else None
            optimizer.step()
        return local.clone()

    train(range(4))
    checkpoint.save(root, app)
    trained = train(range(4, 8))
    checkpoint.load(root, app)
    assert torch.equal(train(range(4, 8)), trained)
    optimizer.sync()
    return local.tolist() if held else None


def test_sharded_tensors_of_islands_are_saved_as_one(tmp_path):
    of_ranks = run_ranks(4, shards_of_several_islands, str(tmp_path / "step"))
    assert of_ranks[0] == of_ranks[2] != torch.arange(12.0).view(3, 4).tolist()


def raised(call, *args, **kwargs):
    with pytest.raises(ShardoptError) as error:
        call(*args, **kwargs)
    return f"{type(error.value).__name__}: {error.value}"


def optimizer_of(here, params, process_group="own", **options):
    inner = shardopt.keyed("sgd", params, lr=0.1, process_group=here.mesh["own"] if process_group == "own" else None)
    return shardopt.SemiSync(inner, process_group=here.mesh["across"], **({"every": 2} | options))


def islands_that_differ(root):
    """What is refused on all ranks, and two checkpoints: one where islands have met, one between two meetings."""
    here = Island("rows", 2, **SHORT)
    island = here.mesh.get_local_rank("across")
    params = dict(here.model.named_parameters())
    told = {
        "overlap": raised(optimizer_of, here, params, process_group=None),
        "options": raised(optimizer_of, here, params, every=2 + island),
        "outer": raised(optimizer_of, here, params, outer_options={"lr": torch.tensor(1 + island * 1e-6)}),
    }
    mesh = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("across", "own"))
    bias = {"bias": torch.nn.Parameter(torch.zeros(3))}
    inner = shardopt.keyed("sgd", bias, lr=0.1, process_group=mesh["own"])
    told["grid"] = raised(shardopt.SemiSync, inner, every=2, process_group=mesh["across"])
    renamed = {f"{name}{island}" if name == "0.bias" else name: param for name, param in params.items()}
    told["names"] = raised(optimizer_of, here, renamed)
    own, before = local_tensors(here.model[2].weight)[0].detach(), whole(here.model[0].weight)
    kept = own.clone()
    if dist.get_rank() == 3:
        own[0, 0] += 1e-12
    told["weights"] = raised(here.step)
    assert torch.equal(whole(here.model[0].weight), before)
    replicated, _ = here.optimizer._islands.buckets_of([bias["bias"], *params.values()]).flats
    assert replicated.numel() == 3  # apart from shards
    own.copy_(kept)
    here.optimizer.zero_grad()
    for _ in range(4):
        here.step()
    checkpoint.save(f"{root}/met", here.app)
    checkpoint.save(f"{root}/plain", {"model": here.model})  # all have the same weights
    here.step()
    checkpoint.save(f"{root}/between", here.app)
    shared = {"model": here.model, "optimizer": shardopt.GradientClippingOptimizer(here.optimizer), "step": 5}
    told["shared"] = raised(checkpoint.save, f"{root}/shared", shared)
    told["lazily"] = raised(checkpoint.async_save(f"{root}/lazily", shared).result)
    told["algorithm"] = raised(
        checkpoint.load, f"{root}/between", Island("rows", 2, **SHORT, outer="adamw").app, init_state=True
    )
    told["every"] = raised(checkpoint.load, f"{root}/between", Island("rows", 2, every=5).app, init_state=True)
    checkpoint.load(f"{root}/met", Island("columns", 2, every=5).app, init_state=True)
    return told


def other_numbers_of_islands(root, layout, islands):
    """Resumes with another number of islands than the two that there were."""
    here = Island(layout, islands, **SHORT)
    optimizer, number = here.optimizer, here.mesh.get_local_rank("across")
    told = [raised(checkpoint.load, f"{root}/met", here.app, init_state=True)]
    strict = checkpoint.Strictness(unexpected="ignore" if islands < 2 else "raise")
    for name in ("between", "met"):
        with optimizer.as_island(number % 2):
            app = {"optimizer": optimizer, "step": 0, **optimizer.own({"model": here.model})}
            if name == "between":
                told.append(raised(checkpoint.load, f"{root}/{name}", app, strict=strict, init_state=True))
            else:
                checkpoint.load(f"{root}/{name}", app, strict=strict, init_state=True)
    weights, anchors = here.values()
    assert_close(weights, anchors, 0.0)
    here.app["step"] = app["step"]
    for _ in range(2):
        here.step()
    url = f"{root}/{islands}"
    checkpoint.save(url, here.app)
    with checkpoint.open(url) as reader:
        keys = reader.keys()
    numbers = {key.split(".")[1] for key in keys if key.startswith("islands.")}
    assert numbers == {str(each) for each in range(islands)}
    return told, anchors


def test_what_differs_between_islands_is_refused_on_all_ranks(tmp_path):
    of_ranks = run_ranks(4, islands_that_differ, str(tmp_path))
    for name, wanted in {
        "overlap": "OptionError.*process_group=mesh",
        "options": "MismatchError.*every: found 3 on island 1; required 2",
        "outer": "MismatchError.*outer.*lr",
        "grid": r"MismatchError.*group: found islands that begin with ranks \[0, 1\].*\[1, 0\]",
        "names": "0.bias0: found nothing on island 1",
        "weights": "MismatchError.*\n  - 2.weight: found other values on island 1",
        "shared": "StateError.*\n  - model.0.weight.*optimizer.own",
        "lazily": "StateError.*\n  - model.0.weight.*optimizer.own",
        "algorithm": "MismatchError.*algorithm",
        "every": r"MismatchError.*__semi_sync.every: found 4, in the middle",
    }.items():
        for told in of_ranks:
            assert re.search(wanted, told[name], re.DOTALL), told[name]
    wanted = simulate(2, 4, 4)[1]
    for layout, islands in (("plain", 4), ("rows", 1)):
        answers = run_ranks(4, other_numbers_of_islands, str(tmp_path), layout, islands)
        for (number, between), anchors in answers:
            first = number.splitlines()[1]
            assert "islands: found 2 islands" in first and "as_island" in first, number
            assert "steps: found 1 local steps" in between, between
            assert_close(anchors, wanted)


def syncs_after_a_validation():
    """Trains, validates and syncs with `fully_shard` and without; returns whether all losses are the same."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("across", "island"))
    inputs, seen = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank)), torch.ones(8, 4)
    losses = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        for module in (model[0], model) if sharded else ():
            fully_shard(module, mesh=mesh["island"])
        inner = shardopt.keyed("adamw", model.named_parameters(), lr=0.1, process_group=mesh["island"])
        optimizer = shardopt.optim.SemiSync(inner, every=4, process_group=mesh["across"])
        losses.append([])
        for step in range(3):
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses[-1] += [loss.item(), model(seen).square().mean().item()]
                if step == 1:
                    optimizer.sync()
                    losses[-1].append(model(seen).square().mean().item())
    return losses[0] == pytest.approx(losses[1])


def test_a_sync_after_a_validation_reaches_the_next_forward():
    assert run_ranks(2, syncs_after_a_validation) == [True, True]
