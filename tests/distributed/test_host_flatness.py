"""Hundreds of saves to tiers: nothing grows with them."""

import gc
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardopt import checkpoint
from shardopt.checkpoint import Tier
from tests.distributed.test_hosts import app_of, assert_is
from tests.harness import run_ranks

SAVES, LOOKS = 500, 20
MOST_MORE_BYTES = 2 << 20


def held(root):
    """Returns by kind what this process holds, the job's store has, and lies on the disks of all hosts."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "shardopt-tiers":  # its work is over, but a loaded machine may not have let it end yet
            thread.join(30)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "keys": distributed_c10d._get_default_store().num_keys(),
        "files": sum(len(files) for _, _, files in os.walk(root)),
    }


def save_often(root, stage):
    base = f"{root}/host-{dist.get_rank()}"
    tiers = [
        Tier(f"{base}/memory", every=1, copies=2),
        Tier(f"{base}/disk", every=10, copies=2),
    ]
    looks = []
    with checkpoint.Manager(f"{root}/root", destinations=tiers, every=50, keep=2, stage=stage) as manager:
        app = app_of(0)
        for step in range(1, SAVES + 1):
            for key, after in app_of(step).items():
                if isinstance(after, torch.Tensor):
                    app[key].to_local().copy_(after.to_local())
                else:
                    app[key] = after
            manager.save(step, app)
            if step % (SAVES // LOOKS) == 0:
                manager.wait()
                dist.barrier()
                looks.append(held(root))
                dist.barrier()
        assert manager.restore(app) == SAVES
        assert_is(app, SAVES)
    return looks


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stage", ["lazy", None])
def test_500_saves_with_copies_leave_memory_descriptors_threads_keys_and_files_flat(tmp_path, stage):
    for rank, looks in enumerate(run_ranks(3, save_often, str(tmp_path), stage, deadline_seconds=1500)):
        series = {kind: [look[kind] for look in looks] for kind in looks[0]}
        print(f"rank {rank}: {series}")
        early, late = LOOKS // 4, LOOKS // 2
        for kind, values in series.items():
            more = max(values[late:]) - max(values[early:late])
            assert more <= (MOST_MORE_BYTES if kind == "bytes" else 0), (kind, values)
