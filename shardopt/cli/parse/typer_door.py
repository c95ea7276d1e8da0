"""The command line by typer, with completion and coloured help (the extra `cli`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from shardopt.cli.parse.declared import Parameter, Verb

Call = Callable[[Verb, Mapping[str, Any]], int]
"""Runs a verb with its parameters by name; returns the exit status."""


def run(verbs: Sequence[Verb], arguments: Sequence[str], version: str, call: Call) -> int:
    """Parses and runs a command line, or completes one; returns the exit status.

    Raises:
        SystemExit: a wrong call (2), or help, the version or completions were printed.
    """
    statuses: list[int] = []
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,  # which would show the memory of the program with its stack
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"shardopt {version}")
            raise typer.Exit

    def root(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Print the version."
        ),
    ) -> None:
        """Looks into checkpoints, compares, verifies and rewrites them."""

    app.callback()(root)
    groups: dict[str, typer.Typer] = {"": app}
    for verb in verbs:
        group, _, name = verb.name.rpartition(" ")
        if group not in groups:
            groups[group] = typer.Typer(no_args_is_help=True)
            words = [each.name.split(" ")[1] for each in verbs if each.name.startswith(f"{group} ")]
            app.add_typer(groups[group], name=group, help=f"{group} {' or '.join(words)}")
        groups[group].command(name, help=verb.help)(_command(verb, call, statuses))
    try:
        app(args=list(arguments), prog_name="shardopt")
    except SystemExit:
        if statuses:
            return statuses[0]
        raise
    return 0


def _command(verb: Verb, call: Call, statuses: list[int]) -> Callable[..., None]:
    """Returns a function whose signature typer makes a command of."""

    def command(**values: Any) -> None:
        statuses.append(call(verb, values))

    parameters = [_parameter(each) for each in verb.all_parameters]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what `inspect` looks for
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _parameter(declared: Parameter) -> inspect.Parameter:
    kind: Any = list[declared.kind] if declared.many else declared.kind  # type: ignore[name-defined]  # at run time
    if not declared.required and declared.kind is not bool:
        kind = kind | None
    if declared.positional:
        info = typer.Argument(help=declared.help, metavar=declared.sign, show_default=False)
    elif declared.kind is bool:
        info = typer.Option(*declared.flags, help=declared.help, show_default=False)
    else:
        info = typer.Option(*declared.flags, help=declared.help, metavar=declared.sign, show_default=False)
    default = inspect.Parameter.empty if declared.required else declared.default
    return inspect.Parameter(
        declared.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )
