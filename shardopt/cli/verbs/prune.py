"""`shardopt prune`: removes the checkpoints of a run that rules do not keep, as `Manager` does during training."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from shardopt.checkpoint.arguments import refuse
from shardopt.checkpoint.run.branches import CheckpointId
from shardopt.checkpoint.run.listing import Listed, RunListing, list_run
from shardopt.checkpoint.run.metrics import remove_records
from shardopt.checkpoint.run.retention import Retention
from shardopt.checkpoint.saving.removal import remove_checkpoints, remove_leftovers
from shardopt.checkpoint.sources.referred import leftovers_in, references_under
from shardopt.checkpoint.storage import storage_of, wrap_os_errors
from shardopt.checkpoint.text import nbytes_text, plural
from shardopt.cli.output import Output, Span
from shardopt.cli.rules import parse_rules
from shardopt.cli.verbs import ls
from shardopt.errors import CheckpointError, CheckpointNotFoundError, Problem

_DEAD_SECONDS = 86_400.0  # since a file was written: no save pauses for so long, and clocks of hosts differ by less
_NEXT_SAVE = "the next save of the run removes what is left of them"


def prune(output: Output, *, root: str, verify: bool, yes: bool, **of_rules: Any) -> int:
    """Lists the checkpoints to be removed, or removes them.

    Only whole checkpoints of the run below its newest are removed, and what was to be removed when the run was taken
    back; and what was left of earlier ones as others referred to it, where none does that stays. What is damaged,
    abandoned, or the beginning of a branch stays, and so do files to which something refers that stays. Of what is
    unfinished only files go that nobody has written to for a day.

    Returns:
        1 if some of these could not be looked at or removed; the others are.

    Raises:
        OptionError: something would be removed, and no checkpoint of the run has the metric of `best`.
    """
    rules = parse_rules(**of_rules, required=True)
    listing = list_run(root, verify)
    if not (listing.checkpoints or listing.branches):
        problem = Problem(listing.url, "no checkpoint of a run", "the root of a run", "give another path")
        raise CheckpointNotFoundError("there is nothing to prune", [problem])
    kept = listing.reasons_to_keep(rules)
    unwanted = unwanted_in(listing, rules)
    if any(each.in_run and each.counts for each in unwanted):
        refuse(listing.problems_of(rules))  # it may be the best one that would be removed
    freed = bytes_freed(listing, unwanted)
    if yes:
        _refuse_changed(root, listing, kept)
        try:
            with wrap_os_errors(f"remove checkpoints of {listing.url}"):
                # At once, as they may refer to each other's files.
                failed = remove_checkpoints([storage_of(each.url) for each in unwanted])
                stay, under = {each.url for each in failed}, storage_of(root)
                gone = [each.id.name for each in unwanted if each.id is not None and each.url not in stay]
                remove_records(under, under.names(), gone)
        except KeyboardInterrupt:
            output.complain(f"interrupted: checkpoints may be without manifests, with files left; {_NEXT_SAVE}")
            raise
        if failed:
            remedy = "make it writable, or move it away; the others are removed"
            problems = [Problem(each.url, str(error), "a removal", remedy) for each, error in failed.items()]
            raise CheckpointError(f"cannot remove {plural(len(failed), 'checkpoint')}", problems)
        for each in unwanted:
            output.line(Span("removed ", "red"), f"step {_name(each)}, {nbytes_text(freed[each.url])}")
    else:
        ls.print_listing(output, listing, rules, kept)
    counted = f"{plural(len(unwanted), 'checkpoint')}, {nbytes_text(sum(freed.values()))}"
    needed = sum(each.nbytes or 0 for each in unwanted) - sum(freed.values())
    counted += f" ({nbytes_text(needed)} more stay, as checkpoints that are kept refer to them)" if needed else ""
    if yes:
        output.line(f"removed {counted}")
    elif unwanted:
        steps = ", ".join(map(_name, unwanted))
        output.line(Span(f"would remove {counted}: step {steps}; --yes removes them", "yellow"))
    else:
        output.line("would remove no checkpoint")
    newest = max((id.step for id in kept), default=-1)
    leftovers = _clear_leftovers(output, listing, newest, yes)
    _print_unfinished(output, listing, newest, [each["url"] for each in leftovers if each["removable_bytes"]])
    urls = {"unwanted": [each.url for each in unwanted], "removed": [each.url for each in unwanted if yes]}
    output.data({**ls.document(listing, rules, kept), **urls, "leftovers": leftovers})
    return 1 if any("error" in each for each in leftovers) else 0


def _print_unfinished(output: Output, listing: RunListing, newest: int, but: Collection[str]) -> None:
    """Says what stays without a manifest below the newest checkpoint, also of a removal that was interrupted.

    Args:
        but: URLs of which something else was said.
    """
    unfinished = [
        each for each in listing.checkpoints if each.condition == "unfinished" and each.in_run and each.url not in but
    ]
    steps = ", ".join(_name(each) for each in unfinished if each.id is not None and each.id.step < newest)
    if steps:
        output.line(f"unfinished stay: step {steps}, of saves or removals that broke off; {_NEXT_SAVE}")


def _clear_leftovers(output: Output, listing: RunListing, newest: int, yes: bool) -> list[dict[str, Any]]:
    """Tells of the files of saves that broke off, and removes them; returns them as JSON, with errors if that failed.

    Those that were written of late stay: they may be of a save, or of a copy from a tier, that is under way.

    Args:
        newest: the step below which the next save of the run removes them.
    """
    found, errors = list[dict[str, Any]](), dict[str, CheckpointError]()
    unfinished = [(each, each.id) for each in listing.checkpoints if each.condition == "unfinished" and each.id]
    if storage_of(listing.url).is_remote:  # which would cost a request for each file, and remove none
        steps = ", ".join(_name(each) for each, id in unfinished if id.step >= newest)
        if steps:
            why = "of saves that are under way, or broke off; a store does not say when files were written"
            output.line(f"unfinished stay: step {steps}, {why}; remove them if no job saves there")
        return []
    for each, id in unfinished:
        left = {"url": each.url, "bytes": 0, "removable_bytes": 0, "removed_bytes": 0}
        try:
            with wrap_os_errors(f"remove leftovers of {each.url}"), suppress(FileNotFoundError):  # that save has ended
                _clear(output, each, left, id.step >= newest, yes)
        except CheckpointError as error:
            errors[str(error)] = error  # once, of what all need
            left["error"] = error.to_json()
        if left["bytes"] or "error" in left:
            found.append(left)
    for failure in errors.values():
        output.error(failure)
    return found


def _clear(output: Output, each: Listed, left: dict[str, Any], stays: bool, yes: bool) -> None:
    """Does so for one directory.

    Args:
        left: the entry of it, to be filled in.
        stays: whether to tell of what stays.
    """
    storage = storage_of(each.url)
    sizes = {name: storage.size(name) for name in leftovers_in(storage)}
    dead = sum(sizes.get(name, 0) for name in leftovers_in(storage, _DEAD_SECONDS))
    left["bytes"], left["removable_bytes"] = sum(sizes.values()), dead
    step = f"of step {_name(each)}"
    what = f"{nbytes_text(dead)} {step}, which saves that broke off have left"
    if dead and yes:
        remove_leftovers(storage, _DEAD_SECONDS)
        left["removed_bytes"] = dead
        output.line(Span("removed ", "red"), what)
    elif dead:
        output.line(Span(f"would remove {what}; --yes removes them", "yellow"))
    young = left["bytes"] - dead
    if young and stays:
        why = "of a save that is under way, or broke off less than a day ago, as far as is known"
        output.line(f"stays: {nbytes_text(young)} {step}, {why}; remove {each.url} if no job saves there")


def _refuse_changed(root: str, listing: RunListing, kept: Collection[CheckpointId]) -> None:
    """Raises CheckpointError if the run has changed since it was listed, which may take long.

    It also raises if references cannot be read.
    """
    references_under(storage_of(root))
    now = list_run(root)
    committed = {each.id for each in now.checkpoints if each.counts}
    if now.branches != listing.branches or not committed.issuperset(kept):
        problem = Problem(listing.url, "other checkpoints or branches than before", "a run that stays", "try again")
        raise CheckpointError("the run has changed meanwhile; nothing was removed", [problem], code="run-root")


def unwanted_in(listing: RunListing, rules: Retention) -> list[Listed]:
    """Returns the checkpoints to remove, ascending, and then the bases that only these need.

    Below the newest that is whole, as a run that is under way restores that one and saves above it.
    """
    kept = listing.reasons_to_keep(rules)
    newest = max((id.step for id in kept), default=-1)

    def is_unwanted(each: Listed) -> bool:
        if each.id is None or not each.counts:
            return False
        if not each.in_run:
            return each.to_be_removed
        return each.id.step < newest and each.id not in kept

    unwanted = [each for each in listing.checkpoints if is_unwanted(each)]
    needed = {directory for directory, _ in _referred_by_others(listing, unwanted)}
    bases = [each for each in listing.checkpoints if each.condition == "base" and each.id]
    return unwanted + [each for each in bases if each.id and each.id.name not in needed]


def bytes_freed(listing: RunListing, unwanted: Sequence[Listed]) -> dict[str, int]:
    """Returns, by URL, the bytes of unwanted checkpoints' files that no remaining checkpoint refers to."""
    stay = _referred_by_others(listing, unwanted)
    return {
        each.url: sum(
            file.nbytes
            for file in each.files
            if each.id and file.directory is None and (each.id.name, file.name) not in stay
        )
        for each in unwanted
    }


def _referred_by_others(listing: RunListing, unwanted: Sequence[Listed]) -> set[tuple[str, str]]:
    """Returns directory and name of each file that remaining checkpoints refer to."""
    gone = {each.url for each in unwanted}
    stay = [each for each in listing.checkpoints if each.url not in gone]
    return {(file.directory, file.name) for each in stay for file in each.files if file.directory is not None}


def _name(each: Listed) -> str:
    assert each.id is not None
    return str(each.id.step) + (f" of branch {each.id.branch}" if not each.in_run else "")
