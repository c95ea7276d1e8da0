"""Two hosts, as network namespaces with a cable between them; it is pulled in the middle of a save."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from shardopt import checkpoint
from tests.harness import run_ranks
from tests.support.killed_job import EVERY, STEPS, train
from tests.support.two_hosts_job import HELD_SAVE, OPTIONS

REPOSITORY = Path(__file__).resolve().parents[2]
RANKS_PER_HOST = 2
HOSTS = {"a": "10.77.0.1", "b": "10.77.0.2"}
DEADLINE_SECONDS = 200.0


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


class Hosts:
    """Two network namespaces, each with one end of a cable."""

    def __init__(self):
        self.names = {host: f"shardopt-{os.getpid()}-{host}" for host in HOSTS}

    def __enter__(self):
        for name in self.names.values():
            ip("netns", "add", name)
        ends = {host: f"so{os.getpid()}{host}" for host in HOSTS}
        ip("link", "add", ends["a"], "type", "veth", "peer", "name", ends["b"])
        for host, address in HOSTS.items():
            ip("link", "set", ends[host], "netns", self.names[host])
            self.ip_on(host, "link", "set", ends[host], "name", "cable")
            self.ip_on(host, "address", "add", f"{address}/24", "dev", "cable")
            for device in ("cable", "lo"):
                self.ip_on(host, "link", "set", device, "up")
        return self

    def ip_on(self, host, *words):
        ip("-n", self.names[host], *words)

    def pids(self, host):
        return [int(pid) for pid in ip("netns", "pids", self.names[host]).split()]

    def __exit__(self, *unused):
        for host, name in self.names.items():
            while pids := self.pids(host):
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.1)
            ip("netns", "del", name)


def torchrun(hosts, host, root, held, log):
    command = ["ip", "netns", "exec", hosts.names[host], sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes=1:2", f"--nproc-per-node={RANKS_PER_HOST}", "--max-restarts=3", "--monitor-interval=0.2"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={HOSTS['a']}:29400", "--rdzv-id=two-hosts"]
    command += [f"--rdzv-conf=is_host={int(host == 'a')},last_call_timeout=8,read_timeout=5"]
    command += [f"--local-addr={HOSTS[host]}", str(REPOSITORY / "tests" / "support" / "two_hosts_job.py")]
    environment = os.environ | {"HOST": host, "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": str(REPOSITORY), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen([*command, root, str(held)], env=environment, stdout=log, stderr=log)


def namespaces_are_allowed():
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"shardopt-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return False
    ip("netns", "del", name)
    return True


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_host_that_is_cut_off_in_a_save_is_left_behind(tmp_path):
    if not namespaces_are_allowed():
        pytest.skip("this machine lets nobody here make network namespaces (ip netns)")
    root, held = str(tmp_path / "root"), tmp_path / "held"
    manager = checkpoint.Manager(root)
    with Hosts() as hosts, open(tmp_path / "a.log", "wb") as log_a, open(tmp_path / "b.log", "wb") as log_b:
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
