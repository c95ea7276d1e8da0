"""The program of a job with a tier, on hosts that are network namespaces, each with the directory of its address.

torchrun ... tiers_job.py <the directory of all hosts> <seconds that a step takes more>
"""

import importlib
import subprocess
import sys
import time

import torch.distributed as dist

from shardopt import checkpoint
from shardopt.checkpoint import SaveOptions, Tier

OPTIONS = {"batch_size": 12, "dropout": 0.0, "on_resize": "keep", "options": SaveOptions(deadline_seconds=5.0)}


def own_address():
    shown = subprocess.run(["ip", "-o", "-4", "address", "show", "dev", "cable"], capture_output=True, text=True)
    return shown.stdout.split()[3].partition("/")[0]


def main():
    base, seconds = sys.argv[1], float(sys.argv[2])
    job = importlib.import_module("tests.support.killed_job")
    train_step = job.train_step

    def train_slowly(*args):
        time.sleep(seconds)
        train_step(*args)

    def note(event, report):
        if event == "copy":
            with open(f"{base}/copied-{own_address()}", "a") as file:
                file.write(f"{int(report.url[-8:])}\n")

    job.train_step = train_slowly
    checkpoint.add_listener(note)
    dist.init_process_group("gloo")
    tiers = [Tier(f"{base}/{own_address()}/memory", every=1, copies=2)]
    job.train(f"{base}/root", "lazy", 2, every=job.STEPS, destinations=tiers, **OPTIONS)  # the root gets the end alone
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
