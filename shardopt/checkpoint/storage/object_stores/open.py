"""Opens buckets of S3, GCS and Azure by URL, with the options and the configuration of fsspec's file systems."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsspec.config import conf  # type: ignore[import-untyped]  # has no type hints

from shardopt.checkpoint.storage import retry
from shardopt.checkpoint.storage.object_stores.azure import azure_container
from shardopt.checkpoint.storage.object_stores.gcs import gcs_bucket
from shardopt.checkpoint.storage.object_stores.options import Bucket, Options
from shardopt.checkpoint.storage.object_stores.s3 import s3_bucket
from shardopt.checkpoint.storage.object_stores.store import ObjectStore
from shardopt.errors import CheckpointError, OptionError, Problem

_opened: dict[tuple[str, ...], tuple[object, ObjectStore]] = {}  # they hold connections; what was read for them
_VARIABLES = ("AWS_", "AZURE_", "GOOGLE_", "STORAGE_EMULATOR_HOST", "HOME")
_FILES = {"AWS_CONFIG_FILE": "~/.aws/config", "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials"}


def open_bucket(url: str, options: Mapping[str, Any]) -> tuple[ObjectStore, str]:
    """Returns the object store of a URL, and the path in it.

    Args:
        options: arguments of the file system that fsspec has for the protocol, by name.

    Raises:
        OptionError: an option that obstore has no equivalent of.
        CheckpointError: there are no credentials.
    """
    protocol, _, path = url.partition("://")
    of_protocol, translate = PROTOCOLS[protocol]
    configured = {name: value for each in of_protocol for name, value in conf.get(each, {}).items()}
    bucket, path = path.partition("/")[0], path.rstrip("/")
    if "//" in path:
        problem = Problem(url, "an empty part of the path", "one slash between parts", "write it with one slash")
        raise CheckpointError(f"cannot open {url}", [problem])
    given = {**configured, **options}
    key = (protocol, bucket, repr(sorted(given.items())), repr(retry.RETRY_POLICY))
    surroundings = _surroundings()
    known, store = _opened.get(key, (None, None))
    if store is None or known != surroundings:
        taken = Options(given)
        found = translate(bucket, taken)
        if left := taken.left():
            remedy = "leave them out, or install fsspec's own package (s3fs, gcsfs, adlfs) in the place of obstore"
            problem = Problem(
                "storage_options, or fsspec's configuration",
                ", ".join(left),
                "options that docs/remote.md lists",
                remedy,
            )
            raise OptionError("invalid arguments", [problem])
        store = ObjectStore(protocol, _maker(found), found.may_lack_conditions, found.place)
        _opened[key] = surroundings, store
    return store, path


def _surroundings() -> object:
    """Returns what endpoints, keys and profiles may be in beside options: variables, and AWS's files as they are."""
    variables = [each for each in os.environ.items() if each[0].startswith(_VARIABLES)]
    files = (os.path.expanduser(os.environ.get(name, default)) for name, default in _FILES.items())
    return sorted(variables), [_state_of(file) for file in files]


def _state_of(file: str) -> tuple[int, ...]:
    try:
        state = os.stat(file)
    except OSError:
        return ()
    return state.st_ino, state.st_size, state.st_mtime_ns


def _maker(bucket: Bucket) -> Callable[..., Any]:
    def make(client_options: dict[str, Any], retry_config: Mapping[str, Any]) -> Any:
        client = {**client_options, **bucket.client}
        return bucket.store(bucket.name, client_options=client, retry_config=retry_config, **bucket.config)

    return make


_S3 = (("s3", "s3a"), s3_bucket)
_GCS = (("gs", "gcs"), gcs_bucket)
_AZURE = (("abfs", "az", "abfss"), azure_container)
PROTOCOLS: Mapping[str, tuple[Sequence[str], Callable[[str, Options], Bucket]]] = {
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs"), _GCS),
    **dict.fromkeys(("az", "abfs", "abfss"), _AZURE),
}
"""Protocol → the names under which fsspec's configuration has its options, and who translates them."""
