"""All parameters of a job as one vector, of which each rank holds some elements.

A vector is a list of local tensors here, one for each leaf of each parameter, in an order that all ranks share.
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
    """The parameters of a job, and which of their elements this rank counts. Making one is collective.

    Args:
        ranks: of the job.
        names: parameter → FQN, of those that this rank has. Sums run in the order of names, so that they do not depend
            on the order in which parameters are given.

    Raises:
        LayoutError: a parameter cannot be described, or ranks hold parts of one that do not fit together.
    """

    def __init__(self, ranks: Ranks, names: Mapping[Tensor, str]) -> None:
        self.ranks = ranks
        self._given = list(names)
        self._names = {parameter: names[parameter] for parameter in sorted(names, key=names.__getitem__)}
        mine, _ = counted_parameters(ranks, self._names)
        self.counted = [counted for share in mine if is_held(share.parameter) for counted in share.counted]
        self.reach = 0.0

    @property
    def parameters(self) -> list[Tensor]:
        """In the order of their names."""
        return list(self._names)

    @property
    def device(self) -> torch.device:
        """Where numbers are worked out."""
        return device_of(self._given[0]) if self._given else self.ranks.device

    def fits(self, ranks: Ranks, parameters: Sequence[Tensor]) -> bool:
        """Whether it is that of these parameters, given in this order."""
        # Ranks of another process group than then may have the same numbers.
        ranks_too = ranks is self.ranks or ranks.size == self.ranks.size == 1
        return ranks_too and len(parameters) == len(self._given) and all(map(is_, parameters, self._given))

    def leaves(self) -> list[Tensor]:
        """The local tensors of the parameters of which this rank has a part."""
        return [leaf for parameter in filter(is_held, self._names) for leaf in local_tensors(parameter)]

    def copy(self) -> list[Tensor]:
        """The parameters as they are now."""
        return [leaf.clone() for leaf in self.leaves()]

    def restore(self, copied: list[Tensor]) -> None:
        """Sets the parameters to what `copy` gave."""
        if copied:
            torch._foreach_copy_(self.leaves(), copied)

    def add(self, length: float, direction: list[Tensor]) -> None:
        """x ← x + length · direction."""
        if direction:
            torch._foreach_add_(self.leaves(), direction, alpha=length)

    def counted_of(self, *vectors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """The tensors of some vectors, leaf by leaf, without those that another rank counts and empty ones."""
        of_leaves = zip(*vectors, strict=True)
        return [its for counted, its in zip(self.counted, of_leaves, strict=True) if counted and its[0].numel()]

    def evaluate(self, closure: Callable[[], Any], direction: list[Tensor] | None = None) -> tuple[Any, Trial]:
        """Evaluates the model where the parameters are. Collective: one all-reduce. `reach` is set where there is a
        direction: to the largest absolute value in it.

        Args:
            closure: as for LBFGS's step.
            direction: what the slope is taken along; None for the gradient itself.

        Returns:
            What the closure returned, and the trial, at step 0.

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
        for leaf, other in self.counted_of(gradient, along) if failure is None else ():
            sums[0] += products([as_rows(leaf)], [as_rows(other)])[0, 0].to(self.device)
            sums[1] += torch.linalg.vector_norm(as_rows(leaf), 1, dtype=torch.float64).to(self.device)
        own = [_as_number(loss, self.device), self._largest(gradient), self._largest(direction or ())]
        own.append(torch.full_like(own[0], failure is not None))
        (slope, total), of_ranks = self.all_reduce_sum(sums, torch.stack(own))
        if failure is not None:
            raise failure
        losses, peaks, reaches, failed = of_ranks.unbind(1)
        _refuse_failures(failed)
        _refuse_differences(losses)
        if direction is not None:
            self.reach = float(reaches.max())
        trial = Trial(0.0, float(losses[0]), float(slope), gradient, float(peaks.max()), float(total))
        return loss, trial

    def all_reduce_sum(self, sums: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Adds up numbers over the job, and brings together what each rank has. Collective: one all-reduce.

        Args:
            sums: [k], fp64, this rank's summands.
            own: [l], fp64, this rank's numbers.

        Returns:
            The sums [k], and the numbers of all ranks [R, l], on the CPU.
        """
        count = len(own)
        buffer = torch.zeros(len(sums) + self.ranks.size * count, dtype=torch.float64, device=self.ranks.device)
        buffer[: len(sums)] = sums
        at = len(sums) + self.ranks.rank * count
        buffer[at : at + count] = own
        together = self.ranks.all_reduce_sum(buffer).cpu()
        return together[: len(sums)], together[len(sums) :].view(self.ranks.size, count)

    def _gradient(self) -> list[Tensor]:
        """The gradient, copied, since the next evaluation writes over it; zero where there is none."""
        gradient: list[Tensor] = []
        for parameter in filter(is_held, self._names):
            found = dense_gradients(parameter, self._names[parameter])
            if found is None:
                gradient += [torch.zeros_like(leaf) for leaf in local_tensors(parameter)]
            else:
                gradient += [its.clone() for its in found]
        return gradient

    def _largest(self, vector: Sequence[Tensor]) -> Tensor:
        """The largest absolute value of a real number in this rank's part of a vector; NaN where there is one."""
        parts = [as_rows(part) for part in vector if part.numel()]
        largest = [torch.linalg.vector_norm(part, torch.inf, dtype=torch.float64).to(self.device) for part in parts]
        return torch.stack([torch.zeros((), dtype=torch.float64, device=self.device), *largest]).max()


def _as_number(loss: Any, device: torch.device) -> Tensor:
    """The loss as an fp64 tensor without dimensions, without waiting for it."""
    if isinstance(loss, Tensor):
        return view_of(loss.detach(), "loss").pieces[0].tensor.reshape(()).to(device, torch.float64)
    return torch.tensor(float(loss), dtype=torch.float64, device=device)


def _refuse_failures(failed: Tensor) -> None:
    ranks = failed.nonzero().flatten().tolist()
    if ranks:
        raise RankError(f"LBFGS failed on rank {', '.join(map(str, ranks))}: the error there says why")


def _refuse_differences(losses: Tensor) -> None:
    """Raises where ranks would decide differently."""
    if bool(torch.isclose(losses, losses[0], rtol=_SAME, atol=0.0, equal_nan=True).all()):
        return
    rank = int((~torch.isclose(losses, losses[0], rtol=_SAME, atol=0.0, equal_nan=True)).nonzero()[0])
    problem = Problem(
        key="closure",
        found=f"a loss of {float(losses[0])} on rank 0 and of {float(losses[rank])} on rank {rank}",
        required="one that all ranks share, and whose gradient the parameters have",
        remedy="return its mean over the ranks where gradients are averaged, "
        "as by torch.distributed.all_reduce(loss, torch.distributed.ReduceOp.AVG), or its sum where they are summed",
    )
    raise RankError("LBFGS takes its steps by the loss, and ranks have different ones", [problem])
