"""Opens storage by URL, the only place that does: registered storage, local directories, and all that fsspec opens."""

from __future__ import annotations

import errno
import gc
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from shardopt.checkpoint.storage.base import Storage
from shardopt.checkpoint.storage.local import LocalStorage
from shardopt.errors import CheckpointError, OptionError, Problem, ShardoptError
from shardopt.redaction import without_secrets
from shardopt.runtime.late import late
from shardopt.world import world

if TYPE_CHECKING:
    from shardopt.checkpoint.storage import file_systems
else:
    file_systems = late("shardopt.checkpoint.storage.file_systems")

_NAME = r"[A-Za-z0-9][A-Za-z0-9+.\-]+"
_LOCAL = re.compile(r"(?:file|local)://(?:localhost(?=/))?|file:(?=/)")
_URL = re.compile(rf"(?:{_NAME}::)*{_NAME}://")
LINK = re.compile(rf"::(?={_URL.pattern})")
"""Separates the links of fsspec's chained URLs; a protocol follows."""
_ONE_SLASH = re.compile(rf"({_NAME}):/(?!/)")
_own: dict[str, Callable[..., Storage]] = {}  # by protocol


def absolute_url(url: str | os.PathLike[str]) -> str:
    """Returns a path or URL that stays valid when the process changes its directory.

    What begins with no protocol is a local path, whatever else is in it: "out/lr::1e-4" is a directory of that name.

    Raises:
        OptionError: it is a URL that has been a `pathlib.Path`, which drops a slash; or it has a NUL character.
    """
    text = os.fspath(url)
    if "\0" in text:
        raise OptionError("invalid arguments", [Problem("url", repr(text), "no NUL character", "give another path")])
    local = _LOCAL.match(text)
    if local is None and _URL.match(text):
        *links, last = LINK.split(text)
        return "::".join([*links, f"file://{absolute_url(last)}" if _LOCAL.match(last) else last])
    if local is None and (slash := _ONE_SLASH.match(text)) and (slash[1] in _own or file_systems.is_known(slash[1])):
        remedy = f"pass {text.replace(':/', '://', 1)!r} as a str: pathlib drops a slash"
        problem = Problem("url", repr(text), "a path, or a URL with two slashes", remedy)
        raise OptionError("invalid arguments", [problem])
    return os.path.abspath(os.path.expanduser(text[local.end() :] if local else text))


def is_in_archive(url: str | os.PathLike[str]) -> bool:
    """Whether a URL is of files in an archive (zip, tar), which can be read but not written."""
    protocol = os.fspath(url).partition(":")[0] if _URL.match(os.fspath(url)) else ""
    return bool(protocol) and file_systems.is_archive(protocol)


def storage_of(url: str | os.PathLike[str], durable: bool = True) -> Storage:
    """Returns the storage at a path or at any URL that fsspec knows, with fsspec's configuration and credentials.

    Args:
        durable: whether local files and directories are flushed to the disk before a write returns.

    Raises:
        CheckpointError: fsspec does not know the protocol, or the package that it needs for it is not there.
    """
    return world().open_storage(os.fspath(url), durable, _open_beside_held if _held else _open)


def hold(url: str | os.PathLike[str], owner: object = None) -> Storage:
    """Returns the storage at a URL, in which all that this process opens at or below that URL is from now on.

    It ends with the returned object, or with `release`. What else would change the store behind the URL, such as
    other options or another environment, is refused where it is asked for, and else has no effect.

    Args:
        owner: whose storage it is; None if nobody else has it. Garbage is collected only once the owner is gone: the
            storage may then be in a cycle that nobody has.

    Raises:
        OptionError: an earlier one, which has not ended, is in another store.
        CheckpointError: as `storage_of`.
    """
    storage = world().open_storage(os.fspath(url), True, _open)
    key = id(storage)
    if isinstance(storage, LocalStorage):  # where there is one store alone
        _local[key] = ref(storage, lambda _: _local.pop(key, None))
        return storage
    place = _place_of(storage, _options_of(storage.url, _options))
    _refuse_elsewhere(storage, place)
    _held[key] = _Held(ref(storage, lambda _: _held.pop(key, None)), ref(storage if owner is None else owner), place)
    return storage


def release(*storages: Storage) -> None:
    """Ends what `hold` has begun."""
    for each in storages:
        _held.pop(id(each), None)
        _local.pop(id(each), None)


def held_urls() -> set[str]:
    """Returns the URLs of what `hold` has begun, and nothing has ended."""
    alive = (each() for each in (*list(_local.values()), *(held.storage for held in list(_held.values()))))
    return {each.url for each in alive if each is not None}


def register_storage(protocol: str, opener: Callable[..., Storage]) -> None:
    """Makes this process open URLs of a protocol by a storage of the program's. Local.

    Each rank calls it, before it saves or loads; a program that has registered the protocol already exchanges it.

    Args:
        protocol: what stands before "://", such as "sqlite".
        opener: makes the storage of a URL, which has no slash at its end. The storage's `url` is that URL, by which it
            is opened again. `storage_options` are given to the opener by name. What it raises is a CheckpointError.

    Raises:
        OptionError: the protocol is none, or one that stands for local paths.
    """
    if not re.fullmatch(_NAME, protocol) or protocol in ("file", "local"):
        required = 'letters and digits, two at least, and neither "file" nor "local"'
        problem = Problem("protocol", repr(protocol), required, 'give what stands before "://"')
        raise OptionError("invalid arguments", [problem])
    _own[protocol] = opener


def use_options(url: str | os.PathLike[str], options: Mapping[str, Any] | None) -> None:
    """Makes this process open everything at or below a URL with these arguments for its file system.

    They may be credentials: they are kept in memory alone, and are in no message.

    Raises:
        OptionError: they are no arguments by name, or the file system does not take them. Or they lead to another
            store than the one that is held there (`hold`); other keys of the same store are taken.
        CheckpointError: as `storage_of`.
    """
    if options is None:
        return
    names = [*options] if isinstance(options, Mapping) else [None]
    if not all(isinstance(name, str) for name in names):
        found = f"a {type(options).__name__}"
        remedy = 'give a dict, such as {"endpoint_url": "https://s3.example.org"}'
        raise OptionError("invalid arguments", [Problem("storage_options", found, _OPTIONS, remedy)])
    text, given = _without_caches(absolute_url(url), options)
    opener = partial(_open, table={**_options, text: given})
    try:
        storage = world().open_storage(text, True, opener)
    except (TypeError, ValueError) as error:
        if isinstance(error, ShardoptError):
            raise
        found = f"{', '.join(names)}, at which it raises {type(error).__name__}"
        problem = Problem("storage_options", found, _OPTIONS, "see its fsspec class, or the one that was registered")
        raise OptionError("invalid arguments", [problem]) from None  # which may have them in its text
    _refuse_elsewhere(storage, _place_of(storage, given))
    # Under the name that the storage gives itself too, by which it is opened later.
    _options.update({text: given, storage.url: given})


class _Held(NamedTuple):
    storage: ref[Storage]
    owner: ref[object]
    place: Mapping[str, str]


_OPTIONS = "arguments of fsspec's file system by name"
_options: dict[str, dict[str, Any]] = {}  # by URL
_held: dict[int, _Held] = {}  # by id, as storages may be equal
_local: dict[int, ref[Storage]] = {}  # likewise, of local ones
_NOT_WHERE = re.compile(
    "key|secret|token|pass|credential|user|sas|anon|client_id|tenant"
    "|timeout|retr|attempt|block_?size|cache|listing|concurren|max_|pool|batch|buffer|keepalive|chunk"
    "|asynchronous|loop|version_aware|auto_mkdir|checksum",
    re.IGNORECASE,
)
"""In names of options that do not say where files are: of credentials, and of how they are read and written."""


def _is_within(url: str, above: str) -> bool:
    return url == above or url.startswith(above.rstrip("/") + "/")


def _options_of(text: str, table: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the file system arguments for a URL: those set for the longest URL that contains it."""
    return table.get(max((each for each in table if _is_within(text, each)), key=len, default=""), {})


def _place_of(storage: Storage, options: Mapping[str, Any]) -> Mapping[str, str]:
    """Returns in which of several stores of one URL a storage is, by the options with which it was opened."""
    return flat_place(options) if storage.place is None else storage.place


def flat_place(options: Mapping[str, Any], within: str = "") -> dict[str, str]:
    """Returns those of some options that may say where files are, which all but those of `_NOT_WHERE` may."""
    found: dict[str, str] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            found |= flat_place(value, f"{within}{name}.")
        elif value is not None and not _NOT_WHERE.search(name):
            found[within + name] = repr(value)
    return found


def _holder(
    storage: Storage, place: Mapping[str, str], refuses: bool = False
) -> tuple[Storage, Mapping[str, str]] | None:
    """Returns what is held at the storage's URL or next above it, and where, if that is another store; else None.

    Args:
        refuses: whether that is an error: the owner may be in a cycle that nobody has, too.
    """
    there, is_owned = _nearest(storage.url)[1:]  # the first of which would stay alive here
    if there in (None, place):
        return None
    if refuses or not is_owned:
        gc.collect()
    held, there, _ = _nearest(storage.url)
    return None if held is None or there is None or there == place else (held, there)


def _nearest(url: str) -> tuple[Storage | None, Mapping[str, str] | None, bool]:
    """Returns what is held at a URL or next above it, in which store, and whether its owner is there."""
    alive = [(each.storage(), each.place, each.owner() is not None) for each in list(_held.values())]
    within = [
        (each, place, is_owned) for each, place, is_owned in alive if each is not None and _is_within(url, each.url)
    ]
    return max(within, key=lambda found: len(found[0].url), default=(None, None, False))


def _refuse_elsewhere(storage: Storage, place: Mapping[str, str]) -> None:
    found = _holder(storage, place, refuses=True)
    if found is None:
        return
    held, there = found
    names = sorted(name for name in {*place, *there} if place.get(name) != there.get(name))
    remedy = "do this before that is made, once it is closed, or in another process"
    problem = Problem(
        storage.url,
        f"another {', '.join(names)} than that of the Manager, MirrorCopier or Follower of {held.url}",
        "one store for a URL in a process at one time",
        remedy,
    )
    raise OptionError("a URL cannot stand for two stores", [problem])


def _open_beside_held(text: str, durable: bool) -> Storage:
    """Opens what is at or below a URL that is held in the store of that."""
    storage = _open(text, durable)
    is_local = isinstance(storage, LocalStorage)
    found = None if is_local else _holder(storage, _place_of(storage, _options_of(storage.url, _options)))
    if found is None:
        return storage
    held = found[0]
    for name in filter(None, storage.url[len(held.url) :].split("/")):
        held = held.child(name)
    return held


def _without_caches(url: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns a URL and its options without the caches of fsspec that stand first: they would show old files."""
    if not LINK.search(url):
        return url, dict(options)
    url, options = file_systems.without_caches(url, options)
    return absolute_url(url), dict(options)


def _open(text: str, durable: bool, table: Mapping[str, dict[str, Any]] | None = None) -> Storage:
    url = absolute_url(text)
    if not _URL.match(url):
        return LocalStorage(url, durable)
    url, _ = _without_caches(url, {})
    options = _options_of(url, _options if table is None else table)
    own = _own.get(url.partition("://")[0])
    if own is not None:
        return _opened_by(own, re.sub(r"(?<![:/])/+$", "", url), options)
    return file_systems.open_url(url, durable, options)


def _opened_by(opener: Callable[..., Storage], url: str, options: Mapping[str, Any]) -> Storage:
    """Returns what a program's own opener makes of a URL. Raises CheckpointError where that is no storage."""
    try:
        storage = opener(url, **options)
    except (ShardoptError, OSError):
        raise
    except Exception as error:
        if options and isinstance(error, TypeError | ValueError):
            raise  # `use_options` names them
        found = f"{type(error).__name__}: {error}"
        problem = Problem(url, found, "a storage of this protocol", "mend the URL, or what register_storage was given")
        raise CheckpointError(f"cannot open {url}", [problem]) from without_secrets(error)
    if not isinstance(storage, Storage) or not hasattr(storage, "url"):
        found = "a storage without a url" if isinstance(storage, Storage) else f"a {type(storage).__name__}"
        problem = Problem(url, found, "a Storage with a url", "mend what register_storage was given")
        raise CheckpointError(f"cannot open {url}", [problem])
    return storage


_ACCESS = (
    "access for the user of this process",
    "see ls -ld of it and of those above it; chmod it, or give another path",
)
_REMEDIES = {
    errno.EACCES: _ACCESS,
    errno.EPERM: _ACCESS,
    errno.EROFS: ("a file system that can be written", "mount it for writing, or give another path"),
    errno.ENOTDIR: ("directories all the way", "move the file away that is in the way, or give another path"),
}


@contextmanager
def wrap_os_errors(doing: str) -> Iterator[None]:
    """Turns errors of the operating system, or of fsspec's file systems, into CheckpointError.

    Args:
        doing: the operation and the URL, for the message ("read s3://bucket/a").
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, ShardoptError):
            raise
        problems = []
        if isinstance(error.filename, str) and error.errno in _REMEDIES:  # of a local path
            required, remedy = _REMEDIES[error.errno]
            problems = [Problem(error.filename, str(error.strerror), required, remedy)]
        raise CheckpointError(f"cannot {doing}: {error}", problems) from without_secrets(error)
