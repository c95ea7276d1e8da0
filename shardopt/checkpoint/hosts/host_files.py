"""The files in a host's own directory, as the host uses them itself, and as it serves them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from shardopt.checkpoint.format.constants import FILE_NAME, RECORD_NAME
from shardopt.checkpoint.hosts.directory import HostDirectory
from shardopt.checkpoint.storage import LocalStorage, Span
from shardopt.ranks.files.server import Files, size_of


class HostFiles(Files):
    """All files, by directory ("" is the host's own) and name. For this host, and its job."""

    def __init__(self, directory: HostDirectory) -> None:
        self._directory = directory

    def storage(self, directory: str) -> LocalStorage:
        """Returns the storage of a directory."""
        path = self._directory.path
        return LocalStorage(f"{path}/{directory}" if directory else path, durable=False)

    def open_file(self, directory: str, name: str) -> int:
        return self._directory.open_file(directory, name)

    def names(self, directory: str) -> list[str]:
        return self._directory.names(directory)

    def remove(self, directory: str, name: str) -> None:
        if name:
            self._directory.remove_file(directory, name)
        else:
            self._directory.remove_if_empty(directory)

    def size(self, directory: str, name: str) -> int:
        return size_of(self, directory, name)

    def read_into(self, directory: str, name: str, spans: Sequence[Span]) -> None:
        self.storage(directory).read_into(name, spans)

    def read_rest(self, directory: str, name: str, begin: int, nbytes: int) -> bytes:
        return self.storage(directory).read(name, begin, begin + nbytes)


class ReadOnlyFiles(Files):
    """The files that a publisher serves to its followers: all but hidden ones, to be read."""

    def __init__(self, directory: HostDirectory) -> None:
        self._directory = directory

    def open_file(self, directory: str, name: str) -> int:
        if name.startswith("."):
            raise FileNotFoundError("no file that is served")
        return self._directory.open_file(directory, name)

    def names(self, directory: str) -> list[str]:
        with suppress(FileNotFoundError):
            return [name for name in self._directory.names(directory) if not name.startswith(".")]
        return []

    def remove(self, directory: str, name: str) -> None:
        raise PermissionError("nothing is removed from here")


class SharesOnly(ReadOnlyFiles):
    """The files of shares of checkpoints, for ranks that fetch copies."""

    def open_file(self, directory: str, name: str) -> int:
        if not directory or (name != RECORD_NAME and not FILE_NAME.fullmatch(name)):
            raise FileNotFoundError("no file of a checkpoint")
        return self._directory.open_file(directory, name)

    def names(self, directory: str) -> list[str]:
        raise PermissionError("names are not served")
