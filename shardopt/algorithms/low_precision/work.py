"""The steps of parameters on this rank: loaded, computed and stored, in chunks of one or of several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardopt.algorithms.communicating import CommunicatingOptimizer
from shardopt.algorithms.low_precision.chunks import (
    VECTOR,
    Chunk,
    Scratch,
    as_matrix,
    block_size,
    chunks_of,
    load,
    together,
)
from shardopt.algorithms.low_precision.codes import as_stored, encode, round_at_random, scales_for
from shardopt.algorithms.low_precision.inner import InnerSteps, Stepped
from shardopt.algorithms.low_precision.noise import Noise, noise_key
from shardopt.algorithms.low_precision.options import MASTER, STEP, Stored, form_of
from shardopt.algorithms.low_precision.shared_scales import SharedScales, rows_of
from shardopt.algorithms.registry import Options
from shardopt.algorithms.shared_rows import RowSharingStep, cuts_of_rows
from shardopt.errors import Problem, StateError
from shardopt.sharding.box import Box
from shardopt.sharding.gradients import requires_gradient
from shardopt.sharding.view import assemble, local_tensors, view_of

_PARAMETER = ""
_GRADIENT = "grad"


class Piece(NamedTuple):
    """The matrices of one box: of the parameter (""), its gradient ("grad") and state; and [rows, blocks] of scales.

    `copied` has this rank's memory of what a step stores to a matrix that is a copy.
    """

    box: Box
    matrices: dict[str, Tensor]
    copied: dict[str, Tensor]
    scales: dict[str, Tensor]
    shared: dict[str, Tensor]

    def put_back(self) -> None:
        """Writes matrices that are copies back to the memory that they are of."""
        for name, own in self.copied.items():
            own.copy_(self.matrices[name].view(own.shape))


class LowPrecisionStep(RowSharingStep):
    """The step of one parameter.

    Args:
        optimizer: has its state.
        inner: steps of the algorithm.
        group: has its options.
        parameter: of any kind.
    """

    shared: SharedScales | None
    group: Any  # which a step of some algorithms changes

    def __init__(self, optimizer: CommunicatingOptimizer, inner: InnerSteps, group: Options, parameter: Tensor) -> None:
        super().__init__(optimizer, group, parameter)
        self._inner, self._shape = inner, self.view.shape
        self.form = form_of(inner.spec, group, self.view.shape, self.view.dtype)
        self.block = block_size(self.view.shape) if self.form.coded else 0
        self.changed: dict[str, Any] = {}
        """The options that the step changed."""
        self.fault = self._unlike_form() or self.fault
        cuts = cuts_of_rows(parameter) if self.form.coded else ()
        if cuts and (self.gradients is not None or requires_gradient(parameter)):
            self.shared = SharedScales(parameter, self.form, cuts)

    def _unlike_form(self) -> StateError | None:
        """Returns the error to raise if state was made under other options than the group has now."""
        if not self.state:
            return None
        wanted: dict[str, torch.dtype | None] = {entry.name: entry.dtype for entry in self.form.entries}
        wanted[MASTER] = torch.float32 if self.form.master else None
        has = {name: _dtype_of(self.state[name]) if name in self.state else None for name in wanted}
        remedy = "put the group's options back; state is stored as they said when it was made"
        problems = [
            Problem(f"{self.name}: {name}", _named(has[name]), f"{_named(dtype)}, as its group says", remedy)
            for name, dtype in wanted.items()
            if has[name] is not dtype
        ]
        return (
            StateError("state is stored otherwise than its group says", problems, code="bad-options")
            if problems
            else None
        )

    def alike(self) -> Any:
        """Returns what is equal for parameters whose chunks may be computed together."""
        if self.fault is not None:
            return self
        numbers = [self.state[STEP], *self._scalars.values()] if self.state else []
        return self.form, self.block, self.shared is None, *map(float, numbers)

    @property
    def is_fused(self) -> bool:
        """Whether torch's fused kernel takes the step."""
        return self._inner.fuses(self.group, self.device.type)

    @property
    def is_brought_in(self) -> bool:
        """Whether the algorithm is the user's own."""
        return self._inner.spec.is_brought_in

    @cached_property
    def working(self) -> dict[str, Any]:
        """The state to compute with: the live one, or as it is before the first step."""
        return self.state or self.optimizer.initial_state(self.group, self.parameter)

    @cached_property
    def _scalars(self) -> dict[str, Tensor | int]:
        """The algorithm's own numbers in the state."""
        return {name: self.working[name] for name in self.form.scalars}

    def chunks(self, piece: Piece) -> Iterator[Chunk]:
        """Returns the chunks of a piece."""
        return chunks_of(piece.box, self._shape, self.block, self.device.type == "cpu")

    def compute(self, tensor: Tensor, gradient: Tensor, entries: Mapping[str, Tensor]) -> Stepped:
        """Takes the algorithm's step on scratch memory, with the numbers of the state."""
        if not self.working[STEP] and self._inner.spec.settled_at_first_step:
            return self._inner.step(self.group, tensor, gradient, {})
        scalars = {name: value.clone() if isinstance(value, Tensor) else value for name, value in self._scalars.items()}
        return self._inner.step(self.group, tensor, gradient, {**scalars, **entries})

    def flag(self) -> None:
        """Notes for the ranks that share rows whether there is a gradient here."""
        assert self.shared is not None
        if self.gradients is not None:
            self.shared.flag.fill_(1)
        elif self.is_held:
            self.shared.lacks.fill_(1)

    def finish(self, stepped: Stepped) -> None:
        """Stores what is of no chunk: scales that ranks share, and the numbers of the state."""
        for name, scales in self.shared.scales.items() if self.shared is not None else ():
            for into, new in zip(local_tensors(self.state[f"{name}_scale"]), local_tensors(scales), strict=True):
                into.copy_(as_stored(new))
        for name, value in self._scalars.items():
            if isinstance(value, Tensor):
                value.copy_(stepped.state[name])
            else:
                self.working[name] = stepped.state[name]
        if STEP not in stepped.state:
            self.state[STEP] += 1
        self.changed = stepped.changed

    def pieces(self) -> Iterator[Piece]:
        """Yields the boxes that this rank has, with the memory of all that belongs to them."""
        state = self.working
        names = [*(entry.name for entry in self.form.entries), *([MASTER] if self.form.master else [])]
        tensors = {name: self._memory_of(local_tensors(state[name])) for name in names}
        tensors[_PARAMETER] = [piece.tensor for piece in self.view.pieces]
        tensors[_GRADIENT] = self._memory_of(self.gradients or [torch.zeros_like(each) for each in self.local_tensors])
        coded = [entry for entry in self.form.entries if entry.coded]
        for number, piece in enumerate(self.view.pieces):
            if not piece.box.numel:
                continue
            memory = {name: each[number] for name, each in tensors.items()}
            matrices = {name: as_matrix(own, piece.box, self._shape, self.block) for name, own in memory.items()}
            memory.pop(_GRADIENT)
            yield Piece(
                piece.box,
                matrices,
                {name: own for name, own in memory.items() if own.data_ptr() != matrices[name].data_ptr()},
                {entry.name: rows_of(state[entry.scale_name], piece.box) for entry in coded},
                {} if self.shared is None else {e.name: rows_of(self.shared.scales[e.name], piece.box) for e in coded},
            )

    def _memory_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Returns the memory of each box of the parameter, in tensors that lie as its local tensors do."""
        pieces = self.view.pieces
        if len(pieces) == len(tensors) == 1 and pieces[0].tensor.shape == tensors[0].shape:
            return [tensors[0].detach()]
        return [piece.tensor for piece in view_of(assemble(self.parameter, tensors)).pieces]


class _Work:
    """The step of some chunks that lie in scratch memory together.

    Args:
        parts: chunks, with the step and the piece of each; of steps that are `alike`.
    """

    def __init__(self, parts: Sequence[tuple[Chunk, tuple[LowPrecisionStep, Piece]]]) -> None:
        self._steps = [step for _, (step, _) in parts]
        self._pieces = [piece for _, (_, piece) in parts]
        self._first = self._steps[0]
        self._scratch = Scratch([chunk for chunk, _ in parts], self._first.device)

    def compute(self, store: bool) -> Stepped:
        """Takes the step; stores the result, or only the largest values in it."""
        form, steps = self._first.form, int(self._first.working[STEP])
        # A fused step cannot fail halfway. torch's loop can, for memory; a class of the user's may write to gradients.
        in_place = store and self._first.is_fused
        tensor = self._load(MASTER if form.master and steps else _PARAMETER, in_place)
        gradient = self._load(_GRADIENT, in_place=not self._first.is_brought_in)
        entries = {entry.name: self._load(entry.name, in_place, entry) for entry in form.entries}
        stepped = self._first.compute(tensor, gradient, entries)
        if store:
            self._store(tensor, stepped.state, steps + 1)
            return stepped
        for entry in form.entries:
            if entry.coded:
                self._lift_shared(entry, self._scales(entry, stepped.state[entry.name]))
        return stepped

    def _matrices(self, name: str) -> list[Tensor]:
        return [piece.matrices[name] for piece in self._pieces]

    def _load(self, name: str, in_place: bool, entry: Stored | None = None) -> Tensor:
        if entry is None or not entry.coded:
            return load(self._scratch, self._matrices(name), in_place=in_place)
        return load(self._scratch, self._matrices(name), [piece.scales[name] for piece in self._pieces], entry.signed)

    def _scales(self, entry: Stored, flat: Tensor) -> Tensor:
        """Returns the scales of new values, as far as this rank has them; clears what is around these."""
        self._scratch.clear_outside(flat)
        return scales_for(self._scratch.blocks(flat), entry.maximum)

    def _lift_shared(self, entry: Stored, scales: Tensor) -> None:
        shared = [piece.shared[entry.name] for piece in self._pieces]
        # One after the other, as several chunks may have parts of one block.
        for known, new in zip(self._scratch.scales_of(shared), self._scratch.split_scales(scales, shared), strict=True):
            torch.maximum(known, new, out=known)

    def _store(self, tensor: Tensor, new: Mapping[str, Tensor], steps: int) -> None:
        form, scratch = self._first.form, self._scratch

        def at_random(flat: Tensor, name: str) -> Tensor:
            return round_at_random(scratch.used(flat), noise(name))

        def noise(entry: str) -> Noise:
            return scratch.noise([noise_key(step.name, entry, steps) for step in self._steps])

        if form.master:
            scratch.put(tensor, self._matrices(MASTER))
        scratch.put(at_random(tensor, "param") if form.rounds_parameter else tensor, self._matrices(_PARAMETER))
        for entry in form.entries:
            values = new[entry.name]
            random = form.rounds_state and not entry.maximum  # whose noise would only ever lift it
            if entry.coded:
                values = self._encoded(entry, values, noise(entry.name) if random else None)
            elif random and entry.dtype is torch.bfloat16:
                values = at_random(values, entry.name)
            scratch.put(values, self._matrices(entry.name))

    def _encoded(self, entry: Stored, flat: Tensor, noise: Noise | None) -> Tensor:
        """Returns codes of new values, flat; stores their scales where no other rank has a part in them."""
        scratch = self._scratch
        if self._first.shared is None:
            scales = self._scales(entry, flat)
            scratch.put_scales(as_stored(scales), [piece.scales[entry.name] for piece in self._pieces])
        else:  # the stored ones are those that other chunks are still decoded with
            scratch.clear_outside(flat)
            shared = scratch.scales_of([piece.shared[entry.name] for piece in self._pieces])
            scales = torch.cat([each.reshape(-1) for each in shared])
        return encode(scratch.blocks(flat), scales, entry.signed, noise).view(-1)


def walk(steps: Sequence[LowPrecisionStep], store: bool) -> None:
    """Computes all chunks of steps that are `alike`, and stores them, or only finds the largest values in blocks."""
    first, pieces = steps[0], [(step, piece) for step in steps for piece in step.pieces()]
    chunks = ((chunk, (step, piece)) for step, piece in pieces for chunk in step.chunks(piece))
    stepped: Stepped | None = None
    for parts in together(chunks, first.device.type == "cpu"):
        stepped = _Work(parts).compute(store)
    if not store:
        return
    for _, piece in pieces:
        piece.put_back()
    if stepped is None:  # counters advance where a rank has no elements
        nothing = torch.zeros(VECTOR, device=first.device)
        entries = {entry.name: torch.zeros_like(nothing) for entry in first.form.entries}
        stepped = first.compute(nothing, torch.zeros_like(nothing), entries)
    for step in steps:
        step.finish(stepped)


def _dtype_of(tensor: Tensor) -> torch.dtype:
    """Returns the dtype of a tensor of any kind: that of a ShardedTensor comes with a warning."""
    here = local_tensors(tensor)
    return here[0].dtype if here else view_of(tensor).dtype


def _named(dtype: torch.dtype | None) -> str:
    return "none" if dtype is None else str(dtype)
