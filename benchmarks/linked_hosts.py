"""Runs ranks on hosts that are namespaces of one machine, each with a cable of a given speed.

For Linux, where users may make namespaces. A benchmark that is to run so calls `in_namespaces` first, which starts it
again in namespaces of its own, and then `on_hosts` instead of `on_ranks`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist

from examples.namespaces import Host, ip, make_switch

_INSIDE = "SHARDOPT_BENCHMARK_HOSTS"
_PORT = 29500
_UNSHARE = ("unshare", "--fork", "--kill-child", "--pid", "--mount-proc", "--net", "--mount")


def in_namespaces() -> None:
    """Runs this program once more in namespaces of its own, and exits with its exit code; returns only there."""
    if _INSIDE not in os.environ:
        as_root = () if os.geteuid() == 0 else ("--user", "--map-root-user")
        # As a module, by its name: the file alone would not find the other modules.
        again = [*_UNSHARE, *as_root, sys.executable, *sys.orig_argv[1:]]
        raise SystemExit(subprocess.run(again, env=os.environ | {_INSIDE: "1"}).returncode)


def on_hosts(n: int, mbit_per_second: int, function: str, *args: Any) -> Any:
    """Runs `function(*args)` on n gloo ranks, each on a host of its own; returns what rank 0 returned.

    Args:
        mbit_per_second: of each cable, in each direction.
        function: as "module:name".
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "call").write_bytes(pickle.dumps((function, args)))
        make_switch()
        hosts = []
        try:
            for number in range(n):
                scratch = Path(folder, f"host{number}")
                scratch.mkdir()
                hosts.append(Host(number, scratch))
                limit_cable(hosts[-1], mbit_per_second)
            environment = {"PYTHONPATH": str(Path.cwd())}
            command = [sys.executable, "-m", "benchmarks.linked_hosts", folder, hosts[0].address, str(n)]
            ranks = [host.start([*command, str(host.number)], environment, sys.stderr.buffer) for host in hosts]
            codes = [rank.wait() for rank in ranks]
            if any(codes):
                raise SystemExit(f"ranks have failed, with exit codes {codes}")
            return torch.load(f"{folder}/result", weights_only=False)
        finally:
            for host in hosts:
                host.end()
            ip("link", "delete", "switch")


def limit_cable(host: Host, mbit_per_second: int) -> None:
    """Limits what goes out of a host, and what comes in."""
    limit = ["root", "tbf", "rate", f"{mbit_per_second}mbit", "burst", "1mb", "latency", "50ms"]
    subprocess.run(["tc", "qdisc", "add", "dev", f"port{host.number}", *limit], check=True)
    host.start(["tc", "qdisc", "add", "dev", "cable", *limit], {}, sys.stderr.buffer).wait()


def _rank(folder: str, address: str, size: str, rank: str) -> None:
    function, args = pickle.loads(Path(folder, "call").read_bytes())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://{address}:{_PORT}", rank=int(rank), world_size=int(size))
    result = resolve_name(function)(*args)
    if rank == "0":
        torch.save(result, f"{folder}/result")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(*sys.argv[1:])
