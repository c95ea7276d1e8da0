"""Finds a checkpoint over all hosts of a job: its record on any of them, and each file on at least one."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import xxhash

from shardopt.checkpoint.format.constants import DIRECTORY_NAME, MANIFEST_LIMIT_BYTES, RECORD_NAME, is_sealed
from shardopt.checkpoint.format.decoding import decode_manifest
from shardopt.checkpoint.hosts.holders import holders_of, missing, survives
from shardopt.checkpoint.hosts.hosts import Hosts, hosts_of, split
from shardopt.checkpoint.hosts.whole import WholeCheckpoint
from shardopt.checkpoint.sources.own import OwnSource
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptionError,
    FormatError,
    Problem,
    ShardoptError,
)
from shardopt.ranks import Ranks

_MOST_NAMED = 8  # files, of each checkpoint that lacks some


def opener_on_hosts(ranks: Ranks, what: str, url: str | os.PathLike[str]) -> Callable[[], CheckpointReader]:
    """Returns a function by which each rank opens a checkpoint on the hosts of a job. Collective.

    The function is local, to be called in a round of the caller's.

    Args:
        what: names the caller's work in errors.

    Raises:
        CheckpointNotFoundError: see `find`.
        CheckpointError: a host's directory cannot be used.
    """
    root, name = split(url)
    whole = find(ranks, hosts_of(ranks, root), name, what)
    return lambda: CheckpointReader(OwnSource(whole, whole.record))


def find(ranks: Ranks, hosts: Hosts, name: str, what: str) -> WholeCheckpoint:
    """Finds a checkpoint that all hosts together hold completely. Collective.

    Args:
        ranks: those of the hosts, or a side channel of theirs.
        what: the caller's work, for errors.

    Raises:
        CheckpointNotFoundError: no host has a record of it, or a file is on no host; each is named.
    """

    def look() -> Any:
        return _share_of(hosts, name) if hosts.is_leader else None

    def decide(reports: list[Any]) -> tuple[Any, list[bytes]]:
        shares = [reports[leader] for leader in hosts.leaders]
        record, holders = _choose(hosts, name, shares)
        return holders, [record]

    _, holders, record = ranks.agree_in_sections(
        f"{what} (looking on {hosts.count} hosts)",
        work=look,
        report=lambda share: share,
        decide=decide,
        section_of=lambda _, rank: 0,
    )
    return WholeCheckpoint(hosts, name, record, decode_manifest(record, hosts.url(name)), holders)


def whole_on(ranks: Ranks, hosts: Hosts) -> tuple[dict[str, int], dict[str, ShardoptError]]:
    """Returns the names of all checkpoints that all hosts together hold completely, and of those that lack files.

    Collective. With each whole one is the number of hosts, whichever they are, without which it would still be whole.
    With each other one, of which a host has the record, is the error of a load. One without a record is what a dead
    save has left: it never was a checkpoint.
    """

    def look() -> Any:
        if not hosts.is_leader:
            return None
        # Also those without a record: a host may have been lost before it had one, and its files are part of the whole.
        return {name: _share_of(hosts, name) for name in hosts.share(".").names() if DIRECTORY_NAME.fullmatch(name)}

    def decide(reports: list[Any]) -> list[dict[str, Any]]:
        by_host = [reports[leader] for leader in hosts.leaders]
        whole, lacking = {}, {}
        for name in sorted({name for shares in by_host for name in shares}):
            shares = [shares.get(name, [None, 0, {}]) for shares in by_host]
            try:
                _, holders = _choose(hosts, name, shares)
            except (CheckpointNotFoundError, CorruptionError, FormatError) as error:
                if any(digest is not None for digest, *_ in shares):
                    lacking[name] = _in_short(error).to_json()
            else:
                whole[name] = survives(holders)
        return [whole, lacking]

    _, (whole, lacking) = ranks.agree(
        f"looking for checkpoints at {hosts.root} on each host",
        work=look,
        report=lambda shares: shares,
        decide=decide,
    )
    return dict(whole), {name: ShardoptError.from_json(wire) for name, wire in lacking.items()}


def _in_short(error: CheckpointError) -> CheckpointError:
    """Returns an error with its first problems, as a checkpoint may lack a file of each of very many ranks."""
    left_out = Counter(problem.remedy for problem in error.problems[_MOST_NAMED:])
    return type(error)(error.message, error.problems[:_MOST_NAMED], left_out, code=error.code)


def _share_of(hosts: Hosts, name: str) -> list[Any]:
    """Returns this host's record, as digest (or None) and bytes, and its files."""
    share = hosts.share(name)
    record = share.record()
    if record is None:
        return [None, 0, share.files()]
    return [xxhash.xxh3_64_hexdigest(record), len(record), share.files()]


def _choose(hosts: Hosts, name: str, shares: Sequence[Sequence[Any]]) -> tuple[bytes, dict[str, list[int]]]:
    """Chooses the record of the whole save, the later one of two, and who has its files; on rank 0."""
    files = [share[2] for share in shares]
    found: list[tuple[float, bytes, dict[str, list[int]]]] = []
    lacking: list[Problem] = []
    remedy = "bring back a host that had it, or restore an earlier checkpoint or one from the shared root"
    records = {digest: nbytes for digest, nbytes, _ in shares if digest is not None}
    for digest, nbytes in records.items():
        have = [host for host, share in enumerate(shares) if share[0] == digest]
        record = _read_record(hosts, name, have, digest, nbytes)
        if record is None:
            continue
        manifest = decode_manifest(record, f"{hosts.root}/{name}/{RECORD_NAME}")
        holders = holders_of(manifest, files)
        lost = missing(holders)
        if not lost:
            found.append((manifest.saved_at or 0.0, record, holders))
        nowhere = f"on none of {hosts.count} hosts"
        lacking += [Problem(f"{hosts.root}/{name}/{file}", nowhere, "on one of them", remedy) for file in lost]
    if not found:
        problem = Problem(f"{hosts.root}/{name}", f"no record of it on {hosts.count} hosts", "a checkpoint", remedy)
        raise CheckpointNotFoundError("there is no whole checkpoint on the hosts", lacking or [problem])
    _, record, holders = max(found, key=lambda each: each[0])
    return record, holders


def _read_record(hosts: Hosts, name: str, have: Sequence[int], digest: str, nbytes: int) -> bytes | None:
    """Reads a record from the first of these hosts that has it; None if none has."""
    for host in sorted(have, key=lambda each: each != hosts.number):
        data: bytes | None = None
        with suppress(OSError):
            if host == hosts.number:
                data = hosts.share(name).record()
            elif nbytes <= MANIFEST_LIMIT_BYTES:
                data = hosts.client(host).read(name, RECORD_NAME, 0, nbytes)
        if data is not None and is_sealed(data) and xxhash.xxh3_64_hexdigest(data) == digest:
            return data
    return None
