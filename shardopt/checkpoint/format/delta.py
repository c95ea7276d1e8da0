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
_PIECE_BYTES = 128 << 10  # of skips, decoded at a time

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
        """Returns positions and values of the changed words between two offsets in the box, in bytes.

        Positions are ascending, and count words from `begin`.

        Raises:
            CorruptionError: skips that are none, or lead out of their segment.
        """
        first, last = begin // SEGMENT_BYTES, segment_count(end)
        values = self._values[self._words_at[first] : self._words_at[last]]
        words = (last - first) * SEGMENT_BYTES // self._word
        positions = np.empty(len(values), np.int32 if words < 1 << 31 else np.int64)
        done = first
        while done < last:  # in pieces that stay in a core's cache
            stop = int(np.searchsorted(self._skips_at, self._skips_at[done] + _PIECE_BYTES, "right")) - 1
            stop = min(max(stop, done + 1), last)
            of_piece = slice(*(self._words_at[[done, stop]] - self._words_at[first]))
            self._decode(done, stop, (done - first) * SEGMENT_BYTES // self._word, positions[of_piece])
            done = stop
        low, high = (each // self._word - first * SEGMENT_BYTES // self._word for each in (begin, end))
        if low or high < words:
            inside = slice(*np.searchsorted(positions, (low, high)))
            return positions[inside] - low if low else positions[inside], values[inside]
        return positions, values

    def apply(self, begin: int, memory: memoryview) -> None:
        """Writes the changed words into memory that has the bytes of the box from an offset on; raises as `changes`."""
        positions, values = self.changes(begin, begin + memory.nbytes)
        if len(positions):
            np.frombuffer(memory, values.dtype)[positions] = values

    def _decode(self, first: int, last: int, base: int, positions: Array) -> None:
        """Writes the positions of the changed words of some segments; `base` is that of the first segment's begin.

        A word is where the steps before it lead: the sum of what each byte of the skips adds to it.
        """
        used = first + np.flatnonzero(np.diff(self._words_at[first : last + 1]))
        if not len(used):
            return
        skips_at, per_segment = self._skips_at - self._skips_at[first], SEGMENT_BYTES // self._word
        codes = self._skips[self._skips_at[first] : self._skips_at[last]]
        is_last = codes < 0x80  # of the bytes of a skip
        steps = ((codes & 0x7F) + is_last).astype(np.int32)
        before = np.flatnonzero(~is_last)  # bytes that another one of the same skip follows
        counts = self.index.lengths[used] - np.diff(np.searchsorted(before, skips_at[[*used, last]]))
        if (counts != self.index.counts[used]).any() or not is_last[skips_at[used + 1] - 1].all():
            raise damaged(self._where, "skips that are not as many as changed words")
        if (before[_MOST_SKIP_BYTES - 1 :] - before[: 1 - _MOST_SKIP_BYTES] < _MOST_SKIP_BYTES).any():
            raise damaged(self._where, f"a skip of more than {_MOST_SKIP_BYTES} bytes")
        high = before + 1
        steps[high] = (steps[high] - is_last[high] << 7) + is_last[high]
        high = before[1:][np.diff(before) == 1] + 1  # the third byte of a skip
        steps[high] = (steps[high] - is_last[high] << 7) + is_last[high]
        sums = np.add.reduceat(steps, skips_at[used], dtype=np.int64)
        if (sums > np.minimum(per_segment, self._nbytes // self._word - used * per_segment)).any():
            raise damaged(self._where, "a position outside its segment")
        # The first step of a segment leads from the last word of that before it.
        begins = base + (used - first) * per_segment
        ends = begins - 1 + sums  # the last words
        steps = steps.astype(positions.dtype, copy=False)
        steps[skips_at[used]] += begins - np.append(0, ends[:-1]) - 1
        np.compress(is_last, np.cumsum(steps, dtype=positions.dtype), out=positions)


class DeltaBuilder:
    """Makes a delta of a box from its old and its new bytes.

    Args:
        nbytes: of the box.
        word: the bytes of a word.

    Attributes:
        nbytes: of the body so far.
        count: the changed words so far.
        runs: how often a changed word followed an unchanged one.
    """

    def __init__(self, nbytes: int, word: int) -> None:
        self.nbytes = self.count = self.runs = 0
        self._word, self._per_segment = word, SEGMENT_BYTES // word
        self._counts, self._lengths = (np.zeros(segment_count(nbytes), np.int64) for _ in range(2))
        self._values: list[Array] = []
        self._skips: list[Array] = []

    def add(self, first_segment: int, old: memoryview, new: memoryview) -> None:
        """Adds whole segments, in ascending order."""
        words, new_words = np.frombuffer(old, f"<u{self._word}"), np.frombuffer(new, f"<u{self._word}")
        changed = _positions(words != new_words)
        segments = slice(first_segment, first_segment + segment_count(new.nbytes))
        bounds = np.arange(segments.stop - segments.start, dtype=changed.dtype) * self._per_segment
        begins = np.searchsorted(changed, bounds)  # of segments, among the changed words
        counts = np.diff(begins, append=len(changed))
        used = np.flatnonzero(counts)
        skips = np.diff(changed, prepend=changed.dtype.type(-1)) - 1
        skips[begins[used]] = changed[begins[used]] - bounds[used]
        codes, longer = _encode(skips)
        self.count += len(changed)
        self.runs += int(np.count_nonzero(skips))
        self._counts[segments] = counts
        self._lengths[segments] = counts + np.diff(np.searchsorted(longer, begins), append=len(longer))
        self._values.append(new_words.take(changed))
        self._skips.append(codes)
        self.nbytes += len(changed) * self._word + len(codes)

    def add_rows(self, first_segment: int, rows: Array, size: int, at: int, new: memoryview) -> None:
        """Adds whole segments of which all words of some rows count as changed.

        Args:
            rows: ascending numbers of rows, of which all have words in these segments.
            size: the words of a row.
            at: the number of the first of these segments' words, counted as rows are.
        """
        words = np.frombuffer(new, f"<u{self._word}")
        segments = segment_count(new.nbytes)
        begins = np.maximum(rows * size - at, 0)
        ends = np.minimum(rows * size - at + size, len(words))
        if len(rows) and (at % size or self._per_segment % size):  # some lie in two segments or more: cut there
            begins, ends = _cut(begins, ends, np.arange(1, segments) * self._per_segment)
        lengths = ends - begins
        segment_of = begins // self._per_segment
        skips = begins - np.maximum(np.append(0, ends[:-1]), segment_of * self._per_segment)
        longer, longest = skips >= 1 << 7, skips >= 1 << 14
        coded = lengths + longer + longest
        at_code = np.cumsum(coded) - coded
        codes = np.zeros(int(coded.sum()), np.uint8)  # within a row nothing is skipped
        codes[at_code] = skips & 0x7F | longer << 7
        codes[at_code[longer] + 1] = skips[longer] >> 7 & 0x7F | longest[longer] << 7
        codes[at_code[longest] + 2] = skips[longest] >> 14
        for numbers, per_run in ((self._counts, lengths), (self._lengths, coded)):
            numbers[first_segment : first_segment + segments] = np.bincount(segment_of, per_run, segments)
        if at % size or len(words) % size:
            self._values.append(
                words.take(np.arange(int(lengths.sum())) + np.repeat(begins - np.cumsum(lengths) + lengths, lengths))
            )
        else:
            self._values.append(words.reshape(-1, size).take(rows - at // size, 0).reshape(-1))
        self._skips.append(codes)
        self.nbytes += self._values[-1].nbytes + len(codes)

    @property
    def segments(self) -> Array:
        """The numbers of the segments that have changed words."""
        return np.flatnonzero(self._counts)

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
    groups: Array = np.flatnonzero(is_changed.view(np.uint64) != 0)  # of a bool array it is several times as fast
    within: Array = np.flatnonzero(is_changed.reshape(-1, 8).take(groups, 0))
    number = np.int32 if len(is_changed) < 1 << 31 else np.int64
    groups, within = groups.astype(number), within.astype(number)
    positions: Array = (groups << 3).take(within >> 3)
    within &= 7
    positions += within
    return positions


def _cut(begins: Array, ends: Array, bounds: Array) -> tuple[Array, Array]:
    """Cuts ascending ranges at each bound that lies within one."""
    place = np.searchsorted(begins, bounds) - 1  # of the range that begins before each bound
    inside = (place >= 0) & (ends[place] > bounds)
    places, bounds = place[inside] + 1, bounds[inside]
    return np.insert(begins, places, bounds), np.insert(ends, places - 1, bounds)


def _encode(skips: Array) -> tuple[Array, Array]:
    """Returns skips as LEB128, one after the other, and the numbers of the skips that each further byte is for."""
    longer: Array = np.flatnonzero(skips >= 1 << 7)
    low: Array = skips.astype(np.uint8)
    if not len(longer):
        return low, longer
    low[longer] |= 0x80
    rest = skips[longer] >> 7
    longest = np.flatnonzero(rest >= 1 << 7)
    high: Array = rest.astype(np.uint8)
    high[longest] |= 0x80
    if len(longest):
        high, longer = (
            np.insert(each, longest + 1, of_longest)
            for each, of_longest in ((high, rest[longest] >> 7), (longer, longer[longest]))
        )
    codes = np.empty(len(low) + len(high), np.uint8)
    is_low = np.ones(len(codes), bool)
    at = longer + np.arange(1, len(longer) + 1)
    is_low[at] = False
    codes[is_low] = low
    codes[at] = high
    return codes, longer
