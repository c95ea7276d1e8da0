"""Judges a simulated stream: what ranks were told, and what is left under the root."""

from __future__ import annotations

import re
from collections import defaultdict

from shardopt import checkpoint
from shardopt.checkpoint.run.branches import parse_id
from shardopt.checkpoint.sources.referred import references_under
from shardopt.checkpoint.storage import storage_of
from tests.simulation.schedule import DEADLINE_SECONDS
from tests.simulation.streams.jobs import LONG_SECONDS, Around, RunningFollower, RunningJob
from tests.simulation.streams.storage import MANIFEST
from tests.simulation.streams.weights import App
from tests.simulation.tasks import Process
from tests.simulation.told import Told, have_left, meaning
from tests.simulation.world import begin_process


def judge(around: Around, started: list[RunningJob]) -> list[str]:
    """Returns what is wrong with what ranks were told."""
    problems = []
    allowed = _seconds_allowed(around)
    by_call: defaultdict[tuple[int, str], list[Told]] = defaultdict(list)
    for told in around.ledger.told:
        if told.end - told.begin > allowed:
            problems.append(f"{told.call} of rank {told.rank} took {told.end - told.begin:.1f} s: {told}")
        if not told.ok and _has_no_excuse(around, started[told.job], told):
            problems.append(f"a call failed without a fault: {started[told.job].name}: {told}")
        if told.text.startswith("RankError") and not re.search(r"rank", told.text.partition(":")[2]):
            problems.append(f"an error does not name who was waited for: {told}")
        if not told.disturbed:
            by_call[told.job, told.call].append(told)
    for (number, call), all_told in by_call.items():
        # Where who passes answers on is hit while it does, some have the answer, and others an error.
        if 0 in started[number].disturbed:
            all_told = [told for told in all_told if told.ok]
        if len({meaning(told, have_left(around.ledger.told, told)) for told in all_told}) > 1:
            each = "\n".join(f"  rank {told.rank}: {told.text}" for told in all_told)
            problems.append(f"{call} of {started[number].name} told ranks differently:\n{each}")
    return problems


def _seconds_allowed(around: Around) -> float:
    """Returns how long a call may take at most: deadlines of some rounds, and all that the schedule slows down."""
    seconds = 5 * DEADLINE_SECONDS + 12.0
    for hit in around.schedule.hits:
        seconds += {"stop": hit.seconds, "slow": 0.03 * hit.seconds, "object": 4.0}.get(hit.kind, 0.0)
    return seconds + sum(LONG_SECONDS for job in around.schedule.following if job.holds)


def _has_no_excuse(around: Around, running: RunningJob, told: Told) -> bool:
    """Whether nothing has hit a job, nor what it reads, nor does it do anything for which it is to be refused."""
    if around.ledger.damaged or any(hit.detail == "late" for hit in around.schedule.hits):
        return False
    if isinstance(running, RunningFollower) and (running.job.holds or " to " in told.call):
        return False
    return not running.hits


def judge_stored(around: Around, keep: int) -> list[str]:
    """Reads all that is under the root, in a process of its own; returns what is wrong with it."""
    scheduler, problems = around.world.scheduler, list[str]()
    reader = Process(scheduler, "reader", "reader")

    def read() -> None:
        begin_process(reader)
        problems.extend(_read(around, keep))

    reader.start(read)
    if not scheduler.run(lambda: reader.dead, scheduler.now + 100):
        problems.append("reading does not end")
    return problems


def _read(around: Around, keep: int) -> list[str]:
    stored, ledger, problems = around.stored, around.ledger, list[str]()
    committed, steps = stored.committed(), []
    referred = references_under(storage_of(stored.root))
    for directory, names in stored.steps().items():
        id = parse_id(directory)
        if id is None:
            continue
        if directory in committed:
            steps.append(id.step)
            url = f"{stored.root}/{directory}"
            report = checkpoint.verify(url)
            app = App(1, 0, "whole", stages=False)
            if report.problems:
                problems.append(f"{url} is kept, and not whole: {report}")
            else:
                checkpoint.load(url, app.tensors)
                if ledger.attempt_of(app, id.step) is None:
                    problems.append(f"{url} is {ledger.why_not(app, id.step)}")
        else:
            left = [name for name in names if name != MANIFEST and name not in referred.get(directory, ())]
            if left or not names:
                problems.append(f"{directory} is no step any more, and has {left}")
    newest = ledger.newest
    if newest is not None and sorted(steps) != [*range(newest.step - keep + 1, newest.step + 1)]:
        problems.append(f"steps {sorted(steps)} are kept, and not the last {keep} before {newest}")
    return problems
