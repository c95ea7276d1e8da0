"""Data that stands in a pickle's result for objects and globals that are never made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Unknown:
    """An object that is never made. `name` is that of its class or function: "module.qualname"."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class Known(Unknown):
    """A global and the function that stands in for it. Left in the result as a value, it counts as unknown."""

    __slots__ = ("call",)

    def __init__(self, name: str, call: Callable[..., Any]) -> None:
        super().__init__(name)
        self.call = call


class ByteArray(Unknown):
    """The bytes of a bytearray, in which the latest protocol stores arrays. Left as a value, it counts as unknown."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        super().__init__("builtins.bytearray")
        self.data = data

    def __len__(self) -> int:
        return len(self.data)


class StandIn(Unknown):
    """An object that gets its state after it was made. Left as a value, it counts as unknown."""

    __slots__ = ()

    def build(self, state: Any) -> None:
        """Takes the state. Raises TypeError or ValueError for a state that does not fit."""
        raise TypeError(f"state for {self.name}")

    def settled(self) -> Any:
        """Returns the object that this one stands for, once it is complete."""
        return self


def settled(value: Any) -> Any:
    """Returns what a stand-in stands for, once it is complete; any other value as it is."""
    return value.settled() if isinstance(value, StandIn) else value


def text_of(data: bytes) -> str | Unknown:
    """Returns a str; an unknown object for one with lone surrogates, which Python pickles and no encoding has.

    Raises:
        UnicodeDecodeError: the bytes are no str at all.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        data.decode("utf-8", "surrogatepass")
        return Unknown("builtins.str that is not valid Unicode")
