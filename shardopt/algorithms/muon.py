"""Muon on sharded parameters: each matrix is orthogonalised whole, by one of the ranks that hold it.

θ parameter of M rows and N columns, G gradient, B momentum, O the update; μ momentum, k = ns_steps.

    B ← μ B + (1 − μ) G
    U = μ B + (1 − μ) G with nesterov, else B
    O = X_k, where X_0 = U / max(‖U‖, eps), X_{i+1} = a X_i + (b A + c A²) X_i, A = X_i X_iᵀ
    θ ← (1 − lr weight_decay) θ − lr s O

with (a, b, c) = ns_coefficients; s = √max(1, M / N), or 0.2 √max(M, N) under adjust_lr_fn="match_rms_adamw". The
transpose of a matrix with M > N is orthogonalised. Sources: Jordan et al., Muon: An optimizer for hidden layers in
neural networks (2024); Liu et al., Muon is scalable for LLM training (2025); options as torch.optim.Muon has them.

What is elementwise (B, U, θ) each rank does on its shards. U goes to the owner of the matrix in the dtype in which O is
computed, and O comes back in it: one all-to-all there and one back for all matrices together, or a few where they are
large. The owner computes on the whole matrix, so that the result is the same bits on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.owners import Job
from shardopt.algorithms.wholes import Together
from shardopt.errors import GradientError, Problem
from shardopt.ranks import Ranks, ranks_among, ranks_of
from shardopt.sharding.box import Box, cover_faults
from shardopt.sharding.layout import held
from shardopt.sharding.view import (
    View,
    assemble,
    device_of,
    gradient_leaves,
    groups_of,
    leaves_of,
    members_of,
    takes_gradient,
    view_of,
)

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_ADJUSTMENTS = (None, "original", "match_rms_adamw")


class Muon(Optimizer):
    """torch.optim.Muon for parameters that may be sharded, on one or several meshes.

    State of a parameter: `momentum_buffer`, which lies as the parameter does. Every rank of every mesh must call
    `step` with the same parameters in the same order, and the same of them must have gradients.

    Args:
        params: matrices, or groups of them.
        lr: the learning rate, a number or a tensor of one element.
        weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps: as above.
        adjust_lr_fn: "original" (as is None) or "match_rms_adamw".
        ns_dtype: the dtype in which matrices are orthogonalised and travel: "bfloat16", in which torch's are, "float32"
            or "float64".

    Raises:
        ValueError: an option is out of its range.
    """

    round_bytes = 128 << 20
    """How large an owner's matrices may be before another one waits for the next round; at any time there are up to
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
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Collective: every rank of every mesh in it must call.

        For each set of ranks over which matrices lie, one all-to-all to the owners and one back for every
        `round_bytes` that an owner works on. Waits for no device, but where a parameter is a ShardedTensor: then
        ranks ask each other whether it has a gradient.

        Args:
            closure: evaluates the model again and returns the loss, which is returned; called once.

        Raises:
            GradientError: a gradient does not fit its parameter, or is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices = [_Matrix(parameter, group) for group in self.param_groups for parameter in group["params"]]
        for ranks, its in _teams(matrices):
            _agree_on_gradients(ranks, its)
            moving = [matrix for matrix in its if matrix.gradients is not None]
            for matrix in moving:
                matrix.update_momentum(self._momentum(matrix))
            if moving:
                dtype = _DTYPES[moving[0].group["ns_dtype"]]
                Together(ranks, dtype, moving[0].device, self.round_bytes).run(moving)
        return loss

    def fresh_state(self, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
        """New state of a parameter that has none, as its first step would make it; changes nothing."""
        return {"momentum_buffer": assemble(parameter, [torch.zeros_like(leaf) for leaf in leaves_of(parameter)])}

    def _momentum(self, matrix: _Matrix) -> Tensor:
        state = self.state[matrix.parameter]
        if not state:
            state.update(self.fresh_state(matrix.group, matrix.parameter))
        buffer: Tensor = state["momentum_buffer"]
        return buffer


class _Matrix:
    """One parameter in one step, as a `Task`."""

    def __init__(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        self.parameter, self.group = parameter, group
        self.view = view_of(parameter)
        self.gradients = _gradients(parameter)
        self._momentum: tuple[Tensor, ...] = ()

    @property
    def device(self) -> torch.device:
        """Where the local tensors lie."""
        return device_of(self.parameter)

    @property
    def job(self) -> Job:
        layout = self.view.layout
        if layout.holders is None:
            layout = held(layout.shape, {layout.boxes[0]: (ranks_of().rank,)})
        short, long = sorted(layout.shape)
        # Two products of [short, long] matrices and one of [short, short] in each step.
        return Job(layout, self.group["ns_steps"] * (4 * short * short * long + 2 * short**3) + short * long)

    def update_momentum(self, buffer: Tensor) -> None:
        """B ← μ B + (1 − μ) G on the local tensors of B."""
        assert self.gradients is not None
        self._momentum = leaves_of(buffer)
        for momentum, gradient in zip(self._momentum, self.gradients, strict=True):
            momentum.lerp_(gradient, 1 - self.group["momentum"])

    def parts(self) -> dict[Box, Tensor]:
        """U, by box."""
        assert self.gradients is not None
        update: Sequence[Tensor] = self._momentum
        if self.group["nesterov"]:
            pairs = zip(self.gradients, self._momentum, strict=True)
            update = [gradient.lerp(momentum, self.group["momentum"]) for gradient, momentum in pairs]
        return {piece.box: piece.tensor for piece in view_of(assemble(self.parameter, update)).pieces}

    def work(self, whole: Tensor) -> Tensor:
        """O from U."""
        return orthogonalised(whole, self.group["ns_coefficients"], self.group["ns_steps"], self.group["eps"])

    def take(self, box: Box, part: Tensor) -> None:
        """θ ← (1 − lr weight_decay) θ − lr s O, in one box."""
        lr: Any = self.group["lr"]
        lr = lr.squeeze() if isinstance(lr, Tensor) else lr
        scale = adjustment(self.group["adjust_lr_fn"], *self.view.shape)
        (here,) = (piece.tensor for piece in self.view.pieces if piece.box == box)
        # In 16 bits torch's kernels round the factor, or do not, by how far from the end of the memory an element is:
        # the result would depend on where shards end.
        wide = here.to(torch.promote_types(here.dtype, torch.float32))
        wide.mul_(1 - lr * self.group["weight_decay"]).add_(part, alpha=-(lr * scale))
        if wide is not here:
            here.copy_(wide)


def orthogonalised(matrix: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly: singular values near 1 (with torch's coefficients 0.7 to 1.2).

    A quintic Newton-Schulz iteration (Jordan et al. 2024): X ← a X + (b A + c A²) X with A = X Xᵀ.

    Args:
        matrix: [M, N] in the dtype to compute in; overwritten.
        coefficients: (a, b, c).
        steps: of the iteration.
        eps: the least norm to divide by.

    Returns:
        [M, N], in the dtype of `matrix`.
    """
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x.div_(x.norm().clamp(min=eps))  # no singular value is larger than the Frobenius norm
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def adjustment(how: str | None, rows: int, columns: int) -> float:
    """By what the learning rate of a matrix of this shape is multiplied."""
    if how == "match_rms_adamw":
        return 0.2 * sqrt(max(rows, columns))
    return sqrt(max(1, rows / columns))


def unsuitable_for_muon(view: View) -> str:
    """What keeps a parameter from being orthogonalised; "" where nothing does."""
    if len(view.shape) != 2:
        return f"shape {view.shape}, which is no matrix's"
    if not view.dtype.is_floating_point:
        return f"dtype {view.dtype}"
    if cover_faults(view.shape, view.layout.boxes):
        return "shards that do not tell where the rest of the matrix is"
    return ""


def _gradients(parameter: Tensor) -> list[Tensor] | None:
    """The gradient on this rank, as local tensors; None where there is none. Zero where only some shards have one."""
    leaves = leaves_of(parameter)
    found = gradient_leaves(parameter)
    if all(gradient is None for gradient in found):
        # A rank without a shard has nothing to say: `_agree_on_gradients` asks the others.
        return None
    for gradient in found:
        if gradient is not None and gradient.layout is not torch.strided:
            problem = Problem("gradient", f"{gradient.layout} memory", "a dense gradient", "make the layer dense")
            raise GradientError("Muon takes no sparse gradients", [problem])
    return [
        torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in zip(leaves, found, strict=True)
    ]


def _agree_on_gradients(ranks: Ranks, matrices: Sequence[_Matrix]) -> None:
    """Where gradients are with the shards, one on any rank is one for the whole matrix."""
    asked = [matrix for matrix in matrices if not takes_gradient(matrix.parameter)]
    if not asked or ranks.size == 1:
        return
    counts = torch.tensor([matrix.gradients is not None for matrix in asked], dtype=torch.int32, device=ranks.device)
    for matrix, count in zip(asked, ranks.add_up(counts).tolist(), strict=True):
        if count and matrix.gradients is None:
            matrix.gradients = [torch.zeros_like(leaf) for leaf in leaves_of(matrix.parameter)]


def _teams(matrices: Iterable[_Matrix]) -> list[tuple[Ranks, list[_Matrix]]]:
    """The matrices by the ranks over which they lie, in the same order on all of these."""
    rank = ranks_of().rank
    teams: dict[tuple[tuple[int, ...], str, str], list[_Matrix]] = {}
    for matrix in matrices:
        members = members_of(matrix.parameter)
        if rank in members and matrix.view.layout.boxes[0].numel:  # an empty matrix has nothing to orthogonalise
            teams.setdefault((members, matrix.group["ns_dtype"], matrix.device.type), []).append(matrix)
    return [(ranks_among(key[0], groups_of(teams[key][0].parameter)), teams[key]) for key in sorted(teams)]
