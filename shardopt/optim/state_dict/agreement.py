"""Compares options and counters of optimizers between ranks.

Compared are values that two ranks have under one name: the options of a parameter's group, and numbers in its state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from typing import Any

from torch import Tensor

from shardopt.errors import Problem
from shardopt.optim.state_dict.options import as_number
from shardopt.ranks import Ranks
from shardopt.ranks.kinds import exchange, kind_by_rank, kinds_of, pack_kinds, unpack_kinds
from shardopt.sharding.gradients import takes_gradient
from shardopt.sharding.view import is_held, local_tensors
from shardopt.state.param_groups import IMPLEMENTATION_OPTIONS, PARAMS, refuse_unmatched

Texts = dict[str, str]
"""Name of an option, or of an entry of state → its value as a text that is equal for equal values."""

Alike = tuple[int, ...]
"""Ranks that are alike in everything, ascending, by their numbers in the job."""

_WHAT = "comparing optimizers between ranks"
_ABSENT = "nothing"
_FEW = 16  # elements of a tensor that is an option, or a wrapper's own state


def differences(
    ranks: Ranks,
    names: Mapping[Tensor, str],
    param_groups: Callable[[], Any],
    state: Callable[[], Mapping[str, Mapping[str, Any]]],
    unmatched: Sequence[Problem] = (),
) -> list[Problem]:
    """Returns, for each option and number in state that differs between ranks, the first parameter. Collective.

    One exchange where ranks agree in everything, and a second one where they do not, or have different parameters: in
    it one rank of each kind tells what all of its kind have.

    Args:
        names: parameter → FQN.
        param_groups: returns the optimizer's groups.
        state: returns FQN, or a name that belongs to no parameter, → entries. Sharded entries are not compared.
        unmatched: a problem for each pattern of groups that matches nothing on this rank.

    Raises:
        StateError: a pattern matches nothing on any rank.
    """

    def kinds(reports: list[Any]) -> list[list[int]]:
        digests, unmatched_there = zip(*reports, strict=True)
        refuse_unmatched(unmatched_there)
        return pack_kinds(kinds_of(digests))

    report, packed = ranks.agree(
        _WHAT,
        work=lambda: json.dumps([list(_options(names, param_groups())), _numbers(names, state())], sort_keys=True),
        report=lambda text: [blake2b(text.encode(), digest_size=16).hexdigest(), [*map(asdict, unmatched)]],
        decide=kinds,
    )
    alike = unpack_kinds(packed)
    if len(alike) == 1:
        return []

    def in_job(kind: Alike) -> Alike:
        return tuple(sorted(ranks.members[rank] for rank in kind))

    is_first = alike[kind_by_rank(alike)[ranks.rank]][0] == ranks.rank
    problems, _ = exchange(
        ranks,
        _WHAT,
        describe=(lambda: json.loads(report)) if is_first else None,
        merge=lambda reports: (_compare({in_job(kind): reports[kind[0]] for kind in alike}), [None]),
        section_of=lambda _, rank: 0,
    )
    return [Problem(*problem) for problem in problems]


def _options(names: Mapping[Tensor, str], param_groups: Any) -> Iterator[tuple[list[str], Texts]]:
    """Yields the sorted names in each group, with the group's options."""
    for group in param_groups:
        options = {name: value for name, value in group.items() if name not in {PARAMS, *IMPLEMENTATION_OPTIONS}}
        yield sorted(names[param] for param in group[PARAMS]), _texts(options)


def _numbers(names: Mapping[Tensor, str], state: Mapping[str, Mapping[str, Any]]) -> dict[str, Texts]:
    """Returns the comparable values of state. Tensors may differ slightly between replicas; counters may not.

    A parameter that has elements here and no state has an entry without numbers.
    """
    most_elements = {name: 1 for name in names.values()}
    # The moments of a parameter without dimensions look like counters.
    most_elements |= {name: 0 for param, name in names.items() if takes_gradient(param) and param.numel() == 1}
    held = {name: _texts({}) for param, name in names.items() if is_held(param)}
    return held | {name: _texts(entries, most_elements.get(name, _FEW)) for name, entries in state.items()}


def _texts(values: Mapping[str, Any], most_elements: int = _FEW) -> Texts:
    """Returns the comparable values: plain ones, and plain tensors up to a size."""
    texts = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            tensors = local_tensors(value)
            if len(tensors) == 1 and tensors[0] is value and value.numel() <= most_elements:
                texts[name] = repr(value.tolist())
        elif isinstance(value, bool | int | float | str | tuple | list | None):
            texts[name] = repr(as_number(value))  # torch prints four digits of a tensor
    return texts


def _compare(reports: Mapping[Alike, Any]) -> list[tuple[str, str, str, str]]:
    """Finds, on rank 0, the first parameter that differs for each option and entry; `reports` by kind of rank."""
    options: dict[str, dict[Alike, Texts]] = {}
    numbers: dict[str, dict[Alike, Texts]] = {}
    group_of: dict[str, str] = {}
    for ranks, (groups, state) in reports.items():
        for names, texts in groups:
            for name in names:
                options.setdefault(name, {})[ranks] = texts
                group_of.setdefault(name, names[0])
        for name, texts in state.items():
            numbers.setdefault(name, {})[ranks] = texts
    problems: dict[str, tuple[str, str, str, str]] = {}
    for name, by_kind in options.items():
        for option, difference in _differing(by_kind):
            remedy = "set it alike on all ranks, from a number that all of them have (a reduced loss, a common step)"
            key = f"param_groups.{group_of[name]}.{option}"
            problems.setdefault(
                f"option {option}", (key, difference, "the same on every rank that has the parameter", remedy)
            )
    for name, by_kind in numbers.items():
        for entry, difference in _differing(by_kind):
            remedy = "step and load all ranks together, with gradients of the same parameters; load the last checkpoint"
            key = f"state.{name}.{entry}"
            problems.setdefault(f"entry {entry}", (key, difference, "the same on every rank that has it", remedy))
    return list(problems.values())


def _differing(by_kind: Mapping[Alike, Texts]) -> Iterator[tuple[str, str]]:
    """Yields the names whose values differ between ranks, with the ranks of each value."""
    for name in dict.fromkeys(name for texts in by_kind.values() for name in texts):
        ranks_of: dict[str, list[int]] = {}
        for ranks, texts in by_kind.items():
            ranks_of.setdefault(texts.get(name, _ABSENT), []).extend(ranks)
        if len(ranks_of) > 1:
            yield name, "; ".join(f"{text} on {_named(sorted(ranks))}" for text, ranks in ranks_of.items())


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
