"""Masters, which step in the place of the parameters that are made of them: a load of parameters alone reaches them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from shardopt.sharding.view import local_tensors, versions_of


class HasMasters(Protocol):
    """An optimizer whose next step overwrites parameters by their masters."""

    def stepped_masters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each such parameter, and its master."""


_holders: WeakSet[HasMasters] = WeakSet()


def note_masters(holder: HasMasters) -> None:
    """Notes an optimizer that may have masters, as long as it is there."""
    _holders.add(holder)


class MastersBeforeLoad:
    """The masters of this process before something is loaded into tensors of the program. Local."""

    def __init__(self) -> None:
        self._seen = [
            (param, versions_of(param), master, versions_of(master))
            for holder in list(_holders)
            for param, master in holder.stepped_masters()
        ]

    @torch.no_grad()
    def follow(self) -> None:
        """Makes the masters again of parameters that were written since, and are no longer made of theirs.

        Not of those whose master was written as well: a load of both is whole.
        """
        for param, versions, master, versions_of_master in self._seen:
            if versions_of(param) == versions or versions_of(master) != versions_of_master:
                continue
            for local, into in zip(local_tensors(param), local_tensors(master), strict=True):
                if not torch.equal(local, into.to(local.dtype)):
                    into.copy_(local)
