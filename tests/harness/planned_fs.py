"""A store in memory, as a file system of fsspec, that is slow, loses requests and fails by plan."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]  # has no type hints


class PlannedFileSystem(MemoryFileSystem):  # type: ignore[misc]  # as above
    """Fails each distinct request `times` times with `error`, or as it says, and then carries it out.

    Args:
        error: to raise; or "hang" (no answer for `seconds`), "short" (an answer cut short).
        times: how often, for each distinct request of those in `operations`.
        operations: such as "cat_file"; all, if it is empty.
        seconds: of latency of each request, or of a hang.
    """

    protocol = "planned"
    cachable = False
    local_file = False

    def __init__(
        self,
        error: Exception | str | None = None,
        times: int = 1,
        operations: tuple[str, ...] = (),
        seconds: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.store: dict[str, Any] = {}
        self.pseudo_dirs = [""]
        self.error, self.times, self.operations, self.seconds = error, times, operations, seconds
        self.asked: list[tuple[Any, ...]] = []
        self.lock = threading.Lock()
        self.met: Counter[tuple[Any, ...]] = Counter()
        self.at_once = self.most_at_once = 0

    def _meet(self, operation: str, *request: Any) -> bool:
        """Whether the request is to fail in a way that is no exception."""
        with self.lock:
            self.asked.append((operation, *request))
            self.met[operation, request] += 1
            fails = self.error is not None and self.met[operation, request] <= self.times
            if self.operations and operation not in self.operations:
                fails = False
        if self.seconds and (fails if self.error == "hang" else True):
            time.sleep(self.seconds)
        if fails and isinstance(self.error, Exception):
            raise self.error
        return fails

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        short = self._meet("cat_file", path, start, end) and self.error == "short"
        with self.lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            data: bytes = super().cat_file(path, start=start, end=end, **options)
        finally:
            with self.lock:
                self.at_once -= 1
        return data[: len(data) // 2] if short else data

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self._meet("pipe_file", path)
        super().pipe_file(path, value, **options)

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._meet("open", path, mode)
        return super().open(path, mode, **options)

    def info(self, path: str, **options: Any) -> Any:
        self._meet("info", path)
        return super().info(path, **options)

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._meet("ls", path)
        return super().ls(path, detail=detail, **options)

    def rm_file(self, path: str) -> None:
        self._meet("rm_file", path)
        if path in self.store:
            del self.store[path]
        else:
            raise FileNotFoundError(path)
