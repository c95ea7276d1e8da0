"""The example's training, slowed down, so that there is time for something to happen to it.

SECONDS_A_STEP=0.3 PACE=a_file BREAKS_AT=7 COLLECTIVE_SECONDS=10 torchrun … slow_lm.py configs/lm.toml …
"""

import os
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from program import launch
from train_lm import Config, train

from shardopt import checkpoint

save = checkpoint.Manager.save


def save_slowly(manager: checkpoint.Manager, step: int, *args: Any, **kwargs: Any) -> Any:
    if step == int(os.environ.get("BREAKS_AT", "0")):
        raise RuntimeError("a bug of the program")
    pace = os.environ.get("PACE")  # a file that has the seconds of a step, from one to the next
    time.sleep(float(Path(pace).read_text() if pace else os.environ.get("SECONDS_A_STEP", "0")))
    return save(manager, step, *args, **kwargs)


if __name__ == "__main__":
    checkpoint.Manager.save = save_slowly
    if "COLLECTIVE_SECONDS" in os.environ:  # else ranks wait for a host that is cut off as long as torch has them wait
        timeout = timedelta(seconds=float(os.environ["COLLECTIVE_SECONDS"]))
        dist.init_process_group = partial(dist.init_process_group, timeout=timeout)
    launch(train, Config, __doc__)
