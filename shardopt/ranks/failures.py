"""Errors between ranks: encodes each as JSON, and merges those of several ranks into one.

Both are bounded by the number of ranks: a thousand problems on each of ten thousand ranks would be gigabytes at rank 0.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any

from shardopt.errors import RankError, ShardoptError

BY_VERSION = " by version "
"""Stands between what a rank calls and its version of shardopt."""

_MOST_NAMES = 16
_MOST_KINDS = 8  # of problems that are only counted
_RANKS = re.compile(r"\branks? \[?(\d+(?:, \d+)*)")

_REPORTS_BYTES = 64 << 20  # of the errors of all ranks together
_MOST_BYTES = 1 << 20  # of one error; some thousand problems
_LEAST_REPORTED_BYTES = 4 << 10  # of the error of one rank, however many there are; a dozen problems
_LEAST_MERGED_BYTES = 64 << 10  # of the one that all get

Wire = Mapping[str, Any]
_Identity = tuple[str, str, str, str]


def describe(error: BaseException, ranks: int = 1) -> dict[str, Any]:
    """Converts an error of one rank to JSON, from which `ShardoptError.from_json` makes it again.

    Args:
        ranks: how many there are. Of what would be too much with so many, the first problems are there, and counts of
            the others.
    """
    if not isinstance(error, ShardoptError):
        error = RankError(f"{type(error).__name__}: {_text_of(error)}", code="rank-failed")
    return bounded(error.to_json(), _limit_bytes(ranks, _LEAST_REPORTED_BYTES))


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failed:  # of the error's own class; the other ranks wait for a report
        return f"an error without a text ({type(failed).__name__})"


def bounded(error: Wire, limit_bytes: int) -> dict[str, Any]:
    """Returns an error of about so many bytes at most: its first problems, and counts of the others by remedy.

    The same of equal errors; all of one that is within the limit.
    """
    kept = list(_within(error["problems"], limit_bytes))
    left_out: Counter[str] = Counter(error.get("left_out", {}))
    left_out.update(problem["remedy"] for problem in error["problems"][len(kept) :])
    return _wire(error, _shortened(error["message"], limit_bytes // 2), kept, left_out)


def _wire(error: Wire, message: str, problems: list[Wire], left_out: Counter[str]) -> dict[str, Any]:
    """Returns the JSON of an error, with the type and code of another one."""
    wire = {**error, "message": message, "problems": problems}
    wire.pop("left_out", None)
    if not left_out:
        return wire
    in_order = sorted(left_out.items(), key=lambda each: (-each[1], each[0]))
    counts = {_shortened(remedy, 400): count for remedy, count in in_order[:_MOST_KINDS]}
    others = sum(count for _, count in in_order[_MOST_KINDS:])
    if others:
        counts["with other remedies"] = counts.get("with other remedies", 0) + others
    return {**wire, "left_out": counts}


def _within(problems: Iterable[Wire], limit_bytes: int) -> Iterator[Wire]:
    """Yields the first problems that fit within a limit; the first one in any case."""
    nbytes = 0
    for number, problem in enumerate(problems):
        short = {name: _shortened(text, limit_bytes // 4) for name, text in problem.items()}
        nbytes += sum(map(len, short.values())) + 64
        if number and nbytes > limit_bytes:
            return
        yield short


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} ({len(text) - most} more characters)"


def _limit_bytes(ranks: int, least: int) -> int:
    return min(max(_REPORTS_BYTES // ranks, least), _MOST_BYTES)


def numbered_in_group(error: dict[str, Any], members: Sequence[int]) -> dict[str, Any]:
    """Adds to an error with rank numbers of a group their numbers in the job.

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
    """Merges failures into one error for all ranks: type, code and text of the first, all ranks, the others' texts.

    Equal problems of several ranks are there once. Where they are too many, the first ones of each rank are, and counts
    of the others.
    """
    ranks_with: dict[tuple[str, str], list[int]] = {}
    for rank, error in failures:
        ranks_with.setdefault((error["type"], error["message"]), []).append(rank)
    limit_bytes = _limit_bytes(size, _LEAST_MERGED_BYTES)
    (first, ranks), *others = ranks_with.items()
    where = "" if len(ranks) == size and size > 1 else f" on {names_of(ranks)}"
    texts = [
        f"on {names_of(those)}: {_shortened(text, limit_bytes // 64)}" for (_, text), those in others[:_MOST_NAMES]
    ]
    if len(others) > _MOST_NAMES:
        rest = sorted(rank for _, those in others[_MOST_NAMES:] for rank in those)
        texts.append(f"and in other words on {names_of(rest)}")
    also = f" (and {'; '.join(texts)})" if texts else ""
    message = f"{what} failed{where}: {_shortened(first[1], limit_bytes // 4)}{also}"
    problems, left_out = problems_of((error for _, error in failures), size)
    return _wire(failures[0][1], message, problems, left_out)


def problems_of(errors: Iterable[Wire], size: int) -> tuple[list[Wire], Counter[str]]:
    """Returns the problems of several ranks' errors, equal ones once, and counts of omitted ones by remedy.

    Args:
        errors: as `describe` makes them; by rank.
        size: how many ranks get this.
    """
    limit_bytes = _limit_bytes(size, _LEAST_MERGED_BYTES)
    distinct = _distinct(errors)
    left_out: Counter[str] = Counter()
    for _, error in distinct:
        left_out.update(error.get("left_out", {}))
    problems = {
        identity: problem for each, error in distinct for identity, problem in zip(each, error["problems"], strict=True)
    }
    kept = list(_within(problems.values(), limit_bytes))
    if len(kept) < len(problems):
        # In turns, the first of each rank before the second of any: no rank's many may hide what others have.
        left_out.update(remedy for _, _, _, remedy in problems)
        kept = list(_within((problems[identity] for identity in _in_turns(distinct)), limit_bytes))
        shown = islice(_in_turns(distinct), len(kept))
        left_out -= Counter(remedy for _, _, _, remedy in shown)
    return kept, left_out


def _in_turns(distinct: Sequence[tuple[tuple[_Identity, ...], Wire]]) -> Iterator[_Identity]:
    """Yields the first problem of each error, then the second, and so on; each problem once."""
    seen: set[_Identity] = set()
    for turn in zip_longest(*(each for each, _ in distinct)):
        for identity in turn:
            if identity is not None and identity not in seen:
                seen.add(identity)
                yield identity


def _distinct(errors: Iterable[Wire]) -> list[tuple[tuple[_Identity, ...], Wire]]:
    """Returns the distinct errors, each with the identities of its problems; errors with equal problems are one."""
    by_content: dict[Any, tuple[tuple[_Identity, ...], Wire]] = {}
    for error in {id(error): error for error in errors}.values():  # many ranks may share one
        identities = tuple(map(_identity, error["problems"]))
        left_out = error.get("left_out")
        by_content.setdefault((identities, *sorted(left_out.items())) if left_out else identities, (identities, error))
    return list(by_content.values())


def _identity(problem: Wire) -> _Identity:
    return problem["key"], problem["found"], problem["required"], problem["remedy"]


def different_calls(calls: Sequence[tuple[int, str]]) -> RankError:
    """Makes the error for all ranks if some are in another call than rank 0.

    Args:
        calls: of rank 0 and others, ascending: the rank, and what it calls; in the first call of a job with its version
            behind `BY_VERSION`, which earlier versions do not say.
    """
    by_version, by_call = dict[str, list[int]](), dict[str, list[int]]()
    for rank, text in calls:
        call, _, version = text.partition(BY_VERSION)
        by_version.setdefault(version or "an earlier version", []).append(rank)
        by_call.setdefault(call, []).append(rank)
    if len(by_version) > 1:
        found = f"ranks have unlike versions of shardopt: {_each_on(by_version)}; install one version on all hosts"
    else:
        found = f"ranks are in different calls: {_each_on(by_call)}; all must make the same ones, in the same order"
    return RankError(found, code="different-calls")


def _each_on(ranks_in: Mapping[str, Sequence[int]]) -> str:
    return "; ".join([f"{what} on {names_of(ranks)}" for what, ranks in ranks_in.items()][:_MOST_NAMES])


def names_of(ranks: Sequence[int]) -> str:
    """Returns "rank 1", or "ranks 1, 3", or the first ones of very many."""
    more = f" and {len(ranks) - _MOST_NAMES} more" if len(ranks) > _MOST_NAMES else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks[:_MOST_NAMES])) + more
