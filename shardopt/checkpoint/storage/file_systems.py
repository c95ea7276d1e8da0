"""Opens fsspec's file systems by URL, and explains failures. Imported at the first URL that is no local path."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import fsspec  # type: ignore[import-untyped]  # has no type hints
from fsspec.archive import AbstractArchiveFileSystem  # type: ignore[import-untyped]  # as above
from fsspec.implementations.cached import CachingFileSystem  # type: ignore[import-untyped]  # as above
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]  # as above
from fsspec.registry import available_protocols, known_implementations  # type: ignore[import-untyped]  # as above

from shardopt.checkpoint.storage.base import Storage
from shardopt.checkpoint.storage.local import LocalStorage
from shardopt.checkpoint.storage.open import LINK
from shardopt.checkpoint.storage.remote import RemoteStorage
from shardopt.errors import CheckpointError, Problem, ShardoptError
from shardopt.redaction import without_secrets
from shardopt.runtime.late import late
from shardopt.runtime.signatures import signature

if TYPE_CHECKING:
    from shardopt.checkpoint.storage.object_stores import open as object_stores
else:
    object_stores = late("shardopt.checkpoint.storage.object_stores.open")

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
"""Protocol of an object store → the extra of this package that installs obstore, which serves it."""
_NO_LINK = "\ue000"  # for "::" in a path, while fsspec looks for chains


def has_obstore() -> bool:
    """Whether obstore is installed."""
    return find_spec("obstore") is not None


def is_known(protocol: str) -> bool:
    """Whether fsspec knows a protocol."""
    return protocol in known_implementations or protocol in available_protocols()


def is_archive(protocol: str) -> bool:
    """Whether a protocol is for files in an archive, such as zip and tar."""
    return _is_a(protocol, AbstractArchiveFileSystem)


def _is_a(protocol: str, kind: type) -> bool:
    if protocol in _EXTRAS:  # an object store, whose package takes a third of a second to import
        return False
    try:
        return is_known(protocol) and issubclass(fsspec.get_filesystem_class(protocol), kind)
    except ImportError:
        return False


def without_caches(url: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns a chained URL, and the options for it, without the caches that stand first."""
    while len(links := LINK.split(url, maxsplit=1)) == 2:
        protocol = links[0].partition("://")[0]
        if not _is_a(protocol, CachingFileSystem):
            break
        url, own = links[1], signature(CachingFileSystem.__init__).parameters
        inner = options.get("target_options") or {}
        options = {**inner, **{name: value for name, value in options.items() if name not in {*own, protocol}}}
    of_link = options.get(url.partition("://")[0])
    return url, dict(of_link if isinstance(of_link, Mapping) and not LINK.search(url) else options)


def open_url(url: str, durable: bool, options: Mapping[str, Any]) -> Storage:
    """Returns the storage at an absolute URL.

    Args:
        options: arguments of its file system by name.

    Raises:
        CheckpointError: fsspec does not know the protocol, or the package that it needs for it is not there.
        OptionError: obstore, through which object stores are reached where it is installed, has no such option.
    """
    try:
        if url.partition("://")[0] in _EXTRAS and has_obstore():
            return RemoteStorage(*object_stores.open_bucket(url, options))
        fs, path = _file_system(url, options)
    except ShardoptError:
        raise
    except AttributeError as error:  # of one that stands before others alone, such as "dir", which has lost these
        found = f"{type(error).__name__}: {error}"
        problems = [Problem(url, found, "a URL that fsspec opens", "leave out its first part, or mend its class")]
        raise CheckpointError(f"cannot open {url}", problems) from without_secrets(error)
    except (ImportError, ValueError, TypeError, OSError) as error:
        problem = _unopened(url, error)
        if problem is None:
            raise
        raise CheckpointError(f"cannot open {url}", [problem]) from without_secrets(error)
    return LocalStorage(path, durable) if isinstance(fs, LocalFileSystem) else RemoteStorage(fs, path)


def _file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Returns the file system of a URL, and the path in it; of a chain ("zip://run::s3://bucket/a.zip") the first."""
    links = LINK.split(url)
    if not any("::" in link for link in links):
        return fsspec.core.url_to_fs(url, **options)  # type: ignore[no-any-return]  # has no type hints
    if len(links) > 1:
        raise ValueError(f"{url}: a path with '::' in it, within a chain")
    fs, path = fsspec.core.url_to_fs(url.replace("::", _NO_LINK), **options)
    return fs, path.replace(_NO_LINK, "::")


def _unopened(url: str, error: Exception) -> Problem | None:
    """Returns why a URL has no file system; None if its protocol is not the reason."""
    protocol = fsspec.core.split_protocol(url)[0]
    if any("::" in link for link in LINK.split(url)):
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
        remedy += "fsspec.available_protocols() lists those there are; "
        remedy += "each rank imports what calls register_storage, and the shell does so by --import MODULE"
        required = "a path, or a protocol that fsspec knows or register_storage was given on this rank"
        return Problem(url, f"the protocol {protocol!r}", required, remedy)
    if isinstance(error, ImportError):
        extra = None if "::" in url else _EXTRAS.get(protocol)  # in chains, fsspec's own package serves
        remedy = f"pip install 'shardopt[{extra}]'" if extra else f"install it: {(known or {}).get('err', error)}"
        return Problem(url, f"no package for {protocol!r} ({error})", "the file system of fsspec for it", remedy)
    return None
