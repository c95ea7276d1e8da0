"""The last or best checkpoint of a run as a Hugging Face folder, written by rank 0 in the background.

    <url>/step-00000500/model.safetensors        the export, as `convert` writes it
    <url>/export.json                            {"name": "step-00000500", "save_id": "9f…", "best": ["loss", "min"],
                                                 "value": 0.5}: written once it is whole

The one before is removed only then. Of the same step, saved again, it is in the other of two folders: step-00000500 and
step-00000500-again. Exports may lag behind the saves: of those that wait only the last or best is made.

A folder counts as the export of a checkpoint only by the id of its save: a step may be saved again. A value counts only
for the metric that is asked for, and while its step is part of the run. Records of earlier versions have neither id nor
metric: that step is written anew, to the other folder, if it is still the one to export, and their value counts.

What cannot be read or written for now fails, and is tried again with the next: that may be a worse one.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch

from shardopt.checkpoint.converting.convert import MAX_FILE_BYTES, ConvertOptions, convert_on
from shardopt.checkpoint.format.constants import DATA_SUFFIX, JOURNAL_NAME
from shardopt.checkpoint.rearrange.rules import AnyRule
from shardopt.checkpoint.run.background import Task, Turns
from shardopt.checkpoint.run.branches import CheckpointId, ids_in, parse_id
from shardopt.checkpoint.run.context import Restored, Run
from shardopt.checkpoint.run.metrics import Noted, is_damage, noted_of
from shardopt.checkpoint.run.retention import MOST_LACKING, Best, Mode, best_of
from shardopt.checkpoint.sources.open import reading
from shardopt.checkpoint.storage import Storage, storage_of, wrap_os_errors
from shardopt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptionError,
    MismatchError,
    OptionError,
    Problem,
    StateError,
    UnreadableError,
)
from shardopt.ranks import Ranks

RECORD_NAME = "export.json"
_AGAIN = "-again"
_MOST_OWN = 1000  # saves, in a run that saves for months
_log = logging.getLogger("shardopt.checkpoint")
_OWN_FILES = re.compile(
    rf"model(-\d{{5}}-of-\d{{5}})?{re.escape(DATA_SUFFIX)}(\.index\.json)?|{re.escape(JOURNAL_NAME)}.*"
)


@dataclass(frozen=True, slots=True)
class Export:
    """Exports of a run's checkpoints as Hugging Face folders: which ones, where, and how.

    Args:
        url: of a directory, in which each export has one of its own. It has the name of the checkpoint, with "-again"
            behind it if the same step was exported there before. `export.json` names the one that is complete.
        best: `(metric, mode)`: exports only a checkpoint whose metric is better than the existing export's ("min" or
            "max"), and none whose metric is no number. An export of a step that has left the run, or by another metric,
            counts for nothing. None exports every checkpoint, so that the last one stays.
        rearrange, rename, select, skip, dtype, max_file_bytes, weights: as for `checkpoint.convert`. `weights="ema"`
            writes the app's averages under that key, under the names of the weights.
    """

    url: str | os.PathLike[str] = field(repr=False)  # it may have a password
    best: tuple[str, Mode] | None = None
    rearrange: Sequence[AnyRule] = ()
    rename: Mapping[str, str] | None = None
    select: str | None = None
    dtype: torch.dtype | None = None
    max_file_bytes: float = MAX_FILE_BYTES
    weights: str | None = None
    skip: str | None = None

    def __post_init__(self) -> None:
        if self.best is not None and (len(self.best) != 2 or self.best[1] not in ("min", "max")):
            problem = Problem("best", repr(self.best), "(metric, mode)", 'as in ("loss", "min")')
            raise OptionError("an invalid export", [problem])


class _Candidate(NamedTuple):
    """A checkpoint that may be exported.

    Args:
        noted: None where it is still to be read.
        hold: keeps the checkpoint from being removed until it is closed.
        is_again: whether it, or one beside it, could not be read or exported before.
    """

    id: CheckpointId
    url: str
    noted: Noted | None
    hold: ExitStack
    is_again: bool


class _Existing(NamedTuple):
    """The export that is there: its folder, of which save, and its value; NaN where any value is better."""

    folder: str
    id: CheckpointId
    save_id: str | None
    value: float


class Exporter(Task):
    """Writes the exports of a run, in a thread of rank 0. Other ranks write none."""

    def __init__(self, run: Run, export: Export) -> None:
        self._run, self._export = run, export
        self._best = None if export.best is None else Best(*export.best, n=1)
        self._by = None if export.best is None else [*export.best]  # as the record has it
        self._root = storage_of(export.url)
        self._own: dict[str, None] = {}  # the ids of this process's saves: what others have saved may not fit `export`
        self._again: set[CheckpointId] = set()  # to be tried again; two threads take what is in it
        self._lacking, self._has_metric = 0, False  # saves with other metrics alone; whether any had that one
        self._with_others = (0, "")  # the last of these, and its metrics
        super().__init__(Turns(self._do, self._describe, "shardopt-export"))

    def begin(self, id: CheckpointId, noted: Noted, is_own: bool) -> None:
        """Exports a checkpoint that has just come to the root, if it is due. Does not wait.

        Args:
            is_own: whether this process has saved it.
        """
        if self._best is not None and noted.metrics and self._best.metric not in noted.metrics:
            self._lacking, self._with_others = self._lacking + 1, (id.step, ", ".join(sorted(noted.metrics)))
            if self._lacking == MOST_LACKING:
                self._tell_of_lacking(self._best.metric)
        if is_own and noted.save_id is not None:
            self._own[noted.save_id] = None
            for oldest in list(self._own)[:-_MOST_OWN]:
                del self._own[oldest]
        self._begin({id: noted})

    def _tell_of_lacking(self, metric: str) -> None:
        if not self._has_metric:
            _log.warning(
                "nothing is exported: Export(best=) goes by the metric %r, which none of %d saves had; step %d has "
                "%s. Name one of these, or give it to the steps that have it [invalid-argument]",
                *(metric, self._lacking, *self._with_others),
            )

    def close(self) -> None:
        """Waits as `finish` does, and raises as `Task.close`. Tells of a job at whose end there is no export."""
        self.finish()
        if self._best is not None and 0 < self._lacking < MOST_LACKING and sys.exception() is None:
            with suppress(OSError, CheckpointError):
                if self._record() is None:
                    self._tell_of_lacking(self._best.metric)
        super().close()

    def note(self, id: CheckpointId, noted: Noted) -> None:
        """Exports a checkpoint that has got metrics, if they decide and it is due. Does not wait."""
        if self._best is not None:
            self._begin({id: noted})

    def restored(self, restored: Restored) -> None:
        """Exports what is due in a restored run, if the export is not of that. Does not wait.

        An earlier process may have been killed before, or what it exported has left the run.
        """
        root = self._run.root
        ids = [restored.id] if root.checkpoint(restored.id).url == restored.url else []
        if self._best is not None:
            ids = [*root.seen.ids]
        there = {id: at for id in ids if (at := root.checkpoint(id)).missing_target() is None}
        self._begin({id: None for id, at in there.items() if at.url not in restored.damaged})

    def _begin(self, noted: Mapping[CheckpointId, Noted | None]) -> None:
        """Begins an export of the best of these and of those that wait; which it is shows once all are read."""
        waiting = [each for job in self._turns.withdraw_waiting() for each in job]
        candidates = self._with_again([*waiting, *(self._held(id, each) for id, each in noted.items())])
        due = self._ranked(candidates)[:1]
        if self._best is not None:
            due += [each for each in candidates if each.noted is None]
        for candidate in candidates:
            if not any(candidate is each for each in due):
                candidate.hold.close()
        if due and not self._turns.begin_alone(due):
            self._again.update(each.id for each in due)
            for candidate in due:
                candidate.hold.close()

    def _held(self, id: CheckpointId, noted: Noted | None, is_again: bool = False) -> _Candidate:
        candidate = _Candidate(id, self._run.root.checkpoint(id).url, noted, ExitStack(), is_again)
        candidate.hold.enter_context(reading(candidate.url))
        return candidate

    def _with_again(self, candidates: Sequence[_Candidate]) -> list[_Candidate]:
        """Returns these, behind those that are to be tried again; of each checkpoint what was noted last."""
        again = self._again.copy()
        self._again.difference_update(again)
        merged: dict[CheckpointId, _Candidate] = {}
        for each in [*(self._held(id, None, is_again=True) for id in sorted(again)), *candidates]:
            if each.id in merged:
                merged.pop(each.id).hold.close()
            merged[each.id] = each
        return [*merged.values()]

    def _describe(self, job: Sequence[_Candidate]) -> str:
        return f"exporting {job[0].url if len(job) == 1 else self._run.root.url} to {self._root.url}"

    def _do(self, job: Sequence[_Candidate]) -> None:
        with ExitStack() as holds, wrap_os_errors(self._describe(job).replace("exporting", "export", 1)):
            candidates = self._with_again(job)
            for each in candidates:
                holds.enter_context(each.hold)
            try:
                candidates = [
                    each._replace(noted=_noted(each)) for each in candidates if self._run.branches.has(each.id)
                ]
            except (OSError, CheckpointError):  # it may be the best one: nothing is exported this time
                self._again.update(each.id for each in candidates)
                raise
            self._export_best(candidates)

    def _export_best(self, candidates: Sequence[_Candidate]) -> None:
        """Exports the best of the candidates that can be exported, unless it is no better than what is there.

        Raises:
            CorruptionError, CheckpointNotFoundError, MismatchError, StateError: one that this process has saved cannot
                be.
            OSError, CheckpointError: the export could not be written, or a disk failed; it is tried again.
        """
        ranked = self._ranked(candidates)
        for each in ranked:
            try:
                self._replace(each, self._existing(candidates))
                return
            except Exception as error:
                is_lost = is_damage(error) or isinstance(error, CheckpointNotFoundError)
                if not (is_lost or isinstance(error, MismatchError | StateError)):
                    self._again.add(each.id)
                    raise
                if _save_id(each) in self._own and not (is_lost and each is not ranked[-1]):
                    raise
                _log.warning("%s is not exported, but the next best, if any: %s", each.url, error)

    def _replace(self, candidate: _Candidate, there: _Existing | None) -> None:
        """Exports a checkpoint unless it is no better than what is there."""
        if there is not None and (there.id, there.save_id) == (candidate.id, _save_id(candidate)):
            folder = there.folder
        elif there is not None and not self._is_better(self._value(candidate), there.value):
            return
        else:
            folder = candidate.id.name
            if there is not None and there.folder == folder:
                folder += _AGAIN
            self._convert(candidate, folder)
        self._publish(candidate, folder)
        self.failures.take()  # of those before: this one is there

    def _convert(self, candidate: _Candidate, folder: str) -> None:
        names = {each.name for each in fields(ConvertOptions)} & {each.name for each in fields(Export)}
        options = ConvertOptions(**{name: getattr(self._export, name) for name in names})
        target = self._root.child(folder)
        if _is_whole(target):  # of another save of this step, as far as is known; no record names it
            _remove(target)
        convert_on(Ranks(None), candidate.url, target.url, "huggingface", options)

    def _publish(self, candidate: _Candidate, folder: str) -> None:
        """Writes the record of a whole export, and removes the others."""
        value = self._value(candidate)
        number = value if math.isfinite(value) else None if math.isnan(value) else str(value)  # JSON has no others
        record = {"name": folder, "save_id": _save_id(candidate), "best": self._by, "value": number}
        if self._record() != record:
            self._root.publish(RECORD_NAME, json.dumps(record).encode())
        for name in self._root.names():
            if name != folder and _id_of(name) is not None:
                if self._record() != record:
                    return  # another process of the run has exported meanwhile, and that is what counts
                _remove(self._root.child(name))

    def _record(self) -> Any:
        """Returns the record, None if there is none; one that is damaged has nothing in it. Raises UnreadableError."""
        try:
            return json.loads(self._root.read_record(RECORD_NAME)) if self._root.exists(RECORD_NAME) else None
        except UnreadableError:  # it may be of a better one
            raise
        except (ValueError, CorruptionError):
            return {}

    def _existing(self, candidates: Sequence[_Candidate]) -> _Existing | None:
        """Returns the export that is there; None if there is none that is complete."""
        try:
            record = self._record()
            folder = "" if record is None else record["name"]
            id = _id_of(folder)
            if id is None or not _is_whole(self._root.child(folder)):
                return None
            # Earlier versions wrote neither the id of the save nor the metric: that they meant this one is likely, and
            # what was the best of a run is not replaced on a guess.
            save_id, is_alike = record.get("save_id"), record.get("best", self._by) == self._by
            value = float(record["value"]) if is_alike and record["value"] is not None else math.nan
        except (ValueError, TypeError, LookupError, AttributeError):
            _log.warning("%s/%s is not what was written: it is written again", self._root.url, RECORD_NAME)
            self._root.remove(RECORD_NAME)  # it may name a folder that is written again too
            return None
        for each in candidates:
            if each.id == id and _save_id(each) is not None:  # what its metric is now, or it was saved again
                value = self._value(each) if _save_id(each) == save_id else math.nan
        return _Existing(folder, id, save_id, value if self._is_in_run(id) else math.nan)

    def _is_in_run(self, id: CheckpointId) -> bool:
        """Whether the run has come as far as this step, and not been taken back before it, or begun anew."""
        steps = [each.step for each in ids_in(self._run.root.storage.names())]
        return self._run.branches.has(id) and id.step <= max(steps, default=-1)

    def _value(self, candidate: _Candidate) -> float:
        if self._best is None or candidate.noted is None:
            return math.nan
        return candidate.noted.metrics.get(self._best.metric, math.nan)

    def _ranked(self, candidates: Sequence[_Candidate]) -> list[_Candidate]:
        """Returns those with a value, the best first; without `best` the last one."""
        if self._best is None:
            return [*candidates[-1:]]
        values = {i: self._value(each) for i, each in enumerate(candidates)}
        ranked = best_of(values, self._best._replace(n=max(len(values), 1)))
        self._has_metric = self._has_metric or bool(ranked)
        return [candidates[i] for i in reversed(ranked)]

    def _is_better(self, value: float, than: float) -> bool:
        return self._best is None or best_of({0: value, 1: than}, self._best) == [0]  # of equal ones the existing


def _id_of(folder: str) -> CheckpointId | None:
    """Returns of which checkpoint the export in a folder is; None for other names."""
    return parse_id(folder.removesuffix(_AGAIN))


def _save_id(candidate: _Candidate) -> str | None:
    return None if candidate.noted is None else candidate.noted.save_id


def _noted(candidate: _Candidate) -> Noted:
    """Returns what is known of a candidate, or reads it; nothing of one that is damaged or not committed.

    Nor of one that cannot be read again: it would stop all exports.

    Raises:
        OSError, CheckpointError: it cannot be read for now.
    """
    if candidate.noted is not None:
        return candidate.noted
    try:
        return noted_of(storage_of(candidate.url))
    except (OSError, CheckpointError) as error:
        if not (is_damage(error) or candidate.is_again):
            raise
        _log.warning("%s", error)
        return Noted(None, {})


def _is_whole(export: Storage) -> bool:
    names = export.names()
    return f"model{DATA_SUFFIX}" in names or f"model{DATA_SUFFIX}.index.json" in names


def _remove(export: Storage) -> None:
    """Removes an export, its config first. Other files stay, and with them the directory."""
    for name in sorted(filter(_OWN_FILES.fullmatch, export.names()), key=lambda name: not name.endswith(".json")):
        export.remove(name)
    export.remove_if_empty()
