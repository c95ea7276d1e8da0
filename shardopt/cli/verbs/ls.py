"""`shardopt ls`: lists a run's checkpoints, which are whole, which are kept and why; and this host's shares on
tiers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shardopt.checkpoint.converting.verify import verify as verify_checkpoint
from shardopt.checkpoint.run.branches import Branches, CheckpointId
from shardopt.checkpoint.run.listing import Listed, RunListing, condition_of, list_run, list_step, look_at
from shardopt.checkpoint.run.retention import Retention
from shardopt.checkpoint.run.root import run_at
from shardopt.checkpoint.run.shares import HostShare, TierListing, is_tier, list_tier, tier_here, tiers_at
from shardopt.checkpoint.sources.contents import CheckpointContents
from shardopt.checkpoint.sources.detect_format import open_source
from shardopt.checkpoint.storage import storage_of
from shardopt.checkpoint.text import nbytes_text, plural
from shardopt.cli.output import Cell, Output, Span, runs_of
from shardopt.cli.rules import parse_rules
from shardopt.errors import CheckpointError
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

_SHARE_TEXTS = {"all": "all of it", "some": "a share of it"}
_SHARE_STYLES = {"all": "green", "some": "", "damaged": "bold red", "unreadable": "bold red", "unfinished": "yellow"}

Tier = tuple[Mapping[str, Any], TierListing | None]
"""A tier as recorded in the root of a run, and this host's share of it, if any."""


def ls(output: Output, *, url: str, verify: bool, **of_rules: Any) -> int:
    """Lists a run, a tier or one checkpoint; status 1 if one of the run's is damaged or unreadable."""
    rules = parse_rules(**of_rules)
    if is_tier(url):
        return _ls_tier(output, url, verify)
    listing = list_run(url, verify)
    tiers, problem = tiers_of(listing.url, verify)
    if not (listing.checkpoints or listing.branches or tiers):
        return _ls_one(output, url, verify, rules)
    kept = listing.reasons_to_keep(rules)
    print_listing(output, listing, rules, kept)
    _print_tiers(output, tiers)
    if problem is not None:
        output.complain(problem)
    output.data(document(listing, rules, kept) | {"tiers": [_tier_document(*each) for each in tiers]})
    is_wrong = any(each.condition in _WRONG and each.in_run for each in listing.checkpoints)
    is_wrong = is_wrong or problem is not None
    return int(is_wrong or any(_has_damage(here) for _, here in tiers if here is not None))


def _ls_one(output: Output, url: str, verify: bool, rules: Retention) -> int:
    """Lists one checkpoint, and names its run; status 1 if it is damaged or unreadable."""
    of_run = list_step(url, verify)
    listing = of_run or RunListing(storage_of(url).url, Branches(), (_one(url, verify),))
    (one,) = listing.checkpoints
    whole = list_run(listing.url) if of_run and not rules.keeps_all else RunListing(listing.url, Branches(), ())
    kept = whole.reasons_to_keep(rules)
    place = "one checkpoint, of no run"
    if one.id is not None:
        branch = f", on branch {one.id.branch}" if listing.branches else ""
        place = f"step {one.id.step} of the run at {listing.url}{branch}"
    output.line(Span(one.url, "bold"), f": {place}", "" if one.in_run else ", which the run has abandoned")
    _print_table(output, [one], rules, kept)
    _complain_of_rules(output, whole, rules)
    run = listing.url if of_run else None
    output.data(document(listing, rules, kept) | {"url": one.url, "run": run, "tiers": []})
    return int(one.condition in _WRONG)


def _one(url: str, verify: bool) -> Listed:
    """Describes a checkpoint outside a run. Raises CheckpointNotFoundError if there is none."""
    listed = look_at(storage_of(url), verify)
    if listed.condition != "unfinished":
        return listed
    # Of another format, or none at all.
    contents = CheckpointContents(open_source(storage_of(url)))
    stored = contents.manifest
    condition, problems = condition_of(verify_checkpoint(url) if verify else None)
    return Listed(
        url=contents.url,
        condition=condition,
        problems=problems,
        saved_at=stored.saved_at,
        world_size=stored.world_size,
        tensors=len(stored.tensors),
        nbytes=sum(file.nbytes for file in stored.files),
        metrics=stored.metrics,
    )


def document(listing: RunListing, rules: Retention, kept: dict[CheckpointId, list[str]]) -> dict[str, Any]:
    """Returns a listing as JSON. `kept` is null if no rules were given."""

    def of(each: Listed) -> dict[str, Any]:
        wire = asdict(each)
        del wire["files"]
        id = wire.pop("id") and each.id
        why = [reason for reason in kept.get(id, []) if reason != "no rule"] if id else []
        return {
            "step": id.step if id else None,
            "branch": id.branch if id else None,
            **wire,
            "kept": id in kept if id and each.in_run and not rules.keeps_all else None,
            "why": why,
        }

    return {
        "url": listing.url,
        "branch": listing.branches.current,
        "branches": [each._asdict() for each in listing.branches.values()],
        "checkpoints": [of(each) for each in listing.checkpoints],
    }


def print_listing(output: Output, listing: RunListing, rules: Retention, kept: dict[CheckpointId, list[str]]) -> None:
    """Prints a listing as a table: the run's checkpoints first, then abandoned ones."""
    run = [each for each in listing.checkpoints if each.in_run]
    aside = [each for each in listing.checkpoints if not each.in_run]
    branch = f", on branch {listing.branches.current}" if listing.branches else ""
    committed = [each for each in run if each.condition not in ("unfinished", "base")]
    nbytes = nbytes_text(sum(each.nbytes or 0 for each in listing.checkpoints))
    output.line(Span(listing.url, "bold"), f": a run of {plural(len(committed), 'checkpoint')}{branch}, {nbytes}")
    _print_table(output, run, rules, kept)
    for each in aside:
        if each.id is not None:
            state = ", to be removed" if each.to_be_removed else ""
            output.line(
                f"abandoned, of branch {each.id.branch}: step {each.id.step}, ",
                Span(each.condition, _STYLES[each.condition]),
                f"{state}, in {each.id.name}",
            )
    _complain_of(output, aside)
    _complain_of_rules(output, listing, rules)


def _complain_of_rules(output: Output, listing: RunListing, rules: Retention) -> None:
    for problem in listing.problems_of(rules):
        output.complain(str(problem))


def _print_table(
    output: Output, listed: Sequence[Listed], rules: Retention, kept: dict[CheckpointId, list[str]]
) -> None:
    """Prints a row for each checkpoint, and then their problems."""
    metrics = list(dict.fromkeys(name for each in listed for name in each.metrics or {}))
    beside = ["beside"] if any(each.nbytes_beside for each in listed) else []
    header = ["step", "saved", "ranks", "tensors", "bytes", *beside, *metrics, "condition", "kept"]
    rows = [_row(each, metrics, rules, kept, bool(beside)) for each in listed]
    output.table(
        [[Span(name, "dim") for name in header], *rows],
        right=[0, *range(2, 5 + len(beside) + len(metrics))],
    )
    _complain_of(output, listed)


def _complain_of(output: Output, listed: Sequence[Listed | HostShare]) -> None:
    for each in listed:
        for problem in each.problems:
            output.complain(str(problem))


def _row(
    each: Listed, metrics: Sequence[str], rules: Retention, kept: dict[CheckpointId, list[str]], has_beside: bool
) -> list[Cell]:
    measured = each.metrics or {}
    why = [reason for reason in kept.get(each.id, []) if reason != "no rule"] if each.id else []
    stays = ", ".join(why)
    if not why and each.id and not rules.keeps_all and each.counts:
        stays = "no"
    return [
        Span("" if each.id is None else str(each.id.step), "bold"),
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


def _ls_tier(output: Output, url: str, verify: bool) -> int:
    """Lists a host's directory of a tier; status 1 if anything there is damaged."""
    listing = list_tier(url, verify)
    _print_tier(output, listing)
    output.line(
        Span("Each host has its own share; Manager.where() knows which steps are whole, and on how many hosts.", "dim")
    )
    output.data(_tier_document({"path": listing.url}, listing))
    return int(_has_damage(listing))


def tiers_of(url: str, verify: bool) -> tuple[list[Tier], str | None]:
    """Returns the tiers of the run in a root, and why this host cannot list them, if so.

    The root is listed in any case.
    """
    try:
        root = storage_of(url)
        tiers = tiers_at(root)
        run = run_at(root) if tiers else None
        return [(tier, tier_here(str(tier["path"]), run, verify)) for tier in tiers], None
    except CheckpointError as error:
        return [], str(error)


def _print_tiers(output: Output, tiers: Sequence[Tier]) -> None:
    """Prints this host's shares on each tier of a run, after the root."""
    for tier, here in tiers:
        rules = ", ".join(f"{name} {tier[name]}" for name in ("every", "keep_last", "copies") if name in tier)
        if here is None:
            output.line(
                "tier ", Span(str(tier["path"]), "bold"), f" ({rules}): this host has nothing of this run there"
            )
        else:
            _print_tier(output, here, rules)


def _print_tier(output: Output, listing: TierListing, rules: str = "") -> None:
    """Prints a host's shares on a tier as a table."""
    run = "of an unknown run"
    if listing.run is not None:
        run = f"of run {listing.run.id[:8]}, which began at {listing.run.root}"
    begin, rules = ("tier ", f" ({rules})") if rules else ("", "")
    shares = [each for each in listing.shares if each.have != "unfinished"]
    output.line(
        begin,
        Span(listing.url, "bold"),
        f"{rules}: what this host has of {plural(len(shares), 'checkpoint')} {run}, "
        f"{nbytes_text(sum(each.nbytes_here or 0 for each in shares))}",
    )
    header = [Span(name, "dim") for name in ("step", "saved", "ranks", "files", "bytes", "of ranks", "here")]
    output.table([header, *map(_share_row, listing.shares)], right=[0, 2, 3, 4])
    _complain_of(output, listing.shares)


def _has_damage(listing: TierListing) -> bool:
    """Whether any share of a host on a tier is damaged or unreadable."""
    return any(each.have in _WRONG for each in listing.shares)


def _tier_document(tier: Mapping[str, Any], listing: TierListing | None) -> dict[str, Any]:
    """Returns a tier as JSON; `here` is null if this host has nothing of the run there."""

    def of(share: HostShare) -> dict[str, Any]:
        wire = asdict(share)
        del wire["id"]
        return {"step": share.id.step, "branch": share.id.branch, **wire}

    here = None
    if listing is not None:
        run = None if listing.run is None else listing.run._asdict()
        here = {"url": listing.url, "run": run, "shares": [of(each) for each in listing.shares]}
    return {**tier, "here": here}


def _share_row(each: HostShare) -> list[Cell]:
    counts = "" if each.files is None else f"{each.files_here} of {each.files}"
    nbytes = ""
    if each.nbytes is not None and each.nbytes_here is not None:
        nbytes = f"{nbytes_text(each.nbytes_here)} of {nbytes_text(each.nbytes)}"
    return [
        Span(str(each.id.step) + (f" b{each.id.branch}" if each.id.branch else ""), "bold"),
        "" if each.saved_at is None else utc_text(each.saved_at),
        _text(each.world_size),
        counts,
        nbytes,
        ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs_of(each.ranks)),
        Span(_SHARE_TEXTS.get(each.have, each.have), _SHARE_STYLES[each.have]),
    ]
