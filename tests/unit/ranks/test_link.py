"""One connection whose peer comes back over another socket: each message arrives once, whatever was on the way."""

import socket

import pytest

from shardopt.ranks.connections.frames import Kind, Message
from shardopt.ranks.connections.link import Ended, Link


class Pair:
    """The two ends of a connection, which can break and be made again."""

    def __init__(self):
        self.sockets = []
        self.below, self.above = self._links()
        self.number = 0
        keys = self._keys()
        self.below.seal("key", *keys)
        self.above.seal("key", *reversed(keys))

    def _links(self):
        ends = socket.socketpair()
        for end in ends:
            end.setblocking(False)
        self.sockets += ends
        return Link(ends[0], 0), Link(ends[1], 1)

    def _keys(self):
        self.number += 1
        return f"up {self.number}".encode(), f"down {self.number}".encode()

    def come_back(self, told_above):
        """The one below comes back; `told_above` is what it was told that the one above has."""
        for link in (self.below, self.above):
            if not link.suspended:
                link.suspend()
        below, above = self._links()
        keys, told_below = self._keys(), self.below.taken
        self.below.resume(below, *keys, said=told_above, told=told_below)
        self.above.resume(above, *reversed(keys), said=told_below, told=told_above)

    def close(self):
        for end in self.sockets:
            end.close()


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    pair.close()


def send(link, *numbers):
    for number in numbers:
        link.put_message(Message(Kind.REPORT, b"12345678", number, b"x"))
    link.flush()


def rounds(link):
    return [message.round for message in link.receive()]


def test_what_came_late_over_the_earlier_socket_is_confirmed_and_comes_once(pair):
    send(pair.below, 1, 2)
    assert rounds(pair.above) == [1, 2]
    told = pair.above.taken
    send(pair.below, 3)
    pair.below.suspend()  # it sees the break first
    pair.below.put_message(Message(Kind.REPORT, b"12345678", 4, b"x"))
    assert rounds(pair.above) == [3]  # which was on the way, and comes after it was told
    pair.come_back(told)
    send(pair.above, 9)  # confirms three, of which the last is to be sent again
    assert rounds(pair.below) == [9] and not pair.below.is_confirmed
    pair.below.flush()
    assert rounds(pair.above) == [4]
    send(pair.above, 10)
    assert rounds(pair.below) == [10] and pair.below.is_confirmed


def test_it_may_break_again_before_that_is_sent(pair):
    send(pair.below, 1, 2)
    assert rounds(pair.above) == [1, 2]
    pair.below.put_message(Message(Kind.REPORT, b"12345678", 3, b"x"))
    pair.come_back(0)  # told before any of them had come
    pair.come_back(pair.above.taken)
    pair.below.flush()
    assert rounds(pair.above) == [3]
    send(pair.above, 9)
    assert rounds(pair.below) == [9] and pair.below.is_confirmed


@pytest.mark.parametrize("told", [-1, 3])
def test_a_peer_cannot_have_more_than_it_was_sent(pair, told):
    send(pair.below, 1, 2)
    with pytest.raises(Ended, match="another number of frames"):
        pair.come_back(told)
