"""torch's `ReduceLROnPlateau` in a form in which ranks cannot drift apart, since each sees a metric of its own.

All other schedulers of torch work unchanged on keyed optimizers and their wrappers, which keep groups live. A scheduler
is an entry of its own in a checkpoint, beside the optimizer whose groups it changes.
"""

from __future__ import annotations

from typing import SupportsFloat

import torch
from torch.optim import lr_scheduler

from shardopt.ranks import ranks_of
from shardopt.runtime.companions import note_companion


class ReduceLROnPlateau(lr_scheduler.ReduceLROnPlateau):
    """torch's `ReduceLROnPlateau` on the mean of a metric over all ranks, which so reduce their rates at the same step.

    Its state is that of torch's. Given the loss of a rank's own batch, torch's would reduce the rate on some ranks and
    not on others. These would then train different models (`KeyedOptimizer.check_agreement` finds it).

    Args:
        optimizer, mode, factor, patience, threshold, threshold_mode, cooldown, min_lr, eps: as for torch's.
    """

    def step(self, metrics: SupportsFloat, epoch: int | None = None) -> None:  # type: ignore[override]  # as torch's
        """Takes a metric of this rank. Collective: every rank of the optimizer's `process_group` must call.

        It makes one all-reduce.

        Args:
            metrics: a number or a tensor of one element. Each rank's counts alike; one that is NaN anywhere counts as
                worse on all ranks. In place of a sum over ranks with unequal shares, pass the same reduced value
                everywhere.
            epoch: as torch's.
        """
        note_companion(self.optimizer, self, "num_bad_epochs")
        ranks = ranks_of(getattr(self.optimizer, "process_group", None))
        mean = ranks.all_reduce_sum(torch.tensor(float(metrics), dtype=torch.float64, device=ranks.device)) / ranks.size
        super().step(float(mean), epoch)
