"""Masters, which step in the place of the parameters that are made of them: a load of parameters alone is lost."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch

from shardopt.sharding.view import local_tensors, versions_of

_holders: WeakSet[Any] = WeakSet()


def note_masters(holder: Any) -> None:
    """Notes an optimizer that may have masters, by which its next step overwrites parameters, as long as it is there.

    Args:
        holder: its `masters()` yields each parameter with its master, and the number of its steps; before the first a
            master is unused.
    """
    _holders.add(holder)


class MastersBeforeLoad:
    """The masters of this process before something is loaded into tensors of the program. Local."""

    def __init__(self) -> None:
        self._seen = [
            (*each, bool(each[2] > 0), [*map(versions_of, each)])
            for holder in list(_holders)
            for each in holder.masters()
        ]

    def settle(self) -> bool:
        """Makes the masters whose counters alone were loaded of their parameters, as these are by now.

        Otherwise masters that are older than their counters would replace the parameters.

        Returns:
            Whether the next step undoes what was loaded: into parameters that their masters do not make. Not where the
            master was loaded as well. Those are left as they are: who looks at another checkpoint puts the parameters
            back, and steps on from the masters.
        """
        is_lost = False
        for param, master, steps, had_stepped, before in self._seen:
            changed, is_loaded, is_counted = (
                versions_of(each) != version for each, version in zip((param, master, steps), before, strict=True)
            )
            if is_loaded or not (changed or is_counted):
                continue
            pairs = [*zip(local_tensors(param), local_tensors(master), strict=True)]
            if is_counted or not had_stepped:
                with torch.no_grad():
                    for local, own in pairs:
                        own.copy_(local)
            else:
                is_lost |= any(not torch.equal(local, own.to(local.device, local.dtype)) for local, own in pairs)
        return is_lost
