"""The recipe for vLLM, as its page has it: published weights in a worker's own fused and sharded parameters."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardopt import checkpoint
from tests.docs.blocks import ROOT, blocks_of
from tests.harness import run_ranks
from tests.support.fused_worker import FusedModel, Worker, published_shapes
from tests.support.streams import train

DEADLINE_SECONDS = 5.0
FEW = ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight"]


def follower_of_page():
    """The class that the page has a reader save."""
    (block,) = (each for each in blocks_of(ROOT / "docs/streams_into.md") if "file" in each.words)
    names = {}
    exec(compile(block.text, block.where, "exec"), names)
    return names["FollowWeights"]


def new_weights(tied, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in published_shapes(tied).items()}
    return weights | {"lm_head.weight": weights["model.embed_tokens.weight"]} if tied else weights


def expected_of(weights, rank, ranks):
    """The parameters of a rank, put together of all ranks' rows by hand."""

    def rows(*names):
        return torch.cat([weights[name].view(ranks, -1, weights[name].shape[1])[rank] for name in names])

    def columns(name):
        width = weights[name].shape[1] // ranks
        return weights[name][:, rank * width : (rank + 1) * width]

    expected = {name: each for name, each in weights.items() if "norm" in name}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        padded = torch.zeros(64, 64)
        padded[: len(weights[name])] = weights[name]
        expected[name] = padded[rank * (64 // ranks) :][: 64 // ranks]
    for i in range(2):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        expected[f"{attention}.qkv_proj.weight"] = rows(*(f"{attention}.{each}_proj.weight" for each in "qkv"))
        expected[f"{mlp}.gate_up_proj.weight"] = rows(f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")
        expected[f"{attention}.o_proj.weight"] = columns(f"{attention}.o_proj.weight")
        expected[f"{mlp}.down_proj.weight"] = columns(f"{mlp}.down_proj.weight")
    return expected


def assert_loaded(worker, weights, rank, ranks, tied):
    expected = expected_of(weights, rank, ranks)
    if tied:
        del expected["lm_head.weight"]  # vLLM has one parameter for both
    found = worker.model_runner.model.state()
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert torch.equal(found[name], each), name


def serve(root, tied):
    """Publishes and loads step by step; returns the names that were loaded at each."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    worker = type("WorkerWithExtension", (Worker, follower_of_page()), {})(rank, ranks, tied)
    weights, loaded = new_weights(tied), []
    with checkpoint.Publisher(root, durable=False, deadline_seconds=DEADLINE_SECONDS) as publisher:
        for step, names in enumerate([list(weights), FEW, list(weights), []], 1):
            train({name: weights[name] for name in names}, step)
            publisher.publish(step, weights).result()
            dist.barrier()
            assert worker.load_published(root) == step
            assert_loaded(worker, weights, rank, ranks, tied)
            loaded.append([*worker.model_runner.model.loaded])
            worker.model_runner.model.loaded.clear()
        assert worker.load_published(root) == 4 and not worker.model_runner.model.loaded  # nothing new
    return loaded


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_vllm_gets_what_has_changed_into_its_own_parameters(tmp_path, ranks, tied):
    everything = published_shapes(tied).keys()
    for loaded in run_ranks(ranks, serve, str(tmp_path), tied):
        assert [set(each) for each in loaded] == [set(everything), set(FEW), set(everything), set()]


def fail_once(root):
    """One rank's load ends in the middle; what is loaded at the next call, of a step that changed something else."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    worker = type("WorkerWithExtension", (Worker, follower_of_page()), {})(rank, ranks)
    model, weights = worker.model_runner.model, new_weights(tied=False)
    with checkpoint.Publisher(root, durable=False, deadline_seconds=DEADLINE_SECONDS) as publisher:

        def publish(step, names):
            train({name: weights[name] for name in names}, step)
            publisher.publish(step, weights).result()
            dist.barrier()

        publish(1, [])
        worker.load_published(root)
        model.loaded.clear()
        publish(2, FEW[:2])
        if rank == 1:

            def interrupted(pairs):
                FusedModel.load_weights(model, [next(pairs)])
                raise RuntimeError("out of memory")

            model.load_weights = interrupted
            with pytest.raises(RuntimeError, match="out of memory"):
                worker.load_published(root)
            del model.load_weights
        else:
            worker.load_published(root)
        model.loaded.clear()
        publish(3, FEW[2:])
        worker.load_published(root)
        assert_loaded(worker, weights, rank, ranks, tied=False)
    return set(model.loaded)


def test_a_load_that_failed_is_made_up_for_by_the_next_call(tmp_path):
    assert run_ranks(2, fail_once, str(tmp_path)) == [set(FEW[2:]), set(FEW)]


def follow_parts(root):
    """Follows straight into the parts of a fused and sharded parameter; no tensor is copied whole."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    weights = {name: each for name, each in new_weights(tied=False).items() if "layers.0.self_attn" in name}
    qkv = torch.nn.Linear(64, 128 // ranks, bias=False)
    parts = qkv.weight.detach().split([64 // ranks, 32 // ranks, 32 // ranks])
    app = {
        f"model.layers.0.self_attn.{name}_proj.weight": DTensor.from_local(part, mesh, [Shard(0)])
        for name, part in zip("qkv", parts, strict=True)
    }
    o = torch.zeros(64, 64 // ranks)
    app["model.layers.0.self_attn.o_proj.weight"] = DTensor.from_local(o, mesh, [Shard(1)])
    follower = checkpoint.Follower(root, app, deadline_seconds=DEADLINE_SECONDS)
    with checkpoint.Publisher(root, durable=False, deadline_seconds=DEADLINE_SECONDS) as publisher:
        for step in (1, 2, 3):
            train(weights, step)
            publisher.publish(step, weights).result()
            dist.barrier()
            report = follower.update()
            assert (report.step, report.whole) == (step, 4 if step == 1 else 0)
            rows = [weights[f"model.layers.0.self_attn.{name}_proj.weight"].chunk(ranks)[rank] for name in "qkv"]
            assert torch.equal(qkv.weight, torch.cat(rows))
            assert torch.equal(o, weights["model.layers.0.self_attn.o_proj.weight"].chunk(ranks, 1)[rank])


def test_parts_of_fused_parameters_are_followed_on_ranks_in_place(tmp_path):
    run_ranks(2, follow_parts, str(tmp_path))
