"""What a rank says of others, and when: the hub of a rank without sockets."""

from types import SimpleNamespace

import pytest

from shardopt.ranks.connections import tree
from shardopt.ranks.connections.frames import MAIN, Kind, Message
from shardopt.ranks.connections.heartbeat import Silence
from shardopt.ranks.connections.message_hub import MessageHub
from shardopt.ranks.lost import Witness
from shardopt.world import World, using, world


class Link:
    """Keeps what is put into it."""

    def __init__(self):
        self.put_so_far = b""

    def put(self, buffers):
        self.put_so_far += b"".join(map(bytes, buffers))


@pytest.fixture
def hub_of(monkeypatch):
    def make(rank, size, ranks_per_block):
        monkeypatch.setattr(tree, "RANKS_PER_BLOCK", ranks_per_block)
        hub = MessageHub(tree.Tree(rank, size), world().condition())
        hub.begin()
        return hub

    return make


def test_a_leader_alone_in_its_block_reports_once_it_is_connected(hub_of):
    hub = hub_of(1, 2, 1)
    with hub.changed:
        hub.report(MAIN, 1, b'"call"\n7')  # while its thread still connects
        hub.links[0] = link = Link()
        hub.repeat()
    assert link.put_so_far.count(b"call") == 1
    assert b'[1, 1, 1]\n[[[0],["call"]],[[0],[7]]]' in link.put_so_far


def test_whose_end_ends_a_call_is_not_hidden_by_the_end_of_the_leader_who_says_so(hub_of):
    hub = hub_of(3, 4, 2)
    with hub.changed:
        hub.links[2] = Link()
        hub.take(2, Message(Kind.CUT_OFF))
        hub.lose(2)
    assert hub.above == 0


def test_a_section_is_in_memory_once_whoever_it_is_sent_to(hub_of):
    hub, section = hub_of(0, 4, 4), bytes(3 << 20)
    sent = {rank: [] for rank in (1, 2, 3)}
    with hub.changed:
        for rank, buffers in sent.items():
            hub.links[rank] = Link()
            hub.links[rank].put = buffers.extend
        hub.answer(MAIN, 1, b"0", [(section, [1, 2, 3])])
    parts = {rank: [part for frame in frames for part in frame.buffers] for rank, frames in sent.items()}
    held = [{id(part.obj) for part in each if isinstance(part, memoryview)} for each in parts.values()]
    assert len(held[0]) == 1 and held[0] == held[1] == held[2]
    assert all(sum(map(len, each)) >= len(section) for each in parts.values())


def test_who_shows_life_in_a_session_that_is_over_does_not_begin_it_again(hub_of):
    hub, name = hub_of(0, 3, 4), b"12345678"
    with hub.changed:
        hub.take(1, Message(Kind.BEAT, name))
        assert hub.sessions[name].signs == {1: 1}
        hub.forget(name)
        hub.take(1, Message(Kind.BEAT, name))
        hub.sign(2, name)
        assert hub.sessions == {}
        for number in range(1000):
            hub.forget(number.to_bytes(8, "big"))
    assert len(hub.forgotten) <= 256


def test_all_stop_though_a_leader_leaves_while_they_are_asked(hub_of):
    hub = hub_of(0, 6, 2)
    links = hub.links
    with hub.changed:
        for rank in (1, 2, 4):
            links[rank] = Link()
        halting = hub.session(MAIN).halting
        assert halting.passes(3)
        hub.halt(MAIN)
        hub.take(1, Message(Kind.PASSED, MAIN, data=(5).to_bytes(8, "big")))
        hub.take(4, Message(Kind.PASSED, MAIN, data=(4).to_bytes(8, "big")))
        assert halting.at is None
        hub.lose(2)
        assert halting.at == 6


class Clock(World):
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


def test_no_member_is_given_up_for_a_leader_that_comes_late(hub_of):
    """Two in each block: 2 leads 3, and comes just before the deadline."""
    hub = hub_of(0, 4, 2)
    with using(Clock()) as clock, hub.changed:
        watch = Silence(10.0)
        witness = Witness(SimpleNamespace(hub=hub, tree=hub.tree, changed=hub.changed), MAIN)

        def silent(*missing):
            clock.now += 1.0
            return witness.silent(watch, missing)

        for _ in range(9):
            assert silent(2, 3) == []
        hub.links[2] = SimpleNamespace(heard=1)
        for _ in range(10):
            assert silent(3) == []
            hub.links[2].heard += 1
        assert silent(3) == [3]
