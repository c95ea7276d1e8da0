"""The host that holds the job's store and rendezvous is lost with its memory: the launcher starts the job again."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from compare_runs import differing_keys

from shardopt import checkpoint
from tests.harness import run_ranks
from tests.support.hosts import Hosts, namespaces_are_allowed
from tests.support.killed_job import STEPS, train
from tests.support.tiers_job import OPTIONS

ROOT = Path(__file__).resolve().parents[2]
ADDRESSES = {"a": "10.79.0.1", "b": "10.79.0.2", "c": "10.79.0.3"}
LOST_AT = 8
DEADLINE_SECONDS = 300.0

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]


def start(hosts, base, log):
    settings = os.environ | {
        "HOSTS": " ".join(f"{hosts.names[host]}={address}" for host, address in ADDRESSES.items()),
        "MAX_RESTARTS": "20",
        "JOB": base.parent.name,
        "LOGS": f"{base}/logs",
        "TRANSPORT": "ip netns exec",
        "RENDEZVOUS": "join_timeout=200,read_timeout=10",
        "RETRY_SECONDS": "2",
        "PYTHON": sys.executable,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
        "PASS": "PYTHONPATH",
        "GLOO_SOCKET_IFNAME": "cable",
        "OMP_NUM_THREADS": "1",
    }
    command = ["bash", "launch/multi_host.sh", "tests/support/tiers_job.py", str(base), "0.4"]
    return subprocess.Popen(command, cwd=ROOT, env=settings, stdout=log, stderr=log)


def copied(base):
    """The newest step of which some rank was told that it is on two hosts."""
    paths = base.glob("copied-*")
    return max((int(line) for path in paths for line in path.read_text().splitlines()), default=0)


def said(base, log):
    texts = [log.read_text(), *(path.read_text(errors="replace") for path in sorted(base.glob("logs/**/*.log")))]
    return "\n".join(text[-4000:] for text in texts)


def test_the_host_of_the_store_is_lost(tmp_path):
    if not namespaces_are_allowed():
        pytest.skip("this machine lets nobody here make network namespaces (ip netns)")
    base, log_path = tmp_path / "job", tmp_path / "log"
    base.mkdir()
    with Hosts(ADDRESSES) as hosts, log_path.open("wb") as log:
        job = start(hosts, base, log)
        try:
            end = time.monotonic() + DEADLINE_SECONDS
            while copied(base) < LOST_AT:
                assert time.monotonic() < end and job.poll() is None, said(base, log_path)
                time.sleep(0.05)
            hosts.ip_on("a", "link", "set", "cable", "down")
            hosts.kill_all("a")
            must = copied(base)
            shutil.rmtree(base / ADDRESSES["a"])
            time.sleep(1.0)
            hosts.ip_on("a", "link", "set", "cable", "up")
            assert job.wait(DEADLINE_SECONDS) == 0, said(base, log_path)
        finally:
            job.terminate()
            try:
                job.wait(20.0)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()
    restored = re.findall(r"resumed step (\d+) from (\S+),", said(base, log_path))
    print(f"step {must} was copied; restored {restored}")
    assert restored and all(url.startswith("hosts://") for _, url in restored), said(base, log_path)
    assert must <= min(int(step) for step, _ in restored) <= max(int(step) for step, _ in restored) < STEPS
    whole = str(tmp_path / "whole")
    run_ranks(len(ADDRESSES), train, whole, None, None, every=STEPS, **OPTIONS)
    differing, keys = differing_keys(*(checkpoint.Manager(each).path(STEPS) for each in (f"{base}/root", whole)))
    assert differing == [] and keys > 10
