"""LocalShardsWrapper: any number of local shards inside one DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor


class Wrapper(Protocol):
    """The methods that torch's LocalShardsWrapper and torchrec's copy of it share, as they have no common base."""

    def local_shards(self) -> list[Tensor]: ...
    def local_offsets(self) -> list[torch.Size]: ...
    def local_sizes(self) -> list[torch.Size]: ...


def is_wrapper(tensor: Any) -> TypeGuard[Wrapper]:
    """Whether it is a LocalShardsWrapper, of torch or of torchrec."""
    return type(tensor) is not Tensor and hasattr(tensor, "local_shards") and hasattr(tensor, "local_offsets")


def wrapper_like(like: Wrapper, shards: Sequence[Tensor]) -> Tensor:
    """Wraps other shards at the same offsets, in the same class."""
    # Without shards a wrapper still tells of one (empty) chunk, hence the zip.
    offsets = [tuple(offsets) for _, offsets in zip(shards, like.local_offsets(), strict=False)]
    make: Any = type(like)
    made: Tensor = make(list(shards), offsets)
    return made
