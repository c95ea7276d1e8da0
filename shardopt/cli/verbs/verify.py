"""`shardopt verify`: reads every byte of checkpoints and compares all checksums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shardopt.checkpoint.converting.verify import verify as verify_checkpoint
from shardopt.checkpoint.progress import progress_bar
from shardopt.checkpoint.text import plural
from shardopt.cli.output import Output, Span
from shardopt.errors import ShardoptError


def verify(output: Output, *, urls: Sequence[str]) -> int:
    """Verifies each checkpoint, even after a damaged or missing one; status 1 if there is any such."""
    results = [_verify(output, url) for url in urls]
    output.data({"checkpoints": results})
    return 0 if all(result["ok"] for result in results) else 1


def _verify(output: Output, url: str) -> dict[str, Any]:
    try:
        with progress_bar("verifying") as progress:
            report = verify_checkpoint(url, progress=progress)
    except ShardoptError as error:
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
