"""Plain tensors of every make: one box, their own memory; and what is no plain tensor is refused."""

import pytest
import torch
from torch.nn.parameter import UninitializedParameter
from torch.testing._internal.two_tensor import TwoTensor

from shardopt.errors import LayoutError
from shardopt.sharding.box import whole
from shardopt.sharding.layout import Layout
from shardopt.sharding.view import view_of

PLAIN = {
    "contiguous": lambda: torch.arange(12.0).reshape(3, 4),
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "sliced": lambda: torch.arange(60).reshape(5, 12)[1:4, ::3],
    "expanded": lambda: torch.ones(1, 3).expand(4, 3),
    "zero_dimensional": lambda: torch.tensor(3.0),
    "empty": lambda: torch.zeros(3, 0, 2),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2, 3)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.ones(2, 3), requires_grad=False),
    "buffer": lambda: torch.nn.Buffer(torch.ones(2)),
    "result of autograd": lambda: torch.ones(2, requires_grad=True) * 2,
    "complex": lambda: torch.ones(2, dtype=torch.complex64),
    "bool": lambda: torch.ones(2, dtype=torch.bool),
    "bfloat16": lambda: torch.ones(2, dtype=torch.bfloat16),
    "meta": lambda: torch.ones(2, 2, device="meta"),
}


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_plain_tensor_is_one_box_in_its_own_memory(make):
    tensor = make()
    view = view_of(tensor)
    assert view.shape == tuple(tensor.shape) and view.dtype == tensor.dtype
    (piece,) = view.pieces
    assert piece.box == whole(tensor.shape)
    assert view.layout == Layout.replicated(tuple(tensor.shape))
    assert view.layout.holders is None and not view.layout.local
    assert piece.tensor.stride() == tensor.stride() and piece.tensor.shape == tensor.shape
    assert not piece.tensor.requires_grad
    if tensor.device.type != "meta":
        assert piece.tensor.data_ptr() == tensor.data_ptr()
        assert torch.equal(piece.tensor, tensor)


def test_writes_through_the_view_are_seen_by_the_version_of_the_tensor():
    param = torch.nn.Parameter(torch.zeros(3))
    before = param._version
    view_of(param).pieces[0].tensor.fill_(1.0)
    assert param._version > before and param.tolist() == [1.0, 1.0, 1.0]


def test_equal_shapes_share_one_layout():
    assert view_of(torch.zeros(3, 4)).layout is view_of(torch.ones(3, 4, dtype=torch.int32)).layout


class NoMemory(torch.Tensor):
    """As torch's MaskedTensor: says what it is made of to nobody."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2,))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


REFUSED = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse", "to_dense"),
    "jagged": (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "jagged", "to_dense"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested", "to_padded_tensor"),
    "subclass": (lambda: TwoTensor(torch.ones(2), torch.ones(2)), "TwoTensor", "wraps"),
    "subclass without memory": (lambda: NoMemory(), "NoMemory", "wraps"),
    "conjugated": (lambda: torch.ones(2, dtype=torch.complex64).conj(), "conjugated", "resolve_conj"),
    "negated": (lambda: torch.ones(2, dtype=torch.complex64).conj().imag, "negated", "resolve_neg"),
    "lazy": (lambda: UninitializedParameter(), "lazy", "run the module"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("make", "fragment", "remedy"), REFUSED.values(), ids=REFUSED)
def test_tensor_whose_elements_are_not_its_memory_is_refused(make, fragment, remedy):
    with pytest.raises(LayoutError) as caught:
        view_of(make(), "some.key")
    (problem,) = caught.value.problems
    assert problem.key == "some.key"
    assert fragment in problem.found and remedy in problem.remedy
