"""How ranks of a job find each other: through the job's store, which may still have what an older job left there.

session                   the last session that a rank 0 has begun: its name, its key, and where it listens
<name>/leader/<rank>      where a leader of that session listens; rank 0 has taken it by then
<name>/broken/<session>   the error by which a session ended

Once all ranks have an answer nothing stands under `session`, and the leaders' keys are deleted. Until then nothing says
that a session is of this job: whoever is refused, or cut off, reads `session` again.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

from shardopt.ranks.connections.frames import Kind, Message
from shardopt.ranks.connections.link import Ended, Link
from shardopt.ranks.connections.proof import Connecting, Meeting, Refused
from shardopt.world import READ, WRITE, Store, world

T = TypeVar("T")

PAUSE_SECONDS = (0.002, 1.0)
"""Between two looks at the store: the first, and the longest; each is as long as a fourth of what was waited."""
CONNECT_SECONDS = (0.5, 5.0)
"""For a host to take a connection: the shortest, and the longest."""
_NOTHING = "-"  # what no entry is: the store answers it where there is no such key, and it stands where one was
_CHALLENGE_SECONDS = 10.0
_LOOK_SECONDS = 1.0  # between two looks whether the session of who does not answer is still the last one


@dataclass(frozen=True, slots=True)
class Entry:
    """What stands in the store of a session, or of a leader.

    Args:
        name, key: of the session, in hexadecimal digits.
        at: hosts and ports, in the order in which they are tried.
    """

    name: str
    key: str
    at: tuple[tuple[str, int], ...]


def publish(store: Store, key: str, entry: Entry) -> None:
    """Writes an entry."""
    store.set(key, _text(entry))


def _text(entry: Entry) -> str:
    return json.dumps([entry.name, entry.key, entry.at])


def read(store: Store, key: str) -> Entry | None:
    """Reads an entry; None where there is none, or one that another version of this package wrote."""
    # By one request that does not wait: an older job may delete the key between two, and `get` would wait for it.
    text = store.compare_set(key, _NOTHING, _NOTHING)
    if text.decode() == _NOTHING:
        return None
    try:
        name, secret, at = json.loads(text)
        return Entry(name, secret, tuple((host, port) for host, port in at))
    except (ValueError, TypeError):
        return None


def leader_key(name: str, rank: int) -> str:
    """Returns where the entry of a leader stands."""
    return f"{name}/leader/{rank}"


def record(store: Store, name: str, session: bytes, error: dict[str, Any]) -> None:
    """Writes by which error a session ended, for ranks that cannot be told."""
    store.set(f"{name}/broken/{session.hex()}", json.dumps(error))


def read_record(store: Store, name: str, session: bytes) -> dict[str, Any] | None:
    """Reads by which error a session ended; None where none is known."""
    key = f"{name}/broken/{session.hex()}"
    error: dict[str, Any] | None = json.loads(store.get(key)) if store.check([key]) else None
    return error


def connect(
    store: Store | None,
    entry: Entry,
    session: Entry,
    below: int,
    above: int,
    goes_on: Callable[[], bool],
    most_seconds: float,
) -> tuple[Link, list[Message]] | None:
    """Connects with a rank that listens, and proves to each other who both are.

    Who listens may be of an older job, and stopped or cut off: its system takes the connection, and nobody answers. So
    whoever waits for an answer looks now and then whether a later session stands in the store.

    Args:
        store: where a later session may stand; None once this one is known to be the job's.
        goes_on: whether there is still reason to wait.
        most_seconds: for each of its addresses to take the connection.

    Returns:
        The connection, and what has come after the welcome; None where there is none to be had.
    """

    def is_last() -> bool:
        if store is None:
            return True
        last = read(store, "session")
        return last is not None and last.name == session.name

    for host, port in entry.at:
        if not goes_on():
            return None
        try:
            link = Link(world().connect(host, port, most_seconds), above)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # this rank's own trouble: nobody else is to be named for it
            continue
        try:
            return link, _prove(link, Meeting(session.name, session.key, below, above), goes_on, is_last)
        except (Ended, Refused):
            link.close()
        except BaseException:
            link.close()
            raise
    return None


def _prove(link: Link, meeting: Meeting, goes_on: Callable[[], bool], is_last: Callable[[], bool]) -> list[Message]:
    side = Connecting(meeting)
    came: list[Message] = []
    with closing(world().selector()) as selector:
        selector.register(link.socket, READ)

        def say(message: Message) -> None:
            link.put_message(message)
            link.flush()
            while not link.is_empty:  # so little always has room; but nothing is promised
                selector.modify(link.socket, WRITE)
                selector.select(1.0)
                selector.modify(link.socket, READ)
                link.flush()

        def hear(most_seconds: float) -> Message:
            end = world().monotonic() + most_seconds
            while not came:
                left = end - world().monotonic()
                if left <= 0 or not goes_on():
                    raise Refused("no answer")
                if selector.select(min(left, _LOOK_SECONDS)):
                    came.extend(link.receive())
                elif not is_last():
                    raise Refused("a later session has begun")
            return came.pop(0)

        say(side.hello())
        proof = side.answer(hear(_CHALLENGE_SECONDS))
        link.trust()
        say(proof)
        # Whoever listens notes this rank as soon as it reads the proof, and takes no second one: so this is waited
        # for as long as the connection stands, however busy the other process is.
        if hear(float("inf")).kind != Kind.WELCOME:
            raise Refused("no welcome")
    return came


def within(seconds: float, question: Callable[[], T]) -> T:
    """Asks the store in a thread of its own: a client of a store that has frozen may wait without an end.

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
    """Takes out of the store what is needed no more once all have joined.

    Of `session` only what this session has put there: another one, of a job that has begun since, may have put its own,
    and nobody would find it any more. No store deletes a key if it has a value, so the key stays, with nothing in it.

    Args:
        keys: of this session alone.
        is_last: whether no other session will ever be under this key, so that it can be deleted.
    """
    if is_last:
        store.delete_key("session")
    else:
        store.compare_set("session", _text(session), _NOTHING)
    for key in keys:
        store.delete_key(key)
