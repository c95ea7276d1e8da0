"""launch/multi_host.sh on three hosts, which are network namespaces: one is lost in the middle, and comes back."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.hosts import Hosts, namespaces_are_allowed

ROOT = Path(__file__).resolve().parents[2]
ADDRESSES = {"a": "10.78.0.1", "b": "10.78.0.2", "c": "10.78.0.3"}
STEPS, EVERY = 90, 10
TOLERANCE = 1e-5
DEADLINE_SECONDS = 300.0

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def hosts():
    if not namespaces_are_allowed():
        pytest.skip("this machine lets nobody here make network namespaces (ip netns)")
    with Hosts(ADDRESSES) as made:
        yield made


class Run:
    """A training job on all hosts, started by one command."""

    def __init__(self, hosts, out, nodes="2:3", seconds_a_step=0.4, breaks_at=0, max_restarts=20, by_hand=False):
        self.out = out
        settings = os.environ | {
            "HOSTS": " ".join(f"{hosts.names[host]}={address}" for host, address in ADDRESSES.items()),
            "NODES": nodes,
            "MAX_RESTARTS": str(max_restarts),
            "JOB": out.parent.name,
            "LOGS": f"{out}/logs",
            "TRANSPORT": "ip netns exec",
            "RENDEZVOUS": "last_call_timeout=8,read_timeout=20",
            "RETRY_SECONDS": "2",
            "PYTHON": sys.executable,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
            "PASS": "PYTHONPATH PACE BREAKS_AT COLLECTIVE_SECONDS",
            "GLOO_SOCKET_IFNAME": "cable",
            "OMP_NUM_THREADS": "1",
            "PACE": f"{out}.pace",
            "BREAKS_AT": str(breaks_at),
            "COLLECTIVE_SECONDS": "10",
        }
        configuration = (
            *(f"steps={STEPS}", f"checkpoints.every={EVERY}", "data.batch=12", "data.context=16", "model.layers=1"),
            *("model.width=32", "model.heads=2", "schedule.warmup_steps=3"),
        )
        program = ["tests/launch/slow_lm.py", "configs/lm.toml", "--resume", "--out", str(out), "--set", *configuration]
        self.seconds_a_step(seconds_a_step)
        self._log = Path(f"{out}.log")
        names = hosts.names.values()
        entered = [["ip", "netns", "exec", name] for name in names] if by_hand else [[]]
        options = [["--here", name] for name in names] if by_hand else [[]]
        with self._log.open("ab") as log:
            self.processes = [
                subprocess.Popen(
                    [*enter, "bash", "launch/multi_host.sh", *option, *program],
                    cwd=ROOT,
                    env=settings,
                    stdout=log,
                    stderr=log,
                )
                for enter, option in zip(entered, options, strict=True)
            ]
        self.process = self.processes[0]

    def seconds_a_step(self, seconds):
        """Has the program take so long for a step, from the next one."""
        Path(f"{self.out}.new").write_text(str(seconds))
        Path(f"{self.out}.new").replace(f"{self.out}.pace")

    @property
    def entries(self):
        """All losses that were logged, in that order, with the number of ranks then."""
        path = self.out / "loss.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def log(self):
        texts = [self._log.read_text()]
        texts += [path.read_text(errors="replace")[-3000:] for path in sorted(self.out.glob("logs/*.log"))]
        return "\n".join(texts)

    def wait_until(self, is_so, what):
        end = time.monotonic() + DEADLINE_SECONDS
        while not any(is_so(entry) for entry in self.entries):
            assert time.monotonic() < end and self.process.poll() is None, f"{what} does not come:\n{self.log}"
            time.sleep(0.1)

    def wait(self):
        return self.process.wait(DEADLINE_SECONDS)

    def losses(self):
        """The last loss that was logged for each step."""
        return {entry["step"]: entry["loss"] for entry in self.entries}


@pytest.fixture
def start(hosts):
    """Starts a job; nothing of it is left at the end of the test."""
    runs = []

    def started(*args, **options):
        runs.append(Run(hosts, *args, **options))
        return runs[-1]

    try:
        yield started
    finally:
        for run in runs:
            for process in run.processes:
                process.kill()
                process.wait()
        for host in ADDRESSES:
            hosts.kill_all(host)
            hosts.ip_on(host, "link", "set", "cable", "up")


@pytest.fixture(scope="module")
def whole(hosts, tmp_path_factory):
    """The losses of a run that nothing interrupted."""
    run = Run(hosts, tmp_path_factory.mktemp("whole") / "out", nodes="3", seconds_a_step=0.0)
    assert run.wait() == 0, run.log
    assert [entry["step"] for entry in run.entries] == list(range(1, STEPS + 1))
    assert {entry["ranks"] for entry in run.entries} == {3}
    return run.losses()


def assert_same(losses, whole):
    assert losses.keys() == whole.keys()
    assert max(abs(losses[step] - whole[step]) for step in whole) < TOLERANCE


@pytest.mark.parametrize("loss", ["of power", "of its cable"])
def test_a_host_is_lost_and_comes_back(hosts, start, whole, tmp_path, loss):
    run = start(tmp_path / "out")
    run.wait_until(lambda entry: entry["step"] > EVERY + 3 and entry["ranks"] == 3, "a step of three hosts")
    if loss == "of power":
        hosts.kill_all("c")  # before the cable, so that the others hear of it from the kernel
    hosts.ip_on("c", "link", "set", "cable", "down")
    run.wait_until(lambda entry: entry["ranks"] == 2, "a step of two hosts")
    behind = max(entry["step"] for entry in run.entries)
    run.wait_until(lambda entry: entry["ranks"] == 2 and entry["step"] > behind + 3, "some more of two hosts")
    hosts.ip_on("c", "link", "set", "cable", "up")
    run.seconds_a_step(2.0)  # so that there is something left to do for who comes back
    run.wait_until(lambda entry: entry["ranks"] == 3 and entry["step"] > behind, "a step of three hosts again")
    run.seconds_a_step(0.0)
    assert run.wait() == 0, run.log
    ranks = [entry["ranks"] for entry in run.entries]
    changes = [after for before, after in itertools.pairwise(ranks) if before != after]
    assert (ranks[0], changes, ranks[-1]) == (3, [2, 3], 3)
    # What a loss costs is at most the steps since the last save; that a host comes back costs none.
    steps = [entry["step"] for entry in run.entries]
    repeated = [step for step, after in itertools.pairwise(steps) if after <= step]
    assert len(repeated) <= 1, f"steps were repeated after {repeated}"
    assert_same(run.losses(), whole)


def test_it_is_stopped_and_started_once_more(start, whole, tmp_path):
    run = start(tmp_path / "out")
    run.wait_until(lambda entry: entry["step"] > EVERY + 3, f"step {EVERY + 4}")
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM, run.log
    last = max(run.losses())
    assert last < STEPS and (tmp_path / f"out/checkpoints/step-{last:08}/manifest.json").exists()
    again = start(tmp_path / "out", seconds_a_step=0.0)
    assert again.wait() == 0, again.log
    assert len(again.entries) == STEPS  # no step was done twice
    assert_same(again.losses(), whole)


def test_each_host_is_started_by_hand(start, whole, tmp_path):
    run = start(tmp_path / "out", seconds_a_step=0.0, nodes="3", by_hand=True)
    assert [process.wait(DEADLINE_SECONDS) for process in run.processes] == [0, 0, 0], run.log
    assert_same(run.losses(), whole)


def test_a_bug_ends_the_job(start, tmp_path):
    run = start(tmp_path / "out", seconds_a_step=0.0, breaks_at=7, max_restarts=1)
    assert run.wait() == 1, run.log
    assert max(run.losses()) == 7
    told = [path for path in (tmp_path / "out/logs").rglob("stderr.log") if "a bug of the program" in path.read_text()]
    assert {path.relative_to(tmp_path / "out/logs").parts[0][-1] for path in told} == set("abc")
