"""Finds tensors that their module loads from another shape: buffers and unsharded parameters.

Buffers of torch's observers and fake quantization have another shape until the first batch, and take the stored one.
Position embeddings are interpolated. Classes that only convert old state have the same hook (batch norm), so that a
copy of the module tries the load.
"""

from __future__ import annotations

import logging

from torch import Tensor
from torch.nn import Module, Parameter

from shardopt.runtime.torch_gradients import loads_other_shape
from shardopt.state.state import FlatState, Leaf

_log = logging.getLogger("shardopt.checkpoint")


def resized_tensor(leaf: Leaf, shape: tuple[int, ...], flat: FlatState) -> Tensor | None:
    """Returns a new tensor of the stored shape, if the leaf is of a module that takes that; None otherwise."""
    if type(leaf.value) not in (Tensor, Parameter):
        return None
    target = next((each for each in flat.targets if each.path == leaf.path[:-1]), None)
    if target is None or not isinstance(target.object, Module):
        return None
    plain = str(leaf.path[-1])
    name = next((own for own, each in target.plain_names.items() if each == plain), plain)
    try:
        module = target.object.get_submodule(name.rpartition(".")[0])
    except AttributeError:
        return None
    new, own = leaf.value.new_empty(shape), name.rpartition(".")[2]
    try:
        return new if loads_other_shape(module, own, new) else None
    except Exception as error:
        _log.debug("a copy of %s cannot try a load: %r", type(module).__name__, error)
        return None
