"""The dtypes in which weights are published: one for all, or one for each pattern of names; rows in 8 bits among them.

patterns and shapes on all ranks  →  the tables whose rows several ranks share    once; one round in each step
smallest and largest of their rows  →  all-reduces                                only where columns are cut
numbers that a form cannot hold  →  one error on all ranks, or casts and codes    one round
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from shardopt.checkpoint.sources.reading.scratch import lost_problem
from shardopt.checkpoint.stream.agreed import Agreement
from shardopt.checkpoint.stream.arranged import seen
from shardopt.checkpoint.stream.int8_rows import LARGEST, codes_of, extremes_of, scales_of
from shardopt.errors import LayoutError, MismatchError, Problem
from shardopt.ranks import Ranks
from shardopt.sharding.box import Box
from shardopt.sharding.pieces import View
from shardopt.sharding.pieces_tensor import PiecesTensor
from shardopt.sharding.view import assemble, device_of, empty_local_tensor, local_tensors
from shardopt.state.casts import lost_in_casts

_CALL = "casting what is published"
_REFUSED = "weights cannot be published in the dtypes of dtype=; nothing was published"

Form = torch.dtype | Literal["int8_rows"]
"""A dtype of floating point; or codes of 8 bits, with a scale and an offset for each row."""

Forms = torch.dtype | Mapping[str, Form] | None
"""One dtype for all weights of floating point; or regex → form; None leaves them as they are."""


def dtype_problems(dtype: Any) -> list[Problem]:
    """Returns the problems with the forms of weights."""
    if not isinstance(dtype, Mapping):
        if dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            return []
        required, remedy = "a dtype of floating point, or a mapping from regex to one", "pass it as torch.bfloat16"
        return [Problem("dtype", repr(dtype)[:80], required, remedy)]
    problems = []
    remedy = 'give it as in {r"tables\\.": "int8_rows", "": torch.bfloat16}'
    for pattern, form in dtype.items():
        if form != "int8_rows" and not (isinstance(form, torch.dtype) and form.is_floating_point):
            required = "a dtype of floating point, or 'int8_rows', for each regex"
            problems.append(Problem("dtype", f"{pattern!r}: {form!r}"[:80], required, remedy))
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            problems.append(Problem("dtype", f"{pattern!r} ({error})"[:80], "a regex", remedy))
    return problems


class Dtypes:
    """Casts the weights of each step to the same forms.

    Args:
        dtype: the forms, which `dtype_problems` has let pass; the same on all ranks.
    """

    def __init__(self, dtype: Forms) -> None:
        self._is_by_name = isinstance(dtype, Mapping)
        by_pattern = dtype if isinstance(dtype, Mapping) else {} if dtype is None else {"": dtype}
        self._forms = [(re.compile(pattern), form) for pattern, form in by_pattern.items()]
        self._agreement = Agreement("dtype", repr([*by_pattern.items()]), _CALL)
        self._shared: dict[str, int] = {}  # the tables whose rows several ranks share, with their number of rows

    def of(self, ranks: Ranks, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns weights in their forms; those that have theirs are not copied.

        Collective, if there are forms. A table "t" as "int8_rows" becomes three tensors: "t", of its shape, uint8;
        "t_scale" and "t_offset", [N], fp32.

        Args:
            weights: of this rank, of any kind. They are not changed.

        Raises:
            MismatchError: a table that is to be in 8 bits is no matrix, another weight has the name of its scale or
                offset, or no weight has a name for some pattern. Or a weight has a number that its form cannot hold.
            LayoutError, StateError: ranks have different patterns; or a table has no boxes or no memory, or another
                shape on another rank.
        """
        if not self._forms:
            return dict(weights)
        numbers = {name: self._number_of(name) for name in weights}
        forms = {name: self._forms[number][1] for name, number in numbers.items() if number is not None}
        forms = {name: form for name, form in forms.items() if _dtype_of(weights[name]) not in (form, None)}
        views: dict[str, View] = {}
        extremes: dict[str, list[Tensor]] = {}
        if self._is_by_name:
            used = {*numbers.values()} - {None}
            look = partial(self._look, weights, forms, used)
            (views, extremes), self._shared = self._agreement.of(ranks, look, self._merge)
            self._share(ranks, views, extremes)

        def work() -> dict[str, Tensor]:
            problems = [*_lost(weights, forms), *_too_large(views, extremes)]
            if problems:
                raise MismatchError(_REFUSED, problems, code="cast-overflow")
            int8 = {name: _in_8_bits(view, extremes[name], device_of(weights[name])) for name, view in views.items()}
            return _cast(weights, forms, int8)

        return ranks.agree(_CALL, work)[0]

    def _number_of(self, name: str) -> int | None:
        """Returns the number of the first pattern that is found in a name."""
        return next((number for number, (pattern, _) in enumerate(self._forms) if pattern.search(name)), None)

    def _look(
        self, weights: Mapping[str, Tensor], forms: Mapping[str, Form], used: set[Any]
    ) -> tuple[tuple[dict[str, View], dict[str, list[Tensor]]], list[Any]]:
        """Returns the tables that are to be in 8 bits as this rank sees them, with the extremes of each piece's rows.

        Also returns what the others are told of them.

        Args:
            used: the numbers of the patterns that this rank has weights for.
        """
        views = {name: seen(name, weights[name]) for name, form in forms.items() if not isinstance(form, torch.dtype)}
        problems = [problem for name, view in views.items() for problem in _no_table(name, view, weights)]
        if problems:
            raise MismatchError(_REFUSED, problems, code="bad-rules")
        tables = {
            name: [*view.shape, any(piece.box.sizes[1] < view.shape[1] for piece in view.pieces)]
            for name, view in views.items()
        }
        extremes = {name: [extremes_of(piece.tensor) for piece in view.pieces] for name, view in views.items()}
        return (views, extremes), [sorted(used), tables]

    def _merge(self, told: Mapping[int, Any]) -> dict[str, int]:
        """Returns the tables whose rows are shared by ranks. Runs on rank 0; all ranks raise what it raises."""
        idle = {*range(len(self._forms))} - {number for used, _ in told.values() for number in used}
        if idle:
            found, remedy = "no weight of that name", "write the names as the model has them"
            problems = [Problem(f"dtype, {self._forms[each][0].pattern!r}", found, "one", remedy) for each in idle]
            raise MismatchError(_REFUSED, problems, code="bad-rules")
        shapes: dict[str, list[int]] = {}
        shared: dict[str, int] = {}
        for rank, (_, tables) in told.items():
            for name, (rows, columns, is_shared) in tables.items():
                if shapes.setdefault(name, [rows, columns]) != [rows, columns]:
                    found, required = f"{[rows, columns]} on rank {rank}", f"{shapes[name]}, as on other ranks"
                    problem = Problem(name, found, required, "give every rank the same global tensor")
                    raise LayoutError("ranks disagree on a table", [problem], code="ranks-differ")
                if is_shared:
                    shared[name] = rows
        return dict(sorted(shared.items()))

    def _share(self, ranks: Ranks, views: Mapping[str, View], extremes: dict[str, list[Tensor]]) -> None:
        """Makes the extremes of rows that ranks share those of whole rows. Collective: an all-reduce a shared table.

        For each of these tables, one after another, a rank needs 8 bytes for each row. Boxes alone say who shares which
        rows, so kinds of tensors that know of no other rank need nothing else.
        """
        for name, rows in self._shared.items():
            pieces = views[name].pieces if name in views else ()
            device = ranks.device_beside(pieces[0].tensor.device if pieces else torch.device("cpu"))
            of_job = torch.full((2, rows), -torch.inf, dtype=torch.float32, device=device)
            for piece, own in zip(pieces, extremes.get(name, ()), strict=True):
                here = of_job[:, _rows(piece.box)]
                here.copy_(torch.maximum(here, own.to(device)))
            ranks.all_reduce_max(of_job)
            extremes[name] = [of_job[:, _rows(piece.box)].to(piece.tensor.device) for piece in pieces]


def _dtype_of(tensor: Tensor) -> torch.dtype | None:
    """Returns the dtype of a tensor of floating point; None of others. A ShardedTensor warns where it is asked."""
    dtype = (local_tensors(tensor) or (empty_local_tensor(tensor),))[0].dtype
    return dtype if dtype.is_floating_point else None


def _rows(box: Box) -> slice:
    return slice(box.offsets[0], box.ends[0])


def _no_table(name: str, view: View, weights: Mapping[str, Tensor]) -> Iterator[Problem]:
    """Yields why a weight cannot be published as rows in 8 bits."""
    if len(view.shape) != 2 or not view.shape[1]:
        remedy = "let the pattern of int8_rows find tables alone"
        yield Problem(name, f"the shape {[*view.shape]}", "a table, [N, D] of at least one column", remedy)
    for other in (f"{name}_scale", f"{name}_offset"):
        if other in weights:
            yield Problem(other, "a weight", f"the name free, for the rows of {name}", "rename one of both")


def _lost(weights: Mapping[str, Tensor], forms: Mapping[str, Form]) -> Iterator[Problem]:
    """Yields the weights that have a number which their dtype cannot hold; NaN and infinity stay what they are."""
    casts = [
        (name, local.detach(), form)
        for name, form in forms.items()
        if isinstance(form, torch.dtype)
        for local in local_tensors(weights[name])
    ]
    problems: dict[str, Problem] = {}
    lost = lost_in_casts([(local, form) for _, local, form in casts])  # of all at once, for one wait
    for (name, local, form), number in zip(casts, lost, strict=True):
        if number is not None:
            problem = lost_problem(name, number, local.dtype, form)
            remedy = "give it a wider dtype, by its name: dtype={regex: dtype, ...}"
            problems.setdefault(name, Problem(name, problem.found, problem.required, remedy))
    yield from problems.values()


def _too_large(views: Mapping[str, View], extremes: Mapping[str, list[Tensor]]) -> Iterator[Problem]:
    """Yields the tables with rows that have no scale. One NaN would make all numbers of its row NaN."""
    required = f"numbers of at most {LARGEST:.1e}"
    remedy = "mend the rows, or publish the table as torch.bfloat16, which holds NaN and infinity"
    for name, view in views.items():
        for piece, of_piece in zip(view.pieces, extremes[name], strict=True):
            (bad,) = torch.where(of_piece.amax(dim=0) > LARGEST)
            if len(bad):
                first = int(bad[0])
                largest = float(of_piece[:, first].max())
                what = f"{largest:.1e}" if largest < torch.inf else "NaN or infinity"
                found = f"{what} in row {piece.box.offsets[0] + first} (such rows on this rank: {len(bad)})"
                yield Problem(name, found, required, remedy)


def _in_8_bits(view: View, extremes: list[Tensor], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the codes of a table, and the scales and offsets of its rows.

    The rank with the first column of a row has its scale and offset. So their boxes never overlap, however columns are
    cut.
    """
    codes: list[tuple[Box, Tensor]] = []
    of_rows: list[tuple[Box, Tensor, Tensor]] = []
    for piece, of_piece in zip(view.pieces, extremes, strict=True):
        scale, offset = scales_of(of_piece)
        codes.append((piece.box, codes_of(piece.tensor, scale, offset)))
        if piece.box.offsets[1] == 0:
            of_rows.append((Box(piece.box.offsets[:1], piece.box.sizes[:1]), scale, offset))
    rows = view.shape[:1]
    return (
        PiecesTensor(view.shape, codes, torch.uint8, device),
        PiecesTensor(rows, [(box, scale) for box, scale, _ in of_rows], torch.float32, device),
        PiecesTensor(rows, [(box, offset) for box, _, offset in of_rows], torch.float32, device),
    )


def _as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a copy in a dtype, placed alike: by its local tensors, as some kinds of tensors compute nothing."""
    local = local_tensors(tensor)
    casts = [each.detach().to(dtype) for each in local]
    return casts[0] if len(local) == 1 and local[0] is tensor else assemble(tensor, casts)


def _cast(
    weights: Mapping[str, Tensor], forms: Mapping[str, Form], int8: Mapping[str, tuple[Tensor, Tensor, Tensor]]
) -> dict[str, Tensor]:
    """Returns weights in their forms; of tied ones with one form one tensor."""
    casts: dict[tuple[int, Form], tuple[Tensor, ...]] = {}
    made: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        form = forms.get(name)
        if form is None:
            made[name] = tensor
            continue
        place = id(tensor), form
        if place not in casts:
            casts[place] = (_as_dtype(tensor, form),) if isinstance(form, torch.dtype) else int8[name]
        made[name], *of_rows = casts[place]
        for end, each in zip(("_scale", "_offset"), of_rows, strict=False):  # a dtype has none of them
            made[f"{name}{end}"] = each
    return made
