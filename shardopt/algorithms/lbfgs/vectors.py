"""All parameters of a job as one vector; each rank holds some of its elements.

A vector is a list of local tensors here, those of each parameter, in an order that all ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.dense_gradients import dense_gradients
from shardopt.algorithms.holders import counted_parameters
from shardopt.algorithms.lbfgs.dots import as_rows, products
from shardopt.algorithms.lbfgs.strong_wolfe import Trial
from shardopt.errors import GradientError, Problem, RankError
from shardopt.ranks import Ranks
from shardopt.sharding.view import device_of, is_held, local_tensors, view_of

_SAME = 1e-5  # relative; ranks may round a loss differently, but losses of different batches are further apart


class ParameterVector:
    """The parameters of a job, and which of their elements this rank counts. The constructor is collective.

    Args:
        ranks: of the job.
        names: parameter → FQN, of those that this rank has. Sums run in the order of names, so that they do not depend
            on the order in which parameters are given.

    Attributes:
        reach: the largest absolute value of the last direction evaluated along.
        maximize: whether the loss is to be maximized.

    Raises:
        LayoutError: a parameter cannot be described, or ranks hold boxes of one that do not fit together.
    """

    def __init__(self, ranks: Ranks, names: Mapping[Tensor, str]) -> None:
        self.ranks = ranks
        self._given = list(names)
        self._names = {parameter: names[parameter] for parameter in sorted(names, key=names.__getitem__)}
        counted_here, _ = counted_parameters(ranks, self._names)
        self.counted = [counted for each in counted_here if is_held(each.parameter) for counted in each.counted]
        self.reach = 0.0
        self.maximize = False

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of their names."""
        return list(self._names)

    @property
    def device(self) -> torch.device:
        """The device of scalars."""
        return device_of(self._given[0]) if self._given else self.ranks.device

    def fits(self, ranks: Ranks, parameters: Sequence[Tensor]) -> bool:
        """Whether this is the vector of these parameters, given in this order."""
        # Ranks of another process group than then may have the same numbers.
        ranks_too = ranks is self.ranks or ranks.size == self.ranks.size == 1
        return ranks_too and len(parameters) == len(self._given) and all(map(is_, parameters, self._given))

    def local_tensors(self) -> list[Tensor]:
        """Returns the local tensors of the parameters that this rank holds elements of."""
        return [local for parameter in filter(is_held, self._names) for local in local_tensors(parameter)]

    def copy(self) -> list[Tensor]:
        """Returns copies of the parameters as they are now."""
        return [local.clone() for local in self.local_tensors()]

    def restore(self, copied: list[Tensor]) -> None:
        """Sets the parameters to copies from `copy`."""
        if copied:
            torch._foreach_copy_(self.local_tensors(), copied)

    def add(self, length: float, direction: list[Tensor]) -> None:
        """Adds: x ← x + length · direction."""
        if direction:
            torch._foreach_add_(self.local_tensors(), direction, alpha=length)

    def counted_of(self, *vectors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Returns the tensors of the vectors side by side; skips empty ones and those that another rank counts."""
        rows = zip(*vectors, strict=True)
        return [row for counted, row in zip(self.counted, rows, strict=True) if counted and row[0].numel()]

    def evaluate(self, closure: Callable[[], Any], direction: list[Tensor] | None = None) -> tuple[Any, Trial]:
        """Evaluates the model at the current parameters. Collective: one all-reduce.

        Sets `reach` to the largest absolute value of the direction, if one is given. Where `maximize` is set, loss and
        gradient of the trial are the negated ones.

        Args:
            closure: as for LBFGS's step.
            direction: the slope is taken along it; None for the gradient itself.

        Returns:
            The result of the closure, and the trial, at step 0.

        Raises:
            GradientError: a gradient does not fit its parameter, or is sparse; on the rank that has it.
            RankError: losses differ between ranks, or another rank has such a gradient.
        """
        with torch.enable_grad():
            loss = closure()
        gradient: list[Tensor] = []
        failure = None
        try:
            gradient = self._gradient()
        except GradientError as error:  # the other ranks are on their way to the all-reduce
            failure = error
        along = direction or gradient
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for local, other in self.counted_of(gradient, along) if failure is None else ():
            sums[0] += products([as_rows(local)], [as_rows(other)])[0, 0].to(self.device)
            sums[1] += torch.linalg.vector_norm(as_rows(local), 1, dtype=torch.float64).to(self.device)
        own = [_as_number(loss, self.device), self._largest(gradient), self._largest(direction or ())]
        own.append(torch.full_like(own[0], failure is not None))
        (slope, total), of_ranks = self.all_reduce_sum(sums, torch.stack(own))
        if failure is not None:
            raise failure
        losses, peaks, reaches, failed = of_ranks.unbind(1)
        _refuse_failures(failed, self.ranks.members)
        _refuse_differences(losses, self.ranks.members)
        if direction is not None:
            self.reach = float(reaches.max())
        least = -float(losses[0]) if self.maximize else float(losses[0])
        trial = Trial(0.0, least, float(slope), gradient, float(peaks.max()), float(total))
        return loss, trial

    def all_reduce_sum(self, sums: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Adds up numbers over the job, and gathers each rank's own numbers. Collective: one all-reduce.

        Args:
            sums: [k], fp64, this rank's summands.
            own: [l], fp64, this rank's numbers.

        Returns:
            The sums [k], and the numbers of all ranks [R, l], on the CPU.
        """
        count = len(own)
        device = self.ranks.device_beside(sums.device)
        buffer = torch.zeros(len(sums) + self.ranks.size * count, dtype=torch.float64, device=device)
        buffer[: len(sums)] = sums
        at = len(sums) + self.ranks.rank * count
        buffer[at : at + count] = own
        together = self.ranks.all_reduce_sum(buffer).cpu()
        return together[: len(sums)], together[len(sums) :].view(self.ranks.size, count)

    def _gradient(self) -> list[Tensor]:
        """Returns a copy of the gradient, as the next evaluation overwrites it, or its negative; zeros without one."""
        gradient: list[Tensor] = []
        for parameter in filter(is_held, self._names):
            gradients = dense_gradients(parameter, self._names[parameter])
            if gradients is None:
                gradient += [torch.zeros_like(local) for local in local_tensors(parameter)]
            else:
                gradient += [each.neg() if self.maximize else each.clone() for each in gradients]
        return gradient

    def _largest(self, vector: Sequence[Tensor]) -> Tensor:
        """Returns the largest absolute value in local tensors of a vector; NaN if one of them is NaN."""
        rows = [as_rows(local) for local in vector if local.numel()]
        largest = [torch.linalg.vector_norm(row, torch.inf, dtype=torch.float64).to(self.device) for row in rows]
        return torch.stack([torch.zeros((), dtype=torch.float64, device=self.device), *largest]).max()


def _as_number(loss: Any, device: torch.device) -> Tensor:
    """Converts the loss to an fp64 tensor without dimensions; waits for no device."""
    if isinstance(loss, Tensor):
        return view_of(loss.detach(), "loss").pieces[0].tensor.reshape(()).to(device, torch.float64)
    return torch.tensor(float(loss), dtype=torch.float64, device=device)


def _refuse_failures(failed: Tensor, members: Sequence[int]) -> None:
    ranks = failed.nonzero().flatten().tolist()
    if ranks:
        names = ", ".join(str(members[rank]) for rank in ranks)
        raise RankError(f"LBFGS failed on rank {names}: the error there says why", code="lbfgs")


def _refuse_differences(losses: Tensor, members: Sequence[int]) -> None:
    """Raises if ranks would decide differently."""
    if bool(torch.isclose(losses, losses[0], rtol=_SAME, atol=0.0, equal_nan=True).all()):
        return
    rank = int((~torch.isclose(losses, losses[0], rtol=_SAME, atol=0.0, equal_nan=True)).nonzero()[0])
    problem = Problem(
        key="closure",
        found=f"a loss of {float(losses[0])} on rank {members[0]} and of {float(losses[rank])} on rank {members[rank]}",
        required="one that all ranks share, and whose gradient the parameters have",
        remedy="return its mean over the ranks where gradients are averaged, "
        "as by torch.distributed.all_reduce(loss, torch.distributed.ReduceOp.AVG), or its sum where they are summed",
    )
    raise RankError("LBFGS takes its steps by the loss, and ranks have different ones", [problem], code="lbfgs")
