"""How ranks agree: here each rank is a thread of this process, with a store of its own kind.

What only processes can show (death, real process groups) is in tests/distributed/test_ranks.py.
"""

import gc
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from shardopt.errors import CheckpointError, CheckpointExistsError, MismatchError, Problem, RankError, StateError
from shardopt.ranks import Ranks, call_on, ranks_of
from shardopt.ranks import channel as channel_module
from shardopt.ranks import ranks as ranks_module
from shardopt.ranks.channel import Channel
from shardopt.ranks.collectives import accelerator_of
from shardopt.ranks.connections import heartbeat
from shardopt.ranks.connections.frames import MAIN
from shardopt.ranks.connections.node import Node
from shardopt.ranks.failures import different_calls
from shardopt.ranks.kinds import decompress, exchange, kind_by_rank, kinds_of
from shardopt.world import using
from tests.support.worlds import FakeClock


class Group:
    """The methods that `Ranks` asks of a process group."""

    def __init__(self, rank, size, store):
        self._rank, self._size, self._store = rank, size, store

    def rank(self):
        return self._rank

    def size(self):
        return self._size

    def get_group_store(self):
        return self._store


@pytest.fixture(autouse=True)
def stubs_have_no_backend(monkeypatch):
    monkeypatch.setattr(ranks_module, "accelerator_of", lambda group: None)
    monkeypatch.setattr(ranks_module, "_members", lambda group: tuple(range(group.size())) if group else (0,))


class Job:
    """Stores for the ranks of one job after the other: `start` makes ranks that know of nothing yet."""

    def __init__(self, kind, folder):
        self.kind, self.path = kind, str(folder / "store")
        self.master = None
        if kind == "tcp":
            self.master = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        if kind == "hash":
            self.master = dist.HashStore()

    def store(self):
        if self.kind == "tcp":
            return dist.TCPStore("localhost", self.master.port, is_master=False)
        return dist.FileStore(self.path) if self.kind == "file" else self.master

    def start(self, size=3):
        return [Ranks(Group(rank, size, self.store())) for rank in range(size)]


@pytest.fixture
def job(tmp_path):
    return Job("hash", tmp_path)


@pytest.fixture(params=["hash", "tcp", "file"])
def any_job(request, tmp_path):
    return Job(request.param, tmp_path)


@pytest.fixture(params=["tcp", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in ("hash", "file"))])
def long_job(request, tmp_path):
    """As `any_job`, for what takes long; it is the same for each kind of store, as ranks only meet there."""
    return Job(request.param, tmp_path)


def together(ranks: list[Ranks], each: Callable[[Ranks], object], absent=()) -> list:
    """Returns what `each` gives or raises on every rank, all at once; None for the absent."""
    outcomes: list = [None] * len(ranks)

    def run(i):
        try:
            outcomes[i] = each(ranks[i])
        except BaseException as error:
            outcomes[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(ranks)) if i not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    return outcomes


def alike(errors, kind):
    """All are the same error; gives its text."""
    assert [type(error) for error in errors] == [kind] * len(errors), errors
    assert len({str(error) for error in errors}) == 1
    return str(errors[0])


def fail(error):
    raise error


# Without a failure.


def test_one_process_alone_is_a_job_of_one():
    here = ranks_of()
    assert (here.rank, here.size) == (0, 1)
    assert here.agree("x", lambda: 3, lambda n: n + 1, lambda reports: [*reports, 7]) == (3, [4, 7])
    error = ValueError("as it is")
    with pytest.raises(ValueError) as raised:
        here.agree("x", lambda: fail(error))
    assert raised.value is error


def test_a_group_of_one_needs_no_store():
    assert Ranks(Group(0, 1, None)).agree("x", lambda: 3, lambda n: n, sum) == (3, 3)


def test_every_rank_has_its_own_result_and_the_one_decision(any_job):
    deciders = []

    def decide(reports):
        deciders.append(threading.current_thread())
        return {"sum": sum(reports), "reports": reports}

    def two_rounds(here):
        first = here.agree("x", lambda: here.rank * 10, lambda n: n + 1, decide)
        return first, here.agree("y", lambda: "done"), threading.current_thread()

    outcomes = together(any_job.start(4), two_rounds)
    assert [first for first, _, _ in outcomes] == [
        (rank * 10, {"sum": 64, "reports": [1, 11, 21, 31]}) for rank in range(4)
    ]
    assert [second for _, second, _ in outcomes] == [("done", None)] * 4
    assert deciders == [outcomes[0][2]]


def test_every_rank_reads_the_section_that_it_needs(long_job):
    """One that is larger than a value of a TCPStore too; sections are gone once all ranks are in a later round."""

    def two_rounds(here):
        sections = [bytes([number]) * (1 + number * (9 << 20)) for number in range(2)]
        got = [
            here.agree_in_sections(
                "x",
                lambda: here.rank,
                lambda rank: rank,
                lambda reports: ([rank % 2 for rank in reports], sections),
                lambda section_of, rank: section_of[rank],
            )
            for _ in range(2)
        ]
        here.agree("y", lambda: None)
        here.agree("y", lambda: None)
        return got

    job = long_job.start(3)
    for rank, outcome in enumerate(together(job, two_rounds)):
        for result, decision, section in outcome:
            assert (result, decision) == (rank, [0, 1, 0])
            assert section == (b"\1" * (1 + (9 << 20)) if rank == 1 else b"\0")
    assert all(here.channel.node.hub.session(MAIN).section == (0, b"") for here in job)


def test_one_process_alone_has_a_section():
    outcome = ranks_of().agree_in_sections(
        "x", lambda: 3, lambda n: n, lambda reports: (reports, [b"a"]), lambda _, rank: 0
    )
    assert outcome == (3, [3], b"a")


def test_sections_that_cannot_be_made_are_everybodys_error(job):
    def fails(here):
        here.agree_in_sections(
            "x", lambda: 1, lambda n: n, lambda _: fail(StateError("no sections", [])), lambda _, rank: 0
        )

    ranks = job.start()
    assert "no sections" in alike(together(ranks, fails), StateError)
    assert together(ranks, lambda here: here.agree("y", lambda: here.rank)[0]) == [0, 1, 2]


def exchanged(here):
    """Ranks of two kinds send numbers, and get the sum of them, and the product with their kind."""
    kinds = kinds_of(["a", "b", "b", "a"])
    own = kind_by_rank(kinds)[here.rank]
    describe = (lambda: here.rank + 10) if kinds[own][0] == here.rank else None
    answer, section = exchange(
        here,
        "x",
        describe,
        lambda sent: ({"sent": sorted(map(list, sent.items()))}, [number * sum(sent.values()) for number in range(2)]),
        lambda _, rank: kind_by_rank(kinds)[rank],
    )
    return answer, decompress(section)


def test_the_first_of_each_kind_is_heard(any_job):
    answer = {"sent": [[0, 10], [1, 11]]}
    assert together(any_job.start(4), exchanged) == [(answer, 0), (answer, 21), (answer, 21), (answer, 0)]


def test_large_reports_and_decisions_travel_in_parts(long_job):
    """A TCPStore takes no value of more than 8 MiB."""
    large = "x" * (9 << 20)
    outcomes = together(
        long_job.start(2), lambda here: here.agree("x", lambda: large, lambda r: r, lambda rs: rs[1] + "y")
    )
    assert outcomes == [(large, large + "y")] * 2


def test_many_rounds_leave_few_keys(long_job):
    def rounds(count):
        large = "x" * (5 << 20)  # two parts
        return lambda here: [
            here.agree("x", lambda: large if i == 0 else "", lambda report: report, len)  # noqa: B023  # called at once
            for i in range(count)
        ]

    ranks, store = long_job.start(), long_job.store()
    together(ranks, rounds(5))
    keys = store.num_keys()
    together(ranks, rounds(40))
    assert store.num_keys() <= keys <= 20


def test_slow_work_that_beats_is_waited_for(long_job):
    def slow(here):
        return here.with_deadline(1.5).agree("x", lambda: time.sleep(2.2 if here.rank == 1 else 0))

    assert together(long_job.start(), slow) == [(None, None)] * 3


def test_a_slow_decision_that_beats_is_waited_for(job):
    def slow(here):
        return here.with_deadline(1.5).agree("x", lambda: None, decide=lambda _: time.sleep(2.2))

    assert together(job.start(), slow) == [(None, None)] * 3


# Work or decision fails: all raise the same, and stay in step.


def then_once_more(here, call):
    """The error of a call, once a further round has shown that the ranks are still in step."""
    try:
        call(here)
    except BaseException as error:
        assert here.agree("after", lambda: here.rank, lambda n: n, lambda reports: reports)[1] == list(range(here.size))
        return error
    raise AssertionError("no error")


@pytest.mark.parametrize("bad", [(0,), (1,), (1, 2), (0, 1, 2)], ids=str)
def test_the_failing_ranks_are_named_by_all(any_job, bad):
    problem = Problem("key", "this", "that", "mend it")

    def work(here):
        if here.rank in bad:
            raise StateError("it does not fit", [problem])

    outcomes = together(
        any_job.start(), lambda here: then_once_more(here, lambda here: here.agree("loading x", lambda: work(here)))
    )
    text = alike(outcomes, StateError)
    where = {1: f" on rank {bad[0]}", 2: " on ranks 1, 2", 3: ""}[len(bad)]
    assert text.startswith(f"loading x failed{where}: it does not fit [cannot-store]\n")
    assert all(error.problems == (problem,) for error in outcomes)
    for rank, error in enumerate(outcomes):  # a rank that failed by itself keeps its own error as the cause
        assert isinstance(error.__cause__, StateError) == (rank in bad)


def test_different_failures_are_all_told(job):
    shared = Problem("shared", "this", "that", "mend it")

    def work(here):
        if here.rank == 1:
            raise MismatchError("one does not fit", [shared, Problem("a", "this", "that", "mend it")])
        if here.rank == 2:
            raise CheckpointError("no space left", [shared, Problem("b", "this", "that", "mend it")])
        if here.rank == 3:
            raise ZeroDivisionError("a bug")

    outcomes = together(
        job.start(4), lambda here: then_once_more(here, lambda here: here.agree("x", lambda: work(here)))
    )
    text = alike(outcomes, MismatchError)
    assert text.startswith(
        "x failed on rank 1: one does not fit (and on rank 2: no space left; on rank 3: ZeroDivisionError: a bug) "
        "[does-not-fit]\n"
    )
    assert [problem.key for problem in outcomes[0].problems] == ["shared", "a", "b"]


def test_many_problems_of_many_ranks_are_merged_quickly(job):
    problems = [Problem(f"key {i}", "this", "that", "mend it") for i in range(5000)]

    def work(here):
        raise MismatchError("nothing fits", [*problems, Problem(f"of {here.rank}", "", "", "")])

    start = time.process_time()
    outcomes = together(job.start(), lambda here: here.agree("x", lambda: work(here)))
    assert time.process_time() - start < 5  # it took minutes
    assert [len(error.problems) for error in outcomes] == [5003] * 3


def test_a_decision_that_fails_is_everybodys_error(any_job):
    def decide(reports):
        raise CheckpointExistsError("the path is taken", [Problem("p", "a checkpoint", "none", "another path")])

    outcomes = together(
        any_job.start(),
        lambda here: then_once_more(here, lambda here: here.agree("saving p", lambda: None, decide=decide)),
    )
    assert alike(outcomes, CheckpointExistsError).startswith(
        "saving p failed on rank 0: the path is taken [path-taken]\n"
    )


@pytest.mark.parametrize("where", ["report", "decide"])
def test_what_is_no_json_is_everybodys_error(job, where):
    """Our own bug; but it must not show as a rank that gives no sign of heartbeat."""

    def call(here):
        here.agree(
            "x",
            lambda: None,
            lambda _: object() if where == "report" and here.rank == 1 else 0,
            lambda _: object() if where == "decide" else 0,
        )

    text = alike(together(job.start(), lambda here: then_once_more(here, call)), RankError)
    assert text.startswith(f"x failed on rank {1 if where == 'report' else 0}: TypeError")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_stays_one_and_the_others_are_told(job, rank, kind):
    def call(here):
        here.agree("x", lambda: fail(kind("stop")) if here.rank == rank else None)

    outcomes = together(job.start(), lambda here: then_once_more(here, call))
    assert type(outcomes.pop(rank)) is kind
    assert alike(outcomes, RankError) == f"x failed on rank {rank}: {kind.__name__}: stop [rank-failed]"


def test_an_interrupted_decision_is_told(job):
    def call(here):
        here.agree("x", lambda: None, decide=lambda _: fail(KeyboardInterrupt()))

    outcomes = together(job.start(), lambda here: then_once_more(here, call))
    assert type(outcomes.pop(0)) is KeyboardInterrupt
    assert alike(outcomes, RankError).startswith("x failed on rank 0: KeyboardInterrupt")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_while_waiting_leaves_the_ranks_in_step(job, rank):
    """The usual place to be in when the user interrupts: all do, and then want to save a last time."""
    ranks = job.start()
    channel = ranks[rank].channel
    wait = channel.wait

    def interrupted(*args):
        if channel._round == 2:
            raise KeyboardInterrupt
        return wait(*args)

    channel.wait = interrupted
    together(ranks, lambda here: here.agree("w", lambda: None))
    outcomes = together(
        ranks, lambda here: then_once_more(here, lambda here: here.agree("x", lambda: fail(OSError("?"))))
    )
    assert type(outcomes.pop(rank)) is KeyboardInterrupt
    assert all(type(error) is RankError for error in outcomes)


def test_an_interrupt_before_all_have_come_leaves_the_ranks_in_step(job):
    """Who comes later gets the answer that was given without it."""
    ranks = job.start()
    channel = ranks[0].channel
    wait = channel.wait

    def interrupted(*args):
        if channel._round < 3:
            raise KeyboardInterrupt
        return wait(*args)

    channel.wait = interrupted

    def call(here):
        if here.rank == 2:
            time.sleep(0.5)
        for _ in range(2):
            with pytest.raises((KeyboardInterrupt, RankError)) as caught:
                here.with_deadline(20).agree("x", lambda: None)
        assert here.agree("after", lambda: here.rank, lambda n: n, lambda reports: reports)[1] == [0, 1, 2]
        return caught.value

    outcomes = together(ranks, call)
    assert type(outcomes.pop(0)) is KeyboardInterrupt
    assert alike(outcomes, RankError) == "x failed on rank 0: KeyboardInterrupt:  [rank-failed]"


@pytest.mark.parametrize("before", ["_round", "reported", "call"])
def test_an_interrupt_between_two_lines_of_a_round_that_begins_is_known(tmp_path, before):
    """It counted the round, as one in which the others had a report: they waited for it, and this rank for them."""

    class Interrupted(Channel):
        def __setattr__(self, name, value):
            if name == before:
                raise KeyboardInterrupt
            super().__setattr__(name, value)

    ranks = Job("hash", tmp_path).start()
    together(ranks, lambda here: here.agree("w", lambda: None))
    channel = ranks[1].channel
    channel.__class__ = Interrupted
    with pytest.raises(KeyboardInterrupt):
        ranks[1].agree("x", lambda: None)
    assert channel.broken is not None or channel._round == 1


# Ranks that are in different calls.


def in_calls(*calls):
    """Each rank in a call of its own, and then all in one."""
    return lambda here: then_once_more(here, lambda here: here.agree(calls[here.rank], lambda: None))


def test_ranks_in_different_calls_are_told_at_once_by_all(any_job):
    start = time.monotonic()
    calls = "removing step 1 of /a/b", "restoring from /c on tiers", "removing step 1 of /b"
    outcomes = together(any_job.start(), in_calls(*calls))
    assert alike(outcomes, RankError) == (
        "ranks are in different calls: removing step 1 on ranks 0, 2; restoring on tiers on rank 1; "
        "all must make the same ones, in the same order [different-calls]"
    )
    assert time.monotonic() - start < 10  # not the deadline


def test_nobody_is_waited_for_where_two_are_in_different_calls(job):
    """The third may itself wait for one of them, elsewhere."""
    ranks = job.start()
    together(ranks, lambda here: here.agree("before", lambda: None))
    late = []

    def call(here):
        if here.rank == 2:
            while not late:
                time.sleep(0.01)
        try:
            here.with_deadline(30).agree("saving" if here.rank else "loading", lambda: None)
        except RankError as error:
            late.append(here.rank)
            assert here.agree("after", lambda: None) == (None, None)
            return str(error)

    outcomes = together(ranks, call)
    # Rank 2 comes late, to an answer that is there.
    assert set(outcomes) == {
        "ranks are in different calls: loading on rank 0; saving on rank 1; "
        "all must make the same ones, in the same order [different-calls]"
    }
    keys = job.store().num_keys()
    for _ in range(3):
        together(ranks, lambda here: here.agree("x", lambda: None))
    assert job.store().num_keys() <= keys


def test_ranks_of_unlike_versions_are_named_in_the_first_call_of_a_job(job, monkeypatch):
    own = threading.local()

    class Version:
        def __str__(self):
            return own.version

    def call(here, version):
        own.version = version
        return here.agree("saving", lambda: None)

    monkeypatch.setattr(channel_module, "__version__", Version())
    ranks = job.start()
    assert alike(together(ranks, lambda here: call(here, "2.0" if here.rank == 1 else "1.0")), RankError) == (
        "ranks have unlike versions of shardopt: 1.0 on ranks 0, 2; 2.0 on rank 1; install one version on all hosts "
        "[different-calls]"
    )
    monkeypatch.undo()
    assert str(different_calls([(0, "saving by version 1.0"), (1, "saving")])).startswith(
        "ranks have unlike versions of shardopt: 1.0 on rank 0; an earlier version on rank 1; "
    )


def test_of_paths_only_the_last_part_is_compared(job):
    ranks = job.start()
    places = ["/mnt/a/step-10", "/mnt/b/step-10/", Path("/local/x/step-10")]
    assert together(ranks, lambda here: here.agree(call_on("saving", places[here.rank]), lambda: None)) == (
        [(None, None)] * 3
    )
    steps = ["s3://b/run/step-10", "s3://b/run/step-11", "s3://b/run/step-10"]
    outcomes = together(ranks, in_calls(*(call_on("saving", each) for each in steps)))
    assert "saving step-10 on ranks 0, 2; saving step-11 on rank 1" in alike(outcomes, RankError)


def test_a_rank_in_another_call_is_told_so_whatever_it_met_there(job):
    def call(here):
        here.agree("saving" if here.rank else "loading", lambda: fail(OSError("?")) if here.rank == 1 else None)

    outcomes = together(job.start(), lambda here: then_once_more(here, call))
    assert "loading on rank 0; saving on ranks 1, 2" in alike(outcomes, RankError)


def test_a_word_that_is_agreed_upon_is_a_call_too(job):
    outcomes = together(
        job.start(),
        lambda here: then_once_more(
            here, lambda here: here.halt("stopping") if here.rank else here.side_channel("background")
        ),
    )
    assert "background on rank 0; stopping on ranks 1, 2" in alike(outcomes, RankError)


# Life between rounds.


def no_threads_are_left():
    """Of ranks that nobody has any more. The thread of signals is the process's: an earlier test may have needed it."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("shardopt-") and thread.name != "shardopt-signals":
            thread.join(10)
            assert not thread.is_alive(), thread.name


def test_beats_reach_from_the_first_line_to_the_last(job):
    def call(here):
        with here.with_deadline(0.2).beating():
            here.with_deadline(0.2).agree("x", lambda: None)
            with here.with_deadline(0.2).beating():
                time.sleep(0.6 if here.rank == 1 else 0)
            here.with_deadline(0.2).agree("x", lambda: None)
            time.sleep(0.6 if here.rank == 0 else 0)
            return here.with_deadline(0.2).agree("x", lambda: None)

    assert together(job.start(), call) == [(None, None)] * 3
    no_threads_are_left()


class Beats:
    """Counts what a node sends to show life; nobody is connected with it."""

    def __init__(self):
        self.node = Node(dist.HashStore(), 0, 2)
        self.count = 0
        self.node.hub.beat = self.beat

    def beat(self, name):
        self.count += 1


@pytest.fixture
def beats():
    beats = Beats()
    yield beats
    beats.node.stop()
    beats.node.join(10)


def test_life_is_shown_by_one_thread_however_many_want_it(beats):
    """Blocks that overlap, as of two threads in turn, and one of which a shorter deadline is asked."""
    before = threading.active_count()
    first, second, third = (beats.node.beating(MAIN, seconds) for seconds in (100, 0.05, 1))
    first.__enter__()
    time.sleep(0.1)
    assert beats.count == 0
    second.__enter__()
    third.__enter__()
    first.__exit__(None, None, None)
    while beats.count < 5:
        time.sleep(0.001)
    assert threading.active_count() == before + 1
    second.__exit__(None, None, None)
    third.__exit__(None, None, None)
    count = beats.count
    time.sleep(0.1)
    assert beats.count <= count + 1  # one that was under way


def test_without_another_thread_a_rank_says_so(job, monkeypatch):
    ranks, start = job.start(), threading.Thread.start

    def no_more(thread):
        if thread.name == "shardopt-ranks-1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", no_more)
    outcomes = together(ranks, lambda here: here.with_deadline(0.5).agree("x", lambda: None))
    assert "ranks cannot communicate: can't start new thread" in str(outcomes.pop(1))
    assert "x: rank 1 gave no sign of life" in alike(outcomes, RankError)


def test_many_short_blocks_within_a_long_one_do_not_keep_it_from_beating(beats):
    with beats.node.beating(MAIN, 0.5):
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            with beats.node.beating(MAIN, 0.4):
                time.sleep(0.001)
    assert beats.count >= 2


# Ranks that are silent.


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_does_not_come_is_named_and_then_all_is_over(long_job, absent):
    ranks = long_job.start()
    start = time.monotonic()
    outcomes = together(ranks, lambda here: here.with_deadline(0.4).agree("saving p", lambda: None), absent=[absent])
    assert time.monotonic() - start < 3
    del outcomes[absent]
    text = alike(outcomes, RankError)
    assert text.startswith(
        f"saving p: rank {absent} gave no sign of life for 0.4 s: dead, cut off, or not in this call"
    )
    start = time.monotonic()
    late = together(ranks, lambda here: here.with_deadline(0.4).agree("again", lambda: None))
    assert all(
        "lost step" in str(error) and f"rank {absent}" in str(error) for error in late if error is not late[absent]
    )
    assert isinstance(late[absent], RankError)  # it comes too late, and is told so


def test_a_rank_that_comes_once_the_others_gave_up_is_told_at_once(job):
    ranks = job.start()
    together(ranks, lambda here: here.agree("w", lambda: None))
    together(ranks, lambda here: here.with_deadline(0.3).agree("x", lambda: None), absent=[2])
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 2 gave no sign"):
        ranks[2].with_deadline(30).agree("x", lambda: None)
    assert time.monotonic() - start < 1
    with pytest.raises(RankError, match="lost step"):
        ranks[2].agree("x", lambda: None)


def test_silence_does_not_hide_what_others_met(job):
    def call(here):
        here.with_deadline(0.3).agree("x", lambda: fail(CheckpointError("no space left")) if here.rank == 1 else None)

    outcomes = together(job.start(4), call, absent=[3])
    text = alike(outcomes[:3], RankError)
    assert "rank 3 gave no sign of life" in text
    assert "on rank 1: no space left" in text


def test_a_rank_that_stops_between_rounds_is_named(any_job):
    def call(here):
        here.with_deadline(0.4).agree("first", lambda: None)
        if here.rank != 1:
            here.with_deadline(0.4).agree("second", lambda: None)

    outcomes = together(any_job.start(), call)
    assert outcomes.pop(1) is None
    assert alike(outcomes, RankError).startswith("second: rank 1 gave no sign of life")


def test_a_lost_store_is_an_error(tmp_path):
    job = Job("tcp", tmp_path)
    ranks = job.start()
    together(ranks, lambda here: here.agree("x", lambda: None))
    lost = threading.Timer(0.2, lambda: setattr(job, "master", None))
    lost.start()
    outcomes = together(ranks, lambda here: here.agree("x", lambda: None), absent=[1])
    lost.join()
    assert [type(outcomes[rank]) for rank in (0, 2)] == [RankError] * 2
    assert all("the job's store is lost" in str(outcomes[rank]) for rank in (0, 2))
    with pytest.raises(RankError, match="lost step"):
        ranks[0].agree("x", lambda: None)


@pytest.fixture
def clock():
    with using(FakeClock()) as clock:
        yield clock


def test_only_ranks_that_do_not_beat_are_silent(clock):
    watch = heartbeat.Silence(5.0)
    named = []
    for second in range(1, 12):
        clock.now += 1
        assert watch.due()
        named.append(watch.silent({1: second, 2: 0, 3: min(second, 3)}))
    assert named == [[]] * 5 + [[2]] * 3 + [[2, 3]] * 3


@pytest.mark.parametrize("before", [0, 3])
def test_who_was_stopped_itself_calls_nobody_dead(clock, before):
    """A process, or a machine with all its ranks, that stood still for long: nobody could beat, or be heard."""
    watch = heartbeat.Silence(5.0)
    for _ in range(before):
        clock.now += 1
        assert watch.silent({1: 0}) == []
    clock.now += 1000
    assert watch.silent({1: 0}) == []
    clock.now += 1
    assert watch.silent({1: 1}) == []


# A store that is not new.


@pytest.mark.parametrize(
    ("any_job", "first", "rounds"),
    [
        # Usually each kind of store with each rank that is first, and each of these with few and with many rounds.
        pytest.param(kind, first, rounds, id=f"{kind}-rank {first} first-{rounds}", marks=marks)
        for i, kind in enumerate(["hash", "tcp", "file"])
        for j, first in enumerate([0, 1, None])
        for k, rounds in enumerate([1, 3])
        for marks in [[pytest.mark.exhaustive][: (i + j + k) % 2]]
    ],
    indirect=["any_job"],
)
def test_what_another_job_left_in_the_store_is_no_answer(any_job, rounds, first):
    """torchrun restarts ranks on the store that they had."""

    def some_rounds(count, number):
        return lambda here: [
            here.agree("x", lambda: [number, here.rank, i], lambda report: report, lambda reports: reports)[1]  # noqa: B023  # called at once
            for i in range(count)
        ]

    def stale(here):
        return here.with_deadline(0.15).agree("x", lambda: None, lambda _: "stale", lambda _: "stale")

    def expected(count, number):
        return [[[[number, rank, i] for rank in range(3)] for i in range(count)]] * 3

    assert together(any_job.start(), some_rounds(rounds, 1)) == expected(rounds, 1)
    aborted = any_job.start()
    together(aborted, stale, absent=[2])
    for number in (3, 4):
        fresh = any_job.start()

        def late(here, number=number):
            time.sleep(0 if first is None or here.rank == first else 0.05)
            return some_rounds(rounds + 1, number)(here)

        assert together(fresh, late) == expected(rounds + 1, number)


def test_groups_do_not_meet_in_one_store(job):
    """Two channels over two prefixes of a store, as two process groups have them, used turn by turn."""
    one = [Ranks(Group(r, 2, dist.PrefixStore("one", job.store()))) for r in range(2)]
    two = [Ranks(Group(r, 2, dist.PrefixStore("two", job.store()))) for r in range(2)]
    for i in range(3):
        for name, ranks in (("one", one), ("two", two)):
            outcomes = together(ranks, lambda here: here.agree("x", lambda: None, lambda _: [name, i], lambda r: r)[1])  # noqa: B023  # called at once
            assert outcomes == [[[name, i]] * 2] * 2


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("cpu:gloo,cuda:nccl", "cuda"),
        ("cpu:ucc,cuda:ucc", "cuda"),
        ("cpu:ucc", None),
        ("cuda:nccl", "cuda"),
        ("cpu:gloo,cuda:gloo", None),  # which copies to the host by itself
        ("xpu:xccl", "xpu"),
    ],
)
def test_the_device_says_which_backend_is_for_accelerators(monkeypatch, config, expected):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert accelerator_of(None) == expected


@pytest.mark.parametrize(("deadline", "seconds"), [(300, 100), (150, 50), (45, 20), (math.inf, 1200)])
def test_ranks_that_are_waited_for_long_are_named_once(deadline, seconds):
    clock = FakeClock()
    with using(clock):
        watch = heartbeat.Silence(deadline)
        told = []
        for second in range(seconds + 30):
            clock.sleep(1.0)
            assert 1 not in watch.silent({1: second, 2: 0, 3: 0})
            told.append(watch.long_silent())
    assert [each for each in told if each] == [[2, 3]]
    assert seconds - 2 <= told.index([2, 3]) <= seconds + 3


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_comes_late_is_waited_for_with_a_line(job, monkeypatch, caplog, late):
    monkeypatch.setattr(heartbeat, "_LONG_WAIT_SECONDS", 1.5)

    def two_rounds(here):
        here = here.with_deadline(4.0)
        here.agree("x", lambda: None)
        if here.rank == late:
            time.sleep(3)
        here.agree("y", lambda: None)
        return here.rank

    assert together(job.start(3), two_rounds) == [0, 1, 2]
    line = (
        f"y: waiting for rank {late}; every rank must make this call. An error follows after 4 s without a sign of life"
    )
    assert f"{line} [rank-lost]" in caplog.messages
