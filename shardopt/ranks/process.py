"""Processes of other ranks on this machine: that one has ended is seen at once, and not waited out.

Linux only, and only for ranks that see each other's processes; nothing is known of the others.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path


def this_process() -> str:
    """Identifies this process for `Processes.meet` on other ranks; "" where the system does not show it."""
    try:
        return f"{_place()} {os.getpid()} {_started(os.getpid())}"
    except OSError:
        return ""


class Processes:
    """The processes of other ranks that run on this machine."""

    def __init__(self) -> None:
        self._here: dict[int, tuple[int, str]] = {}  # rank -> pid, and when it was started: pids are given again

    def meet(self, rank: int, process: str) -> None:
        """Notes where a rank runs.

        Only what is seen running counts: machines that were cloned have the same ids, and containers hide processes.

        Args:
            process: `this_process` of that rank.
        """
        try:
            place, pid, started = process.rsplit(" ", 2)
            if started and place == _place() and _started(int(pid)) == started:
                self._here[rank] = int(pid), started
        except (OSError, ValueError):
            pass

    def ended(self, ranks: Collection[int]) -> list[int]:
        """Returns those of `ranks` whose processes were here, and are not any more."""
        return [rank for rank, (pid, started) in self._here.items() if rank in ranks and not _runs(pid, started)]


def _runs(pid: int, started: str) -> bool:
    """Whether a process that was seen still runs, as far as can be seen."""
    try:
        return _started(pid) == started
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True


def _place() -> str:
    """Returns an id of the boot of this machine and of the namespace in which this process sees others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> str:
    """Returns when a process was started, in ticks since the boot; "" of one that has ended and is still listed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # what is before it may hold anything
    return "" if fields[0] in "ZX" else fields[19]
