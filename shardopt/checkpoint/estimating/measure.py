"""Measures a storage as a save and a load use it: all ranks write, flush, read back and remove files at one time.

    floor       the smallest file, for what every file costs
    growing     samples of what each rank writes, four times as many bytes each time
    repeated    the last one again

The files are those of a save that has not ended, in the directory of a step above all that are there. So whatever is
left of them when a process is killed counts for nothing, and goes with the next commit of a later step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from statistics import median
from typing import Any, NamedTuple

import torch

from shardopt.checkpoint.estimating.sample import Sample, Sizes, nbytes_of, noise_of, part_of, room_for
from shardopt.checkpoint.format.constants import DTYPES, file_name
from shardopt.checkpoint.run.branches import CheckpointId, parse_id
from shardopt.checkpoint.run.root import Root
from shardopt.checkpoint.saving.writing.write import write_files
from shardopt.checkpoint.sources.reading.fetch import fetch
from shardopt.checkpoint.storage import Storage, wrap_os_errors
from shardopt.checkpoint.storage.marker import remove_marker, wait_for_marker, write_marker
from shardopt.ranks import Call, Ranks
from shardopt.world import world

MOST_BYTES = 256 << 20  # that a rank writes at a time
_LEAST_BYTES = 16 << 20
_GROWTH = 4
_REPEATS = 3
_LEAST_SHARE = 0.05  # of the bytes to be written at a time: less says nothing
_LONG_SHARE = 8  # the part of the time in which a sample shall be written, so that it can be repeated


class Measured(NamedTuple):
    """The seconds of all ranks' writes and reads, on the slowest rank; None where the time was too short.

    Args:
        nbytes: written at a time, by the rank that writes the most; 0 where that is too little to tell.
        write, read: of the data files of the whole save.
        publish: of the manifest, on rank 0.
    """

    nbytes: int
    write: float | None
    read: float | None
    publish: float


NOT_MEASURED = Measured(0, None, None, 0.0)


class _Late(Exception):
    """Ends a write for which there is no time."""


class _Timed(NamedTuple):
    """The part of the bytes that was written, and the seconds of writing and of reading them; None if not read."""

    fraction: float
    write: float
    read: float | None


def measure(
    ranks: Ranks,
    call: Call,
    root: Storage,
    sizes: Sizes,
    manifest: bytes,
    device: torch.device,
    seconds: float,
) -> Measured:
    """Measures the storage of a root. Collective. Leaves nothing behind, unless the process is killed.

    Args:
        sizes: of the boxes that this rank writes.
        manifest: on rank 0, for its length.
        device: of the tensors.
        seconds: after which nothing more is begun, and writes are given up.

    Raises:
        ShardoptError: ranks do not see one directory, or it cannot be written. All ranks raise.
    """
    end = world().monotonic() + seconds

    def prepare() -> list[Any]:
        with wrap_os_errors(f"make {root.url}"):
            is_there = Root(root).is_there()
            numbers = [id.step for name in root.names() if (id := parse_id(name)) is not None]
            name = CheckpointId(max(numbers, default=-1) + 1).name
            root.child(name).make()
        return [name, world().random_name(6), is_there]

    name, save_id, was_there = ranks.on_rank_0(call, prepare)
    probe = _Probe(ranks, call, root.child(name), save_id, sizes, device, end)
    try:
        if ranks.size > 1:
            ranks.on_rank_0(call, probe.mark)
            ranks.agree(call, lambda: wait_for_marker(probe.storage, save_id))
        timed = probe.all_samples()
        publish = ranks.on_rank_0(call, lambda: probe.publish(manifest))
    finally:
        probe.clear()
        if not was_there:  # whichever rank comes last
            with suppress(Exception):
                root.remove_if_empty()
    return _from_samples(timed, probe.most_bytes, publish)


def _from_samples(timed: Sequence[_Timed], most_bytes: int, publish: float) -> Measured:
    """Returns the seconds of all bytes, from the largest samples that were read; else from one that was given up."""
    floor, *others = timed
    fraction = max((each.fraction for each in others if each.read is not None), default=0.0)
    alike = [each for each in others if each.read is not None and each.fraction == fraction]
    if alike:
        write, read = median(each.write for each in alike), median(each.read or 0.0 for each in alike)
        write, read = _extended(floor.write, write, fraction), _extended(floor.read or 0.0, read, fraction)
        return Measured(round(fraction * most_bytes), write, read, publish)
    given_up = others[-1] if others else floor
    if given_up.fraction * most_bytes < _LEAST_SHARE * min(MOST_BYTES, most_bytes):
        return Measured(0, None, None, publish)
    # Without the floor: it has not come to what every file costs at its end.
    return Measured(
        round(given_up.fraction * most_bytes), _extended(0.0, given_up.write, given_up.fraction), None, publish
    )


def _extended(floor: float, seconds: float, fraction: float) -> float:
    """Returns the seconds of all bytes, from those of a part of them and of the smallest file."""
    return seconds if fraction >= 1 else floor + max(seconds - floor, 0.0) / fraction


class _Probe:
    """The files of one measurement, on one rank."""

    def __init__(
        self, ranks: Ranks, call: Call, storage: Storage, save_id: str, sizes: Sizes, device: torch.device, end: float
    ) -> None:
        self._ranks, self._call, self.storage, self._save_id = ranks, call, storage, save_id
        self._sizes, self._device, self._end, self._begin = sizes, device, end, world().monotonic()
        self._written: list[str] = []
        self._noise = self._target = torch.empty(0, dtype=torch.uint8, device=device)
        self.most_bytes = 0

    def all_samples(self) -> list[_Timed]:
        """Writes and reads samples, the smallest first. Collective."""
        _, most = self._ranks.agree(self._call, lambda: nbytes_of(self._sizes), int, max)
        self.most_bytes = most
        whole_time = self._end - self._begin
        first, left = self._sample(0.0)
        timed, repeats = [first], 0
        fraction, limit = (min(nbytes / max(most, 1), 1.0) for nbytes in (_LEAST_BYTES, MOST_BYTES))
        while repeats < _REPEATS and left > 0:
            last, left = self._sample(fraction)
            timed.append(last)
            took = last.write + (last.read or 0.0)
            if last.fraction < fraction or left < took:
                break
            grown = min(fraction * _GROWTH, limit)
            if fraction < limit and last.write * _LONG_SHARE < whole_time and took * grown / fraction < left:
                fraction = grown
            else:
                repeats += 1
        return timed

    def _sample(self, fraction: float) -> tuple[_Timed, float]:
        """Writes, reads and removes one sample. Also returns the seconds that are left, on rank 0. Collective."""
        sample, _ = self._ranks.agree(self._call, lambda: self._prepared(fraction))
        written, slowest = self._ranks.agree(
            self._call,
            work=lambda: self._write(sample),
            report=lambda written: written[:2],
            decide=lambda reports: [max(seconds for seconds, _ in reports), min(done for _, done in reports)],
        )
        seconds, done = slowest
        _, (reading, left) = self._ranks.agree(
            self._call,
            work=lambda: self._read(sample, *written[2:]) if done == 1 else 0.0,
            report=float,
            decide=lambda reports: [max(reports), self._end - world().monotonic()],
        )
        return _Timed(fraction * done, seconds, reading if done == 1 else None), left

    def _prepared(self, fraction: float) -> Sample:
        sizes = part_of(self._sizes, fraction) if fraction else ()
        sizes = sizes or [(DTYPES["uint8"], 1)]
        room = room_for(sizes)
        if self._noise.numel() < room:
            self._noise = noise_of(room, self._device)
            self._target = torch.zeros_like(self._noise)  # whose memory is there before a read into it is timed
        sample = Sample.of(sizes, world().random_name(6), self._noise)
        sample.writes.header(0, 0)  # which later saves have kept
        return sample

    def _write(self, sample: Sample) -> tuple[float, float, int, str]:
        """Returns the seconds, the part that was written in time, and the bytes and the digest of the file."""
        done, late = [0, 1], list[bool]()

        def in_time(nbytes: int, total: int) -> None:
            done[:] = nbytes, max(total, 1)
            if world().monotonic() > self._end and nbytes < total:
                late.append(True)
                raise _Late

        self._written.append(sample.name)
        begin = world().monotonic()
        try:
            with wrap_os_errors(f"write {self.storage.url}/{sample.name}"):
                file, *_ = write_files(
                    self.storage, sample.save_id, sample.writes, lambda each: sample.tensors[each.key], None, in_time
                )
        except Exception:
            if not late:
                raise
            return world().monotonic() - begin, done[0] / done[1], 0, ""
        return world().monotonic() - begin, 1.0, file.nbytes, file.digest

    def _read(self, sample: Sample, nbytes: int, digest: str) -> float:
        reader, pieces = sample.reader(self.storage, nbytes, digest), sample.pieces(self._target)
        begin = world().monotonic()
        fetch(reader.requests(pieces, others_follow=False))
        seconds = world().monotonic() - begin
        self._remove(sample.name)
        return seconds

    def mark(self) -> None:
        """Writes the file by which other ranks know the directory, on rank 0."""
        with wrap_os_errors(f"write to {self.storage.url}"):
            write_marker(self.storage, self._save_id)

    def publish(self, manifest: bytes) -> float:
        """Returns the seconds of the publication of as many bytes, on rank 0."""
        name = file_name(self._save_id, 0, 1)
        self._written.append(name)
        begin = world().monotonic()
        with wrap_os_errors(f"write {self.storage.url}/{name}"):
            self.storage.publish_new(name, manifest or b"-")
        return world().monotonic() - begin

    def clear(self) -> None:
        """Removes all files of this rank, and the directory with the last ones."""
        for name in [*self._written]:
            with suppress(Exception):  # the error that is being raised must not be hidden by another
                self._remove(name)
        with suppress(Exception):
            if self._ranks.rank == 0 and self._ranks.size > 1:
                remove_marker(self.storage, self._save_id)
            self.storage.remove_if_empty()

    def _remove(self, name: str) -> None:
        with wrap_os_errors(f"remove {self.storage.url}/{name}"):
            self.storage.remove(name)
        self._written.remove(name)
