"""Checkpoints of our own format as a source: reads their manifest from a storage.

Where there is no manifest, the error says what is there instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Any

import xxhash

from shardopt.checkpoint.format.constants import (
    DTYPES,
    FILE_NAME,
    FORMAT_NAME,
    MANIFEST_LIMIT_BYTES,
    MANIFEST_NAME,
    PER_RANK_PREFIX,
    RECORD_NAME,
    damaged,
    file_name,
    file_stem,
    is_sealed,
    load_json,
    without_duplicates,
)
from shardopt.checkpoint.format.decoding import decode_manifest
from shardopt.checkpoint.format.manifest import DataFile, Manifest
from shardopt.checkpoint.sources.reading.checking import read_entries
from shardopt.checkpoint.sources.reading.open_file import HEAD_BYTES, DataFileReader, form_of
from shardopt.checkpoint.sources.referred import directory_of, referred_in
from shardopt.checkpoint.sources.source import Source
from shardopt.checkpoint.storage import Storage, is_temporary, storage_of, wrap_os_errors
from shardopt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptionError,
    Problem,
    StateError,
    UnreadableError,
)
from shardopt.sharding.box import whole
from shardopt.state.values import decode_value

_MOST_LOOKED_INTO = 64  # of directories within one, the last by number and name
_MOST_NAMED = 6  # of a run's steps, the last
_OF_STEP = re.compile(r"(?:step[-_]?)?0*(\d+)(-b\d+)?")
_UNFINISHED = "give another path: a save that was not finished is none"
_MOST_LOOKS = 4
"""The number of attempts to read a manifest that is replaced between the look at its size and the read."""


class OwnSource(Source):
    """A committed checkpoint in shardopt's own format.

    Args:
        data: the bytes of its manifest; None where they are yet to be read.
        base_root: the directory that has the checkpoints which this one refers to; None for the one that it is in.

    Raises:
        CheckpointNotFoundError, CorruptionError, FormatError: see `read_manifest`.
    """

    format_name = FORMAT_NAME
    is_foreign = False

    def __init__(
        self, storage: Storage, data: bytes | None = None, base_root: str | os.PathLike[str] | None = None
    ) -> None:
        self.storage, self.url = storage, storage.url
        if data is None:
            self.manifest, data = read_manifest(storage)
        else:
            self.manifest = decode_manifest(data, f"{storage.url}/{MANIFEST_NAME}")
        self._head_bytes = HEAD_BYTES
        self.digest = xxhash.xxh3_64_hexdigest(data)
        self._base_root = None if base_root is None else storage_of(base_root)

    def open_file(self, number: int, keys: Collection[str] | None = None) -> DataFileReader:
        file = self.manifest.files[number]
        directory = self.directory_of(file)
        copy = directory.copy_of(file.name)
        try:
            opened = DataFileReader(directory, file, keys, self._head_bytes, self.storage)
            self._head_bytes = max(self._head_bytes, opened.header_bytes)  # as ranks mostly write alike
            return opened
        except CheckpointError as error:
            if directory.pass_over(file.name, copy, error):
                return self.open_file(number, keys)
            if not isinstance(error, CorruptionError) or error.code == "no-checkpoint":
                raise
            with wrap_os_errors(f"read {directory.url}/{file.name}"):
                if file.directory is None or directory.exists(file.name):
                    raise
        remedy = "name the directory that has its directory by base_root=, or restore from another checkpoint"
        problem = Problem(f"{directory.url}/{file.name}", "no such file", f"what {self.url} refers to", remedy)
        raise CorruptionError("a checkpoint lacks what it refers to", [problem])

    def directory_of(self, file: DataFile) -> Storage:
        """Returns the directory of one of the manifest's files: the checkpoint's own, or one beside it."""
        if file.directory is None:
            return self.storage
        return directory_of(file, self.storage) if self._base_root is None else self._base_root.child(file.directory)

    def per_rank(self, rank: int) -> Mapping[str, Any]:
        name = file_name(self.manifest.save_id, rank, 0)
        number = next((i for i, file in enumerate(self.manifest.files) if file.path == name), None)
        if number is None:
            raise damaged(f"{self.url}/{name}", "no such file in the manifest")
        file = self.open_file(number)
        key = PER_RANK_PREFIX + file_stem(rank, 0)
        nbytes = file.entries[key].end - file.entries[key].begin if key in file.entries else 0
        (stored,) = read_entries(file, [file.entry(key, form_of(DTYPES["uint8"], whole((nbytes,))))])
        where = f"{file.where}: {key}"
        try:
            values = load_json(bytes(stored), where, without_duplicates)
            return {name: decode_value(value) for name, value in values.items()}
        except (StateError, RecursionError) as error:
            raise damaged(where, "a malformed value") from error


def manifest_bytes(storage: Storage) -> bytes | None:
    """Returns the bytes of the manifest; None if there is none.

    Raises:
        CorruptionError: it is too large; or the directory is a link to what is not there now, as on a disk that is not
            mounted.
    """
    where = f"{storage.url}/{MANIFEST_NAME}"
    data = b""
    with wrap_os_errors(f"read {where}"):
        try:
            nbytes = storage.size(MANIFEST_NAME)
            for _ in range(_MOST_LOOKS):
                if nbytes > MANIFEST_LIMIT_BYTES:
                    raise damaged(where, f"{nbytes} bytes, more than the limit of {MANIFEST_LIMIT_BYTES}")
                data = storage.read(MANIFEST_NAME, 0, nbytes)
                if is_sealed(data):
                    break
                nbytes = storage.size(MANIFEST_NAME)
                if nbytes == len(data):
                    break  # all of it, and damaged
        except FileNotFoundError:
            if (target := storage.missing_target()) is not None:
                found, remedy = f"a link to {target}, where nothing is", "mount what is missing, or remove the link"
                problem = Problem(storage.url, found, "a checkpoint", remedy)
                raise UnreadableError("a link leads nowhere", [problem]) from None
            return None
    return data


def is_committed(storage: Storage) -> bool:
    """Whether there is a manifest. One that is out of reach counts, too; a load then finds what is wrong."""
    try:
        with wrap_os_errors(f"look into {storage.url}"):
            return storage.exists(MANIFEST_NAME) or storage.missing_target() is not None
    except CorruptionError:
        return True


_urls_in_flight: Callable[[], Collection[str]] = tuple


def tell_of_saves(urls_in_flight: Callable[[], Collection[str]]) -> None:
    """Lets errors tell of saves of this process that are under way.

    Args:
        urls_in_flight: returns where these are.
    """
    global _urls_in_flight
    _urls_in_flight = urls_in_flight


def not_found(storage: Storage) -> CheckpointNotFoundError:
    """Returns the error for a place without a checkpoint, which says what is there."""
    try:
        contents, remedy = _what_is_at(storage)
    except (OSError, CheckpointError) as error:  # that there is no checkpoint is known already
        contents, remedy = f"none, nor what else is there ({error})", "give another path"
    problem = Problem(storage.url, contents, f"a committed checkpoint (with {MANIFEST_NAME})", remedy)
    return CheckpointNotFoundError("there is no checkpoint", [problem])


def read_manifest(storage: Storage) -> tuple[Manifest, bytes]:
    """Returns the manifest of a committed checkpoint, decoded, and its bytes.

    Raises:
        CheckpointNotFoundError: there is none; what lies in the directory besides does not matter.
        CorruptionError, FormatError: it is damaged, or for a newer reader.
    """
    found = manifest_in(storage)
    if found is None:
        raise not_found(storage)
    return found


def manifest_in(storage: Storage) -> tuple[Manifest, bytes] | None:
    """As `read_manifest`; None where it finds none, which takes no look at what is there instead."""
    data = manifest_bytes(storage)
    return None if data is None else (decode_manifest(data, f"{storage.url}/{MANIFEST_NAME}"), data)


def _what_is_at(storage: Storage) -> tuple[str, str]:
    """Describes, for an error message, what is there instead of a checkpoint, and the remedy."""
    if any(storage_of(url).url == storage.url for url in _urls_in_flight()):
        remedy = "wait for it: result() of what async_save or Manager.save has returned"
        return "a save of this process that is under way", remedy
    file = storage.as_file()
    if file is not None:
        directory, name = file
        if name == MANIFEST_NAME or FILE_NAME.fullmatch(name):
            return "a file of a checkpoint", f"give the directory that it is in: {directory.url}"
        return "a file", "give the directory of a checkpoint, or a file of safetensors or torch.save"
    names = storage.names()
    if not names:
        meant = _with_all_digits(storage)
        return (
            "nothing",
            f"give another path{_steps_beside(storage)}" if meant is None else f"give {meant.url}, which is there",
        )
    if any(name.endswith(".distcp") for name in names):
        return "files of torch.distributed.checkpoint without their .metadata", _UNFINISHED
    within = _checkpoints_within(storage, names)
    if within:
        others = f" and {len(within) - 1} more" if len(within) > 1 else ""
        remedy = f"give one of them, such as {storage.child(within[0]).url}, or use Manager(...).restore(app)"
        return f"a directory of checkpoints: {within[0]}{others}", remedy
    if RECORD_NAME in names:
        remedy = "load hosts://<this path> in a job on the hosts that have the others"
        return "a host's share of a checkpoint", remedy
    unfinished = [name for name in names if FILE_NAME.fullmatch(name) or is_temporary(name)]
    if unfinished and referred_in(storage):
        remedy = f"leave these files where they are, and give another path{_steps_beside(storage)}"
        return "files to which checkpoints beside it refer, of a checkpoint that was removed", remedy
    if unfinished:
        return f"{len(unfinished)} files of a save that was not finished", _UNFINISHED
    return f"{len(names)} files and directories, none of a checkpoint, such as {names[0]}", "give another path"


def _with_all_digits(storage: Storage) -> Storage | None:
    """Returns the checkpoint of a step whose number was given short, as "step-40" for "step-00000040"."""
    parent = None if storage.is_remote else storage.parent()
    short = None if parent is None else re.fullmatch(r"(?:step[-_]?)?(\d+)", parent[1])
    if parent is None or short is None:
        return None
    meant = parent[0].child(f"step-{int(short[1]):08d}")
    return meant if meant.url != storage.url and meant.exists(MANIFEST_NAME) else None


def _steps_beside(storage: Storage) -> str:
    """Returns the end of a remedy that names the steps of a run, for a step that it does not have; "" elsewhere."""
    parent = storage.parent()
    if parent is None or not _OF_STEP.fullmatch(parent[1]):
        return ""
    steps = [(int(step[1]), step[0]) for step in map(_OF_STEP.fullmatch, parent[0].names()) if step is not None]
    latest = (name for _, name in sorted(steps, reverse=True)[:_MOST_LOOKED_INTO])
    names = [*islice((name for name in latest if parent[0].child(name).exists(MANIFEST_NAME)), _MOST_NAMED + 1)]
    if not names:
        return ""
    told = ", ".join(_OF_STEP.sub(r"\1\2", name) for name in reversed(names[:_MOST_NAMED]))
    which = f"step {told}" if len(names) == 1 else f"steps {'…, ' if len(names) > _MOST_NAMED else ''}{told}"
    return f": the run there has {which}; retention may have removed this one, or it was not saved"


def _checkpoints_within(storage: Storage, names: Sequence[str]) -> list[str]:
    """Returns the names of checkpoints in a directory, the greatest number first."""

    def by_number(name: str) -> tuple[int, str]:
        digits = re.search(r"(\d+)\D*$", name)
        return int(digits[1]) if digits else -1, name

    directories = sorted((name for name in names if "." not in name), key=by_number, reverse=True)
    return [name for name in directories[:_MOST_LOOKED_INTO] if storage.child(name).exists(MANIFEST_NAME)]
