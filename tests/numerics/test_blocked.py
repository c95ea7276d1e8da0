"""SOAP and Shampoo in one process: beside their packages and the papers' equations, in float64."""

import copy
from itertools import product
from zlib import crc32

import pytest
import pytorch_optimizer
import torch

import shardopt
from shardopt.algorithms.blocked.blocks import assign, blocks_of, factor_shape
from shardopt.algorithms.blocked.factors import inverse_root
from shardopt.errors import AlgorithmError, GradientError, MismatchError

SHAPES = {"matrix": (6, 5), "tall": (9, 3), "vector": (7,), "cube": (4, 3, 5), "number": ()}
STEPS = 14


def tensors(seed, dtype=torch.float64, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in shapes.items()
    }


def parameters(dtype=torch.float64, shapes=SHAPES):
    return {name: torch.nn.Parameter(tensor) for name, tensor in tensors(0, dtype, shapes).items()}


def train(optimizer, params, first=0, last=STEPS):
    for step in range(first, last):
        gradients = tensors(1 + step, next(iter(params.values())).dtype, {n: tuple(p.shape) for n, p in params.items()})
        for name, parameter in params.items():
            parameter.grad = gradients[name]
        optimizer.step()


def assert_close(ours, theirs, atol=1e-10):
    for name, parameter in ours.items():
        assert (parameter.detach() - theirs[name].detach()).abs().max() <= atol, name


SOAP_OPTIONS = {
    "default": {},
    "often": {"precondition_frequency": 3, "lr": 0.05, "weight_decay": 0.1},
    "own beta": {"precondition_frequency": 2, "shampoo_beta": 0.8, "betas": (0.9, 0.99), "eps": 1e-6},
    "limited": {"precondition_frequency": 4, "max_precondition_dim": 5},
    "vectors": {"precondition_frequency": 3, "precondition_1d": True, "correct_bias": False},
}


class Wide:
    """torch, in which the package finds float64 where it asks for float32, in which it takes every QR."""

    def __getattr__(self, name):
        return torch.float64 if name == "float32" else getattr(torch, name)


@pytest.mark.parametrize("options", SOAP_OPTIONS.values(), ids=SOAP_OPTIONS)
def test_soap_is_the_packages(options, monkeypatch):
    monkeypatch.setattr(pytorch_optimizer.optimizer.soap, "torch", Wide())
    # The package has no numbers. A long vector's first moments have one eigenvalue many times, and so no one basis.
    shapes = {**{name: shape for name, shape in SHAPES.items() if shape}, "vector": (2,)}
    ours, theirs = parameters(shapes=shapes), parameters(shapes=shapes)
    optimizer = shardopt.keyed("soap", ours, stagger=False, **options)
    train(optimizer, ours)
    reference = pytorch_optimizer.SOAP(theirs.values(), **options)
    train(reference, theirs)
    assert_close(ours, theirs)
    for name, parameter in theirs.items():
        state, wanted = optimizer.state_dict()["state"][name], reference.state[parameter]
        assert (state["exp_avg"] - wanted["exp_avg"]).abs().max() <= 1e-10
        for dim, basis in enumerate(wanted["Q"]):
            if len(basis) == 0:
                assert f"Q_{dim}" not in state
                continue
            assert (state[f"GG_{dim}"][:, 0] - wanted["GG"][dim]).abs().max() <= 1e-10
            mine = state[f"Q_{dim}"][:, 0]
            signs = (mine * basis).sum(0).sign()
            assert (mine * signs - basis).abs().max() <= 1e-8


@pytest.mark.parametrize("graft", [None, "adam"])
@pytest.mark.parametrize("size", [99, 4])
@pytest.mark.parametrize("stagger", [False, True])
def test_shampoo_is_the_papers_equations(graft, size, stagger):
    options = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.1, "precondition_frequency": 3}
    ours = parameters()
    optimizer = shardopt.keyed(
        "shampoo", ours, **options, graft=graft, graft_beta=0.95, block_size=size, stagger=stagger
    )
    train(optimizer, ours)
    assert_close(ours, shampoo_by_hand(parameters(), graft, size, stagger, options))


def shampoo_by_hand(params, graft, size, stagger, options):
    """Each block by itself, each mode as a matrix; roots as powers of singular values."""
    (beta1, beta2), eps, lr, decay = options["betas"], options["eps"], options["lr"], options["weight_decay"]
    result = {}
    for name, parameter in params.items():
        weight = parameter.detach().clone()
        cuts = [range(0, extent, size) for extent in weight.shape]
        for number, corner in enumerate(product(*cuts)):
            at = tuple(slice(i, i + size) for i in corner)
            block = weight[at]
            order = block.ndim
            moments = [torch.zeros(extent, extent, dtype=torch.float64) for extent in block.shape]
            roots = [torch.zeros(0)] * order
            average, squares = torch.zeros_like(block), torch.zeros_like(block)
            for step in range(1, STEPS + 1):
                gradient = tensors(step)[name][at]
                turn = crc32(name.encode()) + number if stagger else 0
                average = beta1 * average + (1 - beta1) * gradient
                squares = 0.95 * squares + 0.05 * gradient**2
                moved = update = average / (1 - beta1**step)
                for dim in range(order):
                    flat = gradient.transpose(0, dim).reshape(block.shape[dim], -1)
                    moments[dim] = beta2 * moments[dim] + (1 - beta2) * flat @ flat.T
                    if step == 1 or (step + turn) % 3 == 0:
                        eye = torch.eye(block.shape[dim], dtype=torch.float64)
                        left, values, _ = torch.linalg.svd(moments[dim] / (1 - beta2**step) + eps * eye)
                        roots[dim] = left @ torch.diag(values ** (-1 / (2 * order))) @ left.T
                    flat = update.transpose(0, dim)
                    update = (roots[dim] @ flat.reshape(len(flat), -1)).reshape(flat.shape).transpose(0, dim)
                if graft:
                    adam = moved / ((squares / (1 - 0.95**step)).sqrt() + 1e-8)
                    update = update * (adam.norm() / update.norm())
                block.copy_(block * (1 - lr * decay) - lr * update)
        result[name] = weight
    return result


def test_shampoo_of_the_first_paper_is_the_packages():
    shapes = {name: SHAPES[name] for name in ("matrix", "tall", "vector")}
    ours, theirs = parameters(shapes=shapes), parameters(shapes=shapes)
    options = {"betas": (0.0, 1.0), "eps": 0.1, "graft": None, "precondition_frequency": 1, "lr": 0.1}
    optimizer = shardopt.keyed("shampoo", ours, **options)
    train(optimizer, ours)
    train(pytorch_optimizer.Shampoo(theirs.values(), lr=0.1, matrix_eps=0.1), theirs)
    assert_close(ours, theirs)
    assert "exp_avg" not in optimizer.state_dict()["state"]["matrix"]


@pytest.mark.parametrize("name", ["SOAP", "Shampoo"])
def test_staggered_refreshes_are_spread_over_the_steps(name):
    """Every block is refreshed once in so many steps, and not all in the same."""
    shapes = {f"layer{i}": (8, 4) for i in range(6)}
    params = parameters(shapes=shapes)
    optimizer = shardopt.keyed(name, params, precondition_frequency=4, block_size=4)
    entry = "Q_1" if name == "SOAP" else "root_1"
    refreshed = []
    train(optimizer, params, 0, 2)
    for step in range(2, 10):
        before = {key: optimizer.state[p][entry].clone() for key, p in params.items()}
        train(optimizer, params, step, step + 1)
        changed = {key: (optimizer.state[p][entry] != before[key]).any(2).any(0) for key, p in params.items()}
        refreshed.append(sum(int(each.sum()) for each in changed.values()))
    assert sum(refreshed[:4]) == sum(refreshed[4:]) == 12 and refreshed[:4] == refreshed[4:]
    assert max(refreshed) < 12


@pytest.mark.parametrize("name", ["SOAP", "Shampoo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_parameters_are_trained_in_fp32_and_resume_exactly(name, dtype):
    options = {"lr": 0.01, "precondition_frequency": 3, "block_size": 4}
    params = parameters(dtype)
    optimizer = shardopt.keyed(name, params, **options)
    train(optimizer, params, 0, 5)
    state = optimizer.state_dict()["state"]
    assert all(value.dtype == torch.float32 for entries in state.values() for value in entries.values())
    others = {key: torch.nn.Parameter(p.detach().clone()) for key, p in params.items()}
    resumed = shardopt.keyed(name, others, **options)
    resumed.init_state()
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copied = copy.deepcopy(optimizer)
    for each, of in ((optimizer, params), (resumed, others), (copied, dict(copied.params))):
        train(each, of, 5, 9)
    for key, parameter in params.items():
        assert torch.equal(parameter, others[key]) and torch.equal(parameter, copied.params[key])
    unblocked = shardopt.keyed(name, parameters(dtype), **{**options, "block_size": 99})
    unblocked.init_state()
    with pytest.raises(MismatchError, match=r"matrix"):
        unblocked.load_state_dict(optimizer.state_dict())
    other = shardopt.keyed("Shampoo" if name == "SOAP" else "SOAP", parameters(dtype))
    other.init_state()
    with pytest.raises(MismatchError, match=name):
        other.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("name", ["SOAP", "Shampoo"])
def test_a_state_dict_by_position_resumes_exactly(name):
    """torch's own, of the plain class; it casts state to the parameter's dtype."""
    made = shardopt.algorithms.spec_of(name).optimizer
    params = parameters(torch.bfloat16)
    optimizer = made(params.values(), lr=0.1, precondition_frequency=2)
    train(optimizer, params, 0, 3)
    others = {key: torch.nn.Parameter(p.detach().clone()) for key, p in params.items()}
    other = made(others.values())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, of in ((optimizer, params), (other, others)):
        train(each, of, 3, 5)
    assert all(torch.equal(parameter, others[key]) for key, parameter in params.items())


def test_blocks_and_their_owners():
    blocks = blocks_of((5, 3), 2)
    assert [block.box.offsets for block in blocks] == [(0, 0), (0, 2), (2, 0), (2, 2), (4, 0), (4, 2)]
    assert blocks[5].box.sizes == (1, 1)
    assert [block.factors[0].offsets for block in blocks] == [
        (0, 0, 0),
        (0, 1, 0),
        (2, 0, 0),
        (2, 1, 0),
        (4, 0, 0),
        (4, 1, 0),
    ]
    assert blocks[5].factors[0].sizes == (1, 1, 2) and factor_shape((5, 3), 2, 0) == (5, 2, 2)
    assert factor_shape((5, 3), 2, 1) == (3, 3, 2) and factor_shape((5, 3), None, 1) == (3, 1, 3)
    assert blocks_of((0, 3), 2) == () and len(blocks_of((), 2)) == 1
    loads = {2: 100}
    owners = assign({"a": [50, 10, 10], "b": [40]}, {"a": [0, 1], "b": [0, 1, 2]}, loads)
    assert owners == {"a": (0, 1, 0), "b": (1,)} or sum(loads.values()) == 210
    assert loads[2] == 100 and abs(loads[0] - loads[1]) <= 20


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["soap", "shampoo"])
def test_what_is_not_finite_goes_into_its_parameter_and_the_step_ends(name, bad):
    """An error would be the owner's alone, and the other ranks of the step would wait for it."""
    params = parameters(torch.float32, {"good": (4, 3), "spoilt": (4, 3)})
    optimizer = shardopt.keyed(name, params, lr=0.1, precondition_frequency=1)
    train(optimizer, params, 0, 2)
    for _ in range(2):
        params["spoilt"].grad[0, 0] = bad
        optimizer.step()
    assert params["good"].isfinite().all() and params["spoilt"].isnan().all()


def test_a_decomposition_that_fails_gives_nan(monkeypatch):
    def fail(matrix):
        raise torch.linalg.LinAlgError

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    assert inverse_root(torch.eye(3), 4, 0.0).isnan().all()


def test_inverse_roots():
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    root = inverse_root(half @ half.T, 4, 1e-3)
    power = torch.linalg.matrix_power(root, 4) @ (half @ half.T + 1e-3 * torch.eye(6, dtype=torch.float64))
    torch.testing.assert_close(power, torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-9)
    assert inverse_root(torch.zeros(2, 2), 2, 0.25).equal(2 * torch.eye(2))


@pytest.mark.parametrize("name", ["SOAP", "Shampoo"])
def test_what_it_refuses(name):
    for bad in ({"lr": -1.0}, {"precondition_frequency": 0}, {"block_size": 0}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match=f"{name}'s {next(iter(bad))}"):
            shardopt.keyed(name, parameters(), **bad)
    for unfit in (torch.zeros((1,) * 6), torch.zeros(2, dtype=torch.complex64)):
        with pytest.raises(AlgorithmError, match="w: found"):
            shardopt.keyed(name, {"w": torch.nn.Parameter(unfit)})
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = shardopt.keyed(name, {"w": weight})
    weight.grad = torch.ones(3, 2).to_sparse()
    with pytest.raises(GradientError, match=r"w\.grad"):
        optimizer.step()
    assert torch.equal(weight, torch.ones(3, 2)) and not optimizer.state_dict()["state"]
