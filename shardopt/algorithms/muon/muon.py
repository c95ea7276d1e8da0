"""Muon on sharded parameters: each matrix is orthogonalised whole, by one of the ranks that hold it.

A parameter is one matrix, or holds several:

[M, N]                 one matrix
[E, M, N]              E of them, such as the experts of a layer
split=3                three of equal height in each of these, such as a fused query, key and value; or the heads
split=(8, 2, 2)        of so many rows

Of each, with θ of M rows and N columns, G gradient, B momentum, O the update; μ momentum, k = ns_steps.

    B ← μ B + (1 − μ) G
    U = μ B + (1 − μ) G with nesterov, else B
    O = X_k, where X_0 = U / max(‖U‖, eps), X_{i+1} = a X_i + (b A + c A²) X_i, A = X_i X_iᵀ
    θ ← (1 − lr weight_decay) θ − lr s O

with (a, b, c) = ns_coefficients; s = √max(1, M / N), 0.2 √max(M, N) under adjust_lr_fn="match_rms_adamw", or √(M / N)
under "spectral_unclamped". The transpose of a matrix with M > N is orthogonalised. Sources: Jordan et al., Muon: An
optimizer for hidden layers in neural networks (2024); Liu et al., Muon is scalable for LLM training (2025); Bernstein,
Deriving Muon (2025); options as torch.optim.Muon has them.

Each rank computes B, U and θ, which are elementwise, on its shards. U goes to the owner of the matrix in the dtype in
which O is computed, and O comes back in it: one all-to-all there and one back for all matrices together, or a few where
they are large. The owner computes on the whole matrix, so that the result is the same bits on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, product
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.communicating import uncovered
from shardopt.algorithms.gathering.assignment import Job, job_of
from shardopt.algorithms.gathering.optimizer import GatheringOptimizer
from shardopt.algorithms.gathering.step import GatheredStep
from shardopt.algorithms.options import NOT_NEGATIVE, RATE, Range, one_of, options_of
from shardopt.algorithms.registry import Options
from shardopt.errors import AlgorithmError, Problem, StateError
from shardopt.sharding.box import Box
from shardopt.sharding.pieces import View
from shardopt.sharding.view import local_tensors

Split = int | tuple[int, ...] | None

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


class _MuonStep(GatheredStep):
    """The step of one parameter: one matrix, or several."""

    def __init__(self, optimizer: Muon, group: Options, parameter: Tensor) -> None:
        super().__init__(optimizer, group, parameter)
        self.parts = matrices_in(self.name, self.view.shape, split_of(group["split"]))
        self.dtype = _DTYPES[group["ns_dtype"]]

    def job(self, number: int) -> Job:
        """Returns the layout of a matrix and its cost; any rank may own it."""
        return job_of(self.layout, self.parts[number], cost_of(self.parts[number].sizes, self.group["ns_steps"]))

    def begin(self) -> tuple[Sequence[Tensor], ...]:
        """Updates B ← μ B + (1 − μ) G on the local tensors; returns B and G."""
        gradients = self.gradients or []
        momentum = local_tensors(self.counted_state()["momentum_buffer"])
        have, want = ([tuple(each.shape) for each in local] for local in (momentum, gradients))
        if have != want:
            found, remedy = f"{have}, as its momentum has", "shard the model before the first step"
            problem = Problem(self.name, f"local shapes {want}", found, remedy)
            raise StateError(
                "a parameter was sharded in another way under its optimizer", [problem], code="stale-parameters"
            )
        for buffer, gradient in zip(momentum, gradients, strict=True):
            buffer.lerp_(gradient, 1 - self.group["momentum"])
        return momentum, gradients

    def sent(self, *tensors: Tensor) -> Tensor:
        """Returns U."""
        momentum, gradient = tensors
        return gradient.lerp(momentum, self.group["momentum"]) if self.group["nesterov"] else momentum

    def compute(self, number: int, whole: Tensor) -> Tensor:
        """Computes O from U."""
        matrix = whole if whole.ndim == 2 else whole[0]  # of a stack it is one expert's
        result = orthogonalised(matrix, self.group["ns_coefficients"], self.group["ns_steps"], self.group["eps"])
        return result if whole.ndim == 2 else result[None]

    def move(self, number: int, weight: Tensor, result: Tensor) -> None:
        """Updates θ ← (1 − lr weight_decay) θ − lr s O."""
        lr: Any = self.group["lr"]
        lr = lr.squeeze() if isinstance(lr, Tensor) else lr
        scale = adjustment(self.group["adjust_lr_fn"], *self.parts[number].sizes[-2:])
        weight.mul_(1 - lr * self.group["weight_decay"])
        if isinstance(lr, Tensor) and not lr.is_cpu:
            # `alpha` is a number of the host, which would wait for the device. In 16 bits the product would be rounded.
            weight.sub_(result.to(weight.dtype) * (lr * scale))
        else:
            weight.add_(result, alpha=-(lr * scale))


class Muon(GatheringOptimizer):
    """torch.optim.Muon for parameters that may be sharded, on one or several meshes.

    State of a parameter: `momentum_buffer`, placed as the parameter is. Every rank of every mesh must call
    `step` with the same parameters in the same order, and the same of them must have gradients.

    Args:
        params: matrices [M, N], stacks of them [E, M, N] (experts), or groups of these.
        lr: the learning rate, a number or a tensor of one element.
        weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps: as above.
        adjust_lr_fn: "original" (as is None), "match_rms_adamw" or "spectral_unclamped" (torch 2.15 has it).
        split: how each matrix is cut along its rows into matrices that are orthogonalised by themselves: into a number
            of equal parts (3 for a fused query, key and value; the number of heads), or parts of so many rows.
        ns_dtype: the dtype in which matrices are orthogonalised and travel: "bfloat16", in which torch's are, "float32"
            or "float64".

    Raises:
        ValueError: an option is out of its range.
    """

    step_type = _MuonStep

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
        options = options_of(
            locals(),
            lr=RATE,
            weight_decay=NOT_NEGATIVE,
            momentum=NOT_NEGATIVE,
            ns_coefficients=Range("three numbers", lambda numbers: len(numbers) == 3),
            ns_steps=Range("less than 100", lambda steps: steps < 100),
            adjust_lr_fn=one_of(None, "original", "match_rms_adamw", "spectral_unclamped"),
            ns_dtype=one_of(*_DTYPES),
        )
        super().__init__(params, {**options, "split": split_of(split)})


def unsuitable_for_muon(view: View) -> str:
    """Returns why a parameter cannot be orthogonalised; "" if it can."""
    if len(view.shape) not in (2, 3):
        return f"shape {view.shape}, which is no matrix's, and no stack of matrices"
    if not view.dtype.is_floating_point:
        return f"dtype {view.dtype}"
    return uncovered(view)


def split_of(option: Any) -> Split:
    """Returns the option `split` in a form that can be compared. Raises ValueError if it is invalid."""
    split = tuple(option) if isinstance(option, list | tuple) else option
    numbers = split if isinstance(split, tuple) else (split,)
    if split is None or (numbers and all(type(number) is int and number >= 1 for number in numbers)):
        return split
    raise ValueError(f"Muon's split is {option!r}; required None, a number of parts, or the rows of each")


def matrices_in(name: str, shape: tuple[int, ...], split: Split) -> tuple[Box, ...]:
    """Returns the boxes of a parameter's matrices, in ascending order, without empty ones.

    Raises:
        AlgorithmError: its rows cannot be split so.
    """
    boxes = _boxes(shape, split)
    if boxes is None:
        parts = f"parts of {split} rows" if isinstance(split, tuple) else f"{split} parts of equal height"
        remedy = "give it to a group of its own, with the split that it has"
        problem = Problem(name, f"{shape[-2]} rows", parts, remedy)
        raise AlgorithmError("a parameter cannot be split into matrices", [problem])
    return boxes


@lru_cache(maxsize=4096)
def _boxes(shape: tuple[int, ...], split: Split) -> tuple[Box, ...] | None:
    *outer, rows, columns = shape
    heights = split if isinstance(split, tuple) else (rows // (split or 1),) * (split or 1)
    if sum(heights) != rows:
        return None
    begins = accumulate(heights[:-1], initial=0)
    parts_of_one = list(zip(begins, heights, strict=True))
    return tuple(
        Box((*index, begin, 0), (*[1] * len(outer), height, columns))
        for index in product(*map(range, outer))
        for begin, height in parts_of_one
        if height * columns
    )


def cost_of(sizes: tuple[int, ...], steps: int) -> int:
    """Returns the cost of a matrix, or a stack of matrices, for so many steps of the Newton-Schulz iteration."""
    short, long = sorted(sizes[-2:])
    # Two products of [short, long] matrices and one of [short, short] in each step.
    return steps * (4 * short * short * long + 2 * short**3) + short * long


def orthogonalised(matrix: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Approximates the nearest semi-orthogonal matrix: singular values near 1 (with torch's coefficients 0.7 to 1.2).

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
    """Returns the factor by which the learning rate of a matrix of this shape is scaled."""
    if how == "match_rms_adamw":
        return 0.2 * sqrt(max(rows, columns))
    if how == "spectral_unclamped":
        return sqrt(rows / columns)
    return sqrt(max(1, rows / columns))
