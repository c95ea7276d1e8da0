"""The last or best checkpoint of a run as a Hugging Face folder, written by rank 0 in the background.

    <url>/step-00000500/model.safetensors        the export, as `convert` writes it
    <url>/export.json                            {"name": "step-00000500", "value": 0.5}: written once it is whole

The one before is removed only then. Exports may lag behind the saves: of those that wait only the newest is made.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch

from shardopt.checkpoint.converting.convert import MAX_FILE_BYTES, ConvertOptions, convert_on
from shardopt.checkpoint.format.constants import DATA_SUFFIX, JOURNAL_NAME
from shardopt.checkpoint.rearrange.rules import AnyRule
from shardopt.checkpoint.run.background import Task, Turns
from shardopt.checkpoint.run.branches import CheckpointId, parse_id
from shardopt.checkpoint.run.retention import Mode
from shardopt.checkpoint.sources.open import reading
from shardopt.checkpoint.storage import Storage, storage_of, wrap_os_errors
from shardopt.errors import CorruptionError, OptionError, Problem
from shardopt.ranks import Ranks

RECORD_NAME = "export.json"
_log = logging.getLogger("shardopt.checkpoint")
_OWN_FILES = re.compile(
    rf"model(-\d{{5}}-of-\d{{5}})?{re.escape(DATA_SUFFIX)}(\.index\.json)?|{re.escape(JOURNAL_NAME)}.*"
)


@dataclass(frozen=True, slots=True)
class Export:
    """Exports of a run's checkpoints as Hugging Face folders: which ones, where, and how.

    Args:
        url: of a directory, in which each export has a directory of its own, named as the checkpoint is.
        best: `(metric, mode)`: exports only a checkpoint whose metric is better than the existing export's ("min" or
            "max"). None exports every checkpoint, so that the last one stays.
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


class _Wanted(NamedTuple):
    """A checkpoint to export: its directory's name, its URL and its metric, if that decides.

    `hold` keeps the checkpoint from being removed until it is closed.
    """

    name: str
    url: str
    value: float | None
    hold: ExitStack


class Exporter(Task):
    """Writes the exports of a run, in a thread of rank 0. Other ranks write none."""

    def __init__(self, export: Export) -> None:
        self._export = export
        self._root = storage_of(export.url)
        super().__init__(Turns(self._do, self._describe, "shardopt-export"))

    def begin(self, id: CheckpointId, url: str, metrics: Mapping[str, float]) -> None:
        """Exports a just committed checkpoint, if it is due. Does not wait."""
        value = None if self._export.best is None else metrics.get(self._export.best[0])
        if self._export.best is not None and value is None:
            return
        if not all(self._is_better(value, each.value) for each in self._turns.jobs[1:]):
            return
        for overtaken in self._turns.withdraw_waiting():
            overtaken.hold.close()
        wanted = _Wanted(id.name, url, value, ExitStack())
        wanted.hold.enter_context(reading(url))
        self._turns.begin(wanted)

    def _is_better(self, value: float | None, than: float | None) -> bool:
        if self._export.best is None or value is None or than is None:
            return True
        return value < than if self._export.best[1] == "min" else value > than

    def _describe(self, wanted: _Wanted) -> str:
        return f"exporting {wanted.url} to {self._root.url}"

    def _do(self, wanted: _Wanted) -> None:
        with wanted.hold, wrap_os_errors(f"export {wanted.url} to {self._root.url}"):
            self._write(wanted)
        self.failures.take()  # of those before: this one is there

    def _write(self, wanted: _Wanted) -> None:
        if not self._is_better(wanted.value, self._value_of_export()):
            return
        names = {each.name for each in fields(ConvertOptions)} & {each.name for each in fields(Export)}
        options = ConvertOptions(**{name: getattr(self._export, name) for name in names})
        target = self._root.child(wanted.name)
        if not _is_whole(target):
            convert_on(Ranks(None), wanted.url, target.url, "huggingface", options)
        self._root.publish(RECORD_NAME, json.dumps({"name": wanted.name, "value": wanted.value}).encode())
        for name in self._root.names():
            if name != wanted.name and parse_id(name) is not None:
                if json.loads(self._root.read_record(RECORD_NAME))["name"] != wanted.name:
                    return  # another process of the run has exported meanwhile, and that is what counts
                _remove(self._root.child(name))

    def _value_of_export(self) -> float | None:
        """Returns the metric of the existing export; None if there is none that counts."""
        try:
            record = json.loads(self._root.read_record(RECORD_NAME)) if self._root.exists(RECORD_NAME) else None
            if record is None or record["value"] is None or not _is_whole(self._root.child(str(record["name"]))):
                return None
            return float(record["value"])
        except (ValueError, TypeError, LookupError, CorruptionError) as error:
            _log.warning("%s/%s is not what was written (%s): written again", self._root.url, RECORD_NAME, error)
            return None


def _is_whole(export: Storage) -> bool:
    names = export.names()
    return f"model{DATA_SUFFIX}" in names or f"model{DATA_SUFFIX}.index.json" in names


def _remove(export: Storage) -> None:
    """Removes an export, its config first. Other files stay, and with them the directory."""
    for name in sorted(filter(_OWN_FILES.fullmatch, export.names()), key=lambda name: not name.endswith(".json")):
        export.remove(name)
    export.remove_if_empty()
