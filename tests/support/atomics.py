"""What a GPU computes in an order of its own, by atomic operations: other bits each time."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class RefusesAtomics(TorchDispatchMode):
    """Refuses `index_add_` of floating point numbers, which may come to one place several times."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert operation.overloadpacket.__name__ != "index_add_" or not args[0].is_floating_point()
        return operation(*args, **(kwargs or {}))
