"""Kernels for codes against torch's own operations, bit for bit; where there is no GPU, under Triton's interpreter."""

import itertools
import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardopt
from shardopt.algorithms.low_precision import code_kernels, codes
from shardopt.algorithms.low_precision.chunks import Scratch, chunks_of
from shardopt.algorithms.low_precision.noise import Noise, NoiseKey, Positions, noise_key
from shardopt.runtime import kernels
from shardopt.sharding.box import Box
from tests.harness import run_ranks
from tests.support.triton_kernels import device_here, interpreted

needs_triton = pytest.mark.skipif(kernels.triton is None, reason="needs Triton (bash launch/setup.sh)")
STRANGE = (0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 1e-38, 3.4e38, 2.0**127)


def numbers(rows, block):
    """Blocks of numbers over many binades; some are zeros, some hold what is not finite."""
    generator = torch.Generator().manual_seed(block)
    values = torch.randn(rows, block, generator=generator) * torch.logspace(-12, 6, rows)[:, None]
    values *= torch.logspace(-6, 0, block)[torch.randperm(block, generator=generator)]
    values[1] = 0
    for row, strange in enumerate(STRANGE, start=2):
        values[row, row % block] = strange
    return values


def noises(rows, block):
    """One key for all, runs of a block far apart; and one key for each run of 64, beyond 2³²."""
    starts = torch.arange(rows) * 100_003 + 7
    yield Noise(Positions(starts, block, 1 << 40), noise_key("w", "m", 3))
    yield Noise(Positions(starts, block, 1 << 40), NoiseKey(1, -1))
    if rows * block % 64 == 0:
        runs = rows * block // 64
        keys = torch.randint(-(2**31), 2**31, (2, runs), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
        yield Noise(Positions(torch.arange(runs) * 64 + 2**32 - 4096, 64, 1 << 40), NoiseKey(*keys))


def moved(noise, device):
    if noise is None:
        return None
    key = [each.to(device) if isinstance(each, torch.Tensor) else each for each in noise.key]
    return Noise(Positions(noise.positions.starts.to(device), *astuple(noise.positions)[1:]), NoiseKey(*key))


def astuple(positions):
    return positions.starts, positions.length, positions.most


def results(values, block, noise, signed, maximum):
    """All that codes.py computes of blocks of numbers."""
    values = values if signed else values.abs()
    scales = codes.scales_for(values, maximum)
    coded = codes.encode(values.clone(), scales, signed, noise)
    coded[scales.isinf()] = 0  # where codes stand for nothing
    flat = torch.cat([coded.view(-1), coded.new_zeros(40)])  # memory is padded
    column = torch.stack([codes.as_stored(scales), scales + 1], 1)[:, 0]  # as one block of several in a row
    found = [scales, coded, codes.decode(flat, column, signed, block)]
    return found + ([] if noise is None else [codes.round_at_random(values, noise)])


def bits(tensor):
    """On the CPU; the same for all that is no number."""
    return tensor.cpu().nan_to_num(nan=7.5, posinf=torch.inf, neginf=-torch.inf).view(torch.uint8)


def compare_all():
    device = device_here()
    for rows, block in ((16, 256), (13, 100), (32, 64), (12, 1024)):  # of programs, one is not whole
        values = numbers(rows, block)
        drawn = [None, None, None, *noises(rows, block)]
        kinds = itertools.cycle([(True, False), (False, False), (False, True)])
        for noise, (signed, maximum) in zip(drawn, kinds, strict=False):
            with np.errstate(all="ignore"):  # the interpreter computes with NumPy, which warns of what is not finite
                with pytest.MonkeyPatch.context() as patched:
                    patched.setattr(code_kernels, "fits", lambda tensor: False)
                    wanted = results(values.clone(), block, noise, signed, maximum)
                with pytest.MonkeyPatch.context() as patched:
                    patched.setattr(code_kernels, "fits", lambda tensor: True)
                    actual = results(values.to(device), block, moved(noise, device), signed, maximum)
                for number, (want, have) in enumerate(zip(wanted, actual, strict=True)):
                    assert want.dtype == have.dtype and want.shape == have.shape
                    assert torch.equal(bits(want), bits(have)), (rows, block, signed, maximum, number, device)
    return type(code_kernels._encode).__name__


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU; under the interpreter it runs below")
@needs_triton
def test_kernels_compute_the_bits_of_torchs_operations():
    compare_all()


def under_the_interpreter():
    interpreted(code_kernels)
    return compare_all()


@needs_triton
def test_they_do_so_under_the_interpreter():
    """On a rank: the process has the interpreter until it ends."""
    assert run_ranks(1, under_the_interpreter, backend=None) == ["InterpretedFunction"]


def test_noise_of_several_chunks_is_that_of_each_alone():
    shapes = ((4, 320), (3, 256), (9, 512))
    for rows in (slice(0, 4), slice(1, 3)):
        chunks = [
            next(chunks_of(Box((rows.start, 0), (min(rows.stop, shape[0]) - rows.start, shape[1])), shape, 64, True))
            for shape in shapes
        ]
        keys = [noise_key(f"p{number}", "m", 5) for number in range(len(shapes))]
        device = torch.device("cpu")
        together = Scratch(chunks, device).noise(keys).bits()
        alone = [Scratch([chunk], device).noise([key]).bits() for chunk, key in zip(chunks, keys, strict=True)]
        assert torch.equal(together, torch.cat(alone))


def test_where_a_kernel_cannot_be_made_torchs_operations_take_its_place(caplog):
    class OnGPU:
        is_cuda, device = True, torch.device("cuda", 0)

    def trial(device):
        raise RuntimeError("Failed to find C compiler.\nMore of it")

    with pytest.MonkeyPatch.context() as patched, caplog.at_level(logging.WARNING, "shardopt"):
        patched.setattr(kernels, "triton", object())
        assert not kernels.can_run(trial, OnGPU()) and not kernels.can_run(trial, OnGPU())
        assert kernels.can_run(lambda device: None, OnGPU())
    assert caplog.text.count("cuda:0 (Failed to find C compiler.)") == 1


def test_a_trial_without_memory_says_nothing_of_kernels(caplog):
    """Other operations would round otherwise on this rank than on its replicas."""

    class OnGPU:
        is_cuda, device = True, torch.device("cuda", 0)

    def trial(device):
        if not failures:
            failures.append(device)
            raise torch.OutOfMemoryError

    failures = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernels, "triton", object())
        with pytest.raises(torch.OutOfMemoryError):
            kernels.can_run(trial, OnGPU())
        assert kernels.can_run(trial, OnGPU())
    assert not caplog.text


def trained_on_columns(with_kernels):
    """Parameters and state after steps where each of two ranks has one block of each row."""
    interpreted(code_kernels)
    code_kernels.fits = lambda tensor: with_kernels
    mesh, generator = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(0)
    weight, *gradients = torch.randn(3, 16, 512, generator=generator) * torch.logspace(-3, 3, 16)[:, None]
    parameter = nn.Parameter(distribute_tensor(weight, mesh, [Shard(1)], src_data_rank=None))
    optimizer = shardopt.keyed("adamw", {"w": parameter}, lr=0.1, state_dtype=torch.uint8)
    for gradient in gradients:
        parameter.grad = distribute_tensor(gradient, mesh, [Shard(1)], src_data_rank=None)
        optimizer.step()
    entries = [value for value in optimizer.state[parameter].values() if isinstance(value, DTensor)]
    return [each.to_local().detach() for each in (parameter, *entries)]


@needs_triton
def test_ranks_that_have_one_block_of_each_row_have_the_bits_of_torchs_operations():
    wanted, actual = (run_ranks(2, trained_on_columns, with_kernels) for with_kernels in (False, True))
    for here, there in zip(wanted, actual, strict=True):
        assert len(here) == 5 and all(map(torch.equal, here, there))


@needs_triton
def test_the_trial_runs_all_kernels():
    assert run_ranks(1, try_kernels, backend=None) == [None]


def try_kernels():
    interpreted(code_kernels)
    code_kernels._try(torch.device("cpu"))
