"""Bags of ids to look up: checks them without waiting for a device, and pools their vectors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from shardopt.errors import InputError, Problem
from shardopt.nn.table import Table
from shardopt.sharding.view import local_tensors

Given = Tensor | Sequence[Tensor | None]
"""Ids, or (ids, offsets), or (ids, offsets, per_sample_weights)."""


@dataclass(frozen=True, slots=True)
class Bags:
    """The ids for one table, and how they are pooled.

    Args:
        table: where they are looked up.
        ids: int64; [L] where they are pooled.
        offsets: where each bag begins, [B] int64, or [B + 1] with `ends`. None where nothing is pooled.
        weights: for each id, [L], of the table's dtype; None is 1 for all.
        dtype: of the vectors.
        ends: whether the last of the offsets is the end of the last bag.
    """

    table: Table
    ids: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None
    dtype: torch.dtype = torch.float32
    ends: bool = False

    @property
    def begins(self) -> Tensor:
        """Where each bag begins, [B] int64."""
        assert self.offsets is not None
        return self.offsets[:-1] if self.ends else self.offsets

    @property
    def count(self) -> int:
        """How many bags there are, B."""
        return len(self.begins)

    def are_summed_afar(self, parts: int) -> bool:
        """Whether ranks that have parts of the rows send the sums of bags, and not rows.

        So they do where the vectors of all bags from all parts are fewer than different rows can be. But weights that
        get gradients need the rows; and vectors of a table that is cut by columns or whole are to be torch's to the
        bit, which multiplies in another way where there is padding, and rounds fp16 and bf16 once.
        """
        weights, table, is_short = self.weights, self.table, self.dtype.itemsize < 4
        if self.offsets is None or (weights is not None and weights.requires_grad):
            return False
        if is_short and (parts > 1 or table.mode == "mean"):
            return False
        if table.padding_idx is not None and (is_short or weights is not None):
            return False
        return parts * self.count < min(len(self.ids), table.num_embeddings)

    def faulty(self) -> Tensor:
        """Returns, as a bool on the ids' device, whether an id has no row or offsets are wrong; waits for nothing."""
        faulty = _out_of_range(self.ids, self.table).any()
        return faulty if self.offsets is None else faulty | self._wrong_offsets()

    def faults(self) -> Iterator[Problem]:
        """Yields the problems that `faulty` detected; waits for the device."""
        outside = self.ids[_out_of_range(self.ids, self.table)].flatten().tolist()
        if outside:
            others = f" (and {len(outside) - 1} more)" if len(outside) > 1 else ""
            required = f"ids from 0 to {self.table.num_embeddings - 1}"
            remedy = "map ids to rows before the lookup, or give the table more rows (docs/tables.md, More rows)"
            yield Problem(self.table.name, f"id {outside[0]}{others}", required, remedy)
        if self.offsets is not None and self._wrong_offsets():
            required = (
                f"offsets that begin with 0, never fall, and end within {len(self.ids)} ids, none behind the last bag"
            )
            present = f"offsets {self.offsets[:8].tolist()}{'...' if len(self.offsets) > 8 else ''}"
            yield Problem(self.table.name, present, required, "pass where each bag begins")

    def pooled(self, positions: Tensor | None, vectors: Tensor) -> Tensor:
        """Pools vectors to one per bag, [B, D]; without pooling, one per id, [*ids.shape, D].

        Args:
            positions: of each id's vector in `vectors`, as the ids; those of padding are U. None where vectors are
                the sums of bags.
            vectors: [U, D], or [B, D].
        """
        if positions is None:
            return vectors if self.table.mode == "sum" else vectors / self._counts().to(vectors.dtype).unsqueeze(1)
        padding = None if self.table.padding_idx is None else len(vectors)
        if padding is not None:
            vectors = torch.cat([vectors, vectors.new_zeros(1, vectors.shape[1])])
        if self.offsets is None:
            return functional.embedding(positions, vectors, padding)
        return functional.embedding_bag(
            positions,
            vectors,
            self.offsets,
            mode=self.table.mode,
            per_sample_weights=self.weights,
            include_last_offset=self.ends,
            padding_idx=padding,
        )

    def _counts(self) -> Tensor:
        """Returns how many ids each bag has, but padding, [B] int64; 1 where none."""
        begins, padding = self.begins, self.table.padding_idx
        counted = torch.arange(len(self.ids) + 1, device=begins.device)
        if padding is not None:
            counted[1:] = (self.ids != padding).cumsum(0)
        return counted.index_select(0, begins).diff(append=counted[-1:]).clamp(min=1)

    def _wrong_offsets(self) -> Tensor:
        offsets = self.offsets
        assert offsets is not None
        if not len(offsets):
            return torch.full((), bool(len(self.ids)), device=offsets.device)
        # torch leaves the gradients of ids behind the last bag as the memory was.
        past = offsets[-1] != len(self.ids) if self.ends else offsets[-1] > len(self.ids)
        return (offsets[0] != 0) | past | (offsets[1:] < offsets[:-1]).any()


def bags_of(
    tables: Mapping[str, Table],
    given: Mapping[str, Given],
    pools: bool,
    ends: bool,
    dtypes: Mapping[str, torch.dtype],
    device: torch.device,
) -> list[Bags]:
    """Checks a module's ids, and makes bags of them.

    Args:
        tables: by name.
        given: by name of the table.
        pools: whether the module pools the vectors of tables whose mode says so.
        ends: whether offsets have the end of the last bag, too.
        dtypes: of the parameters, by name of the table.
        device: that ids have to be on.

    Raises:
        InputError: names, dtypes, shapes or devices are wrong; lists all of them.
    """
    bags, problems = [], []
    for name, value in given.items():
        if name not in tables:
            problems.append(Problem(name, "ids for an unknown table", f"one of {sorted(tables)}", "mend the name"))
            continue
        try:
            pooled = pools and tables[name].mode != "none"
            bags.append(_bags(tables[name], value, pooled, ends, dtypes[name], device))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError("a lookup cannot be done", problems)
    return bags


def _bags(table: Table, given: Given, pooled: bool, ends: bool, dtype: torch.dtype, device: torch.device) -> Bags:
    arguments = [given] if isinstance(given, Tensor) else list(given) if isinstance(given, Sequence) else []
    first, *others = arguments or [None]
    if (
        len(arguments) > 3
        or not isinstance(first, Tensor)
        or not all(isinstance(argument, Tensor | None) for argument in others)
    ):
        present = f"a {type(given).__name__} of {[type(argument).__name__ for argument in arguments]}"
        raise _refusal(table, present, "ids, (ids, offsets) or (ids, offsets, weights)", "pass tensors")
    strange = [argument for argument in arguments if argument is not None and not _is_plain(argument)]
    if strange:
        kind = type(strange[0]).__name__
        raise _refusal(table, f"a {strange[0].layout} {kind}", "plain tensors", "pass what this rank has")
    ids, offsets, weights = first, *[*others, None, None][:2]
    for name, tensor in (("ids", ids), ("offsets", offsets)):
        if tensor is not None and (tensor.dtype not in (torch.int32, torch.int64) or tensor.device != device):
            present = f"{name} of {tensor.dtype} on {tensor.device}"
            raise _refusal(table, present, f"int64 or int32 on {device}", "convert them")
    if not pooled:
        if offsets is not None or weights is not None:
            raise _refusal(table, "offsets or weights", "ids alone, as nothing is pooled", "leave them out")
        return Bags(table, ids.long())
    if weights is not None:
        if table.mode != "sum":
            raise _refusal(table, f"weights with mode {table.mode!r}", "mode 'sum'", "leave them out, or sum")
        if weights.shape != ids.shape or weights.dtype != dtype or weights.device != device:
            present = f"weights {tuple(weights.shape)} of {weights.dtype} on {weights.device}"
            required = f"{tuple(ids.shape)}, as the ids, of {dtype} on {device}"
            raise _refusal(table, present, required, "pass one for each id")
        weights = weights.flatten()
    if ids.dim() == 2 and offsets is None:
        bags, length = ids.shape
        offsets = torch.arange(bags, device=ids.device) * length
        return Bags(table, ids.flatten().long(), offsets, weights, dtype)
    if ids.dim() != 1 or offsets is None or offsets.dim() != 1 or (ends and not len(offsets)):
        shapes = f"ids {tuple(ids.shape)} and offsets {None if offsets is None else tuple(offsets.shape)}"
        required = "[L] and [B], with include_last_offset [B + 1]; or ids [B, L] alone"
        raise _refusal(table, shapes, required, "pass the ids of all bags one after the other, and where each begins")
    return Bags(table, ids.long(), offsets.long(), weights, dtype, ends)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and any(local is tensor for local in local_tensors(tensor))


def _out_of_range(ids: Tensor, table: Table) -> Tensor:
    return (ids < 0) | (ids >= table.num_embeddings)


def _refusal(table: Table, present: str, required: str, remedy: str) -> InputError:
    return InputError("a lookup cannot be done", [Problem(table.name, present, required, remedy)])
