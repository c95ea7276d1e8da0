"""Verifies a checkpoint: every structure, size and checksum, without a process group and without an app."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardopt.checkpoint.format.constants import (
    CHECKSUMS_PREFIX,
    DATA_SUFFIX,
    DELTA_INDEX_PREFIX,
    DELTA_PREFIX,
    MANIFEST_NAME,
    PER_RANK_PREFIX,
)
from shardopt.checkpoint.format.manifest import DataFile, Manifest, StoredLayout, StoredTensor
from shardopt.checkpoint.progress import Counter, Progress
from shardopt.checkpoint.reports import OfUrl, emit_report
from shardopt.checkpoint.sources.detect_format import open_source
from shardopt.checkpoint.sources.own import not_found
from shardopt.checkpoint.sources.reading.checking import damaged_segments, sizes_for
from shardopt.checkpoint.sources.reading.open_file import Form, OpenFile, form_of
from shardopt.checkpoint.sources.reading.with_deltas import open_with_deltas
from shardopt.checkpoint.sources.referred import referred_in
from shardopt.checkpoint.sources.source import Source
from shardopt.checkpoint.storage import Storage, storage_of, wrap_os_errors
from shardopt.checkpoint.text import plural
from shardopt.errors import CorruptionError, Problem
from shardopt.sharding.box import cover_faults
from shardopt.world import world

_REMEDY = "restore from another checkpoint"


@dataclass(frozen=True, slots=True)
class VerifyReport(OfUrl):
    """The report of a verification.

    Args:
        url: where the checkpoint is.
        tensors: how many tensors it holds.
        files: how many data files it has.
        bytes_read: of data files.
        problems: everything that is not as it was written, each with file, key and segment; empty if all is well.
        seconds: of the verification.
        remains: data files of other saves to this path that lie beside it. They are no damage, and no part of it; but
            torch's own reader takes all that lie in a directory, so they are better removed.
        bytes_without_checksum: whose damage cannot be found: all of other libraries' safetensors and of torch.save
            files without CRC32, and DCP's `.metadata`.
    """

    url: str
    tensors: int
    files: int
    bytes_read: int
    problems: tuple[Problem, ...]
    seconds: float = 0.0
    remains: tuple[str, ...] = ()
    bytes_without_checksum: int = 0

    @property
    def ok(self) -> bool:
        """Whether all that could be checked is as it was written: every byte, but `bytes_without_checksum`."""
        return not self.problems

    @property
    def verdict(self) -> str:
        """The result in words."""
        if self.problems:
            return f"damaged in {plural(len(self.problems), 'place')}"
        if self.bytes_without_checksum:
            return f"the structure is right; no checksum covers {plural(self.bytes_without_checksum, 'byte')}"
        return "every byte is as it was written"

    def raise_if_damaged(self) -> None:
        """Raises CorruptionError with all problems, if any."""
        if self.problems:
            raise CorruptionError(f"the checkpoint at {self.url} is damaged", self.problems)


def verify(
    url: str | os.PathLike[str], *, progress: Progress | None = None, base_root: str | os.PathLike[str] | None = None
) -> VerifyReport:
    """Reads all of a committed checkpoint and checks structure, coverage, sizes and every checksum. Local.

    It continues after damage, and reports all of it. At most a few pieces of 8 MiB are in memory. What the checkpoint
    refers to is a part of it; what else is in the same files is not.

    Args:
        url: as for `open`.
        progress: called with the bytes done and the bytes there are, now and then, from several threads.
        base_root: as for `open`.

    Raises:
        CheckpointNotFoundError: there is no committed checkpoint here.
        FormatError: it needs a newer reader.
    """
    report = _verify(storage_of(url), progress, base_root)
    emit_report("verify", report)
    return report


def _verify(storage: Storage, progress: Progress | None, base_root: str | os.PathLike[str] | None) -> VerifyReport:
    begin = world().monotonic()
    try:
        source = open_source(storage, base_root)
    except CorruptionError as error:
        return VerifyReport(storage.url, 0, 0, 0, error.problems, world().monotonic() - begin)
    manifest = source.manifest
    problems = [*_cover_problems(storage, manifest)]
    members = _MembersByFile(manifest)
    done = Counter(sum(_bytes_to_read(file, i, members) for i, file in enumerate(manifest.files)), progress)
    with world().thread_pool(sizes_for(storage).threads, "shardopt-verify") as pool:
        checks = pool.map(lambda number: _check_file(source, number, members, done), range(len(manifest.files)))
        unsummed = source.unsummed_bytes
        for found, nbytes in checks:
            problems += found
            unsummed += nbytes
    if problems and not source.is_foreign:
        with wrap_os_errors(f"look into {storage.url}"):
            if not storage.exists(MANIFEST_NAME):  # it was removed meanwhile, as by retention
                raise not_found(storage)
    return VerifyReport(
        url=storage.url,
        tensors=len(manifest.tensors),
        files=len(manifest.files),
        bytes_read=done.nbytes,
        problems=tuple(problems),
        seconds=world().monotonic() - begin,
        remains=tuple(_remains(storage, manifest)),
        bytes_without_checksum=unsummed,
    )


def _cover_problems(storage: Storage, manifest: Manifest) -> Iterator[Problem]:
    faults: dict[int, list[str]] = {}
    for key, tensor in manifest.tensors.items():
        layout = tensor.layout
        if id(layout) not in faults:
            faults[id(layout)] = cover_faults(layout.shape, layout.boxes)
        for fault in faults[id(layout)]:
            yield Problem(f"{storage.url}: {key}", fault, "boxes that make up the tensor", _REMEDY)


def _remains(storage: Storage, manifest: Manifest) -> Iterator[str]:
    known = {file.name for file in manifest.own_files}
    remains = [name for name in storage.names() if name.endswith(DATA_SUFFIX) and name not in known]
    referred = referred_in(storage) if remains else ()
    yield from (name for name in remains if name not in referred)


class _Members(NamedTuple):
    """The contents of one file by its manifest: key in the file → the form of the box, and the files with deltas on it.

    `deltas` are the keys of those that it holds itself.
    """

    boxes: Mapping[str, tuple[Form, tuple[int, ...]]]
    deltas: Collection[str]


class _MembersByFile:
    """The members of each file, computed on request: many tensors may share one layout of many files."""

    def __init__(self, manifest: Manifest) -> None:
        self._layouts: dict[int, tuple[StoredLayout, list[tuple[str, StoredTensor]]]] = {}
        for key, tensor in manifest.tensors.items():
            if tensor.tied_to is None:  # else it is stored as the tensor that it is tied to
                self._layouts.setdefault(id(tensor.layout), (tensor.layout, []))[1].append((key, tensor))
        self._boxes: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._with_deltas: defaultdict[int, set[int]] = defaultdict(set)
        for at, (layout, _) in self._layouts.items():
            for box, file in enumerate(layout.files):
                self._boxes[file].append((at, box))
            for entry in layout.entries:
                for file in entry.delta_files:
                    self._with_deltas[file].add(at)

    def of(self, number: int) -> _Members:
        """Returns the members of a file."""
        boxes = {}
        for at, box in self._boxes[number]:
            layout, tensors = self._layouts[at]
            entry = layout.entry(box)
            for key, each in tensors:
                boxes[entry.key(each.stored_as or key)] = form_of(each.dtype, entry.box), entry.deltas
        keys = [each.stored_as or key for at in self._with_deltas[number] for key, each in self._layouts[at][1]]
        return _Members(boxes, {prefix + key for key in keys for prefix in (DELTA_PREFIX, DELTA_INDEX_PREFIX)})


def _bytes_to_read(file: DataFile, number: int, members: _MembersByFile) -> int:
    if file.directory is None:
        return file.nbytes
    of_file = members.of(number)
    return file.nbytes if of_file.deltas else sum(form.nbytes for form, _ in of_file.boxes.values())


def _check_file(source: Source, number: int, by_file: _MembersByFile, done: Counter) -> tuple[list[Problem], int]:
    """Returns all that is wrong with a file, and how many of its bytes no checksum covers."""
    problems: list[Problem] = []
    unsummed = 0
    file = source.manifest.files[number]
    try:
        opened = source.open_file(number)
    except CorruptionError as error:
        done.add(_bytes_to_read(file, number, by_file))
        return [*error.problems], 0
    boxes, deltas = by_file.of(number)
    # Of a file that is referred to, what other checkpoints have in it is theirs.
    is_own = file.directory is None
    entries = {key: (opened, entry) for key, entry in opened.entries.items() if is_own or key in deltas}
    with_deltas = {(): opened, **_with_deltas(source, opened, {numbers for _, numbers in boxes.values()}, problems)}
    for key, (form, numbers) in boxes.items():
        try:
            if numbers in with_deltas:
                entries[key] = with_deltas[numbers], with_deltas[numbers].entry(key, form)
        except CorruptionError as error:
            problems += error.problems
    for key, (of_file, entry) in entries.items():
        if key.startswith(CHECKSUMS_PREFIX):
            continue
        known = key in boxes or key in deltas or key in source.read_through
        if not known and not key.startswith(PER_RANK_PREFIX):
            problems.append(Problem(opened.where, f"{key!r}", "only what the manifest has", _REMEDY))
        try:
            problems += damaged_segments(of_file, entry, done.add, once=True)
            unsummed += of_file.unsummed_bytes(entry)
        except CorruptionError as error:
            problems += error.problems
    return problems, unsummed


def _with_deltas(
    source: Source, opened: OpenFile, chains: Collection[tuple[int, ...]], problems: list[Problem]
) -> dict[tuple[int, ...], OpenFile]:
    """Returns a file with the deltas of each chain of others; adds a problem for a chain that cannot be opened."""
    files: dict[tuple[int, ...], OpenFile] = {}
    for numbers in sorted(each for each in chains if each):
        try:
            files[numbers] = open_with_deltas(opened, [source.open_file(each) for each in numbers])
        except CorruptionError as error:
            problems += error.problems
    return files
