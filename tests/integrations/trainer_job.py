"""Short runs of a Trainer in one process: where each stands at its end, as weights, moments and callbacks' counts."""

from pathlib import Path

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
    return [run(out, name, **options) for name, options in runs]
