"""The destinations of a run's checkpoints beside its root, and the checks of their arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardopt.checkpoint.storage import Storage
from shardopt.errors import OptionError, Problem

_DESTINATIONS = "tiers, the fastest first, and after them at most one Mirror"


@dataclass(frozen=True, slots=True)
class Tier:
    """A directory on each host in which a `Manager` keeps the newest checkpoints of its run.

    Args:
        path: the same on every host, of a directory that each has for itself: in its memory ("/dev/shm/run") or on its
            disks. It is made with mode 0700 if it is missing; one that other users may use is refused.
        every: saves go here at the first step at or after each multiple of this.
        keep_last: how many of the newest stay, of those that are copied; what is newer stays too.
        copies: on how many hosts each file is kept; a checkpoint survives the loss of any `copies - 1` of them.
        domain: the failure domain of this host, such as the name of its rack: copies go to hosts of other domains if
            there are any. None is one for each host.
        max_bytes_per_second: bytes that a host fetches for copies at most; None for no limit.
    """

    path: str
    every: int
    keep_last: int = 2
    copies: int = 1
    domain: str | None = None
    max_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        path = os.path.abspath(os.path.expanduser(self.path))  # whatever directory the process changes to
        object.__setattr__(self, "path", path)


@dataclass(frozen=True, slots=True)
class Mirror:
    """A second root of a run, to which its `Manager` copies committed checkpoints in the background.

    Args:
        url: a path, or a URL that fsspec knows, such as "s3://bucket/run"; another one than the root's.
        storage_options: as for `save`, for this URL. The repr does not have them.
    """

    url: str | os.PathLike[str]
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)


Destination = Tier | Mirror


def tiers_and_mirror(destinations: Any) -> tuple[tuple[Tier, ...], Mirror | None]:
    """Splits the destinations of a run. Raises OptionError if they are of other types, or in another order."""
    remedy = "give it as in destinations=[Tier(path, every=1), Mirror(url)]"
    if isinstance(destinations, str | bytes) or not isinstance(destinations, Sequence):
        problems = [Problem("destinations", repr(destinations), f"a list of {_DESTINATIONS}", remedy)]
        raise OptionError("invalid arguments", problems)
    problems = []
    for number, each in enumerate(destinations):
        if not isinstance(each, Tier | Mirror):
            found = repr(each)
        elif any(isinstance(before, Mirror) for before in destinations[:number]):
            found = f"a {type(each).__name__} after a Mirror"
        else:
            continue
        problems.append(Problem(f"destinations[{number}]", found, _DESTINATIONS, remedy))
    if problems:
        raise OptionError("invalid arguments", problems)
    mirror = destinations[-1] if destinations and isinstance(destinations[-1], Mirror) else None
    return tuple(each for each in destinations if isinstance(each, Tier)), mirror


def refuse_unfit_tiers(tiers: Sequence[Tier], roots: Sequence[Storage], incremental: bool) -> None:
    """Raises OptionError, listing all problems, if tiers cannot be used.

    Args:
        tiers: which come first of all destinations.
        roots: of the run and its mirror.
    """
    problems = []
    taken = {os.path.realpath(root.url) for root in roots if not root.is_remote}
    for number, tier in enumerate(tiers):
        counts = {name: getattr(tier, name) for name in ("every", "keep_last", "copies")}
        wrong = {name: "an int of at least 1" for name, n in counts.items() if type(n) is not int or n < 1}
        if os.path.realpath(tier.path) in taken:
            wrong["path"] = "another path than the root's and the mirror's: what a tier has is removed"
        limit = tier.max_bytes_per_second
        if limit is not None and not (isinstance(limit, int | float) and limit > 0):
            wrong["max_bytes_per_second"] = "a number of bytes above 0"
        if not isinstance(tier.domain, str | None):
            wrong["domain"] = "a name, or None"
        for name, required in wrong.items():
            key, found = f"destinations[{number}].{name}", repr(getattr(tier, name))
            problems.append(Problem(key, found, required, "mend this argument of Tier"))
    if len({tier.path for tier in tiers}) < len(tiers):
        problems.append(Problem("destinations", "one path twice", "a path for each", "mend it"))
    if tiers and incremental:
        remedy = "leave out one of the two"
        problems.append(Problem("incremental", "True, with tiers", "False: what hosts have refers to nothing", remedy))
    if problems:
        raise OptionError("these tiers cannot be used", problems)
