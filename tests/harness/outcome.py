"""The outcome of one rank, as it crosses from the rank to the test."""

from __future__ import annotations

import pickle
import signal
import traceback
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class RankException(Exception):
    """Stands for an exception of a rank that could not be pickled; its text names the real type."""


@dataclass
class Outcome(Generic[T]):
    """The outcome of one rank: it returned a value, raised an error, or died without a report.

    `calls` are the watched operations (those of `trace` and of the rank's faults) in the order in which they were
    called; a rank that died took its own with it, and has none here. `struck`: whether a fault was reached.
    `at_seconds` is the system's monotonic clock, which all ranks share.
    """

    rank: int
    value: T | None = None
    error: BaseException | None = None
    traceback: str = ""
    exit_code: int | None = None  # of a rank that died; negative for a signal
    calls: tuple[str, ...] = ()
    struck: bool = False
    at_seconds: float = 0.0
    stays: bool = False  # the rank has left nothing that its next function would find

    @property
    def ok(self) -> bool:
        return self.error is None and self.exit_code is None

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that ended the rank, if one did."""
        return signal.Signals(-self.exit_code) if self.exit_code is not None and self.exit_code < 0 else None

    def __str__(self) -> str:
        if self.signal is not None:
            return f"rank {self.rank} was killed by {self.signal.name}"
        if self.exit_code is not None:
            return f"rank {self.rank} exited with code {self.exit_code} and no result"
        if self.error is not None:
            name = "" if isinstance(self.error, RankException) else f"{type(self.error).__name__}: "
            return f"rank {self.rank} raised {name}{self.error}"
        return f"rank {self.rank} returned"

    def to_bytes(self) -> bytes:
        """Pickled; an error that does not survive the journey is replaced, a value that does not becomes the error."""
        if self.error is not None:
            try:
                pickle.loads(pickle.dumps(self.error))
            except Exception:
                self.error = RankException(f"{type(self.error).__name__}: {self.error}")
        try:
            return pickle.dumps(self)
        except Exception as error:
            self.value, self.traceback = None, "".join(traceback.format_exception(error))
            self.error = RankException(f"the result of the rank cannot be pickled: {error}")
            return pickle.dumps(self)
