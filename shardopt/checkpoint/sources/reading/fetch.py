"""Fetches boxes from data files into existing memory; reads and verifies every byte once.

Says of memory of the program whether it can be read into, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from math import prod

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from shardopt.checkpoint.format.constants import SEGMENT_BYTES
from shardopt.checkpoint.format.data_file import Entry
from shardopt.checkpoint.format.tensor_bytes import GIVEN_BACK, dtype_name, has_no_memory, torch_dtype
from shardopt.checkpoint.progress import Counter, Progress
from shardopt.checkpoint.sources.reading.checking import damaged_segments, sizes_for
from shardopt.checkpoint.sources.reading.device_scratch import DeviceScratch, is_streamed
from shardopt.checkpoint.sources.reading.open_file import OpenFile, ReadRequest
from shardopt.checkpoint.sources.reading.read_plan import Batch, LargeRead, SmallReads, batches_of
from shardopt.checkpoint.sources.reading.scratch import HostScratch, Scratch, Use, copy_into, lost_problem
from shardopt.checkpoint.sources.reading.widening import Widening
from shardopt.errors import CheckpointError, CorruptionError, MismatchError, Problem
from shardopt.runtime.accelerator import CallersStreams, wait_for_reads
from shardopt.runtime.staging_fence import wait_for_copies
from shardopt.runtime.torch_gradients import reshard_before_writing
from shardopt.sharding.pieces import overlap_problem
from shardopt.state.casts import has_fewer_exponents, lost_in_cast
from shardopt.world import Executor, Future, world

_FEW_BYTES = 64 * 1024  # of one file, which are read before a thread has started


def describe_tensor(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Returns shape and dtype of a tensor, for error messages."""
    return f"a tensor of {dtype_name(dtype)} {list(shape)}"


def memory_problem(key: str, *memories: Tensor) -> Problem | None:
    """Returns why a tensor's memory cannot be read into: there is none, or elements share it. None if it can."""
    for tensor in memories:
        if has_no_memory(tensor):
            if tensor.is_meta:
                state, remedy = "a tensor on the meta device", "call to_empty(device=...) first"
            else:
                state, remedy = GIVEN_BACK, "load while its parameter is there"
            return Problem(key, state, "memory to load into", remedy)
        if problem := overlap_problem(key, tensor):
            return problem
    return None


def fill(requests: Sequence[ReadRequest], into: Iterable[Tensor], progress: Progress | None = None) -> int:
    """Fetches into tensors that the program uses; returns the bytes read. Other arguments and errors as for `fetch`.

    Args:
        into: these tensors, as the program has them, also those of which this rank reads nothing.
    """
    wait_for_copies()  # a save in the background may still be copying what this changes
    wait_for_reads(request.target for request in requests)
    reshard_before_writing(into)
    # Autograd is to refuse a backward through values that are gone: what is read past torch counts as no change.
    increment_version([request.target for request in requests])
    return fetch(requests, progress)


def fetch(requests: Sequence[ReadRequest], progress: Progress | None = None, use: Use = copy_into) -> int:
    """Reads all requests into their targets, in several threads; returns the bytes read.

    Memory of accelerators is filled through pinned scratch, in the order of the caller's current streams; it is filled
    when this returns.

    Args:
        progress: called with the bytes that are done and those of all requests.
        use: called for each piece that cannot be read straight into its target's memory; copies it there by default.

    Raises:
        CorruptionError: bytes that fail their checksum; targets may have changed by then.
    """
    batches = _Batches(requests, use)
    done = None if progress is None else Counter(batches.wanted_bytes, progress)
    to_check = [each for each in requests if each.file.checks_first]
    try:
        if len(batches.files) <= 1 and batches.wanted_bytes <= _FEW_BYTES and not to_check:
            batches.read_all(done)
        else:
            _read_in_threads(batches, to_check, done, CallersStreams(batches.targets_elsewhere))
    finally:
        batches.end()
    return batches.nbytes


def _read_in_threads(
    batches: _Batches,
    to_check: Sequence[ReadRequest],
    done: Counter | None,
    streams: CallersStreams,
) -> None:
    running: list[Future[None]] = []
    has_read = None
    if batches.most_threads > batches.threads:
        widening = Widening(batches.threads, batches.most_threads)

        def has_read(nbytes: int) -> None:
            begin(widening.more_threads(nbytes))

    def begin(threads: int) -> None:
        running.extend(pool.submit(batches.read_all, done, streams, has_read) for _ in range(threads))

    with world().thread_pool(batches.most_threads, "shardopt-read") as pool:
        _check_first(pool, to_check)
        try:
            begin(batches.threads)
            for each in running:  # which grows meanwhile
                each.result()
        finally:
            batches.stop()  # where one has failed, or the caller was interrupted, the others are not to continue


def fetch_here(requests: Iterable[ReadRequest]) -> None:
    """Reads a few requests into their targets, in the calling thread, while another read waits for them.

    Raises:
        CorruptionError: as `fetch`.
    """
    batches = _Batches(requests, copy_into)
    try:
        batches.read_all(None)
    finally:
        batches.end()


def _check_first(pool: Executor, requests: Sequence[ReadRequest]) -> None:
    """Verifies files with one checksum over more than a segment, before any of their bytes are used.

    Raises:
        CorruptionError: with all that is damaged.
    """
    unchecked: dict[tuple[int, int], tuple[OpenFile, Entry]] = {}
    for file, entry, *_ in requests:
        number = file.summed_with(entry)
        if number is not None and number not in file.checked:
            unchecked[id(file), number] = file, entry
    found = pool.map(lambda each: [*damaged_segments(*each)], unchecked.values())
    problems = [problem for each in found for problem in each]
    if problems:
        raise CorruptionError("a checkpoint is damaged", problems)
    for (_, number), (file, _) in unchecked.items():
        file.checked.add(number)


class _Batches:
    """An iterator over the batches of all files, shared by several threads."""

    def __init__(self, requests: Iterable[ReadRequest], use: Use) -> None:
        by_file: defaultdict[OpenFile, list[ReadRequest]] = defaultdict(list)
        on_devices: defaultdict[OpenFile, list[ReadRequest]] = defaultdict(list)
        self.wanted_bytes = 0
        self.targets_elsewhere: list[Tensor] = []  # than on the CPU
        for request in requests:
            file, _, dtype, _, wanted, target = request
            self.wanted_bytes += prod(wanted.sizes) * dtype.itemsize
            if target.is_cpu:
                by_file[file].append(request)
            else:
                (on_devices if use is copy_into and is_streamed(target) else by_file)[file].append(request)
                self.targets_elsewhere.append(target)
        self.files, self.nbytes = {**by_file, **on_devices}.keys(), 0
        self._lock = world().lock()
        read_sizes = {file: sizes_for(file.storage) for file in self.files}
        limit = max((each.batch for each in read_sizes.values()), default=0)
        needed = self.wanted_bytes // max(limit, 1) + len(self.files)  # no more threads than there are reads
        self.threads = max((each.threads for each in read_sizes.values()), default=1)
        self.most_threads = max([self.threads, *(min(each.most_threads, needed) for each in read_sizes.values())])
        ways: list[tuple[Mapping[OpenFile, list[ReadRequest]], Scratch]] = [
            (by_file, HostScratch(limit + 2 * SEGMENT_BYTES, use))
        ]
        self._device = DeviceScratch(on_devices.values(), limit, self.most_threads) if on_devices else None
        if self._device is not None:
            ways.append((on_devices, self._device))
        self._batches = (
            (file, batch)
            for file in self.files
            for of_file, scratch in ways
            if file in of_file
            for batch in batches_of(of_file[file], read_sizes[file], scratch)
        )
        self._stopped = False

    def take(self) -> tuple[OpenFile, Batch | LargeRead | SmallReads] | None:
        """Returns the next batch and its file; None after the last."""
        with self._lock:
            taken = None if self._stopped else next(self._batches, None)
            self.nbytes += taken[1].nbytes if taken else 0
            return taken

    def stop(self) -> None:
        """Ends the iteration for all threads."""
        self._stopped = True

    def end(self) -> None:
        """Ends the reads: what was copied to accelerators is there."""
        if self._device is not None:
            self._device.end()

    def read_all(
        self,
        done: Counter | None,
        streams: CallersStreams | None = None,
        has_read: Callable[[int], None] | None = None,
    ) -> None:
        """Reads batches until none is left; the loop of one thread. An error ends all threads.

        Args:
            streams: of the caller, in whose place another thread reads; None where it is the caller's own.
            has_read: called with the bytes of each batch; None for no call.
        """
        try:
            # A thread has a grad mode of its own.
            with torch.no_grad(), nullcontext() if streams is None else streams.entered():
                taken = self.take()
                while taken is not None:
                    file, copy = taken[0], taken[0].storage.copy_of(taken[0].name)
                    try:
                        with file.opened() as read:
                            while taken is not None and taken[0] is file:
                                taken[1].read(file, read)
                                if has_read is not None:
                                    has_read(taken[1].nbytes)
                                if done is not None:
                                    done.add(taken[1].nbytes)
                                taken = self.take()
                    except CheckpointError as error:
                        if not file.storage.pass_over(file.name, copy, error):
                            raise
        except BaseException:
            self.stop()
            raise


def check_all(requests: Sequence[ReadRequest]) -> None:
    """Verifies every segment of the stored boxes in the requests; changes nothing.

    Raises:
        CorruptionError: with all damaged segments, in the order of the files.
    """
    boxes = {(file.name, entry.begin, id(file)): (file, entry) for file, entry, *_ in requests}
    problems = [problem for key in sorted(boxes) for problem in _damaged_in_all_copies(*boxes[key])]
    if problems:
        raise CorruptionError("a checkpoint is damaged", problems)


def _damaged_in_all_copies(file: OpenFile, entry: Entry) -> list[Problem]:
    """Returns the problems of a stored box; if there are several copies and none is intact, those of the last one."""
    while True:
        copy = file.storage.copy_of(file.name)
        try:
            problems = list(damaged_segments(file, entry))
            if not problems:
                return problems
            error = CheckpointError("a file is damaged", problems, code="damaged")
        except CheckpointError as unreadable:
            if not file.storage.pass_over(file.name, copy, unreadable):
                raise
            continue
        if not file.storage.pass_over(file.name, copy, error):
            return problems


def casts_to_check(requests: Sequence[ReadRequest]) -> list[ReadRequest]:
    """Returns the requests whose target has a dtype that cannot hold all numbers of the stored dtype."""
    dtypes = ((each, torch_dtype(each.dtype), each.target.dtype) for each in requests)
    return [each for each, stored, wanted in dtypes if stored != wanted and has_fewer_exponents(stored, wanted)]


def check_casts(requests: Sequence[ReadRequest], names: Mapping[str, str]) -> None:
    """Reads the requests of `casts_to_check`, and changes nothing.

    Args:
        names: stored key → the app's, where they differ.

    Raises:
        MismatchError: with the keys that have a number which would become another one.
        CorruptionError: bytes that fail their checksum.
    """
    problems: dict[str, Problem] = {}

    def check(entry: Entry, target: Tensor, source: Tensor) -> None:
        lost = lost_in_cast(source, target.dtype)
        if lost is not None:
            key = names.get(entry.key, entry.key)
            problems.setdefault(key, lost_problem(key, lost, source.dtype, target.dtype))

    fetch(requests, use=check)
    if problems:
        message = "the checkpoint has numbers that the app's dtypes cannot hold; nothing was changed"
        raise MismatchError(message, [problems[key] for key in sorted(problems)], code="cast-overflow")
