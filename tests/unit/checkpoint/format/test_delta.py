"""The codec of deltas: any change comes back, from any range; other bytes are refused or stay within their segment."""

import tracemalloc

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt.checkpoint.format.constants import DTYPES, SEGMENT_BYTES, segment_count
from shardopt.checkpoint.format.delta import Delta, DeltaBuilder, decode_index, digest_of, index_bytes, word_bytes
from shardopt.errors import CorruptionError
from tests.support.drawn import examples

WORDS = (1, 2, 4, 8)


def sums_of(data):
    parts = (data[begin : begin + SEGMENT_BYTES] for begin in range(0, len(data), SEGMENT_BYTES))
    return b"".join(map(xxhash.xxh3_64_digest, parts))


def changed(old, word, seed, rates):
    """A copy in which of each segment a part of the words, by its rate, has changed."""
    pick, words = np.random.default_rng(seed), np.frombuffer(old, f"<u{word}").copy()
    per_segment = SEGMENT_BYTES // word
    for number, begin in enumerate(range(0, len(words), per_segment)):
        part = words[begin : begin + per_segment]
        part[pick.random(len(part)) < rates[number % len(rates)]] ^= 1
    return words.tobytes()


def built(old, new, word, step=1):
    """Index and body, from segments that have changed: `step` at a time at most."""
    builder, before, after = DeltaBuilder(len(old), word), sums_of(old), sums_of(new)
    for first in range(0, segment_count(len(old)), step):
        part = slice(first * SEGMENT_BYTES, (first + step) * SEGMENT_BYTES)
        if old[part] != new[part]:
            builder.add(first, memoryview(old[part]), memoryview(new[part]))
    index, body = builder.build(before, after)
    assert builder.nbytes == len(body)
    return index, body


def random_bytes(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()


RATES = st.lists(st.sampled_from([0.0, 1e-5, 1e-3, 0.02, 0.5, 1.0]), min_size=1, max_size=4)


@settings(deadline=None, max_examples=examples(40))
@given(
    word=st.sampled_from(WORDS),
    count=st.integers(0, 40_000) | st.sampled_from([SEGMENT_BYTES // 8, SEGMENT_BYTES // 4, SEGMENT_BYTES // 4 + 1]),
    segments=st.integers(0, 3),
    seed=st.integers(0, 99),
    rates=RATES,
    step=st.integers(1, 4),
    ranges=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=4),
)
def test_any_change_comes_back_from_any_range(word, count, segments, seed, rates, step, ranges):
    nbytes = segments * SEGMENT_BYTES + min(count * word, SEGMENT_BYTES)
    old = random_bytes(nbytes, seed)
    new = changed(old, word, seed, rates)
    data, body = built(old, new, word, step)
    assert len(data) == index_bytes(nbytes)
    index = decode_index(data, nbytes, word, "d")
    assert (index.before, index.after) == (digest_of(sums_of(old)), sums_of(new))
    delta = Delta(index, body, nbytes, word, "d")
    for low, high in [(0.0, 1.0), *ranges]:
        begin, end = (int(each * (nbytes // word)) * word for each in sorted((low, high)))
        memory = bytearray(old[begin:end])
        if memory:
            delta.apply(begin, memoryview(memory))
        assert memory == new[begin:end]


@pytest.mark.parametrize("word", WORDS)
def test_a_window_of_segments_is_decoded_without_the_rest(word):
    nbytes = 5 * SEGMENT_BYTES + 800 * word
    old = random_bytes(nbytes)
    new = changed(old, word, 1, [0.01, 0.0, 0.3])
    data, body = built(old, new, word)
    index = decode_index(data, nbytes, word, "d")
    for first in range(6):
        for last in range(first + 1, 8):
            part, (words, skips) = index.part(first, last, word)
            begin, end = first * SEGMENT_BYTES, min(last * SEGMENT_BYTES, nbytes)
            memory = bytearray(old[begin:end])
            bytes_of_part = body[slice(*words)] + body[slice(*skips)]
            Delta(part, bytes_of_part, end - begin, word, "d").apply(0, memoryview(memory))
            assert memory == new[begin:end]


def test_words_have_the_bytes_of_an_element_where_safetensors_has_its_dtype():
    for dtype in DTYPES.values():
        name = dtype.safetensors or "U8"
        assert word_bytes(name) == (dtype.itemsize if dtype.safetensors else 1)
    assert all(SEGMENT_BYTES % word_bytes(each.safetensors or "U8") == 0 for each in DTYPES.values())


def test_the_bytes_are_those_of_the_specification():
    old, new = bytearray(2 * SEGMENT_BYTES + 8), bytearray(2 * SEGMENT_BYTES + 8)
    words = np.frombuffer(new, "<u2")
    words[[0, 1, 129, 258]] = 0x0201  # skips 0, 0, 127, 128
    words[-1] = 0x0403  # of the last segment: skip 3
    index, body = built(bytes(old), bytes(new), 2)
    numbers = np.array([4, 0, 1, 5, 0, 1], "<u4").tobytes()
    assert index == digest_of(sums_of(bytes(old))) + sums_of(bytes(new)) + numbers
    assert body == bytes([1, 2] * 4 + [3, 4]) + bytes([0, 0, 127, 0x80, 1]) + bytes([3])
    assert built(bytes(old), bytes(old[:-1]) + b"\x01", 1)[1] == b"\x01\x07"
    far = bytearray(SEGMENT_BYTES)
    far[-1] = 9
    assert built(bytes(SEGMENT_BYTES), bytes(far), 1)[1] == b"\x09\xff\xff\x0f"  # three bytes: 2^18 - 1


def apply_hostile(data, body, nbytes, word):
    """Reads what may be anything; everything that it writes lies in the memory that it is given."""
    guard = 64
    memory = bytearray(b"\xaa" * (nbytes + 2 * guard))
    try:
        index = decode_index(data, nbytes, word, "d")
        assert index.nbytes(word) <= nbytes + 3 * nbytes // word
        delta = Delta(index, body, nbytes, word, "d")
        positions, values = delta.changes(0, nbytes)
        assert len(positions) == len(values)
        if len(positions):
            assert (np.diff(positions) > 0).all() and positions[0] >= 0 and positions[-1] < nbytes // word
            numbers = positions // (SEGMENT_BYTES // word)
            assert (np.bincount(numbers, minlength=len(index.counts)) == index.counts).all()
        delta.apply(0, memoryview(memory)[guard : guard + nbytes])
    except CorruptionError:
        return False
    finally:
        assert memory[:guard] == memory[-guard:] == b"\xaa" * guard
    return True


@settings(deadline=None, max_examples=examples(150))
@given(
    word=st.sampled_from(WORDS),
    rates=RATES,
    flips=st.lists(st.tuples(st.integers(0, 1), st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=3),
    cut=st.sampled_from([0, 0, 0, 1, -1]),
)
def test_flipped_bytes_are_refused_or_stay_in_their_segment(word, rates, flips, cut):
    nbytes = SEGMENT_BYTES + 3000 * word
    old = random_bytes(nbytes)
    index, body = built(old, changed(old, word, 3, rates), word)
    for part, place, flip in flips:
        target = body if part and body else index
        at = int(place * len(target))
        if target is index and place > 0.5:
            at = 8 + 8 * 2 + int((place - 0.5) * 2 * 16)  # among the counts and lengths
        target[at] ^= flip
    body = body[:-1] if cut < 0 else body + b"\0" * cut
    apply_hostile(index, body, nbytes, word)


@settings(deadline=None, max_examples=examples(150))
@given(
    word=st.sampled_from(WORDS),
    nbytes=st.integers(0, 80),
    extra=st.integers(0, 2),
    numbers=st.lists(st.integers(0, 9) | st.sampled_from([2**18, 2**31, 2**32 - 1]), min_size=6, max_size=6),
    body=st.binary(max_size=60),
    fits=st.booleans(),
)
def test_random_bytes_are_refused_or_stay_in_their_segment(word, nbytes, extra, numbers, body, fits):
    nbytes = nbytes * word + extra * SEGMENT_BYTES
    segments = segment_count(nbytes)
    index = bytes(8 + 8 * segments) + np.array(numbers, "<u4").tobytes()[: 8 * segments]
    if fits:
        of_body = np.array(numbers, np.int64)
        body = body.ljust(
            int(of_body[:segments].sum() * word + of_body[segments : 2 * segments].sum()) % 100_000, b"\1"
        )
    apply_hostile(index, body, nbytes, word)
    apply_hostile(index[:-1], body, nbytes, word)


@pytest.mark.parametrize(
    ("counts", "lengths", "body"),
    [
        ([1], [1], b"\0\0\x80"),  # a skip that does not end
        ([2], [2], b"\0\0\0\0\x80\0"),  # fewer skips than words
        ([1], [2], b"\0\0\0\0"),  # more
        ([1], [3], b"\0\0\xff\xff\xff"),
        ([1], [1], b"\0\0\x10"),  # a position behind the end
        ([1], [3], b"\0\0\xff\xff\x7f"),
        ([2], [2], b"\0\0\0\0\x08\x07"),  # together behind it
        ([1, 1], [2, 1], b"\0\0\0\0\0\0\x80"),  # a skip across two segments
        ([17], [17], bytes(51)),  # more words than the segment has
        ([1], [0], b"\0\0"),
        ([1], [4], b"\0\0\x80\x80\x80\0"),
        ([0], [1], b"\0"),
    ],
)
def test_each_form_of_nonsense_is_refused(counts, lengths, body):
    segments = len(counts)
    nbytes = (segments - 1) * SEGMENT_BYTES + 32
    index = bytes(8 + 8 * segments) + np.array([*counts, *lengths], "<u4").tobytes()
    assert not apply_hostile(index, body, nbytes, 2)


def test_an_index_that_claims_much_takes_no_memory():
    index = bytes(16) + np.array([2**32 - 1, 2**32 - 1], "<u4").tobytes()
    tracemalloc.start()
    assert not apply_hostile(index, b"", 64, 2)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


@settings(deadline=None, max_examples=examples(40))
@given(
    word=st.sampled_from(WORDS),
    size=st.integers(1, 300) | st.sampled_from([64, 256, 4096]),
    count=st.integers(1, 9000),
    share=st.sampled_from([0.0, 0.001, 0.01, 0.2, 1.0]),
    step=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_rows_come_back_as_their_words_do(word, size, count, share, step, seed):
    pick = np.random.default_rng(seed)
    count = min(count, (3 * SEGMENT_BYTES) // (word * size) + 1)
    old = random_bytes(count * size * word, seed)
    rows = np.flatnonzero(pick.random(count) < share)
    new = np.frombuffer(old, f"<u{word}").reshape(count, size).copy()
    new[rows] ^= 1
    new = new.tobytes()
    builder = DeltaBuilder(len(old), word)
    for first in range(0, segment_count(len(old)), step):
        begin, end = first * SEGMENT_BYTES, min((first + step) * SEGMENT_BYTES, len(old))
        row_bytes = size * word
        here = rows[(rows >= begin // row_bytes) & (rows < -(-end // row_bytes))]
        builder.add_rows(first, here, size, begin // word, memoryview(new[begin:end]))
    index, body = builder.build(sums_of(old), sums_of(new))
    assert (index, body) == built(old, new, word, step)
