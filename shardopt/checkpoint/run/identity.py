"""The identity of a run, by which its root, its mirror and its tiers are known to belong together.

    run.json    {"format": "shardopt-run", "id": "52b1…", "root": "/shared/runs/7", "xxh3": "…"}

A run that has tiers gets one with its first save: a random name that is written once, under its root and
its mirror, and is never changed. Each host's directory of a tier has a copy, `.run`. Whatever has another's is refused:
nothing of it is read, and nothing removed. So a root that was begun anew does not resume from what hosts still have of
the run before, and a root may be moved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from shardopt.checkpoint.hosts.hosts import Hosts
from shardopt.checkpoint.run.branches import ids_in
from shardopt.checkpoint.run.context import Run
from shardopt.checkpoint.run.root import ID_BYTES, LABEL_NAME, RUN_NAME, Root, RunIdentity, run_at
from shardopt.checkpoint.storage import wrap_os_errors
from shardopt.errors import CheckpointError, CorruptionError, Problem
from shardopt.ranks import Ranks
from shardopt.redaction import redacted
from shardopt.world import world

_log = logging.getLogger("shardopt.checkpoint")


def refuse_tiers_of_others(run: Run, ranks: Ranks, tiers: Sequence[Hosts], domains: Sequence[str | None]) -> None:
    """Checks that tiers' directories belong to this run, or to none yet. Collective over `ranks`; writes nothing.

    Args:
        domains: the failure domain of this rank's host, by tier; those of the hosts' leaders then count.

    Raises:
        CheckpointError: a directory is of another run, or has no record of a run, or a damaged one; or root and mirror
            are of two runs, or the root cannot be read. Each directory is named.
        CorruptionError: neither the root nor the mirror has a record that is whole.
    """

    def decide(reports: list[list[Any]]) -> list[list[str | None]]:
        _refuse_others(run.roots, [seen for seen, _ in reports])
        return [[reports[leader][1][number] for leader in hosts.leaders] for number, hosts in enumerate(tiers)]

    what = f"looking whose steps are at {_paths(tiers)}"
    _, of_tiers = ranks.agree(what, lambda: _look_at_own(tiers), lambda seen: [seen, domains], decide)
    for hosts, of_hosts in zip(tiers, of_tiers, strict=True):
        # Managers share hosts: one that names no domain leaves what another has named.
        hosts.domains = [new or old for new, old in zip(of_hosts, hosts.domains, strict=True)]


def claim_tiers(run: Run, ranks: Ranks, tiers: Sequence[Hosts]) -> None:
    """Marks tiers' directories as this run's; makes the run's identity if there is none. Collective over `ranks`.

    Nothing is written where one is another run's.

    Args, Raises: as `refuse_tiers_of_others`; or a record cannot be written.
    """

    def begin(reports: list[list[Any]]) -> str:
        identity, lacking = _refuse_others(run.roots, reports)
        identity = identity or RunIdentity(world().random_name(ID_BYTES), redacted(run.root.url))
        _keep(identity, run.root, lacking)
        return identity.pack().decode()

    def look_again(reports: list[list[Any]]) -> None:
        _refuse_others(run.roots, reports)  # two runs may have begun at once: each sees what is there now

    record = _look_at_all(ranks, f"beginning a run at {_paths(tiers)}", tiers, begin)
    _look_at_all(ranks, f"marking {_paths(tiers)} as the run's", tiers, look_again, record.encode())


def _paths(tiers: Sequence[Hosts]) -> str:
    return " and ".join(hosts.root for hosts in tiers)


def _look_at_all(
    ranks: Ranks, what: str, tiers: Sequence[Hosts], decide: Callable[[list[Any]], Any], mark: bytes | None = None
) -> Any:
    """Returns what rank 0 decides from what the leader of each host sees of each tier. Collective.

    Args:
        mark: a record that is first put where none is.
    """

    def look() -> list[Any]:
        for hosts in tiers:
            if mark is not None and hosts.is_leader:
                hosts.directory.keep_once(LABEL_NAME, mark)
        return _look_at_own(tiers)

    return ranks.agree(what, work=look, report=lambda seen: seen, decide=decide)[1]


def _look_at_own(tiers: Sequence[Hosts]) -> list[Any]:
    return [_look_at(hosts) if hosts.is_leader else None for hosts in tiers]


def _look_at(hosts: Hosts) -> list[Any]:
    """Returns this host's path, the id and root of the run that it belongs to, and whether it has checkpoints.

    Where nothing says whose it is there is None for the run, and where that is damaged no id.
    """
    here = hosts.share(".")
    label: list[str] | None
    try:
        run = run_at(here, LABEL_NAME)
        label = None if run is None else list(run)
    except CorruptionError:
        label = ["", ""]
    return [hosts.directory.path, label, bool(ids_in(here.names()))]


def _refuse_others(roots: Sequence[Root], reports: Sequence[Sequence[Any]]) -> tuple[RunIdentity | None, list[Root]]:
    """Raises CheckpointError if a host's directory belongs to another run; else returns `_identity_of`'s result."""
    (run, lacking), root = _identity_of(roots), roots[0]
    others = "name another path; or remove the directory from each host, if nobody needs what it has; or, if that is "
    as_root = f"{others}the run to resume, copy {LABEL_NAME} from there to {root.url}/{RUN_NAME}"
    as_label = f"{others}of this run, copy {root.url}/{RUN_NAME} to {LABEL_NAME} there"
    required = f"{'a new run' if run is None else f'run {run.id[:8]}'}, of {root.url}"
    problems = []
    for rank, seen in enumerate(reports):
        for path, label, has_steps in filter(None, seen):
            where = f"{path} (rank {rank})"
            if label is None and has_steps:
                problems.append(Problem(where, f"checkpoints, and no {LABEL_NAME} that says whose", required, as_label))
            elif label is not None and not label[0]:
                problems.append(Problem(where, f"a {LABEL_NAME} that is damaged", required, as_label))
            elif label is not None and (run is None or label[0] != run.id):
                found = f"run {label[0][:8]}, which began at {label[1]}"
                problems.append(Problem(where, found, required, as_root))
    if problems:
        raise CheckpointError("a host's directory belongs to another run", problems, code="run-root")
    return run, lacking


def _identity_of(roots: Sequence[Root]) -> tuple[RunIdentity | None, list[Root]]:
    """Returns the run of a root and its mirror, and which of the two lack a record of it. On rank 0.

    One record is enough: where the other is damaged, or the mirror cannot be read, that is logged. A restore has read
    the mirror before, or has failed.
    """
    runs: list[RunIdentity] = []
    lacking: list[Root] = []
    damage: list[CorruptionError] = []
    for root in roots:
        try:
            run = run_at(root.storage)
        except CorruptionError as error:
            damage.append(error)
        except CheckpointError as error:
            if root is roots[0]:
                raise
            _log.warning("%s", error)
        else:
            runs += [] if run is None else [run]
            lacking += [root] if run is None else []
            if runs and runs[0].id != runs[-1].id:
                raise _two_runs(roots[0], root, f"run {runs[0].id[:8]} and run {runs[-1].id[:8]}")
    for each in damage:
        if not runs:
            raise each
        _log.warning("%s", each)
    return runs[0] if runs else None, lacking


def _keep(run: RunIdentity, root: Root, lacking: Sequence[Root]) -> None:
    """Writes the record of a run if there is none; a mirror that is out of reach gets it later. On rank 0."""
    for each in lacking:
        try:
            with wrap_os_errors(f"write {each.url}/{RUN_NAME}"):
                each.storage.make()
                try:
                    each.storage.publish_new(RUN_NAME, run.pack())
                except FileExistsError as error:
                    raise _two_runs(root, each, "one that has begun just now") from error
        except CheckpointError as error:
            if each is root or isinstance(error.__cause__, FileExistsError):
                raise
            _log.warning("%s", error)


def _two_runs(root: Root, other: Root, found: str) -> CheckpointError:
    problem = Problem(f"{other.url}/{RUN_NAME}", found, "one run in both roots", "give each run roots of its own")
    return CheckpointError(f"{root.url} and {other.url} are of two runs", [problem], code="run-root")
