"""Makes the state of torch's optimizers within another library's optimizer by names, as torchrec's wrappers.

Their own `init_state` is a step on zero gradients: it decays weights, which nothing takes back, and makes state of
parameters that had none when they were saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

from shardopt.checkpoint.format.manifest import Manifest
from shardopt.checkpoint.loading.torchs.made_state import TorchsState, stored_state
from shardopt.state.param_groups import PARAMS
from shardopt.state.state import PartialStateful, RestoreTarget, Tied


def torchs_within(
    target: RestoreTarget, keys: Iterable[str], manifest: Manifest, tied: Tied, saved_as: Callable[[], Any]
) -> list[TorchsState]:
    """Returns a `TorchsState` for each of torch's optimizers within an optimizer that has its parameters by name.

    Args:
        target, keys, manifest, tied, saved_as: as for `torchs_state`.
    """
    optimizer, params = target.object, getattr(target.object, "params", None)
    is_others = isinstance(optimizer, Optimizer) and not isinstance(optimizer, PartialStateful)
    if not is_others or not isinstance(params, Mapping):
        return []
    names = {id(parameter): name for name, parameter in params.items()}
    stored = stored_state(target, keys, manifest, {tied.get(name, name): name for name in params})
    found = []
    for inner in _innermost(optimizer):
        parameters = [each for group in inner.param_groups for each in group[PARAMS] if id(each) in names]
        own = {names[id(each)]: each for each in parameters}
        saved = {name: stored[tied.get(name, name)] for name in own if tied.get(name, name) in stored}
        found.append(TorchsState(inner, own, saved, (), saved_as))
    return found


def _innermost(node: Any, above: tuple[Any, ...] = ()) -> Iterator[Optimizer]:
    """Yields the optimizers in an optimizer's attributes, and in theirs, that are around no other.

    Args:
        above: those around this one, which it may know.
    """
    if not isinstance(node, Optimizer):
        for each in node if isinstance(node, list | tuple) else ():
            yield from _innermost(each, above)
        return
    if any(each is node for each in above):
        return
    values = [value for name, value in vars(node).items() if name != "param_groups"]
    within = [each for value in values for each in _innermost(value, (*above, node))]
    if within or hasattr(node, "init_state"):
        yield from within
    else:
        yield node
