"""RowWiseAdagrad and RowWiseAdam in one process: the maths, dtypes, memory, refusals; on ranks see test_sparse.py."""

import copy
from math import prod

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.utils._python_dispatch import TorchDispatchMode

import shardopt
from shardopt.algorithms.row_wise import row_rules
from shardopt.errors import AlgorithmError, GradientError
from shardopt.optim import RowWiseAdagrad, RowWiseAdam
from shardopt.sharding.view import assemble, local_tensors, view_of
from tests.support.fake_rank import fake_rank, shard

BOTH = [RowWiseAdagrad, RowWiseAdam]
MOMENTS = {RowWiseAdagrad: "sum", RowWiseAdam: "exp_avg_sq"}
STEPS = 5


def gradients(shape, step, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(step)).to(dtype)


def sparse(rows, values, shape):
    return torch.sparse_coo_tensor(torch.tensor(rows)[None], values, shape, check_invariants=True)


def trained(make, shape, given, dtype=torch.float32, steps=STEPS):
    """A parameter after some steps, and its optimizer; `given` makes the gradient of a step."""
    parameter = torch.nn.Parameter(gradients(shape, 99, dtype))
    optimizer = make([parameter])
    for step in range(steps):
        parameter.grad = given(step)
        optimizer.step()
    return parameter, optimizer


def reference(cls, rows, given, lr=0.1, lr_decay=0.0, eps=1e-8, betas=(0.9, 0.99), initial=0.0, decay=0.0, sign=1.0):
    """Row by row, in fp64 Python numbers, as the equations stand."""
    rows = [[float(x) for x in row.flatten()] for row in rows]
    moments, averages = [initial] * len(rows), [[0.0] * len(row) for row in rows]
    for t, gradient in enumerate(given, 1):
        for i, row in enumerate(rows):
            g = [sign * float(x) + decay * w for x, w in zip(gradient[i].flatten(), row, strict=True)]
            square = sum(x * x for x in g) / len(g)
            if cls is RowWiseAdagrad:
                moments[i] += square
                rows[i] = [
                    w - lr / (1 + (t - 1) * lr_decay) * x / (moments[i] ** 0.5 + eps)
                    for w, x in zip(row, g, strict=True)
                ]
            else:
                moments[i] = betas[1] * moments[i] + (1 - betas[1]) * square
                averages[i] = [betas[0] * m + (1 - betas[0]) * x for m, x in zip(averages[i], g, strict=True)]
                root = (moments[i] / (1 - betas[1] ** t)) ** 0.5 + eps
                rows[i] = [w - lr / (1 - betas[0] ** t) * m / root for w, m in zip(row, averages[i], strict=True)]
    return rows, moments


@pytest.mark.parametrize("shape", [(6, 4), (5,), (3, 2, 5), (1, 7), (4, 1)], ids=str)
@pytest.mark.parametrize(
    ("cls", "options", "reported"),
    [
        (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-8}, {}),
        (
            RowWiseAdagrad,
            {"lr": torch.tensor(0.1), "eps": 1e-3, "lr_decay": 0.5, "initial_accumulator_value": 0.3},
            {"eps": 1e-3, "lr_decay": 0.5, "initial": 0.3},
        ),
        (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.2, "maximize": True}, {"decay": 0.2, "sign": -1}),
        (RowWiseAdam, {"lr": 0.1, "betas": (0.9, 0.99)}, {}),
        (
            RowWiseAdam,
            {"lr": 0.1, "betas": (0.0, 0.5), "weight_decay": 0.2, "maximize": True},
            {"betas": (0.0, 0.5), "decay": 0.2, "sign": -1},
        ),
    ],
    ids=["adagrad", "adagrad-options", "adagrad-upward", "adam", "adam-upward"],
)
def test_it_is_what_the_equations_say(cls, options, reported, shape):
    parameter, optimizer = trained(
        lambda params: cls(params, **options), shape, lambda step: gradients(shape, step, torch.float64), torch.float64
    )
    start = gradients(shape, 99, torch.float64)
    rows, moments = reference(cls, start, [gradients(shape, step, torch.float64) for step in range(STEPS)], **reported)
    state = optimizer.state[parameter]
    torch.testing.assert_close(parameter.detach(), torch.tensor(rows).double().view(shape), rtol=1e-6, atol=1e-6)
    assert state[MOMENTS[cls]].shape == (shape[0], *[1] * (len(shape) - 1))
    torch.testing.assert_close(state[MOMENTS[cls]].flatten(), torch.tensor(moments).double(), rtol=1e-6, atol=1e-9)
    assert state["step"] == STEPS


@pytest.mark.parametrize(
    ("cls", "torchs"),
    [(RowWiseAdagrad, torch.optim.Adagrad), (RowWiseAdam, torch.optim.Adam)],
    ids=lambda c: c.__name__,
)
def test_rows_of_one_element_are_moved_as_by_torchs_algorithm(cls, torchs):
    ours, _ = trained(lambda params: cls(params, lr=0.1), (50,), lambda step: gradients((50,), step))
    theirs, _ = trained(lambda params: torchs(params, lr=0.1), (50,), lambda step: gradients((50,), step))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("elements", [7, 64, 10**6])
def test_sparse_is_dense_on_the_rows_it_has_and_touches_no_others(cls, elements, monkeypatch):
    """Bit for bit, however many rows are worked on at once. Rows come unordered and twice."""
    monkeypatch.setattr(row_rules, "CHUNK_ELEMENTS", elements)
    shape = (12, 5)
    rows = [7, 2, 9, 2]

    def given(step):
        return sparse(rows, gradients((4, 5), step), shape)

    few, own = trained(lambda params: cls(params, lr=0.1), shape, given)
    monkeypatch.setattr(row_rules, "CHUNK_ELEMENTS", 10**6)
    all_rows, other = trained(lambda params: cls(params, lr=0.1), shape, lambda step: given(step).to_dense())
    elements_of, same = trained(
        lambda params: cls(params, lr=0.1), shape, lambda step: given(step).to_dense().to_sparse()
    )
    assert torch.equal(few, all_rows) and torch.equal(few, elements_of)
    for name, value in own.state[few].items():
        assert torch.equal(value, other.state[all_rows][name]), name
        assert torch.equal(value, same.state[elements_of][name]), name
    touched = torch.zeros(12, dtype=torch.bool)
    touched[rows] = True
    assert torch.equal(few[~touched], gradients(shape, 99)[~touched])
    assert not torch.isclose(few[touched], gradients(shape, 99)[touched]).any()


def test_moments_of_adam_decay_only_where_there_is_a_gradient():
    parameter, optimizer = trained(RowWiseAdam, (4, 3), lambda step: gradients((4, 3), step), steps=2)
    before = {name: value.clone() for name, value in optimizer.state[parameter].items()}
    was = parameter.detach().clone()
    parameter.grad = sparse([1], torch.zeros(1, 3), (4, 3))
    optimizer.step()
    for name in ("exp_avg", "exp_avg_sq"):
        assert (optimizer.state[parameter][name] != before[name]).any(1).tolist() == [False, True, False, False]
    assert (parameter.detach() != was).any(1).tolist() == [False, True, False, False]


class LargestOutput(TorchDispatchMode):
    """The largest tensor that an operation made new."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor) and not t.is_sparse}
        if isinstance(made, torch.Tensor) and not made.is_sparse and made.untyped_storage().data_ptr() not in known:
            self.bytes = max(self.bytes, made.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cls", BOTH)
def test_no_step_makes_a_tensor_of_the_size_of_the_table(cls, dtype, monkeypatch):
    monkeypatch.setattr(row_rules, "CHUNK_ELEMENTS", 256)
    shape = (1000, 16)
    parameter, optimizer = trained(cls, shape, lambda step: gradients(shape, step, dtype), dtype, steps=1)
    with LargestOutput() as dense:
        parameter.grad = gradients((1, 16), 0, dtype).expand(shape)
        optimizer.step()
    parameter.grad = sparse([900, 3], gradients((2, 16), 0, dtype), shape)
    with LargestOutput() as few:
        optimizer.step()
    assert 0 < dense.bytes <= 256 * 4
    assert 0 < few.bytes <= 2 * 16 * 4


@pytest.mark.parametrize("cls", BOTH)
def test_moments_are_fp32_whatever_the_table_is(cls, tmp_path):
    def given(step):
        return gradients((8, 4), step, torch.bfloat16)

    parameter, optimizer = trained(cls, (8, 4), given, torch.bfloat16)
    exact, other = trained(cls, (8, 4), lambda step: given(step).float())
    name = MOMENTS[cls]
    moments = optimizer.state[parameter][name]
    assert (moments.dtype, moments.nbytes) == (torch.float32, 8 * 4)
    assert torch.equal(moments, other.state[exact][name])
    if cls is RowWiseAdam:
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.bfloat16

    loaded = cls([torch.nn.Parameter(torch.zeros(8, 4, dtype=torch.bfloat16))])
    loaded.load_state_dict(optimizer.state_dict())  # torch's own, which casts all other state
    (state,) = loaded.state.values()
    assert state[name].dtype == torch.float32 and torch.equal(state[name], moments)
    saved = optimizer.state_dict()
    saved["state"][0] = {**saved["state"][0], name: moments.bfloat16()}  # as torchrec's class has them
    loaded.load_state_dict(saved)
    (state,) = loaded.state.values()
    assert state[name].dtype == torch.float32 and torch.equal(state[name], moments.bfloat16().float())

    keyed = [shardopt.keyed(cls, {"w": torch.nn.Parameter(parameter.detach().clone())}) for _ in range(2)]
    for each in keyed:
        each.init_state()
        assert each.state_dict()["state"]["w"][name].dtype == torch.float32
    keyed[0].params["w"].grad = given(7)
    keyed[0].step()
    keyed[1].load_state_dict(keyed[0].state_dict())
    assert torch.equal(*(each.state_dict()["state"]["w"][name] for each in keyed))


@pytest.mark.parametrize("name", ["rowwiseadagrad", "rowwiseadam", "sparseadam"])
def test_making_state_early_is_not_noticed(name):
    runs = []
    for early in (None, 0, 2):
        params = {key: torch.nn.Parameter(gradients((6, 3), 99)) for key in ("a", "b")}
        optimizer = shardopt.keyed(name, params, lr=0.1)
        for step in range(4):
            if step == early:
                optimizer.init_state()
            params["a"].grad = sparse([step, 2], gradients((2, 3), step), (6, 3))
            params["b"].grad = None if step < 2 else sparse([1], gradients((1, 3), step), (6, 3))
            optimizer.step()
        runs.append((optimizer.state_dict()["state"], params))
    (wanted, params), *others = runs
    for state, actual in others:
        for key, entries in wanted.items():
            assert torch.equal(params[key], actual[key])
            assert list(entries) == list(state[key])
            for entry, value in entries.items():
                assert value == state[key][entry] if isinstance(value, int) else torch.equal(value, state[key][entry])


def test_the_optimizers_work_on_sharded_parameters_by_themselves():
    """As any torch optimizer, without names; closures, copies and groups as torch's."""
    with fake_rank(1, 2) as mesh:
        full = gradients((6, 4), 99)
        for cls in BOTH:
            sharded, plain = torch.nn.Parameter(shard(full, mesh, Shard(0))), torch.nn.Parameter(full.clone())
            optimizer, alone = cls([sharded], lr=0.1), cls([plain], lr=0.1)
            for step in range(3):
                whole = gradients((6, 4), step)
                sharded.grad, plain.grad = shard(whole, mesh, Shard(0)), whole
                assert optimizer.step(lambda: 3.0) == 3.0
                alone.step()
            assert torch.equal(local_tensors(sharded)[0], plain[3:])
            moments = optimizer.state[sharded][MOMENTS[cls]]
            assert moments.placements == (Shard(0),) and moments.shape == (6, 1)
            assert torch.equal(local_tensors(moments)[0], alone.state[plain][MOMENTS[cls]][3:])
        again = copy.deepcopy(alone)
        assert again.param_groups[0]["lr"] == 0.1 and repr(again) == repr(alone)


def test_local_shards_of_whole_rows_are_moved_and_narrower_ones_refused():
    with fake_rank(0, 2) as mesh:
        full = gradients((8, 4), 99)

        def table(parts, offsets):
            wrapper = LocalShardsWrapper([part.clone().requires_grad_() for part in parts], offsets)
            wrapped = DTensor.from_local(
                wrapper, mesh, [Shard(0)], run_check=False, shape=torch.Size((8, 4)), stride=(4, 1)
            )
            return wrapped, local_tensors(wrapped)

        whole, shards = table([full[:2], full[5:6]], [(0, 0), (5, 0)])
        for cls in BOTH:
            optimizer = shardopt.keyed(cls, {"t": whole}, lr=0.1)
            plain = torch.nn.Parameter(torch.cat([part.detach() for part in shards]))
            alone = cls([plain], lr=0.1)
            for step in range(3):
                values = gradients((3, 4), step)
                shards[0].grad, shards[1].grad = sparse([0, 1], values[:2], (2, 4)), sparse([0], values[2:], (1, 4))
                plain.grad = values
                optimizer.step()
                alone.step()
            assert torch.equal(torch.cat([part.detach() for part in shards]), plain)
            moments = optimizer.state_dict()["state"]["t"][MOMENTS[cls]]
            assert [(p.box.offsets, p.box.sizes) for p in view_of(moments).pieces] == [
                ((0, 0), (2, 1)),
                ((5, 0), (1, 1)),
            ]
            assert torch.equal(torch.cat(local_tensors(moments)), alone.state[plain][MOMENTS[cls]])

        narrow, _ = table([full[:, :2]], [(0, 0)])
        with pytest.raises(AlgorithmError, match="t: found shards that do not say who has the rest of their rows"):
            shardopt.keyed("rowwiseadam", {"t": narrow})


@pytest.mark.parametrize("cls", BOTH)
def test_what_cannot_be_stepped_is_refused_before_anything_has_changed(cls):
    with pytest.raises(AlgorithmError, match="bias: found no dimensions, and so no rows"):
        shardopt.keyed(cls, {"bias": torch.nn.Parameter(torch.zeros(()))})
    wave = torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.complex64))
    with pytest.raises(AlgorithmError, match=r"wave: found elements of torch\.complex64"):
        shardopt.keyed(cls, {"wave": wave})
    wave.grad = torch.zeros_like(wave)
    with pytest.raises(AlgorithmError, match=r"a parameter of shape \(3, 2\): found elements of torch.complex64"):
        cls([wave]).step()

    first, table = (torch.nn.Parameter(torch.ones(4, 2)) for _ in range(2))
    optimizer = shardopt.keyed(cls, {"first": first, "table": table}, weight_decay=0.1)
    first.grad, table.grad = torch.ones(4, 2), sparse([1], torch.ones(1, 2), (4, 2))
    with pytest.raises(GradientError, match=r"table\.grad: found a sparse gradient .* weight_decay=0\.1"):
        optimizer.step()
    assert (first == 1).all() and not optimizer.state_dict()["state"]


@pytest.mark.parametrize(
    ("cls", "options"),
    [(cls, {name: -1.0}) for cls in BOTH for name in ("lr", "weight_decay", "eps")]
    + [(RowWiseAdagrad, {"lr_decay": -1.0}), (RowWiseAdagrad, {"initial_accumulator_value": -1.0})]
    + [
        (RowWiseAdam, {"betas": (1.0, 0.9)}),
        (RowWiseAdam, {"betas": (0.9, -0.1)}),
        (RowWiseAdam, {"lr": float("nan")}),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(cls, options):
    (name,) = options
    with pytest.raises(ValueError, match=name):
        cls([torch.zeros(2, 2)], **options)


def test_copies_on_a_mesh_have_copies_of_the_moments():
    with fake_rank(1, 4, (2, 2)) as mesh:
        parameter = torch.nn.Parameter(shard(torch.ones(5, 3), mesh, Replicate(), Shard(0)))
        optimizer = shardopt.keyed("rowwiseadagrad", {"w": parameter})
        optimizer.init_state()
        moments = optimizer.state_dict()["state"]["w"]["sum"]
        assert moments.placements == (Replicate(), Shard(0)) and prod(moments.shape) == 5


@pytest.mark.parametrize("name", ["rowwiseadagrad", "rowwiseadam", "sparseadam"])
def test_a_resumed_run_is_the_uninterrupted_one(name):
    """Of a DTensor and a plain table, loaded into fresh ones and into a copy, with a rate that a schedule changes."""

    def train(optimizer, steps):
        for step in steps:
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            for number, parameter in enumerate(optimizer.params.values()):
                local = local_tensors(parameter)[0].shape
                given = sparse([step % 3, 1], gradients((2, 4), 10 * step + number), local)
                parameter.grad = assemble(parameter, [given])
            optimizer.step()

    with fake_rank(1, 2) as mesh:

        def make(seed):
            full = gradients((6, 4), seed)
            params = {"d": torch.nn.Parameter(shard(full, mesh, Shard(0))), "plain": torch.nn.Parameter(full.clone())}
            return shardopt.keyed(name, params, betas=(0.8, 0.9)) if "adam" in name else shardopt.keyed(name, params)

        whole, half = make(99), make(99)
        train(whole, range(6))
        train(half, range(3))
        copied, fresh = copy.deepcopy(half), make(98)
        fresh.init_state()
        fresh.load_state_dict(half.state_dict())
        for mine, theirs in zip(fresh.params.values(), half.params.values(), strict=True):
            local_tensors(mine)[0].detach().copy_(local_tensors(theirs)[0].detach())
        for resumed in (copied, fresh):
            train(resumed, range(3, 6))
            for key, parameter in whole.params.items():
                assert torch.equal(local_tensors(parameter)[0], local_tensors(resumed.params[key])[0])
                for entry, value in whole.state[parameter].items():
                    actual = resumed.state[resumed.params[key]][entry]
                    same = value == actual if isinstance(value, int) else torch.equal(*map(_local, (value, actual)))
                    assert same, (key, entry)


def _local(tensor):
    return local_tensors(tensor)[0]
