"""Ranks on hosts of their own, which are network namespaces: how they find each other, strangers, and resets.

Each host is a thread of this process that has gone there, with a file of names of its own; so are those that it starts.
"""

import ctypes
import os
import socket
import struct
import threading
import time
from concurrent.futures import Future

import pytest
import torch.distributed as dist

from shardopt.ranks import Ranks
from shardopt.ranks import ranks as ranks_module
from shardopt.ranks.connections import unauthenticated
from tests.support.hosts import Hosts, ip, namespaces_are_allowed
from tests.unit.ranks.test_ranks import Group, together

CABLES = {"a": "10.80.0.1", "b": "10.80.0.2"}
_NEW_NETWORK, _NEW_MOUNTS, _BIND, _PRIVATE = 0x40000000, 0x00020000, 0x1000, 0x44000
_libc = ctypes.CDLL(None, use_errno=True)


def call(function, *args):
    if function(*args):
        raise OSError(ctypes.get_errno(), f"{function.__name__}: {os.strerror(ctypes.get_errno())}")


@pytest.fixture(scope="module")
def hosts():
    if not namespaces_are_allowed():
        pytest.skip("this machine lets nobody here make network namespaces (ip netns)")
    with Hosts(CABLES) as made:
        yield made


@pytest.fixture(autouse=True)
def no_backend_and_no_choice(monkeypatch):
    monkeypatch.setattr(ranks_module, "accelerator_of", lambda group: None)
    monkeypatch.setattr(ranks_module, "_members", lambda group: tuple(range(group.size())))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "SHARDOPT_NETWORK"):
        monkeypatch.delenv(name, raising=False)


def on_host(hosts, host, names, work):
    """Does something on a host in a thread that stays there; returns the future of what comes of it."""
    result = Future()

    def run():
        try:
            with open(f"/run/netns/{hosts.names[host]}") as network:
                call(_libc.setns, network.fileno(), _NEW_NETWORK)
            call(_libc.unshare, _NEW_MOUNTS)
            call(_libc.mount, None, b"/", None, _PRIVATE, None)
            call(_libc.mount, os.fsencode(names), b"/etc/hosts", None, _BIND, None)
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def agree(here):
    return here.with_deadline(20.0).agree("x", lambda: None, lambda _: here.rank, lambda all: all)[1]


class Job:
    """Two ranks, one on each host; `names` are those that each host has for addresses."""

    def __init__(self, hosts, tmp_path, names=None, file_store=False):
        self.ranks, port = {}, Future()

        def store(host):
            if file_store:
                return dist.FileStore(str(tmp_path / "store"))
            if host == "a":
                made = dist.TCPStore("master", 0, is_master=True, wait_for_workers=False)
                port.set_result(made.port)
                return made
            return dist.TCPStore("master", port.result(30), is_master=False)

        def work(rank, host):
            self.ranks[rank] = Ranks(Group(rank, 2, store(host)))
            return agree(self.ranks[rank])

        files = []
        for host in CABLES:
            files.append(tmp_path / f"{host}.names")
            files[-1].write_text(f"127.0.0.1 localhost\n{(names or {}).get(host, '')}\n")
        self.came = [
            on_host(hosts, host, files[n], lambda n=n, host=host: work(n, host)) for n, host in enumerate(CABLES)
        ]
        self.hosts, self.files = hosts, files

    def results(self):
        return [each.result(60) for each in self.came]

    def end(self):
        for here in self.ranks.values():
            here.channel.node.stop()
        for here in self.ranks.values():
            here.channel.node.join(10.0)


DEBIAN = {"a": "127.0.1.1 master", "b": "10.80.0.1 master"}


def management(hosts, host, number):
    """A second interface, with the way to everywhere else, by which no host reaches another."""
    hosts.ip_on(host, "link", "add", "mgmt", "type", "veth", "peer", "name", "nowhere")
    hosts.ip_on(host, "link", "set", "nowhere", "up")
    hosts.ip_on(host, "address", "add", f"10.90.0.{number}/24", "dev", "mgmt")
    hosts.ip_on(host, "link", "set", "mgmt", "up")
    hosts.ip_on(host, "route", "add", "default", "via", "10.90.0.254", "dev", "mgmt")


def six_only(hosts, host, number):
    hosts.ip_on(host, "address", "flush", "dev", "cable")
    hosts.ip_on(host, "address", "add", f"fd80::{number}/64", "dev", "cable", "nodad")


NETWORKS = {
    "a name that means the host itself, and no way out": (None, DEBIAN, False),
    "a way out through another interface": (management, DEBIAN, False),
    "IPv6 only": (six_only, {"a": "127.0.1.1 master\n::1 master", "b": "fd80::1 master"}, False),
    "a store in a file and two interfaces": (management, None, True),
}


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS.keys())
def test_ranks_find_each_other(tmp_path, network):
    if not namespaces_are_allowed():
        pytest.skip("this machine lets nobody here make network namespaces (ip netns)")
    change, names, file_store = network
    with Hosts(CABLES) as hosts:
        for number, host in enumerate(CABLES, 1):
            if change is not None:
                change(hosts, host, number)
        job = Job(hosts, tmp_path, names, file_store)
        begin = time.monotonic()
        assert job.results() == [[0, 1]] * 2
        assert time.monotonic() - begin < 15.0
        job.end()


def test_a_silent_stranger_on_another_host_holds_nobody_up(hosts, tmp_path, monkeypatch):
    monkeypatch.setattr(unauthenticated, "_MOST_UNPROVEN", 64)
    job = Job(hosts, tmp_path, DEBIAN)
    assert job.results() == [[0, 1]] * 2
    port = {at[0]: at[1] for at in job.ranks[0].channel.node.session.at}["10.80.0.1"]
    silent = on_host(
        hosts, "b", job.files[1], lambda: [socket.create_connection(("10.80.0.1", port)) for _ in range(1024)]
    ).result(60)
    assert together(list(job.ranks.values()), agree) == [[0, 1]] * 2
    assert len(job.ranks[0].channel.node.peers.unauthenticated.links()) <= 64 + 8
    for each in silent:
        each.close()
    job.end()


def reset(here, peer):
    """Resets the connection with a peer, as the system does it that is told to."""
    node = here.channel.node
    nobody = struct.pack("H14x", socket.AF_UNSPEC)
    call(_libc.connect, node.hub.links[peer].socket.fileno(), nobody, len(nobody))


@pytest.mark.parametrize("who", [0, 1])
def test_a_reset_between_hosts_goes_unnoticed(hosts, tmp_path, who):
    job = Job(hosts, tmp_path, DEBIAN)
    assert job.results() == [[0, 1]] * 2
    for _ in range(3):
        reset(job.ranks[who], 1 - who)
        assert together([job.ranks[0], job.ranks[1]], agree) == [[0, 1]] * 2
    job.end()


@pytest.mark.exhaustive
def test_a_reset_of_which_one_host_hears_nothing_goes_unnoticed(hosts, tmp_path):
    job = Job(hosts, tmp_path, DEBIAN)
    assert job.results() == [[0, 1]] * 2
    before = job.ranks[1].channel.node.hub.links[0].socket
    ip("-n", hosts.names["a"], "link", "set", "cable", "down")
    reset(job.ranks[0], 1)
    ip("-n", hosts.names["a"], "link", "set", "cable", "up")
    end = time.monotonic() + 4.5
    while job.ranks[1].channel.node.hub.links[0].socket is before:  # in no call, so that it says nothing
        assert time.monotonic() < end
        time.sleep(0.05)
    assert together([job.ranks[0], job.ranks[1]], agree) == [[0, 1]] * 2
    job.end()
