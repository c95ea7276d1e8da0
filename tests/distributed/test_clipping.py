"""Clipping on real ranks: the norm of one process, whatever the layouts, and never a rank that waits for another."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardopt
from shardopt import GradientClipping, GradientClippingOptimizer
from shardopt.errors import GradientError, LayoutError, RankError
from shardopt.optim import CombinedOptimizer
from shardopt.sharding.gradients import local_gradients
from shardopt.sharding.view import assemble
from tests.harness import Fault, run_ranks, run_ranks_outcomes
from tests.support.clipped import (
    LAYOUTS,
    Case,
    Meshes,
    check_scaled,
    clipping,
    drop_gradient,
    full_gradient,
    make_job,
    on,
    one_process_norm,
    whole,
)

INF, NAN = math.inf, math.nan
ORDERS = [0.5, 1.0, 2.0, 3.0, INF]
COLLECTIVES = [f"torch.distributed:{name}" for name in ("all_reduce", "all_gather_into_tensor", "broadcast", "barrier")]


RANKS_STAY = True


def clip_jobs(jobs):
    """Clips each (layout, p) to half its norm; checks every local gradient, and gives the norms."""
    meshes, norms = Meshes(), []
    for layout, order in jobs:
        cases = LAYOUTS[layout]
        full = {name: full_gradient(name, case) for name, case in cases.items()}
        norm = one_process_norm(full.values(), order)
        params = make_job(cases, meshes)
        optimizer = clipping(params, max_gradient=norm / 2, norm_type=order)
        total = optimizer.clip_grad_norm_()
        assert total is optimizer.total_norm
        for name, param in params.items():
            check_scaled(name, param, full[name], (norm / 2) / (norm + 1e-6))
        norms.append(total.item())
    return norms


def check_norms(ranks, jobs):
    per_rank = run_ranks(ranks, clip_jobs, jobs)
    assert all(norms == per_rank[0] for norms in per_rank)  # the same float, not a close one
    for (layout, order), norm in zip(jobs, per_rank[0], strict=True):
        full = [full_gradient(name, case) for name, case in LAYOUTS[layout].items()]
        assert norm == pytest.approx(one_process_norm(full, order), rel=1e-12, abs=0), (layout, order)


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.exhaustive), pytest.param(2, marks=pytest.mark.exhaustive), 3, 4]
)
def test_norm_is_that_of_one_process(ranks):
    """Each layout with one order, each order with the job that has every layout."""
    check_norms(
        ranks,
        [(layout, ORDERS[(i + ranks) % 5]) for i, layout in enumerate(LAYOUTS)] + [("all", order) for order in ORDERS],
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("order", [*ORDERS, 0.1, 1.5, 2.5, 7.0])
def test_norm_is_that_of_one_process_for_every_layout(ranks, order):
    check_norms(ranks, [(layout, order) for layout in LAYOUTS])


def clip_three_times():
    params = make_job(LAYOUTS["all"], Meshes())
    optimizer = clipping(params, max_gradient=INF)
    return [optimizer.clip_grad_norm_().item() for _ in range(3)]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_each_clip_is_one_all_reduce(ranks):
    outcomes = run_ranks_outcomes(ranks, clip_three_times, trace=COLLECTIVES)
    for outcome in outcomes:
        assert outcome.ok, outcome.traceback
        assert outcome.calls[-3:] == ("torch.distributed:all_reduce",) * 3
        # What comes before is the making of the job; the same job without a clip has just that.
        assert len(set(outcome.value)) == 1
    made = run_ranks_outcomes(ranks, make_the_job_alone, trace=COLLECTIVES)
    assert [len(outcome.calls) - len(other.calls) for outcome, other in zip(outcomes, made, strict=True)] == [3] * ranks


def make_the_job_alone():
    make_job(LAYOUTS["all"], Meshes())


# --- Absent gradients ------------------------------------------------------------------------------------------------


def clip_without(absent):
    """`absent`: name → ranks that have no gradient for it."""
    meshes = Meshes()
    params = make_job(LAYOUTS["all"], meshes)
    for name, ranks in absent.items():
        if name in params and meshes.rank in ranks:
            drop_gradient(params[name])
    optimizer = clipping(params, max_gradient=INF)
    first = optimizer.clip_grad_norm_().item()
    for param in params.values():  # the next step has others: what is kept may not be of the step before
        drop_gradient(param)
    return first, optimizer.clip_grad_norm_().item()


@pytest.mark.parametrize(
    ("without", "ranks"),
    [
        *((without, 2) for without in ([0], [1], None)),
        ([0], 4),  # several have what the first holder lacks
        *(pytest.param(without, 4, marks=pytest.mark.exhaustive) for without in ([1], None)),
    ],
)
def test_absent_gradients_count_nothing_and_what_is_there_counts_once(ranks, without):
    """A shard without a gradient is zero; a whole parameter counts as long as one of its holders has a gradient."""
    without = list(range(ranks)) if without is None else without
    absent = {"plain.w": without, "replicated.w": without, "rows.w": without, "pipeline.tied": without}
    squares = {name: full_gradient(name, case).abs().double() ** 2 for name, case in LAYOUTS["all"].items()}
    for chunk in without:
        squares["rows.w"].chunk(ranks)[chunk].zero_()
    if len(without) == ranks:
        for name in absent:
            squares[name].zero_()
    expected = math.sqrt(sum(square.sum().item() for square in squares.values()))
    for first, second in run_ranks(ranks, clip_without, absent):
        assert first == pytest.approx(expected, rel=1e-12)
        assert second == 0.0


def clip_in_turns():
    """Both ranks have a gradient of `a`, and in the next step each has one of another parameter."""
    meshes = Meshes()
    params = make_job({"a": Case((3,), whole), "b": Case((4,), whole)}, meshes)
    kept = params["b"].grad
    optimizer = clipping(params, max_gradient=INF)
    drop_gradient(params["b"])
    first = optimizer.clip_grad_norm_().item()
    if meshes.rank == 1:
        drop_gradient(params["a"])
        params["b"].grad = kept
    return first, optimizer.clip_grad_norm_().item()


def test_gradients_may_be_absent_in_some_steps_only():
    a, b = (full_gradient(name, Case(shape, whole)) for name, shape in (("a", (3,)), ("b", (4,))))
    for first, second in run_ranks(2, clip_in_turns):
        assert first == pytest.approx(one_process_norm([a], 2.0), rel=1e-12)
        assert second == pytest.approx(one_process_norm([a, b], 2.0), rel=1e-12)


def clip_where_one_rank_has_no_parameter():
    meshes = Meshes()
    params = make_job({"w": Case((4, 2), whole)}, meshes) if meshes.rank == 0 else {}
    return clipping(params, max_gradient=1.0, norm_type=INF).clip_grad_norm_().item()


def test_a_rank_without_parameters_takes_part():
    expected = one_process_norm([full_gradient("w", Case((4, 2), whole))], INF)
    assert run_ranks(3, clip_where_one_rank_has_no_parameter) == [expected] * 3


def clip_what_half_of_the_ranks_train():
    meshes = Meshes()
    params = make_job(LAYOUTS["hybrid"] | {"b": Case((), on("line", Replicate()))}, meshes)
    if meshes.rank < 2:
        del params["w"], params["b"]  # they hold copies, but their optimizers do not have them
    return clipping(params, max_gradient=INF).clip_grad_norm_().item()


def test_copies_count_where_they_are_trained():
    cases = LAYOUTS["hybrid"] | {"b": Case((), whole)}
    expected = one_process_norm([full_gradient(name, case) for name, case in cases.items()], 2.0)
    assert run_ranks(4, clip_what_half_of_the_ranks_train) == pytest.approx([expected] * 4, rel=1e-12)


# --- What cannot be clipped ------------------------------------------------------------------------------------------


def clip_nonfinite(bad_rank, value, order):
    meshes = Meshes()
    params = make_job(LAYOUTS["rows"], meshes)
    if meshes.rank == bad_rank:
        params["w"].grad.to_local()[0, 0] = value
    before = {name: param.grad.to_local().clone() for name, param in params.items()}
    optimizer = clipping(params, max_gradient=1.0, norm_type=order, error_if_nonfinite=True)
    with pytest.raises(GradientError) as caught:
        optimizer.step()
    assert all(torch.equal(params[name].grad.to_local(), own) or name == "w" for name, own in before.items())
    assert [problem.key for problem in caught.value.problems] == (["w.grad"] if meshes.rank == bad_rank else [])
    return caught.value.message


@pytest.mark.parametrize(("value", "order"), [(NAN, 2.0), (INF, 2.0), (NAN, INF), (-INF, 3.0), (NAN, 0.5)])
def test_nonfinite_norm_is_an_error_on_all_ranks(value, order):
    messages = run_ranks(3, clip_nonfinite, 1, value, order)
    assert len(set(messages)) == 1
    assert "ranks [1]" in messages[0]


def clip_with_a_gradient_that_does_not_fit():
    meshes = Meshes()
    params = make_job(LAYOUTS["rows"] | LAYOUTS["plain"], meshes)
    before = {name: param.grad.clone() for name, param in params.items()}
    optimizer = clipping(params, max_gradient=1e-3)
    right = params["b"].grad
    if meshes.rank == 1:
        params["b"].grad = None
        params["b"].data = torch.zeros(3)  # a gradient can be made to not fit only behind torch's back
        params["b"].grad = torch.zeros(3)
        params["b"].data = torch.zeros(())
    with pytest.raises((GradientError, RankError)) as caught:
        optimizer.clip_grad_norm_()
    if meshes.rank != 1:
        assert all(torch.equal(param.grad, before[name]) for name, param in params.items())
    params["b"].data, params["b"].grad = torch.zeros(()), None
    params["b"].grad = right
    return type(caught.value).__name__, str(caught.value), optimizer.clip_grad_norm_().item()


def test_a_gradient_that_fits_on_one_rank_only_hangs_none():
    reported = run_ranks(3, clip_with_a_gradient_that_does_not_fit)
    assert [kind for kind, _, _ in reported] == ["RankError", "GradientError", "RankError"]
    assert "b.grad" in reported[1][1]
    assert "rank 1" in reported[0][1]
    assert len({norm for _, _, norm in reported}) == 1  # and ranks did not lose step


def clip_what_overlaps():
    meshes = Meshes()
    here = on("line", Shard(0)) if meshes.rank else whole
    mesh = meshes.line
    full = full_gradient("w", Case((6, 2), whole))
    placed = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None) if here is not whole else full
    parameter = torch.nn.Parameter(torch.zeros_like(placed))
    parameter.grad = placed
    with pytest.raises(LayoutError) as caught:
        clipping({"w": parameter}).clip_grad_norm_()
    return str(caught.value)


def test_parts_that_overlap_are_refused_by_name_on_all_ranks():
    reported = run_ranks(2, clip_what_overlaps)
    assert reported[0] == reported[1]
    assert "w: found" in reported[0]
    assert "both hold" in reported[0]


# --- Gradients in other forms ----------------------------------------------------------------------------------------


def clip_a_gradient_placed(placement):
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(6.0).view(3, 2)
    weight = torch.nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)]))
    if isinstance(placement, Partial):
        weight.grad = DTensor.from_local(full / 2, mesh, [placement])
    else:
        weight.grad = distribute_tensor(full, mesh, [placement])
    optimizer = GradientClippingOptimizer(shardopt.keyed("sgd", {"w": weight}, lr=1.0), GradientClipping.NORM, 0.5)
    optimizer.step()
    assert optimizer.total_norm.item() == pytest.approx(full.norm().item())
    return weight.detach().full_tensor()


@pytest.mark.parametrize("placement", [Shard(1), Replicate(), Partial()])
def test_a_gradient_with_another_placement_is_clipped_too(placement):
    full = torch.arange(6.0).view(3, 2)
    for result in run_ranks(2, clip_a_gradient_placed, placement):
        torch.testing.assert_close(result, -full * 0.5 / (full.norm() + 1e-6))


def clip_sparse():
    """Row-sharded and plain embeddings; each rank has touched other rows, some twice."""
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    indices = torch.tensor([[1, 1, 3]]) if rank == 0 else torch.tensor([[0, 2, 2]])
    local = torch.sparse_coo_tensor(
        indices, torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), (4, 2), check_invariants=True
    )
    rows = torch.nn.Parameter(distribute_tensor(torch.zeros(8, 2), mesh, [Shard(0)]))
    rows.grad = assemble(rows, [local])
    plain = torch.nn.Parameter(torch.zeros(4, 2))
    plain.grad = torch.sparse_coo_tensor(
        [[0, 0]], torch.tensor([[1.0, 0.0], [1.0, 2.0]]), (4, 2), check_invariants=True
    )
    optimizer = clipping({"rows": rows, "plain": plain}, max_gradient=1.0)
    total = optimizer.clip_grad_norm_().item()
    (of_rows,) = local_gradients(rows)  # torch's to_local() cannot
    assert of_rows.is_sparse
    assert plain.grad.is_coalesced()
    return total, of_rows.to_dense(), plain.grad.to_dense()


def test_sparse_gradients():
    dense = torch.zeros(8, 2)
    dense[1], dense[3] = torch.tensor([4.0, 6.0]), torch.tensor([5.0, 6.0])
    dense[4], dense[6] = torch.tensor([1.0, 2.0]), torch.tensor([8.0, 10.0])
    plain = torch.zeros(4, 2)
    plain[0] = torch.tensor([2.0, 2.0])
    norm = math.sqrt(float(dense.square().sum() + plain.square().sum()))
    results = run_ranks(2, clip_sparse)
    for rank, (total, rows, of_plain) in enumerate(results):
        assert total == pytest.approx(norm, rel=1e-12)
        torch.testing.assert_close(rows, dense.chunk(2)[rank] / (norm + 1e-6))
        torch.testing.assert_close(of_plain, plain / (norm + 1e-6))


# --- In training -----------------------------------------------------------------------------------------------------


def model():
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))


def train(net, clip, ranks=1, rank=0):
    optimizer = GradientClippingOptimizer(shardopt.keyed("adamw", net.named_parameters(), lr=0.05), clip, 0.02)
    norms = []
    for step in range(6):
        batch = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))

        def loss(batch=batch):
            optimizer.zero_grad()
            value = net(batch.chunk(ranks)[rank]).square().mean()
            value.backward()
            return value

        assert optimizer.step(loss).requires_grad
        norms.append(None if optimizer.total_norm is None else optimizer.total_norm.item())
    params = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in net.named_parameters()}
    return norms, {name: param.detach() for name, param in params.items()}


def train_fully_sharded(clip):
    net = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net[0], mesh=mesh)
    fully_shard(net, mesh=mesh)
    return train(net, clip, dist.get_world_size(), dist.get_rank())


@pytest.mark.parametrize("clip", GradientClipping)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_fully_sharded_model_trains_as_one_process_does(ranks, clip):
    norms, params = train(model(), clip)
    results = run_ranks(ranks, train_fully_sharded, clip)
    for its_norms, its_params in results:
        assert its_norms == results[0][0]
        if clip is GradientClipping.NORM:
            assert its_norms == pytest.approx(norms, rel=1e-5)
        for name, param in params.items():
            torch.testing.assert_close(its_params[name], param, rtol=2e-5, atol=2e-6)


def clip_after_adding_a_group():
    meshes = Meshes()
    params = make_job(LAYOUTS["rows"] | LAYOUTS["plain"], meshes)
    later = {name: params.pop(name) for name in ("b", "w")}
    optimizer = GradientClippingOptimizer(shardopt.keyed("sgd", params), GradientClipping.NORM, INF)
    before = optimizer.clip_grad_norm_().item()
    optimizer.add_param_group({"params": later})
    return before, optimizer.clip_grad_norm_().item()


def test_parameters_added_later_are_counted():
    cases = LAYOUTS["rows"] | LAYOUTS["plain"]
    full = {name: full_gradient(name, case) for name, case in cases.items()}
    first = one_process_norm([own for name, own in full.items() if name not in ("b", "w")], 2.0)
    for before, after in run_ranks(2, clip_after_adding_a_group):
        assert before == pytest.approx(first, abs=1e-12)
        assert after == pytest.approx(one_process_norm(full.values(), 2.0), rel=1e-12)


def clip_parts_apart():
    """Two clipped parts of one optimizer, one of them on another mesh, under a third clip."""
    meshes = Meshes()
    first = {"w": make_job({"w": Case((8, 4), on("line", Shard(0)))}, meshes)["w"]}
    second = make_job({"v": Case((6,), on("grid", Replicate(), Shard(0)))}, meshes)
    parts = [
        GradientClippingOptimizer(shardopt.keyed("sgd", own, lr=1.0), GradientClipping.NORM, 1.0)
        for own in (first, second)
    ]
    outer = GradientClippingOptimizer(CombinedOptimizer(parts), GradientClipping.NORM, 10.0)
    outer.step()
    return outer.total_norm.item(), [part.total_norm.item() for part in parts]


def test_nested_clips_measure_what_the_outer_one_left():
    full = [full_gradient("w", Case((8, 4), whole)), full_gradient("v", Case((6,), whole))]
    outer = one_process_norm(full, 2.0)
    assert outer > 10
    for total, parts in run_ranks(4, clip_parts_apart):
        assert total == pytest.approx(outer, rel=1e-12)
        assert parts == pytest.approx([one_process_norm([own], 2.0) * 10 / (outer + 1e-6) for own in full], rel=1e-6)


# --- What torchrec does otherwise ------------------------------------------------------------------------------------


def torchrecs_example(**arguments):
    mesh = init_device_mesh("cpu", (2,))
    weight = torch.nn.Parameter(distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)]))
    weight.grad = distribute_tensor(torch.full((8, 4), 50.0), mesh, [Shard(0)])
    optimizer = GradientClippingOptimizer(
        optimizer=shardopt.keyed("sgd", {"w": weight}, lr=1.0),
        clipping=GradientClipping.NORM,
        max_gradient=1.0,
        norm_type=2.0,
        **arguments,
    )
    optimizer.step()
    return weight.grad.full_tensor().norm().item()


@pytest.mark.parametrize("given", [{}, {"enable_global_grad_clip": True, "param_to_pgs": {}}])
def test_dtensors_are_clipped_without_being_told_process_groups(given):
    """There the norm stays 282.8 after clipping to 1."""
    assert run_ranks(2, torchrecs_example, **given) == pytest.approx([1.0, 1.0], rel=1e-5)


@pytest.mark.parametrize("layout", ["replicated", "hybrid"])
def test_replicas_count_once(layout):
    check_norms(4, [(layout, order) for order in (1.0, 2.0)])


def test_an_empty_shard_takes_part_in_the_inf_norm():
    """There the rank that holds nothing skips the all-reduce, and the others wait for it."""
    check_norms(4, [("empty shards", INF)])


def test_a_rank_that_dies_while_clipping_is_an_error_on_the_others():
    fault = Fault(rank=1, operation="shardopt.ranks:Ranks.all_reduce_sum")
    outcomes = run_ranks_outcomes(2, clip_three_times, faults=[fault])
    assert not outcomes[0].ok
    assert "Connection" in str(outcomes[0].error)
