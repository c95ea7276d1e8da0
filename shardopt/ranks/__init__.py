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

from shardopt.ranks.calls import Call as Call
from shardopt.ranks.calls import as_call as as_call
from shardopt.ranks.calls import call_on as call_on
from shardopt.ranks.collectives import Exchange as Exchange
from shardopt.ranks.connections.heartbeat import DEADLINE_SECONDS as DEADLINE_SECONDS
from shardopt.ranks.groups import Group as Group
from shardopt.ranks.groups import SharedGroup as SharedGroup
from shardopt.ranks.groups import SideRanks as SideRanks
from shardopt.ranks.groups import process_group_among as process_group_among
from shardopt.ranks.groups import ranks_among as ranks_among
from shardopt.ranks.groups import ranks_of as ranks_of
from shardopt.ranks.groups import refuse_lone_processes as refuse_lone_processes
from shardopt.ranks.halt import Halt as Halt
from shardopt.ranks.ranks import Ranks as Ranks
from shardopt.runtime.exports import offer as _offer

_offer(__name__)
