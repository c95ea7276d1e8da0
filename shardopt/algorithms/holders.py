"""Assigns each box of each parameter to one of its holders, which counts it in norms and inner products of the job.

A box that several ranks hold is counted by the first of them. A parameter that each of its holders has whole is shared:
there the others report their gradients too, in case that the first has none.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from torch import Tensor

from shardopt.errors import LayoutError, Problem
from shardopt.ranks import Ranks
from shardopt.sharding.box import overlap_faults
from shardopt.sharding.layout import Layout
from shardopt.sharding.pieces import View
from shardopt.sharding.view import local_tensors, view_of

_WHAT = "finding out who holds which parameter"
# As long as torch's own collectives wait: before their first step, ranks may be far apart (one compiles, one does not).
_DEADLINE_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class CountedParameter:
    """One of this rank's parameters, and which of its local tensors this rank counts.

    Args:
        name: the parameter's FQN.
        parameter: the user's tensor.
        counted: for each of `local_tensors(parameter)`, whether this rank counts it.
        shared: where every holder has all of the parameter, and there are several: its number among all such
            parameters of the job; else None.
    """

    name: str
    parameter: Tensor
    counted: tuple[bool, ...]
    shared: int | None


def counted_parameters(ranks: Ranks, names: Mapping[Tensor, str]) -> tuple[list[CountedParameter], int]:
    """Returns what this rank counts of each parameter, and the number of shared parameters in the job. Collective.

    One exchange where all ranks have the same parameters, as under data parallelism and FSDP; three where they differ,
    or know only of their own shards.

    Args:
        names: parameter → FQN of those that this rank has.

    Raises:
        LayoutError: a parameter cannot be described, or the boxes of one that ranks hold do not fit together. Every
            rank raises.
    """
    views, alike = ranks.agree(
        _WHAT,
        work=lambda: {name: view_of(parameter, name) for parameter, name in names.items()},
        report=_fingerprint,
        decide=lambda fingerprints: len(set(fingerprints)) == 1,
        deadline_seconds=_DEADLINE_SECONDS,
    )
    known = {name: view.layout for name, view in views.items()}
    if alike:
        everyone = range(ranks.size)
        whole = {layout: _with_holders(layout, everyone) for layout in set(known.values())}
        return _shares(ranks.rank, names, views, {name: whole[layout] for name, layout in known.items()})
    _, (tables, ranks_of_table) = ranks.agree(
        _WHAT, work=lambda: json.dumps(_table(known)), report=lambda text: text, decide=_distinct
    )
    layouts = _merged([_layouts_of(json.loads(table)) for table in tables], ranks_of_table)
    # In one round, since no other rank can see a fault of this one.
    counted, _ = ranks.agree(_WHAT, work=lambda: _shares(ranks.rank, names, views, layouts))
    return counted


def _shares(
    rank: int, names: Mapping[Tensor, str], views: Mapping[str, View], layouts: Mapping[str, Layout]
) -> tuple[list[CountedParameter], int]:
    whole_on_several = [name for name, layout in layouts.items() if _is_shared(layout)]
    number_of = {name: number for number, name in enumerate(sorted(whole_on_several))}
    counted = [
        CountedParameter(
            name, parameter, _counted(rank, name, parameter, views[name], layouts[name]), number_of.get(name)
        )
        for parameter, name in names.items()
    ]
    return counted, len(number_of)


def _is_shared(layout: Layout) -> bool:
    assert layout.holders is not None  # `_with_holders` has named them
    return len(layout.boxes) == 1 and layout.boxes[0].numel > 0 and len(layout.holders[0]) > 1


def _counted(rank: int, name: str, parameter: Tensor, view: View, layout: Layout) -> tuple[bool, ...]:
    """Whether this rank is the first holder, for each local tensor."""
    assert layout.holders is not None
    first = {box: holders[0] == rank for box, holders in zip(layout.boxes, layout.holders, strict=True)}
    tensors = local_tensors(parameter)
    if len(tensors) != 1:  # then each that is not empty is one piece, which has its memory
        by_memory = {piece.tensor.data_ptr(): first[piece.box] for piece in view.pieces}
        return tuple(local.numel() > 0 and by_memory[local.data_ptr()] for local in tensors)
    verdicts = {first[piece.box] for piece in view.pieces}
    if len(verdicts) > 1:
        problem = Problem(
            key=name,
            found=f"boxes of one local tensor of rank {rank} of which some are, and some are not, on lower ranks too",
            required="local tensors that two ranks hold alike or not at all",
            remedy="place the parameter alike on all meshes that hold it",
        )
        raise LayoutError("a norm cannot count a parameter once", [problem])
    return (verdicts == {True},)


def _fingerprint(views: Mapping[str, View]) -> str:
    # Without the order, in which ranks may differ.
    lines = sorted(f"{view.layout.fingerprint} {name}" for name, view in views.items())
    return blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _table(layouts: Mapping[str, Layout]) -> dict[str, Any]:
    number_of = {layout: number for number, layout in enumerate(dict.fromkeys(layouts.values()))}
    return {
        "layouts": [layout.to_json() for layout in number_of],
        "names": {name: number_of[layouts[name]] for name in sorted(layouts)},
    }


def _layouts_of(table: Mapping[str, Any]) -> dict[str, Layout]:
    layouts = [Layout.from_json(wire) for wire in table["layouts"]]
    return {name: layouts[number] for name, number in table["names"].items()}


def _distinct(texts: list[str]) -> tuple[list[str], list[list[int]]]:
    """Returns each text once, and the ranks that sent it: most ranks of a large job send the same."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks_of.setdefault(text, []).append(rank)
    return list(ranks_of), list(ranks_of.values())


def _merged(tables: Sequence[Mapping[str, Layout]], ranks_of_table: Sequence[Sequence[int]]) -> dict[str, Layout]:
    """Merges each rank's layouts into the whole layout of each parameter of the job. The same on every rank."""
    layouts_by_name: defaultdict[str, list[tuple[Layout, int]]] = defaultdict(list)
    for number, table in enumerate(tables):
        for name, layout in table.items():
            layouts_by_name[name].append((layout, number))
    made: dict[tuple[tuple[Layout, int], ...], Layout] = {}  # parameters by the thousand lie alike
    layouts = {}
    for name in sorted(layouts_by_name):
        where = tuple(layouts_by_name[name])
        if where not in made:
            by_rank = {rank: layout for layout, number in where for rank in ranks_of_table[number]}
            made[where] = _with_holders(Layout.merge(by_rank, name), by_rank)
            _refuse_overlaps(name, made[where])
        layouts[name] = made[where]
    return layouts


def _with_holders(layout: Layout, having: Iterable[int]) -> Layout:
    """Returns the layout with all holders named, without ranks that do not have the parameter in their optimizer."""
    ranks = set(having)
    of_boxes = layout.holders or [tuple(ranks)] * len(layout.boxes)
    holders = {box: ranks.intersection(of_box) for box, of_box in zip(layout.boxes, of_boxes, strict=True)}
    return Layout.from_holders(layout.shape, {box: of_box for box, of_box in holders.items() if of_box})


def _refuse_overlaps(name: str, layout: Layout) -> None:
    faults = overlap_faults(layout.shape, layout.boxes)
    if faults:
        problem = Problem(name, "; ".join(faults), "boxes that are equal or disjoint", "place it alike on all ranks")
        raise LayoutError("ranks hold boxes of a parameter that overlap", [problem])
