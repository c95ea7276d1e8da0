"""Opens storage by URL, here alone: a program's own, local directories, and all else that fsspec opens."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import fsspec  # type: ignore[import-untyped]  # has no type hints
from fsspec.archive import AbstractArchiveFileSystem  # type: ignore[import-untyped]  # as above
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]  # as above
from fsspec.registry import available_protocols, known_implementations  # type: ignore[import-untyped]  # as above

from shardopt.checkpoint.storage.base import Storage
from shardopt.checkpoint.storage.local import LocalStorage
from shardopt.checkpoint.storage.remote import RemoteStorage
from shardopt.errors import CheckpointError, OptionError, Problem, ShardoptError
from shardopt.redaction import without_secrets
from shardopt.world import world

_NAME = r"[A-Za-z0-9][A-Za-z0-9+.\-]+"
_LOCAL = re.compile(r"(?:file|local)://|file:(?=/)")
_URL = re.compile(rf"(?:{_NAME}::)*{_NAME}://")
_LINK = re.compile(rf"::(?={_URL.pattern})")  # of a chain of fsspec's: a protocol follows
_NO_LINK = "\ue000"  # for "::" in a path, while fsspec looks for chains
_own: dict[str, Callable[[str], Storage]] = {}  # by protocol


def absolute_url(url: str | os.PathLike[str]) -> str:
    """Returns a path or URL that means the same wherever the process changes its directory to.

    What begins with no protocol is a local path, whatever else is in it: "out/lr::1e-4" is a directory of that name.
    """
    text = os.fspath(url)
    local = _LOCAL.match(text)
    if local is None and _URL.match(text):
        *links, last = _LINK.split(text)
        return "::".join([*links, f"file://{absolute_url(last)}" if _LOCAL.match(last) else last])
    return os.path.abspath(text[local.end() :] if local else os.path.expanduser(text))


def is_in_archive(url: str | os.PathLike[str]) -> bool:
    """Whether a URL is of files in an archive (zip, tar), which can be read there, and not be written."""
    protocol = os.fspath(url).partition(":")[0] if _URL.match(os.fspath(url)) else ""
    if protocol not in known_implementations:
        return False
    try:
        return issubclass(fsspec.get_filesystem_class(protocol), AbstractArchiveFileSystem)
    except ImportError:
        return False


def storage_of(url: str | os.PathLike[str], durable: bool = True) -> Storage:
    """Returns the storage at a path or at any URL that fsspec knows, with fsspec's own configuration and credentials.

    Args:
        durable: whether local files and directories are flushed to the disk before a write returns.

    Raises:
        CheckpointError: fsspec does not know the protocol, or the package that it needs for it is not there.
    """
    return world().open_storage(os.fspath(url), durable, _open)


def register_storage(protocol: str, opener: Callable[[str], Storage]) -> None:
    """Has URLs of a protocol opened by a program's own storage from now on, in this process. Local.

    Each rank calls it, before it saves or loads; a program that has registered the protocol already exchanges it.

    Args:
        protocol: what stands before "://", such as "sqlite".
        opener: makes the storage of a URL. Its `url` is that URL, by which it is opened again.

    Raises:
        OptionError: the protocol is none, or one that stands for local paths.
    """
    if not re.fullmatch(_NAME, protocol) or protocol in ("file", "local"):
        required = 'letters and digits, two at least, and neither "file" nor "local"'
        problem = Problem("protocol", repr(protocol), required, 'give what stands before "://"')
        raise OptionError("invalid arguments", [problem])
    _own[protocol] = opener


def use_options(url: str | os.PathLike[str], options: Mapping[str, Any] | None) -> None:
    """Has this process open what is at a URL, and below it, with these arguments of its file system from now on.

    They may be credentials: they are kept in memory alone, and are in no message.

    Raises:
        OptionError: they are no arguments by name, or the file system does not take them.
        CheckpointError: as `storage_of`.
    """
    if options is None:
        return
    names = [*options] if isinstance(options, Mapping) else [None]
    if not all(isinstance(name, str) for name in names):
        found = f"a {type(options).__name__}"
        remedy = 'give a dict, such as {"endpoint_url": "https://s3.example.org"}'
        raise OptionError("invalid arguments", [Problem("storage_options", found, _OPTIONS, remedy)])
    text = absolute_url(url)
    before = _options.get(text)
    _options[text] = dict(options)
    try:
        # Under the name that the storage gives itself too, by which it is opened later.
        _options[storage_of(text).url] = _options[text]
    except (TypeError, ValueError) as error:
        _options.pop(text)
        if before is not None:
            _options[text] = before
        found = f"{', '.join(names)}, at which it raises {type(error).__name__}"
        problem = Problem("storage_options", found, _OPTIONS, "see the documentation of its fsspec class")
        raise OptionError("invalid arguments", [problem]) from None  # which may have them in its text


_OPTIONS = "arguments of fsspec's file system by name"
_options: dict[str, dict[str, Any]] = {}  # by URL


def _options_of(text: str) -> dict[str, Any]:
    """Returns the arguments of the file system of a URL: those of the longest URL that it is at, or below."""
    if not _options:
        return {}
    above = (each for each in _options if text == each or text.startswith(each.rstrip("/") + "/"))
    return _options.get(max(above, key=len, default=""), {})


def _open(text: str, durable: bool) -> Storage:
    url = absolute_url(text)
    if not _URL.match(url):
        return LocalStorage(url, durable)
    own = _own.get(url.partition("://")[0])
    if own is not None:
        return own(url)
    try:
        fs, path = _file_system(url)
    except (ImportError, ValueError, TypeError, OSError) as error:
        problem = _unopened(url, error)
        if problem is None:
            raise
        raise CheckpointError(f"cannot open {url}", [problem]) from without_secrets(error)
    return LocalStorage(path, durable) if isinstance(fs, LocalFileSystem) else RemoteStorage(fs, path)


def _file_system(url: str) -> tuple[Any, str]:
    """Returns the file system of a URL, and the path in it; of a chain ("zip://run::s3://bucket/a.zip") the first."""
    links = _LINK.split(url)
    if not any("::" in link for link in links):
        return fsspec.core.url_to_fs(url, **_options_of(url))  # type: ignore[no-any-return]  # has no type hints
    if len(links) > 1:
        raise ValueError(f"{url}: a path with '::' in it, within a chain")
    fs, path = fsspec.core.url_to_fs(url.replace("::", _NO_LINK), **_options_of(url))
    return fs, path.replace(_NO_LINK, "::")


_EXTRAS = {"s3": "s3", "s3a": "s3"}
"""Protocol → the extra of this package that installs what it needs."""


def _unopened(url: str, error: Exception) -> Problem | None:
    """Returns why there is no file system for a URL; None where its protocol is not to blame."""
    protocol = fsspec.core.split_protocol(url)[0]
    if any("::" in link for link in _LINK.split(url)):
        required = "a protocol with each part of a chain, and no '::' in the paths of one"
        return Problem(url, f"no chain ({error})", required, "name them: zip://run::file:///data/runs.zip")
    protocol = None if protocol is None else protocol.rpartition("::")[2]
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
        raise CheckpointError(f"cannot {doing}: {error}") from without_secrets(error)
