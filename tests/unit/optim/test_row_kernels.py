"""The kernel for GPUs against torch's own operations; where there is no GPU, under Triton's interpreter."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from shardopt.algorithms.row_wise import row_kernels
from shardopt.algorithms.row_wise.row_rules import ADAGRAD, ADAM, update_rows
from shardopt.runtime import kernels
from tests.harness import run_ranks
from tests.support.triton_kernels import device_here, interpreted

OPTIONS = {"lr": 0.1, "lr_decay": 0.1, "eps": 1e-6, "betas": (0.7, 0.9), "weight_decay": 0.0, "maximize": False}
SHAPES = {"narrow": (50, 5), "usual": (40, 64), "vector": (30,), "cube": (20, 3, 7), "wide": (9, 2500)}


RULES, DTYPES = {"adagrad": ADAGRAD, "adam": ADAM}, [torch.float32, torch.bfloat16]
needs_triton = pytest.mark.skipif(kernels.triton is None, reason="needs Triton (bash launch/setup.sh)")


def tables(shape, rule, dtype, device):
    generator = torch.Generator().manual_seed(7)
    made = [torch.randn(shape, generator=generator).to(device, dtype)]
    made.append(torch.rand((shape[0], *[1] * (len(shape) - 1)), generator=generator).to(device))
    return made + [torch.randn(shape, generator=generator).to(device, dtype) for _ in rule.others]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU; under the interpreter it runs below")
@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_it_moves_rows_as_torchs_operations_do(rule, dtype):
    compare_all(RULES[rule], dtype)


def under_the_interpreter():
    interpreted(row_kernels)
    row_kernels._try(torch.device("cpu"))
    for rule, dtype in itertools.product(RULES.values(), DTYPES):
        compare_all(rule, dtype)
    return type(row_kernels._move_rows).__name__


@needs_triton
def test_it_does_so_under_the_interpreter():
    """On a rank: the process has the interpreter until it ends."""
    assert run_ranks(1, under_the_interpreter, backend=None) == ["InterpretedFunction"]


def compare_all(rule, dtype):
    with pytest.MonkeyPatch.context() as monkeypatch:
        for shape in SHAPES.values():
            for options in ({}, {"maximize": True}, {"weight_decay": 0.3}):
                compare(shape, rule, dtype, OPTIONS | options, monkeypatch, every=3)
            compare(shape, rule, dtype, OPTIONS | {"weight_decay": 0.3}, monkeypatch, every=None)


def compare(shape, rule, dtype, options, monkeypatch, every):
    """`every` so many rows one has a sparse gradient; None is a dense one."""
    device = device_here()
    index = None if every is None else torch.arange(0, shape[0], every, device=device)
    gradients = torch.randn((shape[0] if index is None else len(index), *shape[1:]), device=device).to(dtype)
    wanted, actual = (tables(shape, rule, dtype, device) for _ in range(2))
    names = (rule.moments, *rule.others)
    with monkeypatch.context() as without:
        without.setattr(row_kernels, "fits", lambda *tensors: False)
        state = dict(zip(names, wanted[1:], strict=True))
        update_rows(rule, wanted[0], index, gradients, state, rule.numbers(options, 3.0))
    average = actual[2] if rule.others else None
    row_kernels.update(actual[0], index, gradients, actual[1], average, rule.numbers(options, 3.0))
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    for want, have in zip(wanted, actual, strict=True):
        torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)
    if index is None:
        return
    untouched = torch.ones(shape[0], dtype=torch.bool, device=device).index_fill(0, index, False)
    assert torch.equal(actual[0][untouched], tables(shape, rule, dtype, device)[0][untouched])


def test_it_is_not_taken_for_what_it_cannot_do(monkeypatch):
    table = torch.zeros(4, 2)
    assert not row_kernels.fits(table)  # not on a GPU
    made = []
    monkeypatch.setattr(row_kernels, "_try", made.append)
    on_gpu = SimpleNamespace(is_cuda=True, device="cuda:0", is_contiguous=lambda: True, dtype=torch.float32)
    monkeypatch.setattr(kernels, "triton", object())
    assert row_kernels.fits(on_gpu) and made == ["cuda:0"]
    monkeypatch.setattr(kernels, "triton", None)
    assert not row_kernels.fits(on_gpu)
