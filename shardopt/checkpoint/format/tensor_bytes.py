"""Views a tensor's memory as bytes, and bytes as tensors. Copies nothing."""

from __future__ import annotations

import ctypes
from math import prod

import torch
from torch import Tensor

from shardopt.checkpoint.format.constants import DTYPES, Dtype
from shardopt.errors import Problem, StateError

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
"""torch's dtype by the name of the stored one; for loops over all tensors, in which `torch_dtype` is too slow."""


def dtype_name(dtype: torch.dtype) -> str:
    """Returns torch's name of a dtype without the prefix "torch."."""
    return str(dtype).removeprefix("torch.")


STORED_DTYPES: dict[torch.dtype, Dtype] = {TORCH_DTYPES[name]: dtype for name, dtype in DTYPES.items()}
"""The stored form of each dtype that can be stored."""


def stored_dtype(dtype: torch.dtype, key: str) -> Dtype:
    """Returns the stored form of a dtype. Raises StateError for one without, such as a quantized dtype."""
    known = STORED_DTYPES.get(dtype)
    if known is None:
        problem = Problem(key, f"dtype {dtype}", f"one of {', '.join(DTYPES)}", "convert it before saving")
        raise StateError("a tensor cannot be stored", [problem])
    return known


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """Returns torch's dtype for a stored one."""
    return TORCH_DTYPES[dtype.name]


GIVEN_BACK = "a tensor whose memory was given back"
"""Memory freed as by `storage.resize_(0)`, with which sharded modules free what they have gathered."""


def has_no_memory(tensor: Tensor) -> bool:
    """Whether a tensor has elements without memory, so that touching them would end the process."""
    return not tensor.data_ptr() and tensor.numel() > 0


def address_of(tensor: Tensor) -> int:
    """Returns the address of a tensor's memory, 0 without any; on the meta device, a number that stands for it.

    There tensors have the same number if they would have the same address, as tied parameters do.
    """
    if not tensor.is_meta or not tensor.numel():
        return tensor.data_ptr()
    # torch keeps one Python object for each storage, as long as that lives.
    return (id(tensor.untyped_storage()) << 64) + int(tensor.storage_offset()) * tensor.element_size()


def is_plain_memory(tensor: Tensor) -> bool:
    """Whether the tensor's elements are contiguous bytes of this process, in C order."""
    return tensor.is_cpu and tensor.is_contiguous()  # views that conjugate or negate lazily have no boxes


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a tensor for which `is_plain_memory` holds, as writable bytes that keep the tensor alive.

    Through ctypes, because NumPy has no bfloat16 and no float8, and because for 10,000 small tensors the way through
    `Tensor.view` costs several times more.
    """
    nbytes = tensor.nbytes
    if nbytes == 0:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]  # from_address owns nothing, and the view holds `memory`
    return memoryview(memory).cast("B")


def flat_bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor in C order, uint8, on its device: a view if it is contiguous, else of a copy."""
    tensor = tensor.detach().contiguous()
    # Not by `view(-1)`: any stride of one element is contiguous, and stays.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


# Not `ctypes.memmove`, which releases the interpreter's lock: threads that copy a few bytes would wait for one another.
move_bytes = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(("memmove", ctypes.pythonapi))
"""Copies bytes: destination address, source address, number of bytes. The caller guarantees both addresses."""


def tensor_over(buffer: memoryview, begin: int, dtype: Dtype, shape: tuple[int, ...]) -> Tensor:
    """Returns a tensor whose memory is `buffer`, from byte `begin` on."""
    flat = torch.frombuffer(buffer, dtype=torch.uint8, offset=begin, count=prod(shape) * dtype.itemsize)
    return flat.view(torch_dtype(dtype)).reshape(shape)
