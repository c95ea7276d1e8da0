"""An object store, as a file system of fsspec: requests may fail before or after their work, or never be answered."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tests.simulation.tasks import Scheduler

_SECONDS = 2e-3  # of a request
PROTOCOL = "objects"


class ObjectStore:
    """The objects that all hosts see.

    Attributes:
        failing: process name and request's number → "before", "after", "hang", "late" or "twice".
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.objects: dict[str, bytes] = {}
        self.failing: dict[tuple[str, int], str] = {}
        self._requests: dict[str, int] = {}

    def request(self, what: str, path: str, work: Callable[[], Any]) -> Any:
        """Carries out a request, or what a fault makes of it."""
        scheduler = self.scheduler
        assert scheduler.current is not None
        name = scheduler.current.process.name
        self._requests[name] = count = self._requests.get(name, 0) + 1
        fault = self.failing.get((name, count), "")
        scheduler.operate(f"objects {what} {path} {fault}".rstrip(), _SECONDS)
        if fault == "before":
            raise ConnectionError(f"{what} {path}: the connection was reset")
        if fault == "hang":
            scheduler.pause(1000.0)
        if fault == "late":
            # Carried out after it was given up and made again.
            scheduler.at(scheduler.now + 0.5 + scheduler.draw(2.0), lambda: _ignoring_errors(work))
            scheduler.pause(1000.0)
        done = work()
        if fault == "twice":
            scheduler.at(scheduler.now + scheduler.draw(2e-3), lambda: _ignoring_errors(work))
        if fault == "after":
            raise ConnectionError(f"{what} {path}: the connection was reset")
        scheduler.pause(scheduler.draw(_SECONDS / 4))
        return done


def _ignoring_errors(work: Callable[[], Any]) -> None:
    with suppress(OSError):  # there is nobody any more who would hear of it
        work()


class ObjectFileSystem:
    """`ObjectStore` as a file system of fsspec."""

    async_impl = False

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def unstrip_protocol(self, path: str) -> str:
        return f"{PROTOCOL}://{path}"

    def invalidate_cache(self, path: str | None = None) -> None:
        pass

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def rmdir(self, path: str) -> None:
        pass

    def ls(self, path: str, detail: bool = True) -> list[str]:
        def work() -> list[str]:
            below = [name[len(path) + 1 :] for name in self._store.objects if name.startswith(f"{path}/")]
            if not below:
                raise FileNotFoundError(path)
            return sorted({f"{path}/{name.split('/')[0]}" for name in below})

        listed: list[str] = self._store.request("list", path, work)
        return listed

    def info(self, path: str) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            if path in self._store.objects:
                return {"name": path, "size": len(self._store.objects[path]), "type": "file"}
            if any(name.startswith(f"{path}/") for name in self._store.objects):
                return {"name": path, "size": 0, "type": "directory"}
            raise FileNotFoundError(path)

        info: dict[str, Any] = self._store.request("look", path, work)
        return info

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        data: bytes = self._store.request("read", path, lambda: self._get(path)[start:end])
        return data

    def _get(self, path: str) -> bytes:
        if path not in self._store.objects:
            raise FileNotFoundError(path)
        return self._store.objects[path]

    def cat_ranges(self, paths: list[str], starts: list[int], ends: list[int], on_error: str = "raise") -> list[Any]:
        answers: list[Any] = []
        for path, start, end in zip(paths, starts, ends, strict=True):
            try:
                answers.append(self.cat_file(path, start, end))
            except Exception as error:
                answers.append(error)
        return answers

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
        def work() -> None:
            if mode == "create" and path in self._store.objects:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            self._store.objects[path] = bytes(value)

        self._store.request("write" if mode != "create" else "create", path, work)

    def rm_file(self, path: str) -> None:
        def work() -> None:
            if path not in self._store.objects:
                raise FileNotFoundError(path)
            del self._store.objects[path]

        self._store.request("remove", path, work)
