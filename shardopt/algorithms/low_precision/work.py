"""The step of one parameter on this rank: loads, computes and stores chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardopt.algorithms.communicating import CommunicatingOptimizer
from shardopt.algorithms.low_precision.chunks import VECTOR, Chunk, as_matrix, block_size, chunks_of, load
from shardopt.algorithms.low_precision.codes import as_stored, encode, round_at_random, scales_for
from shardopt.algorithms.low_precision.inner import InnerSteps, Stepped
from shardopt.algorithms.low_precision.noise import noise_key, random_bits
from shardopt.algorithms.low_precision.options import MASTER, STEP, Stored, form_of
from shardopt.algorithms.low_precision.shared_scales import SharedScales, rows_of
from shardopt.algorithms.registry import Kind, Options
from shardopt.algorithms.shared_rows import RowSharingStep, cuts_of_rows
from shardopt.errors import Problem, StateError
from shardopt.sharding.box import Box
from shardopt.sharding.gradients import requires_gradient
from shardopt.sharding.view import assemble, local_tensors, view_of

_PARAMETER = ""
_GRADIENT = "grad"


class _Piece(NamedTuple):
    """The matrices of one box: the parameter (""), its gradient ("grad"), its state, and scales [rows, blocks]."""

    box: Box
    matrices: dict[str, Tensor]
    scales: dict[str, Tensor]
    shared: dict[str, Tensor]


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
        self._form = form_of(inner.spec, group, self.view.shape, self.view.dtype)
        self._block = block_size(self.view.shape) if self._form.coded else 0
        self.changed: dict[str, Any] = {}
        """The options that the step changed."""
        self.fault = self._unlike_form() or self.fault
        cuts = cuts_of_rows(parameter) if self._form.coded else ()
        if cuts and (self.gradients is not None or requires_gradient(parameter)):
            self.shared = SharedScales(parameter, self._form, cuts)

    def _unlike_form(self) -> StateError | None:
        """Returns the error to raise if state was made under other options than the group has now."""
        if not self.state:
            return None
        wanted: dict[str, torch.dtype | None] = {entry.name: entry.dtype for entry in self._form.entries}
        wanted[MASTER] = torch.float32 if self._form.master else None
        has = {name: view_of(self.state[name]).dtype if name in self.state else None for name in wanted}
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

    def find_scales(self) -> None:
        """Finds the largest values of this rank's new state, if ranks share rows."""
        assert self.shared is not None
        if self.gradients is not None:
            self.shared.flag.fill_(1)
        elif self.is_held:
            self.shared.lacks.fill_(1)
        if self.is_held:  # without a gradient, for the case that others have one: it is then zero here
            self._walk(self.state or self.optimizer.initial_state(self.group, self.parameter), store=False)

    def apply(self) -> None:
        """Takes the step."""
        if not self.state:
            self.optimizer.state[self.parameter] = self.optimizer.initial_state(self.group, self.parameter)
        self.changed = self._walk(self.state, store=True)

    def _walk(self, state: dict[str, Any], store: bool) -> dict[str, Any]:
        """Computes all chunks; stores them, or only finds the largest values of their blocks.

        Returns:
            The options that the step has changed.
        """
        steps, device = int(state[STEP]), self.device
        stepped: Stepped | None = None
        for piece in self._pieces(state):
            for chunk in chunks_of(piece.box, self._shape, self._block, device.type == "cpu"):
                stepped = self._compute(chunk, piece, state, steps, store)
            if store:
                self._put_back(piece, state)
        if stepped is None:  # counters go on where a rank has no elements
            nothing = torch.zeros(VECTOR, device=device)
            entries = {entry.name: torch.zeros_like(nothing) for entry in self._form.entries}
            stepped = self._step(nothing, torch.zeros_like(nothing), entries, state, steps)
        if store:
            for name, scales in self.shared.scales.items() if self.shared is not None else ():
                for into, new in zip(local_tensors(state[f"{name}_scale"]), local_tensors(scales), strict=True):
                    into.copy_(as_stored(new))
            for name, value in self._scalars(state).items():
                value.copy_(stepped.state[name])
            if STEP not in stepped.state:
                state[STEP] += 1
        return stepped.changed

    def _step(
        self, tensor: Tensor, gradient: Tensor, entries: dict[str, Tensor], state: Mapping[str, Any], steps: int
    ) -> Stepped:
        """Takes the algorithm's step on scratch memory."""
        if not steps and self._inner.spec.settled_at_first_step:
            return self._inner.step(self.group, tensor, gradient, {})
        scalars = {name: value.clone() for name, value in self._scalars(state).items()}
        return self._inner.step(self.group, tensor, gradient, {**scalars, **entries})

    def _scalars(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns the algorithm's own numbers in the state."""
        entries = self._inner.spec.entries(self.group, len(self._shape))
        return {entry.name: state[entry.name] for entry in entries if entry.kind is Kind.SCALAR}

    def _compute(self, chunk: Chunk, piece: _Piece, state: Mapping[str, Any], steps: int, store: bool) -> Stepped:
        """Takes the step of a chunk; stores the result, or only its largest values."""
        source = MASTER if self._form.master and steps else _PARAMETER
        tensor, gradient = (load(chunk, piece.matrices[name]) for name in (source, _GRADIENT))
        entries = {
            entry.name: load(chunk, piece.matrices[entry.name], piece.scales.get(entry.name), entry.signed)
            for entry in self._form.entries
        }
        stepped = self._step(tensor, gradient, entries, state, steps)
        if store:
            self._store(chunk, piece, tensor, stepped.state, steps)
            return stepped
        for entry in self._form.entries:
            if entry.coded:
                found = piece.shared[entry.name][chunk.rows, chunk.blocks]
                torch.maximum(found, self._scales(chunk, entry, stepped.state[entry.name]), out=found)
        return stepped

    def _scales(self, chunk: Chunk, entry: Stored, flat: Tensor) -> Tensor:
        """Returns the scales of a chunk's new values, [rows, blocks], as far as this rank knows them."""
        scratch = chunk.of_scratch(flat)
        chunk.clear_outside(scratch)
        return scales_for(scratch.view(scratch.shape[0], -1, chunk.block), entry.maximum)

    def _store(self, chunk: Chunk, piece: _Piece, tensor: Tensor, new: Mapping[str, Tensor], steps: int) -> None:
        form, matrices = self._form, piece.matrices
        needs_noise = form.rounds_parameter or form.rounds_state
        index, most = chunk.positions(tensor.device) if needs_noise else (tensor, 0)

        def noise(entry: str) -> Tensor:
            return random_bits(index, most, noise_key(self.name, entry, steps + 1))

        def put(name: str, scratch: Tensor) -> None:
            chunk.of(matrices[name]).copy_(scratch[:, chunk.inside])

        stepped = chunk.of_scratch(tensor)
        if form.master:
            put(MASTER, stepped)
        put(_PARAMETER, round_at_random(stepped, noise("param")) if form.rounds_parameter else stepped)
        for entry in form.entries:
            values = chunk.of_scratch(new[entry.name])
            at_random = form.rounds_state and not entry.maximum  # whose noise would only ever lift it
            if entry.coded:
                codes = self._encode(chunk, piece, entry, new[entry.name], noise(entry.name) if at_random else None)
                put(entry.name, codes)
            elif at_random and entry.dtype is torch.bfloat16:
                put(entry.name, round_at_random(values, noise(entry.name)))
            else:
                put(entry.name, values)

    def _encode(self, chunk: Chunk, piece: _Piece, entry: Stored, flat: Tensor, noise: Tensor | None) -> Tensor:
        """Returns codes of a chunk's new values; stores their scales unless other ranks share them."""
        scales = self._scales(chunk, entry, flat)
        if self.shared is None:
            piece.scales[entry.name][chunk.rows, chunk.blocks] = as_stored(scales)
        else:  # the stored ones are those that other chunks are still decoded with
            scales = piece.shared[entry.name][chunk.rows, chunk.blocks]
        scratch = chunk.of_scratch(flat)
        codes = encode(scratch.view(scratch.shape[0], -1, chunk.block), scales, entry.signed, noise)
        return codes.view(scratch.shape)

    def _pieces(self, state: Mapping[str, Any]) -> Iterator[_Piece]:
        """Yields this rank's boxes, with the memory of all matrices that belong to them."""
        parameter, names = self.parameter, [entry.name for entry in self._form.entries]
        gradients = self.gradients or [torch.zeros_like(local) for local in local_tensors(parameter)]
        tensors = {_PARAMETER: parameter, _GRADIENT: assemble(parameter, gradients)}
        tensors |= {name: state[name] for name in (*names, *([MASTER] if self._form.master else []))}
        views = {name: view_of(tensor).pieces for name, tensor in tensors.items()}
        coded = [entry for entry in self._form.entries if entry.coded]
        for number, piece in enumerate(views[_PARAMETER]):
            if not piece.box.numel:
                continue
            yield _Piece(
                piece.box,
                {
                    name: as_matrix(pieces[number].tensor, piece.box, self._shape, self._block)
                    for name, pieces in views.items()
                },
                {entry.name: rows_of(state[entry.scale_name], piece.box) for entry in coded},
                {} if self.shared is None else {e.name: rows_of(self.shared.scales[e.name], piece.box) for e in coded},
            )

    def _put_back(self, piece: _Piece, state: Mapping[str, Any]) -> None:
        """Copies matrices that are copies back to their original memory."""
        for name, matrix in piece.matrices.items():
            if name == _GRADIENT:
                continue
            tensor = self.parameter if name == _PARAMETER else state[name]
            own = next(each.tensor for each in view_of(tensor).pieces if each.box == piece.box)
            if own.data_ptr() != matrix.data_ptr():
                own.copy_(matrix.view(own.shape))


def _named(dtype: torch.dtype | None) -> str:
    return "none" if dtype is None else str(dtype)
