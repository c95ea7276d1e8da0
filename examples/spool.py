"""What trainers and samplers of one run share: a folder in which samples wait, and records, one JSON object a line."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Sample(NamedTuple):
    """A word that a policy wrote.

    Args:
        step: that the weights were of, as the follower says.
        weights: their hash, of the memory that was served.
        letters: of the word, with the space before it.
        made_at: by the clock of this host, in seconds.
        name: of its file.
    """

    step: int
    weights: str
    letters: list[int]
    made_at: float
    name: str


class Spool:
    """Samples in files: each appears whole, as it is renamed once it is written, and is taken by another rename.

    Args:
        root: of the run; samples wait in `waiting`, and then lie in `used` or `dropped`.
    """

    def __init__(self, root: Path) -> None:
        self._waiting, self._used, self._dropped = (root / name for name in ("waiting", "used", "dropped"))
        for folder in (self._waiting, self._used, self._dropped):
            folder.mkdir(parents=True, exist_ok=True)

    def put(self, step: int, weights: str, words: list[list[int]]) -> None:
        """Writes samples."""
        for letters in words:
            sample = {"step": step, "weights": weights, "letters": letters, "made_at": time.time()}
            name = f"{time.time_ns()}.json"
            unfinished = self._waiting / f"{name}.unfinished"
            unfinished.write_text(json.dumps(sample))
            unfinished.rename(self._waiting / name)

    def waiting(self) -> list[str]:
        """Returns the names of those that wait, the oldest first."""
        return sorted(each.name for each in os.scandir(self._waiting) if each.name.endswith(".json"))

    def read(self, name: str) -> Sample:
        """Returns a sample that waits."""
        return _read(self._waiting / name)

    def take(self, name: str, is_used: bool) -> None:
        """Moves a sample that waits to those that were used, or that were dropped."""
        (self._waiting / name).rename((self._used if is_used else self._dropped) / name)

    def all(self) -> Iterator[Sample]:
        """Yields every sample of the run."""
        for folder in (self._used, self._dropped, self._waiting):
            for path in sorted(folder.glob("*.json")):
                yield _read(path)


def _read(path: Path) -> Sample:
    return Sample(**json.loads(path.read_text()), name=path.name)


def note(root: Path, kind: str, **record: Any) -> None:
    """Adds a record to those of its kind, with the time."""
    with open(root / f"{kind}.jsonl", "a") as log:
        log.write(json.dumps(record | {"at": time.time()}) + "\n")


def records(root: Path, kind: str) -> list[dict[str, Any]]:
    """Returns the records of a kind, in the order of time."""
    path = root / f"{kind}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
