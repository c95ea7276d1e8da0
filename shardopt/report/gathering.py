"""All that a report shows, as one JSON document: what `shardopt report --json` prints, and what the page has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardopt.checkpoint.run.listing import RunListing, list_run, list_step
from shardopt.checkpoint.run.retention import Retention
from shardopt.checkpoint.sources.contents import CheckpointContents
from shardopt.checkpoint.sources.detect_format import open_source
from shardopt.checkpoint.storage import storage_of
from shardopt.cli.logs import seconds_in
from shardopt.cli.output import json_form
from shardopt.errors import CheckpointError, MismatchError, Problem
from shardopt.report.changes import changes_document
from shardopt.report.findings import findings_of
from shardopt.report.runs import run_documents
from shardopt.report.tensors import checkpoint_document
from shardopt.version import __version__
from shardopt.world import world


def report_document(
    urls: Sequence[str], against: str | None, values: bool, logs: Sequence[str], rules: Retention
) -> dict[str, Any]:
    """Returns the document of a report. Local; changes nothing.

    Args:
        urls: a run, of which the newest complete step is opened, or one checkpoint; then its mirrors and streams.
        against: the URL of a checkpoint to compare with; its tensors are read where checksums differ.
        values: whether all tensors are read for their statistics.
        logs: files with the log of the run, for the seconds that training waited.
        rules: of retention; those that keep all say nothing.

    Raises:
        CheckpointNotFoundError: there is neither a run nor a checkpoint at the first URL, or none to compare with.
        CheckpointError: what is there cannot be read.
        MismatchError: `values` or `against` without a complete checkpoint.
    """
    saves = seconds_in(logs)
    listing = list_run(urls[0])
    is_run = bool(listing.checkpoints or listing.branches)
    contents = _newest(listing) if is_run else CheckpointContents(open_source(storage_of(urls[0])))
    if contents is None and (values or against is not None):
        problem = Problem(listing.url, "no step that can be opened", "one", "leave out --values and --against")
        raise MismatchError("there is no checkpoint to read", [problem], code="nothing-selected")
    if not is_run and (of_run := list_step(urls[0])) is not None:
        listing, is_run = list_run(of_run.url), True
    document: dict[str, Any] = {
        "version": __version__,
        "made_at": world().wall_clock(),
        "url": listing.url,
        "runs": [*run_documents(listing, urls[1:], saves, rules)] if is_run else [],
        "checkpoint": None if contents is None else checkpoint_document(contents, values),
        "against": None if contents is None or against is None else changes_document(contents, against),
    }
    of_rules = [{"kind": "rule", "text": str(each)} for each in listing.problems_of(rules)] if is_run else []
    wire: dict[str, Any] = json_form({**document, "findings": [*findings_of(document), *of_rules]})
    return wire


def _newest(listing: RunListing) -> CheckpointContents | None:
    """Opens the newest complete step of a run; None if there is none."""
    for each in reversed(listing.checkpoints):
        if each.counts and each.in_run:
            try:
                return CheckpointContents(open_source(storage_of(each.url)))
            except CheckpointError:  # it was removed meanwhile, or is damaged in a way that the listing does not see
                continue
    return None
