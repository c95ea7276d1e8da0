"""Which host fetches which file: enough copies, in different failure domains, with even work and few connections."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shardopt.checkpoint.hosts.holders import fetches_of, survives

DOMAINS = st.lists(st.sampled_from([None, "a", "b", "c"]), min_size=1, max_size=9)


@given(DOMAINS, st.integers(1, 5), st.data())
def test_every_file_gets_its_copies_and_one_that_is_lost_comes_back(domains, copies, data):
    hosts = len(domains)
    have = st.sets(st.integers(0, hosts - 1), min_size=1, max_size=hosts)
    holders = {f"file-{n}": sorted(data.draw(have)) for n in range(data.draw(st.integers(1, 12)))}
    after = {name: set(own) for name, own in holders.items()}
    for host in range(hosts):
        for name in fetches_of(host, holders, domains, copies):
            assert host not in after[name]
            after[name].add(host)
    assert all(len(after[name]) == max(min(copies, hosts), len(holders[name])) for name in holders)
    assert survives({name: sorted(own) for name, own in after.items()}) >= min(copies, hosts) - 1


@given(st.integers(2, 40), st.integers(1, 5), st.integers(1, 4))
def test_alike_hosts_do_the_same_work_and_talk_to_few(hosts, copies, files_each):
    holders = {f"{host}-{n}": [host] for host in range(hosts) for n in range(files_each)}
    fetched = {host: fetches_of(host, holders, [None] * hosts, copies) for host in range(hosts)}
    wanted = min(copies, hosts) - 1
    assert {len(each) for each in fetched.values()} == {wanted * files_each}
    sent = Counter(source for each in fetched.values() for name in each for source in holders[name])
    assert set(sent.values()) <= {wanted * files_each}
    assert all(len({holders[name][0] for name in each}) <= wanted for each in fetched.values())


@given(st.integers(2, 4), st.integers(1, 4), st.integers(2, 4))
def test_copies_go_to_other_failure_domains_while_there_are_any(racks, hosts_each, copies):
    domains = [f"rack-{rack}" for rack in range(racks) for _ in range(hosts_each)]
    holders = {f"of-{host}": [host] for host in range(len(domains))}
    after = {name: [*own] for name, own in holders.items()}
    for host in range(len(domains)):
        for name in fetches_of(host, holders, domains, copies):
            after[name].append(host)
    assert all(len({domains[host] for host in own}) == min(copies, racks) for own in after.values())
