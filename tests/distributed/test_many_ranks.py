"""Two hundred ranks as real processes, of two blocks, five of which are killed: all others raise one error in time."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from shardopt.errors import RankError
from shardopt.ranks import Ranks
from tests.harness import run_ranks_outcomes

RANKS = 200
DEADLINE_SECONDS = 20.0
KILLED = (3, 77, 127, 150, 199)
WITH_A_LEADER = (3, 77, 128, 150, 199)  # rank 128 leads those behind it


class Job:
    """What `Ranks.meeting` asks of a process group."""

    def __init__(self, port):
        self._rank = int(os.environ["RANK"])
        self._store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))

    def rank(self):
        return self._rank

    def get_group_store(self):
        return self._store


def some_are_killed(port, killed):
    job = Job(port)
    ranks = Ranks.meeting(job, tuple(range(RANKS)))
    assert ranks.with_deadline(120.0).agree("meeting", lambda: None, lambda _: 1, sum)[1] == RANKS
    if job.rank() in killed:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        ranks.with_deadline(DEADLINE_SECONDS).agree("saving", lambda: None)
    except RankError as error:
        return str(error), time.monotonic() - begin
    return "no error", 0.0


@pytest.mark.exhaustive
@pytest.mark.parametrize("killed", [KILLED, WITH_A_LEADER])
def test_five_of_two_hundred_are_killed(killed):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outcomes = run_ranks_outcomes(RANKS, some_are_killed, server.port, killed, deadline_seconds=400.0, backend=None)
    assert {rank for rank in range(RANKS) if outcomes[rank].signal == signal.SIGKILL} == set(killed)
    told = [outcomes[rank].value for rank in range(RANKS) if rank not in killed]
    texts = {text for text, _ in told}
    print(f"{len(told)} ranks: {texts}, after {max(seconds for _, seconds in told):.1f} s at most")
    assert len(texts) == 1, texts
    (text,) = texts
    named = [rank for rank in killed if rank == 128 or 128 not in killed or rank < 128]  # a dead leader tells of nobody
    assert text == f"saving: ranks {', '.join(map(str, named))} died, or ended before this call [rank-lost]"
    assert max(seconds for _, seconds in told) < DEADLINE_SECONDS
