"""Muon in one process: torch's bits where it computes in bfloat16, a plain reference where it computes in float32."""

import math

import pytest
import torch

import shardopt
from shardopt.algorithms import StepsOn, spec_of
from shardopt.algorithms.muon.muon import orthogonalised
from shardopt.errors import AlgorithmError, GradientError, MismatchError, StateError
from shardopt.sharding.layout import Layout
from tests.support.cases import option_sets

SHAPES = [(33, 17), (17, 65), (64, 64), (7, 5), (1, 9), (9, 1), (3, 1)]
STEPS, ABSENT = 8, {3: {2}, 5: {0, 1, 4}}  # step: matrices without a gradient
OPTION_SETS = [
    *option_sets("Muon"),
    ("torch's class", {}),
    ("no nesterov", {"nesterov": False}),
    ("adjusted", {"adjust_lr_fn": "match_rms_adamw", "lr": 0.3}),
    ("original", {"adjust_lr_fn": "original"}),
    ("no momentum", {"momentum": 0.0, "weight_decay": 0.0}),
    ("large eps", {"eps": 100.0}),
    ("no iteration", {"ns_steps": 0}),
]


def matrices(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {
        f"w{i}": torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for i, shape in enumerate(SHAPES)
    }


def train(optimizer, parameters, steps=STEPS):
    for step in range(steps):
        generator = torch.Generator().manual_seed(1 + step)
        for i, parameter in enumerate(parameters.values()):
            gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad = None if i in ABSENT.get(step, ()) else gradient
        optimizer.step()


@pytest.mark.parametrize(("what", "options"), OPTION_SETS, ids=[what.replace(" ", "_") for what, _ in OPTION_SETS])
def test_same_bits_as_torch(what, options):
    ours, theirs = matrices(), matrices()
    optimizer = shardopt.keyed(torch.optim.Muon if what == "torch's class" else "muon", ours, **options)
    torchs = torch.optim.Muon(theirs.values(), **options)
    train(optimizer, ours)
    train(torchs, theirs)
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name]), name
        state, expected = optimizer.state[parameter], torchs.state[theirs[name]]
        assert state.keys() == expected.keys()
        assert torch.equal(state["momentum_buffer"], expected["momentum_buffer"])


def test_bfloat16_parameters_are_within_a_rounding_of_torchs():
    ours, theirs = matrices(torch.bfloat16), matrices(torch.bfloat16)
    train(shardopt.keyed("muon", ours), ours)
    train(torch.optim.Muon(theirs.values()), theirs)
    for name, parameter in ours.items():
        assert parameter.dtype == torch.bfloat16
        torch.testing.assert_close(parameter, theirs[name], rtol=2**-7, atol=1e-4)


def reference(parameters, lr, momentum, weight_decay, nesterov, steps=STEPS):
    """The equations, one after the other, on matrices as they stand."""
    a, b, c = 3.4445, -4.7750, 2.0315
    values = [parameter.detach().clone() for parameter in parameters.values()]
    momenta = [torch.zeros_like(value) for value in values]
    for step in range(steps):
        generator = torch.Generator().manual_seed(1 + step)
        for i, value in enumerate(values):
            gradient = torch.randn(value.shape, generator=generator).to(value.dtype)
            if i in ABSENT.get(step, ()):
                continue
            momenta[i] = momentum * momenta[i] + (1 - momentum) * gradient
            update = momentum * momenta[i] + (1 - momentum) * gradient if nesterov else momenta[i]
            x = update / update.square().sum().sqrt()
            wide = x if x.shape[0] <= x.shape[1] else x.T
            for _ in range(5):
                gram = wide @ wide.T
                wide = a * wide + (b * gram + c * gram @ gram) @ wide
            x = wide if x.shape[0] <= x.shape[1] else wide.T
            values[i] = value * (1 - lr * weight_decay) - lr * math.sqrt(max(1, value.shape[0] / value.shape[1])) * x
    return dict(zip(parameters, values, strict=True))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("ns_dtype", "dtype", "most"), [("float32", torch.float32, 1e-5), ("float64", torch.float64, 1e-13)]
)
def test_wider_than_torch_against_a_plain_reference(ns_dtype, dtype, most, nesterov):
    parameters = matrices(dtype)
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.2, "nesterov": nesterov}
    expected = reference(parameters, **options)
    train(shardopt.keyed("muon", parameters, ns_dtype=ns_dtype, **options), parameters)
    for name, parameter in parameters.items():
        distance = (parameter.detach() - expected[name]).norm() / expected[name].norm()
        assert distance <= most, (name, distance)


@pytest.mark.parametrize("shape", [(40, 40), (20, 60), (60, 20)])
def test_singular_values_come_near_one(shape):
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalised(matrix, (3.4445, -4.7750, 2.0315), 8, 1e-7))
    assert 0.6 < values.min() < values.max() < 1.3


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"lr": -1.0}, "Muon's lr is -1.0; required at least 0"),
        ({"lr": torch.tensor([0.1, 0.2])}, "a tensor of one element"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"momentum": -0.1}, "momentum"),
        ({"ns_steps": 100}, "ns_steps"),
        ({"ns_coefficients": (1.0, 2.0)}, "3 numbers"),
        ({"adjust_lr_fn": "arbitrary"}, "'match_rms_adamw'"),
        ({"ns_dtype": "int8"}, "'bfloat16'"),
    ],
)
def test_options_out_of_range_are_refused(options, reported):
    with pytest.raises((ValueError, AlgorithmError), match=reported):
        shardopt.keyed("muon", matrices(), **options)
    with pytest.raises((ValueError, AlgorithmError), match=reported):
        shardopt.keyed("muon", matrices(), groups=[{"match": "w1", **options}])


@pytest.mark.parametrize(
    ("tensor", "actual"),
    [
        (torch.zeros(4), r"shape \(4,\)"),
        (torch.zeros(2, 2, 2, 2), r"shape \(2, 2, 2, 2\)"),
        (torch.zeros(()), r"shape \(\)"),
        (torch.zeros(2, 2, dtype=torch.complex64), "dtype torch.complex64"),
    ],
)
def test_what_is_no_matrix_of_real_numbers_is_refused_by_name(tensor, actual):
    with pytest.raises(AlgorithmError, match=f"odd: found {actual}"):
        shardopt.keyed("muon", {**matrices(), "odd": torch.nn.Parameter(tensor)})


def test_gradients_that_do_not_fit_are_refused_by_name_and_nothing_is_changed():
    parameters = matrices()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer = shardopt.keyed("muon", parameters)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    parameters["w3"].grad = torch.ones(7, 5).to_sparse()
    with pytest.raises(GradientError, match=r"w3\.grad: found torch.sparse_coo"):
        optimizer.step()
    assert all(torch.equal(parameter, before[name]) for name, parameter in parameters.items())
    assert optimizer.state_dict()["state"] == {}


def test_a_momentum_of_another_shape_is_refused():
    parameters = matrices()
    optimizer = shardopt.keyed("muon", parameters)
    optimizer.init_state()
    parameters["w0"].data = torch.zeros(1, 17)
    parameters["w0"].grad = torch.ones(1, 17)
    with pytest.raises(StateError, match=r"w0: found local shapes \[\(1, 17\)\]; required \[\(33, 17\)\]"):
        optimizer.step()


def test_closure_is_called_once_under_autograd_and_its_loss_returned():
    parameters = matrices()
    optimizer = shardopt.keyed("muon", parameters)
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = sum(parameter.square().sum() for parameter in parameters.values())
        loss.backward()
        calls.append(loss)
        return loss

    before = parameters["w0"].detach().clone()
    assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1
    assert not torch.equal(parameters["w0"], before)


def test_the_registry_says_what_it_is():
    spec = spec_of(torch.optim.Muon)
    assert spec is spec_of("muon")
    assert (spec.steps_on, spec.stands_for) == (StepsOn.PARAMETERS, torch.optim.Muon)
    optimizer = shardopt.keyed("muon", matrices())
    optimizer.init_state()
    for parameter in optimizer.params.values():
        state = optimizer.state[parameter]
        assert list(state) == [entry.name for entry in spec.entries(optimizer.param_groups[0])]
        assert torch.equal(state["momentum_buffer"], torch.zeros_like(parameter))


# Several matrices in one parameter: experts, and parts that are fused.

STACKS = [  # shape, split, the rows of each matrix
    ((3, 9, 5), None, (9,)),
    ((2, 6, 7), 3, (2, 2, 2)),
    ((2, 7, 4), (4, 2, 1), (4, 2, 1)),
    ((12, 5), 3, (4, 4, 4)),
    ((11, 6), (6, 4, 1), (6, 4, 1)),
    ((11, 6), [11], (11,)),
    ((1, 4, 4), 1, (4,)),
    ((5, 1, 3), None, (1,)),
    ((6, 3), 6, (1,) * 6),
]


def parts_of(tensor, rows):
    """The matrices in a parameter, one after the other."""
    stack = [tensor] if tensor.ndim == 2 else tensor.unbind()
    return [part for matrix in stack for part in matrix.split(rows)]


def test_the_spectral_adjustment_is_the_root_of_rows_over_columns_for_wide_matrices_too():
    moved = []
    for adjust in ("original", "spectral_unclamped"):
        parameters = matrices()
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        train(shardopt.keyed("muon", parameters, lr=0.1, weight_decay=0.0, adjust_lr_fn=adjust), parameters, steps=1)
        moved.append({name: parameter.detach() - before[name] for name, parameter in parameters.items()})
    original, spectral = moved
    for name, (rows, columns) in zip(original, SHAPES, strict=True):
        wanted = original[name] * min(1.0, rows / columns) ** 0.5
        torch.testing.assert_close(spectral[name], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "split", "rows"), STACKS)
def test_each_matrix_is_stepped_as_if_it_were_alone(shape, split, rows, dtype, adjust):
    value = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    options = {"lr": 0.1, "adjust_lr_fn": adjust, "ns_dtype": "float32"}
    stacked = {"w": torch.nn.Parameter(value.clone()), "other": torch.nn.Parameter(torch.ones(3, 4))}
    groups = [{"match": "other", "split": None}]
    alone = {f"{i}": torch.nn.Parameter(part.clone()) for i, part in enumerate(parts_of(value, rows))}
    one = shardopt.keyed("muon", stacked, split=split, groups=groups, **options)
    many = shardopt.keyed("muon", alone, **options)
    for step in range(4):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(step)).to(dtype)
        stacked["w"].grad = gradient if step != 2 else None
        stacked["other"].grad = torch.ones(3, 4)
        for parameter, part in zip(alone.values(), parts_of(gradient, rows), strict=True):
            parameter.grad = part.clone() if step != 2 else None
        one.step(), many.step()
    moments = parts_of(one.state[stacked["w"]]["momentum_buffer"], rows)
    assert moments[0].dtype == dtype
    for number, part in enumerate(parts_of(stacked["w"].detach(), rows)):
        assert torch.equal(part, alone[f"{number}"])
        assert torch.equal(moments[number], many.state[alone[f"{number}"]]["momentum_buffer"])


@pytest.mark.parametrize(
    ("shape", "split", "reported"),
    [
        ((2, 7, 4), 3, r"w: found 7 rows; required 3 parts of equal height"),
        ((7, 4), 8, r"w: found 7 rows; required 8 parts"),
        ((7, 4), (3, 3), r"w: found 7 rows; required parts of \(3, 3\) rows"),
        ((2, 7, 4), (7, 7), r"w: found 7 rows; required parts of \(7, 7\) rows"),
    ],
)
def test_rows_that_cannot_be_split_are_refused_by_name_and_nothing_is_changed(shape, split, reported):
    parameters = {"w": torch.nn.Parameter(torch.ones(shape)), "other": torch.nn.Parameter(torch.ones(8, 3))}
    optimizer = shardopt.keyed("muon", parameters, groups=[{"match": "w", "split": split}])
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(AlgorithmError, match=reported):
        optimizer.step()
    assert all(parameter.eq(1).all() for parameter in parameters.values())
    assert optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize("split", [0, -1, 1.5, "3", (), (2, 0), (2, -1), True, (True, 1), {2: 3}])
def test_what_is_no_split_is_refused(split):
    for options in ({"split": split}, {"groups": [{"match": "w1", "split": split}]}):
        with pytest.raises((ValueError, AlgorithmError), match="split"):
            shardopt.keyed("muon", matrices(), **options)


def test_the_split_is_saved_and_old_groups_have_none():
    def made(**options):
        return shardopt.keyed("muon", {"w": torch.nn.Parameter(torch.ones(6, 3))}, **options)

    for split in (None, 2, (4, 2), [3, 3]):
        saved = made(split=split).state_dict()
        loaded = made(split=1)
        loaded.load_state_dict(saved)
        assert loaded.param_groups[0]["split"] == (tuple(split) if isinstance(split, list) else split)
    old = made().state_dict()
    for group in old["param_groups"]:
        del group["split"]
        group["given"].pop("split", None)
    made().load_state_dict(old)
    with pytest.raises(MismatchError, match="split"):
        made(split=3).load_state_dict(old)
    kept = made(split=3)
    kept.keep_options("split")
    kept.load_state_dict(old)
    assert kept.param_groups[0]["split"] == 3


def test_an_empty_stack_has_nothing_to_step():
    for shape in ((0, 4, 3), (2, 0, 3), (2, 4, 0)):
        parameters = {"w": torch.nn.Parameter(torch.zeros(shape)), "other": torch.nn.Parameter(torch.ones(4, 3))}
        optimizer = shardopt.keyed("muon", parameters, split=2)
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert not parameters["other"].eq(1).any()


@pytest.mark.parametrize("split", [None, 2])
def test_a_step_on_plain_parameters_hashes_no_layout_anew(split, monkeypatch):
    params = {name: torch.nn.Parameter(torch.ones(4, 6)) for name in ("first", "second")}
    optimizer = shardopt.keyed("muon", params, split=split)
    written = []
    to_json = Layout.to_json
    monkeypatch.setattr(Layout, "to_json", lambda layout: written.append(layout) or to_json(layout))
    for step in range(3):
        for parameter in params.values():
            parameter.grad = torch.randn(4, 6)
        optimizer.step()
        if not step:
            written.clear()
    assert not written
