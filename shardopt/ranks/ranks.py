"""The ranks of a process group: rounds of agreement, all-reduce, all-to-all, halts and side channels."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from hashlib import blake2b
from typing import Any, TypeVar

import torch.distributed as dist

from shardopt.errors import Problem, RankError, ShardoptError
from shardopt.ranks.calls import Call, as_call
from shardopt.ranks.channel import Channel, Decide, Silent
from shardopt.ranks.collectives import Collectives, accelerator_of
from shardopt.ranks.connections.address import network_of
from shardopt.ranks.connections.heartbeat import DEADLINE_SECONDS
from shardopt.ranks.connections.message_hub import Share
from shardopt.ranks.failures import describe
from shardopt.ranks.files.client import FileClient
from shardopt.ranks.files.server import Files, FileServer
from shardopt.ranks.halt import Halt
from shardopt.runtime.stores import StoreError
from shardopt.world import world

T = TypeVar("T")


class Ranks(Collectives):
    """The ranks of one process group, or only this process without one.

    Of each the number in the job is in `members`.

    All ranks must make the same calls in the same order. Where they do not, each round of them raises and names what
    every rank calls; the rounds themselves stay in step. After an error that a lost rank caused they may not be, and
    every further call raises at once.

    Args:
        group: None for a single process.
        deadline_seconds: how long a rank may show no sign of life, in all that these ranks do together, before the
            others give up and name it.
    """

    def __init__(self, group: dist.ProcessGroup | None, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        self.deadline_seconds = deadline_seconds
        self.rank = group.rank() if group is not None else 0
        self.size = group.size() if group is not None else 1
        self.members = _members(group)
        # Weak: `ranks_of` is to forget the group, and these ranks with it, once nobody else has it.
        self._group: Callable[[], dist.ProcessGroup | None] | None = None if group is None else weakref.ref(group)
        self._accelerator = None if group is None else accelerator_of(group)
        self.channel: Channel | None = None
        if group is not None and self.size > 1:
            self.channel = Channel(world().store_of(group, "shardopt"), self.rank, self.members)
        self.kept: dict[object, Any] = {}
        """A cache for others, as long as these ranks live; side channels share it."""

    def with_deadline(self, seconds: float) -> Ranks:
        """Returns these ranks with another deadline, for the same rounds over the same connections. Local."""
        if seconds == self.deadline_seconds:
            return self
        ranks = copy(self)
        ranks.deadline_seconds = seconds
        return ranks

    @classmethod
    def meeting(cls, job: dist.ProcessGroup, members: tuple[int, ...], session: str = "") -> Ranks:
        """Makes ranks of a job without a process group yet, which can only `agree`.

        Args:
            members: their numbers in the job, in the order of their ranks; this rank's is among them.
            session: a name that no other meeting has, where all of them know one: they then meet beside whatever the
                program does, in any thread, with connections that close when they are let go.
        """
        ranks = cls(None)
        ranks.rank, ranks.size, ranks.members = members.index(job.rank()), len(members), members
        ranks._group = _no_group  # calls that need one raise, and do not run on each rank alone
        place = session or blake2b(repr(members).encode(), digest_size=16).hexdigest()
        store = world().store_of(job, f"shardopt-{place}")
        ranks.channel = Channel(store, ranks.rank, ranks.members, is_last=session != "")
        return ranks

    def side_channel(self, what: str) -> Ranks:
        """Makes the same ranks again, to `agree` in rounds of their own in another thread. Collective.

        They use the connections that these ranks have.

        Args:
            what: what they will do, as for `agree`.
        """
        session = self.on_rank_0(what, lambda: world().random_name(8))
        group = self._process_group()
        ranks = Ranks(group, self.deadline_seconds)
        if group is not None and self.channel is not None:
            ranks.channel = Channel(self.channel.store, self.rank, self.members, self.channel, session)
        ranks.kept = self.kept
        return ranks

    def file_server(self, files: Files) -> FileServer | None:
        """Begins to serve files to others of these ranks, who know their session's key; None without others.

        Not before the first round of these ranks is over.

        Raises:
            OSError: this rank cannot listen.
        """
        if self.channel is None:
            return None
        return FileServer(self.channel.session_of_files, self.rank, network_of(self.channel.store), files)

    def file_client(self, rank: int, at: Sequence[tuple[str, int]]) -> FileClient:
        """Returns a client that asks one of these ranks for files; connects nothing yet.

        Args:
            at: where its `file_server` listens.
        """
        assert self.channel is not None  # or there is no other
        places = tuple((host, port) for host, port in at)
        return FileClient(replace(self.channel.session_of_files, at=places), self.rank, rank)

    def beating(self) -> AbstractContextManager[None]:
        """Sends signs of life while it is open. For calls of several rounds with work between them.

        May be opened within itself, and closed by another thread.
        """
        if self.channel is None:
            return nullcontext()
        return self.channel.node.beating(self.channel.session, self.deadline_seconds)

    def halt(self, what: str) -> Halt:
        """Makes a `Halt`, by which all of these ranks stop at one place. Collective.

        Args:
            what: what it is for, as for `agree`.
        """
        session = self.on_rank_0(what, lambda: world().random_name(8))
        channel = self.channel
        if channel is not None:
            channel = Channel(channel.store, self.rank, self.members, channel, session)
            channel.deadline_seconds = self.deadline_seconds
        return Halt(what, channel)

    @property
    def job_numbers(self) -> tuple[int, ...] | None:
        """The numbers of these ranks in the job; None if they are the whole job in its order."""
        return None if self.members == tuple(range(_job_size())) else self.members

    @property
    def in_step(self) -> bool:
        """Whether these ranks can still `agree`: none was lost, as far as this rank knows."""
        return self.channel is None or self.channel.broken is None

    def agree(
        self,
        what: str | Call,
        work: Callable[[], T],
        report: Callable[[T], Any] = lambda result: None,
        decide: Callable[[list[Any]], Any] = lambda reports: None,
    ) -> tuple[T, Any]:
        """Runs `work` on every rank, and `decide` on rank 0 over all reports. Collective.

        Args:
            what: what is being done, for error messages ("saving step-7"); all ranks must do the same. What of words
                has a slash in it is not compared, as hosts may have a disk under other paths: `call_on`.
            work: this rank's own work; what it returns stays here.
            report: what rank 0 must know of it, as JSON.
            decide: runs on rank 0 only; gets the reports by rank and returns JSON that every rank gets.

        Returns:
            What `work` returned on this rank, and what `decide` returned on rank 0.

        Raises:
            ShardoptError: `work` failed on some rank, or `decide` on rank 0. Every rank raises the same error, and
                where not all have failed it names those that did.
            RankError: a rank has died or has not arrived, or is in another call.
        """
        if self.channel is None:
            result = work()
            return result, decide([report(result)])
        return self._round(self.channel, what, work, report, lambda reports: (decide(reports), ()))

    def on_rank_0(self, what: str | Call, decide: Callable[[], Any]) -> Any:
        """Calls a function on rank 0, and gives every rank its result, as JSON. Collective.

        Raises:
            ShardoptError, RankError: as `agree`.
        """
        if self.channel is None:
            return decide()
        return self.agree(what, work=lambda: None, decide=lambda _: decide())[1]

    def agree_in_sections(
        self,
        what: str | Call,
        work: Callable[[], T],
        report: Callable[[T], Any],
        decide: Callable[[list[Any]], tuple[Any, Sequence[bytes]]],
        section_of: Callable[[Any, int], int | None],
    ) -> tuple[T, Any, bytes]:
        """Agrees like `agree`, on a decision with sections, of which each rank gets at most one. Collective.

        Args:
            what, work, report: as for `agree`.
            decide: returns the JSON that every rank gets, and the sections.
            section_of: runs on rank 0 only; gets that JSON and a rank; returns the number of the section for it, None
                for none.

        Returns:
            What `work` returned on this rank, the JSON, and the section; b"" for none.

        Raises:
            ShardoptError, RankError: as `agree`.
        """
        own = [b""]

        def share(reports: list[Any]) -> tuple[Any, list[Share]]:
            decision, sections = decide(reports)
            receivers: dict[int, list[int]] = {}
            for rank in range(self.size) if sections else ():
                number = section_of(decision, rank)
                if number is not None:
                    receivers.setdefault(number, []).append(rank)
            own[0] = next((sections[number] for number, ranks in receivers.items() if ranks[0] == 0), b"")
            return decision, [(sections[number], [*filter(None, ranks)]) for number, ranks in receivers.items()]

        if self.channel is None:
            result = work()
            decision, _ = share([report(result)])
        else:
            result, decision = self._round(self.channel, what, work, report, share)
        if self.channel is not None and self.rank > 0:
            own[0], self.channel.section = self.channel.section, b""
        return result, decision, own[0]

    def _round(
        self,
        channel: Channel,
        what: str | Call,
        work: Callable[[], T],
        report: Callable[[T], Any],
        decide: Decide,
    ) -> tuple[T, Any]:
        """Runs one round of several ranks, as `agree` says."""
        _refuse_in_child(what)
        if channel.broken is not None:
            raise RankError(f"{what}: ranks lost step in an earlier failure ({channel.broken}); restart the job")
        outcome: list[T] = []
        cause: BaseException | None = None
        with channel.node.beating(channel.session, self.deadline_seconds):
            try:
                channel.begin_round(as_call(what), self.deadline_seconds)
                said, failure, cause = self._work(work, report, outcome)
                answer = channel.decide(said, failure, decide) if self.rank == 0 else channel.follow(said, failure)
            except (Silent, StoreError) as silent:
                channel.broken = str(silent) if isinstance(silent, Silent) else f"the job's store is lost: {silent}"
                raise RankError(f"{what}: {channel.broken}") from cause
            except BaseException as interrupt:
                if not channel.reported:
                    channel.broken = f"{type(interrupt).__name__} before the other ranks had a report"
                raise
        if cause is not None and not isinstance(cause, Exception):
            raise cause  # an interrupt stays an interrupt here; the other ranks have the report
        if "error" in answer:
            if answer.get("broken"):
                channel.broken = answer["error"]["message"]
            raise ShardoptError.from_json(answer["error"]) from cause
        return outcome[0], answer["decision"]

    def _work(
        self, work: Callable[[], T], report: Callable[[T], Any], outcome: list[T]
    ) -> tuple[Any, dict[str, Any] | None, BaseException | None]:
        """Does this rank's work, and adds its result to `outcome`; returns its report, or its error, as JSON too."""
        try:
            outcome.append(work())
            return report(outcome[0]), None, None
        except BaseException as error:
            return None, describe(error, self.size), error


_parents_job: list[weakref.ref[dist.ProcessGroup]] = []
"""The job of the process that this one was forked from."""


def _note_parents_job() -> None:
    job = dist.group.WORLD if dist.is_available() else None
    if job is not None:
        _parents_job[:] = [weakref.ref(job)]


os.register_at_fork(after_in_child=_note_parents_job)


def _refuse_in_child(what: str | Call) -> None:
    """Raises RankError in a forked child, which the other ranks know nothing of, unless it has joined a new job."""
    if _parents_job and dist.is_initialized() and _parents_job[0]() is dist.group.WORLD:
        remedy = "make the call in the parent; a child that works alone: start it by 'spawn', without WORLD_SIZE"
        problem = Problem("process", f"a child that rank {dist.get_rank()} has forked", "the rank itself", remedy)
        raise RankError(f"{what}: the other ranks do not know this process", [problem], code="process-group")


def _no_group() -> None:
    """Stands for a weak reference if there is no group."""


def _job_size() -> int:  # which simulated jobs replace
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _members(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    if group is not None:
        return tuple(dist.get_process_group_ranks(group))
    return (dist.get_rank() if dist.is_available() and dist.is_initialized() else 0,)
