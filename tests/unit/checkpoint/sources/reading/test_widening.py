"""How many requests to a store are in flight: more for as long as that pays."""

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.sources.reading import checking, fetch
from shardopt.checkpoint.sources.reading.scratch import copy_into
from shardopt.checkpoint.sources.reading.widening import Widening
from shardopt.errors import CheckpointError, CorruptionError
from shardopt.sharding.box import whole
from shardopt.sharding.pieces import Piece
from shardopt.world import using
from tests.support.worlds import FakeClock


def threads_after(reads, rate_of, most=24):
    """The number of threads after so many reads of one byte; `rate_of` gives bytes a second by threads."""
    with using(FakeClock()) as clock:
        widening, threads = Widening(8, most), 8
        for _ in range(reads):
            clock.now += 1 / rate_of(threads)
            threads += widening.more_threads(1)
    return threads


@pytest.mark.parametrize(
    ("rate_of", "threads"),
    [
        (lambda threads: threads, 24),  # each connection has a rate of its own
        (lambda threads: min(threads, 12), 18),  # the network is full with 12; that shows with 18
        (lambda threads: 8, 12),  # the network was full from the beginning
        (lambda threads: 96 / threads, 12),  # more threads are in each other's way
    ],
)
def test_threads_are_added_while_that_pays(rate_of, threads):
    assert threads_after(1000, rate_of) == threads


def test_nothing_is_judged_before_each_thread_has_read_twice():
    assert threads_after(15, lambda threads: threads) == 8
    assert threads_after(16, lambda threads: threads) == 12


def test_the_most_is_never_exceeded():
    assert threads_after(1000, lambda threads: threads, most=10) == 10
    assert threads_after(1000, lambda threads: threads, most=8) == 8


@pytest.mark.parametrize(
    ("where", "mib", "threads"), [("far", 1, 8), ("far", 96, 13), ("far", 256, 24), ("disk", 96, 0)]
)
def test_a_load_has_no_more_threads_than_reads(tmp_path, where, mib, threads):
    """And disks have as many as always."""
    url = tmp_path / "c" if where == "disk" else f"memory://widening-{mib}"
    value = torch.zeros(mib << 18)
    checkpoint.save(url, {"x": value}, durable=False)
    with checkpoint.open(url) as reader:
        requests = reader.requests([("x", [Piece(whole(tuple(value.shape)), torch.ones_like(value))])])
        batches = fetch._Batches(requests, copy_into)
        assert batches.most_threads == (threads or batches.threads)
        if where == "far":
            assert batches.threads == 8


@pytest.mark.parametrize("fails", [False, True])
def test_threads_that_were_added_read_and_their_errors_end_the_load(monkeypatch, fails):
    monkeypatch.setattr(checking, "_FAR_SIZES", checking.ReadSizes(*[1 << 20] * 3, threads=8, most_threads=24))
    seen, read_all = [], fetch._Batches.read_all

    def noting(self, *arguments):
        seen.append(1)
        if fails and len(seen) > 8:
            raise CorruptionError("by the test")
        read_all(self, *arguments)

    monkeypatch.setattr(fetch._Batches, "read_all", noting)
    monkeypatch.setattr(Widening, "more_threads", lambda self, nbytes: 1 if len(seen) < 11 else 0)
    value = torch.arange(32 << 18, dtype=torch.float32)
    checkpoint.save(f"memory://widening/added-{fails}", {"x": value}, durable=False)
    app = {"x": torch.zeros_like(value)}
    if fails:
        with pytest.raises(CheckpointError, match="by the test"):
            checkpoint.load(f"memory://widening/added-{fails}", app)
        return
    checkpoint.load(f"memory://widening/added-{fails}", app)
    assert torch.equal(app["x"], value) and len(seen) >= 9
