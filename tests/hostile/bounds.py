"""What a user does with a checkpoint from anywhere, under bounds of time and memory; only our own errors come of it."""

import contextlib
import io
import time
import warnings
from pathlib import Path

import torch

from shardopt import checkpoint
from shardopt.cli import main
from shardopt.errors import ShardoptError

MOST_SECONDS = 2.0  # of processor time, of each call
MOST_BYTES = 200 << 20

_RESET_PEAK = "5"


def use(path):
    """Opens, shows, verifies and loads what lies at a path; returns the calls that refused it, by name."""
    refused = []
    for name, call in CALLS.items():
        before = _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        begin = time.process_time()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call(path)
        except ShardoptError as error:
            str(error).encode()
            refused.append(name)
        seconds, nbytes = time.process_time() - begin, _memory("VmHWM") - before
        assert seconds < MOST_SECONDS, f"{name}: {seconds} s"
        assert nbytes < MOST_BYTES, f"{name}: {nbytes >> 20} MiB"
    return refused


def _open(path):
    checkpoint.open(path).close()


def _read(path):
    with checkpoint.open(path) as reader:
        for key in reader.keys():  # noqa: SIM118  # not a dict
            reader.read(key)


def _show(path):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        if main(["show", str(path)]):
            assert "Traceback" not in said.getvalue(), said.getvalue()


def _load(path):
    checkpoint.load(path, {"a": torch.zeros(3), "n": 0}, strict=False)


CALLS = {"open": _open, "read": _read, "show": _show, "verify": checkpoint.verify, "load": _load}


def _memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])
