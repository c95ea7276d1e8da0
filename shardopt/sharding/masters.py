"""Masters, which step in the place of the parameters that are made of them: a load of parameters alone is lost."""

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

    def undo(self) -> bool:
        """Whether the next step undoes what was loaded since: into parameters that their masters do not make.

        Not where the master was loaded as well. Changes nothing: who looks at another checkpoint puts the parameters
        back, and steps on from the masters.
        """
        return any(
            not torch.equal(local, made_of.to(local.device, local.dtype))
            for param, versions, master, versions_of_master in self._seen
            if versions_of(param) != versions and versions_of(master) == versions_of_master
            for local, made_of in zip(local_tensors(param), local_tensors(master), strict=True)
        )
