"""How ranks talk, and how they fail: all of them, with one error.

What ranks must do together is one call of `Ranks.agree`: each does its own work, rank 0 looks at what all have
reported and decides, and either every rank gets the decision or every rank raises the same error. The exceptions are
`Ranks.add_up`, for the few numbers that every step needs, and `Ranks.exchange`, for algorithms that need whole
parameters and for rows of tables: the only collectives of this package.

Reports and decisions travel as JSON through the job's store (the one that `init_process_group` made), not through a
collective: when a peer is dead a collective fails without a name or hangs, while the store, which lives outside the
ranks, still tells who has not answered. A rank that works or waits writes a heartbeat to the store; one that has
neither answered nor beaten for `deadline_seconds` is named as dead. Clocks of different hosts are never compared.

A store may outlive the job that filled it: torchrun restarts ranks on the same one. What is left there must not be
taken for an answer, so every job talks under a random session name, which its ranks agree on in their first round.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistError, HashStore, PrefixStore, Store  # type: ignore[attr-defined]  # from a compiled module

from shardopt.errors import RankError, ShardoptError

T = TypeVar("T")

DEADLINE_SECONDS = 300.0

_PART_BYTES = 4 << 20  # a TCPStore refuses values of more than 8 MiB
_POLL_SECONDS = (0.0005, 0.01)  # first pause between two looks at the store, and the longest


class Ranks:
    """The ranks of one process group, or this process alone where there is none.

    Of each the number in the job is in `members`.

    All ranks must make the same calls in the same order. After an error that a silent rank caused, the ranks may
    have lost step, and every further call raises at once.

    Args:
        group: None for this process alone.
        name: of ranks that talk beside others, as `beside` makes them.
    """

    def __init__(self, group: dist.ProcessGroup | None, name: str = "") -> None:
        self.rank = group.rank() if group is not None else 0
        self.size = group.size() if group is not None else 1
        self.members = _members(group)
        # Weak: `_of_group` is to forget the group, and these ranks with it, once nobody else has it.
        self._group = None if group is None else weakref.ref(group)
        self._accelerator = None if group is None else _accelerator(group)
        self._channel: _Channel | None = None
        if group is not None and self.size > 1:
            store = group.get_group_store()
            # A client answers one question at a time, so those who talk beside others need one of their own.
            if name:
                store = store.clone()  # type: ignore[attr-defined]  # torch's stubs do not have it
            under = PrefixStore(f"shardopt-{name}" if name else "shardopt", store)
            self._channel = _Channel(under, self.rank, self.size)
        self._broken: str | None = None

    def beside(self, name: str) -> Ranks:
        """The same ranks, to `agree` in another thread while these do in theirs: in rounds of their own.

        They have their own connection to the store, which closes when they are let go.

        Args:
            name: the same on every rank, and of no others that are in use.
        """
        return Ranks(None if self._group is None else self._group(), name)

    def notice(self, what: str, first: str, deadline_seconds: float = DEADLINE_SECONDS) -> Notice:
        """A word that all of these ranks can read and replace at any time, each for itself. Collective.

        Args:
            what: what it is for, as for `agree`.
            first: what it is at first, on rank 0.
        """
        channel = self._channel
        if channel is None:
            return Notice(HashStore(), "notice", first)

        def post(_: list[Any]) -> str:
            key = f"notice/{secrets.token_hex(8)}"
            Notice(channel.store, key, first)
            return key

        _, key = self.agree(what, work=lambda: None, decide=post, deadline_seconds=deadline_seconds)
        return Notice(channel.store, key)

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

    def exchange(self, sent: Tensor, sent_counts: Sequence[int], got_counts: Sequence[int]) -> Exchange:
        """Sends a part of a vector to each of the ranks, and gets theirs. Collective: one all-to-all.

        It is only begun here: `wait` of what this returns gives the vector that was got.

        Args:
            sent: contiguous, on a device that the group communicates on; not to be changed before `wait`. The parts
                stand in it in the order of the ranks.
            sent_counts, got_counts: how many elements go to and come from each of them.
        """
        group = self._group and self._group()
        if group is None or self.size == 1:
            return Exchange(sent, sent, None)
        got = sent.new_empty(sum(got_counts))
        # As bytes: gloo knows fewer dtypes than there are.
        got_bytes, sent_bytes = ([n * sent.element_size() for n in counts] for counts in (got_counts, sent_counts))
        outputs, inputs = got.view(torch.uint8), sent.view(torch.uint8)
        work = dist.all_to_all_single(outputs, inputs, got_bytes, sent_bytes, group=group, async_op=True)
        return Exchange(got, sent, work)

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
            except BaseException as interrupt:
                if not channel.told:
                    self._broken = f"{type(interrupt).__name__} before the other ranks were told"
                raise
        if cause is not None and not isinstance(cause, Exception):
            raise cause  # an interrupt stays an interrupt here; the other ranks have been told
        if "error" in answer:
            if answer.get("broken"):
                self._broken = answer["error"]["message"]
            raise ShardoptError.from_json(answer["error"]) from cause
        return outcome[0], answer["decision"]


def _members(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    if group is not None:
        return tuple(dist.get_process_group_ranks(group))
    return (dist.get_rank() if dist.is_available() and dist.is_initialized() else 0,)


class Notice:
    """A word in the job's store, which is replaced in one step. See `Ranks.notice`."""

    def __init__(self, store: Store, key: str, first: str | None = None) -> None:
        self._store, self._key = store, key
        if first is not None:
            store.set(key, first)

    def replace(self, expected: str, wanted: str) -> str:
        """Makes the word `wanted` if it is `expected`; returns what it is then. Local: one question to the store.

        Raises:
            RankError: the store is lost.
        """
        try:
            return self._store.compare_set(self._key, expected, wanted).decode()
        except DistError as error:
            raise RankError(f"the job's store is lost: {error}") from error


class Exchange:
    """An exchange under way; it keeps what was sent until it is done."""

    def __init__(self, got: Tensor, sent: Tensor, work: dist.Work | None) -> None:
        self._got = got
        self._sent: Tensor | None = sent
        self._work = work

    def wait(self) -> Tensor:
        """What was got, once it is there; on an accelerator only the current stream waits, not this process."""
        if self._work is not None:
            self._work.wait()
        self._sent = None
        return self._got


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


_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
"""Groups that were made for want of others, by those whom they are made of; kept while the job's group is."""


def ranks_among(members: tuple[int, ...], known: Iterable[dist.ProcessGroup] = ()) -> Ranks:
    """The ranks with these numbers, through the job's own group or one of `known` where it is made of just them.

    Otherwise through a new group, for which all members must call; those who call for several do it in the same order.

    Args:
        members: global numbers, ascending; this rank's is among them.
        known: groups that there are.
    """
    if len(members) == 1:
        return Ranks(None)
    job = dist.group.WORLD
    assert job is not None
    made = _made.setdefault(job, {})
    for group in (job, *known):
        if sorted(dist.get_process_group_ranks(group)) == list(members):
            return ranks_of(group)
    if members not in made:
        made[members] = dist.new_group(list(members), use_local_synchronization=True)
    return ranks_of(made[members])


class _Silent(Exception):
    """Some rank shows no sign of life."""


class _Channel:
    """Rounds of `agree` in the store.

    Keys: `session`, `<session>/welcome/<rank>`, `beat/<rank>`; and in parts, as values may be large, the reports
    `<session>/<round>/r<rank>/…` and the answers `<session>/<round>/answer/…`.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.told = False  # whether the others have all that they need of this rank in this round
        self._session = secrets.token_hex(8) if rank == 0 else ""
        self._round = 0
        self._spent: list[str] = []  # keys that all have read once all have reported in the next round

    def round(self, what: str, deadline_seconds: float) -> _Heartbeat:
        """Begins a round; within the context that this gives, the rank beats."""
        self._round += 1
        self.told = False
        self.what, self.deadline_seconds = what, deadline_seconds
        return _Heartbeat(self.store, f"beat/{self.rank}", deadline_seconds / 5)

    def decide(self, mine: dict[str, Any], decide: Callable[[list[Any]], Any]) -> dict[str, Any]:
        """Rank 0: gathers, decides, answers. What interrupts it is raised when the others have been told."""
        interrupt: BaseException | None = None
        try:
            answer = self._decided(mine, decide)
            data = _pack(answer)
        except DistError:
            raise
        except BaseException as error:
            interrupt = None if isinstance(error, Exception) else error
            answer = {"error": _merge(self.what, [(0, _describe(error))], self.size)}
            data = _pack(answer)
        self._spent += self._put(self._key("answer"), data)
        self.told = True
        if interrupt is not None:
            raise interrupt
        return answer

    def follow(self, mine: dict[str, Any]) -> dict[str, Any]:
        """Any other rank: reports, and waits for the answer."""
        token = secrets.token_hex(8)
        try:
            data = _pack({**mine, "token": token})
        except Exception as error:  # a report that is not JSON
            data = _pack({"error": _describe(error), "token": token})
        if self._round == 1:
            self._join(data, token.encode())
        else:
            self._put(self._key(f"r{self.rank}"), data)
        self.told = True
        # Rank 0 waits up to a deadline for the others, and beats all the while.
        self._wait_for_rank_0(lambda: self.store.check([self._key("answer/0")]))
        answer: dict[str, Any] = self._get(self._key("answer"))[0]
        return answer

    def _decided(self, mine: dict[str, Any], decide: Callable[[list[Any]], Any]) -> dict[str, Any]:
        heard, silent = self._gather()
        heard[0] = mine
        failures = [(rank, heard[rank]["error"]) for rank in sorted(heard) if "error" in heard[rank]]
        if silent:
            others = "".join(f" (on rank {rank}: {error['message']})" for rank, error in failures)
            return {"error": RankError(f"{self.what}: {self._silence(silent)}{others}").to_json(), "broken": True}
        if failures:
            return {"error": _merge(self.what, failures, self.size)}
        return {"decision": decide([heard[rank]["report"] for rank in range(self.size)])}

    def _gather(self) -> tuple[dict[int, dict[str, Any]], list[int]]:
        """What the other ranks report, by rank; and the silent ranks, for which others may be missing too."""
        if self._round == 1:
            self._set("session", self._session.encode())
        ranks = range(1, self.size)
        silent = self._wait(ranks, lambda some: self.store.check([self._key(f"r{rank}/0") for rank in some]))
        arrived = [rank for rank in ranks if not silent or self.store.check([self._key(f"r{rank}/0")])]
        got = {rank: self._get(self._key(f"r{rank}")) for rank in arrived}
        if not silent:
            for key in self._spent:
                self.store.delete_key(key)
            self._spent = [key for _, keys in got.values() for key in keys]
        if self._round == 1:
            for rank, (report, _) in got.items():
                self._set(f"{self._session}/welcome/{rank}", report["token"].encode())
                self._spent.append(f"{self._session}/welcome/{rank}")
        return {rank: report for rank, (report, _) in got.items()}, silent

    def _join(self, data: bytes, token: bytes) -> None:
        """Reports in the session whose rank 0 welcomes this rank; at first it may see one of ranks that are gone."""

        def is_welcome() -> bool:
            welcome = f"{self._session}/welcome/{self.rank}"
            return self.store.check([welcome]) and self.store.get(welcome) == token

        def welcomed() -> bool:
            session = self.store.get("session").decode() if self.store.check(["session"]) else ""
            # Rank 0 may have welcomed this rank, and opened its next session, since the last look: asked again after
            # the session was read, the welcome of the session before is there, and this round belongs to that one.
            if session != self._session and not is_welcome():
                self._session = session
                self._put(self._key(f"r{self.rank}"), data)
            return is_welcome()

        self._wait_for_rank_0(welcomed)

    def _wait_for_rank_0(self, there: Callable[[], bool]) -> None:
        silent = self._wait([0], lambda _: there())
        if silent:
            raise _Silent(self._silence(silent))

    def _wait(self, ranks: Sequence[int], there: Callable[[Sequence[int]], bool]) -> list[int]:
        """Waits until what is wanted of `ranks` is there; gives up once some whose part is not there are silent."""
        life = _SignsOfLife(self.store, self.deadline_seconds)
        pause, longest = _POLL_SECONDS
        while not there(ranks):
            silent = [rank for rank in life.silent(ranks) if not there([rank])] if life.due() else []
            if silent:
                return silent
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return []

    def _silence(self, silent: Sequence[int]) -> str:
        names = _rank_names(silent)
        return (
            f"{names} gave no sign of life for {self.deadline_seconds:g} s: dead, cut off, "
            "or not in this call (every rank of the group must make it)"
        )

    def _key(self, name: str) -> str:
        return f"{self._session}/{self._round}/{name}"

    def _put(self, key: str, data: bytes) -> list[str]:
        """Writes data in as many parts as it takes; gives their keys."""
        parts = [data[i : i + _PART_BYTES] for i in range(0, len(data), _PART_BYTES)]
        keys = [f"{key}/{i}" for i in range(len(parts))]
        for part_key, part in zip(keys[1:], parts[1:], strict=True):
            self._set(part_key, part)
        self._set(keys[0], b"%d\n" % len(parts) + parts[0])  # last: it tells of the others
        return keys

    def _set(self, key: str, data: bytes) -> None:
        self.store.set(key, data)  # type: ignore[arg-type]  # declared as str, takes bytes as they are

    def _get(self, key: str) -> tuple[Any, list[str]]:
        """What was written with `_put`, and the keys of its parts."""
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
        self._looked = time.monotonic()
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> its last count, and for how many seconds it has stood

    def due(self) -> bool:
        return time.monotonic() - self._looked >= self._interval_seconds

    def silent(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` whose count has not changed for the deadline."""
        now = time.monotonic()
        # A look that comes late may be late because this process, or the whole machine, was stopped for a while; the
        # others had no chance to be heard then.
        passed, self._looked = min(now - self._looked, 2 * self._interval_seconds), now
        silent = []
        for rank in ranks:
            count = self._store.add(f"beat/{rank}", 0)
            known, stood = self._seen.get(rank, (count, 0.0))
            stood = stood + passed if count == known else 0.0
            self._seen[rank] = (count, stood)
            if stood > self._deadline_seconds:
                silent.append(rank)
        return silent


def _pack(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _describe(error: BaseException) -> dict[str, Any]:
    if isinstance(error, ShardoptError):
        return error.to_json()
    return RankError(f"{type(error).__name__}: {error}").to_json()


def _merge(what: str, failures: list[tuple[int, dict[str, Any]]], size: int) -> dict[str, Any]:
    """One error for all ranks: the first failure's type and text, the ranks it came from, and what others met."""
    ranks_with: dict[tuple[str, str], list[int]] = {}
    for rank, error in failures:
        ranks_with.setdefault((error["type"], error["message"]), []).append(rank)
    (first, ranks), *others = ranks_with.items()
    where = "" if len(ranks) == size and size > 1 else f" on {_rank_names(ranks)}"
    also = "; ".join(f"on {_rank_names(those)}: {text}" for (_, text), those in others)
    message = f"{what} failed{where}: {first[1]}" + (f" (and {also})" if also else "")
    problems = {json.dumps(problem, sort_keys=True): problem for _, error in failures for problem in error["problems"]}
    return {"type": first[0], "message": message, "problems": list(problems.values())}


def _rank_names(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
