"""A run over time: its steps, where each of them is complete, its branches, and what is no longer there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, NamedTuple

from shardopt.checkpoint.run.branches import Branches, CheckpointId, parse_id
from shardopt.checkpoint.run.listing import Listed, RunListing, list_run
from shardopt.checkpoint.run.retention import Retention
from shardopt.checkpoint.run.root import STREAM_NAME
from shardopt.checkpoint.run.shares import HostShare
from shardopt.checkpoint.storage import storage_of
from shardopt.cli.verbs import ls
from shardopt.errors import Problem

COMPLETE = ("whole", "committed", "all")
"""The conditions of a place that has all of a step."""
NO_FILE = "no such file"
"""What `Problem.found` says of a missing file."""

Seconds = Mapping[CheckpointId, Mapping[str, float]]


class Seen(NamedTuple):
    """Parts of a step that a place has, as `Listed` and `HostShare` say; `save_id` is None where that is not known."""

    condition: str
    problems: tuple[Problem, ...]
    save_id: str | None


class Place(NamedTuple):
    """A place that steps of a run are in: its root, its mirror, or this host's directory of a tier."""

    url: str
    kind: Literal["root", "mirror", "tier"]
    seen: Mapping[CheckpointId, Seen]


def run_documents(
    root: RunListing, others: Sequence[str], saves: Seconds, rules: Retention
) -> Iterator[dict[str, Any]]:
    """Yields a run as JSON, and then each stream of weights among `others`. Local; reads manifests.

    Args:
        root: the listing of its root.
        others: URLs of its mirrors, and of the roots of publishers.
        saves: seconds by checkpoint, from logs.
        rules: which steps they keep is said; those that keep all say nothing.

    Raises:
        CheckpointError: one of the roots cannot be read.
    """
    streams = [list_run(url) for url in others if storage_of(url).exists(STREAM_NAME)]
    mirrors = [list_run(url) for url in others if not storage_of(url).exists(STREAM_NAME)]
    is_stream = storage_of(root.url).exists(STREAM_NAME)
    yield _document("stream" if is_stream else "run", root, mirrors, saves, rules)
    yield from (_document("stream", each, (), {}, Retention()) for each in streams)


def _document(
    kind: str, root: RunListing, mirrors: Sequence[RunListing], saves: Seconds, rules: Retention
) -> dict[str, Any]:
    steps: dict[CheckpointId, dict[str, Any]] = {}
    places: list[Place] = []
    kept = root.reasons_to_keep(rules)
    for listing in (root, *mirrors):
        wires = ls.document(listing, rules, kept)["checkpoints"]
        for each, wire in zip(listing.checkpoints, wires, strict=True):
            if each.id is not None and (each.id not in steps or steps[each.id]["save_id"] is None):
                steps[each.id] = {**wire, "links": _links(each)}
        seen = {each.id: Seen(each.condition, each.problems, each.save_id) for each in listing.checkpoints if each.id}
        places.append(Place(listing.url, "root" if listing is root else "mirror", seen))
    tiers, problem = ls.tiers_of(root.url, False)
    for tier, here in tiers:
        shares = {} if here is None else {each.id: each for each in here.shares}
        steps = {id: _step_of(share, root.branches) for id, share in shares.items()} | steps
        seen = {id: Seen(share.have, share.problems, None) for id, share in shares.items()}
        places.append(Place(str(tier["path"]), "tier", seen))
    for id, step in steps.items():
        step["stall_seconds"] = saves.get(id, {}).get("stall_seconds")
        if step["seconds"] is None:
            step["seconds"] = saves.get(id, {}).get("seconds")
        step["left"] = _why_left(root.branches, id, step["condition"])
        step["places"] = [*_places_of(id, step["save_id"], places)]
        step["complete"] = any(place["complete"] for place in step["places"])
        step["alone"] = _alone(step, places)
        for name in ("condition", "problems", "url"):  # of one place; `places` has those of all
            del step[name]
    gone = sorted(saves.keys() - steps.keys())
    return {
        "kind": kind,
        "url": root.url,
        "branch": root.branches.current,
        "branches": [each._asdict() for each in root.branches.values()],
        "places": [*_named(places)],
        "problem": problem,
        "metrics": [*dict.fromkeys(name for step in steps.values() for name in step["metrics"] or {})],
        "steps": [steps[id] for id in sorted(steps)],
        "removed": [{**id._asdict(), **saves[id], "left": _why_gone(root.branches, id)} for id in gone],
    }


def _links(listed: Listed) -> list[int]:
    """Returns the steps beside it whose files a checkpoint needs, ascending."""
    ids = {parse_id(file.directory) for file in listed.files if file.directory is not None}
    return sorted({id.step for id in ids if id is not None})


def _step_of(share: HostShare, branches: Branches) -> dict[str, Any]:
    """Returns a step that only tiers have, in the form of the others."""
    one = Listed(
        share.url,
        "unfinished",
        id=share.id,
        in_run=branches.has(share.id),
        saved_at=share.saved_at,
        world_size=share.world_size,
        nbytes=share.nbytes,
    )
    (wire,) = ls.document(RunListing("", branches, (one,)), Retention(), {})["checkpoints"]
    return {**wire, "links": []}


def _places_of(id: CheckpointId, save_id: str | None, places: Sequence[Place]) -> Iterator[dict[str, Any]]:
    """Yields the condition of a step in each place that has anything of it; `place` counts from 0."""
    for number, place in enumerate(places):
        seen = place.seen.get(id)
        if seen is None:
            continue
        is_other = None not in (seen.save_id, save_id) and seen.save_id != save_id
        is_missing = bool(seen.problems) and all(each.found == NO_FILE for each in seen.problems)
        condition = "another save" if is_other else "files missing" if is_missing else seen.condition
        problems = [asdict(each) for each in seen.problems]
        yield {"place": number, "condition": condition, "complete": condition in COMPLETE, "problems": problems}


def _alone(step: Mapping[str, Any], places: Sequence[Place]) -> int | None:
    """Returns the one place that has all of a step, if its root or a mirror should have it too; otherwise None.

    A tier may have steps that the root is never to get: those that are not there at all are no loss.
    """
    complete = [each["place"] for each in step["places"] if each["complete"]]
    if len(complete) != 1 or not step["in_run"] or step["left"] is not None:
        return None
    (alone,) = complete
    there = {each["place"] for each in step["places"]}
    expected = {number for number, place in enumerate(places) if place.kind != "tier"}
    lacking = (expected & there if places[alone].kind == "tier" else expected) - {alone}
    return alone if lacking else None


def _named(places: Sequence[Place]) -> Iterator[dict[str, str]]:
    """Yields each place with a short name: "root"; "mirror 1" where there are several mirrors."""
    kinds = [each.kind for each in places]
    for at, (url, kind, _) in enumerate(places):
        name = kind if kinds.count(kind) == 1 else f"{kind} {kinds[:at].count(kind) + 1}"
        yield {"url": url, "kind": kind, "name": name}


def _why_left(branches: Branches, id: CheckpointId, condition: str) -> str | None:
    """Returns why a step is not, or not all, in the run any more; None if it is."""
    if condition == "base":
        return "removed; its files stay for the steps that refer to them"
    begun = [each for each in branches.values() if id.step > each.from_step and branches.has(id, each.of)]
    if branches.has(id) or not begun:
        return None
    fate = "to be removed" if branches.is_removed(id) else "abandoned"
    return f"{fate}: branch {begun[0].number} began at step {begun[0].from_step}"


def _why_gone(branches: Branches, id: CheckpointId) -> str:
    """Returns why a step that a log tells of is not there."""
    left = _why_left(branches, id, "")
    return "by retention or by hand: runs do not record which" if left is None else left
