"""State of torch's `AveragedModel` under the names that averages of ours (`EMA`, `SWA`) have in its place.

ema.n_averaged                    ema.state.__averaging.n_averaged
ema.module.layers.0.weight        ema.state.layers.0.weight.ema
ema.module.norm.running_mean      left out, where averages have no buffers
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardopt.checkpoint.format.manifest import Manifest, StoredTensors
from shardopt.checkpoint.matching.renaming import renamer
from shardopt.param_groups import N_AVERAGED, STATE
from shardopt.state import FlatState, Path, join


def under_names_of_averages(
    manifest: Manifest, flat: FlatState, rename: Mapping[str, str] | None
) -> tuple[Manifest, dict[str, str]]:
    """Returns a manifest with the names of ours where averages of torch's are stored, and new key → stored key.

    Where a rule of `rename` is for any of these keys nothing is changed.
    """
    stored_key: dict[str, str] = {}
    paths: dict[str, Path | None] = {}  # by stored key; None for what is left out
    for handback in flat.handbacks:
        before = f"{join(handback.path)}."
        names_of = getattr(handback.target, "names_of_averaged_model", None)
        if names_of is None or f"{before}{N_AVERAGED}" not in manifest.tensors:
            continue
        keys, renamed = [key for key in manifest.tensors if key.startswith(before)], renamer(rename)
        if all(renamed(key) == key for key in keys):
            in_state = names_of(key.removeprefix(before) for key in keys)
            for key in keys:
                below = in_state.get(key.removeprefix(before))
                paths[key] = None if below is None else (*handback.path, STATE, *below)
    if not paths:
        return manifest, {}
    tensors = []
    for key, tensor in manifest.tensors.items():
        path = paths.get(key, tensor.path)
        if path is not None:
            new = join(path) if key in paths else key
            stored_key[new] = key
            tensors.append((new, tensor._replace(path=path)))
    return replace(manifest, tensors=StoredTensors(tensors)), {
        new: key for new, key in stored_key.items() if new != key
    }
