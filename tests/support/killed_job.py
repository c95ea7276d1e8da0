"""A training job that is killed again and again: by the harness, or as a program under torchrun.

    torchrun ... killed_job.py <root> <a plan, as JSON>

The plan has a fault for each life of the job: [rank, operation, at]; where the operation is "SIGTERM", the rank gets
that signal after so many seconds.
"""

import importlib
import itertools
import json
import os
import random
import signal
import sys
import threading
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import shardopt
from shardopt import checkpoint
from tests.harness.faults import Fault, watched

STEPS, EVERY = 24, 2
EXIT_CODE = 143

STORAGE = "shardopt.checkpoint.storage:"
# The calls before which a rank can die, by what it is at then; the last two are rank 0's alone.
PHASES = {
    "training": ("tests.support.killed_job:train_step", "shardopt.optim.local.local_step:LocalOptimizer.step"),
    "staging": (
        "shardopt.checkpoint.saving.writing.staging:copy_on_host",
        "shardopt.checkpoint.saving.async_save:Staging",
    ),
    "writing": (STORAGE + "LocalStorage.make", STORAGE + "LocalStorage.write", "os:writev"),
    "commit": ("shardopt.checkpoint.saving.commit:publish_checkpoint", STORAGE + "LocalStorage.publish_new", "os:link"),
    "retention": (
        "shardopt.checkpoint.run.keeper:reasons_to_keep",
        "shardopt.checkpoint.run.keeper:remove_checkpoints",
        "os:unlink",
        "os:rmdir",
    ),
}
OF_RANK_0 = ("commit", "retention")


def train(
    root, stage, keep_last, resumes_at=None, batch_size=6, dropout=0.2, on_resize="raise", every=EVERY, **options
):
    """Trains from the newest checkpoint to the end. Without dropout the number of ranks does not matter."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 2))
    fully_shard(model)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1 + dist.get_rank())
    data = shardopt.ResumableSampler(60, batch_size=batch_size, seed=1)
    app = {"model": model, "optimizer": shardopt.keyed("adamw", model.named_parameters(), lr=0.01), "data": data}
    app |= {"random": shardopt.RandomState(on_resize=on_resize), "step": 0}
    with checkpoint.Manager(root, every=every, keep=keep_last, stage=stage, **options) as manager:
        resumed = manager.restore(app)
        assert resumes_at is None or resumed == resumes_at, (resumed, resumes_at)
        assert app["step"] == resumed
        while app["step"] < STEPS:
            for batch in itertools.islice(data.through(data), STEPS - app["step"]):
                train_step(app, batch)
                app["step"] += 1
                manager.save(app["step"], app)
    return app["step"]


def train_step(app, batch):
    inputs = torch.tensor(batch).float()[:, None] * torch.linspace(-0.1, 0.1, 6)
    app["model"](inputs).square().mean().backward()
    app["optimizer"].step()
    app["optimizer"].zero_grad()


def train_until_a_rank_dies(*args, **options):
    """As `train`; where a rank has died the others are killed too, as a launcher would, wherever they are by then."""
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    peers = [int(pid) for pid in pids]

    def watch():
        while all(os.path.exists(f"/proc/{pid}") for pid in peers):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    return train(*args, **options)


def main():
    root, plan = sys.argv[1], json.loads(sys.argv[2])
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rank, operation, at = plan[life] if life < len(plan) else (-1, "", 0)
    faults = [Fault(rank, operation, at)] if rank == int(os.environ["RANK"]) and operation != "SIGTERM" else []
    dist.init_process_group("gloo")
    gets_signal = rank == dist.get_rank() and operation == "SIGTERM"
    if gets_signal:
        threading.Timer(at, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with watched(faults, ()):
        train(root, "lazy", 1, stop_on=checkpoint.Preemption(signal.SIGTERM, seconds=10.0))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    # The one that the operations name, of which this would be another copy.
    importlib.import_module("tests.support.killed_job").main()
