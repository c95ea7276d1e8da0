"""The hashes of replicas: of the same bytes whatever their strides, at places that follow from the size alone."""

import math

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt.checkpoint.format.constants import DTYPES
from shardopt.checkpoint.saving.planning import replica_check as replicas
from shardopt.checkpoint.saving.planning.replica_check import contents_of, refuse_unknown_choice
from shardopt.sharding.view import view_of
from tests.support.drawn import examples

KIB = 1024


def hashed(tensor, which="sampled"):
    ((digest,),) = [boxes.values() for boxes in contents_of({"x": view_of(tensor)}, which).values()]
    return digest


def raw(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def sample(data, itemsize):
    """The hash of these bytes according to the documentation."""
    if len(data) <= 64 * KIB:
        return data
    elements, block = len(data) // itemsize, KIB // itemsize
    starts = [n * ((elements - block) // 63) for n in range(63)] + [elements - block]
    return b"".join(data[start * itemsize :][:KIB] for start in starts)


def tensor_of(numel, dtype):
    numbers = torch.randint(0, 256, (numel * DTYPES[dtype].itemsize,), dtype=torch.uint8)
    return (numbers % 2).view(torch.bool) if dtype == "bool" else numbers.view(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nbytes", [0, 16, 64 * KIB, 64 * KIB + 16, 900 * KIB])
def test_the_same_hash_for_any_strides(dtype, nbytes):
    plain = tensor_of(nbytes // DTYPES[dtype].itemsize, dtype)
    if plain.numel() % 4 == 0:
        plain = plain.reshape(4, -1)
    numbers = plain.view(replicas._OF_SIZE[plain.element_size()])  # torch cannot copy every float
    strided = numbers.t().contiguous().t().view(plain.dtype) if plain.ndim == 2 else plain
    for which in ("sampled", "all"):
        expected = raw(plain) if which == "all" else sample(raw(plain), plain.element_size())
        assert hashed(plain, which) == hashed(strided, which) == xxhash.xxh3_64_hexdigest(expected)


@settings(max_examples=examples(60))
@given(
    shape=st.lists(st.integers(1, 90), min_size=1, max_size=4).filter(lambda shape: math.prod(shape) < 1_000_000),
    dims=st.permutations(range(4)),
    step=st.integers(1, 3),
    dtype=st.sampled_from(["float64", "bfloat16", "uint8"]),
)
def test_any_view_is_hashed_as_its_copy(shape, dims, step, dtype):
    order = [dim for dim in dims if dim < len(shape)]
    larger = tensor_of(math.prod(shape) * step, dtype).reshape(*shape[:-1], shape[-1] * step)
    view = larger[..., ::step].permute(order)
    for which in ("sampled", "all"):
        assert hashed(view, which) == hashed(view.contiguous(), which)


def test_what_is_gathered_is_copied_in_batches(monkeypatch):
    """Of bounded size; a tensor may lie in several."""
    tensors = {str(i): tensor_of(rows * 100, "float32").reshape(100, rows).t() for i, rows in enumerate([3, 900, 5000])}
    views = {key: view_of(tensor) for key, tensor in tensors.items()}
    wanted = {which: contents_of(views, which) for which in ("sampled", "all")}
    monkeypatch.setattr(replicas, "_COPIED_BYTES", 100 * KIB)
    monkeypatch.setattr(replicas, "_PIECE_BYTES", 30 * KIB)
    assert {which: contents_of(views, which) for which in wanted} == wanted


def test_every_byte_of_a_small_tensor_and_the_ends_of_a_large_one_count():
    small = tensor_of(16 * KIB, "float32")
    large = tensor_of(1 << 20, "float32")
    for tensor, places in (
        (small, [0, 1, 10_000, -1]),
        (large, [0, 255, -256, -1, 255 + (large.numel() - 256) // 63]),
    ):
        before = hashed(tensor)
        for place in places:
            kept = tensor[place].clone()
            tensor.view(torch.int32)[place] ^= 1
            assert hashed(tensor) != before
            tensor[place] = kept
        tensor_hash = hashed(tensor)
        assert tensor_hash == before
    unseen = 256  # just behind the first block
    before = hashed(large), hashed(large, "all")
    large.view(torch.int32)[unseen] ^= 1
    assert hashed(large) == before[0]
    assert hashed(large, "all") != before[1]


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="found 'small'; required one of"):
        refuse_unknown_choice("small")
