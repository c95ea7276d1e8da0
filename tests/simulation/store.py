"""The job's store: a server that outlives ranks, and clients that may be cut off from it for a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from shardopt.runtime.stores import StoreError
from tests.simulation.tasks import Process, Scheduler, Task

T = TypeVar("T")

_SECONDS = 100e-6  # for a question to reach the server, and for its answer
_LOOKS = ("store check", "store add")  # what waits, and what beats
_CONNECTION_SECONDS = 20.0  # after which a connection without an answer breaks


class Network:
    """What cuts processes off from others, for a time.

    Attributes:
        cut: process → when it can be reached again.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.cut: dict[Process, float] = {}

    def cut_off(self, process: Process, seconds: float) -> None:
        """Cuts a process off from all others."""
        self._scheduler.note(process.name, f"is cut off for {seconds:g} s")
        self._scheduler.changed = True
        self.cut[process] = max(self.cut.get(process, 0.0), self._scheduler.now + seconds)

    def seconds_cut(self, process: Process) -> float:
        """Returns for how long a process is still cut off."""
        return max(self.cut.get(process, 0.0) - self._scheduler.now, 0.0) if self.cut else 0.0


class StoreServer:
    """The server of one job's store.

    Attributes:
        lost: whether it has ended: all who ask get an error.
    """

    def __init__(self, scheduler: Scheduler, network: Network) -> None:
        self.scheduler, self.network = scheduler, network
        self.data: dict[str, bytes] = {}
        self.lost = False
        self.most_keys = 0
        self.waiting: list[tuple[Task, str]] = []

    def changed(self, key: str) -> None:
        """Wakes those who wait for a key."""
        self.most_keys = max(self.most_keys, len(self.data))
        if self.waiting:
            still = []
            for task, wanted in self.waiting:
                if wanted == key:
                    self.scheduler.wake(task)
                else:
                    still.append((task, wanted))
            self.waiting = still


class SimulatedStore:
    """A client of a store, with a prefix before all keys: as `PrefixStore` over `TCPStore`."""

    def __init__(self, server: StoreServer, process: Process, prefix: str) -> None:
        self._server, self._process, self._prefix = server, process, prefix
        self.timeout = timedelta(seconds=300)

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def clone(self) -> SimulatedStore:
        return SimulatedStore(self._server, self._process, self._prefix)

    def _ask(self, what: str, key: str, answer: Callable[[], T]) -> T:
        server, scheduler = self._server, self._server.scheduler
        self._travel(f"store {what} {key}")
        if server.lost:
            raise StoreError("the connection to the store was reset")
        answered = answer()
        cut = server.network.seconds_cut(self._process)
        scheduler.pause(scheduler.draw(_SECONDS) + cut)
        return answered

    def _travel(self, what: str) -> None:
        server = self._server
        cut = server.network.seconds_cut(self._process)
        if cut > _CONNECTION_SECONDS:
            server.scheduler.operate(what, _CONNECTION_SECONDS)
            raise StoreError("the connection to the store timed out")
        if cut:
            server.scheduler.pause(cut)
        server.scheduler.operate(what, _SECONDS, looks_only=what.startswith(_LOOKS))

    def set(self, key: str, value: str | bytes) -> None:
        key, data = f"{self._prefix}/{key}", value.encode() if isinstance(value, str) else bytes(value)

        def put() -> None:
            self._server.data[key] = data
            self._server.changed(key)

        self._ask("set", key, put)

    def get(self, key: str) -> bytes:
        key = f"{self._prefix}/{key}"
        self._wait_for([key], self.timeout)
        return self._ask("get", key, lambda: self._server.data[key])

    def _wait_for(self, keys: Sequence[str], timeout: timedelta) -> None:
        server, scheduler = self._server, self._server.scheduler
        end = scheduler.now + timeout.total_seconds()
        for key in keys:
            while key not in server.data:
                if server.lost:
                    raise StoreError("the connection to the store was reset")
                assert scheduler.current is not None
                server.waiting.append((scheduler.current, key))
                if not scheduler.block(end - scheduler.now):
                    raise StoreError(f"wait timeout after {timeout.total_seconds() * 1000:.0f}ms, keys: {key}")

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._travel("store wait")
        self._wait_for([f"{self._prefix}/{key}" for key in keys], timeout or self.timeout)
        self._server.scheduler.pause(self._server.network.seconds_cut(self._process) + _SECONDS)

    def check(self, keys: Sequence[str]) -> bool:
        keys = [f"{self._prefix}/{key}" for key in keys]
        return self._ask("check", keys[-1] if keys else "", lambda: all(key in self._server.data for key in keys))

    def add(self, key: str, amount: int) -> int:
        key = f"{self._prefix}/{key}"

        def count() -> int:
            total = int(self._server.data.get(key, b"0")) + amount
            self._server.data[key] = b"%d" % total
            self._server.changed(key)
            return total

        return self._ask("add", key, count)

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        key = f"{self._prefix}/{key}"

        def swap() -> bytes:
            data = self._server.data
            if (key not in data and not expected) or data.get(key) == expected.encode():
                data[key] = wanted.encode()
            self._server.changed(key)
            return data.get(key, expected.encode())

        return self._ask("compare_set", key, swap)

    def delete_key(self, key: str) -> bool:
        key = f"{self._prefix}/{key}"
        return self._ask("delete", key, lambda: self._server.data.pop(key, None) is not None)
