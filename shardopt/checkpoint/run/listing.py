"""Lists the checkpoints under a run's root: when they were saved, what they hold, and which are whole."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardopt.checkpoint.converting.verify import VerifyReport, verify
from shardopt.checkpoint.format.constants import MANIFEST_NAME
from shardopt.checkpoint.format.manifest import DataFile, Manifest
from shardopt.checkpoint.run.branches import Branches, CheckpointId, parse_id
from shardopt.checkpoint.run.metrics import noted_of
from shardopt.checkpoint.run.retention import Retention, metric_problem, reasons_to_keep
from shardopt.checkpoint.run.root import Root
from shardopt.checkpoint.sources.own import manifest_in
from shardopt.checkpoint.sources.reading.checking import sizes_for
from shardopt.checkpoint.sources.referred import files_by_directory
from shardopt.checkpoint.storage import Storage, storage_of, wrap_os_errors
from shardopt.errors import CheckpointError, CheckpointNotFoundError, CorruptionError, Problem, UnreadableError
from shardopt.world import world

Condition = Literal["whole", "committed", "base", "damaged", "unfinished", "unreadable"]


@dataclass(frozen=True, slots=True)
class Listed:
    """A checkpoint, as described by its manifest and the names and sizes of its files.

    Args:
        url: where it is.
        condition: "whole": every byte was compared with its checksum. "committed": there is a manifest, and all files
            that it names, also those beside it, on a local disk of the sizes that it names; or it was verified, and
            some bytes have no checksum. "damaged": something of that is not so. "base": there is no manifest any more,
            and checkpoints beside it refer to its files. "unfinished": there is no manifest. "unreadable": it could
            not be looked at, or needs a newer reader.
        problems: why it is damaged or unreadable.
        id: its step and branch; None for a checkpoint that is not in the root of a run.
        in_run: whether it is part of the run; it is not where the run was taken back to an earlier step.
        to_be_removed: whether it was to be removed when the run was taken back.
        save_id: the unique name of the save; None where there is no manifest, and so for what follows.
        saved_at: seconds since 1970 began; None where that is not known.
        seconds: how long the save took, on its rank 0; None where that is not known.
        world_size: of the job that saved it.
        tensors: how many it has.
        nbytes: of the data files in its own directory; of a base, of those that others refer to.
        nbytes_beside: of the data files in directories beside it that it refers to, which are theirs.
        metrics: numbers by name.
        files: all data files, its own and those that it refers to; of a base, those that others refer to.
    """

    url: str
    condition: Condition
    problems: tuple[Problem, ...] = ()
    id: CheckpointId | None = None
    in_run: bool = True
    to_be_removed: bool = False
    save_id: str | None = None
    saved_at: float | None = None
    seconds: float | None = None
    world_size: int | None = None
    tensors: int | None = None
    nbytes: int | None = None
    nbytes_beside: int | None = None
    metrics: Mapping[str, float] | None = None
    files: tuple[DataFile, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether it may be one of those that are kept: it is committed, and not known to be damaged."""
        return self.condition in ("whole", "committed")


@dataclass(frozen=True, slots=True)
class RunListing:
    """The checkpoints of a run by step, then by branch, and its branches."""

    url: str
    branches: Branches
    checkpoints: tuple[Listed, ...]

    def reasons_to_keep(self, rules: Retention) -> dict[CheckpointId, list[str]]:
        """Returns the checkpoints of the run that stay, and why: by a rule, or because a branch begins there."""
        run = self._of_run()
        metrics = {step: each.metrics or {} for step, each in run.items()}
        begins = {each.from_step: f"branch {each.number} begins here" for each in self.branches.values()}
        now = world().wall_clock()
        ages = {step: now - each.saved_at for step, each in run.items() if each.saved_at is not None}
        kept = reasons_to_keep(run, rules, metrics, begins, ages)
        return {id: why for step, why in kept.items() if (id := run[step].id) is not None}

    def problems_of(self, rules: Retention) -> list[Problem]:
        """Returns the problem with rules of which one keeps nothing, as no checkpoint of the run has its metric."""
        return metric_problem(rules, [each.metrics or {} for each in self._of_run().values()])

    def _of_run(self) -> dict[int, Listed]:
        """Returns by step the checkpoints of the run that count."""
        return {each.id.step: each for each in self.checkpoints if each.id and each.in_run and each.counts}


def list_run(url: str | os.PathLike[str], verify_bytes: bool = False) -> RunListing:
    """Lists the root of a run; no checkpoints if it is none. Local, changes nothing.

    Args:
        verify_bytes: whether to read every byte of each checkpoint.

    Raises:
        CheckpointError: the root cannot be read.
        CorruptionError: the record of a branch is damaged or missing.
    """
    root = Root(storage_of(url))
    ids = root.ids()
    branches = root.branches()

    with world().thread_pool(sizes_for(root.storage).threads, "shardopt-list") as pool:
        listed = [*pool.map(lambda id: _look_in_run(root, branches, id, verify_bytes), ids)]
    if any(each.condition == "unfinished" for each in listed):  # what is removed meanwhile is left out
        there = frozenset(root.ids())
        listed = [each for each in listed if each.condition != "unfinished" or each.id in there]
    return RunListing(root.url, branches, _with_bases(listed))


def list_step(url: str | os.PathLike[str], verify_bytes: bool = False) -> RunListing | None:
    """Lists one checkpoint of a run, with the run's URL and branches; None for any other. Local.

    Args:
        url: of the directory of a step.
        verify_bytes: as for `list_run`.
    """
    parent, _, name = storage_of(url).url.rstrip("/").rpartition("/")
    id = parse_id(name)
    if id is None or not parent:
        return None
    root = Root(storage_of(parent))
    try:
        root.ids()
        branches = root.branches()
    except CheckpointError:  # one may be able to read the checkpoint, and nothing around it
        return None
    one = _look_in_run(root, branches, id, verify_bytes)
    return None if one.condition == "unfinished" else RunListing(root.url, branches, (one,))


def _with_bases(listed: Sequence[Listed]) -> tuple[Listed, ...]:
    """Marks the directories without manifest that other checkpoints refer to; the others are unfinished saves."""
    needed: defaultdict[str | None, set[DataFile]] = defaultdict(set)
    for file in (file for each in listed for file in each.files if file.directory is not None):
        needed[file.directory].add(file._replace(directory=None))

    def told(each: Listed) -> Listed:
        files = needed.get(each.id.name) if each.id and each.condition == "unfinished" else None
        if not files:
            return each
        return replace(each, condition="base", nbytes=sum(file.nbytes for file in files), files=tuple(files))

    return tuple(told(each) for each in listed)


def _look_in_run(root: Root, branches: Branches, id: CheckpointId, verify_bytes: bool) -> Listed:
    found = look_at(root.checkpoint(id), verify_bytes)
    return replace(found, id=id, in_run=branches.has(id), to_be_removed=branches.is_removed(id))


def look_at(storage: Storage, verify_bytes: bool = False) -> Listed:
    """Describes one checkpoint. Local. Raises nothing if it is damaged or missing."""
    condition: Condition
    try:
        with wrap_os_errors(f"look into {storage.url}"):
            found = manifest_in(storage)
            if found is None:
                return Listed(storage.url, "unfinished")
            manifest, _ = found
            metrics = noted_of(storage).metrics
            problems = [*_missing_or_cut(manifest, storage)]
            if problems and not storage.exists(MANIFEST_NAME):  # it was removed meanwhile, as by retention
                return Listed(storage.url, "unfinished")
        verified = verify(storage.url) if verify_bytes else None
    except CheckpointNotFoundError:
        return Listed(storage.url, "unfinished")
    except CorruptionError as error:
        condition = "unreadable" if isinstance(error, UnreadableError) else "damaged"
        problem = Problem(storage.url, error.message, "its bytes", "take another")
        return Listed(storage.url, condition, error.problems or (problem,))
    except CheckpointError as error:
        problem = Problem(storage.url, error.message, "a checkpoint", "look")
        return Listed(storage.url, "unreadable", error.problems or (problem,))
    return Listed(
        storage.url,
        *condition_of(verified, problems),
        save_id=manifest.save_id,
        saved_at=manifest.saved_at,
        seconds=manifest.seconds,
        world_size=manifest.world_size,
        tensors=len(manifest.tensors),
        nbytes=sum(file.nbytes for file in manifest.own_files),
        nbytes_beside=sum(file.nbytes for file in manifest.referred_files),
        metrics=dict(metrics),
        files=manifest.files,
    )


def condition_of(
    verified: VerifyReport | None, problems: Sequence[Problem] = ()
) -> tuple[Condition, tuple[Problem, ...]]:
    """Returns the condition of a checkpoint that can be read, and why it is damaged.

    Args:
        verified: its verification, if every byte was read.
        problems: what was found without one.
    """
    if verified is None:
        return "damaged" if problems else "committed", tuple(problems)
    if verified.problems:
        return "damaged", verified.problems
    return "committed" if verified.bytes_without_checksum else "whole", ()


def _missing_or_cut(manifest: Manifest, storage: Storage) -> Iterator[Problem]:
    """Yields the files of a checkpoint, its own and referenced ones, that are missing or have another size."""
    remedy = "restore from another one"
    for directory, files in files_by_directory(manifest.files, storage):
        there = set(directory.names())
        for file in files:
            where = f"{directory.url}/{file.name}"
            if file.name not in there and not directory.exists(file.name):  # listings may be old
                yield Problem(where, "no such file", "what was written", remedy)
            elif not directory.is_remote and (size := directory.size(file.name)) != file.nbytes:
                yield Problem(where, f"{size} bytes", f"{file.nbytes}", remedy)
