"""The base of algorithms that precondition blocks.

Each step gathers every block's gradient at its owner. The owner computes the update of the whole block, with state that
it alone keeps, and scatters it back.

So a block's update is the same bits on any mesh. Exchanges, rounds and checks of absent gradients are those of
`gathering/`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from shardopt.algorithms.blocked.block_state import WorkingTensor, make_zeros, owners_in
from shardopt.algorithms.blocked.blocks import Block, assign, blocks_of, cost_of, factor_shape
from shardopt.algorithms.communicating import uncovered
from shardopt.algorithms.gathering.assignment import Job, job_of
from shardopt.algorithms.gathering.optimizer import GatheringOptimizer
from shardopt.algorithms.gathering.step import GatheredStep
from shardopt.algorithms.registry import Dtype, Kind, Options
from shardopt.ranks import ranks_of
from shardopt.sharding.box import Box
from shardopt.sharding.pieces import View
from shardopt.sharding.view import device_of, members_of, view_of

MOST_DIMENSIONS = 5


class BlockEntry(NamedTuple):
    """One tensor of state: its global shape, the box of each block, and whether the boxes are matrices of factors."""

    name: str
    shape: tuple[int, ...]
    boxes: Sequence[Box]
    is_factor: bool


class _BlockStep(GatheredStep):
    """The step of one parameter on this rank."""

    optimizer: BlockOptimizer

    def __init__(self, optimizer: BlockOptimizer, group: Options, parameter: Tensor) -> None:
        super().__init__(optimizer, group, parameter)
        self.dtype = torch.promote_types(self.view.dtype, torch.float32)
        self.parts = [block.box for block in optimizer.blocks(group, self.view.shape)]
        self.number = 0
        """The number of this step, from 1; 0 without a gradient."""
        self._costs = optimizer._costs(group, self.view.shape)
        self._owners = optimizer._owners[parameter] or (ranks_of().rank,) * len(self.parts)

    @cached_property
    def _entries(self) -> list[BlockEntry]:
        return list(self.optimizer.entries(self.group, self.view.shape))

    def job(self, number: int) -> Job:
        """Returns the layout of a block, its cost and its owner."""
        return job_of(self.layout, self.parts[number], self._costs[number], self._owners[number])

    def begin(self) -> tuple[Sequence[Tensor], ...]:
        """Counts the step; returns the gradient."""
        self.number = int(self.counted_state()["step"])
        return (self.gradients or [],)

    def sent(self, *tensors: Tensor) -> Tensor:
        """Returns the gradient."""
        return tensors[0]

    def compute(self, number: int, whole: Tensor) -> Tensor:
        """Computes the update of a block that this rank owns; zeros without a gradient."""
        if self.gradients is None:  # then no rank has one
            return whole.zero_()
        group, state, optimizer = self.group, self.state, self.optimizer
        working = {
            each.name: WorkingTensor(state[each.name], each.boxes[number], square=each.is_factor)
            for each in self._entries
        }
        tensors = {name: each.tensor for name, each in working.items()}
        # By the name alone, so that it is the same on any mesh.
        turn = crc32(self.key.encode()) + number if group["stagger"] else 0
        update = optimizer._update_block(group, self.number, whole, tensors, turn)
        for name, each in working.items():
            each.put_back(tensors[name])
        return update

    def move(self, number: int, weight: Tensor, result: Tensor) -> None:
        """Applies the update."""
        self.optimizer._apply(self.group, self.number, weight, result)


class BlockOptimizer(GatheringOptimizer):
    """A torch optimizer over parameters that may be sharded, on one or several meshes; subclasses have the equations.

    State of a parameter: `step`, a number on the CPU; further tensors in fp32 (fp64 of a parameter of fp64) whose
    global shapes follow from the parameter's and from `block_size` (see `blocks.py`); each block is on its owner alone.
    Owners are chosen among the ranks that hold a parameter, by the work that its blocks are; of a plain parameter every
    rank is the owner.
    """

    step_type = _BlockStep

    # --- the equations ---

    factors: ClassVar[tuple[str, ...]]
    """The prefixes of the names of factors, to which the dimension is added: "left" becomes "left_0", …"""

    def _factored_dims(self, group: Options, sizes: Sequence[int]) -> tuple[int, ...]:
        """Returns the dimensions that have factors.

        Args:
            sizes: of the largest block of the parameter.
        """
        raise NotImplementedError

    def _update_block(self, group: Options, step: int, gradient: Tensor, state: dict[str, Tensor], turn: int) -> Tensor:
        """Updates the state of a block; returns the update of its elements.

        Args:
            group: the options.
            step: the number of this step, from 1.
            gradient: of the block, in the dtype of the state; may be overwritten.
            state: by name; tensors are changed in place, or replaced in the dict by others of their shape.
            turn: is added to the step to find out whether it is this block's turn to decompose its factors again.
        """
        raise NotImplementedError

    def _apply(self, group: Options, step: int, weight: Tensor, update: Tensor) -> None:
        """Adds an update to elements of a parameter, elementwise and in place; both have the dtype of the state."""
        raise NotImplementedError

    # --- the step ---

    def _take_step(self) -> None:
        if not all(self._is_assigned(group, p) for group in self.param_groups for p in group["params"]):
            self._assign()
        super()._take_step()

    def initial_state(self, group: Options, parameter: Tensor) -> dict[str, Any]:
        """Makes the state of a parameter without state, as its first step would; changes nothing."""
        if not self._is_assigned(group, parameter):
            self._assign()
        view = view_of(parameter)
        dtype = torch.promote_types(view.dtype, torch.float32)
        like = torch.empty(0, dtype=dtype, device=device_of(parameter))
        owners, rank, alone = self._owners[parameter], ranks_of().rank, view.layout.local
        state: dict[str, Any] = {"step": torch.zeros((), dtype=Dtype.COUNTER.of(dtype, group), device="cpu")}
        for each in self.entries(group, view.shape):
            state[each.name] = make_zeros(each.shape, each.boxes, owners, rank, like, alone)
        return state

    def state_names(self, group: Options, parameter: Tensor) -> Collection[str]:
        """Returns the names of what `initial_state` makes, and makes nothing."""
        return {"step", *(each.name for each in self.entries(group, view_of(parameter).shape))}

    def unlike(self, group: Options, options: Options, kept: Collection[str]) -> Iterable[tuple[str, Any, Any]]:
        """Yields ("block_size", stored, own) if the stored value cuts a parameter with state into other blocks."""
        own = group["block_size"]
        stored = options.get("block_size", own)
        shapes = {view_of(parameter).shape for parameter in group["params"] if self.state.get(parameter)}
        if any(blocks_of(shape, stored) != blocks_of(shape, own) for shape in shapes):
            yield "block_size", stored, own

    def entries(self, group: Options, shape: tuple[int, ...]) -> Iterator[BlockEntry]:
        """Yields the entries of state of a parameter of this shape, except its step."""
        blocks = self.blocks(group, shape)
        for entry in self.spec.entries(group, 0):  # that which a parameter without dimensions has, too
            if entry.kind is Kind.BLOCKS:
                yield BlockEntry(entry.name, shape, [block.box for block in blocks], False)
        for prefix in self.factors:
            for dim in self.factored_dims(group, shape):
                boxes = [block.factors[dim] for block in blocks]
                yield BlockEntry(f"{prefix}_{dim}", factor_shape(shape, group["block_size"], dim), boxes, True)

    def blocks(self, group: Options, shape: tuple[int, ...]) -> tuple[Block, ...]:
        """Returns the blocks of a parameter of this shape."""
        return blocks_of(shape, group["block_size"])

    def factored_dims(self, group: Options, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the dimensions of a parameter of this shape that have factors."""
        blocks = self.blocks(group, shape)
        return self._factored_dims(group, blocks[0].box.sizes) if blocks else ()

    @property
    def _owners(self) -> dict[Tensor, tuple[int, ...] | None]:
        owners: dict[Tensor, tuple[int, ...] | None] = self.__dict__.setdefault("_owners_of", {})
        return owners  # copies are made without it

    @property
    def _group_of(self) -> dict[Tensor, Options]:
        return {parameter: group for group in self.param_groups for parameter in group["params"]}

    def _is_assigned(self, group: Options, parameter: Tensor) -> bool:
        """Whether each block has an owner; false after a load of another `block_size`."""
        owners = self._owners.get(parameter)
        if owners is None:
            return parameter in self._owners
        return len(owners) == len(self.blocks(group, view_of(parameter).shape))

    def _assign(self) -> None:
        """Gives owners to the blocks of parameters without owners: the ranks that hold their state, if there is state.

        The same on all ranks of a parameter: it depends only on what these have in common. So it waits until state is
        needed: ranks may have added the same groups in different orders.
        """
        found: dict[tuple[int, ...], dict[str, tuple[Tensor, Options]]] = {}
        loads: dict[tuple[int, ...], dict[int, int]] = {}
        for place, (parameter, group) in enumerate(self._group_of.items()):
            members = members_of(parameter)
            view = view_of(parameter)
            if view.layout.holders is None or len(members) == 1:
                self._owners[parameter] = None
                continue
            if not self._is_assigned(group, parameter):
                owners = self._owners_by_state(parameter, group, view.shape)
                if owners is None:
                    name = self.names.get(parameter, f"{place:09}")
                    found.setdefault(members, {})[name] = parameter, group
                    continue
                self._owners[parameter] = owners
            here = loads.setdefault(members, {})
            costs = self._costs(group, view.shape)
            for owner, cost in zip(self._owners[parameter] or (), costs, strict=True):
                here[owner] = here.get(owner, 0) + cost
        for members, named in found.items():
            views = {name: view_of(parameter) for name, (parameter, _) in named.items()}
            costs_of = {name: self._costs(group, views[name].shape) for name, (_, group) in named.items()}
            holders = {name: _having(view) for name, view in views.items()}
            for name, owners_of in assign(costs_of, holders, loads.setdefault(members, {})).items():
                self._owners[named[name][0]] = owners_of

    def _owners_by_state(self, parameter: Tensor, group: Options, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        state = self.state.get(parameter, {})
        for each in self.entries(group, shape):
            if each.name in state:
                key = f"{self.names.get(parameter, 'a parameter')}.{each.name}"
                return owners_in(key, state[each.name], each.boxes)
        return None

    def _costs(self, group: Options, shape: tuple[int, ...]) -> list[int]:
        dims = self.factored_dims(group, shape)
        every = group["precondition_frequency"]
        return [cost_of(block.box.sizes, dims, every) for block in self.blocks(group, shape)]


def unsuitable_for_blocks(view: View) -> str:
    """Returns why a parameter cannot be cut into blocks; "" if it can."""
    if len(view.shape) > MOST_DIMENSIONS:
        return f"shape {view.shape} of more than {MOST_DIMENSIONS} dimensions"
    if not view.dtype.is_floating_point:
        return f"dtype {view.dtype}"
    return uncovered(view)


def _having(view: View) -> list[int]:
    """Returns the ranks that have elements of a parameter."""
    pairs = zip(view.layout.boxes, view.layout.holders or (), strict=True)
    return sorted({rank for box, holders in pairs if box.numel for rank in holders})
