"""A checkpoint of others in the form that ours would have for an app.

Others have the groups of an optimizer as a list, or by parameter and option, and its state maybe by numbers:

    optim.param_groups.0.params, optim.param_groups.0.lr      as torch.distributed.checkpoint flattens nested state
    optim.param_groups.layers.0.weight.lr                     as torch's `flatten_optimizer_state_dict` does
    optim.param_groups                                        one list, as in a file of torch.save
    optim.state.0.exp_avg                                     the first parameter of the first group

All of these become `optim.param_groups.<name>`, a dict, and `optim.state.<name>.exp_avg`. Numbers become names by
"param_names" in the groups, or in the order of the app's own groups, where these are as many and as large. One group
may also be in the order of the parameters of the app's models, frozen ones included where it has as many; where that is
another order, numbers could mean either, and are refused. Checkpoints of our own have numbers where an early version
has saved an optimizer of torch's: there names are needed, or shapes that leave no doubt. Plain values are divided as
the app has them (`regroup_values.py` puts them together).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from torch.nn import Module

from shardopt.checkpoint.format.manifest import Manifest, StoredTensors
from shardopt.checkpoint.matching.names import Names
from shardopt.checkpoint.matching.parameters import ReadTensor, Stored, name_parameters
from shardopt.checkpoint.matching.renaming import (
    name_by_rules,
    names_by_rules,
    path_in_app,
    path_with_tail,
    refuse_collisions,
    renamer,
    roots_in,
    under_names_of,
)
from shardopt.names import names_under_wrappers
from shardopt.param_groups import NAMES_OF_TORCH, PARAM_GROUPS
from shardopt.state import FlatState, Index, Path, join


def foreign_under_names_of(
    manifest: Manifest,
    flat: FlatState,
    select: str | None,
    rename: Mapping[str, str] | None,
    read: ReadTensor,
    in_order: bool,
) -> Names:
    """As `under_names_of`, of a checkpoint of another format, or with numbers of parameters.

    Args:
        read: gives a stored tensor.
        in_order: whether the order of parameters may tell their names.

    A checkpoint of the state of a module alone, without a name for it, is that of the only module in the app.

    Raises:
        MismatchError: two stored keys get one name; or parameters have numbers, and it is not clear which are meant.
    """
    original = manifest
    optimizers = [each.path for each in flat.targets if each.groups is not None]
    new_key = names_by_rules(manifest, rename or {}, optimizers)
    if rename:
        manifest = _with_names_by_rules(manifest, rename, optimizers)
    prefix = _prefix_of_only_module([new_key[key] for key in manifest.tensors], flat)
    named = {key: prefix + new for key, new in new_key.items()}
    refuse_collisions(named.items())
    stored = Stored(
        tensors={named[key]: key for key in manifest.tensors},
        values={named[key]: value for key, (_, value) in manifest.values.items()},
        read=read,
        shape_of=lambda key: original.tensors[key].layout.shape,
        renamed=renamer(rename),
        numbered=numbered_roots(manifest),
        in_order=in_order,
    )
    for target in flat.targets:
        if target.groups is not None:
            name_parameters(target, flat, stored)
    values = dict(chain.from_iterable(_divided(key, value, flat) for key, value in stored.values.items()))
    roots = roots_in(flat)
    paths = {named[key]: path_with_tail(path, named[key]) for key, (path, _) in manifest.values.items()}
    adapted = replace(
        manifest,
        tensors=StoredTensors(
            (key, each._replace(path=path_in_app(key, path_with_tail(each.path, key), flat, roots)))
            for key, each in ((key, manifest.tensors[old]) for key, old in stored.tensors.items())
        ),
        values={key: (path_in_app(key, paths.get(key, ()), flat, roots), value) for key, value in values.items()},
        per_rank={named[key]: path_with_tail(path, named[key]) for key, path in manifest.per_rank.items()},
    )
    names = under_names_of(adapted, flat, select, None)
    old_key = {key: stored.tensors[names.renamed.get(key, key)] for key in names.manifest.tensors}
    old_per_rank = {new: key for key, new in named.items() if key in manifest.per_rank}
    old_key |= {key: old_per_rank[names.renamed.get(key, key)] for key in names.manifest.per_rank}
    return replace(names, renamed={key: old for key, old in old_key.items() if key != old})


def _with_names_by_rules(manifest: Manifest, rename: Mapping[str, str], roots: Sequence[Path]) -> Manifest:
    """Renames the parameters that groups by number tell the names of."""
    values = {}
    for key, (path, value) in manifest.values.items():
        at = path.index(PARAM_GROUPS) if PARAM_GROUPS in path else len(path)

        def renamed(names: Any, root: Path = path[:at]) -> Any:
            return [name_by_rules(name, root, rename, roots) for name in names]

        if path[at + 2 :] == (NAMES_OF_TORCH,) and isinstance(value, list):
            value = renamed(value)
        elif len(path) == at + 1 and isinstance(value, list):
            value = [
                {**group, NAMES_OF_TORCH: renamed(group[NAMES_OF_TORCH])}
                if isinstance(group, dict) and isinstance(group.get(NAMES_OF_TORCH), list)
                else group
                for group in value
            ]
        values[key] = path, value
    return replace(manifest, values=values)


def _prefix_of_only_module(keys: Collection[str], flat: FlatState) -> str:
    """Returns what keys lack to be those of the app's only module; nothing where some are the app's as they are."""
    modules = [join(each.path) for each in flat.targets if isinstance(each.object, Module)]
    if len(modules) != 1 or any(key in flat.leaves for key in keys):
        return ""
    prefix = f"{modules[0]}."
    own = {key.removeprefix(prefix) for key in flat.leaves if key.startswith(prefix)}
    return prefix if any(key in own for key in keys) or names_under_wrappers(keys, own) else ""


def _divided(key: str, value: Any, flat: FlatState) -> Iterator[tuple[str, Any]]:
    """Yields a value as it is, or what is in it where the app has leaves of their own for that."""
    below = f"{key}."
    in_app = key not in flat.leaves and any(each.startswith(below) for each in flat.leaves)
    if not in_app or not isinstance(value, dict | list):
        yield key, value
        return
    for part, child in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _divided(f"{below}{part}", child, flat)


def numbered_roots(manifest: Manifest) -> list[str]:
    """Returns the stored keys of optimizers that have groups by number, as torch's own save them."""
    roots: dict[str, None] = {}
    for path, value in manifest.values.values():
        if PARAM_GROUPS in path:
            at = path.index(PARAM_GROUPS)
            if isinstance([*path, value][at + 1], Index | list):
                roots[join(path[:at])] = None
        elif isinstance(value, dict) and isinstance(value.get(PARAM_GROUPS), list):
            roots[join(path)] = None
    return [*roots]
