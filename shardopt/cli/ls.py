"""`shardopt ls`: the checkpoints of a run, which are whole, which are kept and why; what this host has on its tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shardopt import checkpoint
from shardopt.checkpoint.run.listing import Listed, RunListing, list_run, look_at
from shardopt.checkpoint.run.retention import Retention
from shardopt.checkpoint.run.shares import is_tier
from shardopt.checkpoint.run.steps import Place
from shardopt.checkpoint.storage import storage_of
from shardopt.cli.ls_tiers import has_damage, ls_tier, print_tiers, tier_document, tiers_of
from shardopt.cli.output import Cell, Output, Span, nbytes_text, plural
from shardopt.cli.rules import parse_rules
from shardopt.world import utc_text

_STYLES = {
    "whole": "green",
    "committed": "",
    "base": "dim",
    "damaged": "bold red",
    "unreadable": "bold red",
    "unfinished": "yellow",
}
_WRONG = ("damaged", "unreadable")


def ls(
    output: Output, *, url: str, verify: bool, keep_last: int | None, keep_every: int | None, best: str | None
) -> int:
    """Lists a run, a tier or one checkpoint; status 1 where one of those of the run is damaged or unreadable."""
    rules = parse_rules(keep_last, keep_every, best)
    if is_tier(url):
        return ls_tier(output, url, verify)
    listing = list_run(url, verify)
    tiers, problem = tiers_of(listing.url, verify)
    if not (listing.checkpoints or listing.branches or tiers):
        listing = RunListing(listing.url, listing.branches, (_one(url, verify),))
    kept = listing.reasons_to_keep(rules)
    print_listing(output, listing, rules, kept)
    print_tiers(output, tiers)
    if problem is not None:
        output.complain(problem)
    output.data(document(listing, rules, kept) | {"tiers": [tier_document(*each) for each in tiers]})
    is_wrong = any(each.condition in _WRONG and each.in_run for each in listing.checkpoints)
    is_wrong = is_wrong or problem is not None
    return int(is_wrong or any(has_damage(here) for _, here in tiers if here is not None))


def _one(url: str, verify: bool) -> Listed:
    """Describes a checkpoint that is no part of a run. Raises CheckpointNotFoundError where there is none."""
    listed = look_at(storage_of(url), verify)
    if listed.condition != "unfinished":
        return listed
    # Of another format, or none at all.
    with checkpoint.open(url) as reader:
        stored = reader.manifest
    problems = checkpoint.verify(url).problems if verify else ()
    return Listed(
        url=reader.url,
        condition="damaged" if problems else "whole" if verify else "committed",
        problems=problems,
        saved_at=stored.saved_at,
        world_size=stored.world_size,
        tensors=len(stored.tensors),
        nbytes=sum(file.nbytes for file in stored.files),
        metrics=stored.metrics,
    )


def document(listing: RunListing, rules: Retention, kept: dict[Place, list[str]]) -> dict[str, Any]:
    """Returns a listing as JSON has it. `kept` is null where no rules were given."""

    def of(each: Listed) -> dict[str, Any]:
        wire = asdict(each)
        del wire["files"]
        place = wire.pop("place") and each.place
        why = [reason for reason in kept.get(place, []) if reason != "no rule"] if place else []
        return {
            "step": place.step if place else None,
            "branch": place.branch if place else None,
            **wire,
            "kept": place in kept if place and each.in_run and rules.last is not None else None,
            "why": why,
        }

    return {
        "url": listing.url,
        "branch": listing.branches.current,
        "branches": [each._asdict() for each in listing.branches.values()],
        "checkpoints": [of(each) for each in listing.checkpoints],
    }


def print_listing(output: Output, listing: RunListing, rules: Retention, kept: dict[Place, list[str]]) -> None:
    """Prints a listing as a table, those of the run first, then those that are set aside."""
    run = [each for each in listing.checkpoints if each.in_run]
    aside = [each for each in listing.checkpoints if not each.in_run]
    if [each.place for each in listing.checkpoints] == [None]:
        output.line(Span(listing.url, "bold"), ": one checkpoint, of no run")
    else:
        branch = f", on branch {listing.branches.current}" if listing.branches else ""
        committed = [each for each in run if each.condition not in ("unfinished", "base")]
        nbytes = nbytes_text(sum(each.nbytes or 0 for each in listing.checkpoints))
        output.line(Span(listing.url, "bold"), f": a run of {plural(len(committed), 'checkpoint')}{branch}, {nbytes}")
    metrics = list(dict.fromkeys(name for each in listing.checkpoints for name in each.metrics or {}))
    beside = ["beside"] if any(each.nbytes_beside for each in run) else []
    header = ["step", "saved", "ranks", "tensors", "bytes", *beside, *metrics, "condition", "kept"]
    rows = [_row(each, metrics, rules, kept, bool(beside)) for each in run]
    output.table(
        [[Span(name, "dim") for name in header], *rows],
        right=[0, *range(2, 5 + len(beside) + len(metrics))],
    )
    for each in aside:
        if each.place is not None:
            state = ", to be removed" if each.to_be_removed else ""
            output.line(
                f"set aside, of branch {each.place.branch}: step {each.place.step}, ",
                Span(each.condition, _STYLES[each.condition]),
                f"{state}, in {each.place.name}",
            )
    for each in listing.checkpoints:
        for problem in each.problems:
            output.complain(str(problem))


def _row(
    each: Listed, metrics: Sequence[str], rules: Retention, kept: dict[Place, list[str]], has_beside: bool
) -> list[Cell]:
    measured = each.metrics or {}
    why = [reason for reason in kept.get(each.place, []) if reason != "no rule"] if each.place else []
    stays = ", ".join(why)
    if not why and each.place and rules.last is not None and each.counts:
        stays = "no"
    return [
        Span("" if each.place is None else str(each.place.step), "bold"),
        "" if each.saved_at is None else utc_text(each.saved_at),
        _text(each.world_size),
        _text(each.tensors),
        "" if each.nbytes is None else nbytes_text(each.nbytes),
        *([nbytes_text(each.nbytes_beside) if each.nbytes_beside else ""] if has_beside else []),
        *(f"{measured[name]:.6g}" if name in measured else "" for name in metrics),
        Span(each.condition, _STYLES[each.condition]),
        Span(stays, "yellow" if stays == "no" else "cyan"),
    ]


def _text(number: int | None) -> str:
    return "" if number is None else f"{number:,}"
