"""Two hosts, as network namespaces; the cable of one is pulled in the middle of a save."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from shardopt import checkpoint
from tests.harness import run_ranks
from tests.support.hosts import Hosts, namespaces_are_allowed
from tests.support.killed_job import EVERY, STEPS, train
from tests.support.two_hosts_job import HELD_SAVE, OPTIONS

REPOSITORY = Path(__file__).resolve().parents[2]
RANKS_PER_HOST = 2
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
DEADLINE_SECONDS = 200.0


def torchrun(hosts, host, root, held, log):
    command = ["ip", "netns", "exec", hosts.names[host], sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes=1:2", f"--nproc-per-node={RANKS_PER_HOST}", "--max-restarts=3", "--monitor-interval=0.2"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES['a']}:29400", "--rdzv-id=two-hosts"]
    command += [f"--rdzv-conf=is_host={int(host == 'a')},last_call_timeout=8,read_timeout=5"]
    command += [f"--local-addr={ADDRESSES[host]}", str(REPOSITORY / "tests" / "support" / "two_hosts_job.py")]
    environment = os.environ | {"HOST": host, "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": str(REPOSITORY), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen([*command, root, str(held)], env=environment, stdout=log, stderr=log)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_host_that_is_cut_off_in_a_save_is_left_behind(tmp_path):
    if not namespaces_are_allowed():
        pytest.skip("this machine lets nobody here make network namespaces (ip netns)")
    root, held = str(tmp_path / "root"), tmp_path / "held"
    manager = checkpoint.Manager(root)
    with Hosts(ADDRESSES) as hosts, open(tmp_path / "a.log", "wb") as log_a, open(tmp_path / "b.log", "wb") as log_b:
        job_a, job_b = torchrun(hosts, "a", root, held, log_a), torchrun(hosts, "b", root, held, log_b)
        try:
            end = time.monotonic() + DEADLINE_SECONDS
            while not held.exists():
                assert time.monotonic() < end and job_a.poll() is None
                time.sleep(0.05)
            before = manager.steps()
            hosts.ip_on("b", "link", "set", "cable", "down")
            assert job_a.wait(DEADLINE_SECONDS) == 0
        except BaseException:
            print((tmp_path / "a.log").read_text(errors="replace")[-6000:])
            raise
        finally:
            for job in (job_a, job_b):
                job.kill()
                job.wait()
    assert before[-1] == EVERY * (HELD_SAVE - 1)
    said = (tmp_path / "a.log").read_text(errors="replace")
    assert "ranks 2, 3 gave no sign of life" in said or "rank 3 gave no sign of life" in said
    with checkpoint.open(manager.path(STEPS)) as reader:
        assert reader.manifest.world_size == RANKS_PER_HOST
    whole = str(tmp_path / "whole")
    run_ranks(RANKS_PER_HOST, train, whole, None, None, **OPTIONS)
    with checkpoint.open(manager.path(STEPS)) as one, checkpoint.open(checkpoint.Manager(whole).path(STEPS)) as other:
        wanted_keys = other.keys()
        assert one.keys() == wanted_keys
        for key in wanted_keys:
            value, wanted = one.read(key), other.read(key)
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-6)
            else:
                assert value == wanted
