"""`shardopt prune`: removes the checkpoints of a run that rules would not keep, as `Manager` does behind a training."""

from __future__ import annotations

from collections.abc import Collection

from shardopt.checkpoint.commit import remove_checkpoint
from shardopt.checkpoint.run.listing import Listed, RunListing, list_run
from shardopt.checkpoint.run.retention import Rules
from shardopt.checkpoint.run.steps import Place
from shardopt.checkpoint.storage import storage_of, wrap_os_errors
from shardopt.cli import ls
from shardopt.cli.output import Output, Span, nbytes_text, plural
from shardopt.cli.rules import parse_rules
from shardopt.errors import CheckpointError, CheckpointNotFoundError, Problem


def prune(
    output: Output,
    *,
    root: str,
    keep_last: int,
    keep_every: int | None,
    best: str | None,
    verify: bool,
    yes: bool,
) -> int:
    """Lists what would be removed, or removes it.

    Only whole checkpoints of the run below its newest are removed, and what was to be removed when the run was taken
    back. What is damaged, unfinished, set aside, or the beginning of a branch stays.
    """
    rules = parse_rules(keep_last, keep_every, best)
    listing = list_run(root, verify)
    if not (listing.checkpoints or listing.branches):
        problem = Problem(listing.url, "no checkpoint of a run", "the root of a run", "give another path")
        raise CheckpointNotFoundError("there is nothing to prune", [problem])
    kept = listing.reasons_to_keep(rules)
    unwanted = unwanted_in(listing, rules)
    removed: list[Listed] = []
    if yes:
        _refuse_changed(root, listing, kept)
    for each in unwanted:
        if yes:
            with wrap_os_errors(f"remove {each.url}"):
                remove_checkpoint(storage_of(each.url))
            removed.append(each)
            output.line(Span("removed ", "red"), f"step {_name(each)}, {nbytes_text(each.nbytes or 0)}")
    if not yes:
        ls.print_listing(output, listing, rules, kept)
    total = nbytes_text(sum(each.nbytes or 0 for each in unwanted))
    counted = f"{plural(len(unwanted), 'checkpoint')}, {total}"
    if yes:
        output.line(f"removed {counted}")
    elif unwanted:
        steps = ", ".join(map(_name, unwanted))
        output.line(Span(f"would remove {counted}: step {steps}; --yes removes them", "yellow"))
    else:
        output.line("would remove nothing")
    urls = {"unwanted": [each.url for each in unwanted], "removed": [each.url for each in removed]}
    output.data({**ls.document(listing, rules, kept), **urls})
    return 0


def _refuse_changed(root: str, listing: RunListing, kept: Collection[Place]) -> None:
    """Raises CheckpointError where the run is another than it was when it was listed, which may take long."""
    now = list_run(root)
    committed = {each.place for each in now.checkpoints if each.counts}
    if now.branches != listing.branches or not committed.issuperset(kept):
        problem = Problem(listing.url, "other checkpoints or branches than before", "a run that stays", "try again")
        raise CheckpointError("the run has changed meanwhile; nothing was removed", [problem])


def unwanted_in(listing: RunListing, rules: Rules) -> list[Listed]:
    """Returns the checkpoints that are to go, ascending.

    Below the newest that is whole, as a run that is under way restores that one and saves above it.
    """
    kept = listing.reasons_to_keep(rules)
    newest = max((place.step for place in kept), default=-1)

    def is_unwanted(each: Listed) -> bool:
        if each.place is None or not each.counts:
            return False
        if not each.in_run:
            return each.to_be_removed
        return each.place.step < newest and each.place not in kept

    return [each for each in listing.checkpoints if is_unwanted(each)]


def _name(each: Listed) -> str:
    assert each.place is not None
    return str(each.place.step) + (f" of branch {each.place.branch}" if not each.in_run else "")
