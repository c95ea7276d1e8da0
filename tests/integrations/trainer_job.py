"""Short runs of a Trainer in one process: where each stands at its end, as weights, moments and callbacks' counts."""

import multiprocessing
from pathlib import Path
from unittest.mock import patch

import torch

from tests.integrations.jobs import be_quiet


class Network(torch.nn.Module):
    main_input_name = "x"

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, labels=None):
        y = self.layer(torch.nn.functional.dropout(x, 0.2, self.training))
        return {"loss": (y - x.sum(1, keepdim=True).sin()).square().mean(), "logits": y}


def run(out, name, resume=None, **options):
    """One run, which goes on from the newest checkpoint under its name."""
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
    from transformers.trainer_callback import ExportableState

    from shardopt.integrations.trainer import ShardoptCallback

    class Count(TrainerCallback, ExportableState):
        def __init__(self, by):
            self.by, self.count = by, 0

        def on_step_end(self, args, state, control, **given):
            self.count += self.by

        def state(self):
            return {"args": {"by": self.by}, "attributes": {"count": self.count}}

    set_seed(0)
    numbers = torch.Generator().manual_seed(1)
    data = [{"x": torch.randn(4, generator=numbers), "labels": 0} for _ in range(16)]
    given = {"save_strategy": "no", "lr_scheduler_type": "constant", "learning_rate": 0.3, **options}
    folder = str(Path(out) / name)
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=4, use_cpu=True, report_to=[], disable_tqdm=True, **given
    )
    counts = [Count(1), Count(100)]
    trainer = Trainer(Network(), arguments, train_dataset=data, eval_dataset=data[:4], callbacks=counts)
    trainer.add_callback(ShardoptCallback(trainer, f"{folder}/checkpoints", every=100))
    trainer.train(resume_from_checkpoint=resume)
    optimizer = trainer.optimizer.optimizer  # the keyed one
    moments = [optimizer.state[each]["exp_avg"] for each in optimizer.params.values()]
    weights = [each.detach().clone() for each in trainer.model.parameters()]
    return [each.tolist() for each in (*weights, *moments)], [each.count for each in counts]


def run_each(out, runs):
    be_quiet()
    # The ranks of tests are made by a fork server, which would import torch for each worker.
    multiprocessing.set_start_method("fork", force=True)
    return [run(out, name, **options) for name, options in runs]


def run_as_saved_earlier(out, *steps):
    """Runs to the first number of steps, saves what earlier versions did of callbacks, and goes on to the second."""
    from shardopt.integrations.trainer import ShardoptCallback

    state_of = ShardoptCallback._state_of

    def of_last_callbacks(self, state):
        own = state_of(self, state)
        return {**own, "stateful_callbacks": {name: each[-1] for name, each in own["stateful_callbacks"].items()}}

    be_quiet()
    with patch.object(ShardoptCallback, "_state_of", of_last_callbacks):
        run(out, "run", max_steps=steps[0])
    return run(out, "run", max_steps=steps[1])
