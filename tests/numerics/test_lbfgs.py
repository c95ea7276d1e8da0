"""L-BFGS on plain parameters against torch's own, on convex problems, where rounding does not decide the way."""

import copy
import inspect

import pytest
import torch
from torch.optim.lbfgs import _strong_wolfe

import shardopt
from shardopt.algorithms import Kind, spec_of
from shardopt.algorithms.lbfgs.history import coefficients
from shardopt.algorithms.lbfgs.strong_wolfe import Trial, strong_wolfe
from shardopt.errors import AlgorithmError, GradientError, StateError
from shardopt.optim import KeyedOptimizerWrapper
from tests.support.cases import option_sets

STEPS = 3
SHAPES = {"matrix": (6, 4), "vector": (5,), "scalar": (), "cube": (2, 3, 4)}
MORE = [
    ("small history", {"history_size": 3, "line_search_fn": "strong_wolfe"}),
    ("small history, no search", {"history_size": 2, "lr": 0.2}),
    ("one place", {"history_size": 1, "lr": 0.2}),
    ("few evaluations", {"line_search_fn": "strong_wolfe", "max_eval": 4}),
    ("one iteration", {"max_iter": 1, "lr": 0.5}),
    ("long step", {"line_search_fn": "strong_wolfe", "lr": 30.0, "max_iter": 6}),
    ("tolerances", {"tolerance_change": 1e-3, "line_search_fn": "strong_wolfe"}),
]
CASES = [
    pytest.param(
        options,
        dtype,
        id=f"{desc}-{dtype}".replace(" ", "_"),
        # All options in fp64, whose later steps are compared most closely; each other dtype with some of them.
        marks=() if dtype == torch.float64 or number % 4 == of_dtype else pytest.mark.exhaustive,
    )
    for number, (desc, options) in enumerate([*option_sets("LBFGS"), *MORE])
    for of_dtype, dtype in enumerate((torch.float32, torch.float64, torch.complex64, torch.complex128))
    if not dtype.is_complex or "line_search_fn" in options
]


def values(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return {name: torch.randn(shape, dtype=wide, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def parameters(dtype):
    return {name: torch.nn.Parameter(value) for name, value in values(0, dtype).items()}


def evaluate(optimizer, params, absent=()):
    """A closure: convex in all parameters together. Those in `absent` get no gradient."""
    dtype = params["matrix"].dtype
    centre, weight = values(1, dtype), values(2, dtype)

    def closure():
        optimizer.zero_grad()
        coupled = sum((weight[name] * p).sum() for name, p in params.items()).abs().square() / 40
        own = sum(
            ((p - centre[name]).abs().square() * weight[name].abs()).sum()
            + (1 + (p - centre[name]).abs().square()).sqrt().sum()
            for name, p in params.items()
        )
        loss = coupled + own
        loss.backward()
        for name in absent:
            params[name].grad = None
        return loss

    return closure


def train(optimizer, params, steps=range(STEPS), before=lambda step: None):
    losses = []
    for step in steps:
        before(step)
        losses.append(optimizer.step(evaluate(optimizer, params, ["vector"] if step == 1 else ())).item())
    return losses


def difference(actual, wanted):
    assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape)
    return ((actual - wanted).abs().max() / wanted.abs().max()).item()


def numbers(optimizer):
    return optimizer.state_dict()["state"]["__global__"]


@pytest.mark.parametrize(("options", "dtype"), CASES)
def test_step_is_torchs(options, dtype):
    """The first step, of up to twenty iterations, is so in fp32.

    Near a minimum the loss has no digits left to search by: torch's own later steps are 1e-4 off from those in fp64.
    """
    wide = dtype in (torch.float64, torch.complex128)
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer = shardopt.keyed("lbfgs", ours, **options)
    torchs = torch.optim.LBFGS(theirs.values(), **options)
    for step in range(STEPS):
        losses = train(optimizer, ours, [step]) + train(torchs, theirs, [step])
        assert losses[0] == pytest.approx(losses[1], rel=1e-12 if wide else 1e-5)
        for name, parameter in ours.items():
            actual = difference(parameter.detach(), theirs[name].detach())
            assert actual <= (1e-9 if wide else 1e-5 if step == 0 else 1e-3), (step, name)
    if wide:
        state = torchs.state[theirs["matrix"]]
        assert numbers(optimizer)["n_iter"] == state["n_iter"]
        assert numbers(optimizer)["func_evals"] == state["func_evals"]
        assert numbers(optimizer)["pairs"] == len(state["old_dirs"])


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_maximize_goes_as_far_up_as_the_negative_loss_goes_down(dtype, search):
    """The same numbers, with another sign of what is reported."""
    up, down = parameters(dtype), parameters(dtype)
    options = {"lr": 0.3, "line_search_fn": search}
    upwards = shardopt.keyed("lbfgs", up, maximize=True, **options)
    downwards = shardopt.keyed("lbfgs", down, **options)
    for _ in range(STEPS):
        loss = upwards.step(negative(evaluate(upwards, up), up))
        assert loss == -downwards.step(evaluate(downwards, down))
        assert all(torch.equal(up[name], down[name]) for name in up)
    for key, states in downwards.state_dict()["state"].items():
        assert all(torch.equal(upwards.state_dict()["state"][key][name], value) for name, value in states.items()), key
    upwards.load_state_dict(upwards.state_dict())
    assert upwards.param_groups[0]["maximize"]
    has_it = "maximize" in inspect.signature(torch.optim.LBFGS).parameters  # as of torch 2.15
    assert ("maximize" in downwards.param_groups[0]) == has_it


def negative(closure, params):
    def negated():
        loss = closure()
        for parameter in params.values():
            parameter.grad = -parameter.grad
        return -loss

    return negated


@pytest.mark.parametrize("present", [True, False])
def test_no_slope_at_all_ends_a_step_as_in_torch(present):
    """Where the tolerance does not end it before: with gradients of zeros, and with none."""
    options = {"tolerance_grad": -1.0, "lr": 0.5}
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    optimizer = shardopt.keyed("lbfgs", ours, **options)
    torchs = torch.optim.LBFGS(theirs.values(), **options)
    for parameter in (*ours.values(), *theirs.values()):
        parameter.grad = torch.zeros_like(parameter) if present else None
    for _ in range(2):
        assert optimizer.step(lambda: torch.tensor(2.0)) == torchs.step(lambda: torch.tensor(2.0)) == 2
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_history_is_torchs():
    """Each pair, placed round and round: after five pairs in three places the oldest is in the third."""
    options = {"history_size": 3, "max_iter": 6, "lr": 0.2}
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    optimizer = shardopt.keyed("lbfgs", ours, **options)
    torchs = torch.optim.LBFGS(theirs.values(), **options)
    train(optimizer, ours, range(1))
    train(torchs, theirs, range(1))
    owned = torchs.state[theirs["matrix"]]
    assert (numbers(optimizer)["pairs"], numbers(optimizer)["next"]) == (3, 2)
    offset = 0
    for parameter in ours.values():
        state, count = optimizer.state[parameter], parameter.numel()
        for entry in ("old_dirs", "old_stps"):
            wanted = torch.stack([vector[offset : offset + count].view(parameter.shape) for vector in owned[entry]])
            torch.testing.assert_close(state[entry][[2, 0, 1]], wanted, rtol=1e-10, atol=1e-12)
        for entry in ("d", "prev_flat_grad"):
            wanted = owned[entry][offset : offset + count].view(parameter.shape)
            torch.testing.assert_close(state[entry], wanted, rtol=1e-10, atol=1e-12)
        offset += count
    torch.testing.assert_close(float(numbers(optimizer)["H_diag"]), float(owned["H_diag"]))
    torch.testing.assert_close(1 / numbers(optimizer)["s_dot_y"].diagonal()[[2, 0, 1]], torch.stack(owned["ro"]))
    assert numbers(optimizer)["t"] == owned["t"]


@pytest.mark.parametrize("pairs", [0, 1, 2, 7])
def test_the_direction_is_that_of_the_two_loops(pairs):
    generator = torch.Generator().manual_seed(pairs)
    s, y = torch.randn(2, 20, pairs, generator=generator, dtype=torch.float64)
    y = y + 3 * s  # so that s · y > 0
    g = torch.randn(20, generator=generator, dtype=torch.float64)
    gamma = 0.7
    a, b = coefficients(s.T @ y, y.T @ y, s.T @ g, y.T @ g, gamma)
    q, alphas = -g, {}
    for i in reversed(range(pairs)):
        alphas[i] = s[:, i] @ q / (s[:, i] @ y[:, i])
        q = q - alphas[i] * y[:, i]
    r = gamma * q
    for i in range(pairs):
        r = r + (alphas[i] - y[:, i] @ r / (s[:, i] @ y[:, i])) * s[:, i]
    torch.testing.assert_close(-gamma * g - gamma * (y @ a) + s @ b, r, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(60))
def test_the_search_is_torchs(seed):
    """Along lines through wild functions, with steps too short and too long and budgets too small."""
    generator = torch.Generator().manual_seed(seed)
    slopes = torch.randn(4, generator=generator, dtype=torch.float64)
    first = float(10 ** (3 * torch.rand((), generator=generator) - 1.5))
    most = int(torch.randint(0, 26, (), generator=generator))

    def line(t):
        t = torch.tensor(float(t), dtype=torch.float64, requires_grad=True)
        value = 0.05 * t**2 + sum(w * torch.sin(k * t + w) for k, w in enumerate(slopes.tolist(), 1))
        (slope,) = torch.autograd.grad(value, t)
        return float(value.detach()), slope.reshape(1)

    direction = -line(0.0)[1].sign()  # torch's along a vector of one element
    asked = {"ours": [], "torchs": []}

    def evaluate(t):
        asked["ours"].append(t)
        loss, gradient = line(t * float(direction))
        return Trial(t, loss, float(gradient * direction), [gradient], 0.0, 0.0)

    def objective(x, t, d):
        asked["torchs"].append(float(t))
        return line(float(t) * float(d))

    loss, gradient = line(0.0)
    start = Trial(0.0, loss, float(gradient * direction), [gradient], 0.0, 0.0)
    actual, count = strong_wolfe(evaluate, start, first, lambda steps: steps < 1e-9, most)
    its_loss, its_gradient, t, its_count = _strong_wolfe(
        objective, None, first, direction, loss, gradient, gradient.dot(direction), max_ls=most
    )
    assert asked["ours"] == pytest.approx(asked["torchs"], rel=1e-9)
    assert (actual.step, actual.loss, count) == (pytest.approx(float(t), rel=1e-9), pytest.approx(its_loss), its_count)
    assert torch.allclose(actual.gradient[0], its_gradient)


def test_the_search_gets_back_from_where_the_loss_is_no_number():
    def evaluate(t):
        loss = (t - 1) ** 2 if t < 3 else float("nan") if t < 6 else float("inf")
        return Trial(t, loss, 2 * (t - 1), [], 0.0, 0.0)

    for first in (4.0, 10.0):
        actual, count = strong_wolfe(evaluate, evaluate(0.0), first, lambda steps: steps < 1e-9, 25)
        assert 0 < actual.step < 2 and count < 10


@pytest.mark.parametrize("options", [{"line_search_fn": "strong_wolfe", "max_iter": 4}, {"lr": 0.2, "max_iter": 4}])
def test_init_state_makes_what_the_first_step_makes_and_is_invisible(options):
    runs = []
    for calls_at in ((), (0,), (0, 2)):
        params = parameters(torch.float32)
        optimizer = shardopt.keyed(torch.optim.LBFGS, params, **options)
        before = shapes(optimizer, calls_at)
        train(optimizer, params, before=lambda step, o=optimizer, at=calls_at: step in at and o.init_state())
        assert before in ({}, shapes(optimizer))
        runs.append([*(p.detach() for p in params.values()), *flat(optimizer)])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def flat(optimizer):
    return [value for owned in optimizer.state_dict()["state"].values() for value in owned.values()]


def shapes(optimizer, make=(0,)):
    if make:
        optimizer.init_state()
    state = optimizer.state_dict()["state"]
    return {name: {key: (value.shape, value.dtype) for key, value in owned.items()} for name, owned in state.items()}


def test_state_is_what_the_registry_says():
    params = parameters(torch.bfloat16)
    optimizer = shardopt.keyed("lbfgs", params, history_size=7)
    optimizer.init_state()
    spec = spec_of("lbfgs")
    for parameter in params.values():
        state = optimizer.state[parameter]
        assert list(state) == [entry.name for entry in spec.entries(optimizer.param_groups[0])]
        for entry in spec.entries(optimizer.param_groups[0]):
            stacked = (7,) if entry.kind is Kind.HISTORY else ()
            assert state[entry.name].shape == (*stacked, *parameter.shape)
            assert state[entry.name].dtype == torch.bfloat16
    named = {entry.name: entry for entry in spec.state if entry.kind is Kind.GLOBAL}
    assert numbers(optimizer).keys() == named.keys()
    for name, value in numbers(optimizer).items():
        assert (value.dtype, value.device.type) == (named[name].dtype.of(torch.bfloat16, {}), "cpu")
    assert not any(value.any() for value in flat(optimizer))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("options", [{"line_search_fn": "strong_wolfe"}, {"lr": 0.2}])
def test_resumed_in_another_order_of_parameters_it_continues_exactly(dtype, options):
    options = {"history_size": 5, "max_iter": 4, **options}
    whole, split = parameters(dtype), parameters(dtype)
    uninterrupted = shardopt.keyed("lbfgs", whole, **options)
    train(uninterrupted, whole)
    first = shardopt.keyed("lbfgs", split, **options)
    train(first, split, range(2))
    turned = {name: torch.nn.Parameter(split[name].detach().clone()) for name in reversed(SHAPES)}
    resumed = shardopt.keyed("lbfgs", turned, **options)
    resumed.init_state()
    memory = [value.data_ptr() for value in flat(resumed)]
    saved = first.state_dict()
    resumed.check_state_dict(saved)
    resumed.load_state_dict(saved)
    assert memory == [value.data_ptr() for value in flat(resumed)]
    # The loss adds up its terms in the order of the mapping, and so has to be the same.
    train(resumed, {name: turned[name] for name in SHAPES}, range(2, STEPS))
    assert all(torch.equal(whole[name], turned[name]) for name in SHAPES)
    assert all(map(torch.equal, numbers(uninterrupted).values(), numbers(resumed).values()))


def test_bfloat16_goes_down():
    params = parameters(torch.bfloat16)
    optimizer = shardopt.keyed("lbfgs", params, line_search_fn="strong_wolfe")
    losses = train(optimizer, params)
    reached = parameters(torch.float32)
    wanted = train(shardopt.keyed("lbfgs", reached, line_search_fn="strong_wolfe"), reached)
    assert losses[-1] == pytest.approx(wanted[-1], rel=0.02)


def test_copies_continue_alike():
    params = parameters(torch.float32)
    optimizer = shardopt.keyed("lbfgs", params, lr=0.2, max_iter=4)
    train(optimizer, params, range(2))
    copied, others = copy.deepcopy((optimizer, params))
    assert others["matrix"] is copied.params["matrix"]
    train(optimizer, params, range(2, 4))
    train(copied, others, range(2, 4))
    assert all(torch.equal(params[name], others[name]) for name in SHAPES)
    assert copied.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


def test_what_torch_refuses_is_refused():
    with pytest.raises(AlgorithmError, match="found a second group"):
        shardopt.keyed("lbfgs", parameters(torch.float32), groups=[{"match": "vector", "lr": 0.5}])
    with pytest.raises(AlgorithmError, match="found a second group"):
        KeyedOptimizerWrapper(
            parameters(torch.float32),
            lambda ps: shardopt.algorithms.spec_of("lbfgs").optimizer([{"params": [p]} for p in ps]),
        )
    optimizer = shardopt.keyed("lbfgs", parameters(torch.float32))
    with pytest.raises(AlgorithmError, match="found a second group"):
        optimizer.add_param_group({"params": {"more": torch.nn.Parameter(torch.zeros(1))}})
    with pytest.raises(AlgorithmError, match="evaluates the model several times"):
        optimizer.step()
    for options in ({"lr": -1.0}, {"lr": torch.ones(2)}, {"line_search_fn": "armijo"}, {"history_size": 0}):
        with pytest.raises(ValueError, match="LBFGS's"):
            shardopt.keyed("lbfgs", parameters(torch.float32), **options)


def test_a_sparse_gradient_is_refused_by_name():
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    optimizer = shardopt.keyed("lbfgs", {"w": weight})

    def closure():
        weight.grad = torch.ones(3, 2).to_sparse()
        return 1.0

    with pytest.raises(GradientError, match=r"w\.grad: found torch\.sparse_coo"):
        optimizer.step(closure)


def places(optimizer, params):
    """For how many pairs the histories have memory, as long as nobody looks at them through the keyed optimizer."""
    inner = optimizer._local.optimizer
    return {len(inner.state[p][entry]) for p in params.values() for entry in ("old_dirs", "old_stps")}


@pytest.mark.parametrize("initialized", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_the_history_has_memory_for_the_pairs_that_there_are(initialized):
    """Not for a hundred from the first step on; what looks at it sees all places, and a step gives them back."""
    options = {"lr": 0.05, "max_iter": 1, "tolerance_change": 0.0, "tolerance_grad": 0.0, "history_size": 60}
    params, twins = parameters(torch.float64), parameters(torch.float64)
    optimizer, seen = (shardopt.keyed("lbfgs", owned, **options) for owned in (params, twins))
    if initialized:
        optimizer.init_state()
        assert places(optimizer, params) == {60}
    for step in range(66):
        train(optimizer, params, [step])
        (held,) = places(optimizer, params)
        pairs = int(optimizer._local.optimizer.state["__global__"]["pairs"])
        assert max(pairs, 1) <= held <= min((pairs + 1) * 5 // 4, 60)
        train(seen, twins, [step])
        state = seen.state_dict()["state"]["matrix"]
        assert state["old_dirs"].shape == state["old_stps"].shape == (60, 6, 4)
        assert not state["old_dirs"][pairs:].any()
    assert pairs == held == 60
    assert all(torch.equal(params[name], twins[name]) for name in params)


def test_the_first_step_takes_no_memory_for_a_history():
    weight = torch.nn.Parameter(torch.ones(100_000))
    optimizer = shardopt.keyed("lbfgs", {"w": weight}, max_iter=2)
    weight.grad = torch.ones(100_000)
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:  # torch 2.11 warns without
        optimizer.step(lambda: weight.square().sum().detach())
    allocated = sum(event.self_cpu_memory_usage for event in profile.key_averages() if event.self_cpu_memory_usage > 0)
    assert allocated <= 40 * weight.nbytes


def test_a_parameter_called_as_the_state_of_none_is_refused():
    params = {name: torch.nn.Parameter(torch.ones(2)) for name in ("bias", "__global__")}
    with pytest.raises(AlgorithmError, match=r"__global__: found a parameter of this name"):
        shardopt.keyed("lbfgs", params)
    with pytest.raises(StateError, match=r"__global__: found state of two optimizers"):
        shardopt.keyed("adamw", params, groups=[{"match": "^bias", "algorithm": "lbfgs"}])
    params = {name: torch.nn.Parameter(torch.ones(2)) for name in ("a", "global.bias")}
    optimizer = shardopt.keyed("lbfgs", params)
    optimizer.init_state()
    assert optimizer.state_dict()["state"].keys() == {"a", "global.bias", "__global__"}
