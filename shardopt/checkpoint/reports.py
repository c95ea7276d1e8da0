"""Reports of saves, loads, verifications, reshardings and uploads, for the log and for listeners.

The log is that of `logging.getLogger("shardopt")`: a line of rank 0 for people at INFO, figures of all at DEBUG.

    saved step 500: 2.2 GB in 1.9 s (training waited 3 ms)
    save url=s3://bucket/run/step-00000500 save_id=… tensors=412 bytes_written=… seconds=1.934 … gb_per_second=4.204

What everybody wants to know, such as the step at which a job resumes, goes to stderr in a program that has not
configured logging, since Python then shows warnings only.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from shardopt.checkpoint.text import nbytes_text, seconds_text
from shardopt.errors import OptionError, Problem
from shardopt.redaction import redacted

Listener = Callable[[str, Any], object]
"""Called with the operation ("save", "load", "verify", "reshard", "convert", "upload", "copy") and its report."""

_log = logging.getLogger("shardopt")
_listeners: list[Listener] = []
_STEP = re.compile(r"(?P<root>.+)/step-(?P<step>\d{8,})(?:-b(?P<branch>\d+))?", re.ASCII | re.DOTALL)


class OfUrl:
    """A report of work at a URL, which it shows without password or signature."""

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
        stall_seconds: how long the program was kept from its work. `save` takes all of the time; `async_save` the call
            itself, and the waits of steps for state that was still being copied.
        staging_seconds: from the call until all of this rank's state was copied to host memory; `save` copies nothing.
        writing_seconds: for writing the data files, and until every rank had written and the manifest was there.
        bytes_unchanged: of tensors that this rank did not write, since an earlier save has them (`base=`).
        metrics: that are kept with the checkpoint, of all ranks.
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
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)


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
        left_out: stored keys, and sections of tensors, that rules of `rearrange` leave out; and state of
            parameters that lacks entries which the app's algorithm needs with the others.
        save_seconds: how long the save took, on its rank 0; None where that is not known.
        rename_rules: the rules of `rename` that the names in the app have been through: those recorded in the
            checkpoint, and those given. None if there are neither.
        merged: keys of state of table rows that was stored for other parts of the columns (`Strictness(row_state=)`).
        frozen: the stored keys of the options of parameters that were frozen in the optimizers that were saved; None
            where that is not known.
        in_eval: the names of layers that were in `eval()`, by the key of their module; None where that is not known.
    """

    url: str
    save_id: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    cast: tuple[str, ...]
    renamed: Mapping[str, str] = field(hash=False)
    bytes_wanted: int
    bytes_read: int
    seconds: float
    world_size: int
    saved_at: float | None
    left_out: tuple[str, ...] = ()
    save_seconds: float | None = None
    rename_rules: tuple[tuple[str, str], ...] | None = None
    merged: tuple[str, ...] = ()
    frozen: tuple[str, ...] | None = None
    in_eval: Mapping[str, tuple[str, ...]] | None = field(default=None, hash=False)


@dataclass(frozen=True, slots=True)
class CopyReport(OfUrl):
    """The report of copies on other hosts: each file is on as many hosts as its tier asks for, or on all.

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
    """Adds a listener for every report of this process; returns a function that removes it.

    For TensorBoard:

        def to_tensorboard(event, report):
            for name, value in checkpoint.report_metrics(report).items():
                writer.add_scalar(f"checkpoint/{event}/{name}", value, app["step"])

        checkpoint.add_listener(to_tensorboard)

    Args:
        listener: called with the event ("save", "load", …) and its report when the work is done, by the thread that did
            it: for `async_save` and uploads one in the background. An exception that it raises is logged, and does no
            harm to the work.

    Raises:
        OptionError: it cannot be called.
    """
    if not callable(listener):
        problem = Problem("listener", repr(listener), "a function of an event and a report", "give one")
        raise OptionError("invalid arguments", [problem])
    _listeners.append(listener)

    def remove() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return remove


def report_metrics(report: Any) -> dict[str, float]:
    """Returns the numbers of a report by name.

    Bytes, seconds, and `gb_per_second` (10⁹ bytes) count the bytes of all ranks. A report that knows only its own rank,
    as that of a load, counts this rank's bytes.

    Args:
        report: of a save, a load, a verification or any other work.
    """
    values = {field.name: getattr(report, field.name) for field in fields(report)}
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    nbytes = numbers.get("bytes_total", numbers.get("bytes_read", 0))
    seconds = numbers.get("seconds", 0.0)
    return {**numbers, "gb_per_second": nbytes / seconds / 1e9 if seconds else 0.0}


def emit_report(event: str, report: Any, for_all: bool = True) -> None:
    """Logs a report, and passes it to the listeners.

    Args:
        for_all: whether this rank has the line for people, as rank 0 has; the figures are logged by each.
    """
    log: Listener = partial(_log_report, for_all=for_all)
    for listener in (log, *_listeners):
        try:
            listener(event, report)
        except Exception:  # of somebody else's code, as a handler of the log is, and no reason to lose a checkpoint
            with suppress(Exception):
                _log.exception("a listener failed with the report of a %s", event)


def _log_report(event: str, report: Any, for_all: bool) -> None:
    if for_all and _log.isEnabledFor(logging.INFO):
        _log.info(_line_of(event, report))
    if _log.isEnabledFor(logging.DEBUG):
        texts = {name: getattr(report, name) for name in ("url", "save_id") if hasattr(report, name)}
        words = [f"{name}={value}" for name, value in texts.items()]
        numbers = report_metrics(report).items()
        words += [f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in numbers]
        _log.debug("%s %s", event, " ".join(words))


def _line_of(event: str, report: Any) -> str:
    """Returns a report as a line for people."""
    root, step = _step_of(report.url)
    numbers = report_metrics(report)
    nbytes = nbytes_text(numbers.get("bytes_total", numbers.get("bytes_read", 0)))
    seconds = seconds_text(report.seconds)
    done, more = {
        "save": (f"saved {step}", ""),
        "load": (f"loaded {step}", " on this rank"),
        "update": (f"updated to {step}", " on this rank"),
        "verify": (f"verified {step}", ""),
        "reshard": (f"resharded into {report.url}", ""),
        "convert": (f"converted into {report.url}", ""),
        "upload": (f"uploaded {step} to {root}", ""),
        "copy": (f"copied {step} between hosts", ""),
    }[event]
    line = f"{done}: {nbytes} in {seconds}{more}"
    waited = numbers.get("stall_seconds", report.seconds)
    if event == "save" and waited < report.seconds:
        line += f" (training waited {seconds_text(waited)})"
    if event == "update":
        line += f" (serving waited {seconds_text(report.pause_seconds)})"
    if event == "verify":
        line += f", {report.verdict}"
    return line


def _step_of(url: str) -> tuple[str, str]:
    """Returns the root of a run and "step 500" for the URL of a checkpoint in a run; else the URL itself."""
    found = _STEP.fullmatch(url)
    if found is None:
        return url, url
    return found["root"], f"step {int(found['step'])}" + (f" of branch {found['branch']}" if found["branch"] else "")


def announce(text: str) -> None:
    """Logs a line at INFO; prints it on stderr if the program has configured no logging."""
    _log.info(text)
    # Not where a handler, a level or a switch of the program's keeps it from being seen.
    is_off = _log.disabled or logging.lastResort is None or logging.root.manager.disable >= logging.INFO
    is_default = _log.level == logging.NOTSET and logging.root.level == logging.WARNING
    if not (_log.hasHandlers() or is_off) and (is_default or _log.isEnabledFor(logging.INFO)):
        with suppress(OSError, ValueError):  # a full disk, a closed stream, letters that its encoding lacks
            print(f"shardopt: {redacted(text)}", file=sys.stderr, flush=True)
