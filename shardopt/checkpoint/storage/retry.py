"""Retries requests to a store that may be slow, lose them, or fail for a while; each has a deadline.

A transient error (a request that timed out, a connection that broke, a server in trouble) leads to another attempt,
after a pause that doubles; a permanent one (no such file, no permission, no space) is raised at once. When the attempts
are used up the error names the URL, the operation and a remedy. Stores have retries of their own below these, which
know more of the server's answer; these here are for errors that get through, and for requests never answered.
"""

from __future__ import annotations

import errno
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fsspec import AbstractFileSystem  # type: ignore[import-untyped]  # has no type hints
from fsspec.asyn import sync  # type: ignore[import-untyped]  # as above
from fsspec.implementations.dirfs import DirFileSystem  # type: ignore[import-untyped]  # as above

from shardopt.errors import CheckpointError, Problem, ShardoptError
from shardopt.redaction import without_secrets
from shardopt.world import Future, world

T = TypeVar("T")

_PERMANENT = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)
_PERMANENT_ERRNOS = {
    errno.EDQUOT,
    errno.EINVAL,  # s3fs makes it of "400 Bad Request"
    errno.EMSGSIZE,
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.ENOSYS,
    errno.EROFS,
}
_TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504}
# Of clients that are not all installed, and whose errors are no OSErrors.
_TRANSIENT_NAMES = {
    "ClientConnectionError",  # aiohttp
    "ClientPayloadError",
    "HTTPClientError",  # botocore
    "IncompleteRead",  # http.client, urllib3
    "ProtocolError",
    "ResponseParserError",
    "SSHException",  # paramiko
    "TransportError",  # google.auth
}


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The number of attempts per request, the pauses between them, and their deadlines.

    Args:
        attempts: of a request, before it is given up.
        pause_seconds: before the second attempt; each further pause is twice as long, up to `longest_pause_seconds`.
        request_seconds: after which an unanswered request is abandoned, and made again.
        commit_seconds: in which a commit has up to three times as many attempts: all of a save would be lost with it.
    """

    attempts: int = 8
    pause_seconds: float = 0.25
    longest_pause_seconds: float = 15.0
    request_seconds: float = 60.0
    commit_seconds: float = 180.0


RETRY_POLICY = RetryPolicy()


def is_transient(error: Exception) -> bool:
    """Whether a request that failed with this error may succeed at another attempt."""
    status = getattr(error, "status", None) or getattr(error, "code", None)
    if isinstance(error, ShardoptError | NotImplementedError):
        return False
    if isinstance(status, int) and status >= 400:
        return status in _TRANSIENT_STATUS
    if isinstance(error, OSError):
        return not isinstance(error, _PERMANENT) and error.errno not in _PERMANENT_ERRNOS
    return not _TRANSIENT_NAMES.isdisjoint(kind.__name__ for kind in type(error).__mro__)


def run_in_thread(function: Callable[[], T]) -> Future[T]:
    """Runs a function in a daemon thread of its own, which the process does not wait for at exit."""
    future: Future[T] = world().future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)  # nobody joins the thread; whoever asks for the result gets it

    world().thread(run, "shardopt-request", daemon=True).start()
    return future


class Requests:
    """Requests to one file system of fsspec; thread-safe."""

    def __init__(self, fs: Any, policy: RetryPolicy | None = None) -> None:
        self._fs, self._policy = fs, policy or RETRY_POLICY

    def call(self, doing: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the file system, again after transient errors; returns its result.

        Args:
            doing: for error messages, with the URL ("read s3://bucket/a").

        Raises:
            OSError: a permanent one, as the file system raised it.
            CheckpointError: the attempts are used up, or the file system raised something else.
        """
        return self.repeat(doing, lambda: self.once(method, *args, **kwargs))

    def once(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Makes one request under its deadline. Raises TimeoutError, or the file system's error."""
        seconds = self._policy.request_seconds
        coroutine = getattr(self._fs, f"_{method}", None) if _is_async(self._fs) else None
        if inspect.iscoroutinefunction(coroutine):
            try:
                return sync(self._fs.loop, coroutine, *args, timeout=seconds, **kwargs)
            except TimeoutError as error:
                # Either the deadline, which has no message of its own, or a shorter one of the client.
                raise TimeoutError(str(error) or f"no answer within {seconds:g} s") from error
        function = getattr(self._fs, method)
        if method == "cat_ranges" and isinstance(self._fs, DirFileSystem) and method in vars(self._fs):
            # Before fsspec 2026.9 `dir://` has none of its own, but one that asks what it wraps for coroutines.
            function = partial(AbstractFileSystem.cat_ranges, self._fs)
        return self.within_deadline(lambda: function(*args, **kwargs))

    def within_deadline(self, function: Callable[[], T], seconds: float | None = None) -> T:
        """Returns the result of a blocking call; abandons one that takes too long in its thread.

        Args:
            seconds: it may take; None for those of a request.

        Raises:
            TimeoutError: it took too long.
        """
        seconds = self._policy.request_seconds if seconds is None else seconds
        try:
            return run_in_thread(function).result(seconds)
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"no answer within {seconds:g} s") from error

    def repeat(self, doing: str, function: Callable[[], T], commits: bool = False) -> T:
        """Returns the result of `function`, called again after transient errors; for longer if it `commits`."""
        begin, pause, most = world().monotonic(), self._policy.pause_seconds, self._policy.attempts
        for attempt in range(1, 3 * most + 1):
            try:
                return function()
            except Exception as error:
                if not is_transient(error):
                    raise _permanent_error(doing, error) from without_secrets(error)
                seconds = world().monotonic() - begin
                is_over = attempt >= most and (not commits or seconds >= self._policy.commit_seconds)
                if is_over or attempt == 3 * most or not world().main_thread_lives():
                    failures = f"{attempt} attempts within {seconds:.1f} s, the last of which failed with"
                    raise exhausted(doing, f"{failures} {_describe(error)}") from without_secrets(error)
            world().sleep(pause * world().jitter(0.5, 1.0))  # so that many ranks do not come back at one time
            if attempt < most:
                pause = min(2 * pause, self._policy.longest_pause_seconds)
        raise AssertionError("no attempt was made")


def _is_async(fs: Any) -> bool:
    """Whether a file system has coroutines, which can be cancelled; for a wrapper, whether the wrapped one has."""
    wrapped = getattr(fs, "fs", None)
    return bool(fs.async_impl) and (not isinstance(wrapped, AbstractFileSystem) or _is_async(wrapped))


def _permanent_error(doing: str, error: Exception) -> Exception:
    if isinstance(error, ShardoptError | FileNotFoundError | FileExistsError):
        return error
    remedy = "look at the store's answer; see docs/remote.md for what is expected of a store"
    if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
        remedy = "give credentials that may list, read, write and delete there (docs/remote.md)"
    remedy = getattr(error, "remedy", remedy)
    problem = Problem(doing, _describe(error), "a request that the store grants", remedy)
    return CheckpointError(f"cannot {doing}", [problem])


def exhausted(doing: str, failures: str) -> CheckpointError:
    """Returns the error for a request that no attempt has had an answer to."""
    remedy = "see whether the store can be reached from this host and is well, then try again"
    if not world().main_thread_lives():  # clients have pools of threads, which take no more work by then
        remedy = "wait for background work before the program ends: it cannot be finished after that"
    return CheckpointError(f"cannot {doing}", [Problem(doing, failures, "an answer", remedy)])


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
