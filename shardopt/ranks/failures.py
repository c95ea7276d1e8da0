"""Errors between ranks: each as JSON, and those of several ranks merged into one."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from shardopt.errors import RankError, ShardoptError

_MOST_NAMES = 16
_RANKS = re.compile(r"\branks? \[?(\d+(?:, \d+)*)")


def describe(error: BaseException) -> dict[str, Any]:
    """Converts an error of one rank to JSON, from which `ShardoptError.from_json` makes one again."""
    if isinstance(error, ShardoptError):
        return error.to_json()
    return RankError(f"{type(error).__name__}: {error}").to_json()


def numbered_in_group(error: dict[str, Any], members: Sequence[int]) -> dict[str, Any]:
    """Notes in an error that names ranks by their numbers in a group which numbers these are in the job.

    Args:
        members: the numbers in the job, by rank.
    """
    texts = [error["message"], *(problem["found"] for problem in error["problems"])]
    named = {int(number) for text in texts for numbers in _RANKS.findall(text) for number in numbers.split(", ")}
    other = [(rank, members[rank]) for rank in sorted(named) if rank < len(members) and members[rank] != rank]
    if not other:
        return error
    here = ", ".join(f"{rank} is {number} of the job" for rank, number in other)
    return {**error, "message": f"{error['message']} (of the ranks of this group, {here})"}


def merge(what: str, failures: list[tuple[int, dict[str, Any]]], size: int) -> dict[str, Any]:
    """Merges failures into one error for all ranks: the type and text of the first, its ranks, and those of others."""
    ranks_with: dict[tuple[str, str], list[int]] = {}
    for rank, error in failures:
        ranks_with.setdefault((error["type"], error["message"]), []).append(rank)
    (first, ranks), *others = ranks_with.items()
    where = "" if len(ranks) == size and size > 1 else f" on {names_of(ranks)}"
    also = "; ".join(f"on {names_of(those)}: {text}" for (_, text), those in others)
    message = f"{what} failed{where}: {first[1]}" + (f" (and {also})" if also else "")
    problems = {json.dumps(problem, sort_keys=True): problem for _, error in failures for problem in error["problems"]}
    return {"type": first[0], "message": message, "problems": list(problems.values())}


def different_calls(calls: Sequence[tuple[int, str]]) -> RankError:
    """Makes the error for all ranks where some are in another call than rank 0.

    Args:
        calls: of rank 0 and others, ascending: the rank, and what it calls.
    """
    ranks_in: dict[str, list[int]] = {}
    for rank, call in calls:
        ranks_in.setdefault(call, []).append(rank)
    calls_text = "; ".join([f"{call} on {names_of(ranks)}" for call, ranks in ranks_in.items()][:_MOST_NAMES])
    return RankError(f"ranks are in different calls: {calls_text}; all must make the same ones, in the same order")


def names_of(ranks: Sequence[int]) -> str:
    """Returns "rank 1", or "ranks 1, 3", or the first of very many."""
    more = f" and {len(ranks) - _MOST_NAMES} more" if len(ranks) > _MOST_NAMES else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:_MOST_NAMES])) + more
