"""Finds the names that an app has for a checkpoint of any format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardopt.checkpoint.format.manifest import Manifest, StoredTensors
from shardopt.checkpoint.loading.import_keys import foreign_under_names_of, numbered_roots
from shardopt.checkpoint.loading.names import Names
from shardopt.checkpoint.loading.options import LoadOptions
from shardopt.checkpoint.loading.renaming import renamer, under_names_of
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.errors import FormatError, Problem
from shardopt.state.param_groups import N_AVERAGED
from shardopt.state.paths import STATE, Path, join
from shardopt.state.state import FlatState


def names_in_app(reader: CheckpointReader, flat: FlatState, options: LoadOptions) -> Names:
    """Returns the stored contents under the names of an app, by `select`, `rename` and `skip` of a load.

    Raises:
        FormatError: something is stored in a way that is not known, and not to be skipped.
        MismatchError: the rules of `rename` give two keys one name.
    """
    source, select, rename, skip = reader.source, options.select, options.rename, options.skip
    manifest = contents(reader, skip) if skip is not None or source.unread else reader.manifest
    manifest, of_torchs_averages = _under_names_of_averages(manifest, flat, rename)
    if source.is_foreign or numbered_roots(manifest):
        names = foreign_under_names_of(manifest, flat, select, rename, reader.read, source.is_foreign)
        names = names if source.keeps_empty_dicts else _with_empty_dicts(names, flat)
    else:
        names = under_names_of(manifest, flat, select, rename)
    if not of_torchs_averages:
        return names
    return replace(names, renamed={**names.renamed, **of_torchs_averages})


def _under_names_of_averages(
    manifest: Manifest, flat: FlatState, rename: Mapping[str, str] | None
) -> tuple[Manifest, dict[str, str]]:
    """Returns a manifest with our names for averages of torch's `AveragedModel`, and the mapping new → stored key.

        ema.n_averaged                    ema.state.__averaging.n_averaged
        ema.module.layers.0.weight        ema.state.layers.0.weight.ema
        ema.module.norm.running_mean      left out, where averages have no buffers

    Where a rule of `rename` is for any of these keys nothing is changed.
    """
    moved: dict[str, str] = {}
    paths: dict[str, Path | None] = {}  # by stored key; None for what is left out
    for each in flat.targets:
        before = f"{join(each.path)}."
        names_of = getattr(each.object, "names_of_averaged_model", None)
        if names_of is None or f"{before}{N_AVERAGED}" not in manifest.tensors:
            continue
        keys, renamed = [key for key in manifest.tensors if key.startswith(before)], renamer(rename)
        if all(renamed(key) == key for key in keys):
            in_state = names_of(key.removeprefix(before) for key in keys)
            for key in keys:
                below = in_state.get(key.removeprefix(before))
                paths[key] = None if below is None else (*each.path, STATE, *below)
    if not paths:
        return manifest, {}
    tensors = []
    for key, tensor in manifest.tensors.items():
        path = paths.get(key, tensor.path)
        if path is not None:
            new = join(path) if key in paths else key
            moved |= {new: key} if new != key else {}
            tensors.append((new, tensor._replace(path=path)))
    return replace(manifest, tensors=StoredTensors(tensors)), moved


def _with_empty_dicts(names: Names, flat: FlatState) -> Names:
    """Adds the app's empty dicts, if nothing is stored of them."""
    manifest = names.manifest
    empty = {key for key, leaf in flat.leaves.items() if type(leaf.value) is dict and not leaf.value}
    stored = (*manifest.tensors, *manifest.values, *manifest.per_rank) if empty else ()
    empty -= {key for key in empty if any(each == key or each.startswith(f"{key}.") for each in stored)}
    values: dict[str, tuple[Path, Any]] = {key: (flat.leaves[key].path, {}) for key in sorted(empty & names.chosen)}
    return replace(names, manifest=replace(manifest, values={**manifest.values, **values})) if values else names


def contents(reader: CheckpointReader, skip: str | None) -> Manifest:
    """Returns the manifest of a checkpoint without keys that match the regex `skip`.

    Raises:
        FormatError: something is stored in a way that is not known, and not to be skipped.
    """
    manifest = reader.manifest
    skipped = None if skip is None else re.compile(skip)
    remedy = "leave it out with skip=..., a regex of keys in the checkpoint"
    problems = [
        Problem(key, found, "a tensor or plain value", remedy)
        for key, found in sorted(reader.source.unread.items())
        if skipped is None or not skipped.search(key)
    ]
    if problems:
        raise FormatError(f"{reader.url} has what is not known to be read", problems)
    if skipped is None:
        return manifest
    return replace(
        manifest,
        tensors=StoredTensors((key, each) for key, each in manifest.tensors.items() if not skipped.search(key)),
        values={key: each for key, each in manifest.values.items() if not skipped.search(key)},
        per_rank={key: each for key, each in manifest.per_rank.items() if not skipped.search(key)},
    )
