"""Triton's interpreter on a rank, which has to be chosen before Triton is imported: here it is imported again."""

import importlib
import os
import sys

import torch

from shardopt.runtime import kernels


def interpreted(*modules):
    """Makes kernels run on the CPU until this process ends; imports their modules again."""
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" and "_C" not in name]:
        del sys.modules[name]
    for module in (kernels, *modules):
        importlib.reload(module)


def device_here():
    """The GPU, or the CPU under the interpreter."""
    return "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
