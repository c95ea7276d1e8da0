"""Records what one rank reads from a storage, and replays the answers for ranks that would read the same.

    recording    rank 0 asks the storage, and keeps each answer
    replaying    all ranks have these answers, and ask the storage only for the rest
    closed       nothing is kept, and all is asked

They are of the moments when a checkpoint is opened: what is asked later is about data, of which each rank has its own.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NoReturn, TypeVar

from shardopt.checkpoint.format.constants import MANIFEST_LIMIT_BYTES
from shardopt.checkpoint.storage.base import ReadInto, Span, Storage

T = TypeVar("T")
Question = tuple[Any, ...]
"""The place ("" or "..", the parent directory), the method of `Storage`, and its arguments."""

_LENGTH = struct.Struct("!Q")
_MOST_BYTES = MANIFEST_LIMIT_BYTES  # that are kept; others ask for what is beyond
_NOTHING = None  # in the place of an answer: there is no such file


class RecordedReads:
    """The answers of one storage, by question.

    Args:
        known: those that another rank has got; None to record them.
    """

    def __init__(self, known: dict[Question, Any] | None = None) -> None:
        self._known: dict[Question, Any] = {} if known is None else known
        self._state: Literal["recording", "replaying", "closed"] = "recording" if known is None else "replaying"
        self._nbytes = 0

    def answer(self, question: Question, ask: Callable[[], T]) -> T:
        """Returns the answer to a question, recorded or from the storage. Raises FileNotFoundError, as `ask`."""
        if self._state == "replaying" and question in self._known:
            known: T | None = self._known[question]
            if known is _NOTHING:
                raise FileNotFoundError(question[-1])
            return known
        if self._state != "recording":
            return ask()
        self._nbytes -= _bytes_of(self._known.pop(question, _NOTHING))  # of two answers the later one counts
        try:
            answer = ask()
        except FileNotFoundError:
            self._known[question] = _NOTHING
            raise
        if self._nbytes + _bytes_of(answer) <= _MOST_BYTES:
            self._nbytes += _bytes_of(answer)
            self._known[question] = answer
        return answer

    def replay(self) -> None:
        """Stops recording, and answers only from the record."""
        self._state = "replaying"

    def close(self) -> None:
        """Drops all answers, and asks the storage from now on."""
        self._state = "closed"
        self._known = {}

    def pack(self) -> bytes:
        """Encodes the record, compressed."""
        bodies = [answer for answer in self._known.values() if isinstance(answer, bytes)]
        table = [
            [question, len(answer), None] if isinstance(answer, bytes) else [question, None, answer]
            for question, answer in self._known.items()
        ]
        head = json.dumps(table, separators=(",", ":")).encode()
        packer = zlib.compressobj(1)  # in steps, for no second copy of all of it
        packed = [packer.compress(part) for part in (_LENGTH.pack(len(head)), head, *bodies)]
        return b"".join([*packed, packer.flush()])

    @classmethod
    def unpack(cls, data: bytes) -> RecordedReads:
        """Decodes what `pack` encoded, for replay."""
        raw = memoryview(zlib.decompress(data))
        (length,) = _LENGTH.unpack_from(raw)
        at = _LENGTH.size + length
        known: dict[Question, Any] = {}
        for question, nbytes, answer in json.loads(bytes(raw[_LENGTH.size : at])):
            if nbytes is not None:
                answer, at = bytes(raw[at : at + nbytes]), at + nbytes
            known[tuple(question)] = answer
        return cls(known)


def _bytes_of(answer: Any) -> int:
    return len(answer) if isinstance(answer, bytes) else sum(map(len, answer)) if isinstance(answer, list) else 0


class ReplayStorage(Storage):
    """A storage that records or replays its answers, for reading only. Of data nothing is recorded.

    Args:
        place: "..", where it is the directory above that of the checkpoint.
    """

    def __init__(self, storage: Storage, answers: RecordedReads, place: str = "") -> None:
        self._storage, self._answers, self._place = storage, answers, place
        self.url, self.is_remote = storage.url, storage.is_remote

    def _answer(self, ask: Callable[[], T], *question: Any) -> T:
        return self._answers.answer((self._place, *question), ask)

    def names(self) -> list[str]:
        return self._answer(lambda: self._storage.names(), "names")

    def size(self, name: str) -> int:
        return self._answer(lambda: self._storage.size(name), "size", name)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        return self._answer(lambda: self._storage.read(name, begin, end), "read", begin, end, name)

    def read_rest(self, name: str, begin: int, size: int) -> bytes:
        return self._answer(lambda: self._storage.read_rest(name, begin, size), "read_rest", begin, size, name)

    def as_file(self) -> tuple[Storage, str] | None:
        def name_of_file() -> str:
            found = self._storage.as_file()
            return "" if found is None else found[1]

        name, parent = self._answer(name_of_file, "as_file"), self.parent()
        return (ReplayStorage(parent[0], self._answers, ".."), name) if name and parent is not None else None

    def parent(self) -> tuple[Storage, str] | None:
        return self._storage.parent()

    def child(self, name: str) -> Storage:
        return self._storage.child(name)

    def opened(self, name: str) -> AbstractContextManager[ReadInto]:
        return self._storage.opened(name)

    def read_into(self, name: str, spans: Sequence[Span]) -> None:
        self._storage.read_into(name, spans)

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(f"{self.url} is only read")

    make = write = publish = publish_new = remove = remove_if_empty = _refuse
