"""Compares cuts of the tables of train_tables.py: steps per second, the bytes that ranks hold, and that losses agree.

    torchrun --standalone --nproc-per-node 4 examples/compare_cuts.py configs/tables.toml

A model of each cut steps in turn, on the same batches, so that what else the machine does slows all of them.
"""

import time
from statistics import median

import torch
import torch.distributed as dist
from grams import Config, Grams
from program import launch
from train_tables import Trainer

import shardopt

CUTS = ("rows", "columns", "planned")
WARM_UP, STEPS = 3, 20
TOLERANCE = 1e-5  # relative: cuts differ in the order of sums


def compare(config: Config, device: torch.device, resume: bool) -> None:
    """Prints a table on rank 0; fails where losses differ. Every rank calls it, in an initialized process group."""
    grams = Grams(config.data.corpus, config.grams.model_dump(), config.rows.model_dump())
    data = shardopt.ResumableSampler(len(grams), batch_size=config.data.batch, seed=config.seed)
    trainers = {cut: Trainer(config, cut, device) for cut in CUTS}
    seconds: dict[str, list[float]] = {cut: [] for cut in CUTS}
    losses: dict[str, torch.Tensor] = {}
    for number, letters in enumerate(data.through(data)):
        if number == WARM_UP + STEPS:
            break
        batch = grams.read(letters)
        for cut, trainer in trainers.items():
            dist.barrier()
            begin = time.perf_counter()
            losses[cut] = trainer.step(*batch)
            dist.all_reduce(losses[cut])
            seconds[cut].append(time.perf_counter() - begin)

    held = {cut: torch.tensor([trainer.model.bytes_here()], device=device) for cut, trainer in trainers.items()}
    of_ranks = {cut: [torch.empty_like(here) for _ in range(dist.get_world_size())] for cut, here in held.items()}
    for cut, here in held.items():
        dist.all_gather(of_ranks[cut], here)
    differences = [abs(loss.item() / losses["rows"].item() - 1) for loss in losses.values()]
    if dist.get_rank() == 0:
        print(f"{'cut':>8} {'steps/s':>8}  MB of tables on each rank")
        for cut in CUTS:
            megabytes = "  ".join(f"{int(here) / 1e6:.0f}" for here in of_ranks[cut])
            print(f"{cut:>8} {1 / median(seconds[cut][WARM_UP:]):8.1f}  {megabytes}")
        cuts = ", ".join(f"{table.name} {table.cut}" for table in trainers["planned"].model.tables.tables)
        print(f"planned: {cuts}; losses after {WARM_UP + STEPS} steps differ by at most {max(differences):.1e}")
    if not max(differences) <= TOLERANCE:
        raise SystemExit(f"losses differ between cuts: {losses}")


if __name__ == "__main__":
    launch(compare, Config, __doc__)
