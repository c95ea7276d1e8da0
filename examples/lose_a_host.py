"""A host is lost in the middle of a save, with all that it had; the run is compared with one that lost none.

launch/demo_lost_host.sh starts it in namespaces of its own. What starts the ranks, their store and their rendezvous are
here, outside of the four hosts.
"""

import argparse
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from compare_runs import Record, compare_losses, differing_keys, read_losses
from draw_lost_host import draw
from namespaces import MEMORY, OUTSIDE, Host, make_switch
from torch.distributed import TCPStore

from shardopt import checkpoint

REPOSITORY = Path(__file__).resolve().parent.parent
OUT = REPOSITORY / "out"
HOSTS, VICTIM = 4, 3
STEPS, STORE_EVERY, LOST_STEP = 36, 10, 27
TOLERANCE = 1e-6
DEADLINE_SECONDS = 10  # after which ranks give up another one; if not given
NO_PROGRESS_SECONDS = 600.0
GRACE_SECONDS = 5.0  # that are left to ranks to say what they miss, once one has ended
TIER = f"{MEMORY}/run"
MODEL = ("model.layers=2", "model.width=64", "model.heads=4", "data.context=32", "schedule.warmup_steps=4")

_ports = itertools.count(29400)


@dataclass
class Loss:
    """A run that lost a host, and how it went on."""

    out: Path
    times: list[float] = field(default_factory=list)
    """The seconds from the loss until each line of the log of losses was seen; none above 0 before it went on."""
    seconds: float = 0.0  # until the ranks that were left had given up
    found: list[str] = field(default_factory=list)  # checkpoints that the hosts that are left have together

    @property
    def records(self) -> list[Record]:
        return read_losses(self.out)[: len(self.times)]

    @property
    def resumed_at(self) -> int:
        """The number of the first line after the loss."""
        return next(i for i, seen in enumerate(self.times) if seen > 0.0)

    @property
    def restored(self) -> int:
        """The step that the hosts that are left went on from."""
        return self.records[self.resumed_at].step - 1

    @property
    def steps_lost(self) -> int:
        return self.records[self.resumed_at - 1].step - self.restored

    @property
    def seconds_to_next(self) -> float:
        """From the loss to the next step that was done."""
        return self.times[self.resumed_at]

    @property
    def seconds_to_new(self) -> float:
        """From the loss to the first step that was not done before."""
        before = self.records[self.resumed_at - 1].step
        return next(seen for seen, each in zip(self.times, self.records, strict=True) if each.step > before)


class Job:
    """The training on some hosts, a rank on each, and a store outside of them, which every start has anew."""

    def __init__(self, hosts: Sequence[Host], out: Path, settings: Sequence[str]) -> None:
        port = next(_ports)
        self._store = TCPStore(OUTSIDE, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(REPOSITORY / "examples/train_lm.py"), str(REPOSITORY / "configs/lm.toml")]
        command += ["--resume", "--out", str(out), "--set", f"steps={STEPS}", *MODEL, *settings]
        self.ranks = {}
        for rank, host in enumerate(hosts):
            environment = {"RANK": str(rank), "WORLD_SIZE": str(len(hosts)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            environment |= {"MASTER_ADDR": OUTSIDE, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            with open(self.log_of(host), "ab") as log:
                self.ranks[host] = host.start(command, environment, log)

    def log_of(self, host: Host) -> Path:
        return self.out / f"host-{host.number}.log"

    def follow(self, times: list[float], until: Callable[[], bool]) -> None:
        """Notes when each line of the log of losses is seen, until something is so."""
        last_news, is_over = time.monotonic(), False
        while not is_over:
            is_over = until()  # asked before reading, so that the last lines are read once it is true
            lines = (self.out / "loss.jsonl").read_bytes().count(b"\n") if (self.out / "loss.jsonl").exists() else 0
            now = time.monotonic()
            if lines > len(times):
                last_news = now
                times += [now] * (lines - len(times))
            if now - last_news > NO_PROGRESS_SECONDS:
                self.give_up(f"no step in {NO_PROGRESS_SECONDS:g} s")
            time.sleep(0.002)

    def has_ended(self) -> bool:
        return all(rank.poll() is not None for rank in self.ranks.values())

    def has_lost_ranks(self, but: Host) -> bool:
        """Whether a rank has failed, of those on other hosts."""
        return any(rank.poll() for host, rank in self.ranks.items() if host is not but)

    def give_up(self, reason: str) -> None:
        tails = [f"{log}:\n" + "\n".join(lines_of(log)[-25:]) for log in map(self.log_of, self.ranks)]
        raise SystemExit("\n\n".join([f"{reason}; the ends of the logs:", *tails]))

    def finish(self, times: list[float]) -> None:
        """Follows the job to its end, which has to be a good one."""
        self.follow(times, lambda: self.has_ended() or any(rank.poll() for rank in self.ranks.values()))
        if any(rank.wait() for rank in self.ranks.values()):
            self.give_up("a rank has failed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deadline-seconds", type=int, default=DEADLINE_SECONDS, help="after which ranks give up one")
    parser.add_argument("--out", type=Path, default=OUT, help="a folder for the runs and the picture")
    arguments = parser.parse_args()
    limit, picture = arguments.deadline_seconds, arguments.out.absolute() / "lost_host.png"
    limits = [f"checkpoints.deadline_seconds={limit}", "--collective-seconds", str(limit)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if os.getpid() != 1:
        raise SystemExit("this wants namespaces of its own: bash launch/demo_lost_host.sh")
    runs = arguments.out.absolute() / "demo-lost-host"
    shutil.rmtree(runs, ignore_errors=True)
    scratch = runs / "host"
    scratch.mkdir(parents=True)
    picture.unlink(missing_ok=True)
    make_switch()

    say(f"1/4  Train {STEPS} steps on {HOSTS} hosts, uninterrupted.")
    whole = runs / "uninterrupted"
    with made(scratch) as hosts:
        Job(hosts, whole, ["checkpoints.every=1", f"checkpoints.keep={STEPS}"]).finish([])

    say(f"2/4  The same, saved after every step to the hosts' memory, and to a shared directory every {STORE_EVERY};")
    say(f"     host {VICTIM} is cut off and wiped in the middle of a save.")
    settings = [f"checkpoints.every={STORE_EVERY}"]
    tiers = f'checkpoints.tiers=[{{path="{TIER}", every=1, copies=2}}]'
    with made(scratch) as hosts:
        killed = lose_one(hosts, runs / "killed", [*settings, tiers, *limits])
        left = [host for host in hosts if host.number != VICTIM]
        say(f"3/4  {HOSTS - 1} hosts go on from their memory; and once more, from the shared directory alone.")
        memory = go_on(left, killed, runs / "memory", [*settings, tiers, *limits])
        tell(memory)
        store = go_on(left, killed, runs / "store", [*settings, *limits])
        tell(store)

    say("4/4  Compare with the uninterrupted run.")
    holds = [compare(whole, memory), compare(whole, store), compare_found(whole, memory)]
    draw(whole, memory, store, TOLERANCE, picture)
    say(f"     The picture: {os.path.relpath(picture)}")
    return 0 if all(holds) else 1


@contextmanager
def made(scratch: Path) -> Iterator[list[Host]]:
    """Hosts, of which nothing is left when the block is left."""
    hosts: list[Host] = []
    try:
        for number in range(HOSTS):
            hosts.append(Host(number, scratch))
        yield hosts
    finally:
        for host in hosts:
            host.end()


def lose_one(hosts: Sequence[Host], out: Path, settings: Sequence[str]) -> Loss:
    """Trains on all hosts until one is in the middle of a save, loses that one, and waits until the others give up."""
    victim = next(host for host in hosts if host.number == VICTIM)
    left = [host for host in hosts if host is not victim]
    job, seen = Job(hosts, out, settings), list[float]()
    job.follow(seen, lambda: job.has_ended() or is_saving(victim, job))
    if job.has_ended():
        job.give_up(f"the job was over before host {VICTIM} could be lost")
    at = time.monotonic()
    victim.lose()
    # What a launcher does: once a rank has failed it ends the others, and starts those that are left.
    job.follow(seen, lambda: job.has_lost_ranks(but=victim))
    end = time.monotonic() + GRACE_SECONDS
    while not job.has_ended() and time.monotonic() < end:
        time.sleep(0.05)
    for rank in job.ranks.values():
        rank.kill()
        rank.wait()
    seconds = time.monotonic() - at
    say(f"     after {seconds:.1f} s the ranks that are left have given up, as they say:")
    logs = "\n".join("\n".join(lines_of(job.log_of(host))) for host in left)
    said = re.search(r"ranks? [0-9][0-9, and]* gave no sign of life for [0-9.]+ s", logs)
    say(f"     {said[0] if said else 'a collective of the training has timed out'}")
    times = [min(each - at, 0.0) for each in seen]  # a line may be seen a moment after it was written
    return Loss(out, times, seconds, collect(left, out / "found"))


def go_on(left: Sequence[Host], killed: Loss, out: Path, settings: Sequence[str]) -> Loss:
    """Goes on with the hosts that are left, in a copy of the run; its clock begins when the ranks had given up."""
    shutil.copytree(killed.out, out)
    begin = time.monotonic()
    seen = [begin] * len(killed.times)
    Job(left, out, settings).finish(seen)
    after = [killed.seconds + each - begin for each in seen[len(killed.times) :]]
    return Loss(out, killed.times + after, killed.seconds, killed.found)


def is_saving(host: Host, job: Job) -> bool:
    """Whether a host is in the middle of a save to its memory: it has begun its files, and has no record yet.

    It is stopped while we look: what is so then stays so.
    """
    for step in range(LOST_STEP, STEPS - 2):
        share = host.memory / "run" / f"step-{step:08d}"
        if is_unfinished(share):
            rank = job.ranks[host]
            rank.send_signal(signal.SIGSTOP)
            time.sleep(0.05)
            if is_unfinished(share):
                say(f"     host {host.number} is lost in the save of step {step}")
                return True
            rank.send_signal(signal.SIGCONT)
    return False


def is_unfinished(share: Path) -> bool:
    try:
        names = os.listdir(share)
    except OSError:
        return False
    return bool(names) and "prepared.json" not in names


def collect(hosts: Sequence[Host], into: Path) -> list[str]:
    """Puts together what hosts have of each checkpoint, as docs/format.md has it; returns the whole ones' names."""
    for host in hosts:
        for share in host.memory.glob("run/step-*"):
            (into / share.name).mkdir(parents=True, exist_ok=True)
            for path in share.iterdir():
                shutil.copyfile(path, into / share.name / path.name)
    whole = []
    for directory in sorted(into.glob("step-*")):
        if (directory / "prepared.json").exists():
            (directory / "prepared.json").rename(directory / "manifest.json")
            if checkpoint.verify(directory).ok:
                whole.append(directory.name)
    return whole


def tell(loss: Loss) -> None:
    say(
        f"     {HOSTS - 1} hosts went on from step {loss.restored}: {loss.steps_lost} steps lost; "
        f"{loss.seconds_to_next:.1f} s from the loss to the next step, {loss.seconds_to_new:.1f} s to the first new one"
    )


def compare(whole: Path, loss: Loss) -> bool:
    comparison = compare_losses(whole, loss.out)
    before = comparison.differences[: loss.resumed_at]
    differing = sum(each.relative != 0.0 for each in before)
    holds = comparison.holds(TOLERANCE) and not differing
    say(
        f"     {loss.out.name}: {differing} of {len(before)} losses on {HOSTS} hosts differ in any bit; of all "
        f"{len(comparison.differences)} the worst by {comparison.worst:.1e}, {len(comparison.missing)} are missing; "
        f"{TOLERANCE:g} is allowed: {verdict(holds)}"
    )
    return holds


def compare_found(whole: Path, loss: Loss) -> bool:
    """Compares the checkpoint that the run went on from, bit for bit."""
    place = f"step-{loss.restored:08d}"
    if place not in loss.found:
        say(f"     {place} was not whole on the hosts that were left: DOES NOT HOLD.")
        return False
    differing, keys = differing_keys(
        checkpoint.Manager(whole / "checkpoints").path(loss.restored), str(loss.out / "found" / place)
    )
    say(
        f"     {place} as {HOSTS - 1} hosts had it in memory: {len(differing)} of {keys} values differ in any bit from "
        f"the uninterrupted run's: {verdict(not differing)}"
    )
    return not differing


def verdict(holds: bool) -> str:
    return "holds." if holds else "DOES NOT HOLD."


def lines_of(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(str(error))
