"""Hosts that are namespaces of one machine: each has a cable to a switch, memory of its own, and can be lost.

To be used by a process that has namespaces of its own and is root in them, as launch/demo_lost_host.sh starts one:

    unshare --fork --kill-child --pid --mount-proc --net --mount python ...
"""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

NETWORK = "10.79.0"
OUTSIDE = f"{NETWORK}.254"
"""The address, on the network of the hosts, of who makes them."""
MEMORY = "/memory"
"""A directory that each host has for itself, in its memory."""

# A root of the host's own, which has all that the machine's has, and in memory what is made in it. As / is its own too,
# nobody else could replace what is below.
_ROOT = f"""
mount -t tmpfs -o mode=0755 host "$1" && cd "$1" || exit
for each in /*; do
    if [ -L "$each" ]; then cp -P "$each" . ; elif [ -d "$each" ]; then
        mkdir "./$each" && mount --rbind "$each" "./$each" || exit
    fi
done
mkdir .{MEMORY} && exec chroot . sleep infinity
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def make_switch() -> None:
    """Makes the switch, to which this process is connected as OUTSIDE."""
    ip("link", "add", "switch", "type", "bridge")
    ip("address", "add", f"{OUTSIDE}/24", "dev", "switch")
    ip("link", "set", "switch", "up")
    ip("link", "set", "lo", "up")


class Host:
    """A host, reached through its device `cable`.

    Args:
        number: of the host, from 0.
        scratch: an existing directory, over which it has a file system of its own.
    """

    def __init__(self, number: int, scratch: Path) -> None:
        self.number, self.address = number, f"{NETWORK}.{number + 1}"
        script = ["sh", "-c", _ROOT, "sh", str(scratch)]
        self._anchor = subprocess.Popen(["unshare", "--net", "--mount", *script])
        self._enter = ["nsenter", f"--target={self._anchor.pid}", "--net", "--mount", "--root", "--wd"]
        self.root = Path(f"/proc/{self._anchor.pid}/root")
        self._processes: list[subprocess.Popen[bytes]] = []
        end = time.monotonic() + 60.0
        while not self._is_up():
            if self._anchor.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"host {number} could not be made (exit code {self._anchor.poll()})")
            time.sleep(0.02)
        port = f"port{number}"
        ip("link", "add", port, "type", "veth", "peer", "name", "cable", "netns", str(self._anchor.pid))
        ip("link", "set", port, "master", "switch", "up")
        for words in (f"address add {self.address}/24 dev cable", "link set cable up", "link set lo up"):
            subprocess.run([*self._enter, "ip", *words.split()], check=True)

    def _is_up(self) -> bool:
        try:
            return Path(f"/proc/{self._anchor.pid}/comm").read_text().strip() == "sleep"  # the last of the script
        except OSError:
            return False

    @property
    def memory(self) -> Path:
        """What the host has in its memory, as seen from here."""
        return self.root / MEMORY.lstrip("/")

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Starts a process on the host; paths are absolute."""
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": "cable", **environment}
        process = subprocess.Popen(
            [*self._enter, *command], env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        self._processes.append(process)
        return process

    def lose(self) -> None:
        """Cuts the host off, then ends all that runs on it; with the last of it its memory is gone.

        In this order: the others get no word of any end.
        """
        ip("link", "set", f"port{self.number}", "down")
        self.end()

    def end(self) -> None:
        """Ends all that runs on the host, and the host."""
        for process in (*self._processes, self._anchor):
            process.kill()
            process.wait()
        subprocess.run(["ip", "link", "delete", f"port{self.number}"], capture_output=True)  # else gone a while later
