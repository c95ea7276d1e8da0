"""`shardopt explain`: prints sections of docs/troubleshooting.md, which is part of the package.

Nothing here wants torch, a network or the repository: `troubleshooting.md` beside this file is a link to the page, and
in an installed package a copy of it.
"""

from __future__ import annotations

import difflib
import re
from importlib import resources

from shardopt.cli.output import Output, Span
from shardopt.errors import OptionError, Problem

_SECTION = re.compile(r"^### (\S+)\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
_MESSAGE = re.compile(r"- Message: (.*?)\.\s", re.DOTALL)
_LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")


def explain(output: Output, code: str | None) -> int:
    """Prints the section of a code, or a line for each code."""
    sections = sections_of_page()
    if code is None:
        messages = {name: _first_sentence(text) for name, text in sections.items()}
        output.data({"codes": messages})
        output.table([(Span(name, "bold"), text) for name, text in messages.items()])
        return 0
    name = code.strip("[]")
    if name not in sections:
        near = difflib.get_close_matches(name, sections, 1)
        remedy = f"did you mean {near[0]}?" if near else "`shardopt explain` lists all of them"
        raise OptionError("there is no such code", [Problem("code", repr(code), "one that an error ends with", remedy)])
    output.data({"code": name, "text": sections[name]})
    output.line(Span(name, "bold"))
    output.text(sections[name])
    return 0


def sections_of_page() -> dict[str, str]:
    """Returns the text of each section by its code, in page order; links become names of pages."""
    page = resources.files("shardopt.cli").joinpath("troubleshooting.md").read_text(encoding="utf-8")
    return {code: _plain(text) for code, text in _SECTION.findall(page)}


def _first_sentence(section: str) -> str:
    message = _MESSAGE.match(section)
    return " ".join(message[1].split()) if message else ""


def _plain(text: str) -> str:
    return _LINK.sub(_named, text).replace("**", "").strip()


def _named(link: re.Match[str]) -> str:
    text, target = link.groups()
    return text if target.startswith("#") else f"{text} (docs/{target})"
