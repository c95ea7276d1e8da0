"""How ranks talk, and how they fail: all of them, with one error.

What ranks must do together is one call of `Ranks.agree`: each does its own work, rank 0 looks at what all have
reported and decides, and either every rank gets the decision or every rank raises the same error. The exception is
`Ranks.add_up`, for the few numbers that every step needs: the one collective of this package.

Reports and decisions travel as JSON through the job's store (the one that `init_process_group` made), not through a
collective: when a peer is dead a collective fails without a name or hangs, while the store, which lives outside the
ranks, still tells who has not answered. A rank that works or waits writes a heartbeat to the store; one that has
neither answered nor beaten for `deadline_seconds` is named as dead. Clocks of different hosts are never compared.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]  # from a compiled module

from shardopt.errors import RankError, ShardoptError

T = TypeVar("T")

DEADLINE_SECONDS = 300.0

_PART_BYTES = 4 << 20  # a TCPStore refuses values of more than 8 MiB
_POLL_SECONDS = (0.0005, 0.01)  # first pause between two looks at the store, and the longest


class Ranks:
    """The ranks of one process group, or this process alone where there is none.

    All ranks must make the same calls in the same order. After an error that a silent rank caused, the ranks may
    have lost step, and every further call raises at once.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.rank = group.rank() if group is not None else 0
        self.size = group.size() if group is not None else 1
        # Weak: `_of_group` is to forget the group, and these ranks with it, once nobody else has it.
        self._group = None if group is None else weakref.ref(group)
        self._accelerator = None if group is None else _accelerator(group)
        self._channel: _Channel | None = None
        if group is not None:
            self._channel = _Channel(PrefixStore("shardopt", group.get_group_store()), self.rank, self.size)
        self._broken: str | None = None

    @property
    def device(self) -> torch.device:
        """Where numbers for `add_up` are to lie: on the accelerator in use where the group communicates there."""
        if self._accelerator is None:
            return torch.device("cpu")
        return torch.device(self._accelerator, torch.get_device_module(self._accelerator).current_device())

    def add_up(self, numbers: Tensor) -> Tensor:
        """Each number summed over the ranks, in place; every rank gets the same bits. Collective: one all-reduce.

        Args:
            numbers: on `device`, of the same shape and dtype on every rank.
        """
        group = self._group and self._group()
        if group is not None:
            dist.all_reduce(numbers, group=group)
        return numbers

    def agree(
        self,
        what: str,
        work: Callable[[], T],
        report: Callable[[T], Any] = lambda result: None,
        decide: Callable[[list[Any]], Any] = lambda reports: None,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> tuple[T, Any]:
        """Does `work` on every rank, and `decide` on rank 0 over all the reports. Collective.

        Args:
            what: what is being done, for error messages ("writing step-7").
            work: this rank's own part; what it returns stays here.
            report: what rank 0 must know of it, as JSON.
            decide: runs on rank 0 only; gets the reports by rank and returns JSON that every rank gets.
            deadline_seconds: for how long a rank may show no sign of life before it is given up.

        Returns:
            What `work` returned on this rank, and what `decide` returned on rank 0.

        Raises:
            ShardoptError: `work` failed on some rank, or `decide` on rank 0. Every rank raises the same error, and
                where not all have failed it names those that did.
            RankError: a rank has died or has not arrived.
        """
        if self._channel is None:
            result = work()
            return result, decide([report(result)])
        if self._broken is not None:
            raise RankError(f"{what}: ranks lost step in an earlier failure ({self._broken}); restart the job")
        channel = self._channel
        outcome: list[T] = []
        cause: BaseException | None = None
        with channel.round(what, deadline_seconds):
            try:
                outcome.append(work())
                mine = {"report": report(outcome[0])}
            except BaseException as error:
                cause, mine = error, {"error": _describe(error)}
            try:
                answer = channel.decide(mine, decide) if self.rank == 0 else channel.follow(mine)
            except (_Silent, DistError) as silent:
                self._broken = str(silent) if isinstance(silent, _Silent) else f"the job's store is lost: {silent}"
                raise RankError(f"{what}: {self._broken}") from cause
        if cause is not None and not isinstance(cause, Exception):
            raise cause  # an interrupt stays an interrupt here; the other ranks have been told
        if "error" in answer:
            if answer.get("broken"):
                self._broken = answer["error"]["message"]
            raise ShardoptError.from_json(answer["error"]) from cause
        return outcome[0], answer["decision"]


def _accelerator(group: dist.ProcessGroup) -> str | None:
    """The kind of device that the group's own backend for accelerators (NCCL, not gloo) works on, if it has one."""
    for pair in dist.get_backend_config(group).split(","):
        kind, _, backend = pair.partition(":")
        if backend not in ("gloo", "mpi", "fake"):
            return kind
    return None


_of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, Ranks] = weakref.WeakKeyDictionary()


def ranks_of(group: dist.ProcessGroup | None = None) -> Ranks:
    """The ranks of `group` (default: of the job); this process alone where torch.distributed is not initialized."""
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks(None)
        group = dist.group.WORLD
    assert group is not None
    if group not in _of_group:
        _of_group[group] = Ranks(group)
    return _of_group[group]


class _Silent(Exception):
    """Some rank shows no sign of life."""


class _Channel:
    """Rounds of `agree` in the store. Keys: `<round>/r<rank>/…` reports, `<round>/answer/…`, `beat/<rank>`."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self._round = 0
        self._spent: list[str] = []  # keys of the round before, which all have read once all report in this one

    def round(self, what: str, deadline_seconds: float) -> _Heartbeat:
        """Begins a round; within the context that this gives, the rank beats."""
        self._round += 1
        self.what, self.deadline_seconds = what, deadline_seconds
        return _Heartbeat(self.store, f"beat/{self.rank}", deadline_seconds / 5)

    def decide(self, mine: dict[str, Any], decide: Callable[[list[Any]], Any]) -> dict[str, Any]:
        """Rank 0: gathers, decides, answers."""
        answer: dict[str, Any]
        try:
            gathered = [mine, *self._gather()]
            failures = [(rank, each["error"]) for rank, each in enumerate(gathered) if "error" in each]
            if failures:
                answer = {"error": _merge(self.what, failures, self.size)}
            else:
                answer = {"decision": decide([each["report"] for each in gathered])}
        except _Silent as silent:
            answer = {"error": RankError(f"{self.what}: {silent}").to_json(), "broken": True}
        except Exception as error:
            answer = {"error": _merge(self.what, [(0, _describe(error))], self.size)}
        self._spent += self._put(f"{self._round}/answer", answer)
        return answer

    def follow(self, mine: dict[str, Any]) -> dict[str, Any]:
        """Any other rank: reports, and waits for the answer."""
        self._put(f"{self._round}/r{self.rank}", mine)
        # Rank 0 waits up to a deadline for the others, and beats all the while.
        answer: dict[str, Any] = self._get_all({0: f"{self._round}/answer"})[0][0]
        return answer

    def _gather(self) -> list[dict[str, Any]]:
        got = self._get_all({rank: f"{self._round}/r{rank}" for rank in range(1, self.size)})
        for key in self._spent:
            self.store.delete_key(key)
        self._spent = [key for _, keys in got.values() for key in keys]
        return [got[rank][0] for rank in range(1, self.size)]

    def _get_all(self, keys: dict[int, str]) -> dict[int, tuple[Any, list[str]]]:
        """The values under `keys` by rank, awaited, each with all keys that hold it.

        Watches the heartbeats of the ranks that have not written yet.
        """
        waiting = dict(keys)
        life = _SignsOfLife(self.store, self.deadline_seconds)
        pause, longest = _POLL_SECONDS
        while waiting:
            if self.store.check([f"{key}/0" for key in waiting.values()]):
                break
            time.sleep(pause)
            pause = min(2 * pause, longest)
            if life.due():
                waiting = {rank: key for rank, key in waiting.items() if not self.store.check([f"{key}/0"])}
                silent = life.silent(waiting)
                if silent:
                    raise _Silent(self._silence(silent))
        return {rank: self._get(key) for rank, key in keys.items()}

    def _silence(self, silent: Sequence[int]) -> str:
        names = _rank_names(silent)
        return (
            f"{names} gave no sign of life for {self.deadline_seconds:g} s: dead, cut off, "
            "or not in this call (every rank of the group must make it)"
        )

    def _put(self, key: str, value: Any) -> list[str]:
        data = json.dumps(value, separators=(",", ":")).encode()
        parts = [data[i : i + _PART_BYTES] for i in range(0, len(data), _PART_BYTES)]
        keys = [f"{key}/{i}" for i in range(len(parts))]
        for part_key, part in zip(keys[1:], parts[1:], strict=True):
            self._set(part_key, part)
        self._set(keys[0], b"%d\n" % len(parts) + parts[0])  # last: it tells of the others
        return keys

    def _set(self, key: str, data: bytes) -> None:
        self.store.set(key, data)  # type: ignore[arg-type]  # declared as str, takes bytes as they are

    def _get(self, key: str) -> tuple[Any, list[str]]:
        count, _, first = self.store.get(f"{key}/0").partition(b"\n")
        keys = [f"{key}/{i}" for i in range(int(count))]
        rest = [self.store.get(part_key) for part_key in keys[1:]]
        return json.loads(b"".join([first, *rest])), keys


class _Heartbeat:
    """Counts up a key of the store from a thread of its own, so that long work and long waits show life."""

    def __init__(self, store: Store, key: str, interval_seconds: float) -> None:
        self._store, self._key = store, key
        self._interval_seconds = min(interval_seconds, 5.0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardopt-heartbeat", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_seconds):
            try:
                self._store.add(self._key, 1)
            except RuntimeError:  # the store is gone: whoever waits finds out, and says so
                return


class _SignsOfLife:
    """Watches heartbeats by this process's clock alone."""

    def __init__(self, store: Store, deadline_seconds: float) -> None:
        self._store, self._deadline_seconds = store, deadline_seconds
        self._interval_seconds = min(deadline_seconds / 5, 1.0)
        self._begin = self._looked = time.monotonic()
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> its last count, and when that was new

    def due(self) -> bool:
        return time.monotonic() - self._looked >= self._interval_seconds

    def silent(self, ranks: Sequence[int] | dict[int, str]) -> list[int]:
        """Those of `ranks` whose count has not changed for the deadline."""
        now = self._looked = time.monotonic()
        silent = []
        for rank in ranks:
            count = self._store.add(f"beat/{rank}", 0)
            known, since = self._seen.get(rank, (None, self._begin))
            if count != known:
                since = now if known is not None else self._begin
                self._seen[rank] = (count, since)
            if now - since > self._deadline_seconds:
                silent.append(rank)
        return silent


def _describe(error: BaseException) -> dict[str, Any]:
    if isinstance(error, ShardoptError):
        return error.to_json()
    return RankError(f"{type(error).__name__}: {error}").to_json()


def _merge(what: str, failures: list[tuple[int, dict[str, Any]]], size: int) -> dict[str, Any]:
    """One error for all ranks: the first failure's type and text, the ranks it came from, and what others met."""
    first = failures[0][1]
    same = [rank for rank, error in failures if error == first]
    where = "" if len(same) == size and size > 1 else f" on {_rank_names(same)}"
    others = "; ".join(f"on rank {rank}: {error['message']}" for rank, error in failures if error != first)
    message = f"{what} failed{where}: {first['message']}" + (f" (and {others})" if others else "")
    problems = list(first["problems"])
    for _, error in failures:
        problems += [problem for problem in error["problems"] if problem not in problems]
    return {"type": first["type"], "message": message, "problems": problems}


def _rank_names(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
