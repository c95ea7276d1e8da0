"""Finds what has changed in an app since its step was saved, by counters of writes, options and plain values.

A step is saved once, so that such changes are in no checkpoint. Weights that are written and put back, as by a swap of
averages, count as changed. Nothing is known of other objects, of tensors that are replaced, or of writes that torch
does not count, as steps of keyed optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import ref

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.runtime.torch_gradients import shards_of
from shardopt.sharding.view import versions_of
from shardopt.state.param_groups import PARAMS
from shardopt.state.paths import PARAM_GROUPS, Path, join

_MOST_NAMED = 8
_PLAIN = (bool, int, float, str, type(None))

Seen = dict[tuple[str, str], tuple[ref[Tensor] | None, Any]]
"""What an app has, by the key of a module ("" for others) and a name."""


def seen_in(objects: Iterator[tuple[Path, Any]]) -> Seen:
    """Returns what is known of the objects of an app, by their paths. Local."""
    seen: Seen = {}
    for path, value in objects:
        key = join(path)
        for within, name, part in _parts_of(key, value):
            if isinstance(part, Tensor):
                seen[within, name] = ref(part), versions_of(part)
            elif isinstance(part, _PLAIN) or (isinstance(part, tuple) and all(isinstance(x, _PLAIN) for x in part)):
                seen[within, name] = None, repr(part)
    return seen


def changed_since(before: Seen, now: Seen) -> list[str]:
    """Returns what has changed, as texts."""
    names: dict[str, list[str]] = {}
    for (within, name), (tensor, content) in now.items():
        of, was = before.get((within, name), (tensor, None))
        is_same = tensor is None or of is None or of() is tensor()
        if was != content and is_same and not (tensor is not None and was is None):
            names.setdefault(within, []).append(name)
    texts = names.pop("", [])
    texts += [f"tensors of {within} ({len(each)}, such as {each[0]})" for within, each in names.items()]
    return texts if len(texts) <= _MOST_NAMED else [*texts[:_MOST_NAMED], f"{len(texts) - _MOST_NAMED} more"]


def _parts_of(key: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    if isinstance(value, Module):
        shards = list(shards_of(value))  # of which the module may have gathered copies
        parameters = enumerate(shards) if shards else value.named_parameters()
        for name, each in (*parameters, *value.named_buffers()):
            yield key, str(name), each
    elif isinstance(value, Optimizer):
        for number, group in enumerate(value.param_groups):
            for name, option in group.items() if isinstance(group, Mapping) else ():
                if name != PARAMS:
                    yield "", join((key, PARAM_GROUPS, number, name)), option
    else:
        yield "", key, value
