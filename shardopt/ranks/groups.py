"""Returns ranks by process group and deadline, made once for each; makes missing groups."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _world

from shardopt.errors import OptionError, Problem, RankError, StateError
from shardopt.ranks.channel import Channel
from shardopt.ranks.connections.heartbeat import DEADLINE_SECONDS
from shardopt.ranks.failures import names_of
from shardopt.ranks.ranks import Ranks

Group = dist.ProcessGroup | DeviceMesh
"""Some ranks of the job: a process group, or all ranks of a device mesh."""


class SharedGroup:
    """A group that copies of its owner share, as a process group itself cannot be copied.

    Args:
        process_group: None for the whole job.
        deadline_seconds: of its ranks, as for `ranks_of`.
    """

    def __init__(self, process_group: Group | None = None, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        self.process_group, self._deadline_seconds = process_group, deadline_seconds

    @property
    def ranks(self) -> Ranks:
        """The ranks of the group."""
        return ranks_of(self.process_group, self._deadline_seconds)

    def __deepcopy__(self, memo: object) -> SharedGroup:
        return self

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self.process_group, dist.ProcessGroup):
            remedy = "pass a device mesh, which can be pickled, or save through shardopt.checkpoint"
            problem = Problem("process_group", "a process group, which is nothing in another process", "none", remedy)
            raise StateError("an object of a process group cannot be pickled", [problem], code="process-group")
        return vars(self)


_of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[float, Ranks]] = weakref.WeakKeyDictionary()
"""Ranks by deadline, so that the same request gets the same object."""
_members_of: weakref.WeakKeyDictionary[DeviceMesh, tuple[int, ...]] = weakref.WeakKeyDictionary()


def ranks_of(process_group: Group | None = None, deadline_seconds: float = DEADLINE_SECONDS) -> Ranks:
    """Returns the ranks of `process_group` (default: of the job); only this process without torch.distributed.

    Collective for a mesh of several dimensions that is not the whole job, the first time: its ranks get a group.

    Args:
        deadline_seconds: how long a rank may show no sign of life before the others give up and name it.

    Raises:
        OptionError: this rank is not in it, or it is no group.
    """
    if process_group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks(None, deadline_seconds)
        process_group = dist.group.WORLD
    if isinstance(process_group, DeviceMesh) and process_group.get_coordinate() is not None:
        if process_group not in _members_of:
            _members_of[process_group] = tuple(sorted(process_group.mesh.flatten().tolist()))
        among = process_group_among(_members_of[process_group], process_group.get_all_groups())
        return Ranks(None, deadline_seconds) if among is None else ranks_of(among, deadline_seconds)
    if not isinstance(process_group, dist.ProcessGroup):
        raise _no_group_here(process_group)
    made = _of_group.setdefault(process_group, {})
    if deadline_seconds not in made:
        others = next(iter(made.values()), None)
        made[deadline_seconds] = (
            others.with_deadline(deadline_seconds) if others else Ranks(process_group, deadline_seconds)
        )
    return made[deadline_seconds]


def _no_group_here(process_group: Any) -> OptionError:
    """Returns the error for what is given in the place of a process group that this rank is in."""
    outside = isinstance(process_group, DeviceMesh) or process_group is dist.GroupMember.NON_GROUP_MEMBER
    found = f"one that rank {dist.get_rank()} is not in" if outside else f"a {type(process_group).__name__}"
    remedy = "make the call on the ranks of the group alone; pass a process group, or a device mesh"
    return OptionError(
        "ranks cannot work together",
        [Problem("process_group", found, "one that this rank is in", remedy)],
        code="process-group",
    )


def refuse_lone_processes(doing: str) -> None:
    """Raises for what a process would do alone, for lack of a process group with the others.

    Raises:
        RankError: the launcher has started several processes, and there is no process group.
    """
    launched = os.environ.get("WORLD_SIZE", "")
    if launched.isdecimal() and int(launched) > 1 and not (dist.is_available() and dist.is_initialized()):
        remedy = "call torch.distributed.init_process_group first, or unset WORLD_SIZE where this process is alone"
        problem = Problem("WORLD_SIZE", f"{launched}, and no process group", "one of all processes", remedy)
        raise RankError(f"{doing}: each process would do it alone", [problem], code="process-group")


_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
"""Groups that were made because none existed, by their members; kept as long as the job's group."""


def ranks_among(members: tuple[int, ...], known: Iterable[dist.ProcessGroup] = ()) -> Ranks:
    """Returns the ranks with these numbers, through the job's group or one of `known` if it has just these members.

    Otherwise through a new group, for which all members must call; those who call for several do it in the same order.

    Args:
        members: global numbers, ascending; this rank's is among them.
        known: groups that there are.
    """
    group = process_group_among(members, known)
    return Ranks(None) if group is None else ranks_of(group)


def process_group_among(members: tuple[int, ...], known: Iterable[dist.ProcessGroup]) -> dist.ProcessGroup | None:
    """Returns the group of these members, as `ranks_among`; None for one rank, which needs none."""
    if len(members) == 1:
        return None
    job = dist.group.WORLD
    assert job is not None
    made = _made.setdefault(job, {})
    for group in (job, *known):
        if sorted(dist.get_process_group_ranks(group)) == list(members):
            return group
    if members not in made:
        made[members] = _new_group(members, job)
    return made[members]


def _new_group(members: tuple[int, ...], job: dist.ProcessGroup) -> dist.ProcessGroup:
    """Makes a process group; only these ranks must call.

    torch names it by how many groups a process has, and waits without an end where members have made different ones.
    """
    meeting, what = Ranks.meeting(job, members), f"making a process group of {names_of(members)}"
    _, most = meeting.agree(what, work=lambda: len(_world.pg_names), report=lambda count: count, decide=max)
    # Of a job that was begun with `device_id=` torch splits the communicator, which waits for all ranks of the job.
    device, job.bound_device_id = job.bound_device_id, None
    try:
        while len(_world.pg_names) < most:
            dist.new_group([dist.get_rank()], use_local_synchronization=True)
        group: dist.ProcessGroup = dist.new_group(list(members), use_local_synchronization=True)
    finally:
        job.bound_device_id = device
    group.bound_device_id = device
    return group


class SideRanks:
    """Ranks that agree in a background thread, made at the first use of each process group.

    Args:
        what: what they are for, as for `Ranks.agree`.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        # By the rounds of the program's. Not of the last alone: where ranks are in several groups, those that are in
        # one of them only would not make theirs again.
        self._made: weakref.WeakKeyDictionary[Channel, Ranks] = weakref.WeakKeyDictionary()

    def of(self, ranks: Ranks) -> Ranks:
        """Returns the side channel of `ranks`, with their deadline. Collective if it is not made yet, else local."""
        if ranks.channel is None:
            return ranks
        if ranks.channel not in self._made:
            self._made[ranks.channel] = ranks.side_channel(f"preparing for {self._what}")
        return self._made[ranks.channel].with_deadline(ranks.deadline_seconds)

    def are_beside(self, ranks: Ranks) -> bool:
        """Whether the side channel is made, and for `ranks`. Local."""
        return ranks.channel is None or ranks.channel in self._made

    def forget(self) -> None:
        """Drops the side channel, with its connection."""
        self._made.clear()
