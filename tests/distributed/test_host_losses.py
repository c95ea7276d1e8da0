"""A run on hosts that loses any of them, at any moment and again and again: what the next start resumes from.

Each start is killed at a random operation; what is lost with the hosts is drawn too: processes, memory, disks, all that
is not the mirror. What has to be found is told by what lies in the directories that are left, and by what the ranks had
been promised before.
"""

import logging
import os
import random
import shutil
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardopt import checkpoint
from shardopt.checkpoint import Tier
from shardopt.checkpoint.run.branches import parse_id
from tests.distributed.test_host_kills import DEADLINE_SECONDS, NETWORK, STORAGE, judge, whole_at, whole_on_hosts
from tests.distributed.test_hosts import app_of, assert_is
from tests.harness import run_ranks_outcomes
from tests.harness.faults import watched

HOSTS, MOST_STEPS = 4, 12
OPERATIONS_A_STEP = 70  # of a rank, about
KILLS, SEEDS = 200, 20
DEPTHS = ("processes", "memory", "disks", "root")
STAGES = (None, "now", "lazy")


class Deadly(list):
    """The calls of a rank; which dies instead of one of them."""

    def __init__(self, at):
        super().__init__()
        self._at = at

    def append(self, operation):
        super().append(operation)
        if len(self) == self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def die_with(pid, done):
    def watch():
        while not done.wait(0.002):
            if not os.path.exists(f"/proc/{pid}"):
                os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def manager_of(root, host, copies, stage):
    base = f"{root}/host-{host}"
    tiers = [Tier(f"{base}/memory", every=1, copies=copies), Tier(f"{base}/disk", every=2)]
    return checkpoint.Manager(
        f"{root}/root",
        destinations=[*tiers, checkpoint.Mirror(f"{root}/mirror")],
        every=4,
        stage=stage,
        options=checkpoint.SaveOptions(deadline_seconds=DEADLINE_SECONDS),
    )


def live(root, told, hosts, victims, at, copies, stage):
    """Resumes from where the run is, until the first of the victims dies at its operation `at`, and the others with it.

    Args:
        hosts: of each rank.
        victims: ranks; none where nobody is to die.
    """
    rank, done = dist.get_rank(), threading.Event()
    pids = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    pids[rank] = os.getpid()
    dist.all_reduce(pids)

    def note(what, step):
        with open(f"{told}-{rank}", "a") as file:
            file.write(f"{what} {step}\n")

    def listen(event, report):
        if event == "copy" and report.url.startswith("hosts://"):
            note("copies" if "/memory/" in report.url else "disk", parse_id(report.url.rpartition("/")[2]).step)

    handler = logging.FileHandler(f"{told}-{rank}.log")
    handler.setLevel(logging.WARNING)
    logging.getLogger("shardopt.checkpoint").addHandler(handler)
    if rank in victims[1:]:
        die_with(int(pids[victims[0]]), done)
    with watched((), STORAGE + NETWORK) as watch:
        if rank in victims[:1]:
            watch.calls = Deadly(at)
        checkpoint.add_listener(listen)
        manager = manager_of(root, hosts[rank], copies, stage)
        app = app_of(0)
        start = manager.restore(app)
        try:
            assert_is(app, start)
        except RuntimeError:  # gloo's, of this program's own collective where a rank has died
            return None
        note("restored", start)
        for step in range(start + 1, start + 1 + MOST_STEPS):
            app |= app_of(step)
            report = manager.save(step, app)
            if stage is not None:
                report.result(60.0)
            note("memory", step)
        manager.close()
        done.set()
    return start


def read_told(told, ranks):
    """Returns by kind the greatest step of which any rank was told, and where each rank that restored began."""
    greatest, began = {"memory": 0, "copies": 0, "disk": 0}, set()
    for rank in range(ranks):
        path = Path(f"{told}-{rank}")
        for line in path.read_text().splitlines() if path.exists() else ():
            what, step = line.split()
            if what == "restored":
                began.add(int(step))
            else:
                greatest[what] = max(greatest[what], int(step))
    return greatest, began


def logs(told):
    paths = sorted(Path(told).parent.glob(f"{Path(told).name}-*.log"))
    return "\n".join(f"{path.name}: {line}" for path in paths for line in path.read_text().splitlines())


def lose(root, victims, depth):
    """Takes from the hosts what they lose, and from all the root where even that is lost."""
    for host in victims:
        if depth == "memory":
            shutil.rmtree(f"{root}/host-{host}/memory", ignore_errors=True)
        elif depth != "processes":
            shutil.rmtree(f"{root}/host-{host}", ignore_errors=True)
    if depth == "root":
        shutil.rmtree(f"{root}/root", ignore_errors=True)


def draw_loss(rng, hosts):
    """Returns the hosts that are lost, and what with them; more than half the time it is one of them."""
    count = rng.choice([1, 1, 1, 2, len(hosts)])
    victims = rng.sample(hosts, min(count, len(hosts)))
    depth = rng.choice(DEPTHS if len(victims) == len(hosts) else DEPTHS[:3])
    return victims, depth


def still_promised(promised, told, copies, hosts, lost, depth):
    """Returns what ranks were promised of tiers and have not lost, as (tier, step, how many hosts may be lost)."""
    survives = {"memory": 0, "copies": min(copies, hosts) - 1, "disk": 0}
    promised = [*promised, *((what, step, survives[what]) for what, step in told.items())]
    hit = {"processes": (), "memory": ("memory", "copies")}.get(depth, survives)
    left = [(what, step, most - lost if what in hit else most) for what, step, most in promised]
    return [each for each in left if each[2] >= 0]


def survive(root, seed, most):
    """One run that is killed so often. Returns how often what was lost, with how many hosts, and what it resumed from.

    Raises:
        AssertionError: a start did not resume from the newest step that was whole somewhere, or that is less than what
            had been promised.
    """
    rng = random.Random(seed)
    copies, stage = rng.choice([2, 2, 3]), STAGES[seed % 3]
    hosts, following = list(range(HOSTS)), HOSTS
    losses, promised, newest, life = Counter(), [], 0, 0
    while True:
        is_last = sum(losses.values()) == most
        victims, depth = ([], "processes") if is_last else draw_loss(rng, hosts)
        at = rng.randint(1, OPERATIONS_A_STEP * MOST_STEPS)
        of_rank = [host for host in hosts for _ in range(2 if len(hosts) == 2 else 1)]
        dead = [rank for rank, host in enumerate(of_rank) if host in victims]
        rng.shuffle(dead)
        case = f"seed {seed}, start {life} on {of_rank}, dead {dead} at {at}, {depth} lost, {copies} copies, {stage}"
        told, life = f"{root}/told-{life}", life + 1
        outcomes = run_ranks_outcomes(
            len(of_rank), live, root, told, of_rank, dead, at, copies, stage, deadline_seconds=120
        )
        was_told, began = read_told(told, len(of_rank))
        assert began <= {newest}, f"{case}: from {began} and not {newest}\n{logs(told)}"
        is_killed = any(outcome.signal is not None for outcome in outcomes)
        if is_killed:
            judge(outcomes, dead, case)
        else:  # before it came to that operation it was done
            assert all(outcome.value == newest for outcome in outcomes), (case, outcomes)
            victims = []
        if is_last:
            return losses
        lose(root, victims, depth)
        promised = still_promised(promised, was_told, copies, len(hosts), len(victims), depth)
        if depth in ("disks", "root"):
            hosts = [host for host in hosts if host not in victims]
        while len(hosts) < 2 or (len(hosts) < HOSTS and rng.random() < 0.4):  # some are replaced
            hosts.append(following)
            following += 1
        found = {tier: whole_on_hosts(root, hosts, tier) for tier in ("memory", "disk")}
        found |= {place: whole_at(f"{root}/{place}") for place in ("root", "mirror")}
        newest = max(found.values())
        assert newest >= max((step for _, step, _ in promised), default=0), (case, found, promised)
        if is_killed:
            there = next(place for place, step in found.items() if step == newest) if newest else "nothing"
            losses[depth, len(victims), there] += 1


def test_a_sample_of_losses(tmp_path):
    assert survive(str(tmp_path), 4, 2).total() == 2


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_200_losses(tmp_path, seed):
    losses = survive(str(tmp_path), seed, KILLS // SEEDS)
    print(f"seed {seed}: {losses.total()} kills; (what was lost, with how many hosts, what was found): {dict(losses)}")
    assert losses.total() == KILLS // SEEDS
