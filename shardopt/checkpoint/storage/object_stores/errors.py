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

# The text ends with the store's answer, and has the key: only what obstore itself writes is looked for in it.
_STATUS = re.compile(r" - Server returned non-2xx status code: (\d{3})([^:]*): ?(.*)")
_TOOK = re.compile(r" in [\d.]+(?:ns|µs|ms|s)(?= - |, after |:|$)")  # which would make each error another one
_RETRIES = re.compile(r", after \d+ retries, max_retries: \d+, retry_timeout: ")
_METADATA_SERVER = re.compile(r"\bperforming [A-Z]+ http://(169\.254\.169\.254|metadata\.google\.internal)")
_PERMANENT = re.compile(
    r"Received redirect without LOCATION|Wanted range starting at|Received non-partial response|invalid path"
)
_CODE, _MESSAGE = re.compile(r"<Code>([^<]*)</Code>"), re.compile(r"<Message>([^<]*)</Message>")
_KIND, _CERTIFICATE = re.compile(r"\bkind: (\w+)"), re.compile(r"\bInvalidCertificate\(\s*(\w+)")
_DETAIL = re.compile(r'"([^"\n]*error|[^"\n]* [^"\n]*)"')
_TRANSIENT_STATUS = {408, 409, 425, 429}  # below 500
_EXPIRED = {"ExpiredToken", "TokenRefreshRequired"}
_UNKNOWN = {"InvalidAccessKeyId", "InvalidToken"}
_TRANSIENT_CODES = {"RequestTimeout", "RequestTimeTooSkewed"}
_ARCHIVED = "restore the object from its archive class, then try again"
_REMEDIES = {
    "InvalidObjectState": _ARCHIVED,
    "BlobArchived": _ARCHIVED,
    "BlobBeingRehydrated": "wait until the object is restored from its archive class, then try again",
    "BlobImmutableDueToPolicy": "wait until the container's policy lets objects go, or change the policy",
}
"""Of refusals that no later attempt and no other credentials change, by code."""
# The store lacks parts that it had taken, or has dropped the upload: the file may be sent again.
_LOST_PARTS = {"InvalidPart", "InvalidBlockList", "NoSuchUpload"}
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_MOST_CHARACTERS = 400  # of an error
_users: set[int] = set()  # the process that has used obstore


class ExpiredKeysError(ConnectionError):
    """The store says that the keys of a request have expired."""


class UnknownKeysError(PermissionError):
    """The store does not know the keys of a request, or not any more."""


class StateOfObjectError(PermissionError):
    """The store refuses a request for the state that the object is in.

    Args:
        remedy: what helps.
    """

    def __init__(self, said: str, remedy: str) -> None:
        super().__init__(errno.EPERM, said)
        self.remedy = remedy


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
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # which is no Exception
            raise
        known = OSError(errno.EINVAL, f"obstore failed: {error}"[:_MOST_CHARACTERS])
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
    whole, _, debug = str(error).partition("\n\nDebug source")
    text = _TOOK.sub("", " ".join(whole.split()))
    answer = _STATUS.search(text)
    if answer is None:
        return _without_answer(error, text, debug)
    status, body = int(answer[1]), answer[3]
    found = [each[1] for each in (_CODE.search(body), _MESSAGE.search(body)) if each]
    code = found[0] if _CODE.search(body) else ""
    # Of XML no more than that: S3 puts tokens into it.
    said = text[: answer.start(3)] + (" ".join(found) if "<" in body else body)
    said = said if len(said) <= _MOST_CHARACTERS else said[:_MOST_CHARACTERS] + "…"
    if code in _REMEDIES:
        _, begin, rest = said.partition("Error performing")  # obstore takes its status for that of a conflict
        return StateOfObjectError(begin + rest, _REMEDIES[code])
    if code in _EXPIRED:
        return ExpiredKeysError(said)
    if code in _LOST_PARTS:
        return ConnectionError(f"the store has lost parts of an upload: {said}")
    if code in _NO_BUCKET:
        return OSError(errno.EINVAL, f"there is no such bucket: {said}")
    if status == 404:
        return FileNotFoundError(errno.ENOENT, said)
    if isinstance(error, AlreadyExistsError) and creates:
        return FileExistsError(errno.EEXIST, said)
    if code in _UNKNOWN:
        return UnknownKeysError(errno.EACCES, said)
    if status in (401, 403) and code not in _TRANSIENT_CODES:
        return PermissionError(errno.EACCES, said)
    if status in (501, 507):
        return OSError(errno.ENOSYS if status == 501 else errno.ENOSPC, said)
    if status < 500 and status not in _TRANSIENT_STATUS and code not in _TRANSIENT_CODES:
        return OSError(errno.EINVAL, said)
    return ExhaustedError(said) if _RETRIES.search(text) else ConnectionError(said)


def _without_answer(error: Exception, text: str, debug: str) -> OSError:
    """Returns the error for a request that no server has answered, or whose answer obstore has refused."""
    certificate = _CERTIFICATE.search(debug)
    details = dict.fromkeys(
        _DETAIL.findall(debug) + ([f"invalid certificate: {certificate[1]}"] if certificate else [])
    )
    said = (text + f" ({', '.join(details)})" * bool(details))[:_MOST_CHARACTERS]
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, said)
    if isinstance(error, AlreadyExistsError):
        return FileExistsError(errno.EEXIST, said)
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or _METADATA_SERVER.search(text):
        return PermissionError(errno.EACCES, f"no valid credentials: {said}")
    if isinstance(error, NotSupportedError):
        return OSError(errno.ENOSYS, said)
    if isinstance(error, PreconditionError) or certificate or _PERMANENT.search(text):
        return OSError(errno.EINVAL, said)
    if _RETRIES.search(text):
        return ExhaustedError(said)
    kind = _KIND.search(debug)
    return TimeoutError(said) if kind and kind[1] == "Timeout" else ConnectionError(said)
