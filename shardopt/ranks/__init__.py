"""Communication between ranks beside training: rounds of agreement, heartbeats, and one error for all ranks.

What ranks must do together is one call of `Ranks.agree`: each does its own work, rank 0 looks at the reports of all
and decides, and either every rank gets the decision or every rank raises the same error. The exceptions are
`Ranks.all_reduce_sum`, for the few numbers that every step needs, `Ranks.all_to_all`, for algorithms that need
whole parameters and for rows of tables, and `Ranks.begin_all_reduce_sum` and `broadcast`, for what islands exchange:
the only collectives of shardopt itself.

`connections/` moves bytes between ranks and knows who has ended. Of the files here each imports only those before it:
calls (what rounds are for), failures (errors as JSON), lost (who does not answer), channel (rounds), halt, collectives,
ranks (all of these together), kinds (exchanges by kinds of ranks), groups (which ranks there are, also for threads).
"""

from shardopt.ranks.calls import Call, as_call, call_on
from shardopt.ranks.collectives import Exchange
from shardopt.ranks.connections.heartbeat import DEADLINE_SECONDS
from shardopt.ranks.groups import Group, SharedGroup, SideRanks, ranks_among, ranks_of, refuse_lone_processes
from shardopt.ranks.halt import Halt
from shardopt.ranks.ranks import Ranks

__all__ = [
    "DEADLINE_SECONDS",
    "Call",
    "Exchange",
    "Group",
    "Halt",
    "Ranks",
    "SharedGroup",
    "SideRanks",
    "as_call",
    "call_on",
    "ranks_among",
    "ranks_of",
    "refuse_lone_processes",
]
