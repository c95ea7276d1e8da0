"""What `shardopt ls` says of tiers: what this host has of each checkpoint, which is none by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shardopt.checkpoint.run.identity import run_at
from shardopt.checkpoint.run.shares import HostShare, TierListing, list_tier, tier_here, tiers_at
from shardopt.checkpoint.storage import storage_of
from shardopt.cli.output import Cell, Output, Span, nbytes_text, plural
from shardopt.errors import CheckpointError
from shardopt.world import utc_text

_TEXTS = {"all": "all of it", "some": "a share of it"}
_STYLES = {"all": "green", "some": "", "damaged": "bold red", "unreadable": "bold red", "unfinished": "yellow"}

Tier = tuple[Mapping[str, Any], TierListing | None]
"""What the root of a run tells of a tier, and what this host has there, if anything."""


def ls_tier(output: Output, url: str, verify: bool) -> int:
    """Lists a host's directory of a tier; status 1 where something there is damaged."""
    listing = list_tier(url, verify)
    print_tier(output, listing)
    output.line(
        Span("Each host has its own; how many a step is on, and which are whole, Manager.where() tells.", "dim")
    )
    output.data(tier_document({"path": listing.url}, listing))
    return int(has_damage(listing))


def tiers_of(url: str, verify: bool) -> tuple[list[Tier], str | None]:
    """Returns the tiers of the run in a root, and what keeps this host from telling of them; that is no reason not to
    list the root.
    """
    try:
        root = storage_of(url)
        tiers = tiers_at(root)
        run = run_at(root) if tiers else None
        return [(tier, tier_here(str(tier["path"]), run, verify)) for tier in tiers], None
    except CheckpointError as error:
        return [], str(error)


def print_tiers(output: Output, tiers: Sequence[Tier]) -> None:
    """Prints what this host has on each tier of a run, after what the root has."""
    for tier, here in tiers:
        rules = ", ".join(f"{name} {tier[name]}" for name in ("every", "keep_last", "copies") if name in tier)
        if here is None:
            output.line(
                "tier ", Span(str(tier["path"]), "bold"), f" ({rules}): this host has nothing of this run there"
            )
        else:
            print_tier(output, here, rules)


def print_tier(output: Output, listing: TierListing, rules: str = "") -> None:
    """Prints what a host has on a tier as a table."""
    run = "of nobody knows which run"
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
    output.table([header, *map(_row, listing.shares)], right=[0, 2, 3, 4])
    for each in listing.shares:
        for problem in each.problems:
            output.complain(str(problem))


def has_damage(listing: TierListing) -> bool:
    """Whether something that a host has on a tier is damaged or cannot be read."""
    return any(each.have in ("damaged", "unreadable") for each in listing.shares)


def tier_document(tier: Mapping[str, Any], listing: TierListing | None) -> dict[str, Any]:
    """Returns a tier as JSON has it; `here` is null where this host has nothing of the run there."""

    def of(share: HostShare) -> dict[str, Any]:
        wire = asdict(share)
        del wire["place"]
        return {"step": share.place.step, "branch": share.place.branch, **wire}

    here = None
    if listing is not None:
        run = None if listing.run is None else listing.run._asdict()
        here = {"url": listing.url, "run": run, "shares": [of(each) for each in listing.shares]}
    return {**tier, "here": here}


def _row(each: HostShare) -> list[Cell]:
    counts = "" if each.files is None else f"{each.files_here} of {each.files}"
    nbytes = ""
    if each.nbytes is not None and each.nbytes_here is not None:
        nbytes = f"{nbytes_text(each.nbytes_here)} of {nbytes_text(each.nbytes)}"
    return [
        Span(str(each.place.step) + (f" b{each.place.branch}" if each.place.branch else ""), "bold"),
        "" if each.saved_at is None else utc_text(each.saved_at),
        "" if each.world_size is None else f"{each.world_size:,}",
        counts,
        nbytes,
        _ranges(each.ranks),
        Span(_TEXTS.get(each.have, each.have), _STYLES[each.have]),
    ]


def _ranges(ranks: Iterable[int]) -> str:
    """Returns "0-3, 7" for 0, 1, 2, 3, 7."""
    ends: list[list[int]] = []
    for rank in ranks:
        if ends and rank == ends[-1][1] + 1:
            ends[-1][1] = rank
        else:
            ends.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)
