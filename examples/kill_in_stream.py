"""Train and serve at once, kill a rank of each job, and check that every sample is of exactly one published step."""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from check_stream import check
from draw_stream import draw
from kill_and_resume import OUT, REPOSITORY, pid_of_rank, say
from spool import note, records
from train_and_serve import SAVE_EVERY

TRAINERS, SAMPLERS = 4, 3
NO_PROGRESS_SECONDS = 120.0
LINE_EVERY = 10

Job = subprocess.Popen[bytes]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT / "demo-stream", help="emptied first")
    parser.add_argument("--picture", type=Path, default=OUT / "demo_stream.png")
    parser.add_argument("--steps", type=int, default=32)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave through `finally`, so that no job is left behind
    root, steps = options.out.resolve(), options.steps
    shutil.rmtree(root, ignore_errors=True)
    options.picture.unlink(missing_ok=True)
    root.mkdir(parents=True)

    say(f"1/3  {TRAINERS} ranks train {steps} steps; {SAMPLERS} ranks, tensor parallel, write what they learn from.")
    begin = time.monotonic()
    with torchrun(root, "train", TRAINERS, steps) as trainers, torchrun(root, "serve", SAMPLERS, steps) as samplers:
        jobs = [trainers, samplers]
        kill_step = steps // 3 // SAVE_EVERY * SAVE_EVERY + SAVE_EVERY - 2  # some steps after a checkpoint
        wait(root, jobs, kill_step, life=0)
        kill(root, "trainer", 2, trainers)
        wait(root, jobs, steps * 2 // 3, life=1)  # of no anchor
        kill(root, "sampler", 1, samplers)
        wait(root, jobs, steps, life=1)
        for job in jobs:
            job.wait(NO_PROGRESS_SECONDS)
    for name, job in (("trainers", trainers), ("samplers", samplers)):
        if job.returncode != 0:
            give_up(root, f"torchrun of the {name} ended with exit code {job.returncode}")
    say(f"     Both jobs ended with exit code 0, after {time.monotonic() - begin:.0f} s.")

    say("2/3  Check all samples.")
    findings = check(root, steps)
    for finding in findings:
        say(f"     {finding}")
    say("3/3  Draw.")
    draw(root, options.picture)
    say(f"     The picture: {os.path.relpath(options.picture)}")
    return 0 if all(finding.holds for finding in findings) else 1


@contextmanager
def torchrun(root: Path, role: str, ranks: int, steps: int) -> Iterator[Job]:
    """A job under torchrun, which starts it again when a rank dies; ended when the block is left."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["--max-restarts=3", str(REPOSITORY / "examples" / "train_and_serve.py"), role]
    command += ["--out", str(root), "--steps", str(steps)]
    # Ranks that are started again get a new store: in the agent's they would find the addresses of those that died.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with open(root / f"{role}.log", "ab") as log:
        job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
    try:
        yield job
    finally:
        if job.poll() is None:
            job.terminate()  # torchrun passes it on to its workers
        job.wait()


def wait(root: Path, jobs: list[Job], step: int, life: int) -> None:
    """Waits until the trainers have done a step in one of their lives; tells of the steps until then."""
    batches = records(root, "batches")
    seen, last_news = len(batches), time.monotonic()
    while not any(each["step"] >= step and each["life"] >= life for each in batches):
        has_ended = any(job.poll() is not None for job in jobs)  # asked first, so that the last steps are read
        batches = records(root, "batches")
        for each in batches[seen:]:
            last_news = time.monotonic()
            if each["step"] % LINE_EVERY == 0:
                old = f"weights {sum(each['steps_old']) / len(each['steps_old']):.1f} steps old"
                say(f"     step {each['step']:3d}  reward {each['reward']:.3f}  {old}  {each['text']}")
        seen = len(batches)
        if has_ended and not any(each["step"] >= step and each["life"] >= life for each in batches):
            give_up(root, f"a job ended before step {step}")
        if time.monotonic() - last_news > NO_PROGRESS_SECONDS:
            give_up(root, f"no step in {NO_PROGRESS_SECONDS:g} s")
        time.sleep(0.05)


def kill(root: Path, role: str, rank: int, job: Job) -> None:
    """Sends a rank SIGKILL, and notes it."""
    pid = pid_of_rank(rank, job.pid)
    os.kill(pid, signal.SIGKILL)
    step = records(root, "batches")[-1]["step"]
    note(root, "kills", role=role, rank=rank, step=step)
    say(f"     Rank {rank} of the {role}s (process {pid}) gets SIGKILL after step {step}.")


def give_up(root: Path, reason: str) -> None:
    tails = (
        f"the end of {root / log}:\n" + "\n".join((root / log).read_text(errors="replace").splitlines()[-40:])
        for log in ("train.log", "serve.log")
    )
    raise SystemExit(f"{reason}; " + "\n".join(tails))


if __name__ == "__main__":
    sys.exit(main())
