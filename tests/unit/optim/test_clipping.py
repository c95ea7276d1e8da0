"""Clipping in one process: held against torch's own functions, and everything that needs no other rank."""

import copy
import math
import pickle

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import shardopt
from shardopt import GradientClipping, GradientClippingOptimizer, KeyedOptimizer
from shardopt.errors import GradientError, StateError
from shardopt.optim import CombinedOptimizer
from shardopt.optim.gradients.local_gradients import alike
from shardopt.optim.gradients.norms import _RUN, GradientNorm, JointNorm
from shardopt.ranks import Ranks
from tests.support.fake_rank import fake_rank, shard, sharded_tensor

INF = math.inf
ORDERS = [0.1, 0.5, 1.0, 2.0, 2.5, 3.0, INF]
SHAPES = [(4, 3), (5,), (), (0, 2), (2, 3, 4)]


def parameters(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    params = {f"p{i}": torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for i, shape in enumerate(SHAPES)}
    for param in params.values():
        param.grad = torch.randn(param.shape, generator=generator).to(dtype)
    return params


def clipping(params, clip=GradientClipping.NORM, max_gradient=0.1, **options):
    inner = KeyedOptimizer(params, {}, [{"params": list(params.values())}])
    return GradientClippingOptimizer(inner, clip, max_gradient, **options)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("max_gradient", [1e-30, 0.3, 1e9, INF])
def test_norm_clipping_does_what_torch_does(order, max_gradient):
    ours, theirs = parameters(), parameters()
    norm = clipping(ours, max_gradient=max_gradient, norm_type=order).clip_grad_norm_()
    filled = [param for param in theirs.values() if param.numel()]  # torch's cannot take the inf norm of nothing
    expected = torch.nn.utils.clip_grad_norm_(filled, max_gradient, order)
    torch.testing.assert_close(norm, expected, check_dtype=False)
    for name, param in theirs.items():
        torch.testing.assert_close(ours[name].grad, param.grad)


def test_tiny_norms_are_scaled_as_torchs():
    """1e-6 is added to the norm, so that nothing is divided by zero."""
    ours, theirs = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    ours.grad, theirs.grad = (torch.tensor([6e-7, 8e-7]) for _ in range(2))
    clipping({"w": ours}, max_gradient=1e-6).clip_grad_norm_()
    torch.nn.utils.clip_grad_norm_([theirs], 1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=0)


def test_gradients_below_the_limit_keep_every_bit():
    params = parameters()
    before = {name: param.grad.clone() for name, param in params.items()}
    optimizer = clipping(params, max_gradient=1e9)
    optimizer.clip_grad_norm_()
    assert all(torch.equal(params[name].grad, own) for name, own in before.items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_norm_is_taken_in_fp64(dtype):
    params = parameters(dtype)
    elements = torch.cat([param.grad.flatten() for param in params.values()])
    wide = elements.to(torch.complex128 if dtype.is_complex else torch.float64)
    norm = clipping(params).clip_grad_norm_()
    assert norm.dtype is torch.float64
    torch.testing.assert_close(norm, torch.linalg.vector_norm(wide), rtol=1e-14, atol=0)


def test_large_and_small_gradients_neither_overflow_nor_vanish():
    big = {"a": torch.nn.Parameter(torch.zeros(2)), "b": torch.nn.Parameter(torch.zeros(2))}
    big["a"].grad, big["b"].grad = torch.full((2,), 2e38), torch.full((2,), 1e-30)
    assert clipping(big).clip_grad_norm_().item() == pytest.approx(2e38 * math.sqrt(2), rel=1e-6)
    big["a"].grad.zero_()
    assert clipping(big).clip_grad_norm_().item() == pytest.approx(1e-30 * math.sqrt(2), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes_are_scaled_by_the_whole_factor(dtype):
    """A factor rounded to bf16 would leave the norm up to 0.4% above the limit."""
    params = {"w": torch.nn.Parameter(torch.zeros(4096, dtype=dtype))}
    generator = torch.Generator().manual_seed(3)
    for limit in (0.7371, 0.9177, 1.0233):
        params["w"].grad = torch.randn(4096, generator=generator).to(dtype)
        clipping(params, max_gradient=limit).clip_grad_norm_()
        assert params["w"].grad.double().norm().item() == pytest.approx(limit, rel=2e-4)


def test_value_clipping_does_what_torch_does():
    ours, theirs = parameters(), parameters()
    for params in (ours, theirs):
        params["p1"].grad[0] = math.nan
        params["p0"].grad = None
        params["p4"].grad[0, 0, 0], params["p4"].grad[0, 0, 1] = INF, -INF
    optimizer = clipping(ours, GradientClipping.VALUE, 0.5)
    optimizer._before_step()
    torch.nn.utils.clip_grad_value_(theirs.values(), 0.5)
    for name, param in theirs.items():
        torch.testing.assert_close(ours[name].grad, param.grad, rtol=0, atol=0, equal_nan=True)
    assert optimizer.total_norm is None


def test_without_clipping_gradients_are_not_touched():
    params = {"w": torch.nn.Parameter(torch.zeros(2))}
    params["w"].grad = torch.tensor([3e30, math.nan])
    optimizer = GradientClippingOptimizer(shardopt.keyed("sgd", params, lr=1.0))
    optimizer.step()
    assert params["w"].grad[0] == 3e30
    assert optimizer.total_norm is None


def sparse_embedding():
    embedding = torch.nn.Embedding(6, 2, sparse=True)
    embedding(torch.tensor([1, 1, 4])).mul(torch.tensor([[3.0, -4.0]])).sum().backward()
    return embedding.weight


@pytest.mark.parametrize("clip", [GradientClipping.NORM, GradientClipping.VALUE])
def test_sparse_gradients_are_clipped_and_stay_sparse(clip):
    weight = sparse_embedding()
    assert not weight.grad.is_coalesced()
    dense = weight.grad.to_dense()
    clipping({"w": weight}, clip, 5.0)._before_step()
    assert weight.grad.is_coalesced()
    expected = dense.clamp(-5, 5) if clip is GradientClipping.VALUE else dense * 5 / (dense.norm() + 1e-6)
    torch.testing.assert_close(weight.grad.to_dense(), expected)


def test_gradients_of_the_closure_are_clipped_and_its_loss_returned():
    """torchrec's clips what was there before the closure ran."""
    weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    optimizer = GradientClippingOptimizer(shardopt.keyed("sgd", {"w": weight}, lr=1.0), GradientClipping.NORM, 1.0)
    calls = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = (weight * torch.tensor([300.0, 400.0])).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 700.0
    assert calls == [1]
    assert optimizer.total_norm.item() == 500.0
    torch.testing.assert_close(weight.detach(), torch.tensor([0.4, 0.2]))


def test_no_gradient_at_all():
    params = {"w": torch.nn.Parameter(torch.ones(3))}
    for order in ORDERS:
        assert clipping(params, norm_type=order).clip_grad_norm_().item() == 0.0


@pytest.mark.parametrize("value", [math.nan, INF])
def test_nonfinite_norm_is_an_error_where_asked_for(value):
    params = parameters()
    params["p1"].grad[2] = value
    before = {name: param.grad.clone() for name, param in params.items()}
    with pytest.raises(GradientError, match="not clipped") as caught:
        clipping(params, error_if_nonfinite=True).step()
    assert [problem.key for problem in caught.value.problems] == ["p1.grad"]
    for name, own in before.items():
        torch.testing.assert_close(params[name].grad, own, rtol=0, atol=0, equal_nan=True)
    theirs = [torch.nn.Parameter(torch.zeros_like(own)) for own in before.values()]
    for param, own in zip(theirs, before.values(), strict=True):
        param.grad = own.clone()
    clipping(params).clip_grad_norm_()  # not asked for: as torch, zero or NaN
    torch.nn.utils.clip_grad_norm_([param for param in theirs if param.numel()], 0.1)
    for param, ours in zip(theirs, params.values(), strict=True):
        torch.testing.assert_close(ours.grad, param.grad, equal_nan=True)


def test_the_documented_arguments_of_torchrec():
    inner = shardopt.keyed("sgd", {"w": torch.nn.Parameter(torch.ones(1))})
    optimizer = GradientClippingOptimizer(
        optimizer=inner,
        clipping=GradientClipping.NORM,
        max_gradient=0.1,
        norm_type="inf",
        enable_global_grad_clip=True,
        param_to_pgs={},
    )
    assert optimizer._norm.order == INF
    assert [clip.value for clip in GradientClipping] == ["norm", "value", "none"]
    in_order = GradientClippingOptimizer(inner, GradientClipping.NORM, 0.1, 2.0, False, None)
    assert in_order._norm.order == 2.0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_gradient": -1.0}, "max_gradient"),
        ({"max_gradient": math.nan}, "max_gradient"),
        ({"max_gradient": "1.0"}, "max_gradient"),
        ({"clip": "nrom"}, "clipping"),
        ({"clip": None}, "clipping"),
        ({"norm_type": 0.0}, "norm_type"),
        ({"norm_type": "two"}, "norm_type"),
        ({"norm_type": -INF}, "norm_type"),
        ({"norm_type": math.nan}, "norm_type"),
    ],
)
def test_arguments_out_of_range_are_refused(options, named):
    with pytest.raises(StateError) as caught:
        clipping(parameters(), **options)
    assert [problem.key for problem in caught.value.problems] == [named]


def test_a_limit_without_a_way_to_clip_is_refused():
    """torchrec's default is not to clip, so that a limit alone would do nothing."""
    params = parameters()
    inner = KeyedOptimizer(params, {}, [{"params": list(params.values())}])
    for limit in (1e-6, 0.1, torch.tensor(1.0)):
        with pytest.raises(StateError, match=r"max_gradient: found .* without clipping") as caught:
            GradientClippingOptimizer(inner, max_gradient=limit)
        assert [problem.key for problem in caught.value.problems] == ["max_gradient"]
    before = [param.grad.clone() for param in params.values()]
    for optimizer in (
        GradientClippingOptimizer(inner),
        GradientClippingOptimizer(inner, GradientClipping.NONE, 1e-6),  # turned off
        GradientClippingOptimizer(inner, clipping=GradientClipping.NONE, max_gradient=1e-6),
    ):
        optimizer._before_step()
        assert all(torch.equal(param.grad, old) for param, old in zip(params.values(), before, strict=True))
    optimizer = GradientClippingOptimizer(inner, GradientClipping.VALUE)  # at torchrec's 0.1
    optimizer._before_step()
    assert max(param.grad.abs().max().item() for param in params.values() if param.numel()) == pytest.approx(0.1)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_clips_its_own_parameters(copied):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = GradientClippingOptimizer(shardopt.keyed("sgd", {"w": weight}), GradientClipping.NORM, 1.0)
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer.clip_grad_norm_()
    other = copied(optimizer)
    other.params["w"].grad = torch.tensor([6.0, 8.0])
    assert other.clip_grad_norm_().item() == 10.0
    assert optimizer.total_norm.item() == 5.0
    assert weight.grad.norm().item() == pytest.approx(1.0)


def test_what_is_kept_follows_the_gradients():
    """Shapes, presence and dtype of gradients may change from step to step, and parameters may be added."""
    params = parameters()
    optimizer = clipping(params, max_gradient=INF)
    for step in range(4):
        for number, param in enumerate(params.values()):
            param.grad = None if number % 3 == step else torch.full_like(param, step + 1.0)
        elements = sum(param.grad.numel() for param in params.values() if param.grad is not None)
        assert optimizer.clip_grad_norm_().item() == pytest.approx((step + 1) * math.sqrt(elements))
    optimizer.add_param_group({"params": {"new": torch.nn.Parameter(torch.zeros(1))}})
    optimizer.params["new"].grad = torch.tensor([1e6])
    assert optimizer.clip_grad_norm_().item() == pytest.approx(1e6)


def test_a_model_moved_to_another_dtype_is_still_clipped():
    module = torch.nn.Linear(3, 2)
    optimizer = clipping(dict(module.named_parameters()), max_gradient=1.0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        module.to(dtype)
        for param in module.parameters():
            param.grad = torch.full_like(param, 2.0)
        assert optimizer.clip_grad_norm_().item() == pytest.approx(2 * math.sqrt(8))
        assert module.bias.grad[0].item() == pytest.approx(1 / math.sqrt(8), rel=1e-2)


def test_tied_parameters_count_once():
    weight = torch.nn.Parameter(torch.zeros(4))
    weight.grad = torch.ones(4)
    inner = KeyedOptimizer({"embed": weight, "head": weight}, {}, [{"params": [weight]}])
    assert GradientClippingOptimizer(inner, GradientClipping.NORM).clip_grad_norm_().item() == 2.0


def test_clip_of_combined_of_clip_keeps_its_state():
    """There it is empty."""
    weight = torch.nn.Parameter(torch.ones(2))

    def build():
        part = GradientClippingOptimizer(shardopt.keyed("adam", {"w": weight}), GradientClipping.VALUE, 0.5)
        return GradientClippingOptimizer(CombinedOptimizer([("part", part)]), GradientClipping.NORM, 1.0)

    optimizer = build()
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["state"]["part.w"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    other = build()
    other.init_state()
    other.load_state_dict(saved)
    assert torch.equal(other.state_dict()["state"]["part.w"]["exp_avg"], saved["state"]["part.w"]["exp_avg"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("order", [0.5, 2.0, INF])
def test_joint_norm_of_tensors_of_any_size(dtype, order):
    generator = torch.Generator().manual_seed(1)
    sizes = [3, _RUN - 1, 1, _RUN, _RUN + 1, 7, 2 * _RUN + 5]
    norm = JointNorm()
    for order_of in (sizes, sizes[::-1], [2, 3]):  # what is kept of one call must not leak into the next
        tensors = [torch.randn(size, generator=generator).to(dtype) for size in order_of]
        tensors.append(torch.randn(40, 30, generator=generator).to(dtype).t())
        wide = torch.cat([tensor.flatten() for tensor in tensors]).to(
            torch.complex128 if dtype.is_complex else torch.float64
        )
        actual = norm(alike(tensors), order, torch.device("cpu"))
        torch.testing.assert_close(actual, torch.linalg.vector_norm(wide, order), rtol=1e-12, atol=0)


# --- One rank of several, as it sees itself --------------------------------------------------------------------------


class Alone(Ranks):
    """Ranks that nobody answers: each exchange finds that all have what this one has."""

    def __init__(self, rank, size):
        super().__init__(None)
        self.rank, self.size, self.members = rank, size, tuple(range(size))
        self.sent = []

    def agree(self, what, work, report=lambda result: None, decide=lambda reports: None):
        result = work()
        return result, decide([report(result)] * self.size)

    def all_reduce_sum(self, numbers):
        self.sent.append(numbers.clone())
        return numbers


def counted_by_each_rank(monkeypatch, make, ranks, shape=None):
    """The buffer that each rank would send, for parameters that `make(mesh, rank)` makes with gradients."""
    sent = []
    for rank in range(ranks):
        with fake_rank(rank, ranks, shape) as mesh:
            alone = Alone(rank, ranks)
            monkeypatch.setattr("shardopt.ranks.groups.ranks_of", lambda *args, alone=alone: alone)
            params = make(mesh, rank)
            GradientNorm(1.0).measure(list(params.values()), lambda params=params: {p: n for n, p in params.items()})
            sent += alone.sent
    return torch.stack(sent)


def with_gradient(gradient):
    param = torch.nn.Parameter(torch.zeros_like(gradient))
    param.grad = gradient
    return param


def test_each_rank_counts_its_own_shard_and_the_first_a_replica(monkeypatch):
    full = torch.arange(1.0, 8.0).view(7, 1)

    def make(mesh, rank):
        return {
            "rows": with_gradient(shard(full, mesh, Replicate(), Shard(0))),
            "table": with_shards(sharded_tensor(full, [(3, 2), (4, 0)], rank)),
        }

    sent = counted_by_each_rank(monkeypatch, make, 4, (2, 2))
    rows = [1 + 2 + 3 + 4, 5 + 6 + 7, 0, 0]
    table = [4 + 5 + 6 + 7, 0, 1 + 2 + 3, 0]
    assert sent.tolist() == [[float(rows[r] + table[r]) if r == at else 0.0 for at in range(4)] for r in range(4)]


def with_shards(table):
    for local in table.local_shards():
        local.tensor.grad = local.tensor.clone()
    return table


def test_a_parameter_that_all_have_whole_is_told_by_the_first_and_by_the_others(monkeypatch):
    def make(mesh, rank):
        return {"w": with_gradient(torch.full((3,), 2.0)), "r": with_gradient(shard(torch.ones(2), mesh, Replicate()))}

    sent = counted_by_each_rank(monkeypatch, make, 3)
    assert sent[:, :3].eq(0).all()  # nothing that is theirs alone
    of_first, of_first_count, of_others, of_others_count = sent[:, 3:].view(3, 4, 2).unbind(1)
    assert of_first.tolist() == [[2.0, 6.0], [0.0, 0.0], [0.0, 0.0]]  # by name: r, w
    assert of_first_count.tolist() == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]
    assert of_others.tolist() == [[0.0, 0.0], [2.0, 6.0], [2.0, 6.0]]
    assert of_others_count.tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("clip", list(GradientClipping))
def test_the_norm_is_tracked_without_being_clipped(clip):
    params = parameters()
    wanted = torch.linalg.vector_norm(torch.cat([param.grad.flatten() for param in params.values()]).double())
    made = clipping(params, clip, track_grad_norm=True)
    untracked = clipping(parameters(), clip)
    assert made.last_total_grad_norm is None
    norm, gradients = made.compute_total_grad_norm()
    assert made.last_total_grad_norm is None and len(gradients) == sum(param.numel() > 0 for param in params.values())
    before = {name: param.grad.clone() for name, param in params.items()}
    for each in (made, untracked):
        each._before_step()
    torch.testing.assert_close(made.total_norm, wanted)
    torch.testing.assert_close(made.last_total_grad_norm, wanted.float())
    torch.testing.assert_close(norm, wanted.float())
    assert (untracked.last_total_grad_norm is None) == (clip is not GradientClipping.NORM)
    same = all(torch.equal(param.grad, before[name]) for name, param in params.items())
    assert same == (clip is GradientClipping.NONE)


def test_a_norm_that_backward_has_used_up_cannot_be_tracked():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = shardopt.in_backward({"w": weight}, "sgd", lr=0.1)
    with pytest.raises(StateError, match="cannot be clipped"):
        GradientClippingOptimizer(optimizer, track_grad_norm=True)
    optimizer.stop()
