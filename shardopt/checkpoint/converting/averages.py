"""Finds averages of weights in a checkpoint, and the tensors that they are averages of.

ema.state.layers.0.weight.ema, ema.state.__averaging.n_averaged      of EMA and SWA: "ema"
swa.module.layers.0.weight, swa.n_averaged                           of torch's AveragedModel: "swa"
model.layers.0.weight                                                what both are averages of
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from shardopt.checkpoint.format.manifest import StoredTensors
from shardopt.errors import MismatchError, Problem
from shardopt.state.param_groups import AVERAGING, N_AVERAGED

_OWN = f"state.{AVERAGING}.{N_AVERAGED}"
_OF_TORCH = "module."
_MASTER = ".master"


@dataclass(frozen=True)
class Averages:
    """Averages that were saved together.

    Args:
        by_name: the key of each, by the name of its weight in the model.
        keys: all that belongs to them.
        models: what stands before these names in the keys of the weights, for each model that has them all.
    """

    by_name: Mapping[str, str]
    keys: frozenset[str]
    models: tuple[str, ...]


def averages_in(tensors: StoredTensors) -> dict[str, Averages]:
    """Returns the averages in a checkpoint, by the app's key for them.

    An AveragedModel without the model that it is of is taken for a model.
    """
    found: dict[str, tuple[dict[str, str], frozenset[str], bool]] = {}
    for key in tensors:
        if key == _OWN or key.endswith(f".{_OWN}"):
            root, before = key.removesuffix(_OWN), f"{key.removesuffix(_OWN)}state."
            keys = frozenset(each for each in tensors if each.startswith(before))
            by_name = {each.removeprefix(before).rpartition(".")[0]: each for each in keys - {key}}
        elif key == N_AVERAGED or key.endswith(f".{N_AVERAGED}"):
            root = key.removesuffix(N_AVERAGED)
            before = f"{root}{_OF_TORCH}"
            by_name = {each.removeprefix(before): each for each in tensors if each.startswith(before)}
            keys = frozenset((*by_name.values(), key))
        else:
            continue
        if by_name:
            found[root.removesuffix(".")] = by_name, keys, key.endswith(_OWN)
    taken = frozenset(key for _, keys, _ in found.values() for key in keys)
    averages = {
        root: (Averages(by_name, keys, tuple(_models(by_name, tensors.keys() - taken))), is_own)
        for root, (by_name, keys, is_own) in found.items()
    }
    return {root: each for root, (each, is_own) in averages.items() if is_own or each.models}


def _models(names: Collection[str], keys: Collection[str]) -> Iterator[str]:
    """Yields each prefix under which keys have all of these names."""
    name = max(names, key=len)
    for key in sorted(keys):
        before = key.removesuffix(name)
        if key.endswith(name) and (not before or before.endswith(".")) and all(before + each in keys for each in names):
            yield before


def with_averages(tensors: StoredTensors, weights: str) -> tuple[StoredTensors, dict[str, str]]:
    """Returns the tensors with averages in place of the weights, and the averages' own keys by the weights' keys.

    What has no average is as it is. Without the model the averages have the names that its parameters have.

    Args:
        weights: the key that the app has the averages under.

    Raises:
        MismatchError: there are no such averages, or several models that they may be of.
    """
    there = averages_in(tensors)
    chosen = there.get(weights)
    if chosen is None:
        known = f"one of {', '.join(map(repr, sorted(there)))}" if there else "averages in the checkpoint"
        problem = Problem(f"weights={weights!r}", "no averages", known, "name the key that the app has them under")
        raise MismatchError("averages cannot take the place of weights", [problem], code="cannot-convert")
    if len(chosen.models) > 1:
        found = f"{len(chosen.models)} models of these names ({', '.join(chosen.models[:4])})"
        remedy = "leave the others out with skip=..., a regex of stored keys"
        problem = Problem(f"weights={weights!r}", found, "one that they are averages of", remedy)
        raise MismatchError("averages cannot take the place of weights", [problem], code="cannot-convert")
    rest = {key: each for key, each in tensors.items() if key not in chosen.keys}
    if chosen.models:
        averages = {_stored(tensors, chosen.models[0] + name): key for name, key in chosen.by_name.items()}
        instead = {key: averages[at] for key in rest if (at := _stored(tensors, key)) in averages}
    else:
        instead = dict(chosen.by_name)
        rest |= {name: tensors[key]._replace(path=(name,)) for name, key in instead.items()}
    rest |= {
        key: tensors[average]._replace(path=rest[key].path, tied_to=rest[key].tied_to)
        for key, average in instead.items()
    }
    return StoredTensors(rest), instead


def with_masters(
    tensors: StoredTensors, stored_as: Mapping[str, str], is_state: Callable[[str], bool]
) -> tuple[StoredTensors, dict[str, str]]:
    """Returns the tensors with averages also in place of the fp32 masters of which a load makes these weights.

    A master of which it is not clear whose it is goes. Also returns the averages' keys by the masters' keys.

    Args:
        stored_as: as from `with_averages`.
        is_state: whether a key is of an optimizer.
    """
    masters = [key for key in tensors if key.endswith(_MASTER) and is_state(key)]
    by_end: dict[str, list[str]] = {}
    for key in [key for key in tensors if not is_state(key)] if masters else ():
        for end in _ends(key):
            by_end.setdefault(end, []).append(key)
    instead: dict[str, str] = {}
    made = dict(tensors.items())
    for key in masters:
        name = key.removesuffix(_MASTER)
        weights = next((by_end[end] for end in _ends(name) if end in by_end), [])
        average = tensors[weights[0]] if len(weights) == 1 else None
        if average is None or average.layout.shape != tensors[key].layout.shape:
            del made[key]
        elif weights[0] in stored_as:
            instead[key] = stored_as[weights[0]]
            made[key] = average._replace(path=tensors[key].path, dtype=tensors[key].dtype, tied_to=None)
    return StoredTensors(made), instead


def _ends(key: str) -> Iterator[str]:
    """Yields the ends of a key, the longest first."""
    parts = key.split(".")
    return (".".join(parts[at:]) for at in range(len(parts)))


def _stored(tensors: StoredTensors, key: str) -> str:
    """Returns the key that stores the memory of a tied tensor."""
    return tensors[key].tied_to or key
