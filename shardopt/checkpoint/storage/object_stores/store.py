"""Buckets of object stores by obstore, with the methods of fsspec's file systems that `RemoteStorage` calls.

obstore is object_store of Rust: it signs, sends and receives without Python. Single requests have no attempts of its
own, so that `retry.py` alone decides on them; the parts of large files, which Python does not see, have.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import obstore

from shardopt.checkpoint.storage import retry
from shardopt.checkpoint.storage.object_stores.errors import (
    ExhaustedError,
    ExpiredKeysError,
    UnknownKeysError,
    translated,
)
from shardopt.errors import CheckpointError, Problem

T = TypeVar("T")

_log = logging.getLogger("shardopt.checkpoint")
PARTS_AT_ONCE = 8  # no more of a file are on their way
_SLOWEST_BYTES_PER_SECOND = 1 << 20  # of one part among several
_GIVE_UP_SECONDS = 2.0
_STRAY_KEY = "Encountered object with invalid path"  # such as "run//a"; obstore then lists nothing of its folder
_ATTEMPTS_OF_PART_SECONDS = 180.0  # its signature is valid for 5 minutes


class ObjectStore:
    """A bucket (a container, on Azure); thread-safe. Paths begin with its name.

    Args:
        protocol: of its URLs, such as "s3".
        make: makes obstore's store of the bucket, given its `client_options` and its `retry_config`.
        may_lack_conditions: whether it may ignore the condition of a write, as some compatible stores do.
        place: which of several stores of this protocol has the bucket.
    """

    async_impl = False
    sends_in_place = True
    """Whether files that `open` returns take buffers of any size, and send them from their own memory."""
    refuses_conditions_by = (errno.ENOSYS,)

    def __init__(
        self,
        protocol: str,
        make: Callable[..., Any],
        may_lack_conditions: bool,
        place: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.place = place
        self._protocol, self._make, self._policy = protocol, make, retry.RETRY_POLICY
        self._in_parts: dict[int, Any] = {}  # stores for the parts of large files, by their size
        self.has_conditions = None if may_lack_conditions else True
        """Whether a write may have the condition that there is no file yet; None if that is not known yet."""

    @cached_property
    def _once(self) -> Any:
        """The store for single requests."""
        return self._store({"max_retries": 0}, self._policy.request_seconds)

    def _request(self, request: Callable[[Any], T], creates: bool = False) -> T:
        """Makes a single request. Expired keys are asked for anew by the next one, those that are not known by this."""
        try:
            return translated(lambda: request(self._once), creates)
        except ExpiredKeysError:
            self._forget_keys()
            raise
        except UnknownKeysError:
            self._forget_keys()
            return translated(lambda: request(self._once), creates)

    def _forget_keys(self) -> None:
        self.__dict__.pop("_once", None)
        self._in_parts = {}

    def _store(self, retry_config: Mapping[str, Any], seconds: float) -> Any:
        timeout = timedelta(seconds=seconds)
        client_options = {"timeout": timeout, "connect_timeout": min(timeout, timedelta(seconds=15))}
        try:
            return translated(lambda: self._make(client_options=client_options, retry_config=retry_config))
        except OSError as error:
            required = "options and credentials that obstore takes"
            problem = Problem(f"{self._protocol}://", str(error), required, "see docs/remote.md for what may be given")
            raise CheckpointError("cannot open an object store", [problem]) from None

    def unstrip_protocol(self, path: str) -> str:
        return f"{self._protocol}://{path}"

    def invalidate_cache(self) -> None:
        """Does nothing: no listing is kept."""

    def makedirs(self, path: str, exist_ok: bool) -> None:
        """Does nothing: there are no directories."""

    def rmdir(self, path: str) -> None:
        """Does nothing, as `makedirs`."""

    def ls(self, path: str, detail: bool) -> list[str]:
        try:
            found = self._request(lambda store: store.list_with_delimiter(_key(path) or None))
        except OSError as error:
            if _STRAY_KEY not in str(error):
                raise
            required = "keys whose parts have names, with one slash between them"
            remedy = "remove or rename that object with the store's own tools: its folder cannot be listed beside it"
            problem = Problem(self.unstrip_protocol(path), str(error), required, remedy)
            raise CheckpointError(f"cannot list {self.unstrip_protocol(path)}", [problem]) from None
        names = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
        marker = _key(path)  # consoles make an object in the place of a directory
        return [f"{path}/{name.rpartition('/')[2]}" for name in names if name != marker]

    def info(self, path: str) -> dict[str, Any]:
        try:
            return {"type": "file", "size": self._request(lambda store: store.head(_key(path)))["size"]}
        except OSError as error:
            if not isinstance(error, PermissionError) and error.errno != errno.EINVAL:
                raise
            self._request(lambda store: store.get_range(_key(path), start=0, end=1))  # whose answer says why
            raise

    def cat_file(self, path: str, start: int = 0, end: int | None = None) -> memoryview:
        if end is None:
            options = {"range": {"offset": start}} if start else {}
            return memoryview(self._request(lambda store: store.get(_key(path), options=options).bytes()))
        return memoryview(self._request(lambda store: store.get_range(_key(path), start=start, end=end)))

    def cat_ranges(
        self, paths: Sequence[str], starts: Sequence[int], ends: Sequence[int], on_error: Literal["return"]
    ) -> Sequence[memoryview | Exception]:
        """Returns ranges of one file; in place of one that has failed, the error."""
        if len(paths) > 1:
            # obstore is not to join ranges: those that are worth it have been joined, and it panics past a file's end.
            with suppress(OSError):  # which says not of which of them it is
                found = self._request(
                    lambda store: store.get_ranges(_key(paths[0]), starts=starts, ends=ends, coalesce=0)
                )
                return [memoryview(each) for each in found]
        return [self._range(*each) for each in zip(paths, starts, ends, strict=True)]

    def _range(self, path: str, start: int, end: int) -> memoryview | Exception:
        try:
            return self.cat_file(path, start, end)
        except OSError as error:
            return error

    def pipe_file(self, path: str, data: bytes, mode: Literal["overwrite", "create"] = "overwrite") -> None:
        """Writes a file in one request.

        Raises:
            FileExistsError: there is one, with `mode="create"`.
            OSError: ENOSYS, as the store has no such condition, with `mode="create"`.
        """
        if mode == "overwrite":
            self._request(lambda store: store.put(_key(path), data, use_multipart=False))
        elif self.has_conditions is None:
            self._find_conditions(path, data)
        elif self.has_conditions:
            self._create(path, data)
        else:
            raise OSError(errno.ENOSYS, "the store ignores conditions of writes")

    def _create(self, path: str, data: bytes) -> None:
        try:
            self._request(lambda store: store.put(_key(path), data, mode="create", use_multipart=False), creates=True)
        except FileExistsError as error:
            try:
                self.info(path)
            except FileNotFoundError:
                raise ConnectionError(f"a conflict with another write, which has failed: {error}") from None
            raise

    def _find_conditions(self, path: str, data: bytes) -> None:
        """Creates a file, and sees whether the store refuses to create it again."""
        with suppress(FileNotFoundError):
            self.info(path)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        try:
            self._create(path, data)  # a FileExistsError here is another job's, which has won
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):
                raise
        else:
            try:
                self._create(path, data)
            except FileExistsError:
                self.has_conditions = True
                return
        self.has_conditions = False
        bucket = self.unstrip_protocol(path.partition("/")[0])
        _log.warning("%s ignores conditions: two jobs that commit to one path at one time may both succeed", bucket)
        self.pipe_file(path, data, "create")

    def rm_file(self, path: str) -> None:
        self._request(lambda store: store.delete([_key(path)]))

    def open(self, path: str, mode: Literal["wb"], block_size: int) -> Upload:
        """Begins to write a large file in parts of `block_size` bytes."""
        seconds = max(self._policy.request_seconds, block_size / _SLOWEST_BYTES_PER_SECOND)
        store = self._in_parts.get(block_size)
        if store is None:
            pauses = (self._policy.pause_seconds, self._policy.longest_pause_seconds)
            first, longest = (timedelta(seconds=each) for each in pauses)
            retry_config = {
                "max_retries": self._policy.attempts - 1,
                "retry_timeout": timedelta(seconds=_ATTEMPTS_OF_PART_SECONDS),
                "backoff": {"init_backoff": first, "max_backoff": longest},
            }
            store = self._in_parts[block_size] = self._store(retry_config, seconds)
        deadline_seconds = 2 * (_ATTEMPTS_OF_PART_SECONDS + seconds)
        return Upload(store, self.unstrip_protocol(path), _key(path), block_size, deadline_seconds, self._forget_keys)


class Upload:
    """A large file that is sent in parts, several at a time. It exists once `close` has returned.

    After an error obstore aborts the upload, and the store drops the parts, but for one that was still on its way.

    Args:
        deadline_seconds: of each call, which may wait for all attempts of a part and of the last request.
        forget_keys: called where the store says that they have expired; the file may then be sent again.
    """

    def __init__(
        self,
        store: Any,
        url: str,
        key: str,
        part_bytes: int,
        deadline_seconds: float,
        forget_keys: Callable[[], None],
    ) -> None:
        self._url, self.deadline_seconds, self._forget_keys = url, deadline_seconds, forget_keys
        self._writer = obstore.open_writer(store, key, buffer_size=part_bytes, max_concurrency=PARTS_AT_ONCE)

    def write(self, part: bytearray | memoryview) -> None:
        """Sends bytes, whose memory must stay as it is until the upload ends; waits while many are on their way."""
        self._once(lambda: self._writer.write(part))

    def close(self) -> None:
        self._once(self._writer.close)

    def _once(self, call: Callable[[], object]) -> None:
        """Calls obstore. After all of its attempts the file is not sent once more."""
        try:
            translated(call)
        except (ExpiredKeysError, UnknownKeysError):
            self._forget_keys()
            raise
        except ExhaustedError as error:
            raise retry.exhausted(f"write {self._url}", f"attempts that failed, the last with {error}") from None

    def discard(self) -> None:
        """Aborts the upload, if it has not ended. Does not wait for long: a call that was abandoned may hold it."""
        reason = InterruptedError("the file is given up")
        aborting = retry.run_in_thread(lambda: translated(lambda: self._writer.__exit__(type(reason), reason, None)))
        with suppress(TimeoutError):
            aborting.result(_GIVE_UP_SECONDS)


def _key(path: str) -> str:
    return path.partition("/")[2]
