"""Hosts as network namespaces, with a cable from each to a switch."""

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


class Hosts:
    """Network namespaces that reach one another, each through its device `cable`; of which nothing is left at the end.

    Args:
        addresses: of each host by its name, in one network of 256.
    """

    def __init__(self, addresses):
        self.addresses = addresses
        self.names = {host: f"shardopt-{os.getpid()}-{host}" for host in addresses}
        self._switch = f"shardopt-{os.getpid()}-switch"

    def __enter__(self):
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self):
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._switch, "link", "set", "bridge", "up")
        for number, (host, address) in enumerate(self.addresses.items()):
            end, port = f"so{os.getpid()}{host}", f"port{number}"
            ip("netns", "add", self.names[host])
            ip("link", "add", end, "type", "veth", "peer", "name", f"{end}p")
            ip("link", "set", end, "netns", self.names[host])
            ip("link", "set", f"{end}p", "netns", self._switch)
            ip("-n", self._switch, "link", "set", f"{end}p", "name", port)
            ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
            self.ip_on(host, "link", "set", end, "name", "cable")
            self.ip_on(host, "address", "add", f"{address}/24", "dev", "cable")
            for device in ("cable", "lo"):
                self.ip_on(host, "link", "set", device, "up")

    def ip_on(self, host, *words):
        ip("-n", self.names[host], *words)

    def pids(self, host):
        return [int(pid) for pid in ip("netns", "pids", self.names[host]).split()]

    def kill_all(self, host):
        """Ends all processes of a host at once, as a loss of power does."""
        while pids := self.pids(host):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def __exit__(self, *unused):
        there = {line.split()[0] for line in ip("netns", "list").splitlines() if line}
        for host, name in self.names.items():
            if name in there:
                self.kill_all(host)
                ip("netns", "del", name)
        if self._switch in there:
            ip("netns", "del", self._switch)


def namespaces_are_allowed():
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"shardopt-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    ip("netns", "del", name)
    return True
