"""Parameters by name: pairs that are checked, and put into groups by pattern."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardopt.errors import AlgorithmError, Problem, StateError
from shardopt.names import plain_name
from shardopt.sharding.gradients import takes_gradient

NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]

_MOST_NAMES = 20


def named(parameters: NamedTensors) -> dict[str, Tensor]:
    """The parameters by `plain_name`, in their order.

    Raises:
        StateError: there are none, they are not pairs of a name and a tensor, or a name comes twice.
    """
    pairs = list(parameters.items() if isinstance(parameters, Mapping) else parameters)
    if not pairs:
        problem = Problem("parameters", "none", "at least one", "pass model.named_parameters()")
        raise StateError("an optimizer got no parameters", [problem])
    by_name: dict[str, Tensor] = {}
    for pair in pairs:
        name, tensor = pair if isinstance(pair, tuple) and len(pair) == 2 else (None, pair)
        if not (isinstance(name, str) and isinstance(tensor, Tensor)):
            problem = Problem("parameters", f"a {type(pair).__name__}", "(name, tensor)", "pass named_parameters()")
            raise StateError("an optimizer got parameters without names", [problem])
        name = plain_name(name)
        if name in by_name:
            problem = Problem(name, "two parameters", "one", "give every parameter a name of its own")
            raise StateError("two parameters have one name", [problem])
        by_name[name] = tensor
    return by_name


def first_names(parameters: Mapping[str, Tensor]) -> dict[Tensor, str]:
    """Tensor → its name; a tensor with several names (tied parameters) goes by the first."""
    names: dict[Tensor, str] = {}
    for name, tensor in parameters.items():
        names.setdefault(tensor, name)
    return names


def refuse_unknown(argument: str, names: Iterable[str], known: Collection[str]) -> None:
    """Refuses names that an optimizer does not have. Raises StateError."""
    unknown = sorted(set(names).difference(known))
    if unknown:
        remedy = "mend their spelling; within combined optimizers the key of each stands before its names"
        problem = Problem(argument, listed(unknown), f"some of {listed(known)}", remedy)
        raise StateError("a name is not known", [problem])


def refuse_non_leaves(parameters: Mapping[str, Tensor], groups: Iterable[Mapping[str, Any]] = ()) -> None:
    """As torch: what autograd computed is not optimized, but by a step that is differentiable itself.

    Args:
        parameters: name → tensor.
        groups: options that say whether it is.

    Raises:
        StateError: names each such tensor.
    """
    if any(group.get("differentiable") for group in groups):
        return
    problems = [
        Problem(name, "a tensor that autograd computed", "a parameter", "pass the leaf, or a detached tensor")
        for name, tensor in parameters.items()
        if takes_gradient(tensor) and not (tensor.is_leaf or tensor.retains_grad)
    ]
    if problems:
        raise StateError("a tensor that is not a leaf cannot be optimized", problems)


def by_pattern(
    parameters: Mapping[str, Tensor], groups: Collection[Mapping[str, Any]]
) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Sorts parameters into groups: each goes to the first group whose pattern is found in its name, or to a last one.

    Args:
        parameters: name → tensor; a tensor with several names goes where its first name goes, with all its names.
        groups: mappings with "match", a regular expression that is searched for in the name, and options.

    Returns:
        Options and parameters of each group in the order of `groups`, and those that no pattern matched under no
        options; the last is left out if it is empty.

    Raises:
        StateError: "match" is missing or is no regular expression, or a pattern is no parameter's first match.
    """
    patterns = [_pattern(position, group) for position, group in enumerate(groups)]
    options = [{name: value for name, value in group.items() if name != "match"} for group in groups]
    members: list[dict[str, Tensor]] = [{} for _ in (*patterns, "the rest")]
    canonical = first_names(parameters)
    for name, tensor in parameters.items():
        matching = (i for i, pattern in enumerate(patterns) if pattern.search(canonical[tensor]))
        members[next(matching, len(patterns))][name] = tensor
    problems = [
        Problem(
            key=f"groups[{i}]",
            found=f"the pattern {pattern.pattern!r}, {_why_empty(pattern, parameters)}",
            required="at least one parameter whose first match it is",
            remedy=f"mend or drop the pattern; the names are {listed(parameters)}",
        )
        for i, pattern in enumerate(patterns)
        if not members[i]
    ]
    if problems:
        raise StateError("a pattern matches no parameter", problems)
    return [(its, who) for its, who in zip([*options, {}], members, strict=True) if who]


def refuse_unknown_options(optimizer: type[Optimizer], options: Iterable[str], where: str) -> None:
    """Holds option names against the arguments of the optimizer's class.

    Raises:
        AlgorithmError: names each option that is not one, and those that there are.
    """
    arguments = inspect.signature(optimizer).parameters.values()
    if any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in arguments):
        return
    known = [argument.name for argument in arguments][1:]  # the first is the parameters
    problems = [
        Problem(f"{where}.{name}", "an unknown option", f"one of {', '.join(known)}", "mend its spelling or drop it")
        for name in options
        if name not in known
    ]
    if problems:
        raise AlgorithmError(f"{optimizer.__name__} has no such option", problems)


def listed(names: Iterable[str]) -> str:
    """Names in a sentence, the first twenty of them."""
    names = list(names)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _pattern(position: int, group: Mapping[str, Any]) -> re.Pattern[str]:
    match = group.get("match")
    try:
        return re.compile(match)  # type: ignore[arg-type]  # anything may be given; re says what is wrong with it
    except (TypeError, re.error) as error:
        problem = Problem(
            key=f"groups[{position}].match",
            found=f"{match!r} ({error})",
            required="a regular expression for parameter names",
            remedy='write {"match": r"norm|bias", ...}',
        )
        raise StateError("a group has no pattern", [problem]) from None


def _why_empty(pattern: re.Pattern[str], parameters: Mapping[str, Tensor]) -> str:
    found = [name for name in parameters if pattern.search(name)]
    return f"whose matches an earlier group took ({listed(found)})" if found else "which is found in no name"
