"""Do ranks that hold the same box hold the same bytes? A "replica" that has drifted is found and named, not saved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
import xxhash
from torch import Tensor

from shardopt.checkpoint.memory import bytes_of, is_plain_memory
from shardopt.errors import Problem, StateError
from shardopt.sharding.box import Box
from shardopt.sharding.layout import Layout
from shardopt.sharding.pieces import View

CheckReplicas = Literal["small", "all", "none"]

_SMALL_BYTES = 4096

Contents = Mapping[str, Mapping[str, str]]
"""Key → box → hash of the bytes, of what this rank holds and others hold too."""


def contents_of(views: Mapping[str, View], which: CheckReplicas) -> dict[str, dict[str, str]]:
    """The hashes of this rank's replicas: all of them, or only those of at most 4 KiB.

    What lies on an accelerator is copied to the host in one piece.
    """
    if which == "none":
        return {}
    places: list[tuple[str, str]] = []
    tensors: list[Tensor] = []
    for key, view in views.items():
        for piece in view.pieces:
            small = which == "all" or piece.tensor.numel() * piece.tensor.element_size() <= _SMALL_BYTES
            if small and _is_shared(view.layout, piece.box):
                places.append((key, str(piece.box)))
                tensors.append(piece.tensor)
    contents: dict[str, dict[str, str]] = {}
    for (key, box), tensor in zip(places, _on_host(tensors), strict=True):
        contents.setdefault(key, {})[box] = xxhash.xxh3_64_hexdigest(bytes_of(tensor))
    return contents


def summary_of(contents: Contents, views: Mapping[str, View]) -> dict[str, str]:
    """A few hashes that stand for all: of the replicas that the same ranks hold under the same keys, by these."""
    groups: defaultdict[Any, list[tuple[str, str, str]]] = defaultdict(list)
    for key, boxes in contents.items():
        layout = views[key].layout
        for box, found in boxes.items():
            groups[_shared_by_name(layout).get(box)].append((key, box, found))
    summary = {}
    for holders, members in groups.items():
        members.sort()
        where = "\0".join([str(holders), *(f"{key}\0{box}" for key, box, _ in members)])
        bytes_found = "".join(found for _, _, found in members)
        summary[xxhash.xxh3_64_hexdigest(where.encode())] = xxhash.xxh3_64_hexdigest(bytes_found.encode())
    return summary


def summaries_agree(summaries: Iterable[Mapping[str, str]]) -> bool:
    """Whether all ranks that have summed the same replicas have the same sum."""
    first: dict[str, str] = {}
    return all(first.setdefault(where, found) == found for each in summaries for where, found in each.items())


def refuse_drifted(contents: Sequence[Contents]) -> None:
    """Raises StateError, naming each key and box that two ranks hold with different bytes.

    Args:
        contents: by rank.
    """
    first: dict[tuple[str, str], tuple[int, str]] = {}
    problems: dict[tuple[str, str], Problem] = {}
    for rank, mine in enumerate(contents):
        for key, boxes in mine.items():
            for box, found in boxes.items():
                other, expected = first.setdefault((key, box), (rank, found))
                if found != expected and (key, box) not in problems:
                    told = f"other bytes of {box or 'it'} on rank {rank} than on rank {other}"
                    remedy = 'make them the same, wrap the value in PerRank, or save with check_replicas="none"'
                    problems[key, box] = Problem(key, told, "the same on every rank that holds it", remedy)
    if problems:
        raise StateError("replicas have drifted apart", problems.values())


def _is_shared(layout: Layout, box: Box) -> bool:
    return layout.holders is None or layout.local or box in layout.shared


@lru_cache(maxsize=4096)
def _shared_by_name(layout: Layout) -> Mapping[str, tuple[int, ...]]:
    return {str(box): holders for box, holders in layout.shared.items()}


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors with plain memory on the CPU; those of a device come over together."""
    elsewhere: defaultdict[torch.device, list[int]] = defaultdict(list)
    on_host = list(tensors)
    for i, tensor in enumerate(tensors):
        if not is_plain_memory(tensor):
            elsewhere[tensor.device].append(i)
    for numbers in elsewhere.values():
        flat = [tensors[i].detach().contiguous().reshape(-1).view(torch.uint8) for i in numbers]
        together = torch.cat(flat).cpu()
        begin = 0
        for i, each in zip(numbers, flat, strict=True):
            on_host[i] = together[begin : begin + each.numel()]
            begin += each.numel()
    return on_host
