"""Staging: copies a rank's state to host memory, at once or, if only steps change it, while training continues.

    H ranks hold the same

Of what other ranks hold too a rank writes a part, one H-th under DDP. Where that is much, only this part is copied, as
soon as the plan of the save is known, and 64 KiB of each tensor, by whose hashes ranks see whether replicas have
drifted.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.checkpoint.format.tensor_bytes import is_plain_memory, move_bytes
from shardopt.checkpoint.saving.planning.describe import Description, describe
from shardopt.checkpoint.saving.planning.forgotten import tell_of_what_is_lost
from shardopt.checkpoint.saving.planning.replica_check import (
    SAMPLED_BYTES,
    CheckReplicas,
    contents_of,
    hash_of,
    is_shared,
    sampled_copies,
)
from shardopt.checkpoint.saving.planning.save_plan import RankWrites, WriteRequest
from shardopt.checkpoint.saving.writing.device_stream import begin_copies, pieces_to_host
from shardopt.checkpoint.saving.writing.write import memory_of
from shardopt.errors import Problem, StateError
from shardopt.runtime.accelerator import copy_stream, has_streams, on_stream
from shardopt.runtime.deferred_checks import taking_state
from shardopt.runtime.host_memory import HostMemory
from shardopt.sharding.box import Box
from shardopt.sharding.gradients import may_move_in_backward
from shardopt.sharding.pieces import Piece, View
from shardopt.sharding.view import local_tensors
from shardopt.state.flatten import flatten
from shardopt.state.state import FlatState, Tied

LEAST_SHARED_BYTES = 16 << 20  # that other ranks hold too: of less all is copied, which takes no longer than a round
_SAMPLED_TOGETHER = 64  # tensors, whose samples take up to 4 MiB of the device
_SMALL_BYTES = 64 * 1024  # up to here a copy takes less time than to get Python's lock back


Offsets = dict[tuple[str, Box], int]  # of boxes in their files, by key and box


class Copy(NamedTuple):
    """A tensor, the host memory for its copy, and its version counter at the time of the call."""

    key: str
    source: Tensor
    host: Tensor
    version: int


class Shares(NamedTuple):
    """Host memory for copies by the plan: the boxes that a rank writes, and samples of those that it holds."""

    parts: HostMemory
    samples: HostMemory

    def free(self) -> None:
        """Frees both, which must no longer be in use."""
        self.parts.free()
        self.samples.free()


class Staging:
    """Copies one rank's state to the host.

    The constructor runs in the call that saves, and copies everything that may change before the next step; on
    accelerators the copies are ordered before later work of the current stream. The rest is copied by `finish`, in any
    thread.

    Args:
        app: as for `save`.
        memory: for the copies; nobody else uses it while this staging and its descriptions are in use.
        lazily: whether state that only a step changes is left to `finish`.
        members: as for `describe`.
        tied, select: as for `save`.
        shares: memory for what is copied by the plan; None to copy all that this rank holds.
        check_replicas: the replicas that will be compared: of "all" of them all bytes are needed, and so are copied.
        offsets: of large boxes in their files at earlier saves, by key and box. `learn` updates it.

    Attributes:
        optimizers, modules: those in `app`. The optimizers have to wait with their steps for `finish`.
        is_by_plan: whether some tensors are copied once it is known what this rank writes of them.

    Raises StateError, LayoutError: something in `app` cannot be stored.
    """

    def __init__(
        self,
        app: Mapping[str, Any],
        memory: HostMemory,
        lazily: bool,
        members: tuple[int, ...] | None = None,
        tied: Tied | None = None,
        select: str | None = None,
        shares: Shares | None = None,
        check_replicas: CheckReplicas = "none",
        offsets: Offsets | None = None,
    ) -> None:
        with taking_state() as self._checks:
            flat = flatten(app, tied).selected(select)
        live = describe(flat, "none", members)
        tell_of_what_is_lost(flat, members)
        later = changed_by_steps_alone(flat) if lazily else frozenset()
        later -= {first for key, first in live.tied.items() if key not in later}
        own = {key: view for key, view in live.views.items() if key not in live.tied}  # tied tensors are copied once
        for key in own.keys() & later:  # the same memory, also once `.data` of a tensor is replaced
            pieces = (Piece(box, tensor.detach()) for box, tensor in own[key].pieces)
            own[key] = own[key]._replace(pieces=tuple(pieces))
        self._held = held_by_several(own, live.tied, later if lazily else own.keys())
        if shares is None or check_replicas == "all" or _bytes_of(self._held.values()) < LEAST_SHARED_BYTES:
            self._held = {}
        self._shares, self._check_replicas = shares, check_replicas
        self._versions = {key: [_version(piece.tensor) for piece in view.pieces] for key, view in self._held.items()}
        self._places: dict[WriteRequest, WriteRequest] | None = None  # by the plan, and in what is copied
        self._samples: Mapping[str, Mapping[str, Tensor]] = {}
        self._lazily, self.is_by_plan = lazily, bool(self._held)
        held_pieces = [piece for view in self._held.values() for piece in view.pieces]
        copied_pieces = [piece for key, view in own.items() if key not in self._held for piece in view.pieces]
        self._offsets: Offsets = {} if offsets is None else offsets
        self._memory = memory
        hosts = self._hosts_of({key: view for key, view in own.items() if key not in self._held}, later)
        self._later: list[Copy] = []
        now, views = list[Copy](), dict[str, View]()
        for key, view in own.items():
            if key in self._held:
                views[key] = view
                continue
            staged = tuple(Piece(piece.box, next(hosts[key in later])) for piece in view.pieces)
            views[key] = View(view.shape, view.dtype, staged, view.layout)
            copies = self._later if key in later else now
            for piece, host in zip(view.pieces, staged, strict=True):
                copies.append(Copy(key, piece.tensor, host.tensor, _version(piece.tensor)))
        for key, first in live.tied.items():
            views[key] = views[first]
        self._now = now  # kept until they are copied: on an accelerator that takes until `finish`
        self._description = replace(live, views=views)
        self.optimizers = _optimizers_of(flat)
        self.modules = [each.object for each in flat.targets if isinstance(each.object, Module)]
        self._devices = set(filter(has_streams, {each.tensor.device for each in [*copied_pieces, *held_pieces]}))
        memory.populate()
        with self._after_the_caller():
            _copy_all(now)
            if not lazily:
                self._sample()

    @property
    def is_lazy(self) -> bool:
        """Whether some copies are left to `finish`."""
        return bool(self._later) or (self.is_by_plan and self._lazily)

    @property
    def waits_for_plan(self) -> bool:
        """Whether `copy_by_plan` must be called before the state may change."""
        return self.is_by_plan and not self._lazily

    @contextmanager
    def _after_the_caller(self) -> Iterator[None]:
        """Orders copies after earlier work on each accelerator's current stream, and before later work."""
        for device in self._devices:
            copy_stream(device).wait_stream(torch.get_device_module(device).current_stream(device))
        yield
        for device in self._devices:
            torch.get_device_module(device).current_stream(device).wait_stream(copy_stream(device))

    def copy_by_plan(self, writes: RankWrites | None) -> None:
        """Copies the boxes, shared with other ranks, that this rank writes; all shared boxes if the writes are unknown.

        In the thread that makes the staging, before the state may be changed.
        """
        with self._after_the_caller():
            self._now += self._copy_shares(writes)

    def finish(self, writes: RankWrites | None = None) -> None:
        """Makes the remaining copies, and waits until everything is on the host.

        Args:
            writes: this rank's writes, where staging is by plan and lazy.

        Raises:
            StateError: some of these tensors were changed meanwhile, and not by a step.
            GradientError: the last step before the call was taken without a gradient that it needs.
        """
        later, self._later = self._later, []
        if later:
            self._memory.later.populate()  # not in the call: to pin memory takes longer than to copy
        _copy_all(later)
        if self.is_by_plan and self._lazily:
            self._sample()
            later += self._copy_shares(writes)
        for device in self._devices:
            stream = copy_stream(device)
            with on_stream(stream):
                stream.synchronize()  # and not the device: another thread may be capturing a graph on it
        self._now = []
        self._checks.settle()
        # Not each after its own copy: an operation counts up the version only when it is through.
        changed = {copy.key for copy in later if _version(copy.source) != copy.version}
        if self._lazily:
            changed |= {
                key
                for key, view in self._held.items()
                if [_version(piece.tensor) for piece in view.pieces] != self._versions[key]
            }
        self._held = {}  # which may be casts that only this save has
        changed_keys = [key for key in self._description.views if key in changed]
        if changed_keys:
            required = "as it was when the save was asked for, until it is copied"
            remedy = 'wait for .staged before changing it, or save with stage="now"'
            problems = [
                Problem(key, "changed by another hand than its optimizer's", required, remedy) for key in changed_keys
            ]
            raise StateError("state was changed while it was being copied", problems, code="changed-while-copied")

    def _copy_shares(self, writes: RankWrites | None) -> list[Copy]:
        """Copies boxes that other ranks hold too, and describes the state by the copies."""
        assert self._shares is not None
        views, copies = dict(self._description.views), []
        boxes: defaultdict[str, list[tuple[Box, Tensor, int]]] = defaultdict(list)
        if writes is None:
            for key, view in self._held.items():
                pairs = zip(view.pieces, self._versions[key], strict=True)
                boxes[key] = [(*piece, version) for piece, version in pairs]
        else:
            self._places = {}
            for request in (each for slot in writes.slots.values() for each in slot if each.key in self._held):
                source, version = memory_of(request, self._held), self._versions[request.key][request.piece]
                self._places[request] = request._replace(piece=len(boxes[request.key]), inner=None)
                boxes[request.key].append((request.box, source, version))
        memory = self._shares.parts
        in_order = [(key, *each) for key, of_key in boxes.items() for each in of_key]
        offsets = [self._offsets.get((key, box)) for key, box, *_ in in_order]
        hosts = memory.tensors_like([source for _, _, source, _ in in_order], offsets)
        memory.populate()
        staged: dict[str, list[Piece]] = {key: [] for key in self._held}
        for (key, box, source, version), host in zip(in_order, hosts, strict=True):
            staged[key].append(Piece(box, host))
            copies.append(Copy(key, source, host, version))
        for key, view in self._held.items():
            views[key] = View(view.shape, view.dtype, tuple(staged[key]), view.layout)
        _copy_all(copies)
        self._description = replace(self._description, views=views)
        return copies

    def _sample(self) -> None:
        """Copies the samples to hash, of the tensors that are copied by the plan."""
        if self._shares is None or self._check_replicas == "none" or not self._held:
            return
        places = [
            (key, str(piece.box), piece.tensor)
            for key, view in self._held.items()
            for piece in view.pieces
            if is_shared(view.layout, piece.box)
        ]
        memory = self._shares.samples
        sizes = [torch.Size((min(tensor.nbytes, SAMPLED_BYTES),)) for _, _, tensor in places]
        hosts = memory.tensors_of(
            [(torch.uint8, size, tensor.device) for size, (_, _, tensor) in zip(sizes, places, strict=True)]
        )
        memory.populate()
        samples: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
        by_device: defaultdict[torch.device, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for (key, box, tensor), host in zip(places, hosts, strict=True):
            samples[key][box] = host
            by_device[tensor.device].append((host, tensor))
        for device, pairs in by_device.items():
            with torch.no_grad(), on_stream(copy_stream(device)) if has_streams(device) else nullcontext():
                for at in range(0, len(pairs), _SAMPLED_TOGETHER):
                    begin_copies(device, [*sampled_copies(pairs[at : at + _SAMPLED_TOGETHER])])
        self._samples = samples

    def _hosts_of(self, views: Mapping[str, View], later: Collection[str]) -> dict[bool, Iterator[Tensor]]:
        """Returns host memory for the pieces of tensors in their order, apart for those that are copied later."""
        sources: dict[bool, list[Tensor]] = {False: [], True: []}
        offsets: dict[bool, list[int | None]] = {False: [], True: []}
        for key, view in views.items():
            sources[key in later] += [piece.tensor for piece in view.pieces]
            if self._offsets:
                offsets[key in later] += [self._offsets.get((key, piece.box)) for piece in view.pieces]
        hosts = {False: iter(self._memory.tensors_like(sources[False], offsets[False]))}
        if sources[True]:
            hosts[True] = iter(self._memory.later.tensors_like(sources[True], offsets[True]))
        return hosts

    def learn(self, writes: RankWrites) -> None:
        """Notes where large boxes are in the files that these writes have made, for the memory of the next copies."""
        offsets = writes.large_offsets()
        if offsets:
            self._offsets.clear()
            self._offsets.update(offsets)

    def placed(self, writes: RankWrites) -> RankWrites:
        """Returns the writes with the copies as their memory; valid after `finish`."""
        places = self._places
        return writes if places is None else writes.replaced(lambda request: places.get(request, request))

    def describe_before(self) -> Description:
        """Describes the state before it is copied by the plan, without hashes."""
        return replace(self._description, contents_come_later=True, check_replicas=self._check_replicas)

    def describe(self, check_replicas: CheckReplicas) -> Description:
        """Describes the state at the time of the call, in host memory; valid after `finish`."""
        copied = {key: view for key, view in self._description.views.items() if key not in self._samples}
        contents = contents_of(copied, check_replicas)
        for key, by_box in self._samples.items():
            contents[key] = {box: hash_of(sample) for box, sample in by_box.items()}
        return replace(self._description, contents=contents, check_replicas=check_replicas)


def held_by_several(own: Mapping[str, View], tied: Mapping[str, str], of: Collection[str]) -> dict[str, View]:
    """Returns the tensors whose boxes other ranks may hold too, except tied ones, which are copied whole."""
    in_ties = {*tied, *tied.values()}
    return {
        key: view
        for key, view in own.items()
        if key in of and key not in in_ties and any(is_shared(view.layout, piece.box) for piece in view.pieces)
    }


def _bytes_of(views: Iterable[View]) -> int:
    return sum(piece.tensor.nbytes for view in views for piece in view.pieces)


def changed_by_steps_alone(flat: FlatState) -> frozenset[str]:
    """Returns the keys of tensors that only a step of an optimizer in the state changes.

    These are parameters of optimizers, wherever they stand in the state, and the optimizers' own state; but not of an
    optimizer that updates parameters within backward. Options, which schedules change, and numbers, which cost nothing
    to copy, are not among them.
    """
    optimizers = _optimizers_of(flat)
    within_backward = [each for each in optimizers if may_move_in_backward(each)]
    stepping = [each for each in optimizers if each not in within_backward]
    owned = _memory_of(stepping) - _memory_of(within_backward)
    states = {(*each.path, "state") for each in flat.targets if each.object in stepping}
    keys = []
    for key, leaf in flat.leaves.items():
        if isinstance(leaf.value, Tensor) and leaf.value.ndim:
            within = any(leaf.path[:length] in states for length in range(len(leaf.path)))
            if within or all(_place(local) in owned for local in local_tensors(leaf.value)):
                keys.append(key)
    return frozenset(keys)


def _optimizers_of(flat: FlatState) -> list[Optimizer]:
    return [each.object for each in flat.targets if isinstance(each.object, Optimizer)]


def _memory_of(optimizers: Iterable[Optimizer]) -> set[tuple[Any, ...]]:
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return {_place(local) for group in groups for parameter in group["params"] for local in local_tensors(parameter)}


def _place(local: Tensor) -> tuple[Any, ...]:
    # By memory and not by object: a state_dict may give another tensor over the same memory.
    return (local.device, local.data_ptr(), local.dtype, local.shape, local.stride())


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _copy_all(copies: Sequence[Copy]) -> None:
    by_device: defaultdict[torch.device, list[Copy]] = defaultdict(list)
    for copy in copies:
        if copy.source.numel():
            by_device[copy.source.device].append(copy)
    for device, group in by_device.items():
        if device.type == "cpu":
            for copy in group:
                copy_on_host(copy.host, copy.source)
        else:
            begin_copies(device, [pair for copy in group for pair in pieces_to_host(copy.host, copy.source)])


def copy_on_host(host: Tensor, source: Tensor) -> None:
    """Copies a host tensor, in one thread and without the GIL, so that training continues.

    torch's own copy takes as many threads as training does, which on a busy machine wait for each other.
    """
    if is_plain_memory(source):
        move = move_bytes if source.nbytes <= _SMALL_BYTES else ctypes.memmove
        move(host.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        with torch.no_grad():
            host.copy_(source)
