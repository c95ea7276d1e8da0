"""The options of algorithms: checks a constructor's arguments against the range of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Range(NamedTuple):
    """The values that an option may take.

    Args:
        words: the range, for errors.
        holds: whether a value is in it.
    """

    words: str
    holds: Callable[[Any], bool]


def is_rate(lr: Any) -> bool:
    """Whether a learning rate is a number ≥ 0, or a tensor of one element."""
    return lr.numel() == 1 if isinstance(lr, Tensor) else lr >= 0


def are_decays(betas: Sequence[float], count: int = 2) -> bool:
    """Whether the value is a sequence of this many numbers, all in [0, 1)."""
    return len(betas) == count and all(0 <= beta < 1 for beta in betas)


RATE = Range("at least 0, or a tensor of one element", is_rate)
NOT_NEGATIVE = Range("at least 0", lambda value: value >= 0)
POSITIVE = Range("more than 0", lambda value: value > 0)
DECAY = Range("in [0, 1)", lambda value: 0 <= value < 1)
DECAYS = Range("two numbers in [0, 1)", are_decays)
COUNT = Range("at least 1", lambda value: value >= 1)


def optional(within: Range) -> Range:
    """Returns a range that allows None in addition to another range."""
    return Range(f"{within.words}, or None", lambda value: value is None or within.holds(value))


def one_of(*choices: Any) -> Range:
    """Returns a range of exactly these values."""
    return Range(f"one of {choices}", choices.__contains__)


def options_of(arguments: Mapping[str, Any], **ranges: Range) -> dict[str, Any]:
    """Returns the group options among the arguments of an optimizer's constructor, in their order.

    Args:
        arguments: the constructor's `locals()`: itself, `params`, and the options.
        ranges: option → its range.

    Raises:
        ValueError: an option is out of its range; the first one is named.
    """
    refuse_options(type(arguments["self"]).__name__, arguments, **ranges)
    return {name: value for name, value in arguments.items() if name not in ("self", "params", "__class__")}


def refuse_options(algorithm: str, options: Mapping[str, Any], **ranges: Range) -> None:
    """Raises ValueError for the first option out of its range."""
    for name, (words, holds) in ranges.items():
        if not holds(options[name]):
            raise ValueError(f"{algorithm}'s {name} is {options[name]!r}; required {words}")


def rate_of(group: Mapping[str, Any]) -> Any:
    """Returns the learning rate of a group as a number.

    One on an accelerator stays a tensor there, without dimensions, so that nothing waits for it.
    """
    lr = group["lr"]
    if not isinstance(lr, Tensor):
        return lr
    return lr.item() if lr.is_cpu else lr.reshape(())
