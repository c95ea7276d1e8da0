"""The norm of all gradients of a job, which counts each element once.

R ranks, S parameters that several ranks have whole. With g the elements of all gradients, on whatever ranks,

    ‖g‖_p = (Σ |g_i|^p)^(1/p)  for 0 < p < ∞,   ‖g‖_∞ = max |g_i|.

Every rank takes the norm of the elements it counts, in fp64, and writes it into its place in a buffer of zeros;
the buffers are added up, and the norm of their elements is that of the whole, for every p, infinity included.
Where p-th powers or maxima were reduced instead, large p would overflow earlier and a NaN could get lost in a maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from shardopt.algorithms.holders import CountedParameter, counted_parameters
from shardopt.errors import GradientError, Problem, RankError
from shardopt.optim.gradients.local_gradients import alike, writable_gradients
from shardopt.ranks import Ranks, SharedGroup
from shardopt.sharding.gradients import GradientReader, is_added_up
from shardopt.sharding.view import device_of

_FAILED = -torch.inf  # no norm is negative
_RUN = 1 << 16  # elements; in fp64 they fit into a core's own cache


@dataclass(frozen=True, slots=True)
class Measured:
    """A norm, and the gradients that it was computed from.

    Args:
        total: fp64, without dimensions, on the device that ranks communicate on; on that of the gradients for one rank.
        of_ranks: shape (R,), fp64: the norm of the gradients that each rank counts.
        kinds: the local gradients of this rank, those that others count too, by device and dtype; none of them empty.
        counted_parameters: the parameters of this rank.
        members: the numbers of the R ranks in the job.
    """

    total: Tensor
    of_ranks: Tensor
    kinds: list[list[Tensor]]
    counted_parameters: list[CountedParameter]
    members: tuple[int, ...]

    def refuse_nonfinite(self) -> None:
        """Waits for the norm; raises on all ranks if it is infinite or NaN.

        Raises:
            GradientError: names the ranks, and this rank's parameters, whose gradients are to blame.
        """
        if bool(self.total.isfinite()):
            return
        ranks = (~self.of_ranks.isfinite()).nonzero().flatten().tolist()
        where = f", by what ranks {[self.members[rank] for rank in ranks]} count" if ranks else ""
        problems = [
            Problem(f"{each.name}.grad", "elements that are not finite", "finite ones", "find out where they arise")
            for each in self.counted_parameters
            for gradient in writable_gradients(each.name, each.parameter)
            if gradient is not None and not bool(gradient.isfinite().all())
        ]
        raise GradientError(
            f"the norm of the gradients is {self.total.item()}{where}: they were not clipped, and no step was taken. "
            "Skip it with zero_grad(), or pass error_if_nonfinite=False",
            problems,
            code="clipping",
        )


class GradientNorm:
    """Measures the norm of some parameters' gradients over the job.

    Args:
        order: p, more than 0; may be infinite.
        group: the ranks over which it is taken.
    """

    def __init__(self, order: float, group: SharedGroup | None = None) -> None:
        self.order = order
        self._group = group or SharedGroup()
        self._plan: _Plan | None = None

    def measure(self, parameters: Sequence[Tensor], names: Callable[[], Mapping[Tensor, str]]) -> Measured:
        """Measures the norm of the parameters' current gradients. Collective: one all-reduce of the whole job.

        The first time, and again when there are other parameters, ranks first exchange what they hold; so
        parameters are to be added on all ranks between the same two calls.

        Args:
            parameters: those of this rank; there may be none.
            names: returns parameter → FQN, when that is needed.

        Raises:
            GradientError: a gradient does not fit its parameter.
            LayoutError: as `holders.counted_parameters`.
            RankError: another rank failed with its gradients. (On accelerators the norm is infinite then, since
                a look would wait for it.)
        """
        ranks = self._group.ranks
        if self._plan is None or not self._plan.fits(ranks, parameters):
            counted = {parameter: name for parameter, name in names().items() if is_added_up(parameter)}
            self._plan = _Plan(ranks, parameters, *counted_parameters(ranks, counted))
        with torch.no_grad():
            return self._plan.measure(ranks, self.order)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_plan": None}  # a copy is for the copied parameters


class _Plan:
    """The buffers and readers for measurements, valid while the parameters stay the same.

    The buffer: R norms, one of each rank; then of each shared parameter four numbers, S by S: the norm that the first
    holder has, whether it has a gradient, the sum of the norms that the others have, and how many of them have one.
    """

    def __init__(
        self, ranks: Ranks, parameters: Sequence[Tensor], counted: list[CountedParameter], shared_count: int
    ) -> None:
        self._members = ranks.members
        self._parameters = list(parameters)
        self._counted = counted
        self._readers = [GradientReader(each.parameter) for each in counted]
        # True where it is one local tensor that this rank alone counts, as it mostly is.
        self._simple = [each.counted == (True,) and each.shared is None for each in counted]
        self._shared_count = shared_count
        self._places: tuple[list[int], Tensor] = ([], torch.zeros(0, device="cpu"))
        self._joint_norm = JointNorm()
        self._device = device_of(counted[0].parameter) if counted else torch.device("cpu")

    def fits(self, ranks: Ranks, parameters: Sequence[Tensor]) -> bool:
        """Whether this is the plan for these parameters."""
        return (
            self._members == ranks.members
            and len(parameters) == len(self._parameters)
            and all(map(is_, parameters, self._parameters))
        )

    def measure(self, ranks: Ranks, order: float) -> Measured:
        """Measures the norm, as `GradientNorm.measure` does."""
        device = ranks.device_beside(self._device)
        buffer = torch.zeros(ranks.size + 4 * self._shared_count, dtype=torch.float64, device=device)
        of_ranks, of_shared = torch.split(buffer, [ranks.size, 4 * self._shared_count])
        kinds: list[list[Tensor]] = []
        failure = None
        try:
            kinds = self._fill(of_ranks[ranks.rank], of_shared, order)
        except Exception as error:  # whatever it is: the other ranks are on their way to the all-reduce
            failure = error
            buffer.zero_()
            of_ranks[ranks.rank] = _FAILED
        ranks.all_reduce_sum(buffer)
        if failure is not None:
            raise failure
        if buffer.device.type == "cpu":
            _refuse_failed(of_ranks, ranks.members)
        first, first_has, others, others_have = of_shared.view(4, -1)
        whole = torch.where(first_has > 0, first, others / others_have.clamp(min=1))
        total = torch.linalg.vector_norm(torch.cat([of_ranks, whole]), order)
        return Measured(total, of_ranks, kinds, self._counted, ranks.members)

    def _fill(self, own: Tensor, of_shared: Tensor, order: float) -> list[list[Tensor]]:
        """Writes the norms that this rank counts; returns all its gradients."""
        gradients_read = [read() for read in self._readers]
        # Apart from the rest, as it is most of the work of a step.
        simple = zip(gradients_read, self._simple, strict=True)
        alone = [gradient for gradient, is_simple in simple if is_simple and gradient is not None and gradient.numel()]
        shared: list[Tensor] = []
        places: list[int] = []
        counted_by_others: list[Tensor] = []
        for each, gradient_read, is_simple in zip(self._counted, gradients_read, self._simple, strict=True):
            if is_simple and gradient_read is not None:
                continue
            gradients = writable_gradients(each.name, each.parameter) if gradient_read is None else (gradient_read,)
            for counted, gradient in zip(each.counted, gradients, strict=True):
                if gradient is None or not gradient.numel():
                    continue
                if each.shared is not None:
                    shared.append(gradient)
                    places.append(each.shared + (0 if counted else 2 * self._shared_count))
                elif counted:
                    alone.append(gradient)
                else:
                    counted_by_others.append(gradient)
        kinds = alike(alone)
        if kinds:
            own.copy_(self._joint_norm(kinds, order, own.device))
        if shared:
            index = self._index(places, own.device)
            of_shared.index_copy_(0, index, norm_of_each(shared, order, own.device))
            of_shared.index_fill_(0, index + self._shared_count, 1.0)
        return [*kinds, *alike(shared), *alike(counted_by_others)]

    def _index(self, places: list[int], device: torch.device) -> Tensor:
        """Returns the places as a tensor; cached, since the same parameters have gradients in most steps."""
        if self._places[0] != places or self._places[1].device != device:
            self._places = places, torch.tensor(places, device="cpu").to(device, non_blocking=True)
        return self._places[1]


def _refuse_failed(of_ranks: Tensor, members: Sequence[int]) -> None:
    failed = (of_ranks == _FAILED).nonzero().flatten().tolist()
    if failed:
        names = ", ".join(str(members[rank]) for rank in failed)
        raise RankError(
            f"clipping failed on rank {names}: the error there says why; nothing was changed here", code="rank-failed"
        )


class JointNorm:
    """The joint norm of tensors, none of them empty: fp64, without dimensions, on a given device.

    torch has vector code for fp64 on the CPU, but not for fp32 that is widened on the way. So there elements are
    widened first, many tensors at a time, which takes from a third to a seventh of the time.
    """

    def __init__(self) -> None:
        self._widened: dict[torch.dtype, _Widened] = {}

    def __call__(self, kinds: Iterable[list[Tensor]], order: float, device: torch.device) -> Tensor:
        """Computes the norm of `kinds`, lists of tensors with one device and dtype, as from `alike`."""
        norms_of_kinds = []
        for same in kinds:
            if same[0].device.type == "cpu":
                dtype = same[0].dtype
                if dtype not in self._widened:
                    self._widened[dtype] = _Widened(_wide(same[0]))
                norms = [torch.linalg.vector_norm(run, order) for run in self._widened[dtype].runs(same)]
            else:
                norms = list(torch._foreach_norm(same, order, dtype=_wide(same[0])))
            norms_of_kinds.append(torch.stack(norms).to(device))
        total: Tensor = torch.linalg.vector_norm(torch.cat(norms_of_kinds), order)
        return total


class _Widened:
    """The elements of tensors in a wider dtype, in runs that reuse the same memory.

    The memory, and the views of it that tensors are copied to, are kept: fresh ones would cost as much as the norm.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._memory = torch.empty(_RUN, dtype=dtype, device="cpu")
        self._shapes: list[torch.Size] = []
        self._filled: list[tuple[Tensor, list[Tensor]]] = []  # runs, and the places in each that tensors go to

    def runs(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yields all elements, flat and a run at a time; each run overwrites the previous one."""
        small = [tensor for tensor in tensors if tensor.numel() <= _RUN]
        shapes = [tensor.shape for tensor in small]
        if shapes != self._shapes:
            self._shapes, self._filled = shapes, list(self._places(shapes))
        done = 0
        for run, places in self._filled:
            torch._foreach_copy_(places, small[done : done + len(places)])
            done += len(places)
            yield run
        for tensor in tensors:
            if tensor.numel() > _RUN:
                for run in torch.split(tensor.reshape(-1), _RUN):
                    yield self._memory[: run.numel()].copy_(run)

    def _places(self, shapes: Iterable[torch.Size]) -> Iterator[tuple[Tensor, list[Tensor]]]:
        places: list[Tensor] = []
        end = 0
        for shape in shapes:
            if end + shape.numel() > _RUN:
                yield self._memory[:end], places
                places, end = [], 0
            places.append(self._memory[end : end + shape.numel()].view(shape))
            end += shape.numel()
        if places:
            yield self._memory[:end], places


def norm_of_each(tensors: Sequence[Tensor], order: float, device: torch.device) -> Tensor:
    """Computes the norm of each tensor, none of them empty: fp64, in order."""
    kinds = alike(tensors)
    norms = [torch.stack(torch._foreach_norm(same, order, dtype=_wide(same[0]))).to(device) for same in kinds]
    if len(norms) == 1:
        return norms[0]
    place_of = {id(tensor): place for place, tensor in enumerate(chain.from_iterable(kinds))}
    index = torch.tensor([place_of[id(tensor)] for tensor in tensors], device="cpu")
    return torch.cat(norms)[index.to(device, non_blocking=True)]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64
