"""`shardopt follow`: prints each step of a run or a stream as it is committed."""

from __future__ import annotations

from collections import Counter
from typing import Any

from shardopt.checkpoint.format.constants import DCP_METADATA_NAME, MANIFEST_NAME
from shardopt.checkpoint.run.branches import CheckpointId
from shardopt.checkpoint.sources.own import read_manifest
from shardopt.checkpoint.storage import storage_of
from shardopt.checkpoint.stream.root import Published, StreamRoot
from shardopt.checkpoint.text import nbytes_text, plural, seconds_text
from shardopt.cli.output import Output, Span
from shardopt.errors import CheckpointNotFoundError, CorruptionError, OptionError, Problem, UnreadableError
from shardopt.world import utc_text, world

_MOST_LOOKS = 10
"""At a step that a disk fails to return: then it is passed over, as one that is damaged."""


def follow(output: Output, *, url: str, count: int | None, every: float) -> int:
    """Prints what is newest, and each later step that a look finds, until so many were printed or it is interrupted.

    Raises:
        OptionError: the numbers are out of range, or this is a checkpoint.
    """
    if every <= 0 or (count is not None and count < 1):
        found, required = f"{every:g} and {count}", "more than 0 seconds, and at least 1 step"
        raise OptionError("invalid arguments", [Problem("--every, --count", found, required, "give other numbers")])
    root, printed, seen, failed = StreamRoot(storage_of(url)), 0, None, Counter[Published]()
    told = False
    while count is None or printed < count:
        newest = root.newest()
        if newest is None and not told:
            told = True
            _refuse_checkpoint(root)
            where = root.url if root.is_there() else f"{root.url}, which is no directory"
            output.complain(f"there is no step in {where}: waiting for the first one")
        for each in [] if newest is None or newest == seen else _since(root, seen, newest):
            if printed == count:
                break
            try:
                step = _figures(root, each.id)
            except CheckpointNotFoundError:  # removed meanwhile: then there is a newer one
                continue
            except CorruptionError as error:
                failed[each] += 1
                is_for_now = isinstance(error, UnreadableError) and failed[each] < _MOST_LOOKS
                if each == newest and not is_for_now:
                    raise
                if failed[each] == 1:
                    output.complain(str(error))
                if is_for_now:
                    break  # the next look takes it up again
                continue
            seen, printed = each, printed + 1
            output.line(*_line(step))
            output.data(step)
            output.finish()
        if count is None or printed < count:
            world().sleep(every)
    return 0


def _refuse_checkpoint(root: StreamRoot) -> None:
    """Raises OptionError if this is a checkpoint itself, to which no step is ever added."""
    if any(name in root.seen.names for name in (MANIFEST_NAME, DCP_METADATA_NAME)):
        parent = root.storage.parent()
        remedy = "give another path" if parent is None else f"give {parent[0].url}"
        problem = Problem(root.url, "a checkpoint", "the root of a run or of a Publisher", remedy)
        raise OptionError("nothing can be followed", [problem])


def _since(root: StreamRoot, seen: Published | None, newest: Published) -> list[Published]:
    """Returns the steps after the one that was seen; the newest alone if there is none, or the run was taken back."""
    if seen is None or seen.stream != newest.stream or not newest.is_after(seen):
        return [newest]
    listed = [Published(id, newest.stream) for id in root.ids()]
    branches = root.branches()
    between = [each for each in listed if branches.has(each.id) and each.is_after(seen) and newest.is_after(each)]
    return [*between, newest]


def _figures(root: StreamRoot, newest: CheckpointId) -> dict[str, Any]:
    manifest, _ = read_manifest(root.checkpoint(newest))
    layouts = {id(each.layout): each.layout for each in manifest.tensors.values()}.values()
    return {
        "step": newest.step,
        "branch": newest.branch,
        "url": root.checkpoint(newest).url,
        "bytes": sum(file.nbytes for file in manifest.own_files),
        "bytes_beside": sum(file.nbytes for file in manifest.referred_files),
        "deltas": max((len(entry.deltas) for layout in layouts for entry in layout.entries), default=0),
        "saved_at": manifest.saved_at,
        "age_seconds": None if manifest.saved_at is None else world().wall_clock() - manifest.saved_at,
        "seconds": manifest.seconds,
    }


def _line(step: dict[str, Any]) -> list[str | Span]:
    kind = f"{plural(step['deltas'], 'delta')} after an anchor" if step["deltas"] else "whole"
    parts = [f": {nbytes_text(step['bytes'])}, {kind}"]
    if step["seconds"] is not None:
        parts.append(f", written in {seconds_text(step['seconds'])}")
    if step["saved_at"] is not None:
        age = seconds_text(max(step["age_seconds"], 0.0))
        parts.append(f", committed on {utc_text(step['saved_at'])}, {age} ago")
    return [Span(f"step {step['step']}", "bold"), "".join(parts)]
