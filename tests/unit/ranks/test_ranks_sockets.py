"""What listens on a socket: who is let in, what strangers can do, what is read of them, and at which addresses."""

import errno
import itertools
import json
import os
import random
import resource
import select
import signal
import socket
import struct
import threading
import time
import traceback
import tracemalloc
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shardopt import world as world_module
from shardopt.errors import OptionError
from shardopt.ranks import Ranks
from shardopt.ranks import ranks as ranks_module
from shardopt.ranks.channel import pack, unpack
from shardopt.ranks.connections import address, join, tree
from shardopt.ranks.connections.address import Network
from shardopt.ranks.connections.frames import (
    MAIN,
    MOST_FRAME_BYTES,
    MOST_UNPROVEN_BYTES,
    BadFrame,
    Decoder,
    Frame,
    Kind,
    Message,
    Sealer,
    Unsealer,
    encode,
)
from shardopt.ranks.connections.join import Entry, leader_key, publish, read, withdraw
from shardopt.ranks.connections.link import Broken, Ended, Link
from shardopt.ranks.connections.message_hub import MessageHub
from shardopt.ranks.connections.node import Node
from shardopt.ranks.connections.proof import Connecting, Forgotten, Listening, Meeting, Refused
from shardopt.ranks.connections.session import Gathering
from shardopt.ranks.connections.tree import Tree, pack_runs, unpack_runs
from shardopt.ranks.files.server import FileServer
from shardopt.world import World, using, world
from tests.harness import run_ranks
from tests.support.wire import Wire
from tests.unit.ranks.test_ranks import Group, Job, together

KEY = "6b" * 32


# Frames.

messages = st.builds(
    Message,
    st.sampled_from(Kind),
    st.binary(min_size=8, max_size=8),
    st.integers(0, (1 << 64) - 1),
    st.binary(max_size=300),
)


def decoded(data, cuts):
    decoder, got, at = Decoder(), [], 0
    decoder.trust()
    for number in itertools.count():
        if at >= len(data):
            return got
        step = cuts[number % len(cuts)]
        got += decoder.feed(data[at : at + step])
        at += step


@given(st.lists(messages, max_size=4), st.lists(st.integers(1, 500), min_size=1, max_size=5))
def test_messages_come_as_they_were_however_the_bytes_are_cut(sent, cuts):
    assert decoded(b"".join(bytes(buffer) for message in sent for buffer in encode(message)), cuts) == sent


@pytest.mark.parametrize("nbytes", [MOST_FRAME_BYTES - 1, MOST_FRAME_BYTES, MOST_FRAME_BYTES + 1, 3 * MOST_FRAME_BYTES])
def test_long_messages_travel_in_several_frames(nbytes):
    sent = [Message(Kind.ANSWER, b"12345678", 7, bytes(nbytes)), Message(Kind.BEAT)]
    assert decoded(b"".join(bytes(buffer) for message in sent for buffer in encode(message)), [100_001]) == sent


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_waited_for_and_never_kept(data):
    decoder = Decoder()
    try:
        decoder.feed(data)
    except BadFrame:
        return
    assert len(decoder._buffer) <= MOST_UNPROVEN_BYTES + 22


@pytest.mark.parametrize("claim", [MOST_UNPROVEN_BYTES + 1, MOST_FRAME_BYTES, (1 << 32) - 19])
def test_a_length_is_refused_before_it_is_read(claim):
    with pytest.raises(BadFrame):
        Decoder().feed(struct.pack("!IBB8sQ", 18 + claim, Kind.HELLO, 0, bytes(8), 0))


@pytest.mark.parametrize("nbytes", [0, MOST_UNPROVEN_BYTES])
def test_a_stranger_may_send_no_message_in_parts(nbytes):
    part = struct.pack("!IBB8sQ", 18 + nbytes, Kind.HELLO, 1, bytes(8), 0) + bytes(nbytes)
    with pytest.raises(BadFrame):
        Decoder().feed(part)


def test_a_message_within_another_is_refused():
    decoder = Decoder()
    decoder.trust()
    first = encode(Message(Kind.ANSWER, data=bytes(MOST_FRAME_BYTES + 1)))[:1]
    with pytest.raises(BadFrame):
        decoder.feed(b"".join(map(bytes, first)) + bytes(encode(Message(Kind.BEAT))[0]))


# Proof.


BELOW = Meeting("s", KEY, 3, 0)


def meet(below=BELOW, above=("s", KEY, 0)):
    """All that is said until both sides have proved themselves."""
    connecting, listening = Connecting(below), Listening(*above)
    hello = connecting.hello()
    challenge, _ = listening.take(hello)
    proof = connecting.answer(challenge)
    nothing, rank = listening.take(proof)
    assert nothing is None and rank == below.below
    return hello, challenge, proof


def test_both_sides_prove_themselves_and_the_key_is_not_said():
    assert not any(KEY.encode() in message.data for message in meet())


@pytest.mark.parametrize(
    "above", [("s", "6c" * 32, 0), ("other", KEY, 0), ("s", KEY, 128)], ids=["key", "session", "rank that listens"]
)
def test_who_differs_is_refused(above):
    with pytest.raises(Refused):
        meet(above=above)


def test_a_handshake_is_good_for_one_connection():
    hello, challenge, proof = meet()
    again = Listening("s", KEY, 0)
    again.take(hello)
    with pytest.raises(Refused):
        again.take(proof)
    with pytest.raises(Refused):  # nor does a challenge serve a second time
        connecting = Connecting(Meeting("s", KEY, 3, 0))
        connecting.hello()
        connecting.answer(challenge)


def test_a_listeners_own_proof_proves_nobody_else():
    listening = Listening("s", KEY, 0)
    challenge, _ = listening.take(Connecting(Meeting("s", KEY, 3, 0)).hello())
    reflected = Message(Kind.PROOF, data=json.dumps({"proof": json.loads(challenge.data)["proof"]}).encode())
    with pytest.raises(Refused):
        listening.take(reflected)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"session": 3, "rank": "0", "nonce": []}', b"[" * 4000])
def test_what_is_no_handshake_is_refused(data):
    with pytest.raises(Refused):
        Listening("s", KEY, 0).take(Message(Kind.HELLO, data=data))


# UnauthenticatedPeers on the port of a job.


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks_module, "accelerator_of", lambda group: None)
    monkeypatch.setattr(ranks_module, "_members", lambda group: tuple(range(group.size())) if group else (0,))
    return Job("tcp", tmp_path)


def say(link, message):
    link.sendall(b"".join(map(bytes, encode(message))))


def hear(link):
    decoder, messages = Decoder(), []
    while not messages:
        data = link.recv(4096)
        if not data:
            return None
        messages = decoder.feed(data)
    return messages[0]


def is_closed(link):
    link.settimeout(10)
    try:
        return link.recv(1) == b""
    except ConnectionError:
        return True


def introduce(link, meeting, proof=b'{"proof": "00"}'):
    side = Connecting(meeting)
    say(link, side.hello())
    challenge = hear(link)
    if challenge is None:
        return
    say(link, side.answer(challenge) if meeting.key != KEY else Message(Kind.PROOF, data=proof))


def test_strangers_are_closed_and_cost_nobody_anything(job):
    def reports(here):
        return here.agree("x", lambda: None, lambda _: here.rank, lambda reports: reports)[1]

    ranks = job.start()
    assert together(ranks, reports) == [[0, 1, 2]] * 3
    node = ranks[0].channel.node
    session, own = node.session, dict(node.hub.links)
    (host, port) = session.at[0]
    said = {
        "garbage": lambda link: link.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10),
        "a claim of very many bytes": lambda link: link.sendall(b"\xff" * 22),
        "another key": lambda link: introduce(link, Meeting(session.name, KEY, 1, 0)),
        "half of a character": lambda link: introduce(link, Meeting(session.name, KEY, 1, 0), b'{"proof": "\\ud800"}'),
        "another session": lambda link: introduce(link, Meeting("other", session.key, 1, 0)),
        "a rank that is here": lambda link: introduce(link, Meeting(session.name, session.key, 1, 0)),
        "a rank that nobody waits for": lambda link: introduce(link, Meeting(session.name, session.key, 3, 0)),
        "no introduction": lambda link: say(link, Message(Kind.REPORT, data=b"{}")),
        "a proof first": lambda link: say(link, Message(Kind.PROOF, data=b'{"proof": ""}')),
    }
    silent = [socket.create_connection((host, port)) for _ in range(200)]
    half = socket.create_connection((host, port))
    half.sendall(bytes(encode(Message(Kind.HELLO, data=bytes(100)))[0])[:50])
    for what, act in said.items():
        with socket.create_connection((host, port)) as link:
            act(link)
            assert is_closed(link), what
    assert together(ranks, reports) == [[0, 1, 2]] * 3
    assert node.hub.links == own and all(link.open for link in own.values())
    for link in (*silent, half):
        link.close()
    while node.peers.unauthenticated.links():
        time.sleep(0.001)


def test_who_says_nothing_is_closed_after_a_while(job, monkeypatch):
    monkeypatch.setattr("shardopt.ranks.connections.unauthenticated._UNPROVEN_SECONDS", 0.2)
    monkeypatch.setattr("shardopt.ranks.connections.unauthenticated._MOST_UNPROVEN", 3)
    ranks = job.start(2)
    together(ranks, lambda here: here.agree("x", lambda: None))
    at = ranks[0].channel.node.session.at[0]
    silent = [socket.create_connection(at) for _ in range(5)]
    assert all(map(is_closed, silent))
    for link in silent:
        link.close()


def hold_files():
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(60)]
    for each in opened:
        os.close(each)
    return len(opened)


def meet_silent_strangers(rank, folder):
    """Rank 0 has few descriptors, and listens; rank 1 is the strangers."""
    if rank == 1:
        ports = json.loads(appeared(folder / "ports"))
        silent = [socket.create_connection(("127.0.0.1", ports[number % len(ports)])) for number in range(400)]
        (folder / "silent").touch()
        appeared(folder / "agreed")
        for link in silent:
            link.close()
        return
    ranks_module.accelerator_of = lambda group: None
    ranks_module._members = lambda group: tuple(range(group.size()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    stores = [dist.HashStore() for _ in range(3)]
    jobs = [[Ranks(Group(rank, 2, store)) for rank in range(2)] for store in stores]

    def all_agree():
        for job in jobs:
            assert together(job, lambda here: here.agree("x", hold_files)[0]) == [60, 60]

    all_agree()
    server = FileServer(Entry("aa" * 8, "6b" * 32, ()), 0, Network(("127.0.0.1",)), None)
    ports = [server.at[0][1], *(job[0].channel.node.session.at[0][1] for job in jobs)]
    (folder / "ports.new").write_text(json.dumps(ports))
    (folder / "ports.new").rename(folder / "ports")
    appeared(folder / "silent")
    all_agree()
    (folder / "agreed").touch()


def appeared(path):
    while not path.exists():
        time.sleep(0.005)
    return path.read_text()


def strangers_and_a_job(folder):
    meet_silent_strangers(int(os.environ["RANK"]), folder)


def test_silent_strangers_at_all_listeners_leave_the_process_its_descriptors(tmp_path):
    run_ranks(2, strangers_and_a_job, tmp_path, backend=None)


NONSENSE = {
    "bytes": [Frame([b"nonsense" * 10])],
    "a question of nobody": encode(Message(Kind.HERE, data=b"[2, 0]")),
    "no count of signs": encode(Message(Kind.MISSING, data=b"[[Infinity, [2, 1, 1]]]")),
}


@pytest.mark.parametrize("nonsense", NONSENSE.values(), ids=NONSENSE.keys())
def test_a_proven_rank_that_sends_nonsense_is_lost_and_named(job, nonsense, monkeypatch):
    monkeypatch.setattr("shardopt.ranks.connections.peers._RETURN_SECONDS", 0.5)
    monkeypatch.setattr(tree, "RANKS_PER_BLOCK", 2)  # so that it leads a block
    ranks = job.start()
    together(ranks, lambda here: here.agree("x", lambda: None))
    node = ranks[2].channel.node
    with node.changed:
        node.hub.links[0].put(list(nonsense))
        node.hub.to_flush[0] = node.hub.links[0]
        node.wake()
    while 2 in ranks[0].channel.node.hub.links:  # before it can report
        time.sleep(0.001)
    outcomes = together(ranks, lambda here: here.with_deadline(60).agree("y", lambda: None))
    assert "y: rank 2 died, or ended before this call" in str(outcomes[0])
    assert str(outcomes[1]) == str(outcomes[0])
    assert "y: rank 0 died, or ended before this call" in str(outcomes[2])  # as it sees it


def test_nobody_looks_at_sessions_without_the_lock(job, monkeypatch):
    without, of_name = [], MessageHub.session

    def session(hub, name):
        if not hub.changed._is_owned():
            without.append(traceback.format_stack()[-2])
        return of_name(hub, name)

    monkeypatch.setattr(MessageHub, "session", session)

    def all_there_is(here):
        here.agree("x", lambda: None)
        sections = [b"a", b"b", b"c"]
        here.agree_in_sections("y", lambda: None, lambda _: None, lambda _: (None, sections), lambda _, rank: rank)
        here.side_channel("z").agree("z", lambda: None)
        halt = here.halt("stopping")
        return halt.at(1, False) or halt.at(2, True)

    groups = [Group(rank, 3, job.store()) for rank in range(3)]
    ats = together([Ranks(group) for group in groups], all_there_is)
    assert len(set(ats)) == 1 and ats[0] in (1, 2)
    assert without == []


def test_one_that_is_gone_keeps_nobody_from_what_was_queued_at_the_end(job):
    ranks = job.start()
    together(ranks, lambda here: here.agree("x", lambda: None))
    node = ranks[0].channel.node
    with node.changed:
        gone, there = (node.hub.links[rank] for rank in (1, 2))
        gone.socket.shutdown(socket.SHUT_WR)  # as if its peer was gone
        gone.put([Frame([b"x"])] * 1000)
        before = there.sent_bytes
        there.put_message(Message(Kind.BEAT))
        node.peers.close(0.05)
        assert there.sent_bytes > before and not there.open


def test_what_was_answered_comes_though_who_answered_has_left_and_is_still_spoken_to(job):
    ranks = job.start(2)
    together(ranks, lambda here: here.agree("x", lambda: None))
    above, below = (here.channel.node for here in ranks)
    answer = bytes(1 << 20)
    with below.changed:  # so that it does not read
        link = below.hub.links[0]
        with above.changed:
            above.hub.answer(MAIN, 2, answer)
            above.wake()
        above.wait_until_handed_over(0.1)
        above.stop()
        time.sleep(0.2)
        for _ in range(2):
            link.put_message(Message(Kind.BEAT))
            link.flush()
            time.sleep(0.05)
    above.join(10.0)
    with below.changed:
        while below.hub.above is None:
            below.changed.wait(10.0)
        assert below.hub.session(MAIN).answers == {2: answer}


def test_a_long_answer_has_come_once_it_is_handed_over(job):
    """Its process may be gone then; who still has parts of it to confirm would have the rest destroyed."""
    ranks = job.start(2)
    together(ranks, lambda here: here.agree("x", lambda: None))
    above, below = (here.channel.node for here in ranks)
    for number in range(2, 6):
        with above.changed:
            above.hub.answer(MAIN, number, bytes(number << 20))
            above.wake()
        above.wait_until_handed_over(60.0)
        assert number in below.hub.session(MAIN).answers


def test_a_rank_that_takes_nothing_holds_nobody_up(job, monkeypatch):
    monkeypatch.setattr("shardopt.ranks.connections.node._TAKES_NOTHING_SECONDS", 0.2)
    ranks = job.start(2)
    together(ranks, lambda here: here.agree("x", lambda: None))
    above, below = (here.channel.node for here in ranks)
    seconds = []
    with below.changed:  # so that it does not read, as if it was stopped
        for number in (2, 3):
            with above.changed:
                above.hub.answer(MAIN, number, bytes(64 << 20))  # more than sockets hold
                above.wake()
            begin = time.monotonic()
            above.wait_until_handed_over(60.0)
            seconds.append(time.monotonic() - begin)
            assert above.hub.links[1].stuck_at == above.hub.links[1].moved_bytes
    assert max(seconds) < 30.0
    with below.changed:
        while 3 not in below.hub.session(MAIN).answers:
            assert below.changed.wait(30.0)


def test_who_leaves_gives_the_others_their_sections_first(job):
    ranks = job.start(3)
    sections = [bytes([number]) * (3 << 20) for number in range(3)]

    def call(here):
        got = here.agree_in_sections("x", lambda: None, lambda _: 0, lambda _: (0, sections), lambda _, rank: rank)
        if here.rank == 0:
            here.channel.node.stop()
        return got[2]

    assert together(ranks, call) == sections
    ranks[0].channel.node.join(10.0)


def test_a_child_has_no_connection_whenever_it_is_forked(monkeypatch):
    listener = world().listen("127.0.0.1")
    children = []

    def fork(connection):
        child = os.fork()
        if child == 0:
            try:
                os.fstat(descriptors[-1])
                os._exit(1)
            except OSError:
                os._exit(0)
        children.append(child)
        prepare(connection)

    descriptors, prepare = [], world_module.prepare
    monkeypatch.setattr(world_module, "prepare", lambda each, *seconds: (descriptors.append(each.fileno()), fork(each)))
    connected = world().begin_connect(*listener.getsockname())
    select.select([], [connected], [], 5.0)
    world().finish_connect(connected)
    accepted = world().accept(listener)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    for each in (listener, connected, accepted):
        each.close()


class TakenMeanwhile:
    """A store in which another session begins as soon as it has answered once."""

    def __init__(self, store, other):
        self._store, self._other = store, other

    def __getattr__(self, name):
        def asked(*args):
            answer = getattr(self._store, name)(*args)
            if self._other is not None:
                other, self._other = self._other, None
                publish(self._store, "session", other)
            return answer

        return asked


def test_who_withdraws_a_session_late_takes_no_later_one_with_it():
    store, at = dist.HashStore(), (("127.0.0.1", 1),)
    old, new = Entry("old", KEY, at), Entry("new", KEY, at)
    publish(store, "session", old)
    store.set(leader_key("old", 128), "x")
    withdraw(TakenMeanwhile(store, new), [leader_key("old", 128)], old, is_last=False)
    assert read(store, "session") == new and not store.check([leader_key("old", 128)])
    withdraw(store, [], old, is_last=False)
    assert read(store, "session") == new
    withdraw(store, [], new, is_last=False)
    assert read(store, "session") is None
    publish(store, "session", old)
    withdraw(store, [], old, is_last=True)
    assert not store.check(["session"])


def test_what_an_older_version_left_in_the_store_is_no_session(job):
    store = dist.PrefixStore("shardopt", job.store())
    store.set("session", "0123456789abcdef")
    ranks = job.start()

    def late(here):
        time.sleep(0.2 if here.rank == 0 else 0)
        return here.agree("x", lambda: here.rank)[0]

    assert together(ranks, late) == [0, 1, 2]


def test_a_rank_0_of_an_older_job_that_is_stopped_holds_nobody_up(job):
    stopped = World().listen("127.0.0.1")  # its system takes connections, and it says nothing
    store = dist.PrefixStore("shardopt", job.store())
    publish(store, "session", Entry("0123456789abcdef", KEY, (stopped.getsockname()[:2],)))
    ranks = job.start()

    def late(here):
        time.sleep(0.3 if here.rank == 0 else 0)
        return here.with_deadline(4.0).agree("x", lambda: here.rank)[0]

    with stopped:
        assert together(ranks, late) == [0, 1, 2]
        stopped.accept()[0].close()  # so they have tried


def test_ranks_get_sections_as_one_piece_of_memory(job):
    ranks = job.start(5)
    together(ranks, lambda here: here.agree("x", lambda: None))
    hub, section = ranks[0].channel.node.hub, bytes(4 << 20)
    with hub.changed:  # the thread sends nothing meanwhile
        tracemalloc.start()
        hub.answer(MAIN, 2, b'{"decision":0}', [(section, [1, 2, 3, 4])])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_rank_without_a_descriptor_says_so_of_itself(job, monkeypatch):
    def none_free(*unused):
        raise OSError(errno.EMFILE, "Too many open files")

    ranks = job.start(2)
    monkeypatch.setattr(World, "begin_connect", none_free)
    outcomes = together(ranks, lambda here: here.with_deadline(1.0).agree("x", lambda: None))
    assert "x: this rank cannot communicate: [Errno 24] Too many open files" in str(outcomes[1])


def flush_to_a_peer_that_is_gone():
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    here, there = socket.socketpair()
    there.close()
    link = Link(here)
    link.put_message(Message(Kind.BEAT))
    with pytest.raises(Ended):
        link.flush()


def test_a_peer_that_is_gone_ends_no_program_that_is_to_end_by_broken_pipes():
    run_ranks(1, flush_to_a_peer_that_is_gone, backend=None)


# Connections that break.


@pytest.fixture
def wire():
    made = Wire()
    with using(made):
        yield made
    made.close()


def numbers(here):
    return here.agree("x", lambda: None, lambda _: here.rank, lambda reports: reports)[1]


def end_all(ranks):
    for here in ranks:
        here.channel.node.stop()
    for here in ranks:
        here.channel.node.join(10.0)


def test_a_connection_that_is_reset_between_rounds_comes_back_unnoticed(job, wire, monkeypatch):
    monkeypatch.setattr(tree, "RANKS_PER_BLOCK", 2)  # 2 leads 3
    ranks = job.start(4)
    assert together(ranks, numbers) == [[0, 1, 2, 3]] * 4
    for _ in range(3):
        pairs = wire.pairs()
        assert len(pairs) == 3
        for pair in pairs:
            pair.reset()
        assert together(ranks, numbers) == [[0, 1, 2, 3]] * 4
    links = [link for here in ranks for link in here.channel.node.hub.links.values()]
    assert len(links) == 6 and all(link.open and not link.suspended for link in links)
    end_all(ranks)


def test_rounds_are_whole_however_often_connections_are_reset(job, wire, monkeypatch):
    """Answers of some MiB, sections, and resets at any time.

    Not before each end has taken a frame since the last ones: who is always cut off before is given up, and under load
    a frame of 1 MiB may take longer than the next reset.
    """
    monkeypatch.setattr(tree, "RANKS_PER_BLOCK", 2)
    ranks = job.start(4)
    together(ranks, numbers)
    done, resets = threading.Event(), []
    ends = [link for here in ranks for link in here.channel.node.hub.links.values()]

    def disturb():
        chance, taken = random.Random(7), [-1] * len(ends)
        while not done.wait(chance.uniform(0.0, 0.03)):
            if any(link.taken <= before for link, before in zip(ends, taken, strict=True)):
                continue
            taken = [link.taken for link in ends]
            for pair in wire.pairs():
                if chance.random() < 0.5:
                    resets.append(pair.reset())

    def work(here):
        got = []
        for number in range(12):
            large = "x" * (number % 3 << 19)
            said = [number, here.rank, large]
            _, told = here.agree("y", lambda: None, lambda _, said=said: said, lambda reports: reports)
            sections = [bytes([number, rank]) * (1 << 18) for rank in range(4)]
            section = here.agree_in_sections(
                "z", lambda: 0, lambda _: 0, lambda _, sections=sections: (0, sections), lambda _, rank: rank
            )[2]
            got.append(told == [[number, rank, large] for rank in range(4)] and section == sections[here.rank])
        return got

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        outcomes = together(ranks, work)
    finally:
        done.set()
        thread.join()
    assert outcomes == [[True] * 12] * 4
    assert len(resets) > 10
    end_all(ranks)


def test_bytes_that_somebody_else_sends_on_a_connection_are_none_of_the_rank(job, wire):
    ranks = job.start(2)
    assert together(ranks, numbers) == [[0, 1]] * 2
    forged = b"".join(map(bytes, encode(Message(Kind.REPORT, MAIN, 2, b'{"report":7}')))) + bytes(24)
    for said in (forged, b"\xff" * 100, b"\0" * 100):
        (pair,) = wire.pairs()
        pair.far.sendall(said)
        assert together(ranks, numbers) == [[0, 1]] * 2
    (pair,) = wire.pairs()
    pair.near.sendall(b"".join(map(bytes, encode(Message(Kind.ANSWER, MAIN, 5, b'{"decision":7}')))) + bytes(24))
    assert together(ranks, numbers) == [[0, 1]] * 2
    end_all(ranks)


def test_who_has_ended_after_its_connection_broke_is_named_soon(job, wire, monkeypatch):
    monkeypatch.setattr("shardopt.ranks.connections.peers._RETURN_SECONDS", 0.5)
    ranks = job.start(3)
    together(ranks, numbers)
    node = ranks[1].channel.node
    with node.changed:
        node.peers.come_back = lambda link: None  # as if its process was no more
        node.hub.links[0].socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        node.peers._end(node.hub.links[0], Broken("reset"))
    begin = time.monotonic()
    outcomes = together(ranks, numbers, absent=[1])
    assert "x: rank 1 died, or ended before this call" in str(outcomes[0]) == str(outcomes[2])
    assert time.monotonic() - begin < 10.0
    end_all(ranks)


def test_an_answer_is_not_lost_where_who_gave_it_hears_of_a_reset_as_it_leaves(job, wire):
    ranks = job.start(2)
    assert together(ranks, numbers) == [[0, 1]] * 2
    node, below = (here.channel.node for here in ranks)
    with node.changed:
        node.hub.answer(MAIN, 2, b'{"decision":7}')
        node.stop()
        node.peers._end(node.hub.links[1], Broken("reset"))
    with below.changed:
        while 2 not in below.hub.session(MAIN).answers:
            assert below.changed.wait(10.0)
    end_all(ranks)


def seals(number=0, taken=0, key=b"k" * 32):
    confirmed = []
    return Sealer(key, number), Unsealer(key, number, taken, confirmed.append), confirmed


def test_who_is_cut_off_before_any_answer_names_who_is_gone(job, monkeypatch):
    monkeypatch.setattr(tree, "RANKS_PER_BLOCK", 2)  # 2 leads 3
    monkeypatch.setattr("shardopt.ranks.channel._RECORD_SECONDS", 0.1)
    ranks = job.start(4)
    nodes = [here.channel.node for here in ranks]

    def call(here):
        return here.with_deadline(1.0).agree("x", lambda: None)

    begin = time.monotonic()
    with nodes[0].beating(MAIN, 1.0), nodes[2].beating(MAIN, 1.0):
        outcomes: list = []
        thread = threading.Thread(target=lambda: outcomes.extend(together(ranks, call, absent=[0, 1, 2])))
        thread.start()
        while 3 not in nodes[2].hub.links:
            time.sleep(0.001)
        end_all([ranks[0], ranks[2]])
        thread.join(30.0)
    assert str(outcomes[3]) == "x: rank 2 died, or ended before this call [rank-lost]"
    assert time.monotonic() - begin < 10.0
    end_all(ranks)


FULL = 256 << 10  # bytes of frames, which are confirmed


@given(st.lists(st.sampled_from([0, 1000, FULL - 23, FULL - 22, FULL - 21, FULL // 2, 3 * FULL]), max_size=12))
def test_whatever_is_sent_is_handed_over_once_it_has_come(sizes):
    """What is not yet confirmed then is never confirmed by itself."""
    ends = [Link(end, rank) for rank, end in enumerate(socket.socketpair())]
    for link, keys in zip(ends, ((b"a", b"b"), (b"b", b"a")), strict=True):
        link.socket.setblocking(False)
        link.seal(KEY, *keys)
    above, below = ends
    for size in sizes:
        above.put_message(Message(Kind.ANSWER, data=bytes(size)))
    come = 0
    while come < len(sizes) or not (above.is_empty and below.is_empty):
        above.flush()
        come += len(below.receive())
        below.flush()
        above.receive()
    said = below.sent_bytes
    assert above.is_handed_over(above.mark)
    assert below.receive() == [] and below.is_empty and below.sent_bytes == said
    for link in ends:
        link.close()


def test_a_frame_is_taken_once_in_its_place_and_as_it_was_sent():
    frames = [encode(Message(Kind.REPORT, MAIN, n, b"data"))[0] for n in range(3)]
    sealer, unsealer, confirmed = seals()
    sealed = [(bytes(frame), sealer.seal(frame, 40 + n)) for n, frame in enumerate(frames)]
    for wrong in (
        sealed[1],
        (sealed[0][0], sealed[1][1]),
        (sealed[0][0][:-1] + b"!", sealed[0][1]),
        (sealed[0][0], bytes(24)),
    ):
        with pytest.raises(BadFrame):
            unsealer.open(memoryview(wrong[0]), wrong[1])
    assert [unsealer.open(memoryview(frame), seal) for frame, seal in sealed] == [True] * 3
    assert confirmed == [40, 41, 42] and unsealer.taken == 3
    with pytest.raises(BadFrame):  # once more
        unsealer.open(memoryview(sealed[2][0]), sealed[2][1])
    with pytest.raises(BadFrame):  # of the other direction
        seals(key=b"o" * 32)[1].open(memoryview(sealed[0][0]), sealed[0][1])
    _, again, _ = seals(taken=2)  # who comes back may be told less than was taken
    assert [again.open(memoryview(frame), seal) for frame, seal in sealed] == [False, False, True]


def test_who_comes_back_proves_that_it_is_the_same_process():
    known = SimpleNamespace(key="5c" * 32, taken=7)

    def back(key, taken=5, waits=known):
        connecting, listening = Connecting(BELOW, key, taken), Listening("s", KEY, 0, {3: waits}.get)
        challenge, _ = listening.take(connecting.hello())
        proof = connecting.answer(challenge)
        assert listening.take(proof) == (None, 3) and listening.returns
        assert connecting.taken == listening.taken == (5, 7)
        return connecting, listening

    connecting, listening = back(known.key)
    assert (connecting.from_below, connecting.from_above) == (listening.from_below, listening.from_above)
    assert connecting.from_below != connecting.from_above
    with pytest.raises(Refused):  # another process, which knows the session alone
        back(KEY)
    with pytest.raises(Forgotten):
        back(known.key, waits=None)
    listening = Listening("s", KEY, 0, {}.get)
    side = Connecting(BELOW, KEY, 5)
    challenge, _ = listening.take(side.hello())
    with pytest.raises(Forgotten):
        side.answer(challenge)
    said = Meeting("s", KEY, 3, 0).proof("connects", (side._nonces[0], json.loads(challenge.data)["nonce"]), (5, -1))
    with pytest.raises(Refused):
        listening.take(Message(Kind.PROOF, data=json.dumps({"proof": said}).encode()))


def test_the_key_is_not_in_a_store_that_everybody_may_read(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks_module, "accelerator_of", lambda group: None)
    monkeypatch.setattr(ranks_module, "_members", lambda group: tuple(range(group.size())))
    monkeypatch.setattr(tree, "RANKS_PER_BLOCK", 2)  # so that leaders have entries too
    seen, keep = {}, join.keep_secret

    def kept(store, name, key):
        keep(store, name, key)
        seen.update({path.name: (path.read_text(), path.stat().st_mode & 0o777) for path in tmp_path.glob("*.key")})

    monkeypatch.setattr(join, "keep_secret", kept)
    old = os.umask(0)
    try:
        ranks = Job("file", tmp_path).start(4)
        assert together(ranks, numbers) == [[0, 1, 2, 3]] * 4
    finally:
        os.umask(old)
    session = ranks[0].channel.node.session
    assert {here.channel.node.session.key for here in ranks} == {session.key}
    assert seen == {f"store.{session.name}.key": (session.key, 0o600)}
    stored = (tmp_path / "store").read_bytes()
    assert session.name.encode() in stored and session.key.encode() not in stored
    assert session.key not in repr(session)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]  # nothing is left once all have joined


def test_a_file_system_that_keeps_no_secret_is_refused(tmp_path, monkeypatch):
    opened = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, mode=0o777, **more: opened(path, flags, 0o644, **more))
    store = dist.FileStore(str(tmp_path / "store"))
    with pytest.raises(PermissionError, match="init_method"):
        publish(store, "session", Entry("s", KEY, ()))
    assert not list(tmp_path.glob("*.key"))


# Addresses.


class Host(World):
    """A host whose ways to others are known; those that are not fail. Its interfaces have an address or more each."""

    def __init__(self, store_host, interfaces=(), **routes):
        self._store_host, self._interfaces, self._routes = store_host, interfaces, routes

    def store_host(self, store):
        return self._store_host

    def interfaces(self):
        return [("lo", "127.0.0.1"), ("lo", "::1"), *self._interfaces]

    def route_to(self, host):
        name = {"192.0.2.1": "out", "2001:db8::1": "out6", "127.0.0.1": "loop", "10.1.0.1": "far"}.get(host, host)
        if name not in self._routes:
            raise OSError(f"no way to {host}")
        return self._routes[name]


DATA, MANAGED = ("data0", "10.5.0.7"), ("mgmt0", "10.0.0.7")
A_STORE = object()  # which the world below knows the host of
BOTH = [MANAGED, DATA, ("data1", "fd05::7")]


@pytest.fixture
def environment(monkeypatch):
    """Sets variables that say where ranks listen, and no other."""
    names = {"own": address.NETWORK, "gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
    for name in names.values():
        monkeypatch.delenv(name, raising=False)
    return lambda **texts: [monkeypatch.setenv(names[each], text) for each, text in texts.items()]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (Host("", BOTH), ["127.0.0.1"]),
        (Host("master", BOTH, master="10.0.0.7"), ["10.0.0.7"]),
        (Host("10.1.0.1", far="10.0.0.8"), ["10.0.0.8"]),
        (Host("fd00::1", **{"fd00::1": "fd00::2"}), ["fd00::2"]),
        (Host("localhost", BOTH, localhost="127.0.0.1", out="10.0.0.7"), ["127.0.0.1"]),
        (Host("127.0.0.1", loop="127.0.0.1", out="10.0.0.7"), ["127.0.0.1"]),
        (Host("localhost", localhost="::1", out="10.0.0.7"), ["::1"]),
        (Host("master", master="127.0.1.1", out="10.0.0.7"), ["127.0.1.1", "10.0.0.7"]),
        (Host("master", [DATA], master="127.0.1.1"), ["127.0.1.1", "10.5.0.7"]),
        (Host("master", BOTH, master="127.0.1.1", out="10.0.0.7"), ["127.0.1.1", "10.0.0.7", "10.5.0.7", "fd05::7"]),
        (Host("master", [("data1", "fd05::7")], master="::1", out6="fd05::7"), ["::1", "fd05::7"]),
        (Host("master", master="127.0.1.1"), ["127.0.1.1"]),
        (Host(None, out="10.0.0.7"), ["127.0.0.1", "10.0.0.7"]),
        (Host(None, BOTH, out="10.0.0.7"), ["127.0.0.1", "10.0.0.7", "10.5.0.7", "fd05::7"]),
        (Host(None), ["127.0.0.1"]),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_a_rank_listens_where_others_reach_its_host(host, expected, environment):
    environment()
    with using(host):
        assert address.network_of(A_STORE) == Network(tuple(expected))


def test_who_is_to_be_reached_by_anybody_listens_at_all_addresses(environment):
    environment()
    with using(Host("master", BOTH, master="127.0.1.1", out="10.0.0.7")):
        assert address.network_of(None) == Network(("127.0.0.1", "10.0.0.7", "10.5.0.7", "fd05::7"))
    environment(own="data0")
    with using(Host("master", BOTH, master="127.0.1.1", out="10.0.0.7")):
        assert address.network_of(None) == Network(("10.5.0.7",))


@pytest.mark.parametrize(
    ("texts", "expected", "ports"),
    [
        ({"gloo": "data0"}, ["10.5.0.7"], None),
        ({"gloo": "data1,data0"}, ["10.5.0.7", "fd05::7"], None),
        ({"gloo": "data"}, ["127.0.1.1", "10.0.0.7", "10.5.0.7", "fd05::7"], None),  # which is no name
        ({"nccl": "data"}, ["10.5.0.7", "fd05::7"], None),
        ({"nccl": "=data0"}, ["10.5.0.7"], None),
        ({"nccl": "=data"}, ["127.0.1.1", "10.0.0.7", "10.5.0.7", "fd05::7"], None),
        ({"nccl": "^mgmt,docker"}, ["10.5.0.7", "fd05::7"], None),
        ({"nccl": "^=data1"}, ["10.0.0.7", "10.5.0.7"], None),
        ({"gloo": "mgmt0", "nccl": "data"}, ["10.0.0.7"], None),
        ({"own": "data0", "gloo": "mgmt0"}, ["10.5.0.7"], None),
        ({"own": "mgmt0,data1:30000-30009"}, ["10.0.0.7", "fd05::7"], range(30000, 30010)),
        ({"own": ":30000-30000", "gloo": "data0"}, ["10.5.0.7"], range(30000, 30001)),
    ],
    ids=str,
)
def test_variables_say_where_a_rank_listens(texts, expected, ports, environment):
    environment(**texts)
    with using(Host("master", BOTH, master="127.0.1.1", out="10.0.0.7")):
        assert address.network_of(A_STORE) == Network(tuple(expected), ports)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ib0", "no interface ib0 that is up and has an address; here are lo, mgmt0, data0, data1"),
        ("data0:30000", "no range of ports after the colon"),
        ("data0:30010-30000", "the ports 30010 to 30000"),
        (":0-10", "the ports 0 to 10"),
        (":65000-70000", "the ports 65000 to 70000"),
    ],
)
def test_a_variable_that_names_nothing_here_is_refused_by_all(text, found, environment, job):
    environment(own=text)
    with using(Host("localhost", BOTH)):
        for error in together(job.start(2), lambda here: here.agree("x", lambda: None)):
            assert isinstance(error, OptionError) and found in str(error) and f"SHARDOPT_NETWORK={text}" in str(error)


def test_ranks_listen_at_the_ports_that_are_named(environment, job):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment(own=f":{port}-{port}")
        errors = together(job.start(2), lambda here: here.with_deadline(0.5).agree("x", lambda: None))
        assert f"none of the ports {port} to {port} is free" in str(errors[0])
    environment(own=f":{port}-{port + 20}")
    ranks = job.start(2)
    assert together(ranks, lambda here: here.agree("x", lambda: here.rank)[0]) == [0, 1]
    assert all(port <= at[1] <= port + 20 for at in ranks[0].channel.node.session.at)


class Elsewhere(World):
    """One whose ranks say first that they listen where somebody else does, or nobody."""

    def __init__(self, *wrong):
        self.wrong = wrong

    def begin_connect(self, host, port):
        return (
            super().begin_connect(*self.wrong[int(port)])
            if port < len(self.wrong)
            else super().begin_connect(host, port)
        )


def test_ranks_find_each_other_among_wrong_addresses(job, tmp_path, monkeypatch):
    """Of another host's 127.0.0.1 nobody, or a program that says nothing, or garbage, or an older rank 0."""
    silent, gone = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    gone_at = gone.getsockname()
    gone.close()
    other = Job("hash", tmp_path).start(2)
    together(other, lambda here: here.agree("x", lambda: None))
    wrong = (gone_at, silent.getsockname(), other[0].channel.node.session.at[0], ("192.0.2.77", 9))
    listen = Node._listen
    monkeypatch.setattr(Node, "_listen", lambda node: (*(("10.9.9.9", n) for n in range(4)), *listen(node)))
    begin = time.monotonic()
    with silent, using(Elsewhere(*wrong)):
        assert together(job.start(3), lambda here: here.agree("x", lambda: here.rank)[0]) == [0, 1, 2]
    assert time.monotonic() - begin < 8.0


def test_who_is_not_reached_is_said_with_its_addresses_and_by_whom(job, monkeypatch):
    monkeypatch.setattr("shardopt.ranks.connections.node._UNREACHED_SECONDS", 0.0)
    listen = Node._listen
    monkeypatch.setattr(Node, "_listen", lambda node: [listen(node), (("10.9.9.9", 0),)][1])
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = server.getsockname()
    with using(Elsewhere(nobody)):
        errors = together(job.start(2), lambda here: here.with_deadline(2.0).agree("x", lambda: None))
    for error in errors:
        assert "rank 0 listens at 10.9.9.9:0 (10.9.9.9:0: Connection refused)" in str(error)
        assert "rank 1 could not reach it" in str(error) and "SHARDOPT_NETWORK" in str(error)


def test_the_host_of_a_store_is_that_of_its_server(tmp_path):
    master = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert World().store_host(dist.PrefixStore("a", dist.PrefixStore("b", master))) == "localhost"
    assert World().store_host(dist.HashStore()) == ""
    assert World().store_host(dist.FileStore(str(tmp_path / "store"))) is None


# The tree.


@pytest.mark.parametrize("size", [1, 2, 127, 128, 129, 256, 1000, 16384])
def test_every_rank_is_connected_with_rank_0_through_one_leader_at_most(size):
    trees = [Tree(rank, size) for rank in range(size)] if size <= 1000 else [Tree(r, size) for r in range(0, size, 61)]
    for here in trees:
        above = here.leader
        assert (above is None) == (here.rank == 0)
        if above is not None:
            assert here.rank in Tree(above, size).children
            assert above == 0 or Tree(above, size).leader == 0
            assert here.next_towards(0) == above
        assert all(Tree(child, size).leader == here.rank for child in here.children)
        assert len(here.children) <= 127 + 127


@given(st.sets(st.integers(100, 140)))
def test_ranks_travel_as_runs(ranks):
    assert unpack_runs(pack_runs(sorted(ranks)), range(100, 141)) == sorted(ranks)


@pytest.mark.parametrize(
    "runs", [[99, 1, 1], [139, 1, 3], [100, 1, 1 << 60], [100, 40, 3], [100, 0, 9], [100, 1, 0], [100, 1]]
)
def test_runs_outside_of_a_block_are_refused(runs):
    with pytest.raises(ValueError, match=r"not in|shorter|longer"):
        unpack_runs(runs, range(100, 141))


@given(st.dictionaries(st.integers(0, 40), st.tuples(st.integers(0, 2), st.text(max_size=2))), st.integers(1, 5))
def test_reports_travel_by_columns(reports, per_block):
    """From several leaders to rank 0."""
    blocks, at_0 = defaultdict(Gathering), Gathering()
    for rank, report in reports.items():
        blocks[rank // per_block].add(pack(*report), rank)
    for block in blocks.values():
        for columns, ranks in block.take().items():
            at_0.add_packed(columns, ranks)
    assert at_0.reported == reports.keys()
    got = [{}, {}]
    for columns, ranks in at_0.take().items():
        for into, (which, values) in zip(got, unpack(columns), strict=True):
            assert len(values) == len(set(values))
            assert len(which) == 1 or len(ranks) % len(which) == 0
            into.update({rank: values[which[at % len(which)]] for at, rank in enumerate(ranks)})
    assert {rank: (got[0][rank], got[1][rank]) for rank in got[0]} == reports


def test_long_reports_travel_apart():
    reports = [b"0" * (1 << 18) + pack(rank) for rank in range(5)] + [b"0" * (3 << 19)]
    gathering = Gathering()
    for rank, report in enumerate(reports):
        gathering.add(report, rank)
        if rank == 4:
            assert [len(data) >> 18 for data in gathering.take()] == [3, 2]
    assert [len(data) >> 18 for data in gathering.take()] == [6]


def test_what_is_no_report_ends_no_thread_of_a_leader():
    gathering = Gathering()
    for rank, report in enumerate([b"", b"\n", b"1\n2\n3", b"{"]):
        gathering.add(report, rank)
    assert [*gathering.take().values()] == [[0, 1, 2, 3]]


@pytest.mark.parametrize("data", [b"", b"{", b"[99,1,1]\n[]", b"[100,1]\n[]", b"7\n[]", b'["a",1,1]\n[]'])
def test_reports_of_others_than_the_block_are_refused(data):
    hub = MessageHub(Tree(0, 300), world().condition())
    with pytest.raises(Ended), hub.changed:
        hub.take(128, Message(Kind.REPORTS, MAIN, 1, data))


def test_equal_reports_are_passed_on_once():
    gathering = Gathering()
    for rank in (5, 3, 4):
        gathering.add(b"1\n2", rank)
    gathering.add(b"1\n3", 6)
    gathering.add(b"1\n4", 3)  # a second one
    assert gathering.take() == {b"[[[0],[1]],[[0,0,0,1],[2,3]]]": [3, 4, 5, 6]}
    gathering.add(b"1\n2", 7)
    gathering.add_packed(b"[[[0],[1]],[[0],[2]]]", [8, 9])
    assert gathering.take() == {b"[[[0],[1]],[[0],[2]]]": [8, 9, 7]}
