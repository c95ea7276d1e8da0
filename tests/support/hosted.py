"""A process that publishes from its memory, which tests ask to go on, stop and die; and mounts of its own."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
import traceback
from multiprocessing import Pipe, get_context
from pathlib import Path

import torch

from shardopt import checkpoint
from tests import fork_server
from tests.harness.faults import watched
from tests.harness.rank import die_with_parent
from tests.support.streams import train

_NEW_MOUNTS, _PRIVATE = 0x00020000, 0x44000
_libc = ctypes.CDLL(None, use_errno=True)


def values(step, seed=0):
    """The weights of a step of a job, whole."""
    generator = torch.Generator().manual_seed(seed)
    whole = {"wide": torch.randn(300, 200, generator=generator), "small": torch.randn(7, generator=generator)}
    for each in range(1, step + 1):
        train(whole, each)
    return whole


def take_memory_of_its_own(path):
    """Puts memory that this process alone sees at a path, as on a host of its own. Raises OSError if it may not."""
    Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    done = not _libc.unshare(_NEW_MOUNTS) and not _libc.mount(None, b"/", None, _PRIVATE, None)
    if not done or _libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, b"mode=0700"):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def memory_of_its_own_is_allowed(path):
    """Whether a process may do so here; tried by one that ends."""
    pid = os.fork()
    if not pid:
        try:
            take_memory_of_its_own(path)
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def _main(connection, root, key_file, seed, on_host, options):
    threading.Thread(target=die_with_parent, daemon=True).start()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # those of the fork server lead past pytest, to whoever runs it
    os.dup2(nowhere, 2)
    try:
        if on_host:
            take_memory_of_its_own(root.removeprefix("hosts://"))
        options = {"storage_options": {"key_file": key_file}, "anchor_every": 4, "keep": 3, **options}
        publisher = checkpoint.Publisher(root, **options)
        connection.send(None)
        while (told := connection.recv()) is not None:
            steps, faults = told
            with watched(faults, []):
                for step in steps:
                    publisher.publish(step, values(step, seed)).result()
            connection.send(None)
        publisher.close()
        connection.send(None)
    except BaseException:
        connection.send(traceback.format_exc())


class Trainer:
    """A process with a publisher.

    Args:
        on_host: whether it has memory of its own at the root's path.
        options: of the publisher.
    """

    def __init__(self, root, key_file, seed=0, on_host=False, **options):
        fork_server.start()
        self.seed = seed
        self._connection, other = Pipe()
        arguments = (other, root, str(key_file), seed, on_host, options)
        self._process = get_context("forkserver").Process(target=_main, args=arguments)
        self._process.start()
        other.close()
        self._hear()

    def publish(self, *steps, faults=()):
        """Publishes steps, and waits for their commits. Raises EOFError if the process dies."""
        self._connection.send((steps, faults))
        self._hear()

    def close(self):
        """Closes the publisher, and ends the process."""
        self._connection.send(None)
        self._hear()
        self._process.join(20)

    def send_signal(self, number):
        os.kill(self._process.pid, number)
        if number == signal.SIGKILL:
            self._process.join()
        while number == signal.SIGSTOP and self._states() != {"T"}:
            time.sleep(0.001)

    def _states(self):
        """The states of its threads, as ps(1) names them."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        return {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks}

    def end(self):
        self._process.kill()
        self._process.join()
        self._connection.close()

    def _hear(self):
        if not self._connection.poll(60):
            raise TimeoutError("the trainer says nothing")
        said = self._connection.recv()
        if said is not None:
            raise AssertionError(said)
