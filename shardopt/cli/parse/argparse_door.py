"""The command line by the standard library alone, where the extra `cli` is not installed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardopt.cli.parse.declared import Parameter, Verb

Call = Callable[[Verb, Mapping[str, Any]], int]
"""Runs a verb with its parameters by name; returns the exit status."""


def run(verbs: Sequence[Verb], arguments: Sequence[str], version: str, call: Call) -> int:
    """Parses and runs a command line; returns the exit status. Raises SystemExit (2) for a wrong call."""
    parser = argparse.ArgumentParser(
        prog="shardopt", description="Looks into checkpoints, compares, verifies and rewrites them."
    )
    parser.add_argument("--version", action="version", version=f"shardopt {version}")
    commands = parser.add_subparsers(required=True, metavar="VERB")
    groups: dict[str, Any] = {}
    for verb in verbs:
        group, _, name = verb.name.rpartition(" ")
        if group and group not in groups:
            words = [each.name.split(" ")[1] for each in verbs if each.name.startswith(f"{group} ")]
            of_group = commands.add_parser(group, help=f"{group} {' or '.join(words)}")
            groups[group] = of_group.add_subparsers(required=True, metavar="VERB")
        command = groups.get(group, commands).add_parser(name, help=verb.help, description=verb.help)
        for parameter in verb.all_parameters:
            _add(command, parameter)
        command.set_defaults(verb=verb)
    values = vars(parser.parse_args(arguments))
    return call(values.pop("verb"), values)


def _add(command: argparse.ArgumentParser, parameter: Parameter) -> None:
    name, text = parameter.name, parameter.help.replace("%", "%%")
    if parameter.positional:
        count = ("+" if parameter.required else "*") if parameter.many else (None if parameter.required else "?")
        command.add_argument(name, help=text, nargs=count, metavar=parameter.sign, type=parameter.kind)
    elif parameter.kind is bool:
        command.add_argument(*parameter.flags, dest=name, help=text, action="store_true")
    else:
        action = "append" if parameter.many else "store"
        options: dict[str, Any] = {"type": parameter.kind, "action": action, "required": parameter.required}
        command.add_argument(*parameter.flags, dest=name, help=text, metavar=parameter.sign, **options)
