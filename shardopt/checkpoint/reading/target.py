"""Memory of the program that is read into: whether it can be, and how it is filled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from shardopt.checkpoint.format.tensor_bytes import GIVEN_BACK, dtype_name, has_no_memory
from shardopt.checkpoint.progress import Progress
from shardopt.checkpoint.reading.fetch import fetch
from shardopt.checkpoint.reading.open_file import OpenFile, ReadRequest
from shardopt.errors import Problem
from shardopt.sharding.pieces import View, elements_overlap
from shardopt.staging_fence import wait_for_copies


def describe_tensor(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Shape and dtype of a tensor, for error messages."""
    return f"a tensor of {dtype_name(dtype)} {list(shape)}"


def memory_problem(key: str, view: View) -> Problem | None:
    """The reason why a tensor cannot be read into: no memory, or elements that share it. None where it can be."""
    for piece in view.pieces:
        if has_no_memory(piece.tensor):
            if piece.tensor.is_meta:
                state, remedy = "a tensor on the meta device", "call to_empty(device=...) first"
            else:
                state, remedy = GIVEN_BACK, "load while its parameter is there"
            return Problem(key, state, "memory to load into", remedy)
        if elements_overlap(piece.tensor):
            shared = f"elements that share memory (strides {piece.tensor.stride()})"
            return Problem(key, shared, "a place for each element", "call contiguous() first")
    return None


def fill(requests: Sequence[tuple[OpenFile, ReadRequest]], progress: Progress | None = None) -> int:
    """Fetches into memory that the program uses; returns the bytes read. Arguments and errors are those of `fetch`."""
    wait_for_copies()  # a save in the background may still be copying what this changes
    # Autograd is to refuse a backward through values that are gone: what is read past torch counts as no change.
    increment_version([request.target for _, request in requests])
    return fetch(requests, progress)
