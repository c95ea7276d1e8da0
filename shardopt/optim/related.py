"""The relations of optimizers that are made of others, for torch's GradScaler and for updates in backward."""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakSet

from torch.optim import Optimizer

from shardopt.optim.scaler import refuse_scaled_backward, refuse_torchs_scaler, share_unscaled
from shardopt.torch_private import before_step, scaler_that_steps


class RelatedOptimizer(Optimizer):
    """A torch optimizer that may be made of others, and part of others, which it knows and does not keep alive."""

    @property
    def updates_in_backward(self) -> bool:
        """Whether any parameter is updated while backward runs, and not by `step` alone.

        Its gradients are then gone after backward, and cannot be clipped or unscaled.
        """
        return False

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch's GradScaler asks for this before it steps an optimizer: the moment to refuse where it must not."""
        if self.updates_in_backward:
            refuse_scaled_backward()
        refuse_torchs_scaler(self.param_groups)
        scaler = scaler_that_steps()
        if scaler is not None:
            share_unscaled(scaler, self)
        return False

    def _atoms(self) -> tuple[Optimizer, ...]:
        """Returns the optimizers that this one is made of, to the last: of these gradients are unscaled, each once."""
        return (self,)

    def _children_and_owners(self) -> Iterator[RelatedOptimizer]:
        """Yields those that it is directly made of, and those that are directly made of it."""
        yield from list(self.__dict__.get("_part_of", ()))

    def _family(self) -> list[Optimizer]:
        """Returns every optimizer that this one is part of or made of, at any depth, itself included."""
        members: dict[int, RelatedOptimizer] = {}
        ahead: list[RelatedOptimizer] = [self]
        while ahead:
            each = ahead.pop()
            if id(each) not in members:
                members[id(each)] = each
                ahead += each._children_and_owners()
        atoms = {id(atom): atom for each in members.values() for atom in each._atoms()}
        return list((atoms | members).values())

    def _is_part_of(self, owner: RelatedOptimizer) -> None:
        """Records that another optimizer is made of this one; it is not kept alive by this."""
        self.__dict__.setdefault("_part_of", WeakSet()).add(owner)

    def _before_backward(self) -> None:
        """Fires the step-pre-hooks of all optimizers that this one is part of, then its own; they may refuse."""
        for owner in list(self.__dict__.get("_part_of", ())):
            owner._before_backward()
        before_step(self)
