"""Packs documents of different lengths into samples that can be indexed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from shardopt.errors import OptionError, Problem


class Packed(Dataset[list[Any]]):
    """A map-style data set whose samples are lists of documents that together fit into a capacity.

        packed = Packed(documents, lengths, capacity=4096)
        loader = ResumableStatefulLoader(packed, batch_size=64, collate_fn=...)

    Which documents share a sample follows from their lengths alone: documents in a row, as many as fit. So a position
    in the samples holds on any number of ranks, as it does not where each rank packs what it reads.

    Args:
        documents: map-style.
        lengths: of the documents, in tokens; one for each, positive.
        capacity: of a sample, in tokens.

    Raises:
        OptionError: another number of lengths than documents, or a document that is longer than the capacity.
    """

    def __init__(self, documents: Dataset[Any], lengths: Sequence[int], capacity: int) -> None:
        self.documents = documents
        own = np.asarray(lengths, dtype=np.int64)
        count = len(documents)  # type: ignore[arg-type]  # map-style
        problems = []
        if own.shape != (count,):
            found, required = f"{own.size} lengths", f"{count}, one of each document"
            problems.append(Problem("lengths", found, required, "pass those of this data set"))
        elif count and not (own.min() > 0 and own.max() <= capacity):
            longest = int(own.argmax()) if own.max() > capacity else int(own.argmin())
            found, required = f"{own[longest]} tokens", f"1 to {capacity}"
            remedy = "cut documents that are longer into several, leave empty ones out, or raise the capacity"
            problems.append(Problem(f"documents[{longest}]", found, required, remedy))
        if problems:
            raise OptionError("documents that cannot be packed", problems, code="data-position")
        ends = np.cumsum(own)
        starts = [0]
        while starts[-1] < count:
            before = int(ends[starts[-1] - 1]) if starts[-1] else 0
            starts.append(int(np.searchsorted(ends, before + capacity, side="right")))
        self._starts = np.asarray(starts)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> list[Any]:
        """Returns the documents of a sample."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return [self.documents[i] for i in range(int(self._starts[number]), int(self._starts[number + 1]))]
