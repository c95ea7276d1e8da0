"""From data files into memory that is already there: every byte is summed, and read once."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod

import torch
import xxhash

from shardopt.checkpoint.batches import Batch, Crumbs, Want, batches_of
from shardopt.checkpoint.datafile import Entry
from shardopt.checkpoint.format import SEGMENT_BYTES
from shardopt.checkpoint.open_file import OpenFile
from shardopt.checkpoint.progress import Counter, Progress
from shardopt.checkpoint.storage import Span, Storage
from shardopt.errors import CorruptionError, Problem
from shardopt.sharding.box import Box

_THREADS = 4
_BATCH_BYTES = 2 << 20  # read by one thread at a time, and still in its cache when it is summed and copied
_FAR_BATCH_BYTES = 8 << 20  # where each request costs a round trip; see benchmarks/results/remote.md
_FAR_THREADS = 8


def fetch(wants: Sequence[tuple[OpenFile, Want]], progress: Progress | None = None) -> int:
    """Reads all that is wanted into its targets; returns the bytes read.

    Args:
        progress: of the bytes that are wanted.

    Raises:
        CorruptionError: bytes that fail their checksum; targets may have changed by then.
    """
    by_file: defaultdict[OpenFile, list[Want]] = defaultdict(list)
    for file, want in wants:
        by_file[file].append(want)
    scratch: list[bytearray] = []  # at most two buffers more than there are threads: batches under way or being made
    failures: list[Exception] = []
    threads = max((threads_for(file.storage) for file in by_file), default=1)
    limit = max(map(_batch_bytes, by_file), default=0)
    slots = threading.Semaphore(threads + 1)  # batches that are under way or wait for a thread
    done = Counter(sum(want.wanted.numel * want.dtype.itemsize for _, want in wants), progress)
    nbytes = 0

    def run(batch: Batch | Crumbs, file: OpenFile) -> None:
        try:
            batch.read(file)
            done.add(batch.nbytes)
        except Exception as error:
            failures.append(error)
        finally:
            slots.release()

    with torch.no_grad(), ThreadPoolExecutor(threads, "shardopt-read") as pool:
        for file, wanted in by_file.items():
            for batch in batches_of(sorted(wanted, key=lambda want: want.entry.begin), limit, scratch):
                slots.acquire()
                if failures:
                    slots.release()  # or the files that follow would wait for it
                    break
                pool.submit(run, batch, file)
                nbytes += batch.nbytes
    if failures:
        raise failures[0]
    return nbytes


def threads_for(storage: Storage) -> int:
    """How many threads should read from it at a time."""
    return _FAR_THREADS if storage.is_remote else _THREADS


def _batch_bytes(file: OpenFile) -> int:
    return _FAR_BATCH_BYTES if file.storage.is_remote else _BATCH_BYTES


def check_all(wants: Sequence[tuple[OpenFile, Want]]) -> None:
    """Verifies every segment of the stored boxes that something is wanted of; changes nothing.

    Raises:
        CorruptionError: with all that is damaged.
    """
    boxes = {(id(file), want.entry.begin): (file, want.entry) for file, want in wants}
    problems = [problem for file, entry in boxes.values() for problem in damaged_segments(file, entry)]
    if problems:
        raise CorruptionError("a checkpoint is damaged; nothing was changed", problems)


def damaged_segments(
    file: OpenFile, entry: Entry, progress: Callable[[int], object] = lambda nbytes: None
) -> Iterator[Problem]:
    """The segments of one stored box that fail their checksums; reads all of it.

    Args:
        progress: gets the bytes of each piece that was read.
    """
    step = _batch_bytes(file)
    buffer = memoryview(bytearray(min(step, entry.end - entry.begin)))
    segment = entry.segment
    for begin in range(entry.begin, entry.end, step):
        chunk = buffer[: min(step, entry.end - begin)]
        file.read_into([Span(begin, chunk)])
        progress(chunk.nbytes)
        for i in range(0, chunk.nbytes, SEGMENT_BYTES):
            if xxhash.xxh3_64_digest(chunk[i : i + SEGMENT_BYTES]) != file.sums[8 * segment : 8 * segment + 8]:
                yield from file.failed(entry, segment).problems
            segment += 1


def pieces_in_order(box: Box, itemsize: int) -> Iterator[Box]:
    """Boxes of bounded size that hold a box's elements one after the other in C order."""
    row_bytes = prod(box.sizes[1:]) * itemsize
    if not box.sizes or box.numel * itemsize <= _BATCH_BYTES:
        if box.numel:
            yield box
        return
    step = _BATCH_BYTES // row_bytes
    for begin in range(0, box.sizes[0], max(step, 1)):
        offsets = (box.offsets[0] + begin, *box.offsets[1:])
        if step:
            yield Box(offsets, (min(step, box.sizes[0] - begin), *box.sizes[1:]))
        else:
            for inner in pieces_in_order(Box(box.offsets[1:], box.sizes[1:]), itemsize):
                yield Box((offsets[0], *inner.offsets), (1, *inner.sizes))
