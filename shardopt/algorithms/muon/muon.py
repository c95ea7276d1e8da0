"""Muon on sharded parameters: each matrix is orthogonalised whole, by one of the ranks that hold it.

A parameter is one matrix, or holds several (`matrices.py`): experts, or parts that are fused. Of each, with θ of M rows
and N columns, G gradient, B momentum, O the update; μ momentum, k = ns_steps.

    B ← μ B + (1 − μ) G
    U = μ B + (1 − μ) G with nesterov, else B
    O = X_k, where X_0 = U / max(‖U‖, eps), X_{i+1} = a X_i + (b A + c A²) X_i, A = X_i X_iᵀ
    θ ← (1 − lr weight_decay) θ − lr s O

with (a, b, c) = ns_coefficients; s = √max(1, M / N), or 0.2 √max(M, N) under adjust_lr_fn="match_rms_adamw". The
transpose of a matrix with M > N is orthogonalised. Sources: Jordan et al., Muon: An optimizer for hidden layers in
neural networks (2024); Liu et al., Muon is scalable for LLM training (2025); options as torch.optim.Muon has them.

Each rank computes B, U and θ, which are elementwise, on its shards. U goes to the owner of the matrix in the dtype in
which O is computed, and O comes back in it: one all-to-all there and one back for all matrices together, or a few where
they are large. The owner computes on the whole matrix, so that the result is the same bits on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from operator import add
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.dense_gradients import dense_gradients
from shardopt.algorithms.late_checks import LateChecks
from shardopt.algorithms.muon.assignment import Job
from shardopt.algorithms.muon.matrices import job_of, layout_on, matrices_in, split_of
from shardopt.algorithms.muon.newton_schulz import adjustment, orthogonalised
from shardopt.algorithms.muon.redistribute import MatrixRedistributor
from shardopt.algorithms.muon.teams import Team, refusal, refuse_differing_gradients
from shardopt.errors import GradientError, Problem, StateError
from shardopt.ranks import ranks_among, ranks_of
from shardopt.sharding.box import Box, cover_faults
from shardopt.sharding.layout import Layout
from shardopt.sharding.pieces import View, narrowed
from shardopt.sharding.view import assemble, device_of, groups_of, is_held, local_tensors, members_of, view_of

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_ADJUSTMENTS = (None, "original", "match_rms_adamw")


class Muon(Optimizer):
    """torch.optim.Muon for parameters that may be sharded, on one or several meshes.

    State of a parameter: `momentum_buffer`, which lies as the parameter does. Every rank of every mesh must call
    `step` with the same parameters in the same order, and the same of them must have gradients.

    Args:
        params: matrices [M, N], stacks of them [E, M, N] (experts), or groups of these.
        lr: the learning rate, a number or a tensor of one element.
        weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps: as above.
        adjust_lr_fn: "original" (as is None) or "match_rms_adamw".
        split: how each matrix is cut along its rows into matrices that are orthogonalised by themselves: into a number
            of equal parts (3 for a fused query, key and value; the number of heads), or parts of so many rows.
        ns_dtype: the dtype in which matrices are orthogonalised and travel: "bfloat16", in which torch's are, "float32"
            or "float64".

    Raises:
        ValueError: an option is out of its range.
    """

    names: Mapping[Tensor, str] = MappingProxyType({})
    """Parameter → its name, for errors and for the order of parameters; a keyed optimizer sets it."""

    round_bytes = 128 << 20
    """The size of an owner's matrices from which on another one waits for the next round; at any time there are up to
    four such buffers. The same on every rank."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        ns_dtype: str = "bfloat16",
        split: int | tuple[int, ...] | None = None,
    ) -> None:
        demands = [
            ("lr", lr, "a number, or a tensor of one element", not isinstance(lr, Tensor) or lr.numel() == 1),
            ("lr", lr, "at least 0", isinstance(lr, Tensor) or lr >= 0),
            ("weight_decay", weight_decay, "at least 0", weight_decay >= 0),
            ("momentum", momentum, "at least 0", momentum >= 0),
            ("ns_coefficients", ns_coefficients, "three numbers", len(ns_coefficients) == 3),
            ("ns_steps", ns_steps, "less than 100", ns_steps < 100),
            ("adjust_lr_fn", adjust_lr_fn, f"one of {_ADJUSTMENTS}", adjust_lr_fn in _ADJUSTMENTS),
            ("ns_dtype", ns_dtype, f"one of {tuple(_DTYPES)}", ns_dtype in _DTYPES),
        ]
        for name, value, required, kept in demands:
            if not kept:
                raise ValueError(f"Muon's {name} is {value!r}; required {required}")
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
            "split": split_of(split),
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step. Collective: every rank of every mesh in it must call.

        For each set of ranks over which matrices lie, one all-to-all to the owners and one back for every
        `round_bytes` that an owner works on; before them, on the CPU or where there are ShardedTensors, one small
        all-reduce that finds absent gradients. No device is waited for, but for ShardedTensors or an lr that is there.

        Where nothing is waited for, the first exchange also carries which rank has which gradients, and matrices of
        which nobody has one take part in it. Differences are raised once they have come to the host, in a later step.

        Args:
            closure: evaluates the model again and returns the loss, which is returned; called once.

        Raises:
            GradientError: on all ranks that share a matrix: its gradient does not fit it or is sparse on one of them,
                or is absent on some. Nothing was changed; but on an accelerator, where an earlier step has taken what
                was absent or refused for zeros.
            StateError: a parameter was sharded in another way since its momentum was made.
            AlgorithmError: a parameter has rows that cannot be split as the option says. Nothing was changed.
        """
        self._late.run_ready()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices = [
            _Matrix(parameter, group, self.names.get(parameter, ""))
            for group in self.param_groups
            for parameter in group["params"]
        ]
        teams = _teams(sorted(matrices, key=lambda matrix: matrix.name))
        problems = [problem for team in teams if team.checks_first for problem in team.agree()]
        unchecked = {matrix for team in teams if not team.checks_first for matrix in team.matrices}
        _raise_fault(matrix for matrix in matrices if matrix not in unchecked)
        if problems:
            raise refusal(problems)
        for matrix in matrices:
            if matrix.gradients is not None and matrix.is_held:
                matrix.update_momentum(self._momentum(matrix))
        for team in teams:
            self._orthogonalise(team)
        _raise_fault(unchecked)  # now that the others do not wait for this rank
        return loss

    def initial_state(self, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
        """Makes the state of a parameter that has none, as its first step would; changes nothing."""
        return {"momentum_buffer": assemble(parameter, [torch.zeros_like(local) for local in local_tensors(parameter)])}

    def _orthogonalise(self, team: Team[_Matrix]) -> None:
        stepping = team.stepping()
        if not stepping:
            return
        dtype = _DTYPES[stepping[0].group["ns_dtype"]]
        redistributor = MatrixRedistributor(team.ranks, dtype, stepping[0].device, self.round_bytes)
        tasks = [_Part(matrix, box) for matrix in stepping for box in matrix.boxes]
        flags = redistributor.run(tasks, team.gradient_flags(stepping))
        if not team.checks_first:
            names = [matrix.name for matrix in stepping]
            self._late.defer(flags, partial(refuse_differing_gradients, team.ranks.members, names))

    @property
    def _late(self) -> LateChecks:
        checks: LateChecks = self.__dict__.setdefault("_late_checks", LateChecks())  # copies are made without it
        return checks

    def _momentum(self, matrix: _Matrix) -> Tensor:
        state = self.state[matrix.parameter]
        if not state:
            state.update(self.initial_state(matrix.group, matrix.parameter))
        buffer: Tensor = state["momentum_buffer"]
        return buffer


class _Matrix:
    """One parameter in one step: a matrix, or several.

    Args:
        parameter: the user's.
        group: its options.
        name: its FQN, "" where that is not known.
    """

    def __init__(self, parameter: Tensor, group: Mapping[str, Any], name: str) -> None:
        self.parameter, self.group, self.name = parameter, group, name
        self.view = view_of(parameter, name)
        self.boxes = matrices_in(name, self.view.shape, split_of(group["split"]))
        self.is_held = is_held(parameter)
        self.gradients: list[Tensor] | None = None
        self.fault: GradientError | None = None  # raised once the other ranks know of it
        try:
            self.gradients = dense_gradients(parameter, name)
        except GradientError as error:
            self.fault = error
        self._momentum: tuple[Tensor, ...] = ()

    @property
    def device(self) -> torch.device:
        """Where the local tensors lie."""
        return device_of(self.parameter)

    @cached_property
    def layout(self) -> Layout:
        """Where the parameter lies, with the holders of each box."""
        layout = self.view.layout
        if layout.holders is None:
            layout = layout_on(layout.shape, layout.boxes[0], ranks_of().rank)
        return layout

    def update_momentum(self, buffer: Tensor) -> None:
        """B ← μ B + (1 − μ) G on the local tensors of B."""
        assert self.gradients is not None
        self._momentum = local_tensors(buffer)
        have, want = ([tuple(each.shape) for each in local] for local in (self._momentum, self.gradients))
        if have != want:
            problem = Problem(
                self.name,
                f"local shapes {want}",
                f"{have}, as its momentum has",
                "shard the model before the first step",
            )
            raise StateError("a parameter was sharded in another way under its optimizer", [problem])
        for momentum, gradient in zip(self._momentum, self.gradients, strict=True):
            momentum.lerp_(gradient, 1 - self.group["momentum"])

    def update(self, matrix: Box) -> dict[Box, Tensor]:
        """Returns U in a matrix on this rank, by boxes in coordinates of that; zeros without a gradient."""
        if matrix.sizes == self.view.shape:  # as mostly
            if not self.is_held or self.gradients is None:
                return {box: torch.zeros_like(tensor) for box, tensor, _ in self._pieces}
            return dict(self._placed(map(self._update, self._momentum, self.gradients)))
        update: dict[Box, Tensor] = {}
        for box, momentum, gradient in self._pieces:
            common = box.intersect(matrix)
            if common is not None:
                inside = common.within(box)
                here = narrowed(momentum, inside)
                update[common.within(matrix)] = (
                    torch.zeros_like(here) if gradient is None else self._update(here, narrowed(gradient, inside))
                )
        return update

    def _update(self, momentum: Tensor, gradient: Tensor) -> Tensor:
        return gradient.lerp(momentum, self.group["momentum"]) if self.group["nesterov"] else momentum

    @cached_property
    def _pieces(self) -> list[tuple[Box, Tensor, Tensor | None]]:
        """This rank's boxes with the momentum and gradient there; parameter and None without a gradient."""
        if not self.is_held or self.gradients is None:
            return [(piece.box, piece.tensor, None) for piece in self.view.pieces if self.is_held]
        pairs = zip(self._placed(self._momentum), self._placed(self.gradients), strict=True)
        return [(box, momentum, gradient) for (box, momentum), (_, gradient) in pairs]

    def _placed(self, tensors: Iterable[Tensor]) -> Iterator[tuple[Box, Tensor]]:
        """Yields this rank's boxes and what local tensors that lie as those of the parameter have there."""
        yield from ((piece.box, piece.tensor) for piece in view_of(assemble(self.parameter, [*tensors])).pieces)

    def apply(self, matrix: Box, box: Box, result: Tensor) -> None:
        """θ ← (1 − lr weight_decay) θ − lr s O, in a box of a matrix, in coordinates of that; nothing without a
        gradient.
        """
        if self.gradients is None:
            return
        lr: Any = self.group["lr"]
        lr = lr.squeeze() if isinstance(lr, Tensor) else lr
        scale = adjustment(self.group["adjust_lr_fn"], *matrix.sizes[-2:])
        if matrix.sizes == self.view.shape:
            (here,) = (piece.tensor for piece in self.view.pieces if piece.box == box)
        else:
            box = Box(tuple(map(add, matrix.offsets, box.offsets)), box.sizes)
            (piece,) = (piece for piece in self.view.pieces if piece.box.contains(box))
            here = narrowed(piece.tensor, box.within(piece.box))
        # In 16 bits torch's kernels round the factor, or do not, by how far from the end of the memory an element is:
        # the result would depend on where shards end.
        wide = here.to(torch.promote_types(here.dtype, torch.float32))
        wide.mul_(1 - lr * self.group["weight_decay"]).add_(result, alpha=-(lr * scale))
        if wide is not here:
            here.copy_(wide)


class _Part:
    """One matrix of a parameter in one step, as a `Task`; its boxes have coordinates of its own.

    Args:
        of: the parameter.
        box: the matrix in it.
    """

    def __init__(self, of: _Matrix, box: Box) -> None:
        self._of, self._box = of, box
        self.job: Job = job_of(of.layout, box, of.group["ns_steps"])

    def local_boxes(self) -> dict[Box, Tensor]:
        """Returns U, by box."""
        return self._of.update(self._box)

    def compute(self, whole: Tensor) -> Tensor:
        """Computes O from U."""
        matrix = whole if whole.ndim == 2 else whole[0]  # of a stack it is one expert's
        group = self._of.group
        result = orthogonalised(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])
        return result if whole.ndim == 2 else result[None]

    def apply_box(self, box: Box, result: Tensor) -> None:
        """Applies O in one box."""
        self._of.apply(self._box, box, result)


def unsuitable_for_muon(view: View) -> str:
    """Returns why a parameter cannot be orthogonalised; "" where it can."""
    if len(view.shape) not in (2, 3):
        return f"shape {view.shape}, which is no matrix's, and no stack of matrices"
    if not view.dtype.is_floating_point:
        return f"dtype {view.dtype}"
    if cover_faults(view.shape, view.layout.boxes):
        return "shards that do not say where the rest of the matrix is"
    return ""


def _raise_fault(matrices: Iterable[_Matrix]) -> None:
    for matrix in matrices:
        if matrix.fault is not None:
            raise matrix.fault


def _teams(matrices: Iterable[_Matrix]) -> list[Team[_Matrix]]:
    """Groups the matrices by the ranks over which they lie, in the same order on all of these."""
    rank = ranks_of().rank
    teams: dict[tuple[tuple[int, ...], str, str], list[_Matrix]] = {}
    for matrix in matrices:
        members = members_of(matrix.parameter)
        if rank in members and matrix.boxes:  # an empty matrix has nothing to orthogonalise
            teams.setdefault((members, matrix.group["ns_dtype"], matrix.device.type), []).append(matrix)
    return [Team(ranks_among(key[0], groups_of(teams[key][0].parameter)), teams[key]) for key in sorted(teams)]
