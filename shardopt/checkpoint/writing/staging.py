"""Staging: copies of a rank's state to host memory, at once or, of state that only steps change, beside training."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardopt.checkpoint.format.tensor_bytes import is_plain_memory, move_bytes
from shardopt.checkpoint.planning.describe import Description, describe
from shardopt.checkpoint.planning.replica_check import CheckReplicas, contents_of
from shardopt.checkpoint.writing.host_memory import HostMemory
from shardopt.errors import Problem, StateError
from shardopt.flatten import flatten
from shardopt.sharding.pieces import Piece, View
from shardopt.sharding.view import local_tensors
from shardopt.state import FlatState, Tied, is_below
from shardopt.streams import on_stream

_SMALL_BYTES = 64 * 1024  # up to here a copy takes less time than to get Python's lock back


class Copy(NamedTuple):
    """A tensor, the host memory that it is copied to, and its version counter at the call."""

    key: str
    source: Tensor
    host: Tensor
    version: int


class Staging:
    """The copy of one rank's state to the host.

    The constructor runs in the call that saves, and copies everything that may change before the next step; on
    accelerators the copies are ordered before later work of the current stream. The rest is copied by `finish`, in any
    thread.

    Args:
        app: as for `save`.
        memory: for the copies; nobody else uses it while this staging and its descriptions are in use.
        lazily: whether state that only a step changes is left to `finish`.
        members: as for `describe`.
        tied, select: as for `save`.

    Attributes:
        optimizers: those in `app`, which have to wait with their steps for `finish`.

    Raises:
        StateError, LayoutError: something in `app` cannot be stored.
    """

    def __init__(
        self,
        app: Mapping[str, Any],
        memory: HostMemory,
        lazily: bool,
        members: tuple[int, ...] | None = None,
        tied: Tied | None = None,
        select: str | None = None,
    ) -> None:
        flat = flatten(app, tied).selected(select)
        live = describe(flat, "none", members)
        later = changed_by_steps_alone(flat) if lazily else frozenset()
        later -= {first for key, first in live.tied.items() if key not in later}
        own = {key: view for key, view in live.views.items() if key not in live.tied}  # tied tensors are copied once
        pieces = [piece for view in own.values() for piece in view.pieces]
        hosts = iter(memory.tensors_like([piece.tensor for piece in pieces]))
        self._memory = memory
        self._later: list[Copy] = []
        now: list[Copy] = []
        views: dict[str, View] = {}
        for key, view in own.items():
            staged = tuple(Piece(piece.box, next(hosts)) for piece in view.pieces)
            views[key] = View(view.shape, view.dtype, staged, view.layout)
            copies = self._later if key in later else now
            for piece, host in zip(view.pieces, staged, strict=True):
                copies.append(Copy(key, piece.tensor, host.tensor, _version(piece.tensor)))
        for key, first in live.tied.items():
            views[key] = views[first]
        self._now = now  # kept until they are copied: on an accelerator that takes until `finish`
        self._description = replace(live, views=views)
        self.optimizers = _optimizers_of(flat)
        self._devices = {piece.tensor.device for piece in pieces if piece.tensor.device.type != "cpu"}
        if not self._later:
            memory.populate()
        for device in self._devices:
            memory.stream(device).wait_stream(torch.get_device_module(device).current_stream(device))
        _copy_all(now, memory)
        for device in self._devices:
            torch.get_device_module(device).current_stream(device).wait_stream(memory.stream(device))

    @property
    def is_lazy(self) -> bool:
        """Whether some copies are left for `finish`."""
        return bool(self._later)

    def finish(self) -> None:
        """Makes the copies that were left, and waits until everything is on the host.

        Raises:
            StateError: some of these tensors were changed meanwhile, and not by a step.
        """
        later, self._later = self._later, []
        self._memory.populate()
        _copy_all(later, self._memory)
        for device in self._devices:
            stream = self._memory.stream(device)
            with on_stream(stream):
                stream.synchronize()  # and not the device: another thread may be capturing a graph on it
        self._now = []
        # Not each after its own copy: an operation counts up the version only when it is through.
        changed = list(dict.fromkeys(copy.key for copy in later if _version(copy.source) != copy.version))
        if changed:
            required = "as it was when the save was asked for, until it is copied"
            remedy = 'wait for .staged before changing it, or save with stage="now"'
            problems = [
                Problem(key, "changed by another hand than its optimizer's", required, remedy) for key in changed
            ]
            raise StateError("state was changed while it was being copied", problems)

    def describe(self, check_replicas: CheckReplicas) -> Description:
        """Describes the state at the call, in host memory. To be called after `finish`."""
        contents = contents_of(self._description.views, check_replicas)
        return replace(self._description, contents=contents, check_replicas=check_replicas)


def changed_by_steps_alone(flat: FlatState) -> frozenset[str]:
    """Returns the keys of tensors that nothing changes before an optimizer in the state steps.

    These are parameters of optimizers, wherever they stand in the state, and the optimizers' own state; but not of an
    optimizer that updates parameters within backward. Options, which schedules change, and numbers, which cost nothing
    to copy, are not among them.
    """
    optimizers = _optimizers_of(flat)
    within_backward = [each for each in optimizers if getattr(each, "updates_in_backward", False)]
    stepping = [each for each in optimizers if each not in within_backward]
    owned = _memory_of(stepping) - _memory_of(within_backward)
    states = {(*each.path, "state") for each in flat.handbacks if each.target in stepping}
    keys = []
    for key, leaf in flat.leaves.items():
        if isinstance(leaf.value, Tensor) and leaf.value.ndim:
            within = is_below(leaf.path, *states)
            if within or all(_place(local) in owned for local in local_tensors(leaf.value)):
                keys.append(key)
    return frozenset(keys)


def _optimizers_of(flat: FlatState) -> list[Optimizer]:
    return [each.target for each in flat.handbacks if isinstance(each.target, Optimizer)]


def _memory_of(optimizers: Iterable[Optimizer]) -> set[tuple[Any, ...]]:
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return {_place(local) for group in groups for parameter in group["params"] for local in local_tensors(parameter)}


def _place(local: Tensor) -> tuple[Any, ...]:
    # By memory and not by object: a state_dict may give another tensor over the same memory.
    return (local.device, local.data_ptr(), local.dtype, local.shape, local.stride())


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _copy_all(copies: Sequence[Copy], memory: HostMemory) -> None:
    by_device: defaultdict[torch.device, list[Copy]] = defaultdict(list)
    for copy in copies:
        if copy.source.numel():
            by_device[copy.source.device].append(copy)
    for device, group in by_device.items():
        if device.type == "cpu":
            for copy in group:
                copy_on_host(copy.host, copy.source)
        else:
            with torch.no_grad(), on_stream(memory.stream(device)):
                hosts, sources = [copy.host for copy in group], [copy.source for copy in group]
                torch._foreach_copy_(hosts, sources, non_blocking=True)


def copy_on_host(host: Tensor, source: Tensor) -> None:
    """Copies a tensor of the host, in one thread and without the interpreter's lock, so that training goes on.

    torch's own copy takes as many threads as training does, which on a busy machine wait for each other.
    """
    if is_plain_memory(source):
        move = move_bytes if source.nbytes <= _SMALL_BYTES else ctypes.memmove
        move(host.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        with torch.no_grad():
            host.copy_(source)
