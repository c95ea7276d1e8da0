"""Converts the state of a Lightning trainer to an app and back, for the callback and for the strategy.

    {"model": module, "optimizer": optimizer, "schedule": schedule, "random": …, "loaders": …, "lightning": …}

Where there are several optimizers or schedules they are lists, "optimizers" and "schedules". "lightning" has the rest
of what Lightning puts in a checkpoint of its own, under Lightning's names: the loops' progress, the callbacks' state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer, __version__, callbacks
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng

from shardopt.data.random_state import RandomState
from shardopt.data.sampler import deal
from shardopt.errors import Problem, StateError
from shardopt.integrations.loader import batches_left, position_of
from shardopt.integrations.optimizers import add_objects, require_keyed
from shardopt.integrations.run import FrameworkState, of_rank_0
from shardopt.ranks import ranks_of
from shardopt.state.state import PerRank
from shardopt.state.values import decode_value, encode_value

_KEYED = "return shardopt.keyed(torch.optim.AdamW, self.named_parameters(), lr=...) from configure_optimizers"
_AVERAGED = (
    "leave the callback out; make torch.optim.swa_utils.AveragedModel an attribute of the LightningModule, and update "
    "it in `optimizer_step` (the page on Lightning has the lines)"
)
_AVERAGING = (callbacks.StochasticWeightAveraging, callbacks.WeightAveraging)
_log = logging.getLogger("shardopt")
METRICS = "metrics of schedules"  # the last values that ReduceLROnPlateau goes by; Lightning itself saves none
_STATEFUL = "StatefulDataLoader"  # of torchdata, which need not be installed
_SHARE = (
    "distributed_sampler_kwargs"  # ParallelStrategy's own counts the devices of one node, and says nothing of others
)
_LOADERS = "combined_loader"  # Lightning's name for the states of data loaders, within those of the fit loop


def app_of(trainer: Trainer, framework: FrameworkState, loaders: LoaderStates) -> dict[str, Any]:
    """Returns the app of a trainer whose strategy is set up.

    Raises:
        StateError: an optimizer is not keyed by parameter name; or a callback averages weights, and keeps them outside
            the module, or in the module's place.
    """
    averaging = [type(each).__name__ for each in trainer.callbacks if isinstance(each, _AVERAGING)]
    if averaging:
        found, required = "a callback whose averages cannot be resumed", "averages that the module has"
        problems = [Problem(name, found, required, _AVERAGED) for name in averaging]
        raise StateError("averages of weights that would be lost", problems, code="framework")
    optimizers = require_keyed(trainer.optimizers, _KEYED)
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    app: dict[str, Any] = {"model": trainer.lightning_module, "random": RandomState(on_resize="keep")}
    app |= {"loaders": loaders, "lightning": framework}
    add_objects(app, "optimizer", optimizers)
    add_objects(app, "schedule", schedules)
    return app


def progress_of(trainer: Trainer) -> dict[str, Any]:
    """Returns how far the loops and the data loaders have come."""
    loops = {"fit_loop": trainer.fit_loop.state_dict()}
    return {"epoch": trainer.current_epoch, "global_step": trainer.global_step, "loops": loops}


def state_of(trainer: Trainer, progress: dict[str, Any]) -> dict[str, Any]:
    """Returns Lightning's state beside model, optimizers and schedules. Collective: callbacks' state is rank 0's."""
    checkpoint = {name: progress[name] for name in ("epoch", "global_step")}
    checkpoint["pytorch-lightning_version"] = __version__
    states = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
    checkpoint["callbacks"] = {key: state for key, state in states.items() if state}
    precision, datamodule = trainer.precision_plugin, trainer.datamodule
    for owner in (precision, datamodule):
        if owner is not None and (state := owner.state_dict()):
            checkpoint[type(owner).__qualname__] = state
    with _weights_in(checkpoint, trainer.lightning_module):
        precision.on_save_checkpoint(checkpoint)
        for callback in trainer.callbacks:
            callback.on_save_checkpoint(trainer, trainer.lightning_module, checkpoint)
        trainer.lightning_module.on_save_checkpoint(checkpoint)
    checkpoint = of_rank_0("the state of Lightning's callbacks", checkpoint)
    checkpoint["loops"] = progress["loops"]
    metrics = _means_of_metrics(trainer) if _monitors(trainer) else {}
    return {**checkpoint, METRICS: metrics} if metrics else checkpoint


def _means_of_metrics(trainer: Trainer) -> dict[str, float]:
    """Returns the last metrics that schedules go by, each as the mean over ranks that have it. Collective."""
    known = trainer.callback_metrics
    here = {name: float(known[name]) for name in sorted(_monitors(trainer) & known.keys())}

    def mean(reports: list[Any]) -> Any:
        lists: dict[str, list[float]] = {}
        for name, value in (pair for report in reports for pair in decode_value(report).items()):
            lists.setdefault(name, []).append(value)
        return encode_value({name: sum(values) / len(values) for name, values in lists.items()}, "metrics")

    what = "taking the metrics of schedules"
    _, means = ranks_of(None).agree(what, lambda: None, lambda _: encode_value(here, "metrics"), mean)
    found: dict[str, float] = decode_value(means)
    return found


def load_state(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Hands back the state from `state_of`, as Lightning does when it resumes by itself."""
    precision, datamodule = trainer.precision_plugin, trainer.datamodule
    with _weights_in(checkpoint, trainer.lightning_module):
        trainer.lightning_module.on_load_checkpoint(checkpoint)
        for callback in trainer.callbacks:
            callback.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)
            if callback.state_key in checkpoint["callbacks"]:
                callback.load_state_dict(checkpoint["callbacks"][callback.state_key])
        precision.on_load_checkpoint(checkpoint)
    for owner in (precision, datamodule):
        if owner is not None and type(owner).__qualname__ in checkpoint:
            owner.load_state_dict(checkpoint[type(owner).__qualname__])
    trainer.fit_loop.load_state_dict(checkpoint["loops"]["fit_loop"])
    validation = trainer.fit_loop.epoch_loop.val_loop
    validation.increment_progress_to_evaluation_end = partial(_count_validation, validation)  # it pickles, and copies


def _count_validation(validation: Any) -> None:
    """Counts the validation that came before. Lightning opens its loader for that, which draws a random number."""
    with isolate_rng():
        type(validation).increment_progress_to_evaluation_end(validation)


def draws_seed_in_each_epoch(trainer: Trainer) -> bool:
    """Whether an epoch draws one seed for its loader.

    Workers that stay over epochs have theirs from the first one. A StatefulDataLoader that resumes at its end is opened
    twice, and draws two, unless Lightning makes it anew.
    """
    twice = trainer.reload_dataloaders_every_n_epochs == 0
    return not any(
        getattr(each, "persistent_workers", False) or (twice and _is_stateful(each))
        for each in CombinedLoader(trainer.train_dataloader).flattened
    )


def _is_stateful(loader: Any) -> bool:
    """Whether a loader has the state of torchdata's, and not a position of ours."""
    return position_of(loader) is None and any(kind.__name__ == _STATEFUL for kind in type(loader).__mro__)


def validates(trainer: Trainer) -> bool:
    """Whether a validation follows this batch. One that goes by the time does so on no rank: their clocks differ."""
    loop, by_batches = trainer.fit_loop, trainer.val_check_batch is not None
    return by_batches and bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


def deal_as(strategy: Strategy, loader: Any) -> None:
    """Has a loader of ours deal its batches to the ranks among which a strategy divides data.

    Ranks of tensor parallelism get the same samples then. Raises OptionError if the loader was made for others.
    """
    at, share = position_of(loader), getattr(type(strategy), _SHARE, None)
    if at is not None and share not in (None, ParallelStrategy.distributed_sampler_kwargs):
        numbers = getattr(strategy, _SHARE)
        deal(at, numbers["rank"], numbers["num_replicas"])


class Dealing:
    """A strategy's `process_dataloader`, which passes each loader that Lightning gets to `deal_as` first.

    An object and no function, as it is pickled and copied with its trainer.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy, self.process = strategy, strategy.process_dataloader

    def __call__(self, loader: object) -> object:
        deal_as(self.strategy, loader)
        return self.process(loader)


def begin_dealing(strategy: Strategy) -> None:
    """Has a strategy deal loaders from now on. Once is enough: a fit that failed has left it so."""
    if not isinstance(strategy.process_dataloader, Dealing):
        strategy.process_dataloader = Dealing(strategy)


def end_dealing(strategy: Strategy) -> None:
    """Takes back what `begin_dealing` has set, if it has, and leaves what was set on the strategy before."""
    dealing = vars(strategy).pop("process_dataloader", None)
    before = dealing.process if isinstance(dealing, Dealing) else dealing
    if before not in (None, strategy.process_dataloader):  # one that was set on the object
        strategy.process_dataloader = before


def end_short_epoch(trainer: Trainer) -> None:
    """Begins the next epoch of loaders that have less left than an epoch of Lightning's (`limit_train_batches`).

    Such a loader would go on with that rest, in an epoch of the trainer that is too short.
    """
    for loader in CombinedLoader(trainer.train_dataloader).flattened:
        at = position_of(loader)
        if at is not None and at.position > 0 and batches_left(at) < trainer.num_training_batches:
            loader.load_state_dict({**at.state_dict(), "epoch": at.epoch + 1, "position": 0})


def step_plateaus(trainer: Trainer) -> None:
    """Has Lightning step `ReduceLROnPlateau` at the end of a resumed epoch too, which it leaves out by itself."""
    if _monitors(trainer) <= trainer.callback_metrics.keys():
        trainer.fit_loop._restarting = False


def without_loaders(checkpoint: dict[str, Any]) -> tuple[dict[str, Any], LoaderStates]:
    """Removes the positions of data loaders from Lightning's state, as they may differ between ranks."""
    loop = checkpoint["loops"]["fit_loop"]
    own = dict(loop["state_dict"])
    states = own.pop(_LOADERS, [])
    loops = {**checkpoint["loops"], "fit_loop": {**loop, "state_dict": own}}
    return {**checkpoint, "loops": loops}, LoaderStates(states)


class LoaderStates:
    """The positions of stateful data loaders: stored once if they hold for any rank, else for each rank.

    Args:
        states: in Lightning's order.
    """

    def __init__(self, states: list[Any] | None = None) -> None:
        self.states: list[Any] = states or []

    def state_dict(self) -> dict[str, Any]:
        shared = [state if _is_shared(state) else None for state in self.states]
        own = [None if _is_shared(state) else state for state in self.states]
        return {"shared": {"states": shared}, "of_rank": PerRank(own, "keep")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        shared, own = state_dict["shared"]["states"], state_dict["of_rank"].value
        if any(state is None for state in shared) and len(own) != len(shared):
            found = "the positions of data loaders on another number of ranks"
            remedy = "give Lightning a shardopt.integrations.loader.ResumableLoader"
            problem = Problem("loaders", found, "those of as many ranks", remedy)
            raise StateError("data cannot be resumed", [problem], code="data-position")
        self.states = [own[i] if state is None else state for i, state in enumerate(shared)]

    def put_into(self, checkpoint: dict[str, Any]) -> None:
        """Puts the positions back to where `without_loaders` removed them."""
        if self.states:
            checkpoint["loops"]["fit_loop"]["state_dict"][_LOADERS] = self.states

    def load_positions(self, loaders: Any) -> None:
        """Loads positions into loaders that count by themselves; Lightning does so only in the middle of an epoch."""
        if self.states:
            stateful = [each for each in CombinedLoader(loaders).flattened if hasattr(each, "load_state_dict")]
            for loader, state in zip(stateful, self.states, strict=False):
                if _is_shared(state):
                    loader.load_state_dict(state)


@contextmanager
def _weights_in(checkpoint: dict[str, Any], module: LightningModule) -> Iterator[None]:
    """Shows hooks the weights where Lightning's own checkpoints have them; they are saved and loaded in place."""
    weights = module.state_dict()
    checkpoint["state_dict"] = dict(weights)
    yield
    left = checkpoint.pop("state_dict", {})
    if left.keys() != weights.keys() or any(left[name] is not weights[name] for name in weights):
        _tell_of_changes()


@cache
def _tell_of_changes() -> None:
    _log.warning(
        'a hook has changed checkpoint["state_dict"], which has no effect: shardopt saves and loads all weights of the '
        "module as they are [framework]"
    )


def _monitors(trainer: Trainer) -> set[str]:
    return {str(config.monitor) for config in trainer.lr_scheduler_configs if config.reduce_on_plateau}


def _is_shared(state: Any) -> bool:
    """Whether a state belongs to a `ResumableSampler`, that is, to a `ResumableLoader` or `ResumableStatefulLoader`."""
    return isinstance(state, dict) and state.keys() >= {"size", "seed", "epoch", "position"}
