"""Stand-ins for storages, tensors and parameters in torch's pickles: the places of their bytes in the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

from shardopt.checkpoint.format.constants import DTYPES, MOST_DIMENSIONS, Dtype, all_sizes, is_shape
from shardopt.checkpoint.sources.pickled.stand_ins import Known, StandIn, Unknown
from shardopt.checkpoint.sources.pickled.zip_archive import ZipMember


class TensorRecord(NamedTuple):
    """A tensor in an archive: its elements are at `begin + itemsize * sum(index[d] * strides[d])`.

    `begin` is the offset in the file of its first element; `storage_begin` and `storage_nbytes` tell where the storage
    lies that all its elements are in, `crc32` is that of the whole storage (None where the archive has none), and
    `storage_key` is equal for tensors that share a storage.
    """

    dtype: Dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int
    storage_begin: int
    storage_nbytes: int
    crc32: int | None
    storage_key: str


class _StorageClass(Unknown):
    """The class of a storage. `dtype` is None for a storage of bytes, whose dtype comes with the tensor."""

    __slots__ = ("dtype",)

    def __init__(self, name: str, dtype: Dtype | None) -> None:
        super().__init__(name)
        self.dtype = dtype


class TorchDtype(Unknown):
    """A dtype of torch; not storable as a value by itself."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: Dtype) -> None:
        super().__init__(f"torch.{dtype.name}")
        self.dtype = dtype


class _Storage(StandIn):
    __slots__ = ("dtype", "key", "member")

    def __init__(self, name: str, dtype: Dtype | None, key: str, member: ZipMember) -> None:
        super().__init__(name)
        self.dtype = dtype
        self.key = key
        self.member = member


def storage_in(members: Mapping[str, ZipMember], prefix: str, reference: Any) -> Unknown:
    """Returns the stand-in for a storage of an archive. Raises TypeError or ValueError if the archive lacks it.

    Args:
        members: of the archive.
        prefix: of the names of those that are storages.
        reference: to it, in the pickle of the archive.
    """
    if type(reference) is not tuple:
        raise TypeError("a reference that is no tuple")
    tag, kind, key, _, count = reference
    if tag != "storage" or type(key) is not str or type(count) is not int or not isinstance(kind, Unknown):
        raise TypeError("a reference to what is no storage")
    if not isinstance(kind, _StorageClass):
        return Unknown(kind.name)
    member = members[prefix + key]
    if count * (kind.dtype.itemsize if kind.dtype else 1) != member.nbytes:
        raise ValueError("a storage of another size")
    return _Storage(kind.name, kind.dtype, key, member)


def _tensor(storage: Any, offset: Any, sizes: Any, strides: Any, *rest: Any) -> TensorRecord | Unknown:
    """Stands for `_rebuild_tensor_v2`; ignores requires_grad, hooks and metadata."""
    dtype = storage.dtype if isinstance(storage, _Storage) else None
    return _record(storage, dtype, offset, sizes, strides, rest[2] if len(rest) > 2 else None)


def _tensor_of_dtype(
    storage: Any, offset: Any, sizes: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, metadata: Any = None
) -> TensorRecord | Unknown:
    """Stands for `_rebuild_tensor_v3`, for dtypes without a class of storages."""
    if not isinstance(dtype, Unknown):
        raise TypeError("a tensor without a dtype")
    if not isinstance(dtype, TorchDtype):
        return Unknown(dtype.name)
    return _record(storage, dtype.dtype, offset, sizes, strides, metadata)


def _record(
    storage: Any, dtype: Dtype | None, offset: Any, sizes: Any, strides: Any, metadata: Any
) -> TensorRecord | Unknown:
    if not isinstance(storage, _Storage):
        if isinstance(storage, Unknown):
            return Unknown(storage.name)
        raise TypeError("a tensor without a storage")
    if dtype is None:
        return Unknown(storage.name)
    if metadata:
        return Unknown("torch.Tensor (conjugated or negated)")  # its bytes are not its values
    if type(sizes) is not tuple or type(strides) is not tuple or len(sizes) != len(strides):
        raise TypeError("a tensor without a shape")
    if len(sizes) > MOST_DIMENSIONS or not all_sizes([offset, *sizes, *strides]) or not is_shape(sizes):
        raise ValueError("a shape, stride or offset that is none")
    count = prod(sizes)
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    member = storage.member
    if count and (last + 1) * dtype.itemsize > member.nbytes:
        raise ValueError("a tensor beyond its storage")
    begin = member.begin + (offset * dtype.itemsize if count else 0)
    return TensorRecord(dtype, sizes, strides, begin, member.begin, member.nbytes, member.crc32, storage.key)


def _parameter(data: Any, _requires_grad: Any, _hooks: Any, _state: Any = None) -> Any:
    """Stands for `_rebuild_parameter` and `_rebuild_parameter_with_state`; drops attributes."""
    if not isinstance(data, TensorRecord | Unknown):
        raise TypeError("a parameter that is no tensor")
    return data


def _with_attributes(function: Any, kind: Any, arguments: Any, _state: Any) -> Any:
    """Stands for `_rebuild_from_type_v2`, by which torch pickles subclasses, and tensors with attributes."""
    if not isinstance(function, Unknown) or not isinstance(kind, Unknown) or type(arguments) is not tuple:
        raise TypeError("a tensor that is none")
    if type(kind) is not Known or kind.name not in _TENSOR_CLASSES:
        return Unknown(kind.name)
    if type(function) is not Known or function.name not in _REBUILD:
        return Unknown(function.name)
    return function.call(*arguments)


def _never(*_arguments: Any) -> Any:
    raise TypeError("a tensor that is made from nothing")


_REBUILD: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
}
_TENSOR_CLASSES = dict.fromkeys(
    ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"), _never
)
_STORAGE_CLASSES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
}

DTYPE_GLOBALS: Mapping[str, TorchDtype] = {f"torch.{dtype.name}": TorchDtype(dtype) for dtype in DTYPES.values()}
"""Stand-ins for the dtypes that can be stored."""

TENSOR_GLOBALS: Mapping[str, Callable[..., Any] | Any] = {
    **_REBUILD,
    **_TENSOR_CLASSES,
    "torch._tensor._rebuild_from_type_v2": _with_attributes,
    **{
        f"torch.{kind}Storage": _StorageClass(f"torch.{kind}Storage", DTYPES[dtype])
        for kind, dtype in _STORAGE_CLASSES.items()
    },
    **{name: _StorageClass(name, None) for name in ("torch.storage.UntypedStorage", "torch.UntypedStorage")},
    **DTYPE_GLOBALS,
}
"""Stand-ins for the globals that torch writes for tensors and parameters."""
