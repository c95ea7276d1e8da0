"""What the ranks want of one rank's piece of a table: it answers with vectors, and turns their gradients into rows'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from shardopt.runtime.rows import runs_of_ids, sort_ids


@dataclass(frozen=True, slots=True)
class Served:
    """The rows that each of G ranks wants of this rank's piece, and what it wants of them.

    A vector is a row, or the sum of some. Sums of fp16 and bf16 are made in fp32, and rounded once.

    Args:
        rows: for each rank, [n] int64, counted in the piece.
        lengths: for each rank of how many of its rows each vector is the sum, [v] int64; None where each is one row.
        weights: for each rank what its rows are multiplied with, [n] fp64; None is 1, as where each vector is one row.
    """

    rows: Sequence[Tensor]
    lengths: Sequence[Tensor | None]
    weights: Sequence[Tensor | None]

    @property
    def counts(self) -> list[int]:
        """How many vectors each rank wants."""
        return [len(rows if own is None else own) for rows, own in zip(self.rows, self.lengths, strict=True)]

    def vectors(self, piece: Tensor, ranks: Sequence[int]) -> Sequence[Tensor]:
        """Returns for each of some ranks its vectors of the piece, [v, W]."""
        rows, lengths, weights = self._joined(ranks)
        found = piece.index_select(0, rows) if lengths is None else _sums(piece, rows, lengths, weights)
        counts = self.counts
        return torch.split(found, [counts[q] for q in ranks])

    def gradients(self, of_vectors: Tensor, order: Tensor, repeats: Tensor) -> Tensor:
        """Returns the gradients of the different rows that ranks want, [M, W].

        Args:
            of_vectors: the gradients of the vectors of all ranks in turn, [V, W].
            order: where each is, by ascending rows.
            repeats: how often each different one is among them, [M] int64.
        """
        lengths, weights = _filled(self.lengths, self.rows), _filled(self.weights, self.rows)
        # A row's gradient is itself a sum: of the gradients of the vectors that it is in.
        of_row = order
        if lengths is not None:
            numbers = torch.arange(len(lengths), device=order.device)
            of_row = numbers.repeat_interleave(lengths, output_size=len(order)).index_select(0, order)
        weights = None if weights is None else weights.index_select(0, order)
        return _sums(of_vectors, of_row, repeats, weights)

    def _joined(self, ranks: Sequence[int]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the rows, lengths and weights of some ranks in turn; None as above where it is for all of them."""
        rows = [self.rows[q] for q in ranks]
        lengths = _filled([self.lengths[q] for q in ranks], rows)
        weights = _filled([self.weights[q] for q in ranks], rows)
        return (torch.cat(rows) if rows else self.rows[0][:0]), lengths, weights


def gradients_of_rows(
    pieces: Mapping[int, Served], of_vectors: Callable[[int], Tensor]
) -> dict[int, tuple[Tensor, Tensor]]:
    """Returns for each piece the different rows that ranks want, ascending, [M], and their gradients, [M, W].

    Waits for a GPU once, for all pieces.

    Args:
        pieces: by number.
        of_vectors: number → the gradients of the vectors of all ranks in turn, [V, W].
    """
    ordered = {number: sort_ids(torch.cat([*served.rows])) for number, served in pieces.items()}
    runs = runs_of_ids([rows for rows, _ in ordered.values()])
    return {
        number: (different, pieces[number].gradients(of_vectors(number), order, repeats))
        for (number, (_, order)), (different, repeats) in zip(ordered.items(), runs, strict=True)
    }


def _filled(blocks: Sequence[Tensor | None], rows: Sequence[Tensor]) -> Tensor | None:
    """Joins blocks; one that is None is of ones, as many as the rows. None if all are."""
    like = next((each for each in blocks if each is not None), None)
    if like is None:
        return None
    return torch.cat([like.new_ones(len(r)) if each is None else each for each, r in zip(blocks, rows, strict=True)])


def _sums(vectors: Tensor, places: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
    """Returns sums of vectors, [len(lengths), W]: of so many in turn, at `places`, times their weights."""
    if not len(places):
        return vectors.new_zeros(len(lengths), vectors.shape[1])
    begins = lengths.cumsum(0) - lengths
    weights = None if weights is None else weights.to(vectors.dtype)
    return functional.embedding_bag(places, vectors, begins, mode="sum", per_sample_weights=weights)
