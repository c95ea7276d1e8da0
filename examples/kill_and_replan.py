"""Tables of 2 million rows, told step by step: compare cuts, train, lose a rank, resume on three under another plan."""

import argparse
import os
import shutil
import signal
import sys
import tomllib
from pathlib import Path

from compare_runs import compare_losses, table
from draw_tables import draw
from kill_and_resume import (
    NO_PROGRESS_SECONDS,
    OUT,
    REPOSITORY,
    checkpoints,
    give_up,
    say,
    torchrun,
    train,
    train_and_kill,
    verdict,
)
from spool import records

CONFIG = REPOSITORY / "configs" / "tables.toml"
PROGRAM = ("train_tables.py", str(CONFIG))
RANKS, RANKS_LEFT = 4, 3
TOLERANCE = 1e-5  # relative, in fp32: ranks add up in another order


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT / "demo-tables", help="emptied first")
    parser.add_argument("--picture", type=Path, default=OUT / "demo_tables.png")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave through `finally`, so that no job is left behind
    settings = tomllib.loads(CONFIG.read_text())
    steps, save_every = settings["steps"], settings["checkpoints"]["every"]
    kill_step = steps // 2 // save_every * save_every + save_every // 2
    runs = options.out.resolve()
    shutil.rmtree(runs, ignore_errors=True)
    options.picture.unlink(missing_ok=True)
    whole, killed = runs / "uninterrupted", runs / "killed"

    say(f"1/5  Compare cuts on {RANKS} ranks.")
    compare_cuts(runs / "cuts")
    say(f"2/5  Train {steps} steps on {RANKS} ranks, uninterrupted; every {save_every} steps a save of touched rows.")
    train(whole, RANKS, steps, PROGRAM)
    say(f"3/5  The same job again; a rank gets SIGKILL after step {kill_step}.")
    train_and_kill(killed, RANKS, steps, kill_step, PROGRAM)
    say(
        f"4/5  Resume on {RANKS_LEFT} ranks from step {checkpoints(killed).steps()[-1]}, under a plan for {RANKS_LEFT}."
    )
    train(killed, RANKS_LEFT, steps, PROGRAM)
    for line in (killed / "torchrun.log").read_text().splitlines():
        if " ranks, from step " in line:
            say(f"     {line}")

    say("5/5  Compare with the uninterrupted run.")
    comparison = compare_losses(whole, killed)
    holds = comparison.holds(TOLERANCE)
    say(table(comparison, lambda line: line.step in (1, steps) or line.step % save_every == 0))
    say(
        f"     {len(comparison.differences)} losses compared, worst relative difference {comparison.worst:.1e}, "
        f"{len(comparison.missing)} missing; {TOLERANCE:g} is allowed: {verdict(holds)}"
    )
    for save in records(killed, "saves"):
        megabytes = f"{save['bytes'] / 1e6:6.1f} MB by {save['ranks']} ranks"
        say(f"     step {save['step']:3d}  {save['writes']:>7} {megabytes} in {save['seconds']:.2f} s")
    draw(whole, killed, options.picture)
    say(f"     The picture: {os.path.relpath(options.picture)}")
    return 0 if holds else 1


def compare_cuts(out: Path) -> None:
    """Run the comparison of cuts on all ranks, and show what it says."""
    with torchrun(out, RANKS, ("compare_cuts.py", str(CONFIG))) as job:
        job.wait(NO_PROGRESS_SECONDS)
    if job.returncode != 0:
        give_up(out, f"torchrun ended with exit code {job.returncode}")
    for line in (out / "torchrun.log").read_text().splitlines():
        say(f"     {line}")


if __name__ == "__main__":
    sys.exit(main())
