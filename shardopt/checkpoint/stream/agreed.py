"""What the ranks of a publisher tell each other in each step: hashes, by which they know whether anything is new."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import xxhash

from shardopt.errors import Problem, StateError
from shardopt.ranks import Ranks
from shardopt.ranks.kinds import decompress, exchange, kind_by_rank, kinds_of, pack_kinds, unpack_kinds

T = TypeVar("T")


def _hash_of(text: str) -> str:
    """Returns 32 hexadecimal digits, the same on every rank."""
    return xxhash.xxh3_128_hexdigest(text.encode())


class Agreement:
    """Compares by hashes what the ranks of a publisher see, and sends it only where it is new.

    Args:
        argument: the publisher's that has the rules.
        rules: a text that is equal for equal rules; ranks with different ones raise StateError.
        what: what is being done, as for `Ranks.agree`.
    """

    def __init__(self, argument: str, rules: str, what: str) -> None:
        self._argument, self._rules, self._what = argument, _hash_of(rules), what
        self._merged: Any = None
        self._job = ""  # the hash of all that ranks had told when they last merged it

    def of(
        self, ranks: Ranks, look: Callable[[], tuple[T, Any]], merge: Callable[[Mapping[int, Any]], Any]
    ) -> tuple[T, Any]:
        """Tells the others what this rank sees; a step later that is most often nothing new. Collective.

        Args:
            look: returns what stays here, and what is told, as JSON.
            merge: runs on rank 0; gets what each kind of ranks tells, by its first rank, and returns what all get.

        Returns:
            What stays here; and what `merge` has returned on rank 0, the same object until something is new.

        Raises:
            ShardoptError: what `look` or `merge` raises.
            StateError: ranks have different rules.
        """

        def report(looked: tuple[T, Any]) -> list[str]:
            return [self._rules, _hash_of(json.dumps(looked[1])), self._job]

        (found, told), (job, packed) = ranks.agree(self._what, look, report, self._compared)
        if packed:
            kinds = unpack_kinds(packed)
            is_first = kinds[kind_by_rank(kinds)[ranks.rank]][0] == ranks.rank
            describe = (lambda: told) if is_first else None
            _, section = exchange(ranks, self._what, describe, lambda each: (None, [merge(each)]), lambda _, rank: 0)
            self._merged, self._job = decompress(section), job
        return found, self._merged

    def _compared(self, reports: Sequence[Sequence[str]]) -> Any:
        """Returns the hash of all that ranks have told and, if that is new to one of them, the kinds of ranks."""
        rules = [each for each, _, _ in reports]
        other = next((rank for rank, each in enumerate(rules) if each != rules[0]), None)
        if other is not None:
            found, required = f"other rules on rank {other}", "those of rank 0"
            problem = Problem(self._argument, found, required, "give all ranks the same rules")
            raise StateError("ranks publish by different rules", [problem], code="ranks-differ")
        told = [each for _, each, _ in reports]
        job = _hash_of("".join(told))
        return job, [] if all(known == job for _, _, known in reports) else pack_kinds(kinds_of(told))
