"""Assigns each box of each parameter to one of its holders, which counts it in norms and inner products.

A box that several ranks hold is counted by the first of them. A parameter that each of its holders has whole is shared:
there the others report their gradients too, in case that the first has none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from torch import Tensor

from shardopt.errors import LayoutError, Problem
from shardopt.ranks import Ranks
from shardopt.ranks.kinds import decompress, exchange, kind_by_rank, kinds_of, pack_kinds, unpack_kinds
from shardopt.sharding.box import overlap_faults
from shardopt.sharding.layout import Layout
from shardopt.sharding.layout_merge import KindMerger, LayoutReader, LayoutWriter, components_of
from shardopt.sharding.pieces import View
from shardopt.sharding.view import local_tensors, view_of

_WHAT = "finding out who holds which parameter"
# As long as torch's own collectives wait: before their first step, ranks may be far apart (one compiles, one does not).
_DEADLINE_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class CountedParameter:
    """One parameter of this rank, and which of its local tensors this rank counts.

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
    """Returns which local tensors this rank counts, and how many parameters of the job are shared. Collective.

    One exchange where all ranks have the same parameters, as under data parallelism and FSDP; three where they differ,
    or know only of their own shards.

    Args:
        names: parameter → FQN of those that this rank has.

    Raises:
        LayoutError: a parameter cannot be described, lies in part on other ranks than these, or the boxes of one that
            ranks hold do not fit together. Every rank raises.
    """
    views, packed = ranks.with_deadline(_DEADLINE_SECONDS).agree(
        _WHAT,
        work=lambda: {
            name: view_of(param, name).numbered_in(ranks.job_numbers, all_of=name) for param, name in names.items()
        },
        report=_fingerprint,
        decide=lambda fingerprints: pack_kinds(kinds_of(fingerprints)),
    )
    known = {name: view.layout for name, view in views.items()}
    kinds = unpack_kinds(packed)
    if len(kinds) == 1:
        everyone = range(ranks.size)
        whole = {layout: _with_holders(layout, everyone) for layout in set(known.values())}
        layouts = {name: whole[layout] for name, layout in known.items()}
        return _shares(ranks.rank, names, views, layouts, _number_shared(layouts))
    kind_of = kind_by_rank(kinds)
    answer, section = exchange(
        ranks,
        _WHAT,
        describe=(lambda: _table(known)) if kinds[kind_of[ranks.rank]][0] == ranks.rank else None,
        merge=lambda tables: _merge(kinds, list(tables.values())),
        section_of=lambda answer, rank: int(answer["section_of"][kind_of[rank]]),
    )

    def shares() -> tuple[list[CountedParameter], int]:
        own = decompress(section)
        counted, _ = _shares(ranks.rank, names, views, _layouts_of(own), own["shared"])
        return counted, answer["shared"]

    # In one round, since no other rank can see a fault of this one.
    return ranks.agree(_WHAT, work=shares)[0]


def _shares(
    rank: int,
    names: Mapping[Tensor, str],
    views: Mapping[str, View],
    layouts: Mapping[str, Layout],
    number_of: Mapping[str, int],
) -> tuple[list[CountedParameter], int]:
    counted = [
        CountedParameter(
            name, parameter, _counted(rank, name, parameter, views[name], layouts[name]), number_of.get(name)
        )
        for parameter, name in names.items()
    ]
    return counted, len(number_of)


def _number_shared(layouts: Mapping[str, Layout]) -> dict[str, int]:
    """Numbers the shared parameters of the job."""
    return {name: number for number, name in enumerate(sorted(n for n, each in layouts.items() if _is_shared(each)))}


def _is_shared(layout: Layout) -> bool:
    assert layout.holders is not None  # `_with_holders` has named them
    return len(layout.boxes) == 1 and layout.boxes[0].numel > 0 and len(layout.holders[0]) > 1


def _counted(rank: int, name: str, parameter: Tensor, view: View, layout: Layout) -> tuple[bool, ...]:
    """Returns, for each local tensor, whether this rank is its first holder."""
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
        raise LayoutError("a norm cannot count a parameter once", [problem], code="ranks-differ")
    return (verdicts == {True},)


def _fingerprint(views: Mapping[str, View]) -> str:
    # Without the order, in which ranks may differ.
    lines = sorted(f"{view.layout.fingerprint} {name}" for name, view in views.items())
    return blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _table(layouts: Mapping[str, Layout]) -> dict[str, Any]:
    writer = LayoutWriter()
    names = {name: writer.number(layout) for name, layout in layouts.items()}
    return {"layouts": writer.texts, "names": names}


def _layouts_of(table: Mapping[str, Any], reader: LayoutReader | None = None) -> dict[str, Layout]:
    layouts = (reader or LayoutReader()).read(table["layouts"])
    return {name: layouts[number] for name, number in table["names"].items()}


def _merge(
    kinds: Sequence[tuple[int, ...]], tables: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Merges the tables of all kinds of ranks into the whole layout of each parameter, on rank 0.

    Returns:
        The number of each kind's section, and of shared parameters in the job; and the sections: tables of the
        parameters of kinds that share some, with the numbers of those that are shared.
    """
    reader, merger = LayoutReader(), KindMerger(kinds)
    by_name: defaultdict[str, dict[int, Layout]] = defaultdict(dict)
    for number, table in enumerate(tables):
        for name, layout in _layouts_of(table, reader).items():
            by_name[name][number] = layout
    whole: dict[tuple[int, tuple[int, ...]], Layout] = {}  # parameters by the thousand lie alike
    merged: dict[str, Layout] = {}
    for name in sorted(by_name):
        numbers = tuple(by_name[name])
        layout = merger.merge(by_name[name], name)
        case = id(layout), numbers  # `merger` keeps the layout alive
        if case not in whole:
            whole[case] = _with_holders(layout, merger.ranks_of(numbers))
            _refuse_overlaps(name, whole[case])
        merged[name] = whole[case]
    number_of = _number_shared(merged)
    component_of = components_of(dict.fromkeys(map(tuple, by_name.values())), len(kinds))
    own: list[dict[str, Layout]] = [{} for _ in range(1 + max(component_of))]
    for name, layout in merged.items():
        own[component_of[next(iter(by_name[name]))]][name] = layout
    sections = [
        {**_table(each), "shared": {name: number_of[name] for name in each if name in number_of}} for each in own
    ]
    return {"section_of": component_of, "shared": len(number_of)}, sections


def _with_holders(layout: Layout, having: Iterable[int]) -> Layout:
    """Returns the layout with all its holders, except ranks whose optimizer lacks the parameter."""
    ranks = set(having)
    if layout.holders is not None and all(map(ranks.issuperset, layout.holders)) and not layout.local:
        return layout
    of_boxes = layout.holders or [tuple(ranks)] * len(layout.boxes)
    holders = {box: ranks.intersection(of_box) for box, of_box in zip(layout.boxes, of_boxes, strict=True)}
    return Layout.from_holders(layout.shape, {box: of_box for box, of_box in holders.items() if of_box})


def _refuse_overlaps(name: str, layout: Layout) -> None:
    faults = [] if layout.grid is not None else overlap_faults(layout.shape, layout.boxes)
    if faults:
        problem = Problem(name, "; ".join(faults), "boxes that are equal or disjoint", "place it alike on all ranks")
        raise LayoutError("ranks hold boxes of a parameter that overlap", [problem], code="ranks-differ")
