"""Deltas: the words of a stored box that have changed since an earlier save, as positions and values. No I/O, no torch.

    word    an element's bytes as an unsigned integer; a byte where safetensors has no name for the dtype
    skip    the unchanged words before a changed one, since the changed one before it or its segment's begin; unsigned
            LEB128 of at most 3 bytes

A delta is two entries of a data file:

    __delta_index__.KEY    before, after, counts, lengths: see `DeltaIndex`
    __delta__.KEY          the changed words of all segments, then their skips

Segments are independent of one another, so that any of them can be decoded alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardopt.checkpoint.format.constants import DTYPES, SEGMENT_BYTES, damaged, segment_count

_MOST_SKIP_BYTES = 3  # 21 bits: a segment has at most 2^18 words
_NUMBERS = np.dtype("<u4")

Array = NDArray[Any]


_WORD_BYTES = {each.safetensors: each.itemsize for each in DTYPES.values() if each.safetensors}


def word_bytes(dtype: str) -> int:
    """Returns the bytes of a word, from the dtype of a box in its data file."""
    return _WORD_BYTES.get(dtype, 1)


class DeltaIndex(NamedTuple):
    """The index of a delta, with an entry for each segment of its box.

    Args:
        before: XXH3-64 of the checksums of the box that the delta belongs on.
        after: the checksums of all segments with the delta applied.
        counts: the changed words of each segment.
        lengths: the bytes of the skips of each segment.
    """

    before: bytes
    after: bytes
    counts: Array
    lengths: Array

    def encode(self) -> bytes:
        """Returns the bytes of the index's entry."""
        return (
            self.before + self.after + self.counts.astype(_NUMBERS).tobytes() + self.lengths.astype(_NUMBERS).tobytes()
        )

    def nbytes(self, word: int) -> int:
        """Returns the bytes of the delta's other entry: words and skips."""
        return int(self.counts.sum()) * word + int(self.lengths.sum())

    def part(self, first: int, last: int, word: int) -> tuple[DeltaIndex, tuple[tuple[int, int], tuple[int, int]]]:
        """Returns the index of some segments, and where their words and their skips begin and end in the other entry.

        The index of a part is of no use but to decode it: its `before` and `after` are those of the whole.
        """
        words, skips = ((int(each[:first].sum()), int(each[:last].sum())) for each in (self.counts, self.lengths))
        skips_at = int(self.counts.sum()) * word
        part = self._replace(counts=self.counts[first:last], lengths=self.lengths[first:last])
        return part, ((words[0] * word, words[1] * word), (skips_at + skips[0], skips_at + skips[1]))


def index_bytes(nbytes: int) -> int:
    """Returns the bytes of the index of a box of so many bytes."""
    return 8 + 16 * segment_count(nbytes)


def digest_of(checksums: bytes) -> bytes:
    """Returns the `before` of a delta, from the checksums of a box."""
    return xxhash.xxh3_64_digest(checksums)


def decode_index(data: bytes | bytearray | memoryview, nbytes: int, word: int, where: str) -> DeltaIndex:
    """Decodes an index from untrusted bytes.

    Args:
        nbytes: of the box.
        word: the bytes of a word.

    Raises:
        CorruptionError: it is not that of a box of this size.
    """
    segments = segment_count(nbytes)
    if len(data) != index_bytes(nbytes):
        raise damaged(where, f"an index of {len(data)} bytes for {segments} segments")
    sums, numbers = 8 + 8 * segments, np.frombuffer(data, _NUMBERS, offset=8 + 8 * segments).astype(np.int64)
    counts, lengths = numbers[:segments], numbers[segments:]
    words = np.full(segments, SEGMENT_BYTES // word)
    words[-1:] = (nbytes - (segments - 1) * SEGMENT_BYTES) // word
    if (counts > words).any() or (lengths < counts).any() or (lengths > _MOST_SKIP_BYTES * counts).any():
        raise damaged(where, "more changed words or skips than a segment can have")
    return DeltaIndex(bytes(data[:8]), bytes(data[8:sums]), counts, lengths)


class Delta:
    """Changed words of a box.

    Args:
        body: the bytes of the entry with words and skips, as many as the index says.
        nbytes: of the box.
        word: the bytes of a word.
        where: the place of the delta, for errors.
    """

    def __init__(self, index: DeltaIndex, body: bytes | bytearray | memoryview, nbytes: int, word: int, where: str):
        self.index, self._nbytes, self._word, self._where = index, nbytes, word, where
        self._words_at, self._skips_at = (
            np.concatenate(([0], np.cumsum(each))) for each in (index.counts, index.lengths)
        )
        count = int(self._words_at[-1])
        if len(body) != index.nbytes(word):
            raise damaged(where, f"{len(body)} bytes where its index has {index.nbytes(word)}")
        self._values = np.frombuffer(body, f"<u{word}", count)
        self._skips = np.frombuffer(body, np.uint8, offset=count * word)

    def changes(self, begin: int, end: int) -> tuple[Array, Array]:
        """Returns positions, ascending, and values of the changed words between two offsets in the box, in bytes.

        Raises:
            CorruptionError: skips that are none, or lead out of their segment.
        """
        first, last = begin // SEGMENT_BYTES, segment_count(end)
        words_at, skips_at = self._words_at[first : last + 1], self._skips_at[first : last + 1]
        values = self._values[words_at[0] : words_at[-1]]
        counts = np.diff(words_at)
        steps = self._decode(self._skips[skips_at[0] : skips_at[-1]], words_at - words_at[0], skips_at - skips_at[0])
        through = np.cumsum(steps)  # from the first segment's begin, as if all followed one another
        used = np.flatnonzero(counts)
        last_words = through[words_at[used + 1] - words_at[0] - 1]
        bases = np.concatenate(([0], last_words[:-1])) if len(used) else last_words
        per_segment = SEGMENT_BYTES // self._word
        sizes = np.minimum(per_segment, self._nbytes // self._word - (first + used) * per_segment)
        if (last_words - bases > sizes).any():
            raise damaged(self._where, "a position outside its segment")
        positions = through + np.repeat((first + used) * per_segment - bases - 1, counts[used])
        if begin % SEGMENT_BYTES or end % SEGMENT_BYTES:
            inside = slice(*np.searchsorted(positions, (begin // self._word, end // self._word)))
            return positions[inside], values[inside]
        return positions, values

    def apply(self, begin: int, memory: memoryview) -> None:
        """Writes the changed words into memory that has the bytes of the box from an offset on; raises as `changes`."""
        positions, values = self.changes(begin, begin + memory.nbytes)
        if len(positions):
            np.frombuffer(memory, values.dtype)[positions - begin // self._word] = values

    def _decode(self, codes: Array, words_at: Array, skips_at: Array) -> Array:
        """Returns each skip and 1; checks that every segment has as many as it should."""
        ends = np.flatnonzero(codes < 0x80)
        used = words_at[1:] > words_at[:-1]
        if len(ends) != words_at[-1] or (ends[words_at[1:][used] - 1] + 1 != skips_at[1:][used]).any():
            raise damaged(self._where, "skips that are not as many as changed words")
        if len(ends) == len(codes):
            return codes.astype(np.int64) + 1
        lengths = np.diff(ends, prepend=-1)
        if len(ends) and lengths.max() > _MOST_SKIP_BYTES:
            raise damaged(self._where, f"a skip of more than {_MOST_SKIP_BYTES} bytes")
        steps = codes[ends].astype(np.int64)
        for number in range(1, _MOST_SKIP_BYTES):
            longer = np.flatnonzero(lengths > number)
            steps[longer] = steps[longer] << 7 | codes[ends[longer] - number] & 0x7F
        return steps + 1


class DeltaBuilder:
    """Makes a delta of a box from its old and its new bytes.

    Args:
        nbytes: of the box.
        word: the bytes of a word.
    """

    def __init__(self, nbytes: int, word: int) -> None:
        self.nbytes = 0
        self._word, self._per_segment = word, SEGMENT_BYTES // word
        self._counts, self._lengths = (np.zeros(segment_count(nbytes), np.int64) for _ in range(2))
        self._values: list[Array] = []
        self._skips: list[Array] = []

    def add(self, first_segment: int, old: memoryview, new: memoryview) -> None:
        """Adds whole segments, in ascending order."""
        words, new_words = np.frombuffer(old, f"<u{self._word}"), np.frombuffer(new, f"<u{self._word}")
        changed = _positions(words != new_words)
        segments = slice(first_segment, first_segment + segment_count(new.nbytes))
        bounds = np.arange(segments.stop - segments.start) * self._per_segment
        begins = np.searchsorted(changed, bounds)  # of segments, among the changed words
        used = begins < np.append(begins[1:], len(changed))
        skips = np.diff(changed, prepend=-1) - 1
        skips[begins[used]] = changed[begins[used]] - bounds[used]
        codes, ends = _encode(skips)
        self._counts[segments] = np.diff(begins, append=len(changed))
        self._lengths[segments] = np.diff(np.append(0, ends)[begins], append=len(codes))
        self._values.append(new_words.take(changed))
        self._skips.append(codes)
        self.nbytes += len(changed) * self._word + len(codes)

    def build(self, before: bytes, after: bytes) -> tuple[bytearray, bytearray]:
        """Returns the bytes of both entries, index and body, from the box's checksums before and after."""
        index = DeltaIndex(digest_of(before), after, self._counts, self._lengths)
        body = bytearray(self.nbytes)
        at = 0
        for part in (*self._values, *self._skips):
            body[at : at + part.nbytes] = part.data.cast("B") if part.nbytes else b""
            at += part.nbytes
        return bytearray(index.encode()), body


def _positions(is_changed: Array) -> Array:
    """Returns the positions of true elements: finds the groups of eight first, as most have none."""
    rest = len(is_changed) % 8
    if rest:
        is_changed = np.append(is_changed, np.zeros(8 - rest, bool))
    groups = np.flatnonzero(is_changed.view(np.uint64) != 0)  # of a bool array it is several times as fast
    within = np.flatnonzero(is_changed.reshape(-1, 8).take(groups, 0))
    return (groups << 3).take(within >> 3) + (within & 7)


def _encode(skips: Array) -> tuple[Array, Array]:
    """Returns skips as LEB128, one after the other, and the end of each."""
    longer = np.flatnonzero(skips >= 1 << 7)
    if not len(longer):
        return skips.astype(np.uint8), np.arange(1, len(skips) + 1)
    lengths = np.ones(len(skips), np.int64)
    lengths[longer] += 1 + (skips[longer] >= 1 << 14)
    ends = np.cumsum(lengths)
    codes = np.empty(int(ends[-1]), np.uint8)
    codes[ends - 1] = skips  # right where one byte is enough; the others follow
    for number in range(_MOST_SKIP_BYTES):
        some = longer[lengths[longer] > number]
        more = 0x80 if number else 0
        codes[ends[some] - 1 - number] = skips[some] >> 7 * (lengths[some] - 1 - number) & 0x7F | more
    return codes, ends
