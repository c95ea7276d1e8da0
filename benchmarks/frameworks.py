"""What frameworks do by themselves: their own checkpoints, resumed on the same ranks, on fewer, and on more.

    PYTHONPATH=.:examples python -m benchmarks.frameworks [name ...]

Each job trains what `examples/integrations` trains, with torch's own AdamW and the framework's own data loading, saves
every 2 steps, and loses a rank to SIGKILL in the forward of step 8. A cell is how the resumed job differs from one that
was never interrupted: the largest relative difference of a loss, or the first line of the error.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import log_loss
from compare_runs import compare_losses, read_losses
from integrations.task import BATCH, SEED, Network, Sums
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from tests.harness import Fault, run_ranks_outcomes

STEPS, DIES_AT, EVERY, EPOCHS = 15, 8, 2, 3


def newest(folder: Path, pattern: str, step_of: Any) -> str | None:
    found = sorted(folder.glob(pattern), key=step_of)
    return str(found[-1]) if found else None


def after_equals(path: Path) -> int:
    return int(path.stem.rpartition("=")[2])


def after_dash(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def lightning(out: Path, sharded: bool) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    ranks = dist.get_world_size()

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = Network()

        def configure_model(self) -> None:
            if sharded:
                fully_shard(self.network, mesh=self.device_mesh["data_parallel"])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

        def train_dataloader(self) -> Any:
            return DataLoader(Sums(), batch_size=BATCH // ranks, shuffle=False)

        def training_step(self, batch: Any, batch_index: int) -> Any:
            loss = self.network(**batch)["loss"]
            log_loss(out, self.trainer.global_step + 1, loss.detach().double() / ranks)
            return loss

    strategy = (
        ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1, process_group_backend="gloo")
        if sharded
        else DDPStrategy(process_group_backend="gloo")
    )
    saving = ModelCheckpoint(out / "saved", every_n_train_steps=EVERY, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, max_epochs=EPOCHS, logger=False,
        callbacks=[saving], enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Module(), ckpt_path=newest(out / "saved", "*.ckpt", after_equals), weights_only=False)


def accelerate(out: Path, sharded: bool) -> None:
    from accelerate import Accelerator

    from tests.integrations.jobs import shard

    accelerator = Accelerator(cpu=True)
    if sharded:
        shard(accelerator)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    loader = DataLoader(Sums(), batch_size=BATCH // dist.get_world_size(), shuffle=False)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    saved = newest(out, "saved-*", after_dash)
    step = 0
    if saved is not None:
        accelerator.load_state(saved)
        step = after_dash(Path(saved))
    while step < STEPS:
        batches = accelerator.skip_first_batches(loader, step % 5) if step % 5 else loader
        for batch in batches:
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            log_loss(out, step, loss.detach().double() / accelerator.num_processes)
            if step % EVERY == 0:
                accelerator.save_state(str(out / f"saved-{step}"))


def trainer(out: Path, sharded: bool) -> None:
    from integrations.fit_trainer import LoggingTrainer
    from transformers import TrainingArguments

    from tests.integrations.jobs import shard_trainer

    arguments = TrainingArguments(
        str(out), per_device_train_batch_size=BATCH // dist.get_world_size(), num_train_epochs=EPOCHS, seed=SEED,
        learning_rate=0.01, save_steps=EVERY, logging_steps=4, use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    made = LoggingTrainer(Network(), arguments, train_dataset=Sums())
    if sharded:
        shard_trainer(made)
    made.train(resume_from_checkpoint=newest(out, "checkpoint-*", after_dash))


JOBS = {
    "Lightning, DDP": (lightning, False),
    "Lightning, FSDP2": (lightning, True),
    "Accelerate, DDP": (accelerate, False),
    "Accelerate, FSDP2": (accelerate, True),
    "Trainer, DDP": (trainer, False),
    "Trainer, FSDP2": (trainer, True),
}


def job(name: str, out: str) -> None:
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    function, sharded = JOBS[name]
    if dist.get_rank() == 0:
        Path(out).mkdir(exist_ok=True)
    dist.barrier()
    function(Path(out), sharded)


def first_error(outcomes: Any) -> str | None:
    failed = [each for each in outcomes if not each.ok]
    if not failed:
        return None
    error = min(failed, key=lambda each: each.at_seconds)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:150]


def row(name: str) -> list[str]:
    """Returns the cells of a job: resumed on 2 ranks, 1 and 3."""
    with tempfile.TemporaryDirectory() as folder:
        reference, killed = Path(folder) / "uninterrupted", Path(folder) / "killed"
        problem = first_error(run_ranks_outcomes(2, job, name, str(reference), deadline_seconds=240))
        if problem is not None:
            return [f"not resumed: its own save fails: {problem}"] * 3
        fault = Fault(1, "integrations.task:Network.forward", DIES_AT)
        run_ranks_outcomes(2, job, name, str(killed), faults=[fault], deadline_seconds=240)
        cells = []
        for ranks in (2, 1, 3):
            run = Path(folder) / f"on {ranks}"
            shutil.copytree(killed, run)
            before = len(read_losses(run))
            problem = first_error(run_ranks_outcomes(ranks, job, name, str(run), deadline_seconds=240))
            comparison, lines = compare_losses(reference, run), read_losses(run)[before:]
            if problem is not None:
                cells.append(problem)
            else:
                first = f"from step {lines[0].step}" if lines else "no step"
                cells.append(f"{first}, losses off by {comparison.worst:.1e}")
        return cells


def main() -> None:
    print("| | on 2 ranks | on 1 | on 3 |\n|---|---|---|---|")
    for name in sys.argv[1:] or JOBS:
        print(f"| {name} | {' | '.join(row(name))} |", flush=True)


if __name__ == "__main__":
    # The one that the ranks import, of which this would be another copy.
    from benchmarks import frameworks

    frameworks.main()
