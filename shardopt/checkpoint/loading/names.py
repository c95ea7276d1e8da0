"""A checkpoint under the names of an app; here for the simple case, in which stored keys are the app's keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from shardopt.checkpoint.format.manifest import Manifest
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.state.param_groups import ALGORITHM, other_algorithm
from shardopt.state.paths import Path
from shardopt.state.state import FlatState


@dataclass(frozen=True, slots=True)
class Names:
    """A checkpoint under the names of an app.

    Args:
        manifest: with the app's keys and paths, without what is not selected.
        renamed: key of the app → key in the data files, where they differ.
        chosen: the app's keys that are to be loaded.
        aliases: key of the manifest → the key of the app that is declared to stand for it, and is in the manifest too.
        incomplete: key of state that the manifest is without, as it is of no use alone → what it lacks, for the log.
    """

    manifest: Manifest
    renamed: Mapping[str, str]
    chosen: frozenset[str]
    aliases: Mapping[str, str]
    incomplete: Mapping[str, str] = field(default_factory=dict)


def names_as_stored(reader: CheckpointReader, flat: FlatState) -> Names | None:
    """Returns a checkpoint of our own unchanged; None if a key of it is none of the app's.

    Args:
        flat: an app in which no names are declared to stand for others.
    """
    manifest, source, here = reader.manifest, reader.source, flat.leaves.keys()
    is_own = not (source.is_foreign or source.unread)
    if is_own and all(here >= stored.keys() for stored in (manifest.tensors, manifest.values, manifest.per_rank)):
        return Names(manifest, {}, frozenset(here), {})
    return None


def stored_paths(manifest: Manifest) -> dict[str, Path]:
    """Returns the path of each stored key."""
    paths = {key: tensor.path for key, tensor in manifest.tensors.items()}
    paths.update((key, path) for key, (path, _) in manifest.values.items())
    paths.update(manifest.per_rank)
    return paths


def saved_by_another(key: str, flat: FlatState, manifest: Manifest) -> str:
    """Returns the algorithm that has saved a parameter's options, if it is known to be another than steps it here."""
    stored, leaf = manifest.values.get(key, ((), None))[1], flat.leaves.get(key)
    if leaf is None or not (isinstance(stored, Mapping) and isinstance(leaf.value, Mapping)):
        return ""
    return other_algorithm(stored, str(leaf.value.get(ALGORITHM) or ""))


def owner_of(key: str, names: Collection[str]) -> tuple[str, str]:
    """Splits a key into the longest of some parameter names that it begins with, and the rest; ("", "") if none."""
    name = key
    while name and name not in names:
        name = name.rpartition(".")[0]
    return (name, key[len(name) + 1 :]) if name else ("", "")
