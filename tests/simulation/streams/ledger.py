"""What was published and committed in a simulated stream, and so may be served."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from tests.simulation.streams.weights import App, Weights, begun, trained
from tests.simulation.told import Told


class Attempt(NamedTuple):
    """A step as a job has published it. A later job takes steps back: its attempts are newer than all before."""

    job: int
    step: int


class Ledger:
    """What all jobs of a simulation have done, and what was wrong with it.

    Args:
        seed, first: of the schedule.

    Attributes:
        ending: whether the last publisher was started: nothing that is stored is damaged any more.
        over: whether it has ended, and all faults are past.
        damaged: whether something that was stored was damaged.
        newest: what was published last.
        committed: what was committed last.
    """

    def __init__(self, seed: int, first: int) -> None:
        self.told: list[Told] = []
        self.problems: list[str] = []
        self.ending = self.over = self.damaged = False
        self.newest: Attempt | None = None
        self.committed: Attempt | None = None
        self._seed, self._first = seed, first
        self._jobs = 0  # that have begun to publish
        self._begun = begun(seed)
        self._weights: dict[Attempt, Weights] = {}
        self._trained: dict[int, Weights] = {}  # by step, as the job of now has them
        self._committing: defaultdict[int, list[Attempt]] = defaultdict(list)
        self._choices: dict[str, int | None] = {}

    def begins(self, back: int) -> int:
        """Has another job begin, so many steps back; returns its first step."""
        first = self._first if self.newest is None else max(self.newest.step + 1 - back, self._first)
        self._jobs += 1
        self._trained = {step: weights for step, weights in self._trained.items() if step < first}
        return first

    def publishes(self, job: int, step: int, changes: str) -> Weights:
        """Returns the weights of a step, the same on all ranks of a job."""
        attempt = Attempt(job, step)
        if attempt not in self._weights:
            before = self._trained[max(self._trained)] if self._trained else self._begun
            self._trained[step] = self._weights[attempt] = trained(before, changes, f"{self._seed} {job} {step}")
            self.newest = attempt
        return self._weights[attempt]

    def commits(self, job: int, step: int) -> None:
        """Notes that all ranks have written a step: from now on it may be committed."""
        self._committing[step].insert(0, Attempt(job, step))

    def comes_late(self, at: Attempt, least: Attempt | None) -> bool:
        """Whether an update has not come to what was committed before it.

        A job that has begun since may have taken that back.
        """
        return least is not None and at < least and least.job == self._jobs - 1 and not self.damaged

    def attempt_of(self, app: App, step: int) -> Attempt | None:
        """Returns the committed attempt at a step that an app has all weights of, the latest; None if there is none."""
        return next((each for each in self._committing[step] if not app.other_than(self._weights[each])), None)

    def why_not(self, app: App, step: int) -> str:
        """Returns which weights are not those of a step."""
        each = [f"{app.other_than(self._weights[attempt])} of job {attempt.job}" for attempt in self._committing[step]]
        return f"not step {step}: {'; '.join(each) or 'which nobody has committed'}"

    def choice(self, what: str, drawn: int | None) -> int | None:
        """Returns what the first rank has drawn, as all ranks make the same calls."""
        return self._choices.setdefault(what, drawn)
