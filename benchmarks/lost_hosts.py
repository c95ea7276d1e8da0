"""What failures of hosts cost a run with tiers, simulated: 1,024 hosts of 8 ranks, copies by the product's own rule.

    python -m benchmarks.lost_hosts

One host of the job fails a day, with all that it has, at a random time; it is replaced, and the copies that are lacking
are made again within `RECOPY_SECONDS`, in which the job also starts again. A share of the failures takes a whole rack
of 16 hosts (a switch, a power supply). A failure *loses memory* where a file of the newest copied save is on no host
that is left: then the run goes back to its root. For each number of copies, with racks named as failure domains and
without: how many failures of a month do that, how likely a month without any is, and the steps that go with it.

Rates: Llama 3's 54 days on 16,384 GPUs had 419 unexpected interruptions (Grattafiori et al. 2024, section 3.3.4, table
5), some 8 a day on 2,048 hosts of 8, of which not all take a host's memory with them: one a day for 1,024 hosts is of
that order. How many take a rack is an assumption; both 0 and 2 % are shown.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.peers import write_table
from shardopt.checkpoint.hosts.holders import fetches_of

HOSTS, RACK, DAYS, MONTHS = 1024, 16, 30, 5_000
RECOPY_SECONDS = 600.0
EVERY_MEMORY, EVERY_ROOT, STEP_SECONDS = 5, 500, 2.0
STATE_BYTES = 12 * 70e9  # AdamW in fp32 with 70 B parameters


def holders(copies: int, with_racks: bool) -> list[frozenset[int]]:
    """Returns the hosts that have each host's files."""
    domains: Sequence[str | None] = [f"rack-{host // RACK}" if with_racks else None for host in range(HOSTS)]
    have = [{host} for host in range(HOSTS)]
    files = {str(host): [host] for host in range(HOSTS)}
    for host in range(HOSTS):
        for name in fetches_of(host, files, domains, copies):
            have[int(name)].add(host)
    return [frozenset(each) for each in have]


def losing_failures(have: list[frozenset[int]], rack_share: float, rng: random.Random) -> tuple[int, int, int]:
    """Simulates all months; returns the failures, those that lost memory, and the months that had such."""
    of_host: list[list[frozenset[int]]] = [[] for _ in range(HOSTS)]
    for each in have:
        for host in each:
            of_host[host].append(each)
    failures = losing = months = 0
    for _ in range(MONTHS):
        time, lost_at, had = 0.0, dict[int, float](), False
        while (time := time + rng.expovariate(1 / 86400)) < DAYS * 86400:
            failures += 1
            host = rng.randrange(HOSTS)
            gone = [host]
            if rng.random() < rack_share:
                gone = [*range(host - host % RACK, host - host % RACK + RACK)]
            lost_at = {other: at for other, at in lost_at.items() if time - at < RECOPY_SECONDS}
            lost_at |= dict.fromkeys(gone, time)
            if any(each <= lost_at.keys() for other in gone for each in of_host[other]):
                losing, had = losing + 1, True
        months += had
    return failures, losing, months


def main() -> None:
    rows = []
    for rack_share in (0.0, 0.02):
        for copies in (1, 2, 3):
            for with_racks in (False, True) if copies > 1 else (False,):
                have = holders(copies, with_racks)
                failures, losing, months = losing_failures(have, rack_share, random.Random(copies))
                steps = (losing * EVERY_ROOT / 2 + (failures - losing) * EVERY_MEMORY / 2) / MONTHS
                sent = STATE_BYTES / HOSTS * (copies - 1) / 1e9
                rows.append(
                    [
                        f"{rack_share:.0%}",
                        str(copies),
                        "yes" if with_racks else "no",
                        f"{losing / MONTHS:.4f}",
                        f"{1 - months / MONTHS:.2%}",
                        f"{steps:,.0f}",
                        f"{sent:.2f}",
                        str(copies - 1),
                    ]
                )
    header = [
        "failures that take a rack",
        "copies",
        "racks named",
        "failures a month that lose memory",
        "months without any",
        "steps lost a month",
        "GB that a host fetches for a save",
        "hosts that it fetches from",
    ]
    notes = (
        f"{HOSTS:,} hosts of 8 ranks, {MONTHS:,} simulated months of {DAYS} days, one failure of a host a day, copies "
        f"made again after {RECOPY_SECONDS / 60:g} minutes. A failure costs half of {EVERY_MEMORY} steps on average if "
        f"memory still has a complete save, otherwise half of {EVERY_ROOT} (the root's). 70 B parameters of 12 bytes "
        "each. Nothing here was run on so many hosts; the sources of the rates are in `benchmarks/lost_hosts.py`."
    )
    print(write_table("lost_hosts", "What failures of hosts cost, simulated", header, rows, notes))


if __name__ == "__main__":
    main()
