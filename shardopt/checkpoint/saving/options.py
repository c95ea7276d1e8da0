"""The options of saves: those of a program, and those that only this package gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from shardopt.checkpoint.format.manifest import RenameRules
from shardopt.checkpoint.progress import Progress
from shardopt.checkpoint.saving.planning.replica_check import CheckReplicas, refuse_unknown_choice
from shardopt.checkpoint.saving.writing.earlier import Kept
from shardopt.checkpoint.saving.writing.row_prints import RowPrints
from shardopt.checkpoint.saving.writing.unchanged import Chain
from shardopt.errors import OptionError, Problem, ShardoptError
from shardopt.ranks import DEADLINE_SECONDS, Group
from shardopt.state.state import Tied, refuse_chains, refuse_no_regex


@dataclass(frozen=True)
class SaveOptions:
    """The options of a `Manager`'s saves, with the same meanings as for `save`.

    Args:
        durable, check_replicas, progress, select: as for `save`.
        deadline_seconds: how long a rank may show no sign of life before the others give up and name it; in restores
            too.
        tied: as for `save`; in restores too.

    Raises ValueError: `check_replicas` is none of its values. OptionError lists all other invalid arguments.
    """

    durable: bool = True
    check_replicas: CheckReplicas = "sampled"
    progress: Progress | None = None
    deadline_seconds: float = DEADLINE_SECONDS
    tied: Tied | None = None
    select: str | None = None

    def __post_init__(self) -> None:
        if self.check_replicas not in get_args(CheckReplicas):
            refuse_unknown_choice(self.check_replicas)
        if self.select is not None:
            refuse_no_regex("select", self.select)
        if self.tied:
            refuse_chains(self.tied)
        seconds, problems = self.deadline_seconds, []
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            problems.append(Problem("deadline_seconds", repr(seconds), "more than 0 seconds", "give a number"))
        if not isinstance(self.durable, bool):
            problems.append(Problem("durable", repr(self.durable), "one of True, False", "pass one of them"))
        if problems:
            raise OptionError("invalid arguments", problems)


@dataclass(frozen=True)
class SaveTerms(SaveOptions):
    """All options of one save.

    `process_group` and `base` are as for `save`. `base_required` is whether it is an error that there is no such base,
    or a damaged one; otherwise all is written. `fallback_urls` are tried in turn if there is no room. `renamed` are the
    rules of `rename` that the names had since the run began, if known. `in_background`: training continues meanwhile.
    `chain` says what deltas are for: "bounded" for fewer bytes, as long as restores stay fast; "link" and "anchor" for
    followers, who take them one by one. An anchor is written whole beside them. `kept` has the bytes of the last save,
    to compare with these; None to read them where they are stored. `prints` finds rows that have changed since the last
    save, and learns those of this one; None to compare bytes alone. `in_eval` are the layers in `eval()`, where it is
    known, on rank 0. `refused`: all raise it; None to save.
    """

    process_group: Group | None = None
    base: str | None = None
    base_required: bool = True
    fallback_urls: tuple[str, ...] = ()
    renamed: RenameRules | None = None
    in_background: bool = False
    chain: Chain = "bounded"
    kept: Kept | None = None
    prints: RowPrints | None = None
    in_eval: Mapping[str, tuple[str, ...]] | None = None
    refused: ShardoptError | None = None


DEFAULT_OPTIONS = SaveTerms()
