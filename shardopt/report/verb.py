"""`shardopt report`: writes a run and a checkpoint as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardopt.checkpoint.text import nbytes_text, plural
from shardopt.cli.output import Output, Span
from shardopt.cli.rules import parse_rules
from shardopt.errors import OptionError, Problem
from shardopt.report.gathering import report_document
from shardopt.runtime.late import late

if TYPE_CHECKING:
    from shardopt.report import html
else:
    html = late("shardopt.report.html")  # needs the extra `report`, and `--json` does not


def report(
    output: Output,
    *,
    urls: Sequence[str],
    out: str | None,
    against: str | None,
    values: bool,
    log: Sequence[str] | None,
    **of_rules: Any,
) -> int:
    """Writes a report, and prints what a reader should look at first."""
    if out is None and not output.as_json:
        problem = Problem("--out", "no file", "a file to write, or --json", "add -o report.html")
        raise OptionError("invalid arguments", [problem])
    page_of = None if out is None else html.page_of  # before the bytes are read, which may take long
    rules = parse_rules(**of_rules)
    document = report_document(urls, against, values, log or (), rules)
    if out is not None and page_of is not None:
        data = page_of(document).encode("utf-8", "backslashreplace")  # paths may have bytes that are no text
        with open(out, "wb") as file:
            file.write(data)
        output.line(Span(out, "bold"), f": {nbytes_text(len(data))}, {plural(len(document['findings']), 'finding')}")
    for each in document["findings"]:
        output.line(f"{each['kind']}: {each['text']}")
    output.data(document)
    return 0
