"""Opens storage by URL: the one place that decides between local directories and all else that fsspec opens."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec  # type: ignore[import-untyped]  # has no type hints
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]  # as above
from fsspec.registry import available_protocols, known_implementations  # type: ignore[import-untyped]  # as above

from shardopt.checkpoint.storage.base import Storage
from shardopt.checkpoint.storage.local import LocalStorage
from shardopt.checkpoint.storage.remote import RemoteStorage
from shardopt.errors import CheckpointError, Problem, ShardoptError
from shardopt.world import world


def storage_of(url: str | os.PathLike[str], durable: bool = True) -> Storage:
    """Returns the storage at a path or at any URL that fsspec knows, with fsspec's own configuration and credentials.

    Args:
        durable: whether local files and directories are flushed to the disk before a write returns.

    Raises:
        CheckpointError: fsspec does not know the protocol, or the package that it needs for it is not there.
    """
    return world().open_storage(os.fspath(url), durable, _open)


def _open(text: str, durable: bool) -> Storage:
    try:
        fs, path = fsspec.core.url_to_fs(text)
    except (ImportError, ValueError) as error:
        problem = _unopened(text, error)
        if problem is None:
            raise
        raise CheckpointError(f"cannot open {text}", [problem]) from error
    return LocalStorage(path, durable) if isinstance(fs, LocalFileSystem) else RemoteStorage(fs, path)


_EXTRAS = {"s3": "s3", "s3a": "s3"}
"""Protocol → the extra of this package that installs what it needs."""


def _unopened(url: str, error: Exception) -> Problem | None:
    """Returns why there is no file system for a URL; None where its protocol is not to blame."""
    protocol = fsspec.core.split_protocol(url)[0]
    known = known_implementations.get(protocol)
    if protocol is None:
        return None
    if protocol == "hosts":
        return Problem(
            url,
            "what hosts have in directories of their own",
            "a path that one process sees all of",
            "load it in a job on these hosts, or from the root that it was promoted to",
        )
    if known is None and protocol not in available_protocols():
        alike = difflib.get_close_matches(protocol, available_protocols(), 3, cutoff=0.5)
        remedy = f"did you mean {' or '.join(alike)}? " if alike else ""
        remedy += "fsspec.available_protocols() lists those there are"
        return Problem(url, f"the protocol {protocol!r}", "a path, or a protocol that fsspec knows", remedy)
    if isinstance(error, ImportError):
        extra = _EXTRAS.get(protocol)
        remedy = f"pip install 'shardopt[{extra}]'" if extra else f"install it: {(known or {}).get('err', error)}"
        return Problem(url, f"no package for {protocol!r} ({error})", "the file system of fsspec for it", remedy)
    return None


@contextmanager
def wrap_os_errors(doing: str) -> Iterator[None]:
    """Turns an error of the operating system, or of a file system of fsspec, into a CheckpointError.

    Args:
        doing: the operation and the URL, for the message ("read s3://bucket/a").
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, ShardoptError):
            raise
        raise CheckpointError(f"cannot {doing}: {error}") from error
