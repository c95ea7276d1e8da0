"""Lets ranks of a job find each other through the job's store, which may still hold an older job's entries.

session                   the last session that a rank 0 has begun: its name, its key, and where it listens
<name>/leader/<rank>      where a leader of that session listens; rank 0 has taken it by then
<name>/unreached/<rank>   why a rank does not reach the one that it is to be connected with, while it does not
<name>/broken/<session>   the error by which a session ended

Where the store is a file, which everybody may read, the key stands beside it in one that is its owner's alone.

Once all ranks have an answer nothing stands under `session`, and the leaders' keys are deleted. Until then nothing says
that a session is of this job: whoever is refused, or cut off, reads `session` again.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from shardopt.runtime.stores import Store
from shardopt.world import world

T = TypeVar("T")

PAUSE_SECONDS = (0.002, 1.0)
"""The shortest and the longest pause between two looks at the store; each is a fourth of the time waited."""
STORE_SECONDS = 5.0
"""The time limit of requests to the store that are made only after a failure."""
_NOTHING = "-"  # no entry is this: the store answers it where there is no such key, and it stands where one was


@dataclass(frozen=True, slots=True)
class Entry:
    """The entry of a session, or of a leader, in the store.

    Args:
        name, key: of the session, in hexadecimal digits; a leader's entry has no key.
        at: hosts and ports, in the order in which they are tried.
    """

    name: str
    key: str = field(repr=False)
    at: tuple[tuple[str, int], ...]


def publish(store: Store, key: str, entry: Entry) -> None:
    """Writes an entry. Raises OSError if its key cannot be kept secret."""
    if entry.key:
        keep_secret(store, entry.name, entry.key)
    store.set(key, _text(store, entry))


def _text(store: Store, entry: Entry) -> str:
    return json.dumps([entry.name, "" if world().store_file(store) is not None else entry.key, entry.at])


def read(store: Store, key: str) -> Entry | None:
    """Reads an entry; None if there is none, or if another version of this package wrote it.

    Raises OSError: its key is not for this user.
    """
    # By one request that does not wait: an older job may delete the key between two, and `get` would wait for it.
    text = store.compare_set(key, _NOTHING, _NOTHING)
    if text.decode() == _NOTHING:
        return None
    try:
        name, secret, at = json.loads(text)
        entry = Entry(name, secret, tuple((host, port) for host, port in at))
    except (ValueError, TypeError):
        return None
    if key != "session" or entry.key:
        return entry
    secret = read_secret(store, entry.name)
    return None if secret is None else replace(entry, key=secret)


def leader_key(name: str, rank: int) -> str:
    """Returns the key of a leader's entry."""
    return f"{name}/leader/{rank}"


def record(store: Store, name: str, session: bytes, error: dict[str, Any]) -> None:
    """Writes the error that ended a session, for ranks that no message reaches."""
    store.set(f"{name}/broken/{session.hex()}", json.dumps(error))


def read_record(store: Store, name: str, session: bytes) -> dict[str, Any] | None:
    """Reads the error that ended a session; None if none is known."""
    key = f"{name}/broken/{session.hex()}"
    error: dict[str, Any] | None = json.loads(store.get(key)) if store.check([key]) else None
    return error


def unreached_key(name: str, rank: int) -> str:
    """Returns the key under which a rank writes why it cannot reach the rank above it."""
    return f"{name}/unreached/{rank}"


def within(seconds: float, question: Callable[[], T]) -> T:
    """Asks the store in a thread of its own, as a frozen store may block its client forever.

    Raises:
        TimeoutError: it did not answer in time.
    """
    answers: list[T] = []
    errors: list[BaseException] = []
    done = world().event()

    def ask() -> None:
        try:
            answers.append(question())
        except BaseException as error:
            errors.append(error)
        done.set()

    world().thread(ask, "shardopt-store", daemon=True).start()
    if not done.wait(seconds):
        raise TimeoutError(f"the job's store did not answer for {seconds:g} s")
    if errors:
        raise errors[0]
    return answers[0]


def withdraw(store: Store, keys: Sequence[str], session: Entry, is_last: bool) -> None:
    """Removes from the store what is not needed after all ranks have joined.

    Of `session` only what this session has put there: another one, of a job that has begun since, may have put its own,
    and nobody would find it any more. No store deletes a key if it has a value, so the key stays, with nothing in it.

    Args:
        keys: of this session alone.
        is_last: whether no other session will ever be under this key, so that it can be deleted.
    """
    if is_last:
        store.delete_key("session")
    else:
        store.compare_set("session", _text(store, session), _NOTHING)
    forget_secret(store, session.name)
    for key in keys:
        store.delete_key(key)


def keep_secret(store: Store, name: str, key: str) -> None:
    """Writes the key of a new session beside a store that is a file, readable for only this user.

    Raises:
        OSError: that cannot be done there.
    """
    path = _path(store, name)
    if path is None:
        return
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "w") as file:
        if stat.S_IMODE(os.fstat(fd).st_mode) & 0o077:
            os.unlink(path)
            raise PermissionError(
                f"{path}: this file system lets others read what is made for its owner alone; use a store that is "
                "no file there (init_method env:// or tcp://)"
            )
        file.write(key)


def read_secret(store: Store, name: str) -> str | None:
    """Reads the key of a session; None if the session has ended. Raises OSError: it is another user's."""
    path = _path(store, name)
    if path is None:
        return ""
    try:
        with open(path) as file:
            return file.read(1 << 10)
    except FileNotFoundError:
        return None


def forget_secret(store: Store, name: str) -> None:
    """Removes the key of a session that all have joined, if it is beside the store."""
    path = _path(store, name)
    if path is not None:
        with suppress(OSError):
            os.unlink(path)


def _path(store: Store, name: str) -> str | None:
    file = world().store_file(store)
    return None if file is None else f"{file}.{name}.key"
