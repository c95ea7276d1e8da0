"""Starts ranks, waits for them under a deadline, and reports what went wrong first.

Ranks are forked from a server that has torch loaded (`tests/fork_server.py`). They meet in a file, so no port can be
taken.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import settings

from tests import fork_server
from tests.harness.faults import Fault
from tests.harness.outcome import Outcome
from tests.harness.rank import LEAVE, Job, rank_main

T = TypeVar("T")

_SETTLE_SECONDS = 0.3  # how long a rank that has failed stays, so that others that fail by themselves can say so
_GIVE_UP_SECONDS = 2.0  # how long the others may still run after that, where one failure decides the test
_STACK_SECONDS = 2.0  # how long a rank that hangs may take to write its stack
_MOST_LOG_LINES = 40


class RanksFailed(AssertionError):
    """Ranks did not do what the test asked of them; the message holds the first failure in full."""


def run_ranks(
    n: int,
    function: Callable[..., T],
    *args: Any,
    deadline_seconds: float = 60.0,
    faults: Sequence[Fault] = (),
    trace: Sequence[str] = (),
    backend: str | None = "gloo",
    **kwargs: Any,
) -> list[T]:
    """Run `function(*args, **kwargs)` on n ranks, and give each rank's result, by rank.

    Args:
        n: number of ranks; each is a process with one torch thread.
        function: at module level, since the ranks import it; arguments and results are pickled.
        deadline_seconds: after which all ranks are killed, and the test fails with the stacks of those that hung.
        faults: what goes wrong, and where. Not one of them reached is a failure of the test.
        trace: operations whose calls are recorded in the outcomes.
        backend: of the process group that each rank finds initialized; None for none.

    Raises:
        RanksFailed: a rank raised, died or hung; with the full traceback of the first that did.
    """
    __tracebackhide__ = True
    stays = not (faults or trace) and backend == "gloo" and ranks_stay(function)
    with _ranks(n, function, args, kwargs, backend, faults, trace, stays) as ranks:
        _wait_for_outcomes(ranks, deadline_seconds, first_failure_decides=True)
        failed = [rank for rank in ranks if rank.outcome is not None and not rank.outcome.ok]
        if failed:
            raise RanksFailed(_first_failure(ranks, min(failed, key=_order_of_failure)))
        _check_struck(ranks, faults)
        return [rank.outcome.value for rank in ranks]  # type: ignore[union-attr,misc]  # each has an outcome, and is ok


def run_ranks_outcomes(
    n: int,
    function: Callable[..., T],
    *args: Any,
    deadline_seconds: float = 60.0,
    faults: Sequence[Fault] = (),
    trace: Sequence[str] = (),
    backend: str | None = "gloo",
    **kwargs: Any,
) -> list[Outcome[T]]:
    """As `run_ranks`, but a rank may raise or die: how each of them ended is the result.

    Raises:
        RanksFailed: a rank hung.
    """
    __tracebackhide__ = True
    with _ranks(n, function, args, kwargs, backend, faults, trace) as ranks:
        _wait_for_outcomes(ranks, deadline_seconds, first_failure_decides=False)
        _check_struck(ranks, faults)
        return [rank.outcome for rank in ranks if rank.outcome is not None]


def ranks_stay(function: Callable[..., Any]) -> bool:
    """Whether the file of a function says `RANKS_STAY = True`: its functions follow one another on the same ranks.

    As those of a long program do, in one process group, which spares each rank some 60 ms of its processor. Whoever
    leaves something that another function would find (`traces.py`) or fails has the next one begin on new ranks, and
    so does each file.
    """
    return bool(getattr(sys.modules.get(function.__module__), "RANKS_STAY", False))


class _Rank:
    """One rank as the test process sees it."""

    def __init__(self, rank: int, job: Job) -> None:
        self.rank, self.job = rank, job
        self.outcome: Outcome[Any] | None = None
        self.connection, rank_end = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        self.process: BaseProcess = context.Process(target=rank_main, args=(rank, job, rank_end), name=f"rank {rank}")
        self.process.start()
        rank_end.close()

    def begin(self, job: Job) -> None:
        """Has the rank, which has stayed, run another job."""
        self.outcome = None
        if self.job.log(self.rank).exists():
            os.truncate(self.job.log(self.rank), 0)
        self.connection.send_bytes(pickle.dumps(job))

    def take_outcome(self) -> None:
        """Note how the rank ended, if it has."""
        alive = self.process.is_alive()  # asked first: what a dead rank has sent lies in the pipe already
        if self.connection.poll():
            try:
                self.outcome = pickle.loads(self.connection.recv_bytes())
                return
            except (EOFError, OSError):
                self.process.join()
                alive = False
        if not alive:
            self.outcome = Outcome(self.rank, exit_code=self.process.exitcode, at_seconds=time.monotonic())

    def ask_for_stack(self) -> None:
        """Have the rank write its stacks: a C handler does it, whatever the rank is blocked in."""
        if self.process.pid is not None and self.process.is_alive() and self.job.stack(self.rank).exists():
            os.kill(self.process.pid, signal.SIGUSR1)

    def stack(self) -> str:
        path = self.job.stack(self.rank)
        return path.read_text() if path.exists() else ""

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()

    def log(self) -> str:
        path = self.job.log(self.rank)
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join([f"--- output of rank {self.rank}", *lines[-_MOST_LOG_LINES:]]) if lines else ""


class _Staying:
    """The ranks that have stayed, by their number, of the file whose functions they run."""

    def __init__(self) -> None:
        self.file = ""
        self.ranks: dict[int, tuple[tempfile.TemporaryDirectory[str], list[_Rank]]] = {}

    def take(self, file: str, n: int) -> tuple[tempfile.TemporaryDirectory[str], list[_Rank]] | None:
        if file != self.file:
            self.end()
            self.file = file
        return self.ranks.pop(n, None)

    def end(self) -> None:
        """Ends all."""
        for folder, ranks in self.ranks.values():
            _end(folder, ranks)
        self.ranks.clear()


_STAYING = _Staying()
end_staying = _STAYING.end
# Before multiprocessing waits for its processes at the end of this one.
multiprocessing.util.Finalize(None, end_staying, exitpriority=100)


@contextmanager
def _ranks(
    n: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backend: str | None,
    faults: Sequence[Fault],
    trace: Sequence[str],
    stays: bool = False,
) -> Iterator[list[_Rank]]:
    """n running ranks; none of them is left, whatever happens in the block, but those that stay."""
    __tracebackhide__ = True
    if any(not 0 <= fault.rank < n for fault in faults):
        raise ValueError(f"a fault on a rank that is not one of {n}: {list(faults)}")
    fork_server.start()
    folder, ranks = (stays and _STAYING.take(function.__module__, n)) or (
        tempfile.TemporaryDirectory(prefix="shardopt-ranks-"),
        [],
    )
    try:
        # Pickled here and not by multiprocessing, whose tensors would travel as shared memory of this process.
        call = pickle.dumps((function, args, kwargs))
        environment, filters = dict(os.environ), list(warnings.filters)
        in_full = stays and settings.get_current_profile_name() == "exhaustive"  # of tests/conftest.py
        job = Job(n, Path(folder.name), call, backend, faults, trace, environment, filters, os.getcwd(), stays, in_full)
        if ranks:
            for each in ranks:
                each.begin(job)
        else:
            for rank in range(n):
                ranks.append(_Rank(rank, job))
        yield ranks
        if all(each.outcome is not None and each.outcome.stays for each in ranks):
            _STAYING.ranks[n] = folder, ranks
    finally:
        if _STAYING.ranks.get(n, (folder, []))[1] is not ranks:
            _end(folder, ranks)


def _end(folder: tempfile.TemporaryDirectory[str], ranks: Sequence[_Rank]) -> None:
    for each in ranks:
        each.end()
    folder.cleanup()


def _wait_for_outcomes(ranks: Sequence[_Rank], deadline_seconds: float, first_failure_decides: bool) -> None:
    """Fill in every rank's outcome, let those that all succeeded leave together; a rank that hangs is a failure."""
    __tracebackhide__ = True
    deadline = time.monotonic() + deadline_seconds
    first_failure_at = float("inf")
    while running := [rank for rank in ranks if rank.outcome is None]:
        now = time.monotonic()
        if now >= first_failure_at + _SETTLE_SECONDS:
            for rank in ranks:
                if rank.outcome is not None:
                    rank.process.kill()  # its peers must see it gone
            if first_failure_decides and now >= first_failure_at + _SETTLE_SECONDS + _GIVE_UP_SECONDS:
                return
        if now >= deadline:
            raise RanksFailed(_hung(ranks, running, f"did not finish within {deadline_seconds:g} s"))
        connection.wait(
            [*(rank.connection for rank in running), *(rank.process.sentinel for rank in running)],
            timeout=min(deadline - now, 60.0 if first_failure_at == float("inf") else 0.05),
        )
        for rank in running:
            rank.take_outcome()
            if rank.outcome is not None and not rank.outcome.ok:
                first_failure_at = min(first_failure_at, time.monotonic())
    if first_failure_at == float("inf") and not all(rank.outcome is not None and rank.outcome.stays for rank in ranks):
        _leave_together(ranks, deadline)


def _leave_together(ranks: Sequence[_Rank], deadline: float) -> None:
    """All returned: let them close their group and end, which can abort or hang too."""
    __tracebackhide__ = True
    for rank in ranks:
        rank.connection.send_bytes(LEAVE)
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
    left = [rank for rank in ranks if rank.process.exitcode is None]
    if left:
        raise RanksFailed(_hung(ranks, left, "returned, but did not end"))
    for rank in ranks:
        if rank.process.exitcode != 0:
            rank.outcome = Outcome(rank.rank, exit_code=rank.process.exitcode, at_seconds=time.monotonic())


def _check_struck(ranks: Sequence[_Rank], faults: Sequence[Fault]) -> None:
    """A fault that is never reached would make a test pass that tests nothing."""
    __tracebackhide__ = True
    outcomes = [rank.outcome for rank in ranks if rank.outcome is not None]
    if faults and not any(outcome.struck or outcome.signal is not None for outcome in outcomes):
        counts = {f"rank {o.rank}": {name: o.calls.count(name) for name in sorted(set(o.calls))} for o in outcomes}
        raise RanksFailed(f"no fault was reached: {list(faults)}; calls were {counts}")


def _order_of_failure(rank: _Rank) -> tuple[bool, float]:
    """A signal comes first, since peers that see the dead rank's connection close can report before its death is
    noted here; but not an abort, which is what torch's own threads do when a peer is gone."""
    outcome = rank.outcome
    assert outcome is not None
    return outcome.signal in (None, signal.SIGABRT), outcome.at_seconds


def _first_failure(ranks: Sequence[_Rank], first: _Rank) -> str:
    assert first.outcome is not None
    lines = [f"{first.outcome} (first of {len(ranks)} ranks)", first.outcome.traceback.rstrip(), first.log()]
    for rank in ranks:
        if rank.outcome is None:
            lines.append(f"rank {rank.rank} was still running")
        elif rank is not first:
            later = rank.outcome.at_seconds - first.outcome.at_seconds
            lines.append(f"{rank.outcome} ({later:+.3f} s)")
    return "\n".join(filter(None, lines))


def _hung(ranks: Sequence[_Rank], hung: Sequence[_Rank], what: str) -> str:
    """Names the ranks that hang, with the Python stack of each of their threads."""
    for rank in hung:
        rank.ask_for_stack()
    end = time.monotonic() + _STACK_SECONDS
    while not all(rank.stack() for rank in hung) and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.1)  # for the last lines
    lines = [f"rank {', '.join(str(rank.rank) for rank in hung)} of {len(ranks)} {what}"]
    for rank in ranks:
        if rank not in hung and rank.outcome is not None:
            lines += [str(rank.outcome), rank.outcome.traceback.rstrip()]
    for rank in hung:
        threads = [thread for thread in rank.stack().split("\n\n") if "in die_with_parent" not in thread]
        lines += [f"--- stack of rank {rank.rank}", "\n\n".join(threads).rstrip() or "(none was given)", rank.log()]
    return "\n".join(filter(None, lines))
