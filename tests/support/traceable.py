"""Tensors that wrap others by torch's protocol, as libraries of quantized training have them."""

import torch
from torch.utils._pytree import tree_map_only


class Marked(torch.Tensor):
    """One tensor, marked for a conversion in the forward pass, as torchao's weights in float8 training are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(tensors, meta, size, stride):
        return Marked(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        args, kwargs = tree_map_only(Marked, lambda each: each.inner, (args, kwargs or {}))
        made = operation(*args, **kwargs)
        names = ("split", "clone", "view", "as_strided", "slice", "new_zeros", "empty_like", "_to_copy", "detach")
        stays = operation.__name__.partition(".")[0] in names
        return tree_map_only(torch.Tensor, Marked, made) if stays else made


class Coded(torch.Tensor):
    """Codes of one byte with a scale for each row, of which shards have theirs, and a table that all shards have."""

    @staticmethod
    def __new__(cls, codes, scales, table):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes, scales, table):
        self.codes, self.scales, self.table = codes, scales, table

    def __tensor_flatten__(self):
        return ["codes", "scales", "table"], None

    @staticmethod
    def __tensor_unflatten__(tensors, meta, size, stride):
        return Coded(**tensors)

    def decoded(self):
        return self.table[self.codes.long()] * self.scales[:, None]

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        name = operation.__name__.partition(".")[0]
        first = args[0]
        if name == "split":
            pairs = zip(first.codes.split(args[1]), first.scales.split(args[1]), strict=True)
            return [Coded(codes, scales, first.table) for codes, scales in pairs]
        if name in ("detach", "clone", "alias", "view"):  # in their own shape
            return Coded(
                *(each.clone() if name == "clone" else each for each in (first.codes, first.scales, first.table))
            )
        if name == "copy_":
            for into, each in zip((first.codes, first.scales, first.table), vars(args[1]).values(), strict=False):
                into.copy_(each)
            return first
        raise NotImplementedError(f"{operation} on codes")


def coded(rows, seed=0):
    """Makes random codes of so many rows, 8 columns."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(16, (rows, 8), dtype=torch.uint8, generator=generator)
    return Coded(codes, torch.rand(rows, generator=generator), torch.linspace(-1, 1, 16))
