"""The base of algorithms that precondition blocks: each step gathers every block's gradient at its owner, which
computes the update on the whole block with state that it alone keeps, and scatters it back.

So a block's update is the same bits on any mesh. Exchanges, rounds and checks of absent gradients are Muon's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from operator import add
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.algorithms.blocked.block_state import WorkingTensor, make_zeros, owners_in
from shardopt.algorithms.blocked.blocks import Block, assign, blocks_of, cost_of, factor_shape, job_of
from shardopt.algorithms.dense_gradients import dense_gradients
from shardopt.algorithms.elementwise.base import restore_dtypes
from shardopt.algorithms.late_checks import LateChecks
from shardopt.algorithms.muon.assignment import Job
from shardopt.algorithms.muon.redistribute import MatrixRedistributor
from shardopt.algorithms.muon.teams import Team, refusal, refuse_differing_gradients
from shardopt.errors import GradientError
from shardopt.ranks import ranks_among, ranks_of
from shardopt.sharding.box import Box, cover_faults
from shardopt.sharding.layout import Layout
from shardopt.sharding.pieces import View, narrowed
from shardopt.sharding.view import assemble, device_of, groups_of, is_held, members_of, view_of

Group = Mapping[str, Any]
MOST_DIMENSIONS = 5


class BlockOptimizer(Optimizer):
    """A torch optimizer over parameters that may be sharded, on one or several meshes; a subclass has the equations.

    Every rank of every mesh must call `step` with the same parameters in the same order, and the same of them must have
    gradients.

    State of a parameter: `step`, a number on the CPU; further tensors in fp32 (fp64 of a parameter of fp64) whose
    global shapes follow from the parameter's and from `block_size` (see `blocks.py`), each block of which is on its
    owner alone. Owners are chosen among the ranks that hold a parameter, by the work that its blocks are; of a plain
    parameter every rank is the owner.
    """

    round_bytes = 128 << 20
    """As Muon's."""

    @property
    def names(self) -> Mapping[Tensor, str]:
        """Parameter → its name, for errors and for the order of parameters; a keyed optimizer sets it."""
        names: Mapping[Tensor, str] = self.__dict__.get("_names_of", {})
        return names

    @names.setter
    def names(self, names: Mapping[Tensor, str]) -> None:
        self.__dict__["_names_of"] = names
        self._assign()

    # --- the equations ---

    def _like_names(self, group: Group) -> tuple[str, ...]:
        """Returns the names of state that is shaped like the parameter."""
        raise NotImplementedError

    def _factor_names(self) -> tuple[str, ...]:
        """Returns the beginnings of the names of factors, to which the dimension is added: "left" is "left_0", …"""
        raise NotImplementedError

    def _factored_dims(self, group: Group, sizes: Sequence[int]) -> tuple[int, ...]:
        """Returns the dimensions that have factors.

        Args:
            sizes: of the largest block of the parameter.
        """
        raise NotImplementedError

    def _update_block(self, group: Group, step: int, gradient: Tensor, state: dict[str, Tensor], turn: int) -> Tensor:
        """Updates the state of a block, and returns the update of its elements.

        Args:
            group: the options.
            step: the number of this step, from 1.
            gradient: of the block, in the dtype of the state; may be overwritten.
            state: by name; tensors are changed in place, or replaced in the dict by others of their shape.
            turn: is added to the step to find out whether it is this block's turn to decompose its factors anew.
        """
        raise NotImplementedError

    def _apply(self, group: Group, step: int, weight: Tensor, update: Tensor) -> None:
        """Changes elements of a parameter by their update, elementwise and in place; both in the dtype of the state."""
        raise NotImplementedError

    # --- the step ---

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step. Collective: every rank of every mesh in it must call.

        For each set of ranks over which parameters lie, one all-to-all of gradients to the owners and one back of
        updates for every `round_bytes` that an owner works on; before them, on the CPU or where there are
        ShardedTensors, one small all-reduce that finds absent gradients. Where nothing is waited for (on accelerators)
        differences are raised in a later step.

        Args:
            closure: evaluates the model again and returns the loss, which is returned; called once.

        Raises:
            GradientError: on all ranks that share a parameter: its gradient does not fit it or is sparse on one of
                them, or is absent on some. Nothing was changed; but on an accelerator, where an earlier step has taken
                what was absent or refused for zeros.
            StateError: the state of a parameter was made for other blocks than those of its group's `block_size`.
        """
        self._late.run_ready()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not all(self._is_assigned(group, p) for group in self.param_groups for p in group["params"]):
            self._assign()
        works = [
            _Work(self, parameter, group, self.names.get(parameter, ""))
            for group in self.param_groups
            for parameter in group["params"]
        ]
        teams = _teams(sorted(works, key=lambda work: work.name))
        problems = [problem for team in teams if team.checks_first for problem in team.agree()]
        unchecked = {work for team in teams if not team.checks_first for work in team.matrices}
        _raise_fault(work for work in works if work not in unchecked)
        if problems:
            raise refusal(problems)
        for work in works:
            if work.gradients is not None and work.is_held:
                work.count_step()
        for team in teams:
            self._step_team(team)
        _raise_fault(unchecked)  # now that the others do not wait for this rank
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads as torch does, but state in the dtype that it was saved with, where torch casts to the parameter's."""
        super().load_state_dict(state_dict)
        restore_dtypes(self, state_dict, lambda name: name != "step")

    def initial_state(self, group: Group, parameter: Tensor) -> dict[str, Any]:
        """Makes the state of a parameter that has none, as its first step would; changes nothing."""
        if not self._is_assigned(group, parameter):
            self._assign()
        view = view_of(parameter)
        dtype = torch.promote_types(view.dtype, torch.float32)
        like = torch.empty(0, dtype=dtype, device=device_of(parameter))
        wide = torch.get_default_dtype() == torch.float64
        blocks, owners, rank = self.blocks(group, view.shape), self._owners[parameter], ranks_of().rank
        counter = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device="cpu")
        state: dict[str, Any] = {"step": counter}
        boxes = [block.box for block in blocks]
        for name in self._like_names(group):
            state[name] = make_zeros(view.shape, boxes, owners, rank, like, view.layout.local)
        for prefix in self._factor_names():
            for dim in self.factored_dims(group, view.shape):
                shape = factor_shape(view.shape, group["block_size"], dim)
                boxes_of = [block.factors[dim] for block in blocks]
                state[f"{prefix}_{dim}"] = make_zeros(shape, boxes_of, owners, rank, like, view.layout.local)
        return state

    def unlike(self, group: Group, options: Mapping[str, Any]) -> Iterable[tuple[str, Any, Any]]:
        """Yields `block_size` where a saved one cuts a parameter that has state into other blocks: stored, and own."""
        own = group["block_size"]
        stored = options.get("block_size", own)
        shapes = {view_of(parameter).shape for parameter in group["params"] if self.state.get(parameter)}
        if any(blocks_of(shape, stored) != blocks_of(shape, own) for shape in shapes):
            yield "block_size", stored, own

    def blocks(self, group: Group, shape: tuple[int, ...]) -> tuple[Block, ...]:
        """Returns the blocks of a parameter of this shape."""
        return blocks_of(shape, group["block_size"])

    def factored_dims(self, group: Group, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the dimensions of a parameter of this shape that have factors."""
        blocks = self.blocks(group, shape)
        return self._factored_dims(group, blocks[0].box.sizes) if blocks else ()

    @property
    def _owners(self) -> dict[Tensor, tuple[int, ...] | None]:
        owners: dict[Tensor, tuple[int, ...] | None] = self.__dict__.setdefault("_owners_of", {})
        return owners  # copies are made without it

    @property
    def _group_of(self) -> dict[Tensor, Group]:
        return {parameter: group for group in self.param_groups for parameter in group["params"]}

    def _is_assigned(self, group: Group, parameter: Tensor) -> bool:
        """Whether each block has an owner: a load may have brought another `block_size`."""
        owners = self._owners.get(parameter)
        if owners is None:
            return parameter in self._owners
        return len(owners) == len(self.blocks(group, view_of(parameter).shape))

    def _assign(self) -> None:
        """Gives owners to the blocks of those parameters that have none; where there is state, those who have it.

        The same on all ranks of a parameter: it depends on what these have in common alone.
        """
        found: dict[tuple[int, ...], dict[str, tuple[Tensor, Group]]] = {}
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

    def _owners_by_state(self, parameter: Tensor, group: Group, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        state, blocks = self.state.get(parameter, {}), self.blocks(group, shape)
        boxes_of = {name: [block.box for block in blocks] for name in self._like_names(group)}
        for dim in self.factored_dims(group, shape):
            boxes_of[f"{self._factor_names()[0]}_{dim}"] = [block.factors[dim] for block in blocks]
        for name, boxes in boxes_of.items():
            if name in state:
                return owners_in(f"{self.names.get(parameter, 'a parameter')}.{name}", state[name], boxes)
        return None

    def _costs(self, group: Group, shape: tuple[int, ...]) -> list[int]:
        dims = self.factored_dims(group, shape)
        every = group["precondition_frequency"]
        return [cost_of(block.box.sizes, dims, every) for block in self.blocks(group, shape)]

    def _step_team(self, team: Team[_Work]) -> None:
        stepping = team.stepping()
        if not stepping:
            return
        redistributor = MatrixRedistributor(team.ranks, stepping[0].dtype, stepping[0].device, self.round_bytes)
        tasks = [_Task(work, number) for work in stepping for number in range(len(work.blocks))]
        flags = redistributor.run(tasks, team.gradient_flags(stepping))
        if not team.checks_first:
            names = [work.name for work in stepping]
            self._late.defer(flags, partial(refuse_differing_gradients, team.ranks.members, names))

    @property
    def _late(self) -> LateChecks:
        checks: LateChecks = self.__dict__.setdefault("_late_checks", LateChecks())  # copies are made without it
        return checks


class _Work:
    """One parameter in one step.

    Args:
        optimizer: that steps.
        parameter: the user's.
        group: its options.
        name: its FQN, "" where that is not known.
    """

    def __init__(self, optimizer: BlockOptimizer, parameter: Tensor, group: Group, name: str) -> None:
        self.optimizer, self.parameter, self.group, self.name = optimizer, parameter, group, name
        self.view = view_of(parameter, name)
        self.dtype = torch.promote_types(self.view.dtype, torch.float32)
        self.blocks = optimizer.blocks(group, self.view.shape)
        self.costs = optimizer._costs(group, self.view.shape)
        self.owners = optimizer._owners[parameter] or (ranks_of().rank,) * len(self.blocks)
        self.is_held = is_held(parameter)
        self.gradients: list[Tensor] | None = None
        self.fault: GradientError | None = None  # raised once the other ranks know of it
        self.step = 0
        try:
            self.gradients = dense_gradients(parameter, name)
        except GradientError as error:
            self.fault = error

    @property
    def device(self) -> torch.device:
        """Where the local tensors lie."""
        return device_of(self.parameter)

    @cached_property
    def layout(self) -> Layout:
        """Where the parameter lies, with the holders of each box."""
        layout = self.view.layout
        if layout.holders is None:
            layout = Layout.from_holders(layout.shape, {layout.boxes[0]: (ranks_of().rank,)})
        return layout

    def count_step(self) -> None:
        """Makes the state where there is none, and counts the step."""
        state = self.optimizer.state[self.parameter]
        if not state:
            state.update(self.optimizer.initial_state(self.group, self.parameter))
        state["step"] += 1
        self.step = int(state["step"])

    @cached_property
    def _gradient_pieces(self) -> list[tuple[Box, Tensor]]:
        assert self.gradients is not None
        return [(each.box, each.tensor) for each in view_of(assemble(self.parameter, self.gradients)).pieces]

    def gradient_in(self, block: Box) -> dict[Box, Tensor]:
        """Returns the gradient in a block on this rank, by boxes in coordinates of that; zeros without a gradient."""
        if not self.is_held:
            return {}
        if self.gradients is None:
            pieces = [(each.box, torch.zeros_like(each.tensor)) for each in self.view.pieces]
        else:
            pieces = self._gradient_pieces
        common = ((box.intersect(block), box, tensor) for box, tensor in pieces)
        return {
            each.within(block): narrowed(tensor, each.within(box)) for each, box, tensor in common if each is not None
        }

    def update_of(self, number: int, gradient: Tensor) -> Tensor:
        """Computes the update of a block of which this rank is the owner; zeros without a gradient."""
        if self.gradients is None:  # then no rank has one
            return gradient.zero_()
        block, group, state = self.blocks[number], self.group, self.optimizer.state[self.parameter]
        working = {name: WorkingTensor(state[name], block.box) for name in self.optimizer._like_names(group)}
        for prefix in self.optimizer._factor_names():
            for dim in self.optimizer.factored_dims(group, self.view.shape):
                name = f"{prefix}_{dim}"
                working[name] = WorkingTensor(state[name], block.factors[dim], square=True)
        tensors = {name: each.tensor for name, each in working.items()}
        # By the name alone, so that it is the same on any mesh.
        turn = crc32(self.name.encode()) + number if group["stagger"] else 0
        update = self.optimizer._update_block(group, self.step, gradient, tensors, turn)
        for name, each in working.items():
            each.put_back(tensors[name])
        return update

    def apply(self, block: Box, box: Box, update: Tensor) -> None:
        """Applies an update in a box of a block, in coordinates of that; nothing without a gradient."""
        if self.gradients is None:
            return
        box = Box(tuple(map(add, block.offsets, box.offsets)), box.sizes)
        (piece,) = (each for each in self.view.pieces if each.box.contains(box))
        here = narrowed(piece.tensor, box.within(piece.box))
        # In 16 bits torch's kernels round by how far from the end of the memory an element is.
        wide = here.to(self.dtype)
        self.optimizer._apply(self.group, self.step, wide, update)
        if wide is not here:
            here.copy_(wide)


class _Task:
    """One block of a parameter in one step, for the redistributor."""

    def __init__(self, work: _Work, number: int) -> None:
        self._work, self._number = work, number
        self._box = work.blocks[number].box
        self.job: Job = job_of(work.layout, self._box, work.costs[number], work.owners[number])

    def local_boxes(self) -> dict[Box, Tensor]:
        """Returns the gradient, by box."""
        return self._work.gradient_in(self._box)

    def compute(self, whole: Tensor) -> Tensor:
        """Computes the update from the gradient."""
        return self._work.update_of(self._number, whole)

    def apply_box(self, box: Box, result: Tensor) -> None:
        """Applies the update in one box."""
        self._work.apply(self._box, box, result)


def unsuitable_for_blocks(view: View) -> str:
    """Returns why a parameter cannot be cut into blocks; "" where it can."""
    if len(view.shape) > MOST_DIMENSIONS:
        return f"shape {view.shape} of more than {MOST_DIMENSIONS} dimensions"
    if not view.dtype.is_floating_point:
        return f"dtype {view.dtype}"
    if cover_faults(view.shape, view.layout.boxes):
        return "shards that do not say where the rest of the parameter is"
    return ""


def _having(view: View) -> list[int]:
    """Returns the ranks that have elements of a parameter."""
    pairs = zip(view.layout.boxes, view.layout.holders or (), strict=True)
    return sorted({rank for box, holders in pairs if box.numel for rank in holders})


def _raise_fault(works: Iterable[_Work]) -> None:
    for work in works:
        if work.fault is not None:
            raise work.fault


def _teams(works: Iterable[_Work]) -> list[Team[_Work]]:
    """Groups the parameters by the ranks over which they lie, in the same order on all of these."""
    rank = ranks_of().rank
    teams: dict[tuple[tuple[int, ...], str, str], list[_Work]] = {}
    for work in works:
        members = members_of(work.parameter)
        if rank in members and work.blocks:
            teams.setdefault((members, str(work.dtype), work.device.type), []).append(work)
    return [Team(ranks_among(key[0], groups_of(teams[key][0].parameter)), teams[key]) for key in sorted(teams)]
