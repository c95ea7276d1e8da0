"""What is to run without a wait of the host for the device, beside steps with rates that are numbers; and where."""

import tempfile
import threading
from functools import partial
from itertools import chain, pairwise, product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.saving.planning.replica_check import sampled_pieces
from shardopt.checkpoint.saving.writing.staging import Staging
from shardopt.nn import Grid, ShardedEmbeddingBag, Table, route
from shardopt.ranks import ranks_of
from shardopt.runtime.rows import runs_of_ids
from shardopt.state.casts import lost_in_casts
from tests.accelerator.support import each_kind, needs_standin, on_accelerator

OWN = ("lion", "ademamix", "adafactor", "lamb", "lars", "muon", "soap", "rowwiseadam", "rowwiseadagrad")
WAIT_FOR_A_RATE = {"lion", "ademamix", "rowwiseadam", "rowwiseadagrad", "schedulefreeadamw", "schedulefreesgd"}


def steps_with_rates_there(standin):
    waiting, differing = set(), {}
    for name in (*OWN, "shampoo", "schedulefreeadamw", "schedulefreesgd"):
        found = []
        for kind in ("cpu", standin.KIND):
            weight = nn.Parameter(torch.eye(6).add(0.5).to(kind))
            optimizer = shardopt.keyed(name, {"w": weight}, lr=torch.tensor(0.125).to(kind))
            for step in range(3):
                generator = torch.Generator().manual_seed(step)
                weight.grad = torch.randn(6, 6, generator=generator).to(kind)
                try:
                    if kind == "cpu" or step < 2 or name in waiting:
                        optimizer.step()
                    else:
                        with standin.no_waits():
                            optimizer.step()
                except RuntimeError:
                    waiting.add(name)
            found.append(weight.detach().cpu())
        if name not in waiting:
            differing[name] = (found[0] - found[1]).abs().max().item()
    return waiting, differing


@each_kind
def test_steps_with_a_rate_on_the_device_wait_where_it_is_listed(kind):
    ((waiting, differing),) = on_accelerator(1, steps_with_rates_there, kind=kind)
    assert waiting == WAIT_FOR_A_RATE
    assert max(differing.values()) < 1e-4 and differing["muon"] < 1e-6, differing


def calls_of_async_save(standin):
    """Returns how often the host waits within the call, by stage and by where rates are."""
    called, finish, found = threading.Event(), Staging.finish, {}

    def after_the_call(staging, writes=None):
        assert called.wait(30)
        finish(staging, writes)

    weights = {str(i): nn.Parameter(torch.randn(8, 8).to(standin.KIND)) for i in range(3)}
    for place, rate in (("host", torch.tensor(0.5)), ("device", torch.tensor(0.5).to(standin.KIND))):
        optimizer = shardopt.keyed("adamw", weights, lr=rate)
        for weight in weights.values():
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        for stage in ("now", "lazy"):
            called.clear()
            with tempfile.TemporaryDirectory() as folder, mock.patch.object(Staging, "finish", after_the_call):
                standin.C.reset()
                pending = checkpoint.async_save(folder, {"w": weights, "optimizer": optimizer}, stage=stage)
                found[place, stage] = sum(standin.waits().values())
                called.set()
                pending.result(60)
    return found


@needs_standin
def test_the_call_of_async_save_waits_for_rates_on_the_device_alone():
    (found,) = on_accelerator(1, calls_of_async_save)
    assert found == {("host", "now"): 0, ("host", "lazy"): 0, ("device", "now"): 1, ("device", "lazy"): 1}


def samples(standin):
    here = torch.randn(300, 2, 200).mT, torch.randn(1, 2)[:, 1]  # of one element the stride is 2, and stays so
    there = here[0].to(standin.KIND), torch.empty(1, 2, device=standin.KIND)[:, 1].copy_(here[1])
    with standin.no_waits():
        pieces = [piece for tensor in there for piece in sampled_pieces(tensor)]
    return [piece.cpu() for piece in pieces], [piece for tensor in here for piece in sampled_pieces(tensor)]


@each_kind
def test_samples_of_views_are_taken_without_a_wait(kind):
    ((there, here),) = on_accelerator(1, samples, kind=kind)
    assert all(torch.equal(*pair) for pair in zip(there, here, strict=True))


def casts(standin):
    """Returns how often the host waits to look at tensors of several runs each, and what is found."""
    small, large = torch.randn(8), torch.randn(5 << 19)
    found = []
    for spoilt in ([], [(1, 3 << 19, 1e9)]):
        tensors = [small.double(), large.clone(), large.mul(1j)]
        for which, place, value in spoilt:
            tensors[which][place] = value
        there = [(tensor.to(standin.KIND), torch.float16) for tensor in tensors]
        standin.C.reset()
        found.append((lost_in_casts(there), sum(standin.waits().values())))
    return found


@needs_standin
def test_casts_are_looked_at_in_one_wait():
    (((nothing, waits), (lost, more)),) = on_accelerator(1, casts)
    assert nothing == [None] * 3 and waits == 1
    assert lost == [None, 1e9, None] and more <= 4  # one run is looked at again


def sums(standin):
    mesh = init_device_mesh(standin.KIND, (1,))
    module = ShardedEmbeddingBag([Table("a", 100, 4), Table("b", 100, 4)], mesh)
    ids = torch.arange(100).to(standin.KIND), torch.arange(0, 100, 50).to(standin.KIND)
    found, find = [], route.find_wanted

    def watched(*args):
        with standin.no_waits():
            found.append(find(*args))
        return found[-1]

    module({"a": ids, "b": ids})  # the first one sends where tables are cut, which stays there
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(route, "find_wanted", watched)
        module({"a": ids, "b": ids})
    return found[0].bags


@each_kind
def test_sums_that_a_rank_wants_are_found_without_a_wait(kind):
    assert on_accelerator(1, sums, kind=kind, group=True) == [[2, 2]]


def waits_of_tables(standin):
    """Returns how often the host waits in each forward, backward and step of two batches, by cut, number of tables, and
    whether backward updates them.
    """
    found = {}
    for cut, count, fused in product(("rows", "columns", "whole", Grid(1, 2)), (2, 5), (True, False)):
        tables = [Table(f"t{number}", 40, 4, mode="sum", cut=cut) for number in range(count)]
        module = ShardedEmbeddingBag(tables, init_device_mesh(standin.KIND, (2,)))
        make = module.fuse if fused else partial(shardopt.keyed, named_params=module.named_parameters())
        optimizer = make("rowwiseadagrad", lr=torch.tensor(0.1).to(standin.KIND))
        ids = torch.arange(24).to(standin.KIND), torch.arange(0, 24, 4).to(standin.KIND)
        for _ in range(3):
            waits = [sum(standin.waits().values())]
            for _ in range(2):
                vectors = module({table.name: ids for table in tables})
                waits.append(sum(standin.waits().values()))
                sum(each.sum() for each in vectors.values()).backward()
                waits.append(sum(standin.waits().values()))
            optimizer.step()
            waits.append(sum(standin.waits().values()))
            optimizer.zero_grad()
        found[str(cut), count, fused] = [after - before for before, after in pairwise(waits)]
    return found, differing_runs(standin)


def differing_runs(standin):
    """Returns the lists of ids of which the device finds other runs than the CPU."""
    lists = [[[]], [[], [3, 3]], [[5], [5], [], [5, 5, 7], []], [[0, 1, 1, 4], [4, 4], [2]]]
    differing = []
    for each in lists:
        ids = [torch.tensor(numbers, dtype=torch.int64) for numbers in each]
        here, there = runs_of_ids(ids), runs_of_ids([one.to(standin.KIND) for one in ids])
        pairs = zip(chain(*here), (found.cpu() for found in chain(*there)), strict=True)
        differing += [] if all(torch.equal(*pair) for pair in pairs) else [each]
    return differing


@needs_standin
def test_a_step_of_tables_waits_as_often_for_many_as_for_few():
    for found, differing in on_accelerator(2, waits_of_tables):
        assert not differing
        for (cut, _, fused), waits in found.items():
            flags = cut == "columns" or cut == str(Grid(1, 2))
            step = 1 + flags  # for the rate, and for what the ranks of a row have said
            backward = 1 + (step if fused else 0)
            assert waits == [1, backward, 1, backward + (not fused), 0 if fused else step], found


def device_of_a_bound_group(standin):
    group = dist.group.WORLD
    before, group.bound_device_id = ranks_of().device, torch.device("standin", 1)
    bound, group.bound_device_id = ranks_of().device, None
    return str(before), str(bound)


@needs_standin
def test_ranks_communicate_on_the_device_of_their_group():
    ((before, bound),) = on_accelerator(1, device_of_a_bound_group, group=True)
    assert (before, bound) == ("standin:0", "standin:1")
