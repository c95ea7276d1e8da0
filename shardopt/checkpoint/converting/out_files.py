"""The files of a conversion: their contents and writers; writes them, or finds that they are already whole."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import xxhash

from shardopt.checkpoint.converting.choosing import ChosenTensor
from shardopt.checkpoint.converting.streaming import Part, PartReader
from shardopt.checkpoint.converting.zip_bytes import Take
from shardopt.checkpoint.format.constants import JOURNAL_NAME
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.storage import Span, Storage

_RECEIPT_SUFFIX = ".converted"
_READ_BYTES = 4 << 20

T = TypeVar("T")
AddBytes = Callable[[int], object]


class OutFile(ABC):
    """A file to write.

    Args:
        name: in the destination.
        parts: boxes of tensors, in the order of their bytes; the boxes of one tensor follow one another.
        begins: the offset in the file of each part.
        nbytes: of the whole file.
        known: all that the file has beside its parts, as bytes or a digest of them: with the parts, what it depends on.
    """

    def __init__(self, name: str, parts: Sequence[Part], begins: Sequence[int], nbytes: int, known: bytes) -> None:
        self.name, self.parts, self.begins, self.nbytes = name, parts, begins, nbytes
        self._known = known

    @abstractmethod
    def body(self, take: Take) -> Iterator[memoryview]:
        """Yields all bytes; `take` yields those of the next part."""

    def note(self) -> Any:
        """Returns, as JSON, what the commit needs to know of a written file."""
        return None

    def fingerprint(self, source: str) -> str:
        """Returns a text that is equal if a source of this digest gives equal bytes."""
        parts = [(part.key, part.stored, part.dtype.name, part.box.offsets, part.box.sizes) for part in self.parts]
        text = json.dumps([source, self.name, self.nbytes, parts]).encode()
        return xxhash.xxh3_128_hexdigest(text + self._known)


@dataclass(frozen=True, slots=True)
class Written:
    """A written file: the xxh3-128 of all its bytes, its note, and the digests of the tensors in it."""

    name: str
    nbytes: int
    digest: str
    note: Any = None
    digests: dict[str, str] = field(default_factory=dict)
    reused: bool = False


class _Body:
    """All bytes of a file; can be iterated again if storage has lost the file."""

    def __init__(
        self, file: OutFile, reader: CheckpointReader, shapes: dict[str, tuple[int, ...]], progress: AddBytes
    ) -> None:
        self._file, self._reader, self._shapes, self._progress = file, reader, shapes, progress
        self.nbytes = file.nbytes
        self.digest, self.digests = "", dict[str, str]()

    def __iter__(self) -> Iterator[memoryview]:
        parts, whole = PartReader(self._reader, self._file.parts, self._shapes), xxhash.xxh3_128()
        for chunk in self._file.body(parts.take):
            whole.update(chunk)
            yield chunk
            self._progress(chunk.nbytes)
        self.digest, self.digests = whole.hexdigest(), parts.digests()


def write_file(
    storage: Storage,
    file: OutFile,
    reader: CheckpointReader,
    shapes: dict[str, tuple[int, ...]],
    progress: AddBytes = lambda nbytes: None,
) -> Written:
    """Writes a file, durable on return; it never has its name while it is incomplete.

    Args:
        shapes: of tensors, by key.
        progress: called with the bytes of each piece.
    """
    body = _Body(file, reader, shapes, progress)
    nbytes = storage.write_atomically(file.name, body)
    return Written(file.name, nbytes, body.digest, file.note(), body.digests)


def keep_receipt(storage: Storage, written: Written, fingerprint: str) -> None:
    """Records that a file is whole, for a conversion that resumes after this one was killed."""
    text = json.dumps({**asdict(written), "fingerprint": fingerprint})
    storage.publish(receipt_name(written.name), text.encode())


def find_written(
    storage: Storage,
    file: OutFile,
    reader: CheckpointReader,
    shapes: dict[str, tuple[int, ...]],
    progress: AddBytes,
) -> Written | None:
    """Finds a file from an earlier conversion and reads all of it; returns it if it equals the planned one.

    Other libraries' formats do not tell whether two sources have equal bytes: of such the source is read, too.
    """
    name, nbytes, fingerprint = file.name, file.nbytes, file.fingerprint(reader.digest)
    try:
        receipt = json.loads(storage.read(receipt_name(name)))
        written = Written(**{**{k: v for k, v in receipt.items() if k != "fingerprint"}, "reused": True})
        if receipt["fingerprint"] != fingerprint or storage.size(name) != nbytes:
            return None
    except (FileNotFoundError, ValueError, TypeError, LookupError, AttributeError):
        return None
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(_READ_BYTES, nbytes)))
    with storage.opened(name) as read:
        for begin in range(0, nbytes, _READ_BYTES):
            chunk = buffer[: min(_READ_BYTES, nbytes - begin)]
            read([Span(begin, chunk)])
            digest.update(chunk)
    if digest.hexdigest() != written.digest:
        return None
    if reader.source.is_foreign:
        body = _Body(file, reader, shapes, lambda nbytes: None)
        for _ in body:
            pass
        if body.digest != written.digest:
            return None
    progress(nbytes)
    return written


def receipt_name(name: str) -> str:
    """Returns the name of a file's receipt, which stands beside the file until the conversion is committed."""
    return f".{name}{_RECEIPT_SUFFIX}"


def begin_journal(storage: Storage, names: Sequence[str]) -> None:
    """Records the names of the files to be written, so that leftovers can be recognised."""
    storage.publish(JOURNAL_NAME, json.dumps([*names]).encode())


def files_of_earlier(storage: Storage) -> list[str]:
    """Returns the names of the files that an uncommitted conversion to this place planned to write."""
    try:
        names = json.loads(storage.read(JOURNAL_NAME))
    except (FileNotFoundError, ValueError):
        return []
    return [name for name in names if isinstance(name, str) and "/" not in name] if isinstance(names, list) else []


def remove_notes(storage: Storage) -> None:
    """Removes journal and receipts of a committed conversion. They are of no more use, but harmless."""
    with suppress(OSError):
        for name in [*map(receipt_name, files_of_earlier(storage)), JOURNAL_NAME]:
            storage.remove(name)


def pack(tensors: Sequence[ChosenTensor], most_bytes: int) -> list[list[ChosenTensor]]:
    """Packs tensors, in order, into groups of about equal bytes, at most `most_bytes` unless one tensor has more."""
    total = sum(map(nbytes_of, tensors))
    count = max(-(-total // most_bytes), 1)
    groups: list[list[ChosenTensor]] = [[]]
    used = done = number = 0
    for tensor in tensors:
        nbytes = nbytes_of(tensor)
        share = min((done + nbytes // 2) * count // max(total, 1), count - 1)
        if groups[-1] and (share > number or used + nbytes > most_bytes):
            groups.append([])
            used = 0
        groups[-1].append(tensor)
        number, used, done = max(share, number), used + nbytes, done + nbytes
    return groups


def nbytes_of(tensor: ChosenTensor) -> int:
    """Returns the bytes of a whole tensor as written."""
    return sum(box.numel for box in tensor.boxes) * tensor.dtype.itemsize


def deal(items: Sequence[T], nbytes_of_item: Callable[[T], int], workers: int) -> list[list[T]]:
    """Deals items out to workers: the largest first, each to the worker with the fewest bytes so far."""
    load, dealt = [0] * workers, [list[T]() for _ in range(workers)]
    for item in sorted(items, key=nbytes_of_item, reverse=True):
        worker = load.index(min(load))
        load[worker] += nbytes_of_item(item)
        dealt[worker].append(item)
    return dealt
