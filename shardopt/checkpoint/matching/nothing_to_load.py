"""Refuses loads that would load nothing, and would look like those that have loaded everything."""

from __future__ import annotations

from itertools import islice

from shardopt.checkpoint.format.manifest import Manifest
from shardopt.checkpoint.matching.renaming import Names
from shardopt.errors import MismatchError, Problem
from shardopt.state import FlatState


def is_met(flat: FlatState, names: Names) -> bool:
    """Whether this rank's app and the checkpoint have any key in common, or both have none."""
    manifest = names.manifest
    if any(key in stored for key in names.chosen for stored in (manifest.tensors, manifest.values, manifest.per_rank)):
        return True
    has_nothing = not (flat.leaves or manifest.tensors or manifest.values or manifest.per_rank)
    return has_nothing or any(each.elsewhere for each in flat.handbacks)


def refuse_nothing(manifest: Manifest, flat: FlatState, select: str | None) -> None:
    """Raises MismatchError for a load where no rank has a place for any key.

    Args:
        manifest: of the checkpoint.
        select: as for `load`.
    """
    if select is None:
        stored = ", ".join(islice((*manifest.tensors, *manifest.values, *manifest.per_rank), 3)) or "none"
        required = "one at least: nothing would be loaded"
        remedy = f"give names by rename={{...}}; the checkpoint has {stored}"
        problem = Problem("app", "no key that the checkpoint has", required, remedy)
    else:
        required = "a regex that is found in some key of both the app and the checkpoint"
        remedy = f"mend the regex; the app has {', '.join(islice(flat.leaves, 3)) or 'none'}"
        problem = Problem("select", repr(select), required, remedy)
    raise MismatchError("there is nothing to load", [problem])
