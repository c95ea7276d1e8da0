"""Exchanges descriptions by kinds of ranks: one rank sends what many have in common, and it is merged once.

round    fingerprints    → `kinds_of` on rank 0, sent to all as `pack_kinds`
round    descriptions    → `exchange`: the first rank of each kind sends, rank 0 merges, each rank gets its section
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardopt.ranks.calls import Call
from shardopt.ranks.connections.tree import pack_runs, unpack_runs
from shardopt.ranks.ranks import Ranks

Kinds = Sequence[tuple[int, ...]]
"""The ranks of each kind, ascending; kinds are ordered by their first ranks."""


def kinds_of(fingerprints: Sequence[str]) -> list[tuple[int, ...]]:
    """Sorts ranks into kinds by equal fingerprints.

    Args:
        fingerprints: by rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, fingerprint in enumerate(fingerprints):
        ranks_of.setdefault(fingerprint, []).append(rank)
    return [tuple(ranks) for ranks in ranks_of.values()]


def pack_kinds(kinds: Kinds) -> list[list[int]]:
    """Encodes kinds as JSON, each as runs of ranks at equal distances: first, distance, count, and so on."""
    return [pack_runs(ranks) for ranks in kinds]


def unpack_kinds(wire: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Decodes what `pack_kinds` encoded."""
    return [tuple(unpack_runs(runs)) for runs in wire]


def kind_by_rank(kinds: Kinds) -> dict[int, int]:
    """Returns the kind of each rank."""
    return {rank: number for number, ranks in enumerate(kinds) for rank in ranks}


def exchange(
    ranks: Ranks,
    what: str | Call,
    describe: Callable[[], Any] | None,
    merge: Callable[[Mapping[int, Any]], tuple[Any, Sequence[Any]]],
    section_of: Callable[[Any, int], int],
) -> tuple[Any, bytes]:
    """Merges descriptions of some ranks on rank 0, and gives each rank the section that it needs. Collective.

    Args:
        what: as for `Ranks.agree`.
        describe: makes this rank's description, as JSON; None where another of its kind sends it.
        merge: runs on rank 0 only; gets descriptions by rank, and returns the JSON that every rank gets, and sections.
        section_of: runs on rank 0 only; gets that JSON and a rank, and returns the number of its section.

    Returns:
        The JSON that every rank gets, and this rank's section, which `decompress` decodes.

    Raises:
        ShardoptError, RankError: as `Ranks.agree`.
    """

    def decide(reports: list[str | None]) -> tuple[Any, list[bytes]]:
        sent = {rank: decompress(base64.b64decode(report)) for rank, report in enumerate(reports) if report is not None}
        answer, sections = merge(sent)
        return answer, [compress(section) for section in sections]

    _, answer, section = ranks.agree_in_sections(
        what,
        work=lambda: None if describe is None else base64.b64encode(compress(describe())).decode(),
        report=lambda text: text,
        decide=decide,
        section_of=section_of,
    )
    return answer, section


def compress(value: Any) -> bytes:
    """Encodes JSON, compressed: geometry is repetitive, and fast compression takes less time than encoding."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)


def decompress(data: bytes) -> Any:
    """Decodes what `compress` encoded."""
    return json.loads(zlib.decompress(data))
