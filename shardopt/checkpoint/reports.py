"""Reports of saves, loads, verifications, reshardings and uploads, and their way to the log and to listeners.

The log is that of `logging.getLogger("shardopt")`, at INFO: one line for each on every rank that took part, such as

    save url=s3://bucket/run/step-00000500 save_id=… tensors=412 bytes_written=… seconds=1.934 … gb_per_second=4.204

What is of interest to everybody, such as the checkpoint that a job was restored from, is a line of rank 0 alone. In a
program that has not configured logging it goes to stderr, since Python then shows warnings only.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from shardopt.redaction import redacted

Listener = Callable[[str, Any], object]
"""Called with the operation ("save", "load", "verify", "reshard", "convert", "upload", "copy") and its report."""

_log = logging.getLogger("shardopt")
_listeners: list[Listener] = []


class OfUrl:
    """A report of what was done at a URL, without its password or signature."""

    __slots__ = ()
    url: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", redacted(self.url))


@dataclass(frozen=True, slots=True)
class SaveReport(OfUrl):
    """The report of a save.

    Args:
        url: where the checkpoint is.
        save_id: the unique name of this save, which begins the names of its data files.
        tensors: how many tensors the checkpoint holds.
        bytes_written: by this rank.
        bytes_total: by all ranks, headers and checksums included.
        seconds: on this rank, from the call to the commit.
        stall_seconds: how long the program was kept from its work: all the time by `save`; by `async_save` in the call
            itself, and before a step that came while state was still being copied.
        staging_seconds: from the call until all of this rank's state was copied to host memory; `save` copies nothing.
        writing_seconds: for writing the data files, and until every rank had written and the manifest was there.
        bytes_unchanged: of tensors that this rank did not write, since an earlier save has them (`base=`).
    """

    url: str
    save_id: str
    tensors: int
    bytes_written: int
    bytes_total: int
    seconds: float
    stall_seconds: float = 0.0
    staging_seconds: float = 0.0
    writing_seconds: float = 0.0
    bytes_unchanged: int = 0


@dataclass(frozen=True, slots=True)
class LoadReport(OfUrl):
    """The report of a load, on this rank.

    Args:
        url: where the checkpoint is.
        save_id: the unique name of the save that it is of.
        loaded: the keys that were loaded.
        missing: keys of the app that the checkpoint has not; left as they were (`strict=False`).
        unexpected: keys of the checkpoint that the app has on no rank; left out (`strict=False`).
        cast: keys of tensors that were converted to the app's dtype.
        renamed: key of the app → key in the checkpoint, where they differ.
        bytes_wanted: of tensors, on this rank.
        bytes_read: from data files, on this rank; the ends of checksummed segments and strided reads add to it.
        seconds: on this rank.
        world_size: of the job that saved it.
        saved_at: when it was saved, in seconds since 1970 began; None where that is not known.
        left_out: stored keys, and sections of tensors, that rules of `rearrange` leave out.
        save_seconds: how long the save took, on its rank 0; None where that is not known.
        rename_rules: the rules of `rename` that the names in the app have been through: those that the checkpoint
            tells of, and those that were given; None where none are, and the checkpoint has no record of such.
    """

    url: str
    save_id: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    cast: tuple[str, ...]
    renamed: Mapping[str, str]
    bytes_wanted: int
    bytes_read: int
    seconds: float
    world_size: int
    saved_at: float | None
    left_out: tuple[str, ...] = ()
    save_seconds: float | None = None
    rename_rules: tuple[tuple[str, str], ...] | None = None


@dataclass(frozen=True, slots=True)
class CopyReport(OfUrl):
    """The report of copies on other hosts: each file of a checkpoint is on as many as its tier asks for, or on all.

    Args:
        url: of the checkpoint on its tier.
        save_id: of the checkpoint.
        copies: on how many hosts its files are.
        bytes_total: of the checkpoint's files.
        seconds: on this rank, from its turn until all hosts had theirs.
    """

    url: str
    save_id: str
    copies: int
    bytes_total: int
    seconds: float


def add_listener(listener: Listener) -> Callable[[], None]:
    """Adds a listener that gets every report of this process; returns a function that removes it.

    For TensorBoard:

        def to_tensorboard(event, report):
            for name, value in checkpoint.report_metrics(report).items():
                writer.add_scalar(f"checkpoint/{event}/{name}", value, app["step"])

        checkpoint.add_listener(to_tensorboard)

    Args:
        listener: called with the event ("save", "load", …) and its report when the work is done, by the thread that did
            it: for `async_save` and uploads one in the background. An exception that it raises is logged, and does no
            harm to the work.
    """
    _listeners.append(listener)

    def remove() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return remove


def report_metrics(report: Any) -> dict[str, float]:
    """Returns the numbers of a report by name.

    Bytes, seconds, and `gb_per_second` (10⁹ bytes) of the bytes of all ranks; where a report does not know of all
    ranks, as that of a load, of this rank's bytes.

    Args:
        report: of a save, a load, a verification or any other work.
    """
    values = {field.name: getattr(report, field.name) for field in fields(report)}
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    nbytes = numbers.get("bytes_total", numbers.get("bytes_read", 0))
    seconds = numbers.get("seconds", 0.0)
    return {**numbers, "gb_per_second": nbytes / seconds / 1e9 if seconds else 0.0}


def emit_report(event: str, report: Any) -> None:
    """Logs a report, and hands it to the listeners."""
    if _log.isEnabledFor(logging.INFO):
        texts = {name: getattr(report, name) for name in ("url", "save_id") if hasattr(report, name)}
        words = [f"{name}={value}" for name, value in texts.items()]
        numbers = report_metrics(report).items()
        words += [f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in numbers]
        _log.info("%s %s", event, " ".join(words))
    for listener in tuple(_listeners):
        try:
            listener(event, report)
        except Exception:  # of somebody else's code, which is no reason to lose a checkpoint
            _log.exception("a listener failed with the report of a %s", event)


def announce(text: str) -> None:
    """Logs a line at INFO; in a program that has configured no logging, prints it on stderr."""
    _log.info(text)
    if _has_no_logging():
        print(f"shardopt: {redacted(text)}", file=sys.stderr, flush=True)


def _has_no_logging() -> bool:
    """Whether a line at INFO is lost because logging is not configured, and not by a handler, a level, or a switch."""
    if (
        _log.hasHandlers()
        or _log.disabled
        or logging.lastResort is None
        or logging.root.manager.disable >= logging.INFO
    ):
        return False
    return _log.isEnabledFor(logging.INFO) or (_log.level == logging.NOTSET and logging.root.level == logging.WARNING)
