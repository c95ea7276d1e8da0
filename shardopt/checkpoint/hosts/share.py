"""A host's share of one checkpoint: its ranks' data files, copies of other hosts' files, and a record.

The record is the manifest of the whole checkpoint, under another name: what reads this directory alone finds no
checkpoint in it. Every host has it; it is written once all ranks have written their files, and has their digests. So
whoever finds one record, and every file that it names on some host, has found all of a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress

from shardopt.checkpoint.format.constants import (
    FILE_NAME,
    MANIFEST_LIMIT_BYTES,
    MANIFEST_NAME,
    RECORD_NAME,
    is_sealed,
)
from shardopt.checkpoint.hosts.directory import HostDirectory
from shardopt.checkpoint.hosts.spare import FILE_MODE, keep_spare, take_spare
from shardopt.checkpoint.storage import LocalStorage, is_temporary
from shardopt.checkpoint.text import WHERE_TAKEN
from shardopt.errors import CheckpointError, CheckpointExistsError, Problem
from shardopt.world import world


class Share(LocalStorage):
    """The directory of a checkpoint on this host."""

    def __init__(self, directory: HostDirectory, name: str, durable: bool) -> None:
        super().__init__(f"{directory.path}/{name}", durable)
        self._directory = directory

    def make(self) -> None:
        """Makes the directory, in the one that this host keeps open."""
        self._directory.refuse_replaced()
        with suppress(FileExistsError):
            os.mkdir(self.url, 0o700)
        self.sync_directory(self._directory.path)
        self.sync_names_above(self._directory.path)

    def begin(self) -> None:
        """Makes the directory, and removes leftovers of a dead save.

        Raises:
            CheckpointExistsError: it has a record, or is a checkpoint.
        """
        for name in (RECORD_NAME, MANIFEST_NAME):
            if self.exists(name):
                problem = Problem(self.url, "a checkpoint", "no checkpoint", WHERE_TAKEN)
                raise CheckpointExistsError("the path is taken", [problem])
        self.make()
        for name in self.names():
            if FILE_NAME.fullmatch(name) or is_temporary(name):
                self.remove(name)

    def write(self, name: str, buffers: Iterable[memoryview]) -> int:
        """Writes a data file, over a kept one of a removed checkpoint if possible; names it once it is whole."""
        temporary = f"{self.url}/.{name}.{world().random_name(6)}.tmp"
        try:
            fd = take_spare(self._directory.path, name, temporary)
            if fd is None:
                fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
            try:
                nbytes = self.write_to(fd, buffers)
                os.ftruncate(fd, nbytes)
                self.sync_file(fd)
            finally:
                os.close(fd)  # before it has its name: nobody writes to what has one
            os.replace(temporary, f"{self.url}/{name}")
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        self.sync_directory(self.url)
        return nbytes

    def write_atomically(self, name: str, buffers: Iterable[memoryview]) -> int:
        return self.write(name, buffers)

    def keep_record(self, data: bytes, own: Mapping[str, int]) -> None:
        """Writes the record, durably, after checking that this host's files exist.

        Args:
            own: names of the files that this host's ranks wrote, and their bytes.
        """
        missing = [name for name, nbytes in own.items() if not self.exists(name) or self.size(name) != nbytes]
        if missing:
            problems = [Problem(f"{self.url}/{name}", "no such file", "what was written", "") for name in missing]
            raise CheckpointError(
                "files of the checkpoint were removed while it was committed", problems, code="files-missing"
            )
        self.publish(RECORD_NAME, data)

    def record(self) -> bytes | None:
        """Returns the record; None if it is missing or damaged."""
        with suppress(FileNotFoundError):
            data = self.read(RECORD_NAME, 0, MANIFEST_LIMIT_BYTES)
            return data if is_sealed(data) else None
        return None

    def files(self) -> dict[str, int]:
        """Returns the data files of this share, with their sizes in bytes."""
        found = {}
        for name in self.names():
            if FILE_NAME.fullmatch(name):
                with suppress(FileNotFoundError):
                    found[name] = self.size(name)
        return found

    def clear(self) -> None:
        """Removes the share, the record first. Keeps its data files to be overwritten.

        A directory with a manifest is a checkpoint that somebody has put there, and no share: it stays.
        """
        if self.exists(MANIFEST_NAME):
            return
        self.remove_durably(RECORD_NAME)
        for name in self.names():
            if FILE_NAME.fullmatch(name):
                keep_spare(self._directory.path, f"{self.url}/{name}")
            elif is_temporary(name):
                self.remove(name)
        self.remove_if_empty()

    def discard(self, save_id: str) -> None:
        """Removes the files of a failed save, unless this host has its record."""
        if not self.exists(RECORD_NAME):
            for name in self.names():
                if FILE_NAME.fullmatch(name) and name.startswith(f"{save_id}-"):
                    self.remove(name)
            self.remove_if_empty()
