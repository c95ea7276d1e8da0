"""State of table rows under another cut of the columns: the mean over the parts that a row was stored in.

torchrec cuts tables by columns, too. Its row-wise optimizers then have a number of each row for each part of the
columns, as one tensor [P · R] of P parts and R rows, by ascending columns. Tables of whole rows have R numbers, [R] in
torchrec and [R, 1] in keyed optimizers. A load turns P parts into Q of the app:

    merged[r] = Σ_p w_p · stored[p · R + r] / Σ_p w_p        w_p: the columns of part p
    app[q · R + r] = merged[r]                               for each q < Q

The derivation: let g_t be the gradients of a row of W columns, and a_t = mean_j g_tj² their mean square, which is what
the rule for whole rows takes. Part p has a_tp, the mean over its own w_p columns, so that a_t = Σ_p (w_p / W) a_tp.

    Adagrad   S = S_0 + Σ_t a_t = Σ_p (w_p / W) S_p                     as S_0 is the same in all parts
    Adam      V ← β₂ V + (1 − β₂) a_t is linear in V and a_t, so that again V = Σ_p (w_p / W) V_p

Both need the same steps in all parts: a row that is looked up gets a gradient in each. So the merged number is that of
one process with these gradients, but for rounding: it is added up in fp64, and rounded once, where that process rounds
each step. The gradients themselves came from weights that each part had moved by its own root, and so a run that is
resumed from merged state is not the run that had whole rows from the start. State that is not linear in the mean
squares, such as the maximum that AMSGrad keeps, would not be that of one process.

The way back is not determined: each part gets the number of its row, from where torchrec's parts part ways again.
Numbers that are the same in all parts, such as counts of steps, stay as they are both ways.

Sources: the rules in `algorithms/row_wise/row_rules.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch

from shardopt.checkpoint.format.constants import Dtype
from shardopt.checkpoint.format.data_file import Entry
from shardopt.checkpoint.format.manifest import Manifest, StoredLayout, StoredTensors
from shardopt.checkpoint.format.tensor_bytes import torch_dtype
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.sources.reading.checking import damaged_segments
from shardopt.checkpoint.sources.reading.fetch import fetch_here
from shardopt.checkpoint.sources.reading.open_file import ComputedFile, ReadChunks, ReadRequest, form_of
from shardopt.checkpoint.storage import Span
from shardopt.errors import Problem
from shardopt.sharding.box import Box, whole
from shardopt.sharding.pieces import Piece

_MOST_KEYS = 5
_log = logging.getLogger("shardopt.checkpoint")


class RowState(NamedTuple):
    """One number for each row and part of the columns, as stored and as the app has it.

    Args:
        rows: of the table.
        widths: the columns of each stored part; empty where the checkpoint does not tell them.
        shape: the app's: [Q · R], or [R, 1].
    """

    rows: int
    widths: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def parts(self) -> int:
        """Into how many parts the app cuts the columns."""
        return prod(self.shape) // self.rows

    @property
    def is_merged(self) -> bool:
        """Whether numbers change: not where whole rows stay whole, in another shape."""
        return self.parts > 1 or len(self.widths) > 1


def other_row_state(
    reader: CheckpointReader, stored_keys: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, RowState]:
    """Finds the app's state of rows that is stored for another cut of the columns, or in another shape.

    Args:
        reader: has the state, and in the same checkpoint its parameter, whose stored boxes tell the cut.
        stored_keys: key of the app → key in the checkpoint, where they differ.
        shapes: of the app's tensors, which may be in the checkpoint or not.

    Returns:
        The app's key → its cuts.
    """
    tensors = reader.manifest.tensors
    unlike = {
        key: tensor
        for key, shape in shapes.items()
        if (tensor := tensors.get(stored_keys.get(key, key))) is not None and tensor.layout.shape != shape
        if torch_dtype(tensor.dtype).is_floating_point and len(tensor.path) > 1
    }
    tables = _tables_of(reader.manifest, {str(tensor.path[-2]) for tensor in unlike.values()})
    found = {key: _cuts_of(each.layout.shape, shapes[key], tables[str(each.path[-2])]) for key, each in unlike.items()}
    return {key: state for key, state in found.items() if state is not None}


_Table = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape of a table, and the widths of its parts."""


def _tables_of(manifest: Manifest, names: Set[str]) -> dict[str, set[_Table]]:
    """Returns the stored tables whose keys end with a name, by name."""
    found: dict[str, set[_Table]] = {name: set() for name in names}
    for key, tensor in manifest.tensors.items() if names else ():
        name = key if len(tensor.layout.shape) == 2 else ""
        while name:
            if name in names:
                columns = sorted({(box.offsets[1], box.sizes[1]) for box in tensor.layout.boxes})
                found[name].add((tensor.layout.shape, tuple(size for _, size in columns)))
            name = name.partition(".")[2]
    return found


def _cuts_of(stored: tuple[int, ...], shape: tuple[int, ...], tables: Set[_Table]) -> RowState | None:
    """Returns the cuts of state that is to fill a tensor of `shape`; None if it is no state of rows of a table."""
    for (rows, columns), widths in tables:
        if not (rows and _has_rows(stored, rows) and _has_rows(shape, rows)):
            continue
        parts = prod(stored) // rows
        if parts == 1:
            widths = (columns,)
        # Of two tables of one name, such as a teacher's, nothing tells which one the state is of.
        is_known = len(tables) == 1 and len(widths) == parts and sum(widths) == columns
        return RowState(rows, widths if is_known else (), shape)
    return None


def _has_rows(shape: tuple[int, ...], rows: int) -> bool:
    return shape == (rows, 1) or (len(shape) == 1 and shape[0] > 0 and shape[0] % rows == 0)


def with_remedy(problem: Problem, state: RowState, stored: tuple[int, ...]) -> Problem:
    """Says of a problem with state of rows how it can be loaded.

    Args:
        state: what `other_row_state` found.
        stored: the stored shape.
    """
    before = prod(stored) // state.rows
    remedy = (
        'load with strict=Strictness(row_state="merge"), by which a row gets the mean of its parts, weighted by their '
        "columns, and each part of the app the number of its row"
    )
    if not state.widths:
        remedy = (
            "shard the columns into as many parts as when it was saved, or load only the weights with select=: the "
            "stored weights do not tell which columns a part had, and so not how much it counts"
        )
    found, required = (
        f"{text}, for {_parts(n)}" for text, n in ((problem.found, before), (problem.required, state.parts))
    )
    return replace(problem, found=found, required=required, remedy=remedy)


def _parts(count: int) -> str:
    return "whole rows" if count == 1 else f"rows in {count} parts of the columns"


def log_merged(url: str, states: Mapping[str, RowState]) -> None:
    """Logs in one line the keys that were merged from parts, or spread over them."""
    shown = [f"{key} ({len(state.widths)} to {state.parts})" for key, state in [*states.items()][:_MOST_KEYS]]
    more = ["..."] if len(states) > _MOST_KEYS else []
    text = "loading %s: state of rows goes from and to parts of the columns, by the mean over a row's parts: %s"
    _log.info(text, url, ", ".join([*shown, *more]))


def with_shapes(manifest: Manifest, states: Mapping[str, RowState]) -> Manifest:
    """Returns a manifest in which state of rows, by its key there, has the app's shapes."""
    tensors = StoredTensors(manifest.tensors)
    for key, state in states.items():
        tensors[key] = tensors[key]._replace(layout=StoredLayout.in_one_box(state.shape, 0))
    return replace(manifest, tensors=tensors)


class MergedRows(CheckpointReader):
    """A reader in which state of rows has the app's shapes.

    Args:
        reader: of the checkpoint, which this one reads, and closes.
        states: by stored key.
    """

    def __init__(self, reader: CheckpointReader, states: Mapping[str, RowState]) -> None:
        super().__init__(reader.source)
        self._reader, self._states = reader, states
        # The digest stays the checkpoint's: ranks compare it, and not all of them have all tables.
        self.digest, self.left_out = reader.digest, reader.left_out
        self.manifest = with_shapes(reader.manifest, states)

    def key_in_files(self, key: str) -> str:
        return self._reader.key_in_files(key)

    def requests(self, wanted: Sequence[tuple[str, Sequence[Piece]]], others_follow: bool = True) -> list[ReadRequest]:
        outlines = [(key, [_outline(self._reader, key)]) for key, _ in wanted if key in self._states]
        # They open the files of merged state with all others; their own reads come later.
        self._reader.requests(outlines, others_follow=True)
        as_stored = [each for each in wanted if each[0] not in self._states]
        requests = self._reader.requests(as_stored, others_follow)
        for key, pieces in wanted:
            if key in self._states:
                file = _MergedFile(self._reader, key, self._states[key])
                requests += map(file.request, pieces)
        return requests

    def close(self) -> None:
        self._reader.close()
        super().close()


class _MergedFile(ComputedFile):
    """A file with the merged state of one table, which is computed from the stored parts as it is read.

    Args:
        reader: of the stored state, its files open.
        key: of the stored state.
        state: its cuts.
    """

    def __init__(self, reader: CheckpointReader, key: str, state: RowState) -> None:
        super().__init__(reader.source.storage, f"merged {key}")
        self._reader, self._key, self._state = reader, key, state
        self._dtype: Dtype = reader.manifest.tensors[key].dtype

    def request(self, piece: Piece) -> ReadRequest:
        """Returns the read that fills a piece of the app's tensor."""
        everything = whole(self._state.shape)
        entry = self.entry(self._key, form_of(self._dtype, everything))
        return ReadRequest(self, entry, self._dtype, everything.sizes, piece.box, piece.tensor)

    def check(self, entry: Entry, read: ReadChunks) -> Iterator[Problem]:
        for request in self._reader.requests([(self._key, [_outline(self._reader, self._key)])]):
            yield from damaged_segments(request.file, request.entry)

    def fill(self, spans: Sequence[Span]) -> None:
        dtype = torch_dtype(self._dtype)
        for offset, memory in spans:
            if not memory.nbytes:
                continue
            target, at = torch.frombuffer(memory, dtype=dtype), offset // dtype.itemsize
            while len(target):
                row = at % self._state.rows
                count = min(self._state.rows - row, len(target))
                target[:count] = self._mean(row, count)
                target, at = target[count:], at + count

    def _mean(self, row: int, count: int) -> torch.Tensor:
        """Reads some rows of all parts; returns their weighted mean, [count], in the stored dtype."""
        rows, widths, _ = self._state
        info = self._reader.info(self._key)
        parts = torch.empty(len(widths), count, dtype=info.dtype, device="cpu")
        ones = (1,) * (len(info.shape) - 1)
        pieces = [
            Piece(Box((part * rows + row, *(0 for _ in ones)), (count, *ones)), memory.view(count, *ones))
            for part, memory in enumerate(parts)
        ]
        fetch_here(self._reader.requests([(self._key, pieces)]))
        if len(widths) == 1:
            return parts[0]
        weights = torch.tensor(widths, dtype=torch.float64, device="cpu")
        return (weights @ parts.double() / sum(widths)).to(info.dtype)


def _outline(reader: CheckpointReader, key: str) -> Piece:
    """Returns all of a stored tensor, without memory."""
    info = reader.info(key)
    return Piece(whole(info.shape), torch.empty(info.shape, dtype=info.dtype, device="meta"))
