"""The contents of an open checkpoint by key, from only its manifest. Needs no torch; `reader.py` reads tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from shardopt.checkpoint.format.constants import damaged
from shardopt.checkpoint.format.manifest import Manifest
from shardopt.checkpoint.sources.source import Source
from shardopt.errors import MismatchError, Problem
from shardopt.sharding.box import cover_faults
from shardopt.state.paths import Path


class CheckpointContents:
    """The keys and values of a checkpoint. Local: involves no other rank.

    Args:
        source: the checkpoint as it lies in its storage.

    Raises:
        CorruptionError: its boxes do not make up its tensors.
    """

    source: Source
    """The checkpoint as a source, which reads its storage."""
    manifest: Manifest
    """The contents by key."""
    url: str
    is_remote: bool
    """Whether reading goes over a network."""
    digest: str
    """A text that is equal for equal contents."""
    left_out: tuple[str, ...] = ()
    """The stored keys that the caller has left out."""

    def __init__(self, source: Source) -> None:
        self.source, self.manifest, self.digest = source, source.manifest, source.digest
        self.url, self.is_remote = source.url, source.storage.is_remote
        checked: set[tuple[tuple[int, ...], int]] = set()
        for key, tensor in self.manifest.tensors.items():
            layout = tensor.layout
            if (layout.shape, id(layout.boxes)) not in checked:  # layouts that are alike share their boxes
                checked.add((layout.shape, id(layout.boxes)))
                faults = cover_faults(layout.shape, layout.boxes)
                if faults:
                    raise damaged(f"{self.url}: {key}", "; ".join(faults))

    def keys(self) -> list[str]:
        """Returns the keys of all tensors and plain values, sorted."""
        return sorted([*self.manifest.tensors, *self.manifest.values])

    def below(self, key: str) -> dict[Path, str]:
        """Returns the keys of all tensors and plain values below a key, by their paths from there."""
        paths = {each: tensor.path for each, tensor in self.manifest.tensors.items()}
        paths |= {each: path for each, (path, _) in self.manifest.values.items()}
        found = ((_rest(paths[each], key), each) for each in self.keys() if each.startswith(f"{key}."))
        return {rest: each for rest, each in found if rest}

    def key_in_files(self, key: str) -> str:
        """Returns a tensor's key in the data files: its own, an earlier one, or that of its tie."""
        *_, tied_to, stored_as = self.manifest.tensors[key]
        if tied_to is not None:
            return tied_to
        return key if stored_as is None else stored_as

    def per_rank(self, rank: int) -> Mapping[str, Any]:
        """Returns the values that a rank stored for itself as `PerRank`, decoded, by key."""
        return self.source.per_rank(rank)

    def unknown(self, key: str, known: Iterable[str], kind: str) -> MismatchError:
        """Returns the error for an unknown key."""
        names = sorted(known)
        near = get_close_matches(key, names, 3)
        listed = ", ".join(names[:20]) + (f", ... ({len(names)} in all)" if len(names) > 20 else "")
        remedy = f"did you mean {' or '.join(near)}?" if near else f"there are: {listed}"
        problem = Problem(key, "nothing", f"{kind} of the checkpoint", remedy)
        return MismatchError("no such key", [problem], code="cannot-read-tensor")


def _rest(path: Path, key: str) -> Path:
    """Returns what follows a key in a path; of a part that it ends in, such as a module's, the end."""
    for at, part in enumerate(map(str, path)):
        if part == key:
            return path[at + 1 :]
        if part.startswith(f"{key}."):
            return part[len(key) + 1 :], *path[at + 1 :]
        if not key.startswith(f"{part}."):
            break
        key = key[len(part) + 1 :]
    return ()
