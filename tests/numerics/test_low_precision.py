"""Low-precision state and parameters in one process: codes, equations, rounding at random, memory; on ranks see
tests/distributed."""

import copy
import pickle

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

import shardopt
from shardopt import checkpoint
from shardopt.algorithms.low_precision.codes import encode, round_at_random
from shardopt.algorithms.low_precision.noise import Noise, NoiseKey, Positions, noise_key, random_bits
from shardopt.errors import AlgorithmError, MismatchError, StateError
from shardopt.optim import CombinedOptimizer
from tests.support.fake_rank import fake_rank, shard
from tests.support.low_precision import ALGORITHMS, CASES, OPTIONS, Training, dequantized, finished

BF16, FP32 = torch.bfloat16, torch.float32
ROWS = ("rows", "fsdp_tp", "hsdp", "table")  # layouts that need no other rank


def differences_on(rank, ranks, layout, case):
    wanted = finished(case)
    with fake_rank(rank, ranks):
        training = Training.of(case, layout)
        training.steps(0, 3)
        return training.differences(wanted)


@pytest.mark.parametrize(
    ("number", "case"),
    [
        pytest.param(number, case, marks=() if number % 5 == 0 else pytest.mark.exhaustive, id=", ".join(case))
        for number, case in enumerate(CASES)
    ],
)
def test_a_rank_has_the_bits_of_one_process(number, case):
    assert differences_on(number % 3, 3 + number % 2, ROWS[number % len(ROWS)], case) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", ROWS)
@pytest.mark.parametrize("how", OPTIONS)
def test_every_rank_has_the_bits_of_one_process(how, layout, ranks):
    for case in (case for case in CASES if case[1] == how):
        for rank in range(ranks):
            assert differences_on(rank, ranks, layout, case) == [], (case, rank)


def gradients(step, shape=(24, 300)):
    generator = torch.Generator().manual_seed(step)
    spread = torch.logspace(-4, 1, shape[1])
    return torch.randn(shape, generator=generator) * spread


def test_a_step_is_torchs_on_what_the_codes_say_and_stores_the_nearest_codes():
    weight = torch.nn.Parameter(gradients(99))
    optimizer = shardopt.keyed("adamw", {"w": weight}, lr=0.1, weight_decay=0.1, **OPTIONS["codes"][1])
    optimizer.init_state()
    for step in range(6):
        state = optimizer.state[weight]
        names = (("exp_avg", True), ("exp_avg_sq", False))
        before = {name: dequantized(state[name], state[f"{name}_scale"], signed) for name, signed in names}
        theirs = torch.nn.Parameter(weight.detach().clone())
        plain = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.1)
        plain.state[theirs] = {"step": state["step"].clone(), **before}
        weight.grad, theirs.grad = gradients(step), gradients(step)
        optimizer.step()
        plain.step()
        assert torch.equal(weight, theirs)
        for name, signed in names:
            wanted, codes, scales = plain.state[theirs][name], state[name], state[f"{name}_scale"]
            assert (codes.dtype, scales.shape) == (torch.uint8, (24, 2))
            largest = torch.stack([part.abs().amax(1) for part in wanted.split(256, 1)], 1)
            assert torch.equal(scales, largest)
            error = (dequantized(codes, scales, signed) - wanted).abs()
            for other in (-1, 1):  # no neighbour of a code is nearer, but for the rounding of fp32
                magnitude = (codes.int() & 127 if signed else codes.int()) + other
                neighbour = magnitude.clamp(0, 120 if signed else 248) | (codes.int() & 128 if signed else 0)
                off = (dequantized(neighbour.to(torch.uint8), scales, signed) - wanted).abs()
                nearer = off < error * (1 - 1e-4) - 1e-6 * wanted.abs()
                assert not (nearer & ~((codes == 1) & (not signed))).any()  # a positive number is never 0
            assert signed or not ((codes == 0) & (wanted > 0)).any()


@pytest.mark.parametrize("signed", [True, False])
def test_codes_hold_what_they_stand_for_and_their_ends(signed):
    codes = torch.arange(121 if signed else 249, dtype=torch.uint8)
    numbers = dequantized(codes[None], torch.ones(1, 1), signed)
    assert (numbers[0].diff() > 0).all() and numbers[0, -1] == 1 and numbers[0, 0] == 0
    encoded = encode(numbers.float()[:, None].clone(), torch.ones(1, 1), signed, None)
    assert torch.equal(encoded.flatten(), codes)
    zeros = encode(torch.zeros(2, 1, 4), torch.zeros(2, 1), signed, None)
    assert not zeros.any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_block_with_a_number_that_is_not_finite_becomes_nan_in_its_whole_and_no_other(bad):
    weight = torch.nn.Parameter(gradients(7))
    optimizer = shardopt.keyed("adamw", {"w": weight}, lr=0.1, state_dtype=torch.uint8)
    weight.grad = gradients(1)
    weight.grad[2, 5] = bad
    optimizer.step()
    state = optimizer.state[weight]
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        numbers = dequantized(state[name], state[f"{name}_scale"], signed)
        assert numbers[2, :256].isnan().all() and numbers.isnan().sum() == 256 and not numbers.isinf().any()
    weight.grad = gradients(2)
    optimizer.step()
    assert weight[2, :256].isnan().all() and weight.isnan().sum() == 256


def test_random_rounding_is_unbiased_and_keeps_what_is_no_number(monkeypatch):
    positions = Positions(torch.zeros(1, dtype=torch.int64), 1 << 18, 1 << 18)
    values = torch.full([1 << 18], 1 + 2**-9)  # a quarter of the way from 1 to the next number in bf16
    rounded = round_at_random(values, Noise(positions, noise_key("w", "param", 1))).float()
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    assert abs((rounded > 1).float().mean() - 0.25) < 0.005
    strange = torch.tensor([0x7FFFFFFF, -1, 0x7F800000, -0x800000], dtype=torch.int32).view(torch.float32)
    at_most = Noise(Positions(torch.zeros(1, dtype=torch.int64), 4, 4), NoiseKey(0, 0))
    with monkeypatch.context() as patched:
        patched.setattr(Noise, "bits", lambda noise: torch.full((4,), -1, dtype=torch.int32))
        kept = round_at_random(strange, at_most)
    assert kept[:2].isnan().all() and kept[2:].tolist() == [torch.inf, -torch.inf]
    noise = Noise(positions, noise_key("w", "exp_avg", 2))
    codes = encode(torch.full((1024, 1, 256), 0.7), torch.ones(1024, 1), True, noise)
    mean = dequantized(codes, torch.ones(1024, 1), True).mean()
    assert codes.unique().numel() == 2 and abs(mean - 0.7) < 5e-4  # codes are 0.06 apart there


def test_random_bits_differ_by_name_entry_step_and_element_and_are_fair():
    index = torch.arange(1 << 14)
    keys = [noise_key(*each) for each in (("w", "m", 1), ("w", "m", 2), ("w", "v", 1), ("u", "m", 1))]
    draws = [random_bits(index, 1 << 14, key) for key in keys]
    draws += [random_bits(index + shift, 1 << 40, keys[0]) for shift in (2**32, 2**33, 1 << 14)]
    bits = torch.stack([(draw[:, None] >> torch.arange(32, dtype=torch.int32)) & 1 for draw in draws]).float()
    assert ((bits.mean(1) - 0.5).abs() < 0.024).all()  # 6 deviations
    flat = bits.flatten(1) - 0.5
    assert ((flat @ flat.T / flat.shape[1] * 4 - torch.eye(len(draws))).abs() < 0.009).all()
    neighbours = (bits[:, 1:] - 0.5) * (bits[:, :-1] - 0.5)
    assert (neighbours.mean(1).abs() * 4 < 0.05).all()
    assert torch.equal(draws[0][100:200], random_bits(index[100:200], 200, keys[0]))


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(each, marks=() if each in ("sgd", "rprop", "adagrad", "asgd") else pytest.mark.exhaustive)
        for each in ALGORITHMS
    ],
)
def test_state_that_was_made_early_is_not_noticed(algorithm):
    case = next(each for each in ((algorithm, "codes, master"), (algorithm, "bf16, master")) if each in CASES)
    early, late = Training.of(case), Training.of(case)
    early.optimizer.init_state()
    assert early.optimizer.unstepped_state(early.params) == set(early.params)
    for training in (early, late):
        for group in training.optimizer.param_groups:
            group["lr"] = 0.05  # after the state was made
        for parameter in training.params.values():
            parameter.data.add_(1)  # after the master was made
        training.steps(0, 2)
    assert early.differences(late.whole()) == []
    assert not early.optimizer.unstepped_state(early.params)


@pytest.mark.parametrize("algorithm", ["adamw", "sgd"])
def test_state_that_was_never_stepped_is_dropped_whatever_its_parameter_is_by_now(algorithm, tmp_path):
    one, other = (Training.of((algorithm, "codes, master"), seed=seed) for seed in (0, 1))
    checkpoint.save(tmp_path / "saved", one.app)  # without state
    other.optimizer.init_state()
    for parameter in other.params.values():
        parameter.data.add_(1)  # after the master was made
    checkpoint.load(tmp_path / "saved", other.app, init_state=True)
    assert not other.optimizer.state_dict()["state"]
    for training in (one, other):
        training.steps(0, 2)
    assert other.differences(one.whole()) == []


def test_copies_continue_with_the_same_bits():
    one = Training.of(("sgd", "codes, at random"))
    one.steps(0, 2)
    copies = [copy.deepcopy(one), pickle.loads(pickle.dumps(one))]
    for training in (one, *copies):
        training.steps(2, 4)
        assert training.differences(one.whole()) == []


def test_a_parameter_is_made_of_its_master_when_that_is_loaded():
    one, other = (Training.of(("adamw", "codes, master"), seed=seed) for seed in (0, 1))
    one.steps(0, 2)
    other.steps(0, 1)
    other.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
    for name, parameter in one.params.items():
        assert torch.equal(other.params[name], parameter)
        assert torch.equal(parameter, one.optimizer.state[parameter]["master"].to(BF16))


def linear(dtype=FP32):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(96, 128), torch.nn.Linear(128, 64)).to(dtype)


@pytest.mark.parametrize("how", ["codes, at random", "bf16, master"])
def test_in_backward_trains_the_same_bits(how):
    dtype, options = OPTIONS[how]
    after, within = linear(dtype), linear(dtype)
    stepped = shardopt.keyed("adamw", after.named_parameters(), **options)
    fused = shardopt.in_backward(within, "adamw", **options)
    for step in range(3):
        for model in (after, within):
            model(gradients(step, (8, 96)).to(dtype)).square().sum().backward()
        stepped.step()
        stepped.zero_grad()
        fused.step()
    assert all(map(torch.equal, after.parameters(), within.parameters()))
    states = [optimizer.state_dict()["state"] for optimizer in (stepped, fused)]
    for name, entries in states[0].items():
        assert all(torch.equal(value, states[1][name][entry]) for entry, value in entries.items())


def combined(net):
    options = OPTIONS["bf16, master"][1]
    halves = [(str(i), shardopt.keyed("adamw", net[i].named_parameters(), **options)) for i in (0, 1)]
    return copy.deepcopy(CombinedOptimizer(halves), {id(each): each for each in net.parameters()})


@pytest.mark.parametrize(
    "made",
    [
        lambda net: shardopt.keyed("adamw", net.named_parameters(), **OPTIONS["bf16, master"][1]),
        lambda net: shardopt.in_backward(net, "adamw", **OPTIONS["bf16, master"][1]),
        combined,
    ],
)
def test_a_load_of_parameters_without_their_masters_changes_no_master_and_warns(made, tmp_path, caplog):
    net = linear(BF16)
    optimizer = made(net)

    def train():
        net(gradients(0, (8, 96)).to(BF16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    checkpoint.save(tmp_path / "c", {"model": net, "optimizer": optimizer})
    saved = copy.deepcopy([optimizer.state[param]["master"] for param in net.parameters()])
    train()
    own = copy.deepcopy([(param.detach(), optimizer.state[param]["master"]) for param in net.parameters()])
    app, warning = {"model": net, "optimizer": optimizer}, "parameters were loaded without their fp32 masters"
    for part, options in (
        ({"model": net}, {"strict": checkpoint.Strictness(unexpected="ignore")}),
        (app, {"select": r"^model"}),
        (app, {"select": r"^model|exp_avg"}),  # of which the hand-back makes the parameters of their masters
    ):
        caplog.clear()
        checkpoint.load(tmp_path / "c", part, **options)
        assert warning in caplog.text
        for param, (value, master) in zip(net.parameters(), own, strict=True):
            assert torch.equal(optimizer.state[param]["master"], master)
            with torch.no_grad():
                param.copy_(value)
    caplog.clear()
    checkpoint.load(tmp_path / "c", {"model": net, "optimizer": optimizer})
    for param, master in zip(net.parameters(), saved, strict=True):
        assert torch.equal(optimizer.state[param]["master"], master)
    checkpoint.load(tmp_path / "c", app, select=r"^model")  # what the masters make
    assert warning not in caplog.text


def test_in_backward_refuses_a_group_whose_scales_need_other_ranks_before_it_is_added():
    with fake_rank(1, 2) as mesh:
        rows, columns = (torch.nn.Parameter(shard(torch.ones(80, 128), mesh, Shard(dim))) for dim in (0, 1))
        optimizer = shardopt.in_backward({"rows": rows}, "adamw", state_dtype=torch.uint8)
        with pytest.raises(AlgorithmError, match="columns: found 8-bit state"):
            optimizer.add_param_group({"params": {"columns": columns}})
        assert len(optimizer.param_groups) == 1 and [*optimizer.params] == ["rows"]
        optimizer.state_dict()
        optimizer.add_param_group({"params": {"columns": columns}, "state_dtype": BF16})
        with pytest.raises(AlgorithmError, match="columns: found 8-bit state"):
            shardopt.in_backward({"columns": columns}, "adamw", state_dtype=torch.uint8)


def test_groups_store_each_in_its_way_and_a_closure_is_called_once():
    model = linear(BF16)
    groups = [{"match": "bias", "state_dtype": None, "rounding": "nearest"}, {"match": "^1", "state_dtype": BF16}]
    optimizer = shardopt.keyed(
        "adamw", model.named_parameters(), state_dtype="uint8", rounding="stochastic", groups=groups
    )
    calls = []

    def closure():
        calls.append(1)
        loss = model(torch.ones(2, 96, dtype=BF16)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad and len(calls) == 1
    state = optimizer.state_dict()["state"]
    assert [state[name]["exp_avg"].dtype for name in ("0.weight", "0.bias", "1.weight")] == [torch.uint8, BF16, BF16]
    assert [group["state_dtype"] for group in optimizer.state_dict()["param_groups"]] == [None, "bfloat16", "uint8"]


@pytest.mark.parametrize("change", [{"state_dtype": None}, {"state_dtype": "bfloat16"}, {"master_dtype": "float32"}])
def test_another_form_while_training_is_refused_before_anything_changes(change):
    params = {name: torch.nn.Parameter(gradients(7).to(BF16)) for name in ("first", "w")}
    optimizer = shardopt.keyed("adamw", params, state_dtype=torch.uint8, groups=[{"match": "first"}])
    for parameter in params.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = copy.deepcopy((params, optimizer.state_dict()["state"]))
    optimizer.param_groups[1].update(change)
    with pytest.raises(StateError, match=r"w: (exp_avg|master): found"):
        optimizer.step()
    assert all(torch.equal(params[name], before[0][name]) for name in params)
    for name, entries in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[1][name][entry]) for entry, value in entries.items())
    optimizer.param_groups[1].update(state_dtype="uint8", master_dtype=None)
    optimizer.step()


class Faster(torch.optim.AdamW):
    def __init__(self, params, lr=0.5, **options):
        super().__init__(params, lr=lr, **options)


REFUSED = {
    "another algorithm": ({"algorithm": "muon"}, "Muon"),
    "averages": ({"algorithm": "schedulefreeadamw"}, "ScheduleFreeAdamW"),
    "no such dtype": ({"state_dtype": torch.int8}, "'int8'"),
    "no such rounding": ({"rounding": "up"}, "'up'"),
    "fused": ({"state_dtype": BF16, "fused": True}, "by itself"),
    "foreach in a group": ({"state_dtype": BF16, "groups": [{"match": "weight", "foreach": True}]}, "foreach"),
    "fp64": ({"state_dtype": BF16, "dtype": torch.float64}, "0.weight"),
    "a subclass": ({"algorithm": Faster}, 'Faster, a subclass of AdamW.*give "adamw"'),
    "fp16 at random": ({"rounding": "stochastic", "dtype": torch.float16}, "or a master"),
}


@pytest.mark.parametrize(("options", "named"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_stored_so_is_refused_by_name(options, named):
    options = {"algorithm": "adamw", "state_dtype": "uint8", "dtype": FP32, **options}
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)).to(options.pop("dtype"))
    with pytest.raises(AlgorithmError, match="(?s)" + named):
        shardopt.keyed(options.pop("algorithm"), model.named_parameters(), **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_what_torch_would_compute_otherwise_is_refused_beside_a_group_that_asks(dtype):
    params = {"w": torch.nn.Parameter(torch.ones(4)), "wide": torch.nn.Parameter(torch.ones(4, dtype=dtype))}
    with pytest.raises(AlgorithmError, match=f'wide: dtype: found a parameter of {dtype}.*"algorithm" of its own'):
        shardopt.keyed("adamw", params, groups=[{"match": "^w$", "state_dtype": BF16}])


def test_a_group_with_an_algorithm_of_its_own_keeps_what_torch_computes():
    number, moved = torch.nn.Parameter(torch.ones(4, dtype=torch.complex64)), []
    groups = [{"match": "number", "algorithm": "adamw", "lr": 0.1, "state_dtype": None}]
    optimizer = shardopt.keyed(
        "adamw", {"w": torch.nn.Parameter(torch.ones(4)), "number": number}, state_dtype=BF16, groups=groups
    )
    alone = torch.nn.Parameter(torch.ones(4, dtype=torch.complex64))
    for stepped, parameter in ((optimizer, number), (torch.optim.AdamW([alone], lr=0.1), alone)):
        parameter.grad = torch.full((4,), 1j, dtype=torch.complex64)
        stepped.step()
        moved.append(parameter.detach())
    assert torch.equal(*moved) and moved[0].imag.any()


@pytest.mark.parametrize("algorithm", ["adamw", "soap", Faster])
def test_torchs_way_to_store_may_be_asked_for_by_name(algorithm):
    plain = {"state_dtype": None, "master_dtype": None, "rounding": "nearest"}
    made = shardopt.keyed(algorithm, linear(FP32).named_parameters(), groups=[{"match": "bias", **plain}], **plain)
    assert not plain.keys() & made.param_groups[0].keys() and not plain.keys() & made.defaults.keys()


@pytest.mark.parametrize(
    ("saved", "loaded", "named"),
    [
        (
            {"state_dtype": "uint8"},
            {},
            r"param_groups.0.bias.state_dtype: found 'uint8'.*resume with state_dtype='uint8'",
        ),
        ({}, {"state_dtype": "uint8"}, r"state_dtype: found None.*required 'uint8'; resume without state_dtype"),
        ({"master_dtype": FP32}, {"state_dtype": BF16}, r"master_dtype: found 'float32'"),
        ({"rounding": "stochastic"}, {"state_dtype": BF16}, r'rounding: .*keep_options\("rounding"\)'),
    ],
)
def test_another_form_on_resume_is_refused_by_name(saved, loaded, named, tmp_path):
    model, optimizers = linear(BF16), []
    for options in (saved, loaded):
        optimizers.append(shardopt.keyed("adamw", model.named_parameters(), **options))
    model(torch.ones(2, 96, dtype=BF16)).sum().backward()
    optimizers[0].step()
    checkpoint.save(tmp_path / "saved", {"optimizer": optimizers[0]})
    with pytest.raises(MismatchError, match=named):
        checkpoint.load(tmp_path / "saved", {"optimizer": optimizers[1]}, init_state=True)


def test_a_run_may_resume_with_another_rounding_and_bf16_is_converted_if_asked():
    model = linear(FP32)
    model(torch.ones(2, 96)).sum().backward()
    one = shardopt.keyed("adamw", model.named_parameters(), state_dtype=BF16)
    one.step()
    other = shardopt.keyed("adamw", model.named_parameters(), state_dtype=BF16, rounding="stochastic")
    other.init_state()
    other.keep_options("rounding")
    other.load_state_dict(one.state_dict())
    assert other.param_groups[0]["rounding"] == "stochastic"
    plain = shardopt.keyed("adamw", model.named_parameters())
    plain.init_state()
    with pytest.raises(MismatchError, match="convert_state=True"):
        plain.load_state_dict(one.state_dict())
    plain.load_state_dict(one.state_dict(), convert_dtype=True)
    for parameter in model.parameters():
        assert torch.equal(plain.state[parameter]["exp_avg"], one.state[parameter]["exp_avg"].float())


class LargestOutput(TorchDispatchMode):
    """The bytes of the largest tensor that an operation made new."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        known = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in known:
            self.nbytes = max(self.nbytes, made.nbytes)
        return made


@pytest.mark.parametrize("how", ["codes, at random", "master"])
def test_a_step_has_scratch_of_a_chunk_and_8_bit_adamw_keeps_two_bytes(how):
    dtype, options = OPTIONS[how]
    weight = torch.nn.Parameter(gradients(0, (700, 768)).to(dtype))
    optimizer = shardopt.keyed("adamw", {"w": weight}, **options)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with LargestOutput() as largest:
        optimizer.step()
    assert 0 < largest.nbytes <= 8 * 32_768  # of an index
    if how.startswith("codes"):
        kept = sum(value.nbytes for value in optimizer.state[weight].values())
        assert 2 < kept / weight.numel() < 2.04
