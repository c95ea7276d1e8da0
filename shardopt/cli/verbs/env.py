"""`shardopt env`: prints what a bug report needs to say about machine, ranks and storage."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from shardopt.checkpoint.format.constants import file_name
from shardopt.checkpoint.storage import marker, storage_of
from shardopt.checkpoint.text import plural
from shardopt.cli.joined import joined
from shardopt.cli.output import Output
from shardopt.errors import OptionError, Problem
from shardopt.ranks import Ranks
from shardopt.redaction import redacted
from shardopt.version import __version__
from shardopt.world import world

_PACKAGES = (
    "torch",
    "numpy",
    "fsspec",
    "xxhash",
    "triton",
    "argcomplete",
    "rich",
    "obstore",
    "s3fs",
    "gcsfs",
    "adlfs",
)
_VARIABLES = re.compile(r"(TORCH|TORCHELASTIC|NCCL|GLOO|SLURM)_\w+")
_SHOWN = re.compile(
    r"""
    (LOCAL_|GROUP_|ROLE_)?RANK | (LOCAL_)?WORLD_SIZE | MASTER_(ADDR|PORT) | OMP_NUM_THREADS | CUDA_VISIBLE_DEVICES
    | (TORCH_)?NCCL_(ASYNC_ERROR_HANDLING|BLOCKING_WAIT|ENABLE_MONITORING|HEARTBEAT_TIMEOUT_SEC|AVOID_RECORD_STREAMS)
    | TORCH_(DISTRIBUTED_DEBUG|CPP_LOG_LEVEL|SHOW_CPP_STACKTRACES)
    | TORCHELASTIC_(RESTART_COUNT|MAX_RESTARTS|RUN_ID|USE_AGENT_STORE|SIGNALS_TO_HANDLE)
    | NCCL_(DEBUG|DEBUG_SUBSYS|SOCKET_(IFNAME|FAMILY|NTHREADS)|NSOCKS_PERTHREAD|NET|NET_GDR_LEVEL|CROSS_NIC|VERSION)
    | NCCL_(IB_(DISABLE|HCA|TIMEOUT|RETRY_CNT|GID_INDEX|TC|SL)|(P2P|SHM)_DISABLE|P2P_LEVEL|ALGO|PROTO|BUFFSIZE)
    | NCCL_((MIN|MAX)_NCHANNELS|NTHREADS|(COLLNET|NVLS|CUMEM)_ENABLE)
    | GLOO_(SOCKET_IFNAME|DEVICE_TRANSPORT)
    | SLURM_(JOB_?ID|JOB_(NUM_NODES|NODELIST|PARTITION|GPUS|START_TIME|END_TIME)|NNODES|NODELIST|NTASKS|NPROCS|PROCID)
    | SLURM_(LOCALID|NODEID|STEP_(ID|NODELIST|NUM_NODES|NUM_TASKS|GPUS)|TASKS_PER_NODE|NTASKS_PER_NODE|CPUS_PER_TASK)
    | SLURM_(CPUS_ON_NODE|GPUS_(ON|PER)_NODE|MEM_PER_NODE|RESTART_COUNT|CLUSTER_NAME|ARRAY_(JOB|TASK)_ID)
    | SLURM_LAUNCH_NODE_IPADDR
    """,
    re.VERBOSE,
)
"""The names of variables whose values are printed; any other variable may hold a secret."""
_PROBE_MIB = 64


def env(output: Output, *, url: str | None, mib: int | None) -> int:
    """Prints versions, machine and the launcher's variables; for a directory, whether all ranks see it, and its speed.

    Under torchrun it is collective: rank 0 prints, and says of each rank on which host and device it is.
    """
    if mib is not None and mib < 1:
        raise OptionError("nothing to try", [Problem("--mib", str(mib), "1 or more", "give how much each rank writes")])
    with joined() as ranks:
        here = {"host": platform.node(), "pid": os.getpid(), "device": _device()}
        _, places = ranks.agree("describing ranks", lambda: here, lambda place: place, list)
        found = {
            "packages": _packages(),
            "python": platform.python_version(),
            "system": platform.platform(),
            "cpus": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "torch": _torch(),
            "variables": _variables(),
            "ranks": places,
        }
        if url is not None:
            found["storage"] = probe(ranks, url, (_PROBE_MIB if mib is None else mib) << 20)
        if ranks.rank == 0:
            _print(output, found)
    return 0


def _packages() -> dict[str, str]:
    found = {"shardopt": __version__}  # of this code, whatever an older installation of it says
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _torch() -> dict[str, Any]:
    backends = {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
        "mpi": dist.is_available() and dist.is_mpi_available(),
    }
    return {
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "backends": [name for name, is_there in backends.items() if is_there],
    }


def _device() -> str:
    """Returns the GPU for this rank's number on its host, or the CPU."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return f"cuda:{local}" if local < torch.cuda.device_count() else "cpu"


def _variables() -> dict[str, str]:
    """Returns the variables that launchers and torch use; of unknown ones only the names."""
    names = (name for name in sorted(os.environ) if _SHOWN.fullmatch(name) or _VARIABLES.fullmatch(name))
    return {name: redacted(os.environ[name]) if _SHOWN.fullmatch(name) else "(not shown)" for name in names}


def probe(ranks: Ranks, url: str, nbytes: int) -> dict[str, Any]:
    """Writes one file on each rank at once, reads the files, and removes them. Collective.

    Raises:
        ShardoptError: ranks do not see the same directory, or it cannot be written.
    """
    storage = storage_of(url, durable=True)
    what = f"trying the storage {url}"
    made: list[str] = []  # directories that were not there, innermost first

    def prepare() -> str:
        above = "" if storage.is_remote else storage.url
        while above and not os.path.isdir(above):
            made.append(above)
            above = os.path.dirname(above)
        storage.make()
        name = world().random_name(6)
        marker.write_marker(storage, name)
        return name

    name = ranks.on_rank_0(what, prepare)
    own, neighbours = (file_name(name, rank % ranks.size, 0) for rank in (ranks.rank, ranks.rank + 1))
    noise = torch.randint(256, (1 << 20,), dtype=torch.uint8)  # which no file system makes smaller
    data = memoryview(bytearray(noise.repeat(nbytes >> 20).numpy().tobytes()))
    try:
        ranks.agree(what, lambda: marker.wait_for_marker(storage, name))
        writing = _seconds(ranks, what, lambda: storage.write(own, [data]))
        reading = _seconds(ranks, what, lambda: storage.read(neighbours))
        ranks.agree(what, lambda: storage.remove(own))
        free = storage.free_bytes()  # while the directory is there
    finally:
        storage.remove(own)
        if ranks.rank == 0:
            marker.remove_marker(storage, name)
            for path in made:
                storage_of(path).remove_if_empty()
    total = nbytes * ranks.size
    return {
        "url": storage.url,
        "is_remote": storage.is_remote,
        "free_bytes": free,
        "bytes": total,
        "write_bytes_per_second": total / writing,
        "read_bytes_per_second": total / reading,
    }


def _seconds(ranks: Ranks, what: str, work: Callable[[], object]) -> float:
    """Returns the time of the slowest rank in seconds. Collective."""

    def timed() -> float:
        begin = world().monotonic()
        work()
        return max(world().monotonic() - begin, 1e-9)

    _, seconds = ranks.agree(what, timed, lambda took: took, max)
    return float(seconds)


def _print(output: Output, found: dict[str, Any]) -> None:
    output.data(found)
    output.table([[name, number] for name, number in {"python": found["python"], **found["packages"]}.items()])
    made = found["torch"]
    runtime = f"CUDA {made['cuda']}" if made["cuda"] else f"HIP {made['hip']}" if made["hip"] else "no GPU runtime"
    output.line(f"torch: {runtime}, {plural(made['threads'], 'thread')}, {', '.join(made['backends'])}")
    output.line(f"system: {found['system']}, {plural(found['cpus'], 'CPU')}, {found['memory_bytes'] / 2**30:.0f} GiB")
    for gpu in made["gpus"]:
        output.line(f"GPU: {gpu}")
    for name, value in found["variables"].items():
        output.line(f"{name}={value}")
    for rank, place in enumerate(found["ranks"]):
        output.line(f"rank {rank}: process {place['pid']} on {place['host']}, {place['device']}")
    if "storage" in found:
        storage = found["storage"]
        output.line(
            f"{storage['url']}: seen by all ranks; {storage['bytes'] >> 20} MiB written at "
            f"{storage['write_bytes_per_second'] / 2**20:.0f} MiB/s, durable, and read at "
            f"{storage['read_bytes_per_second'] / 2**20:.0f} MiB/s (from caches, where there are any)"
        )
