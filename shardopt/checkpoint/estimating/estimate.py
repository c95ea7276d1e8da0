"""Estimates what saves and loads of an app cost, before a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from shardopt.checkpoint.estimating.first_state import with_first_state
from shardopt.checkpoint.estimating.kept import Kept, kept_over_run
from shardopt.checkpoint.estimating.measure import NOT_MEASURED, Measured, measure
from shardopt.checkpoint.estimating.planned import PlannedSave, plan_save
from shardopt.checkpoint.estimating.report import Estimate
from shardopt.checkpoint.estimating.sample import sizes_of
from shardopt.checkpoint.hosts.served import is_on_hosts
from shardopt.checkpoint.loading.compare import compare
from shardopt.checkpoint.loading.names import names_as_stored
from shardopt.checkpoint.loading.options import STRICT
from shardopt.checkpoint.run.retention import Retention, retention_of
from shardopt.checkpoint.saving.options import DEFAULT_OPTIONS, SaveOptions
from shardopt.checkpoint.sources.own import OwnSource
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.storage import Storage, absolute_url, storage_of, use_options
from shardopt.errors import OptionError, Problem
from shardopt.ranks import Group, Ranks, call_on, ranks_of, refuse_lone_processes
from shardopt.runtime.deferred_checks import taking_state
from shardopt.runtime.gc_pause import gc_paused
from shardopt.runtime.signals import SAVING, is_part_of, refuse_within
from shardopt.runtime.torch_private import out_of_inference_mode
from shardopt.sharding.view import local_tensors, view_of
from shardopt.state.flatten import flatten
from shardopt.state.state import FlatState
from shardopt.world import world

MEASURE_SECONDS = 10.0


def estimate(
    app: Mapping[str, Any],
    url: str | os.PathLike[str],
    *,
    steps: int | None = None,
    every: int = 1,
    keep: int | Retention | None = None,
    seconds_per_step: float | None = None,
    measure_seconds: float = MEASURE_SECONDS,
    options: SaveOptions = DEFAULT_OPTIONS,
    process_group: Group | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Estimate:
    """Estimates bytes, host memory and seconds of a save and a load, and what a run keeps. Collective, as `save`.

    Bytes are those of the plan that a save would make of this state: all of it, without a base. Optimizer state that
    does not exist before the first step is counted as if every trained parameter had a gradient. Keyed optimizers make
    it on the device of their parameters, and drop it before the call returns. Tensors of `app` may be on the meta
    device. Nothing in `app` is changed.

    Seconds are measured: each rank writes up to 256 MiB in sizes like those of its state, flushes them if
    `options.durable`, reads them back, and removes them, at the same time as the others. They are written to the
    directory of a step under `url`, as files of a save that never ends: if the process is killed, a `Manager` removes
    them after a later commit. Reads come from caches, where there are any.

    Args:
        app: as for `save`.
        url: the root of the run, or a directory for checkpoints.
        steps: of the run; None for no totals.
        every, keep: as for `Manager`; `every` in steps.
        seconds_per_step: of the run; only rules by age (`Retention(seconds=)`) need it.
        measure_seconds: about how long to measure. 0 measures nothing, and touches no storage.
        options: of the run's saves.
        process_group, storage_options: as for `save`.

    Raises:
        OptionError: arguments out of their range; or this rank is not in `process_group`.
        StateError, LayoutError: a save of `app` would be refused.
        CheckpointError: `url` cannot be written, or ranks do not share it.
        RankError: a rank failed in another way, died, or did not make the call.
    """
    refuse_within(f"estimating saves to {os.fspath(url)}", app)
    if isinstance(measure_seconds, bool) or not isinstance(measure_seconds, int | float) or not measure_seconds >= 0:
        required = "0 seconds, or more"
        problem = Problem("measure_seconds", repr(measure_seconds), required, "give a number")
        raise OptionError("invalid arguments", [problem])
    rules = retention_of(keep)
    if steps is not None:
        kept_over_run(0, rules, steps, every, seconds_per_step)  # which refuses before anything is written
    if storage_options is not None:
        use_options(url, storage_options)
    ranks = ranks_of(process_group, options.deadline_seconds)
    planned, measured, load_seconds, uncounted = _look(ranks, absolute_url(url), app, options, measure_seconds)
    nbytes = sum(planned.bytes_by_rank) + planned.manifest_bytes
    kept: Kept | None = None if steps is None else kept_over_run(nbytes, rules, steps, every, seconds_per_step)
    return Estimate.of(absolute_url(url), planned, measured, load_seconds, kept, uncounted)


@is_part_of(SAVING)
def _look(
    ranks: Ranks, url: str, app: Mapping[str, Any], options: SaveOptions, measure_seconds: float
) -> tuple[PlannedSave, Measured, float, tuple[str, ...]]:
    """Plans a save and measures the storage. Collective."""
    call = call_on("estimating saves to", url)
    refuse_lone_processes(str(call))
    with out_of_inference_mode(), ranks.beating(), gc_paused(), taking_state(), ExitStack() as state:

        def take() -> tuple[FlatState, tuple[str, ...], float]:
            flat, uncounted = state.enter_context(with_first_state(app, options.tied))
            begin = world().monotonic()
            flatten(app, options.tied)
            seconds = world().monotonic() - begin
            return flat if options.select is None else flat.selected(options.select), uncounted, seconds

        (flat, uncounted, taking), _ = ranks.agree(call, take)
        storage = storage_of(url, options.durable)
        planned = plan_save(ranks, call, flat, options, storage, taking)
        if not measure_seconds or is_on_hosts(url):
            return planned, NOT_MEASURED, 0.0, uncounted
        # An app takes its state back about as fast as it gives it.
        seconds = ranks.on_rank_0(call, lambda: 2 * taking + _load_seconds(ranks, flat, storage, planned))
        device = _device_of(flat)
        state.close()
        sizes = sizes_of(planned.writes)
        measured = measure(ranks, call, storage, sizes, planned.manifest, device, measure_seconds)
    return planned, measured, seconds, uncounted


def _load_seconds(ranks: Ranks, flat: FlatState, storage: Storage, planned: PlannedSave) -> float:
    """Returns the seconds in which rank 0 decodes the manifest and compares it with the app."""
    begin = world().monotonic()
    reader = CheckpointReader(OwnSource(storage, planned.manifest))
    views = {key: view_of(leaf.value, key) for key, leaf in flat.leaves.items() if isinstance(leaf.value, Tensor)}
    names = names_as_stored(reader, flat)
    if names is not None:
        compare(flat, views, names, STRICT, ranks.size, needs_memory=False)
    return world().monotonic() - begin


def _device_of(flat: FlatState) -> torch.device:
    """Returns the device of an accelerator that has tensors of this rank; the CPU if none has."""
    tensors = (leaf.value for leaf in flat.leaves.values() if isinstance(leaf.value, Tensor))
    devices = {local.device for tensor in tensors for local in local_tensors(tensor)}
    return next((device for device in devices if device.type not in ("cpu", "meta")), torch.device("cpu"))
