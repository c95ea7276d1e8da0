"""A whole save's agreement among 16,384 ranks: the real code of a few of them, and stand-ins for all others.

Run by `benchmarks.simulate_scale agreement`.

Real, each in a process of its own: rank 0, the first rank of the second block (which leads its others), and a member of
that block. They run `save_described` twice, with the description of 8,000 tensors over all ranks; only what would
write data files is left out. Stand-ins, in one more process, hold the other connections that rank 0 and that leader
have, and say on them what the real member says: of the files that it has written each rank in its own words.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import xxhash
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # from a compiled module

from benchmarks.agreement import CountedWorld, Job, _CountingSocket, processor_seconds, serve
from shardopt.checkpoint.format.constants import file_name
from shardopt.checkpoint.saving.agree_plan import PlanCache, Planning
from shardopt.checkpoint.saving.options import DEFAULT_OPTIONS
from shardopt.checkpoint.saving.planning.describe import Description
from shardopt.checkpoint.saving.save import Described, save_described
from shardopt.ranks import Ranks
from shardopt.ranks.connections.frames import MAIN, Kind, Message
from shardopt.ranks.connections.join import Entry, leader_key, read
from shardopt.ranks.connections.link import Ended, Link
from shardopt.ranks.connections.meeting import CONNECT_SECONDS, meet
from shardopt.ranks.connections.message_hub import MessageHub
from shardopt.ranks.connections.proof import Meeting
from shardopt.ranks.connections.session import Gathering
from shardopt.ranks.connections.tree import RANKS_PER_BLOCK, Tree, pack_runs
from shardopt.runtime.gc_pause import gc_paused
from shardopt.runtime.stores import Store
from shardopt.world import READ, WRITE, Selector, using, world

commit_module: Any = importlib.import_module("shardopt.checkpoint.saving.commit")
save_module: Any = importlib.import_module(
    "shardopt.checkpoint.saving.save"
)  # by which name the package has a function

LEADER, MEMBER = RANKS_PER_BLOCK, RANKS_PER_BLOCK + 1
REAL = (0, LEADER, MEMBER)
SAVES = 3  # the first, and others of the same layouts
_SESSION = "simulated"
_PREFIX = f"shardopt-{_SESSION}"


class _Spent:
    """Seconds of this thread's processor that calls of a function have taken."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **rest: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*args, **rest)
            finally:
                self.seconds += time.thread_time() - begin

        return noting


def run_real(
    rank: int,
    size: int,
    port: int,
    describe: Callable[[], Description],
    start: Barrier,
    results: Connection,
    reports: Connection | None,
) -> None:
    """One rank. The member tells its reports to the stand-ins."""
    planning, manifest = _Spent(), _Spent()
    Planning.plan = planning.around(Planning.plan)  # type: ignore[method-assign]  # to be timed
    save_module.make_manifest = manifest.around(save_module.make_manifest)

    def write_nothing(target: Any, save_id: str, *unused: Any) -> Any:
        name = file_name(save_id, rank, 0)
        return save_module._Written([[name, 1 << 30, xxhash.xxh3_64_hexdigest(name.encode())]], {}, 1 << 30, 0)

    save_module._write = write_nothing
    commit_module.publish_checkpoint = lambda *unused: None  # which would miss the files
    if reports is not None:
        report, told = MessageHub.report, reports

        def telling(hub: MessageHub, name: bytes, number: int, data: bytes) -> None:
            told.send((number, data))
            report(hub, name, number, data)

        MessageHub.report = telling  # type: ignore[method-assign, assignment]  # to be counted
    found = []
    plans: PlanCache = {}
    with using(CountedWorld()):
        job = Job(rank, size, port)
        ranks = Ranks.meeting(job, tuple(range(size)), _SESSION)  # type: ignore[arg-type]  # what it asks, Job has

        def measured(call: Callable[[], object]) -> None:
            start.wait()
            planning.seconds = manifest.seconds = 0.0
            begun = processor_seconds(os.getpid()), _CountingSocket.counted
            call()
            used = processor_seconds(os.getpid()) - begun[0]
            found.append(
                {
                    "agreement": used - planning.seconds - manifest.seconds,
                    "planning": planning.seconds,
                    "manifest": manifest.seconds,
                    "bytes": _CountingSocket.counted - begun[1],
                }
            )

        def save(number: int, description: Description) -> None:
            with ranks.beating(), gc_paused():
                url = f"memory://scale/step-{number}"
                save_described(ranks, url, lambda: Described(description, None), plans, DEFAULT_OPTIONS)

        measured(lambda: ranks.agree("beginning", lambda: None))
        for number in range(SAVES):
            description = describe()
            measured(partial(save, number, description))
        start.wait()
    results.send(found)


class _StandIn:
    """One connection of ranks that are not there: of a member, or of a leader that speaks for its block."""

    def __init__(self, link: Link, block: range, leads: bool) -> None:
        self.link, self.block, self.leads = link, block, leads

    def report(self, number: int, data: bytes) -> None:
        of_member = file_name("", MEMBER, 0)[1:].encode()  # without what names the save
        if not self.leads:
            self.link.put_message(Message(Kind.REPORT, MAIN, number, _said_by(self.block[0], data, of_member)))
        else:
            gathering = Gathering()
            for rank in self.block:
                gathering.add(_said_by(rank, data, of_member), rank)
            for columns, ranks in gathering.take().items():
                runs = json.dumps(pack_runs(ranks)).encode()
                self.link.put_message(Message(Kind.REPORTS, MAIN, number, b"%b\n%b" % (runs, columns)))


def _said_by(rank: int, data: bytes, of_member: bytes) -> bytes:
    return data.replace(of_member, file_name("", rank, 0)[1:].encode())


def stand_in(size: int, port: int, reports: Connection, done: Connection) -> None:
    """Holds the connections of all who are not there, and reports for them, until told to end."""
    stand_ins = _connected(size, port)
    selector = world().selector()
    for each in (reports, done):
        selector.register(each, READ)
    for stand in stand_ins:
        selector.register(stand.link.socket, READ, stand)
    while True:
        for key, mask in selector.select():
            if key.fileobj is done:
                return
            if key.fileobj is reports:
                number, data = reports.recv()
                for stand in stand_ins:
                    stand.report(number, data)
                    stand.link.flush()
                    if not stand.link.is_empty:
                        selector.modify(stand.link.socket, READ | WRITE, stand)
            else:
                _serve(key.data, mask, selector)


def _serve(stand: _StandIn, mask: int, selector: Selector) -> None:
    """Takes what has come, whatever it is, and sends what is still to go."""
    if mask & READ:
        try:
            stand.link.receive()
        except Ended:
            selector.unregister(stand.link.socket)
            return
    if mask & WRITE:
        stand.link.flush()
        if stand.link.is_empty:
            selector.modify(stand.link.socket, READ, stand)


def _connected(size: int, port: int) -> list[_StandIn]:
    store = PrefixStore(_PREFIX, Job(-1, size, port).get_group_store())
    session = _wait_for(store, "session")
    at_leader = _wait_for(store, leader_key(session.name, LEADER))
    stand_ins = []
    for above, entry in ((0, session), (LEADER, at_leader)):
        for rank in Tree(above, size).children:
            if rank not in REAL:
                meeting = Meeting(session.name, session.key, rank, above)
                met = meet(entry.at, meeting, lambda: True, CONNECT_SECONDS[1])
                met.link.seal(met.side.key, met.side.from_below, met.side.from_above)
                tree = Tree(rank, size)
                block = tree.block_of(rank) if tree.leads else range(rank, rank + 1)
                stand_ins.append(_StandIn(met.link, block, tree.leads))
    return stand_ins


def _wait_for(store: Store, key: str) -> Entry:
    while (entry := read(store, key)) is None:
        time.sleep(0.01)
    return entry


def measure(size: int, describe: Callable[[], Description]) -> dict[int, list[dict[str, float]]]:
    """Returns, by real rank, what was used: to find each other and agree once, and by each of the saves.

    "planning", "manifest", and "agreement", which is all the rest, are seconds of the processor, of all threads;
    "bytes" were sent and received.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(size, theirs))
    server.start()
    port = ours.recv()
    start = context.Barrier(len(REAL))
    heard, told = context.Pipe(False)
    ended, end = context.Pipe(False)
    pipes = {rank: context.Pipe(False) for rank in REAL}
    processes = [
        context.Process(
            target=run_real, args=(rank, size, port, describe, start, pipe[1], told if rank == MEMBER else None)
        )
        for rank, pipe in pipes.items()
    ]
    others = context.Process(target=stand_in, args=(size, port, heard, ended))
    for process in (*processes, others):
        process.start()
    found = {rank: pipe[0].recv() for rank, pipe in pipes.items()}
    for process in processes:
        process.join()
    end.send(None)
    ours.send(None)
    for process in (others, server):
        process.join()
    return found
