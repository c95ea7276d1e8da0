"""What rules make of the weights of a job, by names, shapes and dtypes alone. Has no tensors."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardopt.checkpoint.format.constants import DTYPES
from shardopt.checkpoint.format.manifest import Manifest, StoredLayout, StoredTensor, StoredTensors
from shardopt.checkpoint.rearrange.binding import Component, NewTensor, bind, first_match
from shardopt.checkpoint.rearrange.notation import Name
from shardopt.checkpoint.rearrange.rules import AnyRule, Tie
from shardopt.checkpoint.rearrange.ties import names_to_leave_out, second_names
from shardopt.errors import LayoutError, MismatchError, Problem

_log = logging.getLogger("shardopt.checkpoint")

_REFUSED = "the weights do not fit the rules of rearrange=; nothing was published"
_ON_FOLLOWERS = "leave the rule out, and give it to the followers"

Told = list[Any] | None
"""What ranks are told of a weight, as JSON: its shape; its dtype, "" on a rank that holds nothing of it; and the first
name with the same memory. None for a weight that no rule names."""


@dataclass(frozen=True)
class Made:
    """The published tensors of a job.

    Args:
        unchanged: new name → the name of the same tensor.
        tensors: new name → a tensor that is made of others.
        members: new name → the names of these.
        parts: name → each tensor that has a part of it, with this part.
        ties: second name → the new name of the same tensor, in the order in which they are given.
    """

    unchanged: Mapping[str, str]
    tensors: Mapping[str, NewTensor]
    members: Mapping[str, tuple[str, ...]]
    parts: Mapping[str, Sequence[tuple[str, Component]]]
    ties: Mapping[str, str]


def is_named(name: str, rules: Sequence[AnyRule]) -> bool:
    """Whether a rule needs to know more of a weight than its name."""
    path = (name,)
    ends = [end for rule in rules if isinstance(rule, Tie) and rule.reverse for end in (rule.name, rule.also)]
    return first_match(name, path, rules)[1] is not None or any(Name(end).find(name, path) for end in ends)


def merged(told: Mapping[int, Mapping[str, Told]]) -> dict[str, Told]:
    """Merges what ranks tell of their weights.

    Raises:
        LayoutError: ranks have one name for tensors of several shapes or dtypes, or none of them holds anything of it.
    """
    of_job: dict[str, Told] = {}
    problems = []
    for rank, weights in told.items():
        for name, each in weights.items():
            known = of_job.setdefault(name, each and [*each])
            if known is None or each is None:
                continue
            if each[0] != known[0] or (each[1] and known[1] and each[1] != known[1]):
                found, required = f"{each[0]} {each[1]} on rank {rank}", f"{known[0]} {known[1]}, as on other ranks"
                problems.append(Problem(name, found, required, "give every rank the same global tensor"))
            elif each[1]:
                known[1], known[2] = each[1], each[2] if known[2] in ("", each[2]) else None
    nowhere = [name for name, each in of_job.items() if each is not None and not each[1]]
    problems += [Problem(name, "no elements of it on any rank", "all of them", "publish all ranks") for name in nowhere]
    if problems:
        raise LayoutError("ranks disagree on a tensor that a rule names", problems, code="ranks-differ")
    return of_job


def made(weights: Mapping[str, Told], rules: Sequence[AnyRule], warns: bool = False) -> Made:
    """Applies rules to the weights of a job.

    Args:
        warns: whether rules that find nothing, while others do, are logged.

    Raises:
        MismatchError: the weights do not fit the rules; every difference is listed.
    """
    twins = {name for rule in rules if isinstance(rule, Tie) and rule.reverse for name in _twins(rule, weights, rules)}
    stored = {name: each for name, each in weights.items() if name not in twins}
    try:
        bound = bind(_manifest(stored), rules)
    except MismatchError as error:
        raise MismatchError(_REFUSED, error.problems, code="bad-rules") from None
    if bound.equal:
        problems = [
            Problem(names[0], f"{rule}", "no rule that joins numbers", _ON_FOLLOWERS) for rule, names in bound.equal
        ]
        raise MismatchError(_REFUSED, problems, code="bad-rules")
    paths, ties = bound.paths, dict[str, str]()
    idle = _idle(weights, rules)
    for rule in rules:
        if isinstance(rule, Tie) and not rule.reverse:
            seconds = {also: (name, path) for also, name, path in second_names(rule, paths)}
            ties |= {also: name for also, (name, _) in seconds.items()}
            paths = paths | {also: path for also, (_, path) in seconds.items()}
            idle += [] if any(Name(rule.name).find(name, path) for name, path in paths.items()) else [rule]
    _refuse_idle(idle, rules, warns)
    parts: defaultdict[str, list[tuple[str, Component]]] = defaultdict(list)
    for new, tensor in bound.tensors.items():
        for each in tensor.components:
            if each.key is not None:
                parts[each.key].append((new, each))
    members = {
        new: tuple(dict.fromkeys(each.key for each in tensor.components if each.key is not None))
        for new, tensor in bound.tensors.items()
    }
    return Made(bound.keys, bound.tensors, members, parts, ties)


def _manifest(weights: Mapping[str, Told]) -> Manifest:
    """Returns the weights in the form in which a checkpoint has them."""
    tensors = StoredTensors()
    for name, each in weights.items():
        shape, dtype, _ = ((), "uint8", None) if each is None else each  # nobody asks for that of others
        tensors[name] = StoredTensor((name,), DTYPES[dtype], StoredLayout.in_one_box(shape, 0))
    return Manifest("", 1, (), tensors)


def _twins(rule: Tie, weights: Mapping[str, Told], rules: Sequence[AnyRule]) -> Iterator[str]:
    """Yields the second names that a reversed tie leaves out; raises MismatchError if one is no tied tensor."""
    for name, first in names_to_leave_out(rule, {name: (name,) for name in weights}, rules):
        told, of_first = weights[name], weights[first]
        if told is None or of_first is None or told[2] is None or told[2] != of_first[2]:
            required = f"one memory on every rank, for {rule}"
            problem = Problem(name, f"another tensor than {first}", required, _ON_FOLLOWERS)
            raise MismatchError(_REFUSED, [problem], code="bad-rules")
        yield name


def _idle(weights: Mapping[str, Told], rules: Sequence[AnyRule]) -> list[AnyRule]:
    """Returns the rules that name none of the weights, except ties, which name new ones."""
    used = set[int]()
    for name in weights:
        number, found, _ = first_match(name, (name,), rules)
        used |= set() if found is None else {number}
    return [rule for number, rule in enumerate(rules) if number not in used and not isinstance(rule, Tie)]


def _refuse_idle(idle: Sequence[AnyRule], rules: Sequence[AnyRule], warns: bool) -> None:
    """Raises MismatchError if no rule finds a weight. Families have rules for several models, so some may find none."""
    remedy = "write the names as the model has them"
    reverse = [rule for rule in rules if isinstance(rule, Tie) and rule.reverse]
    if len(idle) + len(reverse) == len(rules):
        problems = [Problem(str(rule), "no weight of that name", "one at least", remedy) for rule in idle]
        raise MismatchError(_REFUSED, problems, code="bad-rules")
    if warns and idle:
        _log.warning("no weight has a name of %s [bad-rules]", "; ".join(map(str, idle)))
