"""Verbs of the command line as data, of which either parser is made. Nothing here imports what a verb runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a verb: an argument by position, or an option.

    Args:
        name: of the parameter of the verb's function; of an option also its name in the shell, with dashes.
        help: one line.
        kind: str, int or bool; an option of bool is a switch.
        positional: whether it is an argument by position.
        required: whether a call without it is wrong.
        many: whether there may be several, which the function gets as a list.
        metavar: its sign in the help; None for the name in capitals.
        short: a short form of an option, such as "-o".
    """

    name: str
    help: str
    kind: type[str] | type[int] | type[bool] = str
    positional: bool = False
    required: bool = False
    many: bool = False
    metavar: str | None = None
    short: str | None = None

    @property
    def flags(self) -> list[str]:
        """The spellings of an option."""
        return ["--" + self.name.replace("_", "-"), *([self.short] if self.short else [])]

    @property
    def sign(self) -> str:
        """What stands for its value in the help."""
        return self.metavar or self.name.upper()

    @property
    def default(self) -> Any:
        """Its value where it is not given."""
        return False if self.kind is bool else None


JSON = Parameter("json", "print one JSON document in the place of text", kind=bool)


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb of the command line.

    Args:
        name: "show"; of a group of verbs two words, "plot run".
        help: one line.
        function: "module:function", imported when the verb is called; it takes an `Output` and the parameters by name,
            and returns the exit status.
        parameters: without `--json`, which every verb has.
    """

    name: str
    help: str
    function: str
    parameters: tuple[Parameter, ...]

    @property
    def all_parameters(self) -> tuple[Parameter, ...]:
        """The parameters, and `--json`."""
        return (*self.parameters, JSON)


def argument(
    name: str, help: str, *, required: bool = True, many: bool = False, metavar: str | None = None
) -> Parameter:
    """Declares an argument by position."""
    return Parameter(name, help, positional=True, required=required, many=many, metavar=metavar)


def option(
    name: str,
    help: str,
    *,
    kind: type[str] | type[int] = str,
    required: bool = False,
    many: bool = False,
    metavar: str | None = None,
    short: str | None = None,
) -> Parameter:
    """Declares an option with a value."""
    return Parameter(name, help, kind, required=required, many=many, metavar=metavar, short=short)


def switch(name: str, help: str) -> Parameter:
    """Declares an option without a value."""
    return Parameter(name, help, bool)
