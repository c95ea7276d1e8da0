"""`shardopt verify`: reads every byte of checkpoints and compares all checksums."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from shardopt.checkpoint.converting.verify import verify as verify_checkpoint
from shardopt.checkpoint.format.constants import FILE_NAME
from shardopt.checkpoint.progress import progress_bar
from shardopt.checkpoint.run.branches import parse_id
from shardopt.checkpoint.run.metrics import record_name
from shardopt.checkpoint.run.root import Root
from shardopt.checkpoint.sources.referred import referred_in
from shardopt.checkpoint.storage import Storage, is_temporary, storage_of, wrap_os_errors
from shardopt.checkpoint.text import plural
from shardopt.cli.output import Output, Span
from shardopt.errors import CheckpointError, CheckpointNotFoundError, ShardoptError


def verify(output: Output, *, urls: Sequence[str]) -> int:
    """Verifies each checkpoint, and all steps of the root of a run; continues after a damaged or missing one.

    What the pattern `ROOT/step-*` also names is told: metrics, and steps without a manifest, as of a save under way.

    Returns:
        1 if one is damaged or missing, or nothing is complete. A step without a manifest counts as missing unless
        another step of its root is complete; so does one that has gone meanwhile, as by retention, unless a higher one
        is, and one that is not there at the beginning.
    """
    results, unfinished = list[dict[str, Any]](), list[tuple[str, str]]()
    for url, was_there in [(each, each != given or _is_there(each)) for given in urls for each in _steps_of(given)]:
        try:
            root, _, name = storage_of(url).url.rpartition("/")
        except ShardoptError:  # it cannot be opened, as the verification says
            root = name = ""
        if parse_id(name.removesuffix(record_name(""))) and not parse_id(name):
            output.line(f"{url}: metrics of a step, and no checkpoint")
        elif parse_id(name) and _is_unfinished(storage_of(url), was_there):
            unfinished.append((root, url))
        else:
            result = _verify(output, url, may_be_gone=was_there)
            if result["ok"] is None:
                unfinished.append((root, url))
            else:
                results.append(result)
    complete = {str(result["url"]).rpartition("/")[0] for result in results if result["ok"]}
    for root, url in unfinished:
        if root not in complete:
            results.append(_verify(output, url))
            continue
        what = "a save is under way, or broke off, or it was removed"
        if _is_base(storage_of(url)):
            what = "a removed step, of which later ones need these files"
        output.line(f"{url}: ", Span(f"no manifest: {what}", "yellow"))
        results.append({"url": url, "ok": None})
    output.data({"checkpoints": results})
    return 0 if complete and all(result["ok"] is not False for result in results) else 1


def _steps_of(url: str) -> list[str]:
    """Returns the URLs of all steps under the root of a run; the URL itself where it is none."""
    try:
        root = Root(storage_of(url))
        ids = root.ids()
    except ShardoptError:  # which the verification names, if it is a checkpoint
        return [url]
    return [root.checkpoint(id).url for id in ids] or [url]


def _is_there(url: str) -> bool:
    try:
        return Root(storage_of(url)).is_there()
    except (OSError, ShardoptError):  # as above
        return True


def _is_unfinished(step: Storage, was_there: bool) -> bool:
    """Whether a directory has no manifest, and nothing else that makes a checkpoint.

    Args:
        was_there: at the beginning.
    """
    try:
        with wrap_os_errors(f"look into {step.url}"):
            names = set(step.names())
    except CheckpointError:
        return False
    if step.missing_target() is not None:
        return False  # whose bytes nobody can verify now
    ours = {name for name in names if FILE_NAME.fullmatch(name) or is_temporary(name)}
    return names == ours and was_there


def _is_base(step: Storage) -> bool:
    """Whether checkpoints beside it refer to its files."""
    with suppress(ShardoptError, OSError):
        return bool(referred_in(step))
    return False


def _is_outlived(step: Storage) -> bool:
    """Whether this is named as a step, and a higher one beside it is complete: retention removes lower ones."""
    parent = step.parent()
    id = None if parent is None else parse_id(parent[1])
    if parent is None or id is None:
        return False
    root = Root(parent[0])
    try:
        with wrap_os_errors(f"look into {root.url}"):
            return any(each.step > id.step and root.is_committed(each) for each in reversed(root.ids()))
    except CheckpointError:
        return False


def _verify(output: Output, url: str, may_be_gone: bool = False) -> dict[str, Any]:
    """Verifies one, and returns the result as JSON.

    Args:
        may_be_gone: whether nothing is said of a step that retention may have removed; `ok` is None then.
    """
    try:
        with progress_bar("verifying") as progress:
            report = verify_checkpoint(url, progress=progress)
    except ShardoptError as error:
        if may_be_gone and isinstance(error, CheckpointNotFoundError) and _is_outlived(storage_of(url)):
            return {"url": url, "ok": None}
        output.error(error)
        return {"url": url, "ok": False, "error": error.to_json()}
    for problem in report.problems:
        output.complain(str(problem))
    for name in report.remains:
        output.complain(f"{report.url}/{name}: a data file of another save, which torch's own reader takes too")
    style = "bold red" if report.problems else "yellow" if report.bytes_without_checksum else "green"
    verdict = Span(report.verdict, style)
    read = f"{plural(report.tensors, 'tensor')}, {plural(report.files, 'file')}, {report.bytes_read:,} bytes"
    output.line(f"{report.url}: {read}: ", verdict)
    figures = {name: value for name, value in asdict(report).items() if name not in ("url", "problems")}
    return {"url": report.url, "ok": report.ok, **figures, "problems": [asdict(each) for each in report.problems]}
