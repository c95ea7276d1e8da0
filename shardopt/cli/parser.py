"""The parser of the command line, built from the table of verbs."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from shardopt.cli.table import IMPORT, JSON, VERBS, Argument, Verb
from shardopt.errors import OptionError, ShardoptError


def parse(arguments: Sequence[str], version: str) -> tuple[Verb, dict[str, Any]]:
    """Returns the verb of a command line, and its arguments by name.

    Where a shell asks for completions, they are printed to it instead (argcomplete, of the extra `cli`).

    Raises:
        SystemExit: a wrong call (2), or help or the version was printed.
    """
    parser = _parser(version)
    if "_ARGCOMPLETE" in os.environ:
        _complete(parser)
    found, unknown = parser.parse_known_args(arguments)
    values = vars(found)
    own: _Parser = values.pop("parser")
    if unknown:
        own.error(f"unrecognized arguments: {' '.join(unknown)}")
    if "verb" not in values:
        own.print_help(sys.stderr)
        own.exit(2)
    return values.pop("verb"), values


class _Parser(argparse.ArgumentParser):
    """Suggests the nearest verb or option for a misspelt one, and accepts no abbreviated options.

    An abbreviation would become ambiguous, or another option's, with the next option.
    """

    known: list[str]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        self.known = []
        self.set_defaults(parser=self)

    def verbs(self, words: Iterable[str]) -> Any:
        """Stores the names of verbs; returns the object that makes a parser for each."""
        self.known.extend(words)
        return self.add_subparsers(metavar="VERB")

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2."""
        misspelt = re.search(r"(?:invalid choice: '|unrecognized arguments: )([\w-]+)", message)
        near = difflib.get_close_matches(misspelt[1], self.known, 1) if misspelt else []
        super().error(f"{message}; did you mean {near[0]}?" if near else message)


def _parser(version: str) -> _Parser:
    parser = _Parser(
        prog="shardopt",
        description="Looks into checkpoints, compares, verifies and rewrites them.",
        epilog="Every verb has its own help: shardopt VERB --help.",
    )
    parser.add_argument("--version", action="version", version=f"shardopt {version}")
    parser.known.append("--version")
    words: dict[str, list[str]] = {}
    for verb in VERBS:
        first, _, second = verb.name.partition(" ")
        words.setdefault(first, []).extend([second] if second else [])
    commands = parser.verbs(words)
    groups = {}
    for verb in VERBS:
        group, _, name = verb.name.rpartition(" ")
        if group and group not in groups:
            of_group = commands.add_parser(group, help=f"{group} {' or '.join(words[group])}")
            groups[group] = of_group.verbs(words[group])
        command: _Parser = groups.get(group, commands).add_parser(
            name, help=verb.help, description=f"{verb.help[0].upper()}{verb.help[1:]}."
        )
        for names, options in (*verb.arguments, JSON, IMPORT):
            sign = {"metavar": names[0].upper()} if not names[0].startswith("-") else {}
            command.add_argument(*names, **sign | options)
            command.known.extend(names)
        command.set_defaults(verb=verb)
    return parser


def _complete(parser: argparse.ArgumentParser) -> None:
    """Prints completions to the shell that asks for them, and ends the process."""
    try:
        import argcomplete
    except ModuleNotFoundError:
        raise SystemExit(0) from None
    argcomplete.autocomplete(parser)


def put_flags(error: ShardoptError, arguments: Iterable[Argument]) -> None:
    """Replaces argument names in an error by the flags of the verb that made the call.

    "drop_per_rank=True" becomes "--drop-per-rank", and "skip=..." becomes "--skip ...".
    """
    flags = {flag[2:].replace("-", "_"): flag for each in arguments for flag in each.names if flag.startswith("--")}
    of_arguments = flags if isinstance(error, OptionError) else {}  # else "steps" may be a stored key
    error.problems = tuple(
        replace(
            each,
            key=of_arguments.get(each.key) or _with_flags(each.key, flags, in_key=True),
            remedy=_with_flags(each.remedy, flags),
        )
        for each in error.problems
    )


def _with_flags(text: str, flags: Mapping[str, str], in_key: bool = False) -> str:
    if in_key and not re.match(rf"({'|'.join(flags)})(=|$)", text):
        return text  # a path or a stored key
    for name, flag in flags.items():
        text = re.sub(rf"(?<![\w-]){name}=True\b", flag, text)
        text = re.sub(rf"(?<![\w-]){name}=(?=[^\s,;)])", f"{flag} ", text)
        text = re.sub(rf"(?<![\w-]){name}=", flag, text)
        if "_" in name:  # "select" may be a word of a sentence
            text = re.sub(rf"(?<![\w-]){name}\b", flag, text)
    return text
