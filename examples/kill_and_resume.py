"""The main job, told step by step: train, lose a rank, resume on fewer, and compare with a run that lost none."""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from compare_runs import compare_losses, differing_keys, read_losses, table
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shardopt import checkpoint

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIG = REPOSITORY / "configs" / "lm.toml"
PROGRAM = ("train_lm.py", str(CONFIG))
OUT = REPOSITORY / "out"
RANKS, RANKS_LEFT, VICTIM = 4, 2, 2
TOLERANCE = 1e-5
NO_PROGRESS_SECONDS = 120.0
PLAIN_LINE_EVERY = 10

Show = Callable[[int, float], object]  # is told each step and its loss


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave through `finally`, so that no job is left behind
    settings = tomllib.loads(CONFIG.read_text())
    steps, save_every = settings["steps"], settings["checkpoints"]["every"]
    resume_step = steps // 2 // save_every * save_every
    kill_step = resume_step + save_every // 2

    runs = OUT / "demo"
    shutil.rmtree(runs, ignore_errors=True)
    (OUT / "loss.png").unlink(missing_ok=True)
    whole, killed, on_fewer, on_same = (
        runs / name for name in ("uninterrupted", "killed", f"resumed-on-{RANKS_LEFT}", f"resumed-on-{RANKS}")
    )

    say(f"1/5  Train {steps} steps on {RANKS} ranks, uninterrupted; a checkpoint every {save_every} steps.")
    train(whole, RANKS, steps)

    say(f"2/5  The same job again; rank {VICTIM} gets SIGKILL after step {kill_step}.")
    train_and_kill(killed, RANKS, steps, kill_step)
    survived = checkpoints(killed).steps()
    say(f"     Checkpoints that survived: steps {', '.join(map(str, survived))}; the newest is")
    say(f"     {Path(checkpoints(killed).path(survived[-1])).relative_to(REPOSITORY)}")

    say(f"3/5  Resume on {RANKS_LEFT} ranks from step {survived[-1]}: everything is resharded {RANKS} → {RANKS_LEFT}.")
    shutil.copytree(killed, on_fewer)
    train(on_fewer, RANKS_LEFT, steps)

    say(f"4/5  Resume on {RANKS} ranks from a copy of the same checkpoint.")
    shutil.copytree(killed, on_same)
    train(on_same, RANKS, steps)

    say("5/5  Compare with the uninterrupted run.")
    fewer_holds = compare_on_fewer(whole, on_fewer, steps, save_every)
    same_holds = compare_on_same(whole, on_same, steps)
    say(f"     The picture: {(OUT / 'loss.png').relative_to(REPOSITORY)}")
    return 0 if fewer_holds and same_holds else 1


def compare_on_fewer(whole: Path, resumed: Path, steps: int, save_every: int) -> bool:
    from draw_runs import draw  # with matplotlib, which those who take other functions from here need not import

    comparison = compare_losses(whole, resumed)
    say(table(comparison, lambda line: line.step in (1, steps) or line.step % save_every == 0))
    draw(whole, resumed, TOLERANCE, OUT / "loss.png")
    holds = comparison.holds(TOLERANCE)
    say(
        f"     Resumed on {RANKS_LEFT} ranks: {len(comparison.differences)} losses compared, worst relative difference "
        f"{comparison.worst:.1e}, {len(comparison.missing)} missing; {TOLERANCE:g} is allowed: {verdict(holds)}"
    )
    return holds


def compare_on_same(whole: Path, resumed: Path, steps: int) -> bool:
    comparison = compare_losses(whole, resumed)
    differing, keys = differing_keys(checkpoints(whole).path(steps), checkpoints(resumed).path(steps))
    holds = comparison.holds(0.0) and not differing
    say(
        f"     Resumed on {RANKS} ranks: {sum(line.relative != 0.0 for line in comparison.differences)} of "
        f"{len(comparison.differences)} losses and {len(differing)} of {keys} values of the last checkpoint differ in "
        f"any bit: {verdict(holds)}"
    )
    return holds


def train(out: Path, ranks: int, steps: int, program: Sequence[str] = PROGRAM) -> None:
    """Run the training program on `ranks` ranks to its end."""
    with torchrun(out, ranks, program) as job, progress(steps) as show:
        for step, loss in steps_of(job, out):
            show(step, loss)
    if job.returncode != 0:
        give_up(out, f"torchrun ended with exit code {job.returncode}")


def train_and_kill(out: Path, ranks: int, steps: int, kill_step: int, program: Sequence[str] = PROGRAM) -> None:
    """Run the training program, and send one rank SIGKILL once `kill_step` is done and a checkpoint committed."""
    pid = None
    with torchrun(out, ranks, program) as job, progress(steps) as show:
        for step, loss in steps_of(job, out):
            show(step, loss)
            if pid is None and step >= kill_step and checkpoints(out).steps():
                pid = pid_of_rank(VICTIM, job.pid)
                os.kill(pid, signal.SIGKILL)
    if pid is None:
        give_up(out, f"torchrun ended with exit code {job.returncode} before rank {VICTIM} could be killed")
    if job.returncode == 0:
        give_up(out, "torchrun reported success although a rank was killed")
    say(f"     Rank {VICTIM} (process {pid}) was killed; torchrun came down with exit code {job.returncode}.")


@contextmanager
def torchrun(out: Path, ranks: int, program: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A training program of this folder, with its arguments, under torchrun; ended when the block is left."""
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(REPOSITORY / "examples" / program[0]), *program[1:], "--resume", "--out", str(out)]
    with open(out / "torchrun.log", "ab") as log:
        job = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    try:
        yield job
    finally:
        if job.poll() is None:
            job.terminate()  # torchrun passes it on to its workers
        job.wait()


def steps_of(job: subprocess.Popen[bytes], out: Path) -> Iterator[tuple[int, float]]:
    """Each new step of the run and its loss, until torchrun has ended."""
    seen = len(read_losses(out))
    last_news = time.monotonic()
    ended = False
    while not ended:
        ended = job.poll() is not None  # asked before reading, so that the last lines are read once it is true
        records = read_losses(out)
        for record in records[seen:]:
            last_news = time.monotonic()
            yield record.step, record.loss
        seen = len(records)
        if time.monotonic() - last_news > NO_PROGRESS_SECONDS:
            give_up(out, f"no step in {NO_PROGRESS_SECONDS:g} s")
        time.sleep(0.05)


def pid_of_rank(rank: int, agent_pid: int) -> int:
    """The process that torchrun's agent started as `rank`: the agent's child with that RANK in its environment."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == agent_pid and f"RANK={rank}".encode() in (process / "environ").read_bytes().split(b"\0"):
                return int(process.name)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended while we looked, or is another user's
    raise SystemExit(f"found no process of rank {rank} under torchrun's agent, process {agent_pid}")


def checkpoints(out: Path) -> checkpoint.Manager:
    return checkpoint.Manager(out / "checkpoints")


@contextmanager
def progress(steps: int) -> Iterator[Show]:
    """A bar on a terminal, a plain line every few steps elsewhere."""
    if not sys.stdout.isatty() or os.environ.get("CI"):
        yield lambda step, loss: step % PLAIN_LINE_EVERY or say(f"     step {step:3d} of {steps}  loss {loss:.4f}")
        return
    loss_column = TextColumn("steps  loss {task.fields[loss]:.4f}")
    with Progress(TextColumn("    "), BarColumn(40), MofNCompleteColumn(), loss_column, TimeElapsedColumn()) as bar:
        task = bar.add_task("", total=steps, loss=float("nan"))
        yield lambda step, loss: bar.update(task, completed=step, loss=loss)


def verdict(holds: bool) -> str:
    return "holds." if holds else "DOES NOT HOLD."


def say(line: str) -> None:
    print(line, flush=True)


def give_up(out: Path, reason: str) -> None:
    log = out / "torchrun.log"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-60:])
    raise SystemExit(f"{reason}; the end of {log}:\n{tail}")


if __name__ == "__main__":
    sys.exit(main())
