"""Averages of sharded models on real ranks, batch-norm statistics of all ranks, and a plateau seen by all alike."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import shardopt
from shardopt import checkpoint
from tests.harness import run_ranks

RANKS_STAY = True

KINDS = {
    "ema": (lambda net, **options: shardopt.EMA(net, 0.8, **options), get_ema_multi_avg_fn(0.8)),
    "swa": (shardopt.SWA, get_swa_multi_avg_fn()),
}
BATCH = 12


def model(seed=5):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5))


def batch(step):
    return torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step))


def whole(tensor):
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def averages(averaging):
    return {
        name: whole(owned) for name, entries in averaging.state_dict()["state"].items() for owned in entries.values()
    }


def weights(net):
    return {name: whole(parameter) for name, parameter in net.named_parameters()}


def sharded(kind, seed=5):
    net = model(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = shardopt.keyed("adamw", net.named_parameters(), lr=0.05)
    optimizer.init_state()
    averaging = KINDS[kind][0](net)
    averaging.attach(optimizer)
    return net, optimizer, averaging


def train(net, optimizer, steps, after_step=lambda: None):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in steps:
        optimizer.zero_grad()
        net(batch(step).chunk(ranks)[rank]).square().mean().backward()
        optimizer.step()
        after_step()


def average_and_swap(kind):
    """Averages are held against torch's on the gathered weights, which are the same numbers on one rank."""
    net, optimizer, averaging = sharded(kind)
    twin = model()
    theirs = AveragedModel(twin, multi_avg_fn=KINDS[kind][1])

    def follow():
        with torch.no_grad():
            for name, value in weights(net).items():
                twin.get_parameter(name).copy_(value)
        theirs.update_parameters(twin)

    train(net, optimizer, range(5), follow)
    with torch.no_grad():
        net(batch(50))  # leaves the root's unsharded weights behind
        averaging.state_dict()  # does not take these for other parameters
        expected, own = theirs(batch(51)), net(batch(51))
    net[0].unshard(async_op=True)  # nor does what is gathered meanwhile, of the weights
    memory = [parameter.to_local().data_ptr() for parameter in optimizer.params.values()]
    with averaging.swap(), torch.no_grad():
        swapped, actual = weights(net), net(batch(51))
    with torch.no_grad():
        again = net(batch(51))
    averaging.swap()
    averaging.swap()
    assert memory == [parameter.to_local().data_ptr() for parameter in optimizer.params.values()]
    assert torch.equal(again, own) and not torch.equal(actual, own)
    restored = weights(net)
    for name, value in twin.named_parameters():
        assert torch.equal(restored[name], value), name
    mine = averages(averaging)
    torchs = {name: value.detach().clone() for name, value in theirs.module.named_parameters()}
    train(net, optimizer, range(5, 7), follow)
    return (mine, swapped, actual), (torchs, expected), averages(averaging), dict(theirs.module.named_parameters())


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [("ema", 3), ("swa", 2), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in [("ema", 2), ("swa", 3)])],
)
def test_sharded_averages_are_those_of_whole_weights(kind, ranks):
    for (mine, swapped, actual), (torchs, expected), later, torchs_later in run_ranks(ranks, average_and_swap, kind):
        assert mine.pop("__averaging") == 5 and later.pop("__averaging") == 7
        for name, value in torchs.items():
            assert torch.equal(mine[name], value), name
            assert torch.equal(swapped[name], mine[name]), name
            assert torch.equal(later[name], torchs_later[name]), name
        torch.testing.assert_close(actual, expected)


def train_and_save(kind, url):
    net, optimizer, averaging = sharded(kind)
    train(net, optimizer, range(4))
    checkpoint.save(url, {"model": net, "optimizer": optimizer, "averages": averaging})
    saved = averages(averaging)
    train(net, optimizer, range(4, 7))
    return saved, averages(averaging)


def load_and_train(kind, url):
    net, optimizer, averaging = sharded(kind, seed=9)
    checkpoint.load(url, {"model": net, "optimizer": optimizer, "averages": averaging})
    loaded = averages(averaging)
    train(net, optimizer, range(4, 7))
    return loaded, averages(averaging)


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("ema", 2, 3),
        ("swa", 3, 2),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [("ema", 3, 2), ("swa", 2, 3), ("ema", 2, 2), ("swa", 2, 2)]
        ),
    ],
)
def test_averages_are_resharded_and_resume(kind, before, after, tmp_path):
    saved, expected = run_ranks(before, train_and_save, kind, str(tmp_path / "c"))[0]
    for loaded, resumed in run_ranks(after, load_and_train, kind, str(tmp_path / "c")):
        assert loaded.keys() == saved.keys() and resumed["__averaging"] == 7
        for name, value in saved.items():
            assert torch.equal(loaded[name], value), name
            if before == after:
                assert torch.equal(resumed[name], expected[name]), name
            else:
                torch.testing.assert_close(resumed[name], expected[name], rtol=2e-5, atol=2e-6)


def normalized():
    torch.manual_seed(2)
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def statistics(net):
    return {name: buffer.clone() for name, buffer in net.named_buffers()}


def update_bn_on_ranks(url):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    net = normalized()
    fully_shard(net, mesh=init_device_mesh("cpu", (ranks,)))
    swa = shardopt.SWA(net)
    own = statistics(net)
    with swa.swap():
        shardopt.optim.update_bn([batch(step) for step in range(rank, 6, ranks)], net)
        actual = statistics(net)
        checkpoint.save(url, {"model": net}, check_replicas="all")  # refused where ranks differ
    after = statistics(net)
    assert all(torch.equal(after[name], value) for name, value in own.items())

    uneven = normalized()  # plain: ranks may have other numbers of batches
    shardopt.optim.update_bn([batch(step) for step in range(6) if (step == 0) == (rank == 0)], uneven)
    return actual, statistics(uneven)


def test_batch_norm_statistics_are_those_of_all_batches(tmp_path):
    alone = normalized()
    shardopt.optim.update_bn([batch(step) for step in range(6)], alone)
    results = run_ranks(2, update_bn_on_ranks, str(tmp_path / "c"))
    for actual, uneven in results:
        for name, value in statistics(alone).items():
            torch.testing.assert_close(actual[name], value)
            torch.testing.assert_close(uneven[name], value)
            assert torch.equal(actual[name], results[0][0][name])
    assert actual["1.num_batches_tracked"] == 6


METRICS = [(1.0, 1.0, 1.0), (0.5, 2.0, 0.8), (0.4, 2.1, 0.9), (0.3, 1.0, 1.1), (0.2, float("nan"), 0.1)]


def reduce_on_plateau(kind):
    net = model()
    optimizer = shardopt.keyed("sgd", net.named_parameters(), lr=1.0)
    schedule = kind(optimizer, factor=0.5, patience=0)
    rates = []
    for metrics in METRICS:
        schedule.step(torch.tensor(metrics[dist.get_rank()]))
        rates.append(schedule.get_last_lr())
    return rates, schedule.state_dict()["best"]


def test_a_plateau_of_the_mean_is_seen_by_all_ranks():
    actual = run_ranks(3, reduce_on_plateau, shardopt.optim.ReduceLROnPlateau)
    assert actual[0] == actual[1] == actual[2]
    assert [rate for (rate,) in actual[0][0]] == [1.0, 0.5, 0.25, 0.25, 0.125]
    torchs = run_ranks(3, reduce_on_plateau, lr_scheduler.ReduceLROnPlateau)
    assert torchs[0] != torchs[1], "metrics on which torch's ranks do not drift apart show nothing"
