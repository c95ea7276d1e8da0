"""Keys of an optimizer's state, by which a comparison sees that one side only has some."""

from __future__ import annotations

from collections.abc import Iterable

from shardopt.state import Handback, join


def state_key(optimizer: Handback) -> str:
    """The key under which the state of an optimizer stands in an app."""
    return join((*optimizer.path, "state"))


def keys_of_state(optimizer: Handback, keys: Iterable[str]) -> list[str]:
    """Those of the keys, the app's or a checkpoint's under the app's names, that are within an optimizer's state."""
    prefix = f"{state_key(optimizer)}."
    return [key for key in keys if key.startswith(prefix)]
