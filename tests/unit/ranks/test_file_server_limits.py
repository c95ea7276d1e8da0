"""What listens for ranks that fetch files: many names, replies that are none, and the limits of what is served."""

import socket
import threading
import time

import pytest

from shardopt.ranks.connections.join import Entry
from shardopt.ranks.files import server as server_module
from shardopt.ranks.files.client import FileClient
from shardopt.ranks.files.server import FOUND, REFUSED, REPLY, SILENT_SECONDS, Files, FileServer, Limits
from tests.support.worlds import FakeClock
from tests.unit.ranks.test_file_server import DATA, KEY, LOCAL, Served, ask, client_of, handshake, proven, read


def test_ten_thousand_names_are_told(tmp_path):
    names = [f"step-{i:08d}" for i in range(10_000)]

    class Many(Files):
        def names(self, directory):
            return names

    server = FileServer(Entry("aa" * 8, KEY, ()), 1, LOCAL, Many())
    client = client_of(server)
    assert client.names("") == names
    client.close()
    server.close()


class Nothing(Files):
    pass


def lying_server(reply):
    """A server with the key, that answers anything with the same bytes."""

    class Liar(FileServer):
        def _reply(self, socket, request):
            socket.sendall(reply)

    return Liar(Entry("aa" * 8, KEY, ()), 1, LOCAL, Nothing())


def found(data):
    return REPLY.pack(FOUND, len(data)) + data


ASKED = {
    "names": lambda client: client.names(""),
    "size": lambda client: client.size("", "data"),
    "rest": lambda client: client.read_rest("", "data", 0, 100),
    "read": lambda client: client.read("", "data", 0, 100),
    "remove": lambda client: client.remove("", "data"),
}


@pytest.mark.parametrize(
    ("what", "reply"),
    [
        ("names", REPLY.pack(FOUND, 1 << 60)),
        ("names", found(b'{"a": 1}')),
        ("names", found(b'["a", 1]')),
        ("names", found(b"[" * 100_000)),
        ("names", found(b"\xff\xfe")),
        ("size", found(b"-1")),
        ("size", found(b"true")),
        ("size", found(b"1e3")),
        ("size", REPLY.pack(FOUND, 1 << 60)),
        ("rest", REPLY.pack(FOUND, 101)),
        ("read", REPLY.pack(FOUND, 99)),
        ("remove", REPLY.pack(REFUSED, 1 << 40)),
    ],
)
def test_a_reply_that_is_none_is_an_error_that_names_the_server_and_takes_no_memory(what, reply):
    server = lying_server(reply)
    client = FileClient(Entry("aa" * 8, KEY, server.at), 0, 1, "host 1 of hosts:///x")
    with pytest.raises(ConnectionAbortedError, match="host 1 of hosts:///x: a reply that is none"):
        ASKED[what](client)
    assert not client._free
    server.close()


@pytest.fixture
def limited(tmp_path):
    """Makes servers of one file, with limits."""
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "data").write_bytes(DATA)
    servers = []

    def make(**limits):
        files = Served(tmp_path, [])
        servers.append(FileServer(Entry("aa" * 8, KEY, ()), 1, LOCAL, files, Limits(**limits)))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def test_one_more_than_may_connect_is_told_and_the_others_go_on(limited):
    server = limited(connections=2)
    known = [client_of(server), client_of(server)]
    for client in known:
        assert read(client, 0, 3) == DATA[:3]
    newcomer = client_of(server)
    for _ in range(3):
        with pytest.raises(OSError, match="rank 1: 2 connections are served already"):
            read(newcomer, 0, 3)
    for client in known:
        assert read(client, 7, 3) == DATA[7:10]
    known.pop().close()
    end = time.monotonic() + 10
    while True:  # the server learns of it by and by
        try:
            assert read(newcomer, 0, 3) == DATA[:3]
            break
        except OSError:
            assert time.monotonic() < end
    newcomer.close()
    known.pop().close()


def test_threads_of_one_client_take_turns_on_the_connections_that_it_has(limited):
    server, wrong = limited(connections=2), []
    client = client_of(server)
    assert read(client, 0, 3) == DATA[:3]

    def work():
        for begin in range(0, 1000, 50):
            if read(client, begin, 50_000) != DATA[begin : begin + 50_000]:
                wrong.append(begin)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and 1 <= len(client._free) <= 2 and client._used == 0
    client.close()


def test_of_those_that_are_too_many_only_some_are_kept_to_be_told(limited):
    server = limited(connections=1)
    peers = [proven(server)]
    peers += [handshake(server)[0] for _ in range(100)]  # none of them asks for anything
    assert len(server._clients) <= 1 + 64
    ask(peers[0], ["read", "step-1", "data", [[0, 5]]])
    assert REPLY.unpack(peers[0].recv(REPLY.size, socket.MSG_WAITALL)) == (FOUND, 5)
    for peer in peers:
        peer.close()


def slowed(limited, monkeypatch, **limits):
    """A server with a clock of its own, as what it sends is looked at, and not how long that takes."""
    clock = FakeClock()
    monkeypatch.setattr(server_module, "world", lambda: clock)
    return limited(**limits), clock


def test_no_more_bytes_a_second_are_sent_than_may_be(limited, monkeypatch):
    server, clock = slowed(limited, monkeypatch, bytes_per_second=1e5)
    begin = clock.now
    pieces = [*server._in_turn([(0, 300_000), (7, 0), (1_000_000, 200_000)])]
    assert clock.now - begin == pytest.approx(5.0)
    assert sum(nbytes for _, nbytes in pieces) == 500_000
    assert [*server._in_turn([(5, 10)])] == [(5, 10)] and clock.now - begin == pytest.approx(5.0001)
    clock.now += 100.0  # in which nothing is sent, and nothing is saved up
    begin = clock.now
    assert sum(nbytes for _, nbytes in server._in_turn([(0, 100_000)])) == 100_000
    assert clock.now - begin == pytest.approx(1.0)


def test_as_many_as_may_connect_share_a_low_rate_and_none_takes_the_server_for_silent(limited, monkeypatch):
    server, clock = slowed(limited, monkeypatch, bytes_per_second=5e4, connections=256)
    peers = [server._in_turn([(0, 1_000_000)]) for _ in range(256)]
    last = [clock.now] * 256
    for _ in range(3):
        for number, peer in enumerate(peers):
            next(peer)
            assert clock.now - last[number] < SILENT_SECONDS / 2
            last[number] = clock.now


def test_a_server_with_a_low_rate_ends_at_once(limited):
    server = limited(bytes_per_second=1000.0)
    peer = proven(server)
    ask(peer, ["read", "step-1", "data", [[0, len(DATA)]]])
    peer.recv(REPLY.size, socket.MSG_WAITALL)
    (thread,) = server._clients.values()
    while server._sent_until <= time.monotonic():
        time.sleep(0.01)
    time.sleep(0.1)  # by then it waits, for seconds
    begin = time.monotonic()
    server.close()
    assert time.monotonic() - begin < 1.9 and not thread.is_alive()
    peer.close()
