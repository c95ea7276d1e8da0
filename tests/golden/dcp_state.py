"""The states that torch's distributed checkpoints in `dcp/` hold. Once they are stored, they must not change."""

import torch

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int64", "bool", "complex64")

VALUES = {
    "step": 7,
    "lr": 0.1,
    "none": None,
    "text": "ü",
    "bytes": b"\x00\xff",
    "tuple": (1, ("x", 2.5)),
    "list": [1, 2, "three"],
    "set": {1, 2},
    "dict": {"a": {"b": True}},
}
"""Those that are nested in dicts are entries of their own."""


def whole(name):
    """The value of a tensor in the state of kinds, over all ranks."""
    numbers = torch.arange(1.0, 31.0).reshape(6, 5)
    match name:
        case "bool":
            return numbers % 2 == 0
        case "complex64":
            return torch.complex(numbers, -numbers)
        case _ if name in DTYPES:
            return numbers.to(getattr(torch, name))
        case "transposed":
            return torch.arange(12.0).reshape(3, 4).t()
        case "scalar":
            return torch.tensor(2.5)
        case "empty":
            return torch.zeros(0, 4)
        case "columns":
            return numbers.t().contiguous()
        case "short":
            return torch.arange(3.0).reshape(1, 3)
        case "table":
            return torch.arange(28.0).reshape(7, 4)
        case "listed":
            return torch.arange(4, dtype=torch.int64)


KINDS = ("transposed", "scalar", "empty", "columns", "short", "table", "listed")


def filled(key, shape, dtype):
    """The value of a parameter or of its state in the states of AdamW, by its name."""
    numbers = torch.arange(float(torch.Size(shape).numel())) + len(key)
    return numbers.reshape(shape).to(dtype)
