"""The server that ranks are forked from, which has torch loaded: a rank costs milliseconds instead of seconds.

One is enough for all workers of pytest: its start takes six seconds of a processor. The process that starts the workers
starts it before them, so that it is there when they have collected; without workers the first test that needs one does.
Nothing here imports torch, which the process that starts the workers has no other need for.
"""

from __future__ import annotations

import os
import sys
import threading
from glob import glob
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_HAS_GPU = bool(glob("/dev/nvidia[0-9]*") or glob("/dev/kfd"))
PRELOADED = [
    "tests.harness.rank",
    "shardopt.checkpoint.public",  # what ranks of most tests import
    "shardopt.checkpoint.storage.file_systems",  # with fsspec: a fifth of a second in each rank that imports it
    "shardopt.checkpoint.sources.foreign",
    "shardopt.public",
    "shardopt.sharding.public",
    "shardopt.nn.public",
    "shardopt.checkpoint.storage.object_stores.open",  # with obstore, for ranks that reach a store
    "botocore.session",  # with which a store of S3 is opened: a fifth of a second
    "encodings.idna",  # the first connection of a rank imports it
    "safetensors.torch",
    # torch's own table of optimizers: two seconds. It opens a GPU, and what has one open cannot be forked.
    *([] if _HAS_GPU else ["tests.support.cases"]),
    "tests.docs.run_page",  # with YAML's package: a sixth of what the block of a page takes
    "tests.support.fake_rank",
    "tests.support.layouts",
    "tests.support.placement",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",  # 80 ms in each rank that imports it
    "torch.distributed.tensor._shards_wrapper",
    "torch._dynamo",  # the first step of any optimizer imports it
    "hypothesis.stateful",
    "pytest",
    "tests.harness.preloaded",  # last
]
_IN_USUAL_RUNS = tuple(PRELOADED)  # directories of tests may add others, of which a shared server does not know
_START = threading.Lock()
_SERVER: Any = forkserver._forkserver
_shared: dict[str, Any] | None = None


def start() -> None:
    """Start the server, once, with nothing in it that a fork could break: no threads of OpenMP or BLAS."""
    with _START:
        if _shared is not None and tuple(PRELOADED) == _IN_USUAL_RUNS:
            _use(_shared)
            return
        get_context("forkserver").set_forkserver_preload(PRELOADED)
        wanted = {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, sys.path)]),
        }
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            forkserver.ensure_running()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def shared() -> dict[str, Any]:
    """What another process needs to know of the server that this one has started."""
    return {name: getattr(_SERVER, name, None) for name in ("_forkserver_address", "_forkserver_authkey")}


def share(server: dict[str, Any]) -> None:
    """Has this process use the server of another, which ends with that one."""
    global _shared
    _shared = server


def _use(server: dict[str, Any]) -> None:
    if getattr(_SERVER, "_forkserver_alive_fd", None) is not None:
        return
    vars(_SERVER).update(server)
    # A process that is forked is given the end of a pipe that keeps the server alive: here one that nobody waits for.
    _SERVER._forkserver_alive_fd = os.pipe()[1]
    _SERVER.ensure_running = lambda: None  # the server is no child of this process, which could look after it
