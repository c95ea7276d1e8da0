"""The output of a verb: lines of spans, plain or in colours, or one JSON document.

Spans are text and never markup. What a terminal would take for a command is escaped, as keys and values come from
files. Nothing is cut to a width, so that what is piped into another program is whole.
"""

from __future__ import annotations

import json
import math
import os
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from shardopt.errors import ShardoptError
from shardopt.redaction import redacted

if TYPE_CHECKING:
    from rich.console import Console

_WIDEST_PADDED = 60  # a column of one very long key does not push away those beside it in all other rows


class Span(NamedTuple):
    """A text with one of rich's styles: "bold", "dim", "red" or others; "" for none."""

    text: str
    style: str = ""


Cell = str | Span
Line = Sequence[Cell]


class ReaderGone(Exception):
    """The program that reads the output has ended."""


class Unwritten(Exception):
    """Output cannot be written, as on a full disk."""


class Output:
    """Prints the output of a verb.

    Args:
        as_json: whether `data` prints, and lines do not.
        console: of rich, to print to; None for stdout, in colours where that is a terminal.
    """

    def __init__(self, as_json: bool = False, console: Console | None = None) -> None:
        self.as_json = as_json
        self._console = console if console is not None else _terminal()

    def line(self, *spans: Cell) -> None:
        """Prints a line."""
        if not self.as_json:
            self._print(spans)

    def text(self, text: str) -> None:
        """Prints a text of several lines."""
        for line in text.split("\n"):
            self.line(line)

    def table(self, rows: Sequence[Line], right: Iterable[int] = ()) -> None:
        """Prints rows with aligned columns.

        Args:
            right: the columns whose texts end in one place, as numbers do.
        """
        right = set(right)
        table = [[_span(cell) for cell in row] for row in rows]
        for row in table:
            while row and not row[-1].text:
                row.pop()
        widths: defaultdict[int, int] = defaultdict(int)
        for row in table:
            for i, cell in enumerate(row):
                if i in right or i < len(row) - 1:  # a cell that ends a line takes no room from other lines
                    widths[i] = max(widths[i], min(cell_width(cell.text), _WIDEST_PADDED))
        for row in table:
            spans: list[Span] = []
            for i, cell in enumerate(row):
                padding = Span(" " * (widths[i] - cell_width(cell.text)))
                spans += [Span("  ")] * (i > 0)
                spans += [padding, cell] if i in right else [cell, padding] if i < len(row) - 1 else [cell]
            self.line(*spans)

    def data(self, document: Mapping[str, Any]) -> None:
        """Prints the JSON document of the verb, if it was asked for."""
        if self.as_json:
            self._write(json.dumps(json_form(document), indent=2, allow_nan=False) + "\n")

    def fail(self, error: BaseException) -> None:
        """Prints an error on stderr; its JSON form on stdout, if it was asked for."""
        self.error(error)
        if self.as_json:
            plain = {"type": type(error).__name__, "message": str(error), "problems": []}
            self.data({"error": error.to_json() if isinstance(error, ShardoptError) else plain})

    def error(self, error: BaseException) -> None:
        """Prints an error on stderr, with the command that explains it."""
        self.complain(_with_verb(error) if isinstance(error, ShardoptError) else str(error) or type(error).__name__)

    def complain(self, text: str) -> None:
        """Prints a text on stderr."""
        for i, line in enumerate(redacted(text).split("\n")):
            print(_encodable("shardopt: " * (i == 0) + escaped(line), sys.stderr), file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Flushes all output."""
        self._write("")

    def _print(self, spans: Sequence[Cell]) -> None:
        plain = [Span(escaped(redacted(span.text)), span.style) for span in map(_span, spans)]
        if self._console is None:
            self._write("".join(span.text for span in plain).rstrip() + "\n")
        else:
            from rich.text import Text  # slow to import, and there where a console is

            self._console.print(Text.assemble(*plain), soft_wrap=True, highlight=False)

    def _write(self, text: str) -> None:
        try:
            sys.stdout.write(_encodable(text, sys.stdout))
            if not text:
                sys.stdout.flush()
        except BrokenPipeError:
            raise ReaderGone from None
        except OSError as error:
            raise Unwritten(f"cannot write to stdout: {error.strerror or error}") from None


def _terminal() -> Console | None:
    """Returns a console for colours, if stdout is a terminal with colours."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return None
    try:
        from rich.console import Console  # of the extra `cli`
    except ModuleNotFoundError:
        return None
    return Console(markup=False, emoji=False, highlight=False)


def escaped(text: str) -> str:
    """Returns a text with control and other unprintable characters escaped, as in a literal."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def cell_width(text: str) -> int:
    """Returns the number of terminal columns that a text takes."""
    text = escaped(text)
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Returns ascending numbers as runs without gaps: the first and the last number of each."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        first = runs.pop()[0] if runs and number == runs[-1][1] + 1 else number
        runs.append((first, number))
    return runs


def shortened(text: str, most: int) -> str:
    """Returns the text; if it is too long, its beginning and "…"."""
    return text if len(text) <= most else text[: most - 1] + "…"


def _span(cell: Cell) -> Span:
    return cell if isinstance(cell, Span) else Span(cell)


def _with_verb(error: ShardoptError) -> str:
    """Returns an error with the command that explains it in place of its code; one problem takes one line."""
    code = f"[{error.code}]"
    text = f"{error.message}: {error.problems[0]} {code}" if len(error.problems) == 1 else str(error)
    return text.replace(code, f"[shardopt explain {error.code}]", 1)


def _encodable(text: str, stream: TextIO) -> str:
    """Returns the text with characters that the stream cannot encode escaped."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def json_form(value: Any) -> Any:
    """Returns a value for JSON: numbers that JSON lacks become "nan", "inf" and "-inf"; URLs lose their secrets.

    Each text is redacted by itself: in the whole document a URL would reach beyond its quotes.
    """
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {redacted(str(key)): json_form(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_form(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
