"""What the ranks of a publisher tell each other in each step: hashes, by which they know whether anything is new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from shardopt.errors import Problem, StateError
from shardopt.ranks.kinds import kinds_of, pack_kinds


def hash_of(text: str) -> str:
    """Returns 32 hexadecimal digits, the same on every rank."""
    return xxhash.xxh3_128_hexdigest(text.encode())


def compared(argument: str) -> Callable[[Sequence[Sequence[str]]], Any]:
    """Returns what rank 0 decides over the reports of all ranks.

    A report has the hash of a rank's rules, that of what it tells, and that of what it knows of the job. The decision
    has the hash of all that ranks have told and, if that is new to one of them, the kinds of ranks.

    Args:
        argument: the publisher's that has the rules; ranks with different ones raise StateError.
    """

    def decide(reports: Sequence[Sequence[str]]) -> Any:
        rules = [each for each, _, _ in reports]
        other = next((rank for rank, each in enumerate(rules) if each != rules[0]), None)
        if other is not None:
            problem = Problem(
                argument, f"other rules on rank {other}", "those of rank 0", "give all ranks the same rules"
            )
            raise StateError("ranks publish by different rules", [problem], code="ranks-differ")
        told = [each for _, each, _ in reports]
        job = hash_of("".join(told))
        return job, [] if all(known == job for _, _, known in reports) else pack_kinds(kinds_of(told))

    return decide
