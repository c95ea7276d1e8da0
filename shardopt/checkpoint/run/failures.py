"""What has failed behind the training, until it is raised: once on each rank, whichever has met it first."""

from __future__ import annotations

from shardopt.world import world


class Failures:
    """The failures of what is begun in one order on all ranks, by the number of its turn. Any thread may call."""

    def __init__(self) -> None:
        self._lock = world().lock()
        self._begun = self._told = 0
        self._failed: dict[int, BaseException] = {}

    def begin(self) -> int:
        """Returns the number of what is begun, from 1 on: the same on all ranks."""
        with self._lock:
            self._begun += 1
            return self._begun

    def note(self, number: int, failure: BaseException) -> None:
        """Keeps a failure to be raised, unless another rank's of the same has been."""
        with self._lock:
            if number > self._told:
                self._failed[number] = failure

    @property
    def newest(self) -> int:
        """The number of the last that has failed and was not raised; 0 for none."""
        with self._lock:
            return max(self._failed, default=0)

    def take(self, until: int | None = None) -> BaseException | None:
        """Returns the last failure once, and forgets those before; does not wait. Local.

        Args:
            until: the last number that counts, of which some rank's failure is raised on all now; None for any.
        """
        with self._lock:
            numbers = [number for number in self._failed if until is None or number <= until]
            failure = self._failed[max(numbers)] if numbers else None
            self._told = max(self._told, until or 0)
            self._failed = {number: each for number, each in self._failed.items() if number not in numbers}
            return failure
