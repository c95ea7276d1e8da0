"""Communication between ranks beside training: rounds of agreement, heartbeats, and one error for all ranks.

What ranks must do together is one call of `Ranks.agree`: each does its own work, rank 0 looks at the reports of all
and decides, and either every rank gets the decision or every rank raises the same error. The exceptions are
`Ranks.all_reduce_sum`, for the few numbers that every step needs, and `Ranks.all_to_all`, for algorithms that need
whole parameters and for rows of tables: the only collectives of shardopt itself.

Each file imports only those before it: tree (who is connected with whom), frames (messages as bytes), link (one
connection), proof (who may connect), address (where to listen), join (how ranks find each other in the store),
gathering and centre (what is counted, kept and passed on), heartbeat, node (all connections, and their thread); calls
(what rounds are for), failures (errors as JSON), lost (who does not answer), channel (rounds), collectives,
shared_cell, ranks (all of these together), kinds (exchanges by kinds of ranks), groups (which ranks there are), side
(ranks for threads).
"""

from shardopt.ranks.calls import Call, as_call, call_on
from shardopt.ranks.collectives import Exchange
from shardopt.ranks.groups import Group, SharedGroup, ranks_among, ranks_of, refuse_lone_processes
from shardopt.ranks.heartbeat import DEADLINE_SECONDS
from shardopt.ranks.ranks import Ranks
from shardopt.ranks.shared_cell import SharedCell
from shardopt.ranks.side import SideRanks

__all__ = [
    "DEADLINE_SECONDS",
    "Call",
    "Exchange",
    "Group",
    "Ranks",
    "SharedCell",
    "SharedGroup",
    "SideRanks",
    "as_call",
    "call_on",
    "ranks_among",
    "ranks_of",
    "refuse_lone_processes",
]
