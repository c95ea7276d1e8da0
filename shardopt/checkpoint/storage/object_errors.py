"""Errors of obstore as those of the operating system, which tell whether another attempt may succeed.

obstore has one class for most of them, without the status of the answer, which its text has; and a process that was
forked from one that has used it would wait for ever for threads that it does not have.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from typing import TypeVar

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from shardopt.errors import CheckpointError, Problem

T = TypeVar("T")

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_RETRIES = re.compile(r"after \d+ retries")
_KIND = re.compile(r"\bkind: (\w+)")
_DETAIL = re.compile(r'"([^"\n]*error|[^"\n]* [^"\n]*)"')
_TRANSIENT_STATUS = {408, 425, 429}  # below 500
# The store lacks parts that it had taken, or has dropped the upload: the file may be sent again.
_LOST_PARTS = ("InvalidPart", "InvalidBlockList", "NoSuchUpload")
_PERMANENT = ("redirect", "Wanted range starting", "non-partial")
_METADATA_SERVERS = ("169.254.169.254", "metadata.google.internal")
_MOST_CHARACTERS = 400  # of a store's answer in an error
_users: set[int] = set()  # the process that has used obstore


class ExhaustedError(ConnectionError):
    """All of obstore's own attempts of a request have failed."""


def translated(call: Callable[[], T], creates: bool = False) -> T:
    """Returns what a call of obstore returns.

    Args:
        creates: whether it writes only where there is nothing; then a conflict says that there is something.

    Raises:
        OSError: of the kind that says what happened; ConnectionError and TimeoutError, if it may succeed again.
        CheckpointError: this process was forked from one that has used obstore.
    """
    _require_own_threads()
    try:
        return call()
    except BaseError as error:
        known = _os_error(error, creates)
    except OSError as error:
        known = _os_error(error, creates) if error.errno is None else error
    raise known from None  # its text has the whole answer, and may be long


def _require_own_threads() -> None:
    process = os.getpid()
    if not _users:
        _users.add(process)
    if process not in _users:
        problem = Problem(
            "this process",
            "forked from one that has used an object store, whose threads it lacks",
            "a process that was started anew, or forked before the first use",
            'start processes by torchrun, or with multiprocessing\'s "spawn" or "forkserver"',
        )
        raise CheckpointError("cannot use an object store in a forked process", [problem])


def _os_error(error: Exception, creates: bool) -> OSError:
    text, _, debug = str(error).partition("\n\nDebug source")
    text = " ".join(text.split())
    found = _STATUS.search(text)
    status = int(found[1]) if found else None
    if not found and (details := _DETAIL.findall(debug)):
        text += f" ({', '.join(dict.fromkeys(details))})"
    said = text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "…"
    if any(code in text for code in _LOST_PARTS):
        return ConnectionError(f"the store has lost parts of an upload: {said}")
    if isinstance(error, FileNotFoundError) or status == 404:
        return FileNotFoundError(errno.ENOENT, said)
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in (401, 403):
        return PermissionError(errno.EACCES, said)
    if isinstance(error, AlreadyExistsError) or status == 409:
        return FileExistsError(errno.EEXIST, said) if creates else ConnectionError(said)
    if isinstance(error, NotSupportedError) or status == 501:
        return OSError(errno.ENOSYS, said)
    if status == 507:
        return OSError(errno.ENOSPC, said)
    is_refusal = isinstance(error, PreconditionError) or any(words in text for words in _PERMANENT)
    if is_refusal or (status is not None and status < 500 and status not in _TRANSIENT_STATUS):
        return OSError(errno.EINVAL, said)
    if any(server in text for server in _METADATA_SERVERS):
        return PermissionError(errno.EACCES, f"no credentials were found: {said}")
    if _RETRIES.search(text):
        return ExhaustedError(said)
    kind = _KIND.search(debug)
    return TimeoutError(said) if kind and kind[1] == "Timeout" else ConnectionError(said)
