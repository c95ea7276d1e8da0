"""The program of the job on two hosts: `killed_job`, which on host b stops in the middle of a save.

torchrun ... two_hosts_job.py <root> <a file to make when in that save>
"""

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from shardopt.checkpoint import SaveOptions
from shardopt.checkpoint.storage import LocalStorage
from tests.support.killed_job import train

OPTIONS = {"batch_size": 12, "dropout": 0.0, "on_resize": "keep", "options": SaveOptions(deadline_seconds=5.0)}
HELD_SAVE = 3


def main():
    root, marker = sys.argv[1:]
    write, saves = LocalStorage.write, 0

    def write_late(self, *args):
        nonlocal saves
        saves += 1
        if saves == HELD_SAVE:
            Path(marker).touch()
            time.sleep(600)
        return write(self, *args)

    if os.environ["HOST"] == "b" and os.environ["LOCAL_RANK"] == "1":
        LocalStorage.write = write_late
    dist.init_process_group("gloo")
    train(root, None, 2, **OPTIONS)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
