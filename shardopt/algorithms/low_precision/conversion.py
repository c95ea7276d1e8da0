"""Converts stored state between forms: codes, bf16 and fp32; with a master and without.

Widening is exact: codes times their scales, and bf16, are fp32 numbers. So is a master that is made of its parameter.
Narrowing rounds to nearest, and a master that is dropped leaves what the parameter has of it: the largest error, over
the largest number of the tensor on this rank, is returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardopt.algorithms.low_precision.chunks import Scratch, as_matrix, block_size, blocks_of_row, chunks_of, load
from shardopt.algorithms.low_precision.codes import as_stored, encode, scales_for
from shardopt.algorithms.low_precision.options import MASTER, STEP, Form, Stored, form_of
from shardopt.algorithms.low_precision.shared_scales import rows_of
from shardopt.algorithms.registry import AlgorithmSpec, Options
from shardopt.algorithms.shared_rows import cuts_of_rows
from shardopt.errors import Problem
from shardopt.sharding.reduced import blocks_like
from shardopt.sharding.view import assemble, local_tensors, tells_of_others, view_of
from shardopt.state.param_groups import STORAGE_OPTIONS, UNTOUCHED


class Conversion(NamedTuple):
    """The change of one entry of a parameter's state.

    Args:
        entry: its name.
        then, now: its dtypes; None where it was not, or is no more.
        error: the largest difference over the largest number; 0 where it is exact.
    """

    entry: str
    then: torch.dtype | None
    now: torch.dtype | None
    error: float


class CannotConvert(Exception):
    """An entry cannot be converted here."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def storage_of(options: Options) -> dict[str, Any]:
    """Returns a group's options for storage, with torch's way to store as the default."""
    return {name: options.get(name, default) for name, default in STORAGE_OPTIONS.items()}


@torch.no_grad()
def converted(
    spec: AlgorithmSpec, options: Options, then: Options, parameter: Tensor, entries: Mapping[str, Any], counts: bool
) -> tuple[dict[str, Any], list[Conversion]]:
    """Converts the state of a parameter from the form that another group's options stored to this group's form.

    Args:
        spec: of the algorithm itself.
        options: of the group here, those of storage among them or not.
        then: of the group that stored it.
        parameter: has its values; placed as the state. A master is made of them.
        entries: the state; not changed.
        counts: whether state here has a `step`, also of an algorithm that has none.

    Raises:
        CannotConvert: codes are wanted, and ranks share rows, or are not known to.
    """
    view = view_of(parameter)
    old, new = (form_of(spec, {**options, **storage_of(each)}, view.shape, view.dtype) for each in (then, options))
    made = dict(entries)
    if not all(entry.name in entries for entry in old.entries) or not all(
        entry.scale_name in entries for entry in old.entries if entry.coded
    ):
        return made, []  # which the comparison refuses by name
    notes: list[Conversion] = []
    by_name = {entry.name: entry for entry in old.entries}
    for entry in new.entries:
        before = by_name.get(entry.name)
        if before is None or (before.dtype, before.coded) == (entry.dtype, entry.coded):
            continue
        made.pop(before.scale_name, None)
        _refuse_cut_rows(entry, parameter)
        tensors, error = _recode(before, entry, parameter, entries)
        made |= tensors
        notes.append(Conversion(entry.name, before.dtype, entry.dtype, error))
    notes += _convert_master(old, new, parameter, made)
    if not any(entry.name == STEP for entry in spec.state):
        if counts and STEP not in made:  # any number that is not 0 says that there was a step
            made[STEP] = torch.full((), 0.0 if then.get(UNTOUCHED) else 1.0, dtype=torch.float32, device="cpu")
        elif not counts:
            made.pop(STEP, None)
    return made, notes


def _convert_master(old: Form, new: Form, parameter: Tensor, made: dict[str, Any]) -> list[Conversion]:
    """Makes or drops the master, in `made`."""
    if new.master and not old.master:
        made[MASTER] = assemble(parameter, [local.detach().float() for local in local_tensors(parameter)])
        return [Conversion(MASTER, None, torch.float32, 0.0)]
    if old.master and not new.master and MASTER in made:
        master = local_tensors(made.pop(MASTER))
        pairs = list(zip(local_tensors(parameter), master, strict=True))
        return [Conversion(MASTER, torch.float32, None, max((_off(a.float(), b) for a, b in pairs), default=0.0))]
    return []


def _refuse_cut_rows(entry: Stored, parameter: Tensor) -> None:
    if not entry.coded or (tells_of_others(parameter) and not cuts_of_rows(parameter)):
        return
    problem = Problem(
        entry.name,
        f"{entry.name} in more than 8 bits, of rows that lie on several ranks",
        "scales that need no other rank",
        "convert where it is cut only along its first dimension, and load that checkpoint here",
    )
    raise CannotConvert(problem)


def _recode(
    before: Stored, after: Stored, parameter: Tensor, entries: Mapping[str, Any]
) -> tuple[dict[str, Tensor], float]:
    """Returns an entry in another form, with scales if it is codes, and the largest relative error."""
    shape = view_of(parameter).shape
    result = assemble(parameter, [torch.empty_like(local, dtype=after.dtype) for local in local_tensors(parameter)])
    made = {after.name: result}
    if after.coded:
        made[after.scale_name] = blocks_like(parameter, blocks_of_row(shape), torch.float32)
    block = block_size(shape) if before.coded or after.coded else 0
    error = greatest = 0.0
    for source, into in zip(view_of(entries[before.name]).pieces, view_of(result).pieces, strict=True):
        if not into.box.numel:
            continue
        old, new = (as_matrix(each.tensor, into.box, shape, block) for each in (source, into))
        old_scales = rows_of(entries[before.scale_name], into.box) if before.coded else None
        new_scales = rows_of(made[after.scale_name], into.box) if after.coded else None
        for chunk in chunks_of(into.box, shape, block, new.device.type == "cpu"):
            scratch = Scratch([chunk], new.device)
            flat = load(scratch, [old], None if old_scales is None else [old_scales], before.signed)
            stored = _store(scratch, after, [new], None if new_scales is None else [new_scales], flat)
            (inside,) = scratch.own(flat)
            error = max(error, float((stored - inside).abs().nan_to_num_(nan=0.0).max()))
            greatest = max(greatest, float(inside.abs().nan_to_num_(nan=0.0, posinf=0.0).max()))
        if new.data_ptr() != into.tensor.data_ptr():
            into.tensor.copy_(new.view(into.tensor.shape))
    return made, error / greatest if greatest else 0.0


def _store(
    scratch: Scratch, stored: Stored, matrices: list[Tensor], scales: list[Tensor] | None, flat: Tensor
) -> Tensor:
    """Stores a chunk's numbers, rounded to nearest; returns what is stored, as fp32."""
    if scales is None:
        scratch.put(flat, matrices)
    else:
        blocks = scratch.blocks(flat).clone()
        found = scales_for(blocks, stored.maximum)
        scratch.put_scales(as_stored(found), scales)
        scratch.put(encode(blocks, found, stored.signed, None).view(-1), matrices)
    return scratch.own(load(scratch, matrices, scales, stored.signed))[0]


def _off(one: Tensor, other: Tensor) -> float:
    if not one.numel():
        return 0.0
    greatest = float(other.abs().max())
    return float((one - other).abs().max()) / greatest if greatest else 0.0
