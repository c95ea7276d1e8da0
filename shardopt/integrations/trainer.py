"""Checkpoints of a transformers `Trainer` by a callback, resumed on any number of ranks, at the next sample.

    trainer = Trainer(model, args, train_dataset=dataset)  # args: save_strategy="no", seed, and a batch size per rank
    trainer.add_callback(ShardoptCallback(trainer, "out/checkpoints", every=500))
    trainer.train()  # from the newest committed checkpoint, if there is one

The global batch has to stay what it is: on half of the ranks, `per_device_train_batch_size` is to be doubled.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from itertools import cycle, islice
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from shardopt.checkpoint import Manager
from shardopt.data.random_state import RandomState
from shardopt.data.sampler import refuse_any_order
from shardopt.data.workers import shield_if_listening
from shardopt.errors import MismatchError, OptionError, Problem
from shardopt.integrations.optimizers import make_keyed, require_keyed
from shardopt.integrations.run import FrameworkState, TrainingRun, of_rank_0
from shardopt.ranks import ranks_of

__all__ = ["ShardoptCallback"]

# Taken from the arguments of this run, not of the run that saved.
_OF_THIS_RUN = {
    *("is_local_process_zero", "is_world_process_zero", "is_hyper_param_search", "trial_name", "trial_params"),
    *("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "train_batch_size"),
}
_BEFORE_EPOCH = "before_epoch"  # saved when a run ended with an epoch: the loader of the next draws its seed later
_REMEDY = "let the Trainer make its optimizer, or give it one of torch.optim that has not stepped"
_log = logging.getLogger("shardopt")


class ShardoptCallback(TrainerCallback):
    """Restores the newest checkpoint when training begins, saves at regular steps, and at the end.

    Saved are model, optimizer, schedule and random states, and the Trainer's state: steps, logs, the loss since the
    last log, the best metric, what callbacks export. A torch optimizer, which is what a Trainer makes, is replaced by
    the keyed one of the same algorithm and groups, once the model is sharded. A step is saved when the next one
    begins, so that it is logged and evaluated by then. All ranks have a callback.

    Args:
        trainer: the one that it is added to.
        root: of the run's checkpoints, as for `checkpoint.Manager`.
        every: a checkpoint every so many steps; or, a `timedelta`, at the first step after each such time.
        options: `start_from`, the URL of a checkpoint of another program, from which a run without any takes model and
            optimizer; and those of `checkpoint.Manager`, such as `keep`, `stage` or `storage_options` (which hold for
            `start_from` too). `stop_on` is SIGTERM; None leaves the signal alone.

    Attributes:
        restored: the step that training began with.

    Raises when training begins:
        OptionError: data or accumulation by which training cannot resume in the middle of an epoch; a batch size that
            may change; or `resume_from_checkpoint`, which is the Trainer's own.
        StateError: the optimizer cannot be keyed by parameter name.
        MismatchError: the global batch is another than it was, or the data set has another size; nothing was loaded.
    """

    def __init__(
        self, trainer: Trainer, root: str | os.PathLike[str], *, every: int | timedelta = 1, **options: Any
    ) -> None:
        self._trainer = trainer
        self._run = TrainingRun(root, every=every, **options)
        self._random: dict[str, Any] | None = None
        self._before_epoch = False
        self._ended: dict[str, Any] | None = None  # random state before an evaluation that only the end of a run has
        self._batches = self._steps = 1  # of an epoch; batches of this rank
        self._samples = 0  # of a step, on all ranks together
        self._order: dict[str, int] = {}  # determines the order of samples; empty where data begins anew
        self.restored = 0

    @property
    def manager(self) -> Manager:
        """The Manager, during training."""
        return self._run.manager

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Restores: all parts of the training exist by now, and no data was requested yet."""
        loader, accumulated = given["train_dataloader"], args.gradient_accumulation_steps
        self._check_data(args, loader, state.global_step)
        if _is_stream(loader):  # which has no length, and may be read by one rank for all
            self._batches, batch = args.max_steps * accumulated, args.train_batch_size * args.world_size
        else:
            self._batches, batch = len(loader), loader.total_batch_size
        self._steps = -(-self._batches // accumulated)
        self._samples = batch * accumulated
        self._order = {} if args.ignore_data_skip else _order_of(loader)
        make_keyed(given["optimizer"], given["model"], [given["lr_scheduler"]], _REMEDY)
        saved = FrameworkState(check=self._check_batch)
        random = RandomState(on_resize="keep")
        self.restored = self._run.begin(self._app(saved, random, **given))
        shield_if_listening(loader)
        if self.restored:
            self._load(state, saved.value)
            self._random = random.state_dict()
            # Workers that stay over epochs have their seed from the first one.
            draws = not getattr(loader, "persistent_workers", False)
            self._before_epoch = draws and saved.value.get(_BEFORE_EPOCH, False)
            self._skip(loader, saved.value)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Puts the random numbers back if the loader of the epoch has yet to draw its seed from them."""
        if self._before_epoch:
            self._put_random_back()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Saves the state after the previous step, if that is due."""
        # Not before: the loader has drawn a seed from these generators since, which this step did not see.
        self._put_random_back()
        self._ended = None
        self._run.after_step(state.global_step, lambda: self._app_of(state, **given))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Corrects the epoch, which the Trainer counts from the start of this process."""
        if state.global_step >= state.max_steps and args.eval_strategy == "steps":
            self._note_random(state.global_step % state.eval_steps != 0)
        if self.restored:
            epochs, steps = divmod(state.global_step - 1, self._steps)
            batches = min((steps + 1) * args.gradient_accumulation_steps, self._batches)
            state.epoch = epochs + batches / self._batches

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Notes the random state if the run may end here, and a longer one would not have an evaluation here."""
        self._note_random(state.global_step % self._steps != 0)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Saves the last step at the last log, behind which the Trainer may load the weights of the best step."""
        if "total_flos" in state.log_history[-1]:  # other callbacks have removed it from `logs`
            self._run.save_last(state.global_step, lambda: self._app_of(state, ended=True, **given))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Waits for all running writes."""
        self._run.end(state.global_step, lambda: self._app_of(state, ended=True, **given))

    def _app(self, saved: FrameworkState, random: RandomState | dict[str, Any], **given: Any) -> dict[str, Any]:
        (optimizer,) = require_keyed([given["optimizer"]], _REMEDY)
        app = {"model": given["model"], "optimizer": optimizer, "random": random, "trainer": saved}
        return app if given["lr_scheduler"] is None else {**app, "schedule": given["lr_scheduler"]}

    def _app_of(self, state: TrainerState, ended: bool = False, **given: Any) -> dict[str, Any]:
        own = self._state_of(state)
        if ended and state.global_step % self._steps == 0:
            own[_BEFORE_EPOCH] = True
        random = self._ended if ended and self._ended else RandomState(on_resize="keep")
        return self._app(FrameworkState(own), random, **given)

    def _note_random(self, evaluates_at_end_only: bool) -> None:
        if evaluates_at_end_only and self._ended is None:
            self._ended = RandomState(on_resize="keep").state_dict()

    def _put_random_back(self) -> None:
        if self._random is not None:
            RandomState(on_resize="keep").load_state_dict(self._random)
            self._random = None

    def _state_of(self, state: TrainerState) -> dict[str, Any]:
        """Returns rank 0's Trainer state, with the losses and operations since the last log. Collective."""
        trainer, ranks = self._trainer, ranks_of(None)
        own = {name: value for name, value in asdict(state).items() if name not in _OF_THIS_RUN}
        own["stateful_callbacks"] = {
            name: [each.state()["attributes"] for each in callbacks] for name, callbacks in _exportable(trainer).items()
        }
        own["last_logged"] = trainer._globalstep_last_logged
        own["samples"], own["order"] = self._samples, self._order
        mean, flos = ranks.agree(
            "taking the mean of losses",
            work=lambda: (float(trainer._tr_loss.item()), trainer.current_flos),
            report=lambda since: since,
            decide=lambda counted: (sum(loss for loss, _ in counted) / len(counted), sum(each for _, each in counted)),
        )[1]
        own["total_flos"] += flos  # as by `store_flos`, which would be a round of its own
        return {**of_rank_0("the Trainer's state", own), "loss_since": mean}  # of times, ranks see others

    def _load(self, state: TrainerState, saved: dict[str, Any]) -> None:
        trainer = self._trainer
        for name in asdict(state).keys() - _OF_THIS_RUN - {"stateful_callbacks"}:
            if name in saved:
                setattr(state, name, saved[name])
        for kind, callbacks in _exportable(trainer).items():
            states = saved["stateful_callbacks"].get(kind, [])
            if not isinstance(states, list):  # earlier versions: of the last callback of that name
                callbacks, states = callbacks[-1:], [states]
            for each, attributes in zip(callbacks, states, strict=False):
                for name, value in attributes.items():
                    setattr(each, name, value)
        # A log divides losses by the steps since the last one, and `train` losses and times by those of this process.
        trainer._initial_global_step, trainer._initial_num_input_tokens_seen = (
            state.global_step,
            state.num_input_tokens_seen,
        )
        trainer._globalstep_last_logged = saved["last_logged"]
        trainer._tr_loss = torch.tensor(saved["loss_since"], device=trainer._tr_loss.device)
        trainer._total_loss_scalar = -trainer._tr_loss.item()  # to which the next log adds the losses of those steps

    def _skip(self, loader: Any, saved: dict[str, Any]) -> None:
        """Makes the data begin after the samples that were seen, as the Trainer counts epochs from 0."""
        if not self._order:
            return
        epochs, steps = divmod(self.restored, self._steps)
        order = {**self._order, **saved.get("order", {})}
        size, own = self._order["size"], self._order["filled_to"]
        if -size % own > -size % order["filled_to"]:
            _log.warning(
                "the last batch of each epoch had fewer samples than others, and has as many from here on: a Trainer "
                "on several ranks fills it with the first samples of the epoch; its losses are others [framework]"
            )
        self._order["filled_to"] = max(own, order["filled_to"])
        sampler = _inner(loader.batch_sampler).sampler
        if "seed" in order and hasattr(sampler, "initial_seed"):
            self._order["seed"] = sampler.initial_seed = order["seed"]
        done = self.restored >= self._trainer.state.max_steps
        begins = _GoesOn(sampler, epochs, None if done else steps * self._samples, self._order["filled_to"])
        loader.set_sampler(begins)

    def _check_data(self, args: TrainingArguments, loader: Any, begins_at: int) -> None:
        problems = []
        if begins_at:  # the Trainer has loaded a checkpoint of its own
            found, required = f"step {begins_at} of a checkpoint of the Trainer's", "none: this callback resumes"
            remedy = "leave that option out (the page on the Trainer says how to begin from such a checkpoint)"
            problems.append(Problem("resume_from_checkpoint", found, required, remedy))
        if args.auto_find_batch_size:
            required = "one batch size for the whole run"
            remedy = "leave it out, and pass a per_device_train_batch_size that fits in memory"
            problems.append(Problem("auto_find_batch_size", "True", required, remedy))
        if isinstance(loader, DataLoaderDispatcher) and not _is_stream(loader):
            required, remedy = "each rank reads its own batches", "leave it out"
            problems.append(Problem("accelerator_config.dispatch_batches", "True", required, remedy))
        elif not args.ignore_data_skip:
            refuse_any_order(loader)
            problems += _unfit_for_skipping(loader, args.gradient_accumulation_steps)
        if problems:
            raise OptionError("training could not be resumed by this callback", problems, code="framework")

    def _check_batch(self, saved: dict[str, Any]) -> None:
        if saved["samples"] != self._samples:
            remedy = "set per_device_train_batch_size so that ranks × batch × accumulation is what it was"
            problem = Problem(
                "samples of a step", str(self._samples), f"{saved['samples']}, as in the checkpoint", remedy
            )
            raise MismatchError("training cannot resume with another global batch", [problem], code="framework")
        size = saved.get("order", {}).get("size")
        if self._order and size not in (None, self._order["size"]):
            another = Problem(
                key="train_dataset",
                found=f"{self._order['size']} samples",
                required=f"{size}, as the data set of the checkpoint has",
                remedy="pass the same data set, or ignore_data_skip=True to see this one from its begin",
            )
            raise MismatchError("a position in another data set", [another], code="data-position")


class _GoesOn:
    """A sampler that begins where another run stopped: after some epochs, and some samples of the next.

    Epochs are filled up here, to batches that are whole: the loader does so with the first samples that it is given,
    which in an epoch that resumes are not the first ones of the epoch.

    Args:
        sampler: gives the samples of all ranks, in the order of an epoch.
        epochs: how many of them are done.
        samples: how many of the first epoch that is asked for are done. None for all of this and any other epoch.
        filled_to: the number of samples in an epoch becomes a multiple of this, by its first samples once more.
    """

    def __init__(self, sampler: Any, epochs: int, samples: int | None, filled_to: int) -> None:
        self._sampler, self._epochs, self._samples, self._filled_to = sampler, epochs, samples, filled_to
        self.set_epoch(0)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        if self._samples is None:
            return
        skipped, self._samples = self._samples, 0
        yield from islice(self._filled(), skipped, None)

    def _filled(self) -> Iterator[Any]:
        first, count = [], 0
        for sample in self._sampler:
            if count < self._filled_to:
                first.append(sample)
            count += 1
            yield sample
        yield from islice(cycle(first), -count % self._filled_to)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch + self._epochs)


def _inner(batches: Any) -> Any:
    """Returns the batch sampler of the whole job, from which ranks take their batches."""
    return getattr(batches, "batch_sampler", batches)


def _unfit_for_skipping(loader: Any, accumulated: int) -> Iterator[Problem]:
    batches = loader.batch_sampler
    sampler = getattr(_inner(batches), "sampler", None)
    if _is_stream(loader):
        yield Problem(
            key="train_dataset",
            found="data without a sampler",
            required="a map-style data set, of which samples can be left out",
            remedy="or ignore_data_skip=True, to see the data once more",
        )
    elif sampler is None or (hasattr(sampler, "generator") and not hasattr(sampler, "set_epoch")):
        yield Problem(
            key="train_sampling_strategy",
            found=f"a {type(sampler or batches).__name__}, which draws the order of an epoch when that begins",
            required="an order that follows from the number of the epoch",
            remedy="sample at random or in sequence, with use_seedable_sampler as by default, or pass "
            "ignore_data_skip=True, to see the data once more",
        )
    elif len(loader) % accumulated:
        yield Problem(
            key="gradient_accumulation_steps",
            found=f"{accumulated}, of {len(loader)} batches in an epoch",
            required="a number that divides them",
            remedy="shorten the data set",
        )


def _is_stream(loader: Any) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def _order_of(loader: Any) -> dict[str, int]:
    """Returns what determines the order of samples: their number, the padded number, and the seed."""
    batches, sampler = loader.batch_sampler, _inner(loader.batch_sampler).sampler
    fills = getattr(batches, "even_batches", False) and not batches.drop_last
    order = {"size": len(sampler), "filled_to": loader.total_batch_size if fills else 1}
    return {**order, "seed": sampler.initial_seed} if hasattr(sampler, "initial_seed") else order


def _exportable(trainer: Trainer) -> dict[str, list[Any]]:
    """Returns the callbacks that export a state, by the name of their class, in their order."""
    found: dict[str, list[Any]] = {}
    for each in trainer.callback_handler.callbacks:
        if isinstance(each, ExportableState):
            found.setdefault(type(each).__name__, []).append(each)
    return found
