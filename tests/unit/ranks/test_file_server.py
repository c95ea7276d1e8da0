"""What listens for ranks that fetch files: who gets something, and that strangers get nothing and hold up nobody."""

import json
import os
import socket
import struct
import threading
import time

import pytest

from shardopt.ranks.connections.address import Network
from shardopt.ranks.connections.frames import Kind, Message, encode
from shardopt.ranks.connections.join import Entry
from shardopt.ranks.connections.proof import Connecting, Meeting
from shardopt.ranks.files import server as server_module
from shardopt.ranks.files.client import FileClient
from shardopt.ranks.files.server import (
    FOUND,
    LENGTH,
    MOST_REQUEST_BYTES,
    REPLY,
    Files,
    FileServer,
)

KEY = "6b" * 32
DATA = bytes(range(256)) * 5000
LOCAL = Network(("127.0.0.1",))


class Served(Files):
    def __init__(self, path, asked):
        self.path, self.asked = path, asked

    def open_file(self, directory, name):
        self.asked.append((directory, name))
        return os.open(self.path / directory / name, os.O_RDONLY)

    def names(self, directory):
        return sorted(os.listdir(self.path / directory))

    def remove(self, directory, name):
        raise PermissionError("nothing is removed from here")


@pytest.fixture
def served(tmp_path):
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "data").write_bytes(DATA)
    asked = []

    server = FileServer(Entry("aa" * 8, KEY, ()), 1, LOCAL, Served(tmp_path, asked))
    yield server, asked
    server.close()


def client_of(server, key=KEY, name="aa" * 8):
    return FileClient(Entry(name, key, server.at), 0, 1)


def read(client, begin, nbytes):
    return client.read("step-1", "data", begin, nbytes)


def connected(server):
    return socket.create_connection(server.at[0], 5)


def ends(peer):
    """Whether the server closes a connection, and what it says before."""
    peer.settimeout(30)
    said = b""
    try:
        while data := peer.recv(4096):
            said += data
    except ConnectionResetError:
        pass
    peer.close()
    return said


def test_ranges_come_as_they_are_asked_for(served):
    server, _ = served
    client = client_of(server)
    assert read(client, 0, len(DATA)) == DATA
    pieces = [
        (offset, memoryview(bytearray(nbytes))) for offset, nbytes in [(7, 100), (0, 3), (1000, 0), (400_000, 70_000)]
    ]
    client.read_into("step-1", "data", pieces)
    assert all(bytes(memory) == DATA[offset : offset + len(memory)] for offset, memory in pieces)
    many = [(offset, memoryview(bytearray(3))) for offset in range(0, 9000, 5)]  # more than one request may have
    client.read_into("step-1", "data", many)
    assert all(bytes(memory) == DATA[offset : offset + 3] for offset, memory in many)
    client.close()


def test_many_threads_read_at_one_time(served):
    server, _ = served
    client, wrong = client_of(server), []

    def work(n):
        for i in range(20):
            begin = (n * 7919 + i * 104729) % (len(DATA) - 5000)
            if read(client, begin, 5000) != DATA[begin : begin + 5000]:
                wrong.append((n, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    client.close()


def test_what_is_not_there_is_told_and_the_connection_continues(served):
    server, _ = served
    client = client_of(server)
    with pytest.raises(FileNotFoundError, match="fewer than are asked for"):
        read(client, len(DATA) - 1, 2)
    with pytest.raises(FileNotFoundError):
        client.read("step-2", "data", 0, 1)
    assert read(client, 5, 2) == DATA[5:7]
    client.close()


def test_a_wrong_key_or_session_opens_nothing(served):
    server, asked = served
    for client in (client_of(server, key="6c" * 32), client_of(server, name="bb" * 8)):
        with pytest.raises(ConnectionRefusedError):
            read(client, 0, 1)
    assert not asked


def handshake(server):
    """The messages of a rank that proves itself, with its connection."""
    peer, side = connected(server), Connecting(Meeting("aa" * 8, KEY, 0, 1))
    hello = b"".join(bytes(each) for each in encode(side.hello()))
    peer.sendall(hello)
    (length,) = struct.unpack("!I", peer.recv(4, socket.MSG_WAITALL))
    frame = peer.recv(length, socket.MSG_WAITALL)
    proof = b"".join(bytes(each) for each in encode(side.answer(Message(Kind.CHALLENGE, data=frame[18:]))))
    peer.sendall(proof)
    return peer, hello, proof


def ask(peer, request):
    data = json.dumps(request).encode()
    peer.sendall(LENGTH.pack(len(data)) + data)


def proven(server):
    peer, _, _ = handshake(server)
    (length,) = struct.unpack("!I", peer.recv(4, socket.MSG_WAITALL))
    peer.recv(length, socket.MSG_WAITALL)  # the welcome
    return peer


def test_a_handshake_that_is_repeated_opens_nothing(served):
    server, asked = served
    peer, hello, proof = handshake(server)
    other = connected(server)
    other.sendall(hello + proof)
    ask(other, ["read", "step-1", "data", [[0, 5]]])
    said = ends(other)
    assert DATA[:5] not in said and not asked
    peer.close()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        os.urandom(4000),
        struct.pack("!I", 1 << 31) + b"x" * 100,
        LENGTH.pack(40) + json.dumps(["read", "step-1", "data", [[0, 5]]]).encode(),
    ],
    ids=["another protocol", "garbage", "too long", "a request without a proof"],
)
def test_garbage_is_dropped(served, said):
    server, asked = served
    peer = connected(server)
    peer.sendall(said)
    assert ends(peer) == b"" and not asked


@pytest.mark.parametrize(
    "said",
    [
        LENGTH.pack(MOST_REQUEST_BYTES + 1),
        LENGTH.pack(4) + b"null",
        LENGTH.pack(2) + b"{}",
        *[
            LENGTH.pack(len(data)) + data
            for data in (
                json.dumps(["read", "step-1", "data", [[0, 1 << 62]]]).encode(),
                json.dumps(["read", "step-1", "data", [[-1, 4]]]).encode(),
                json.dumps(["read", "step-1", "data", [[0, True]]]).encode(),
                json.dumps(["read", 1, "data", []]).encode(),
                json.dumps(["read", "step-1", "data", [[0, 1]] * 600]).encode(),
                b"[" * 5000,
            )
        ],
    ],
)
def test_what_is_no_request_ends_the_connection_of_a_rank_and_no_other(served, said):
    server, asked = served
    peer, other = proven(server), proven(server)
    peer.sendall(said)
    assert ends(peer) == b"" and not asked
    ask(other, ["read", "step-1", "data", [[0, 5]]])
    assert REPLY.unpack(other.recv(REPLY.size, socket.MSG_WAITALL)) == (FOUND, 5)
    other.close()


def test_a_claim_of_more_bytes_than_there_are_is_refused_before_any_is_read(served):
    server, _ = served
    peer = proven(server)
    ask(peer, ["read", "step-1", "data", [[0, 1 << 60]]])
    status, length = REPLY.unpack(peer.recv(REPLY.size, socket.MSG_WAITALL))
    assert status != FOUND and b"fewer" in peer.recv(length, socket.MSG_WAITALL)
    peer.close()


def test_a_thousand_strangers_hold_up_no_rank(served):
    server, _ = served
    client = client_of(server)
    assert read(client, 0, 1) == DATA[:1]
    strangers = [connected(server) for _ in range(1000)]
    for n, stranger in enumerate(strangers):
        stranger.sendall(b"\0\0\0\x30half a frame"[: n % 12])
    assert read(client, 0, 3) == DATA[:3]  # one that is known continues,
    other = client_of(server)
    assert read(other, 0, 3) == DATA[:3]  # and one that comes is let in
    for peer in strangers:
        peer.close()
    client.close()
    other.close()


def test_a_server_that_ends_is_noticed_at_once(served):
    server, _ = served
    client = client_of(server)
    read(client, 0, 1)
    server.close()
    with pytest.raises(OSError):
        read(client, 0, 1)


def test_the_rest_of_a_file_is_as_much_as_it_has(served):
    server, _ = served
    client = client_of(server)
    for begin, nbytes in [(0, 10), (len(DATA) - 4, 10), (len(DATA), 10), (len(DATA) + 5, 10), (3, 0)]:
        assert client.read_rest("step-1", "data", begin, nbytes) == DATA[begin : begin + nbytes]
    client.close()


def test_names_and_sizes_are_told(served):
    server, _ = served
    client = client_of(server)
    assert client.names("") == ["step-1"] and client.names("step-1") == ["data"]
    assert client.size("step-1", "data") == len(DATA)
    client.close()


@pytest.mark.parametrize(
    "ask_for",
    [
        lambda client: client.size("step-1", "none"),
        lambda client: client.read_rest("step-1", "none", 0, 5),
        lambda client: client.names("none"),
        lambda client: client.remove("step-1", "data"),
    ],
    ids=["size", "rest", "names", "remove"],
)
def test_what_is_refused_is_told_and_the_connection_continues(served, ask_for):
    server, _ = served
    client = client_of(server)
    client.names("")
    (connection,) = client._free
    with pytest.raises(FileNotFoundError):
        ask_for(client)
    assert read(client, 5, 2) == DATA[5:7] and client._free == [connection]
    client.close()


@pytest.mark.parametrize("what", ["write", "", "Read", "names\0"])
def test_a_request_that_nobody_knows_ends_the_connection(served, what):
    server, asked = served
    peer = proven(server)
    ask(peer, [what, "step-1", "data", [[0, 5]]])
    assert ends(peer) == b"" and not asked


@pytest.mark.parametrize("said", [b"", b"\0", LENGTH.pack(40), LENGTH.pack(40) + b'["read", "step'])
def test_half_a_request_is_given_up(served, monkeypatch, said):
    monkeypatch.setattr(server_module, "SILENT_SECONDS", 0.2)
    server, asked = served
    peer = proven(server)
    peer.sendall(said)
    if said:
        assert ends(peer) == b"" and not asked
    else:  # an idle one stays
        time.sleep(0.4)
        ask(peer, ["read", "step-1", "data", [[0, 5]]])
        assert REPLY.unpack(peer.recv(REPLY.size, socket.MSG_WAITALL)) == (FOUND, 5)
        peer.close()
