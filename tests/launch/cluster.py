"""A Slurm of two nodes on one machine: a controller, two node daemons and munge, in a folder of their own.

Needs Debian's packages slurmctld, slurmd, slurm-client and munge, and to be root; `launch/test_slurm.sh` installs them.
Both nodes are this machine, at ports of their own.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")
NODES = ("n1", "n2")
_START_SECONDS = 30.0

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job that is queued again waits for its old credential to expire.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=1
SchedulerType=sched/builtin
KillWait=60
MinJobAge=3600
# Of two nodes on one machine; what is set down stays down until it is resumed.
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first_port} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second_port} CPUs=1
PartitionName=all Nodes=n1,n2 Default=YES State=UP
"""


class Cluster:
    """A running Slurm."""

    def __init__(self, folder: Path) -> None:
        self._environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str, **variables: str) -> str:
        """Runs a command of Slurm's; returns what it printed."""
        environment = self._environment | variables
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def field(self, what: str, which: str, field: str) -> str:
        """A field of `scontrol show`: of a job, or of a node."""
        text = self.run("scontrol", "show", what, which, "--oneliner")
        return next(word.partition("=")[2] for word in text.split() if word.startswith(f"{field}="))

    def state(self, job: str) -> str:
        return self.field("job", job, "JobState")

    def wait_for(self, job: str, *states: str, seconds: float = 900.0) -> str:
        """Waits until a job is in one of these states; returns which."""
        end = time.monotonic() + seconds
        while (state := self.state(job)) not in states:
            assert time.monotonic() < end, f"job {job} is {state} after {seconds} s, and not {' or '.join(states)}"
            time.sleep(0.5)
        return state


@contextmanager
def slurm() -> Iterator[Cluster]:
    """A Slurm that runs while this is open, and of which nothing is left afterwards."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, _running(Path(folder)) as cluster:
        yield cluster


@contextmanager
def _running(folder: Path) -> Iterator[Cluster]:
    host = socket.gethostname().partition(".")[0]
    ports = dict(zip(("controller_port", "first_port", "second_port"), _free_ports(3), strict=True))
    (folder / "munge").mkdir()
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(host=host, folder=folder, **ports))
    started: list[subprocess.Popen[bytes]] = []

    def start(*command: str, user: str | None = None) -> None:
        environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        with (folder / f"{len(started)}.log").open("wb") as log:
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, user=user))

    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    for path in (folder / "munge", key):
        shutil.chown(path, "munge", "munge")
    folder.chmod(0o755)  # for munge, which is another user, to get to its own
    here = f"{folder}/munge"
    try:
        start(
            *("munged", "--foreground", "--force", f"--socket={here}/socket", f"--key-file={key}"),
            *(f"--pid-file={here}/pid", f"--log-file={here}/log", f"--seed-file={here}/seed"),
            user="munge",
        )
        _wait_for_file(folder / "munge" / "socket")
        start("slurmctld", "-D", "-c")
        for node in NODES:
            start("slurmd", "-D", "-N", node)
        cluster = Cluster(folder)
        end = time.monotonic() + _START_SECONDS
        while True:
            try:
                if all(cluster.field("node", node, "State") == "IDLE" for node in NODES):
                    break
            except AssertionError:
                pass  # the controller does not answer yet
            assert time.monotonic() < end, "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))
            time.sleep(0.3)
        yield cluster
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
        for process in reversed(started):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _wait_for_file(path: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while not path.exists():
        assert time.monotonic() < end, f"{path} does not come"
        time.sleep(0.05)
