"""The writer by which torch.distributed.checkpoint (DCP) saves in shardopt's format.

DCP's planner says which rank writes which boxes; data files, manifest and commit are those of `checkpoint.save`.

    prepare_local_plan    each rank gives its number in the job
    prepare_global_plan   the first rank refuses a path that is taken, and names the save
    write_data            one round, in which all ranks write their files; if one fails all raise, and nothing is left
    finish                the first rank commits
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan as DcpSavePlan
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter as DcpStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardopt.checkpoint.dcp.plan import box_of, plan_of, without_nothing
from shardopt.checkpoint.format.manifest import DataFile
from shardopt.checkpoint.format.tensor_bytes import stored_dtype
from shardopt.checkpoint.format.values import encode_each
from shardopt.checkpoint.saving.commit import make_manifest, publish_checkpoint, refuse_committed
from shardopt.checkpoint.saving.planning.save_plan import RankWrites, SavePlan, WriteRequest
from shardopt.checkpoint.saving.removal import discard
from shardopt.checkpoint.saving.writing.write import write_files
from shardopt.checkpoint.sources.grouping import path_of, regrouped
from shardopt.checkpoint.storage import Storage, absolute_url, storage_of, wrap_os_errors
from shardopt.checkpoint.storage.marker import remove_marker, wait_for_marker, write_marker
from shardopt.errors import OptionError, Problem, StateError
from shardopt.ranks import DEADLINE_SECONDS, Ranks, call_on, ranks_of, refuse_lone_processes
from shardopt.state.containers import holds_tensors
from shardopt.state.values import decode_value, encode_value
from shardopt.world import world


class _Task(NamedTuple):
    """A rank's part of a save, which the first rank sends with the plan.

    Args:
        save_id: the unique name of the save, under which its ranks meet, too.
        members: the numbers in the job of the ranks that save.
    """

    save_id: str
    members: tuple[int, ...]


class _Reported(NamedTuple):
    """The reports of all ranks on their written files, held by the first rank."""

    files: list[list[list[Any]]]
    values: dict[str, Any]  # typed JSON by key


class StorageWriter(DcpStorageWriter):
    """Saves the state given to `torch.distributed.checkpoint.save` or `async_save` as a shardopt checkpoint.

        dcp.save({"model": model, "optim": optimizer}, storage_writer=StorageWriter(url))

    Nothing exists at `url` for any reader until all of it is durable. If a rank fails to write, or dies, all ranks
    raise and the files of the save are removed. Nothing is stored as a pickle: plain values are those that
    `checkpoint.save` takes. A plain tensor or value that several ranks have is stored as one of them has it, without
    comparing.

    Args:
        url: a path, or a URL that fsspec knows; None where `checkpoint_id` is given to each save.
        durable: whether local files are flushed to the disk before the commit.
        deadline_seconds: how long a rank that writes may show no sign of life before the others give up and name it.

    Raised within torch's `CheckpointException`, on all ranks:
        CheckpointExistsError: a committed checkpoint stands there.
        StateError, LayoutError: something cannot be stored.
        OptionError: a planner that caches plans or hides its values, or `use_collectives=False`.
        CheckpointError, RankError: a rank could not write, or died.
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | None = None,
        *,
        durable: bool = True,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        super().__init__()
        self._url = None if url is None else absolute_url(url)
        self._durable, self._deadline_seconds = durable, deadline_seconds
        self._plan: SavePlan | None = None
        self._task: _Task | None = None
        self._reported: _Reported | None = None
        self._abandon: weakref.finalize[Any, Any] | None = None

    @property
    def checkpoint_id(self) -> str | None:
        """The URL that it saves to."""
        return self._url

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a save; to another path, if one is given."""
        if checkpoint_id is not None:
            self._url = absolute_url(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the value is a path or URL, by its type."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Called by DCP on every rank."""
        if self._abandon is not None:
            self._abandon()
        self._plan = self._task = self._reported = self._abandon = None
        if not kwargs.get("use_collectives", True):
            found, required = "use_collectives=False", "ranks that save together"
            problem = Problem("use_collectives", found, required, "leave it out; a checkpoint is one for all ranks")
            raise OptionError("a checkpoint cannot be saved by each rank alone", [problem], code="dcp-planner")
        refuse_lone_processes(f"saving {self._url}")

    def prepare_local_plan(self, plan: DcpSavePlan) -> DcpSavePlan:
        """Adds this rank's number in the job to its plan."""
        return dataclasses.replace(plan, storage_data=ranks_of().members[ranks_of().rank])

    def prepare_global_plan(self, plans: list[DcpSavePlan]) -> list[DcpSavePlan]:
        """Raises if the path is taken, and names the save; on the first rank."""
        if not all(plan.usable for plan in plans):
            found, required = "plans that DCP has kept from an earlier save", "those of this save"
            problem = Problem("planner", found, required, "pass DefaultSavePlanner(enable_plan_caching=False)")
            raise OptionError("a save needs its whole plan", [problem], code="dcp-planner")
        plans = without_nothing(plans)
        self._plan = plan_of(plans)
        members = tuple(plan.storage_data for plan in plans)
        if len(members) == 1:
            members = (ranks_of().members[ranks_of().rank],)
        self._task = _Task(world().random_name(6), members)
        storage = self._storage()
        with wrap_os_errors(f"make {storage.url}"):
            refuse_committed(storage)
            storage.make()
            if len(members) > 1:
                write_marker(storage, self._task.save_id)
        return [dataclasses.replace(plan, storage_data=self._task) for plan in plans]

    def write_data(self, plan: DcpSavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's data files, in a round with the other ranks."""
        task: _Task = plan.storage_data
        storage, call = self._storage(), call_on("saving", str(self._url))
        ranks = _ranks_of(task).with_deadline(self._deadline_seconds)

        def keep(reports: Sequence[Any]) -> None:
            values = {key: value for _, own in reports for key, value in own.items()}
            self._reported = _Reported([files for files, _ in reports], values)

        try:
            ranks.agree(
                call,
                work=lambda: _write(storage, task, ranks.rank, plan.items, planner),
                report=lambda done: [[[file.name, file.nbytes, file.digest] for file in done[0]], done[1]],
                decide=keep,
            )
        except BaseException:
            if ranks.rank == 0:
                discard(storage, task.save_id)
            raise
        if ranks.rank == 0:
            # DCP has a round of its own before `finish`, and tells nobody where a rank dies in it.
            self._abandon = weakref.finalize(self, _discard_of, os.getpid(), storage, task.save_id)
        written: Future[list[WriteResult]] = Future()
        written.set_result([])  # the first rank has had the reports
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the checkpoint, on the first rank."""
        assert self._task is not None and self._plan is not None and self._reported is not None
        storage, task, plan = self._storage(), self._task, self._plan
        if self._abandon is not None:
            self._abandon.detach()
        paths = metadata.planner_data or {}
        try:
            values = {
                key: (path_of(paths.get(key, (key,))), decode_value(value))
                for key, value in self._reported.values.items()
            }
            tensors = {key: path_of(paths.get(key, (key,))) for key in plan.geometry.members}
            at, options = regrouped(tensors, values)
            for key, member in plan.geometry.members.items():
                plan.geometry.members[key] = dataclasses.replace(member, path=at[key])  # type: ignore[index]  # a dict
            with wrap_os_errors(f"commit {storage.url}"):
                if len(task.members) > 1:
                    remove_marker(storage, task.save_id)
                manifest, data = make_manifest(task.save_id, plan, encode_each(options), self._reported.files)
                publish_checkpoint(storage, manifest, data)
        except BaseException:
            discard(storage, task.save_id)
            raise
        finally:
            self._plan = self._task = self._reported = self._abandon = None

    def _storage(self) -> Storage:
        if self._url is None:
            problem = Problem("url", "None", "a path or URL", "pass one to StorageWriter, or checkpoint_id to the save")
            raise OptionError("there is no place to save to", [problem])
        return storage_of(self._url, self._durable)


def _discard_of(pid: int, storage: Storage, save_id: str) -> None:
    """Removes the files of a save, in the process that made them: not where a child of it ends."""
    if os.getpid() == pid:
        discard(storage, save_id)


def _ranks_of(task: _Task) -> Ranks:
    job = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if job is None or len(task.members) == 1:
        return Ranks(None)
    return Ranks.meeting(job, task.members, task.save_id)


def _write(
    storage: Storage, task: _Task, rank: int, items: Sequence[WriteItem], planner: SavePlanner
) -> tuple[list[DataFile], dict[str, Any]]:
    """Writes a rank's data files; returns them, and the plain values that it stores, as typed JSON by key."""
    item_of = {(item.index.fqn, box_of(item)): item for item in items if item.type != WriteItemType.BYTE_IO}
    writes = RankWrites(plan_of([DcpSavePlan(list(items))], rank), rank)

    def tensor_of(request: WriteRequest) -> Tensor:
        return _resolved(planner, item_of[request.key, request.box], request)

    with wrap_os_errors(f"write to {storage.url}"):
        if rank > 0:
            wait_for_marker(storage, task.save_id)
        values = {item.index.fqn: _encoded(planner, item) for item in items if item.type == WriteItemType.BYTE_IO}
        return write_files(storage, task.save_id, writes, tensor_of, None), values


def _resolved(planner: SavePlanner, item: WriteItem, request: WriteRequest) -> Tensor:
    """Returns the local tensor of an item, as the planner gives it."""
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor)
    if stored_dtype(tensor.dtype, request.key) != request.dtype or tuple(tensor.shape) != request.box.sizes:
        found = f"a tensor of {tensor.dtype} {list(tensor.shape)}"
        required = f"one of {request.dtype.name} {list(request.box.sizes)}, as planned"
        problem = Problem(request.key, found, required, "have the planner change it before it plans")
        raise StateError("a planner gives another tensor than it has planned", [problem], code="dcp-planner")
    return tensor.detach()


def _encoded(planner: SavePlanner, item: WriteItem) -> Any:
    """Returns a plain value as typed JSON instead of the pickle that DCP would write."""
    key = item.index.fqn
    look_up = getattr(planner, "lookup_object", None)
    if look_up is None:
        required = "one with `lookup_object`, as DefaultSavePlanner has it"
        problem = Problem("planner", f"a {type(planner).__name__}", required, "derive it from DefaultSavePlanner")
        raise OptionError("a planner keeps its plain values to itself", [problem], code="dcp-planner")
    value = look_up(item.index)
    if holds_tensors(value):
        required = "plain values, and tensors under keys of their own"
        remedy = "take it out of the tuple, or pass DefaultSavePlanner(flatten_state_dict=True)"
        raise StateError("a value cannot be stored", [Problem(key, "a value with tensors in it", required, remedy)])
    return encode_value(value, key)
