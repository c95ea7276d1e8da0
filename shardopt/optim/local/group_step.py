"""One step of one group, with local tensors and their gradients in place of the user's parameters.

On small parameters most of a step's time goes into asking each of them for its gradient and its state, although from
one step to the next only the gradients are others. Where that is so, an algorithm is handed the lists that torch's
`_init_group` gathered in the step before, with the new gradients in them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.optim.local.memory_order import InOrder
from shardopt.optim.local.shards import BorrowedGrads, Shards
from shardopt.runtime.torch_private import gather_lists, step_with_lists
from shardopt.sharding.gradients import attach_gradients

Group = dict[str, Any]
Options = tuple[Any, ...]

_NUMBERS = (bool, int, float)
_OTHERS = (type(None), str, tuple, list)


class StepCache(NamedTuple):
    """The result of `_init_group`, and the lists that it filled, without gradients.

    Args:
        options: those that it may have gone by, of `deciding_options`.
        present: for each local tensor of the group whether it had a gradient.
        local_tensors: those that had one.
        state: lists of their state, in the order of `_init_group`'s arguments.
        init_result: the result of `_init_group`.
    """

    options: Options
    present: list[bool]
    local_tensors: list[Tensor]
    state: list[list[Tensor]]
    init_result: Any


def deciding_options(group: Mapping[str, Any]) -> Options:
    """Extracts the options that a group's state depends on, or that decide what is refused.

    Of numbers that is whether they are 0: schedules change them in every step. No tensor is looked into, which could
    wait for a device: of learning rates the class alone matters, and another tensor (or a NumPy number,
    or whatever else there may be) is equal to nothing.
    """
    return tuple(
        [
            (name, bool(value))
            if type(value) in _NUMBERS
            else (name, type(value) if type(value) in _OTHERS or name.endswith("lr") else object())
            for name, value in group.items()
            if name != "params"
        ]
    )


class GroupShards:
    """The local tensors of a group's parameters, kept from step to step.

    A step keeps two things here: `cache`, the lists that it gathered, if the next one may go by them; and `in_order`,
    that it saw them lie alike in memory.

    Args:
        parameters: of the group, in its order.
        shards: parameter → its shards, of the sharded ones.
    """

    def __init__(self, parameters: Iterable[Tensor], shards: Mapping[Tensor, Shards]) -> None:
        self._parameters = list(parameters)
        self._shards = [shards.get(parameter) for parameter in self._parameters]
        self.readers = {each.reader: each for each in self._shards if each is not None and each.is_held}
        self.cache: StepCache | None = None
        self.in_order: InOrder | None = None
        self.was_fused: bool | None = None
        """Whether the last step on an accelerator was fused, and so where counters are."""
        self.refresh()

    def are_of(self, parameters: list[Tensor]) -> bool:
        """Whether the group still has the same parameters."""
        return len(parameters) == len(self._parameters) and all(map(is_, parameters, self._parameters))

    @property
    def alike(self) -> bool:
        """Whether all parameters with elements here are sharded, with one local tensor each.

        Only the state of such parameters is never replaced from outside: a plain parameter's state is the inner
        optimizer's own dict.
        """
        return None not in self._shards and len(self.readers) == len(self.local_tensors)

    @property
    def kinds(self) -> set[tuple[bool, torch.dtype]]:
        """The distinct pairs (on the CPU, dtype) of the local tensors.

        A plain parameter may change both while it stays the same object (`module.to`).
        """
        return self._kinds if None not in self._shards else _kinds_of(self.local_tensors)

    def names_of_local_tensors(self, names: Mapping[Tensor, str]) -> dict[Tensor, str]:
        """Returns, for each local tensor, the FQN of its parameter.

        Args:
            names: of plain parameters.
        """
        plain = {local: names[local] for local in self.local_tensors if local in names}
        return {**plain, **{local: name for name, local in self.sharded}}

    def refresh(self) -> None:
        """Looks up the current local tensors."""
        pairs = zip(self._parameters, self._shards, strict=True)
        tensors = ((tensor,) if shards is None else shards.local_tensors for tensor, shards in pairs)
        self.local_tensors = list(chain.from_iterable(tensors))
        sharded = [shards for shards in self._shards if shards is not None]
        self.sharded = [(shards.name, local) for shards in sharded for local in shards.local_tensors]
        self._kinds = _kinds_of(self.local_tensors)


def _kinds_of(tensors: Collection[Tensor]) -> set[tuple[bool, torch.dtype]]:
    return set(zip(map(_IS_CPU, tensors), map(_DTYPE, tensors), strict=True))


_IS_CPU, _DTYPE = attrgetter("is_cpu"), attrgetter("dtype")  # of plain parameters this is read in every step


class Part:
    """Some local tensors of a group, which torch steps at once.

    Attributes:
        group: with these as its "params".
        lists: those that torch gathers for them: local tensors with a gradient, gradients, and their state. A list is
            None if the step makes that state. `lists` is None before `gather`, or if torch does not gather ahead.
        init_result: the result of torch's `_init_group`.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.lists: list[list[Any]] | None = None
        self.init_result: Any = None

    def fill(self, lists: Sequence[list[Any]]) -> Any:
        """Fills lists as torch's `_init_group` does in the step; returns its result."""
        assert self.lists is not None
        for each, own in zip(lists, self.lists, strict=True):
            each.extend(own)
        return self.init_result


class GroupStep(Part):
    """A group in a step; `restore` returns it to its earlier state.

    Args:
        group: with the user's parameters.
        shards: of those.
    """

    def __init__(self, group: Group, shards: GroupShards) -> None:
        super().__init__(group)
        self.shards = shards
        self._parts: list[Part] | None = None
        self._before: Group = {name: group[name] for name in ("params", "fused") if name in group}
        # A cache is kept only where every parameter is sharded and has one local tensor.
        self._options = deciding_options(group) if shards.alike else ()
        self._borrowed = BorrowedGrads()
        self._gradients: list[Tensor | None] | None = None
        self.gradients_in_order = False
        """Whether, in a step that repeats, gradients are contiguous and have their local tensors' shapes."""
        self.chosen = False
        """Whether the group names no implementation, and "fused" was chosen for it."""
        self.repeats = False
        """Whether this step can reuse the lists gathered in the last one."""

    def attach(self, follow: Callable[[Shards], None], takes_dense: bool) -> None:
        """Puts the local tensors, with their gradients, into the group.

        Args:
            follow: called with shards whose local tensors may have been replaced, before their gradients are looked at.
            takes_dense: whether the algorithm steps with dense gradients.

        Raises:
            GradientError: a gradient does not fit its parameter.
        """
        shards, kept = self.shards, self.shards.cache
        shards.cache = None
        gradients, others, in_order = attach_gradients(shards.readers, self._borrowed.borrowers)
        if others:
            try:
                for each in [shards.readers[reader] for reader in others]:
                    follow(each)
                    each.attach_gradients(self._borrowed, takes_dense)
            finally:
                # Those before one that is refused may have other local tensors, and are not looked at again.
                shards.refresh()
        else:
            self._gradients, self.gradients_in_order = gradients, in_order
        self.group["params"] = shards.local_tensors
        # Nobody but `_init_group` makes or replaces state of these, so it would gather the same lists.
        if kept is not None and not others and kept.options == self._options:
            self.repeats = kept.present == [gradient is not None for gradient in gradients]
            shards.cache = kept if self.repeats else None

    def gather(self, optimizer: Optimizer) -> None:
        """Lets torch gather the lists to step with, which may make state; or reuses those of the last step."""
        shards, kept = self.shards, self.shards.cache
        if self.repeats and kept is not None and self._gradients is not None:
            self.lists = [kept.local_tensors, list(compress(self._gradients, kept.present)), *kept.state]
            self.init_result = kept.init_result
            return
        self.lists, self.init_result = gather_lists(optimizer, self.group)
        stepped, gradients, *state = self.lists
        if not shards.alike or any(each.layout is not torch.strided for each in gradients):
            return
        if any(value is None for each in state for value in each):  # the step makes it
            return
        here = set(map(id, stepped))
        present = [id(local) in here for local in shards.local_tensors]
        # Of copies, as the step continues with the lists.
        kept_state = [list(each) for each in state]
        shards.cache = StepCache(self._options, present, list(stepped), kept_state, self.init_result)

    @property
    def parts(self) -> Sequence[Part]:
        """The whole group, or parts of it that take different implementations."""
        return (self,) if self._parts is None else self._parts

    @property
    def is_split(self) -> bool:
        return self._parts is not None

    def split(self, optimizer: Optimizer, parts: Iterable[tuple[list[Tensor], bool | None]]) -> None:
        """Has torch step these local tensors in parts, each with its own value of "fused"."""
        self._parts = [Part({**self.group, "params": tensors, "fused": fused}) for tensors, fused in parts]
        if self.lists is not None:
            for part in self._parts:
                part.lists, part.init_result = gather_lists(optimizer, part.group)

    def restore(self) -> None:
        """Undoes `attach`, and options that were set in the group for the step."""
        self.group.update(self._before)
        self._borrowed.restore()


def step_groups(optimizer: Optimizer, steps: Sequence[GroupStep]) -> None:
    """Steps these groups of the optimizer, without hooks, with the lists that they have gathered."""
    every = optimizer.param_groups
    parts = [part for step in steps for part in step.parts]
    by_group = {id(part.group): part for part in parts}
    ahead = any(part.lists is not None for part in parts)
    optimizer.param_groups = [part.group for part in parts]
    try:
        step_with_lists(optimizer, (lambda group, lists: by_group[id(group)].fill(lists)) if ahead else None)
    finally:
        optimizer.param_groups = every
