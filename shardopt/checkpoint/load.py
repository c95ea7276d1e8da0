"""Loading, from a committed checkpoint into an app, in place:

open → flatten → compare → plan → read in place → hand back to app
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardopt.checkpoint.compare import Match, compare
from shardopt.checkpoint.pause import gc_paused
from shardopt.checkpoint.read import OpenFile, Want, fetch
from shardopt.checkpoint.reader import CheckpointReader, open_checkpoint
from shardopt.checkpoint.storage import storage_of
from shardopt.checkpoint.torn import mark_torn, unmark_torn
from shardopt.errors import CheckpointError, Problem
from shardopt.ranks import DEADLINE_SECONDS, ranks_of
from shardopt.sharding.view import view_of
from shardopt.state import FlatState, PerRank, flatten, iterate_optimizers


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did, on this rank.

    Args:
        url: where the checkpoint is.
        save_id: the unique name of the save that it is of.
        loaded: the keys that were loaded.
        missing: keys of the app that the checkpoint has not; left as they were (`strict=False`).
        unexpected: keys of the checkpoint that the app has not; left out (`strict=False`).
        bytes_wanted: of tensors, on this rank.
        bytes_read: from data files, on this rank; the ends of checksummed segments and strided reads add to it.
        seconds: on this rank.
    """

    url: str
    save_id: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    bytes_wanted: int
    bytes_read: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Plan:
    reader: CheckpointReader
    flat: FlatState
    match: Match
    wants: list[tuple[OpenFile, Want]]
    per_rank: Mapping[str, Any]


def load(
    url: str | os.PathLike[str],
    app: Mapping[str, Any],
    *,
    strict: bool = True,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> LoadReport:
    """Loads a checkpoint into `app`, whatever ranks, meshes and placements it was saved from. Collective.

    Tensors are filled in their own memory; plain values are replaced in the dicts and lists of `app` that hold them;
    objects get their state through `load_state_dict`. What does not fit is found before a byte is changed.

    Args:
        url: of a committed checkpoint.
        app: as for `save`.
        strict: whether keys that only one side has are an error. Other differences always are.
        deadline_seconds: how long a rank may show no sign of life before the others give up and name it.

    Raises:
        CheckpointNotFoundError, FormatError: there is nothing here to load.
        MismatchError: the checkpoint does not fit; every difference is listed, and nothing was changed.
        CorruptionError: stored bytes are not what was written. Where that is met in the middle, the optimizers of
            `app` refuse to step until a load is whole.
        RankError: a rank failed in another way, died, or did not make the call.
    """
    begin = time.monotonic()
    ranks = ranks_of()
    what = f"loading {storage_of(url).url}"

    with gc_paused():
        plan, _ = ranks.agree(
            what,
            work=lambda: _plan(url, app, strict, ranks.rank, ranks.size),
            report=lambda plan: plan.reader.digest,
            decide=lambda digests: _same_checkpoint(str(url), digests),
            deadline_seconds=deadline_seconds,
        )
        mark_torn(iterate_optimizers(plan.flat), what)
        bytes_read, _ = ranks.agree(what, work=lambda: _execute(plan), deadline_seconds=deadline_seconds)
        unmark_torn(iterate_optimizers(plan.flat))

    return LoadReport(
        url=plan.reader.url,
        save_id=plan.reader.manifest.save_id,
        loaded=(*plan.match.tensors, *plan.match.values, *plan.match.per_rank),
        missing=tuple(plan.match.missing),
        unexpected=tuple(plan.match.unexpected),
        bytes_wanted=sum(want.wanted.numel * want.dtype.itemsize for _, want in plan.wants),
        bytes_read=bytes_read,
        seconds=time.monotonic() - begin,
    )


def _plan(url: str | os.PathLike[str], app: Mapping[str, Any], strict: bool, rank: int, size: int) -> _Plan:
    """Everything that can be refused is refused here."""
    reader = open_checkpoint(url)
    flat = flatten(app)
    views = {key: view_of(tensor, key) for key, tensor in flat.tensors().items()}
    match = compare(flat, views, reader.manifest, strict, size)
    wants = [want for key, (view, _) in match.tensors.items() for want in reader.wants(key, view.pieces)]
    return _Plan(reader, flat, match, wants, reader.per_rank(rank) if match.per_rank else {})


def _same_checkpoint(url: str, digests: list[str]) -> None:
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        found = f"another checkpoint on rank {other} than on rank 0"
        problem = Problem(url, found, "the same on every rank", "check what is mounted there")
        raise CheckpointError("ranks do not see the same checkpoint", [problem])


def _execute(plan: _Plan) -> int:
    nbytes = fetch(plan.wants)
    for key, value in plan.match.values.items():
        plan.flat.leaves[key].replace(value)
    for key in plan.match.per_rank:
        leaf = plan.flat.leaves[key]
        leaf.replace(PerRank(plan.per_rank[key], leaf.value.on_resize))
    for handback in plan.flat.handbacks:
        handback.target.load_state_dict(handback.state)
    return nbytes
