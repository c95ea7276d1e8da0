"""A registered kind of `pieces` and `gradients` alone: its buffer of gradients is what steps, scalers and zeros see."""

import pytest
import torch

import shardopt
from shardopt.errors import GradientError
from shardopt.sharding import Box, TensorKind, register_kind


class Buffered(torch.Tensor):
    """A whole parameter, with a buffer of gradients beside it."""

    @staticmethod
    def __new__(cls, memory):
        made = torch.Tensor._make_wrapper_subclass(cls, memory.shape, dtype=memory.dtype, requires_grad=True)
        made.memory, made.buffer = memory, torch.zeros(2, *memory.shape)[0]  # a view, as in a buffer of many
        return made

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        raise AssertionError(f"{operation} on a buffered tensor")


class BufferedKind(TensorKind):
    def pieces(self, tensor):
        return [(Box((0,), tuple(tensor.memory.shape)), tensor.memory)]

    def gradients(self, tensor):
        return [tensor.buffer]


@pytest.fixture
def param():
    register_kind(Buffered, BufferedKind())
    return Buffered(torch.zeros(3))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_clears_what_the_kind_gives_as_gradients(param, set_to_none, caplog):
    optimizer = shardopt.keyed("sgd", {"w": param}, lr=1.0)
    for steps in (1, 2):
        param.buffer.add_(1.0)
        optimizer.step()
        assert param.memory.tolist() == [-steps] * 3
        optimizer.zero_grad(set_to_none)
        assert not param.buffer.any()
    assert "moves nothing" not in caplog.text


def test_torchs_scaler_is_refused_where_a_kind_has_gradients(param):
    plain = torch.nn.Parameter(torch.zeros(2))
    optimizer = shardopt.keyed("sgd", {"w": param, "plain": plain}, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(plain.sum()).backward()
    param.buffer.fill_(1024.0)
    with pytest.raises(GradientError, match="shards with gradients of their own"):
        scaler.step(optimizer)
    assert not param.memory.any() and not plain.any()
