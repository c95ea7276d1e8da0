"""Weights by name, as a publisher gives them and a follower has them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shardopt.checkpoint.loading.renaming import renamer
from shardopt.checkpoint.rearrange.rules import AnyRule
from shardopt.errors import OptionError, Problem
from shardopt.state.versions import notes_of, with_notes

Weights = nn.Module | Mapping[str, Tensor]
"""A module, of which parameters and persistent buffers count; or tensors by name."""


def rename_problems(rename: Any) -> list[Problem]:
    """Returns the problems with rules of names."""
    remedy = 'give it as in {r"^model\\.": ""}'
    if rename is None:
        return []
    if not isinstance(rename, Mapping):
        return [Problem("rename", repr(rename)[:80], "a mapping from regex to replacement", remedy)]
    problems = []
    for pattern, into in rename.items():
        found = f"{pattern!r}: {into!r}"[:80]
        if not isinstance(pattern, str) or not isinstance(into, str):
            problems.append(Problem("rename", found, "text in both", remedy))
            continue
        try:
            re.compile(pattern)
        except re.error as error:
            problems.append(Problem("rename", f"{found} ({error})", "a regex", remedy))
    return problems


def rearrange_problems(rearrange: Any) -> list[Problem]:
    """Returns the problems with rules of tensors."""
    is_several = isinstance(rearrange, Sequence) and not isinstance(rearrange, str)
    if is_several and all(isinstance(each, AnyRule) for each in rearrange):
        return []
    return [Problem("rearrange", repr(rearrange)[:80], "rules", "give them as for load")]


def weights_of(model: Any, argument: str) -> dict[str, Tensor]:
    """Returns the tensors of a module or mapping by name, with notes of versions; tied ones are one object.

    Raises:
        OptionError: it is neither, or has something else than tensors.
    """
    named = model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else model
    found = type(model).__name__
    if isinstance(named, Mapping):
        others = [name for name, each in named.items() if not isinstance(name, str) or not isinstance(each, Tensor)]
        if not others or isinstance(model, nn.Module):
            return with_notes({name: each for name, each in named.items() if name not in others}, notes_of(named))
        found = f"{found} with {str(others[0])[:80]!r}: {type(named[others[0]]).__name__}"
    problem = Problem(argument, found, "a module, or tensors by name", "pass the model, or its state_dict()")
    raise OptionError("invalid arguments", [problem])


def renamed(weights: Mapping[str, Tensor], rename: Mapping[str, str]) -> dict[str, Tensor]:
    """Returns weights under their new names.

    Raises:
        OptionError: two names become one.
    """
    served: dict[str, Tensor] = {}
    was: dict[str, str] = {}
    rules = renamer(rename)
    for name, tensor in weights.items():
        new = rules(name)
        if new in served:
            problem = Problem(new, f"{was[new]} and {name}", "a name for each", "mend the rules of rename")
            raise OptionError("two weights would have one name", [problem])
        served[new], was[new] = tensor, name
    return served
