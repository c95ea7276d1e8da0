"""Weights that flow between ranks: from trainers to followers in other layouts, and through failures of either."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardopt
from shardopt import checkpoint
from shardopt.errors import CheckpointError, RankError, ShardoptError, StateError
from tests.harness import Fault, run_ranks, run_ranks_outcomes
from tests.support.streams import bits, named, train

RANKS_STAY = True

DEADLINE_SECONDS = 5.0
SHAPES = {"rows": (203, 300), "columns": (120, 250), "few": (3, 5000), "plain": (90, 100), "small": (7,)}


def values(step):
    """The weights of a step, whole, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    for each in range(1, step + 1):
        train(whole, each)
    return whole


LAYOUTS = {  # by name of a tensor, on one mesh or two; None for a plain tensor
    "rows": dict.fromkeys(SHAPES, (Shard(0),)) | {"plain": None},
    "columns": {name: (Shard(len(shape) - 1),) for name, shape in SHAPES.items()} | {"plain": None},
    "mixed": {"rows": (Shard(1),), "columns": (Shard(0),), "few": (Replicate(),), "plain": None, "small": None},
    "hybrid": dict.fromkeys(SHAPES, (Replicate(), Shard(0))) | {"plain": None},
    "both": dict.fromkeys(SHAPES, (Shard(0), Shard(0))) | {"columns": (Shard(1), Shard(0)), "plain": None},
    "replicas": dict.fromkeys(SHAPES, None),
}


def placed(whole, layout):
    ranks = dist.get_world_size()
    placements = LAYOUTS[layout]
    if len(placements["rows"] or ()) == 2:
        mesh = init_device_mesh("cpu", (2, ranks // 2))
    else:
        mesh = init_device_mesh("cpu", (ranks,))
    return {
        name: each.clone()
        if placements[name] is None
        else distribute_tensor(each, mesh, list(placements[name]), src_data_rank=None)
        for name, each in whole.items()
    }


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assert_same(app, expected):
    for name, each in named(app).items():
        assert torch.equal(bits(local(each)), bits(local(expected[name]))), name


def publish(root, layout, steps, anchor_every=3, **options):
    options = {"deadline_seconds": DEADLINE_SECONDS, "durable": False, "keep": None, **options}
    with checkpoint.Publisher(root, anchor_every=anchor_every, **options) as publisher:
        for step in steps:
            publisher.publish(step, placed(values(step), layout)).result()


def follow(root, layout, steps, memory_bytes=1 << 30):
    """Goes from step to step; returns of each how many parts were read whole."""
    app = placed({name: torch.zeros(shape) for name, shape in SHAPES.items()}, layout)
    follower = checkpoint.Follower(root, app, memory_bytes=memory_bytes, deadline_seconds=DEADLINE_SECONDS)
    whole = []
    for step in steps:
        report = follower.update(step)
        assert report.step == follower.step == step
        other = placed({name: torch.zeros(shape) for name, shape in SHAPES.items()}, layout)
        checkpoint.load(report.url, other)
        assert_same(app, other)
        assert_same(app, placed(values(step), layout))
        whole.append(report.whole)
    return whole


@pytest.mark.parametrize(
    "trainers", ["mixed", "both", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("rows", "hybrid"))]
)
def test_trainers_on_four_ranks_are_followed_in_any_layout(tmp_path, trainers):
    root = str(tmp_path)
    run_ranks(4, publish, root, trainers, range(1, 7))
    layouts = [name for name in LAYOUTS if len(LAYOUTS[name]["rows"] or ()) < 2]
    for ranks in (1, 2, 3):
        layout = layouts[(ranks + len(trainers)) % len(layouts)]
        for whole in run_ranks(ranks, follow, root, layout, [1, 2, 3, 6, 2, 5], memory_bytes=(1 << 30) * (ranks % 2)):
            assert whole[1] <= 5 and whole[2] <= 5  # of small boxes


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("trainers", LAYOUTS)
def test_any_layout_is_followed_in_any_other(tmp_path, trainers, layout):
    run_ranks(4, publish, str(tmp_path), trainers, range(1, 7))
    for ranks in (1, 2, 3, 4):
        if len(LAYOUTS[layout]["rows"] or ()) < 2 or ranks % 2 == 0:
            run_ranks(ranks, follow, str(tmp_path), layout, [1, 2, 3, 6, 2, 5], memory_bytes=(ranks % 2) << 30)


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 201), nn.LayerNorm(201), nn.Linear(201, 50))


def train_and_publish(root, steps):
    """A real training: what is published is what the model has at the call, and not after the next steps."""
    model = new_model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    kept = []
    with checkpoint.Publisher(root, deadline_seconds=DEADLINE_SECONDS, dtype=torch.bfloat16) as publisher:
        for step in steps:
            publisher.publish(step, model)
            kept.append({name: each.full_tensor().bfloat16() for name, each in model.state_dict().items()})
            for _ in range(2):
                model(torch.randn(8, 100)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return kept[-1]


def follow_model(root):
    model = new_model().bfloat16()
    fully_shard(model)
    follower = checkpoint.Follower(root, model, deadline_seconds=DEADLINE_SECONDS)
    assert follower.update().step == 4
    return {name: each.full_tensor() for name, each in model.state_dict().items()}


def test_a_training_goes_on_while_its_weights_are_written(tmp_path):
    late = [Fault(rank, "os:link", action="delay", seconds=0.1, times=99) for rank in range(4)]
    late += [Fault(rank, "os:writev", action="delay", seconds=0.1, times=99) for rank in range(4)]
    kept, *_ = run_ranks(4, train_and_publish, str(tmp_path), range(1, 5), faults=late)
    for found in run_ranks(3, follow_model, str(tmp_path)):
        for name, each in kept.items():
            assert torch.equal(found[name], each), name


def both_in_one_job(root):
    """Ranks 0 and 1 publish, 2 and 3 follow, each by a group of their own."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    app = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    options = {"process_group": groups[rank // 2], "deadline_seconds": DEADLINE_SECONDS}
    steps = []
    if rank < 2:
        with checkpoint.Publisher(root, durable=False, **options) as publisher:
            for step in range(1, 6):
                publisher.publish(step, values(step)).result()
                dist.barrier()
                dist.barrier()
        return steps
    follower = checkpoint.Follower(root, app, **options)
    for step in range(1, 6):
        dist.barrier()
        assert follower.update().step == step
        assert_same(app, values(step))
        steps.append(step)
        dist.barrier()
    return steps


def test_some_ranks_of_a_job_publish_and_others_follow(tmp_path):
    assert run_ranks(4, both_in_one_job, str(tmp_path)) == [[], [], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]


def follow_through_failure(root, memory_bytes, error):
    """Updates to step 2, in which a rank fails: all ranks have one step, or serve none. The next update is whole."""
    app = placed({name: torch.zeros(shape) for name, shape in SHAPES.items()}, "rows")
    follower = checkpoint.Follower(root, app, memory_bytes=memory_bytes, deadline_seconds=DEADLINE_SECONDS)
    follower.update(1)
    raised = None
    try:
        follower.update(2)
    except error as found:
        raised = type(found).__name__
    steps = [None] * dist.get_world_size()
    dist.all_gather_object(steps, (follower.step, raised))
    if follower.step is None:
        with pytest.raises(StateError), follower.serving():
            pass
    else:
        assert_same(app, placed(values(follower.step), "rows"))
    assert follower.update().step == 2
    assert_same(app, placed(values(2), "rows"))
    return steps


READ = "shardopt.checkpoint.stream.staged:Staged.read"
APPLY = "shardopt.checkpoint.stream.staged:Staged.apply"
SCATTER = "shardopt.checkpoint.stream.changes:Scatter.apply"


@pytest.mark.parametrize(
    ("operation", "at", "memory_bytes", "step"),
    [(READ, 2, 1 << 30, 1), (APPLY, 2, 1 << 30, None), (SCATTER, 2, 1 << 30, None), (SCATTER, 2, 0, None)],
    ids=["reading", "before applying", "applying", "reading in the pause"],
)
def test_a_rank_that_fails_leaves_all_of_them_at_one_step(tmp_path, operation, at, memory_bytes, step):
    run_ranks(2, publish, str(tmp_path), "rows", [1, 2])
    fault = Fault(1, operation, at, RuntimeError("the device fell off"))
    for by_rank in run_ranks(3, follow_through_failure, str(tmp_path), memory_bytes, Exception, faults=[fault]):
        assert {each for each, _ in by_rank} == {step}
        assert all(raised in ("RuntimeError", "RankError") for _, raised in by_rank)


def follow_to(root, last):
    app = placed({name: torch.zeros(shape) for name, shape in SHAPES.items()}, "columns")
    follower = checkpoint.Follower(root, app, deadline_seconds=DEADLINE_SECONDS)
    follower.update(1)
    begin = time.monotonic()
    try:
        for step in range(2, last + 1):
            follower.update(step)
    except ShardoptError as error:
        if follower.step is not None:
            assert_same(app, placed(values(follower.step), "columns"))
        return follower.step, f"{type(error).__name__}: {error}", time.monotonic() - begin
    return follower.step, "", 0.0


@pytest.mark.parametrize(
    ("operation", "at"), [(READ, 2), (APPLY, 2), (SCATTER, 3), ("os:preadv", 9)], ids=["read", "apply", "scatter", "io"]
)
def test_the_others_are_told_of_a_rank_that_was_killed_in_an_update(tmp_path, operation, at):
    run_ranks(2, publish, str(tmp_path), "rows", [1, 2, 3])
    fault = Fault(1, operation, at, "kill")
    outcomes = run_ranks_outcomes(3, follow_to, str(tmp_path), 3, faults=[fault], deadline_seconds=40)
    assert outcomes[1].signal is not None
    told = [each.value for each in outcomes if each.rank != 1]
    assert all(each is not None for each in told), [str(each) for each in outcomes]
    assert len({step for step, *_ in told}) == 1
    assert all("rank 1" in said and seconds < DEADLINE_SECONDS + 10 for _, said, seconds in told), told
    run_ranks(3, follow, str(tmp_path), "columns", [1, 2, 3])


def publish_and_survive(root, steps):
    try:
        publish(root, "rows", steps, keep=2)
    except (CheckpointError, RankError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


CALLS = ("os:open", "os:writev", "os:link", "os:unlink", "os:rename", "os:listdir", "os:mkdir", "os:rmdir")


@pytest.mark.parametrize("share", [0.3, 0.75, *(pytest.param(i / 40, marks=pytest.mark.exhaustive) for i in range(40))])
def test_a_publisher_that_was_killed_leaves_whole_steps_and_goes_on(tmp_path, share):
    sound = run_ranks_outcomes(2, publish_and_survive, str(tmp_path / "sound"), [1, 2, 3, 4, 5], trace=CALLS)
    calls = sound[0].calls
    at = int(len(calls) * share)
    operation = calls[at]
    fault = Fault(0, operation, calls[: at + 1].count(operation), "kill")
    root = str(tmp_path / "killed")
    outcomes = run_ranks_outcomes(
        2, publish_and_survive, root, [1, 2, 3, 4, 5], faults=[fault], deadline_seconds=DEADLINE_SECONDS + 25
    )
    assert outcomes[0].signal is not None
    app = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    follower = checkpoint.Follower(root, app)
    report = follower.update()
    last = 0 if report is None else report.step
    if last:
        assert_same(app, values(last))
        checkpoint.verify(report.url).raise_if_damaged()
    run_ranks(3, publish, root, "columns", [last, last + 1, last + 2] if last else [1, 2])
    assert follower.update().step == last + 2
    assert_same(app, values(last + 2))


def into_named_tensors_after_a_forward(root):
    """Loads, and follows, tensors by name after a forward; returns whether the next forward has them.

    Also whether it has weights that an optimizer makes of masters that are loaded, and those from before where one rank
    alone reads something else.
    """
    mesh, inputs = init_device_mesh("cpu", (2,)), torch.ones(8, 4)

    def made(seed, dtype=torch.float32):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).to(dtype)
        for module in (model[0], model):
            fully_shard(module, mesh=mesh)
        return model, dict(model.named_parameters())

    def with_masters(seed):
        model, named = made(seed, torch.bfloat16)
        optimizer = shardopt.keyed("adamw", named, lr=0.1, master_dtype=torch.float32)
        model(inputs.bfloat16()).sum().backward()
        optimizer.step()
        return model, optimizer

    trained = [with_masters(1), with_masters(2)]
    with torch.no_grad():
        source, named = made(1)
        wanted, found = source(inputs), []
        checkpoint.save(f"{root}/saved", {"model": named})
        with checkpoint.Publisher(f"{root}/published") as publisher:
            publisher.publish(1, named).result()
        for reads in ("load", "follow"):
            model, named = made(2)
            model(inputs)
            if reads == "load":
                checkpoint.load(f"{root}/saved", {"model": named})
            else:
                checkpoint.Follower(f"{root}/published", named).update()
            found.append(torch.allclose(model(inputs), wanted))
        before = model(inputs)
        if dist.get_rank() == 0:
            with checkpoint.open(f"{root}/saved") as saved:
                saved.read_into("model.1.bias", torch.zeros(1))
        found.append(torch.equal(model(inputs), before))
        (model, optimizer), (loaded, other) = trained
        loaded(inputs.bfloat16())
        other.load_state_dict(optimizer.state_dict())
        found.append(torch.equal(loaded(inputs.bfloat16()), model(inputs.bfloat16())))
    return found


def test_tensors_by_name_reach_the_next_forward_of_a_sharded_model(tmp_path):
    assert run_ranks(2, into_named_tensors_after_a_forward, str(tmp_path)) == [[True] * 4] * 2
