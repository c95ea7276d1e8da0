"""The options for storing parameters and state, and the form that they imply for each parameter.

    state_dtype    None: as the tensor that is stepped; "bfloat16"; or "uint8", 8-bit codes
    master_dtype   None; or "float32": bf16 and fp16 parameters get a master in fp32, which is stepped in their place
    rounding       None: state that `state_dtype` stores in fewer bits is rounded at random, bf16 parameters to nearest;
                   "stochastic": both at random; "nearest": both to nearest. Maxima are in any case
                   rounded to nearest

They are texts in groups, so that they can be saved; `as_texts` makes them of dtypes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from shardopt.algorithms.low_precision.chunks import suits_blocks
from shardopt.algorithms.registry import AlgorithmSpec, AtFirstStep, Kind, Options
from shardopt.errors import AlgorithmError, Problem
from shardopt.state.param_groups import STORAGE_OPTIONS

CODES = "uint8"
MASTER = "master"
STEP = "step"
NEAREST = "nearest"
STOCHASTIC = "stochastic"

_log = logging.getLogger("shardopt")

_CHOICES: dict[str, tuple[Any, ...]] = {
    "state_dtype": (None, "bfloat16", CODES),
    "master_dtype": (None, "float32"),
    "rounding": (None, NEAREST, STOCHASTIC),
}
_HALF_A_STEP = {"bfloat16": 2.0**-8, CODES: 2.0**-4}
"""Half the distance between neighbouring stored numbers, relative to the lower one, at its largest."""
_COMPOUNDS_REMEDY = (
    'write one of them; rounding="nearest" beside it loads state that was saved in 8 bits, to be converted by '
    "load_state_dict(..., convert_state=True) of another"
)
_UNFIT = {
    "foreach": "the step goes through chunks of one parameter at a time",
    "fused": "a step takes torch's fused kernel by itself, where the device has one",
}
_UNFIT |= {"capturable": "counters stay on the CPU", "differentiable": "chunks take no part in autograd"}


def as_texts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options with dtypes as names: torch.bfloat16 as "bfloat16"."""
    return {
        name: str(value).removeprefix("torch.") if name in STORAGE_OPTIONS and isinstance(value, torch.dtype) else value
        for name, value in options.items()
    }


def asks_for_less(options: Mapping[str, Any]) -> bool:
    """Whether options store differently from torch."""
    return any(not is_torchs(name, options.get(name, default)) for name, default in STORAGE_OPTIONS.items())


def is_torchs(name: str, value: Any) -> bool:
    """Whether an option has the value by which torch stores."""
    return value is None or (name, value) == ("rounding", NEAREST)


def without_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options without those that store as torch does, since torch's own classes do not know them."""
    return {name: value for name, value in options.items() if name not in STORAGE_OPTIONS or not is_torchs(name, value)}


def refuse_bad_values(options: Mapping[str, Any], spec: AlgorithmSpec) -> None:
    """Raises AlgorithmError if an option here has an unknown value, or does not go with another option."""
    problems = [
        Problem(name, repr(options[name]), " or ".join(map(repr, choices)), "write one of them, or the dtype itself")
        for name, choices in _CHOICES.items()
        if options.get(name, choices[0]) not in choices
    ]
    problems += [
        Problem(name, "True", f"False, as {why}", "leave it out") for name, why in _UNFIT.items() if options.get(name)
    ]
    if spec.compounds and options["state_dtype"] == CODES and options["rounding"] != NEAREST:
        found = f"{CODES!r}, whose noise {spec.name}'s steps gather in its state"
        problems.append(Problem("state_dtype", found, "'bfloat16' or None", _COMPOUNDS_REMEDY))
    if problems:
        raise AlgorithmError(f"{spec.name} cannot store its state in this way", problems, code="low-precision")


def warn_of_lost_changes(spec: AlgorithmSpec, options: Options) -> None:
    """Logs, once per way to store, that state rounded to nearest loses changes as small as the options imply."""
    stored = options["state_dtype"]
    if options["rounding"] != NEAREST or stored is None:
        return
    slowest = _least_change(options)
    if slowest < _HALF_A_STEP[stored]:
        _log_lost_changes(spec.name, stored, slowest)


def _least_change(options: Options) -> float:
    """Returns the smallest share of state that a step replaces: 1 − β; 0 for a sum."""
    decays = [float(beta) for beta in options.get("betas", ())]
    decays += [float(options.get(name) or 0.0) for name in ("alpha", "rho", "momentum")]
    if "initial_accumulator_value" in options:
        decays.append(1.0)
    return 1 - max((decay for decay in decays if decay <= 1), default=0.0)  # AdEMAMix's alpha is no decay


@lru_cache(maxsize=256)
def _log_lost_changes(algorithm: str, stored: str, slowest: float) -> None:
    _log.warning(
        '%s with rounding="nearest": a step changes some of its state by a share of %.2g, and state in %s loses '
        "changes below %.2g. It stays behind the gradients; leave rounding out to let it follow [low-precision]",
        algorithm,
        slowest,
        stored,
        _HALF_A_STEP[stored],
    )


def refuse_algorithm(spec: AlgorithmSpec) -> None:
    """Raises AlgorithmError unless an algorithm is elementwise, and sets parameters only in a step."""
    averages = any(entry.initial is AtFirstStep.PARAMETER for entry in spec.state)
    like = all(entry.kind in (Kind.PARAMETER, Kind.SCALAR) for entry in spec.state)
    if spec.elementwise and spec.takes_dense and like and not averages:
        return
    of = "rows with a gradient alone" if spec.elementwise else "more than one element at a time"
    if averages:
        of = "parameters that it makes anew of its state to evaluate"
    problem = Problem(
        key=", ".join(STORAGE_OPTIONS),
        found=f"{spec.name}, which computes with {of}",
        required="an elementwise algorithm with dense gradients",
        remedy=f"leave these options out for {spec.name}",
    )
    raise AlgorithmError(
        f"{spec.name} does not store state or parameters in fewer bits", [problem], code="low-precision"
    )


@dataclass(frozen=True, slots=True)
class Stored:
    """The stored form of one entry of state that has the parameter's shape.

    Args:
        name: of the entry.
        dtype: of its tensor; uint8 of codes.
        coded: whether it is codes, with a tensor of scales beside it.
        signed: whether an element may be negative.
        maximum: whether it is the largest that there was, and never falls.
    """

    name: str
    dtype: torch.dtype
    coded: bool
    signed: bool
    maximum: bool

    @property
    def scale_name(self) -> str:
        """The name of the entry with the scales of this entry's codes."""
        return f"{self.name}_scale"


@dataclass(frozen=True, slots=True)
class Form:
    """The stored form of a parameter's state.

    Args:
        entries: of state like the parameter, but for the master.
        scalars: the names of the algorithm's own numbers in the state.
        master: whether there is one.
        rounds_state, rounds_parameter: whether at random, where they are stored in fewer bits.
    """

    entries: tuple[Stored, ...]
    scalars: tuple[str, ...]
    master: bool
    rounds_state: bool
    rounds_parameter: bool

    @property
    def coded(self) -> bool:
        """Whether any entry is stored as codes."""
        return any(entry.coded for entry in self.entries)


def form_of(spec: AlgorithmSpec, options: Options, shape: tuple[int, ...], dtype: torch.dtype) -> Form:
    """Returns the form of the state of a parameter.

    Args:
        spec: of the algorithm itself.
        options: of the parameter's group.
        shape: global shape.
        dtype: of the parameter.
    """
    there = spec.entries(options, len(shape))
    entries = tuple(
        (entry.name, entry.signed, entry.maximum, entry.narrows(options))
        for entry in there
        if entry.kind is Kind.PARAMETER
    )
    scalars = tuple(entry.name for entry in there if entry.kind is Kind.SCALAR)
    return _form_of(entries, scalars, *(options[name] for name in STORAGE_OPTIONS), tuple(shape), dtype)


@lru_cache(maxsize=4096)
def _form_of(
    entries: tuple[tuple[str, bool, bool, bool], ...],
    scalars: tuple[str, ...],
    state_dtype: str | None,
    master_dtype: str | None,
    rounding: str | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Form:
    master = master_dtype is not None and dtype.itemsize == 2
    stepped = torch.float32 if master else dtype

    def stored(name: str, signed: bool, maximum: bool, narrows: bool) -> Stored:
        coded = state_dtype == CODES and narrows and suits_blocks(shape)
        in_bf16 = state_dtype == "bfloat16" and narrows
        kept = stepped if state_dtype is None else torch.bfloat16 if in_bf16 else torch.float32
        return Stored(name, torch.uint8 if coded else kept, coded, signed, maximum)

    at_random = rounding == STOCHASTIC and not master and dtype is torch.bfloat16
    of_state = rounding == STOCHASTIC or (rounding is None and state_dtype is not None)
    return Form(tuple(stored(*entry) for entry in entries), scalars, master, of_state, at_random)


def unfit(name: str, options: Options, dtype: torch.dtype) -> Iterator[Problem]:
    """Yields the problems of a group's options with a parameter of this dtype.

    A group that asks for nothing is computed in fp32 too, where another of the algorithm asks: fp64 would lose half of
    its bits, and a complex number its imaginary part.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        asked = [option for option in STORAGE_OPTIONS if not is_torchs(option, options[option])]
        for key in asked or (["dtype"] if dtype.is_floating_point or dtype.is_complex else []):
            yield Problem(
                key=f"{name}: {key}",
                found=f"a parameter of {dtype}, where steps are computed in float32",
                required="float32, bfloat16 or float16",
                remedy='give it to a group with an "algorithm" of its own, and without these options',
            )
    elif dtype is torch.float16 and options["rounding"] == STOCHASTIC and options["master_dtype"] is None:
        yield Problem(
            key=f"{name}: rounding",
            found=f"a parameter of {dtype} without a master",
            required="bfloat16, or a master",
            remedy="give it to a group without this option",
        )
