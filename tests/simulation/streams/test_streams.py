"""Schedules of publishers and followers at the same time, each judged by what must always hold.

`python -m tests.simulation --stream SEED` replays one.
"""

from collections import Counter
from dataclasses import replace

import pytest

from shardopt.checkpoint.stream import follower
from tests.simulation.shrink import shrink
from tests.simulation.streams.schedule import Following, Hit, Publishing, Stream, draw
from tests.simulation.streams.simulate import simulate

DEFAULT = 20
CHUNK, CHUNKS = 1000, 20
SEEDS = range(3, 5)


def run_seeds(first, count):
    """Runs schedules; returns how many of them were distinct. Fails with the first that has a problem."""
    digests = set()
    for seed in range(first, first + count):
        outcome = simulate(draw(seed))
        problems = "\n".join(outcome.problems)
        assert not problems, f"python -m tests.simulation --stream {seed}\n{problems}"
        digests.add(outcome.digest)
    return len(digests)


def test_streams_hold_what_is_promised_and_come_to_all_of_it(monkeypatch):
    seen = Counter()
    update = follower.Follower._update

    def counting(self, *args):
        seen["of torn weights"] += self._is_torn
        report = update(self, *args)
        seen["whole" if report.whole == report.parts else "by deltas"] += 1
        seen["back"] += report.previous is not None and report.step < report.previous
        return report

    monkeypatch.setattr(follower.Follower, "_update", counting)
    assert run_seeds(170, DEFAULT) == DEFAULT  # some of which tear weights
    assert seen["by deltas"] > DEFAULT
    assert min(seen[each] for each in ("whole", "of torn weights", "back")) > 0, seen


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "job",
    [
        Following(ranks=2, updates=6, threads=1),
        Following(ranks=2, updates=6, threads=1, memory_bytes=0, layout="rows"),
    ],
    ids=["staged", "read-in-the-pause"],
)
def test_a_follower_may_be_killed_at_any_operation(job, request):
    step = 1 if request.config.getoption("exhaustive") else 29
    publishing = Publishing(changes=("few",) * 4, seconds=0.03, anchor_every=3)
    for rank in range(2):
        for at in range(1 + rank, 90, step):  # some of them between two changes of an update
            killed = replace(job, hits=(Hit("kill", rank, at),))
            outcome = simulate(Stream(at, (publishing,), (killed,)))
            assert outcome.problems == [], f"killed rank {rank} at {at}"


@pytest.mark.timeout(1200)
def test_a_publisher_may_be_killed_at_any_operation_and_take_steps_back(request):
    step = 1 if request.config.getoption("exhaustive") else 29
    following = (Following(updates=8, seconds=0.02, threads=1),)
    for rank in range(2):
        for at in range(1 + rank, 130, step):
            hit = Hit("kill", rank, at)
            first = Publishing(ranks=2, changes=("few",) * 5, seconds=0.0, anchor_every=2, keep=2, hits=(hit,))
            outcome = simulate(Stream(at, (first, Publishing(back=2)), following, first=0))
            assert outcome.problems == [], f"killed rank {rank} at {at}"


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_many_streams_hold_what_is_promised(chunk):
    distinct = run_seeds(chunk * CHUNK, CHUNK)
    print(f"{CHUNK} schedules, {distinct} distinct")
    assert distinct > 0.95 * CHUNK


def test_a_seed_gives_the_same_trace_again():
    here = [simulate(draw(seed)).digest for seed in SEEDS]
    assert [simulate(draw(seed)).digest for seed in reversed(SEEDS)] == here[::-1]


def test_a_schedule_of_a_stream_is_printed_as_code():
    names = {"Stream": Stream, "Publishing": Publishing, "Following": Following, "Hit": Hit}
    for seed in range(50):
        assert eval(str(draw(seed)), names) == draw(seed)


def test_a_failing_stream_shrinks_to_what_it_takes():
    def fails(schedule):
        return any(job.keep == 1 and job.ranks > 1 for job in schedule.publishing) and any(
            hit.kind == "kill" for job in schedule.following for hit in job.hits
        )

    large = Stream(
        7,
        publishing=(Publishing(keep=2), Publishing(ranks=3, keep=1, changes=("all", "few", "one"))),
        following=(Following(threads=2, hits=(Hit("flip"), Hit("kill", at=3))), Following(ranks=2)),
        remote=True,
    )
    smallest = Stream(7, (Publishing(ranks=2, changes=(), keep=1),), (Following(updates=2, hits=(Hit("kill"),)),))
    assert shrink(large, fails) == smallest
