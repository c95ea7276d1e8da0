"""Ranks as runs at equal distances: few numbers for very many ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def pack_runs(ranks: Iterable[int]) -> list[int]:
    """Encodes ascending ranks as runs: first, distance, count, and so on."""
    runs: list[int] = []
    for rank in ranks:
        if runs:
            first, distance, count = runs[-3:]
            if count == 1 or rank == first + distance * count:
                runs[-2:] = [(rank - first) if count == 1 else distance, count + 1]
                continue
        runs += [rank, 1, 1]
    return runs


def unpack_runs(runs: Sequence[int], within: range | None = None) -> list[int]:
    """Decodes what `pack_runs` encoded. Raises ValueError where a rank is not within a range, if one is given."""
    ranks: list[int] = []
    for first, distance, count in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
        end = first + distance * (count - 1)
        if within is not None and (first not in within or end not in within or distance < 1 or count < 1):
            raise ValueError(f"ranks {first} to {end} are not in {within}")
        ranks += range(first, end + 1, distance)
    return ranks
