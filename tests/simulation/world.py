"""The simulated world, and what beside it must be of one simulated process or not be real."""

from __future__ import annotations

import builtins
import gc
import importlib
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from shardopt.checkpoint.saving.async_save import AsyncSaver
from shardopt.checkpoint.sources.reading.checking import ReadSizes
from shardopt.checkpoint.storage import LocalStorage
from shardopt.checkpoint.storage.remote import RemoteStorage
from shardopt.checkpoint.storage.retry import RetryPolicy
from shardopt.world import World, using
from tests.simulation.files import FileSystem, SimulatedOs
from tests.simulation.objects import PROTOCOL, ObjectFileSystem, ObjectStore
from tests.simulation.sockets import Fabric, SimulatedSelector
from tests.simulation.store import Network, SimulatedStore, StoreServer
from tests.simulation.tasks import Killed, Process, Scheduler
from tests.simulation.threads import (
    SimulatedCondition,
    SimulatedEvent,
    SimulatedFuture,
    SimulatedListener,
    SimulatedLock,
    SimulatedPool,
    SimulatedThread,
    wait_for_all,
)


class SimulatedGroup(dist.ProcessGroup):
    """The process group of a simulated rank: its number, and the job's store."""

    def __init__(self, process: Process, server: StoreServer, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks the one without a store
        self.process, self.server, self.members = process, server, tuple(range(size))


class SimulatedWorld(World):
    """Clock, threads, store and storage of whichever process is running."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.network = Network(scheduler)
        self.fabric = Fabric(scheduler, self.network)
        self.files = FileSystem(scheduler)
        self.objects = ObjectStore(scheduler)

    def _process(self) -> Process:
        assert self.scheduler.current is not None
        return self.scheduler.current.process

    def monotonic(self) -> float:
        return self.scheduler.now

    def wall_clock(self) -> float:
        return 1e9 + self.scheduler.now

    def sleep(self, seconds: float) -> None:
        self.scheduler.pause(seconds)

    def lock(self) -> SimulatedLock:
        return SimulatedLock(self.scheduler)

    def event(self) -> SimulatedEvent:
        return SimulatedEvent(self.scheduler)

    def condition(self) -> SimulatedCondition:
        return SimulatedCondition(self.scheduler)

    def thread(self, target: Callable[[], object], name: str | None = None, daemon: bool = False) -> SimulatedThread:
        return SimulatedThread(self._process(), target, name or "thread", daemon)

    def lower_priority(self, niceness: int) -> None:
        pass  # whose turn it is follows from the seed

    def timer(self, seconds: float, function: Callable[[], object], name: str) -> SimulatedThread:
        def run() -> None:
            self.scheduler.pause(seconds)
            function()

        return SimulatedThread(self._process(), run, name, daemon=True)

    def current_thread(self) -> SimulatedThread:
        task: Any = self.scheduler.current
        thread: SimulatedThread = getattr(task, "thread", task)  # the main one is no more than a task
        return thread

    def in_main_thread(self) -> bool:
        return self.scheduler.current is self._process().main

    def main_thread_lives(self) -> bool:
        process = self._process()
        return process.main is not None and not process.main_ended

    def thread_pool(self, threads: int, name: str) -> Executor:
        return SimulatedPool(self.scheduler, self._process(), threads, name)

    def future(self) -> Future[Any]:
        return SimulatedFuture(self.scheduler)

    def wait_for_all(self, futures: Iterable[Future[Any]]) -> None:
        wait_for_all(self.scheduler, futures)

    def random_name(self, nbytes: int) -> str:
        return self.scheduler.random.randbytes(nbytes).hex()

    def jitter(self, low: float, high: float) -> float:
        return self.scheduler.random.uniform(low, high)

    def store_of(self, group: Any, prefix: str) -> Any:
        return SimulatedStore(group.server, group.process, prefix)

    def listen(self, host: str, ports: range | None = None, backlog: int = 1024) -> Any:
        return self.fabric.listen(self._process(), host)

    def begin_connect(self, host: str, port: int) -> Any:
        return self.fabric.begin_connect(self._process(), host, port)

    def finish_connect(self, connecting: Any) -> None:
        connecting.finish_connect()

    def accept(self, listener: Any) -> Any:
        return listener.accept()[0]

    def abort(self, connection: Any) -> None:
        connection.abort()

    def route_to(self, host: str) -> str:
        return self._process().address

    def interfaces(self) -> list[tuple[str, str]]:
        return [("eth0", self.route_to(""))]

    def store_host(self, store: Any) -> str | None:
        return "store"

    def store_file(self, store: Any) -> str | None:
        return None

    def main_thread_stack(self, most_lines: int) -> str:
        main = self._process().main
        return "" if main is None else "\n".join(main.stack().splitlines()[-most_lines:])

    def selector(self) -> Any:
        return SimulatedSelector(self.scheduler, self._process())

    def socket_pair(self) -> Any:
        return self.fabric.pair(self._process())

    def exit_at_once(self, code: int) -> None:
        """As `os._exit`."""
        process = self._process()
        process.gives_up()
        process.kill()
        raise Killed

    def open_storage(self, url: str, durable: bool, opener: Callable[[str, bool], Any]) -> Any:
        if url.startswith(f"{PROTOCOL}://"):
            return RemoteStorage(ObjectFileSystem(self.objects), url.removeprefix(f"{PROTOCOL}://"))
        return LocalStorage(url, durable)


_KEPT_BY_PROCESS: list[tuple[str, str, Callable[[], Any]]] = [
    ("shardopt.checkpoint.saving.save", "_plans", dict),
    ("shardopt.checkpoint.saving.writing.pending", "_tracked", list),
    ("shardopt.runtime.staging_fence", "_awaited", set),
    ("shardopt.checkpoint.sources.open", "_readers", Counter),
    ("shardopt.checkpoint.sources.referred", "_known", OrderedDict),
    ("shardopt.checkpoint.sources.referred", "_bytes_of", dict),
    ("shardopt.checkpoint.storage.local", "_durably_named", set),
    ("shardopt.checkpoint.saving.async_save", "_default", AsyncSaver),
    ("shardopt.checkpoint.saving.async_save", "_of_members", dict),
    ("shardopt.ranks.groups", "_of_group", weakref.WeakKeyDictionary),
    ("shardopt.ranks.connections.node", "_nodes", weakref.WeakValueDictionary),
    ("shardopt.ranks.connections.unauthenticated", "_in_process", dict),
    ("shardopt.ranks.connections.tree", "RANKS_PER_BLOCK", lambda: 128),
]
"""Modules, and the names under which they keep something once for each process."""


def begin_process(process: Process, ranks_per_block: int = 128) -> None:
    """Makes, for a new process, all that modules keep once for each process. To be called in its main thread."""
    process.keeps = [(_namespace(module), name, make()) for module, name, make in _KEPT_BY_PROCESS]
    process.keeps.append((_namespace("shardopt.ranks.connections.tree"), "RANKS_PER_BLOCK", ranks_per_block))
    for namespace, name, value in process.keeps:
        namespace[name] = value


def end_process() -> None:
    """Does what a process does when its program has ended. To be called in its main thread."""
    _namespace("shardopt.ranks.connections.node")["_stop_all"]()


@lru_cache
def _namespace(module: str) -> dict[str, Any]:
    return vars(importlib.import_module(module))  # not by attributes: `checkpoint.save` is a function


_POLICY = RetryPolicy(attempts=4, pause_seconds=0.05, longest_pause_seconds=0.4, request_seconds=0.5)


@contextmanager
def simulated(world: SimulatedWorld) -> Iterator[None]:
    """Puts the world in place, and what the package reaches for past it. To be called `without_garbage`."""
    fake_os = SimulatedOs(world.files)
    scheduler = world.scheduler

    patches: list[tuple[str, str, Any]] = [
        ("shardopt.checkpoint.storage.local", "os", fake_os),
        ("shardopt.checkpoint.storage.local", "open", fake_os.open_file),
        ("shardopt.checkpoint.storage.local", "_sync_file_range", None),
        ("shardopt.checkpoint.run.root", "os", fake_os),
        ("shardopt.checkpoint.storage.retry", "RETRY_POLICY", _POLICY),
        (
            "shardopt.checkpoint.run.stopping",
            "Listener",
            lambda signum, *functions: SimulatedListener(world._process(), *functions),
        ),
        (
            "shardopt.checkpoint.run.stopping",
            "os",
            SimpleNamespace(_exit=world.exit_at_once, write=lambda fd, data: len(data)),
        ),
        # Buffers of their own size would cost more than all else that is done with so few bytes.
        ("shardopt.checkpoint.sources.reading.checking", "_SIZES", _SMALL_READS),
        ("shardopt.checkpoint.sources.reading.checking", "_DISK_SIZES", _SMALL_READS),
        (
            "shardopt.checkpoint.sources.reading.checking",
            "_FAR_SIZES",
            _SMALL_FAR_READS,
        ),
        ("shardopt.ranks.ranks", "_members", lambda group: (0,) if group is None else group.members),
        ("shardopt.ranks.ranks", "accelerator_of", lambda group: None),
        ("shardopt.ranks.ranks", "_job_size", lambda: world._process().job_size),
        ("shardopt.sharding.view", "_rank", lambda: world._process().rank),  # by which a part of a tensor has holders
    ]
    gone = [f"{module}.{name}" for module, name, _ in patches if name not in {*_namespace(module), *dir(builtins)}]
    assert not gone, f"nobody looks up {gone} any more: what they stand for would not be simulated"
    names = [
        *((module, name) for module, name, _ in patches),
        *((module, name) for module, name, _ in _KEPT_BY_PROCESS),
    ]
    before = [(_namespace(module), name, _namespace(module).get(name, _ABSENT)) for module, name in names]
    grad_mode = torch.is_grad_enabled()
    # One by one: a module whose whole namespace is put in place anew is looked up anew everywhere, which is slow.
    for module, name, value in patches:
        _namespace(module)[name] = value
    try:
        with using(world):
            yield
    finally:
        for namespace, name, value in before:
            if value is _ABSENT:
                namespace.pop(name, None)
            else:
                namespace[name] = value
        scheduler.give_up()
        torch._C._set_grad_enabled(grad_mode)


_SMALL_READS = ReadSizes(batch=1 << 12, run=1 << 12, call=512 << 10)
_SMALL_FAR_READS = _SMALL_READS._replace(threads=8, most_threads=24)
_ABSENT = object()


@contextmanager
def without_garbage() -> Iterator[None]:
    """Collects garbage at the end alone: what is done when an object goes would else come at another time in each run.

    Only what was made meanwhile is looked at: all of torch would take longer than a schedule. Finalizers of it are
    dropped, as they are with a process: what they hold on to has all the rest.
    """
    enabled, finalizers = gc.isenabled(), set(weakref.finalize._registry)  # type: ignore[attr-defined]  # private
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        for finalizer in weakref.finalize._registry.keys() - finalizers:  # type: ignore[attr-defined]  # as above
            finalizer.detach()
        gc.collect()
        gc.unfreeze()
        if enabled:
            gc.enable()
