"""Checkpoints on the hosts' own directories: what is left of them is found, whichever hosts are left."""

import errno
import logging
import os
import random
import shutil
import threading
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardopt import checkpoint
from shardopt.checkpoint import Tier
from shardopt.checkpoint.format.constants import RECORD_NAME
from shardopt.checkpoint.hosts.share import Share
from shardopt.errors import CheckpointExistsError, CheckpointNotFoundError, OptionError
from shardopt.ranks.files import client
from tests.harness import Fault, run_ranks, run_ranks_outcomes

HOSTS = 4
ROWS = 97


def value(step):
    return (torch.arange(ROWS * 300, dtype=torch.float64).reshape(ROWS, 300) + 1) * step


def app_of(step):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = distribute_tensor(value(step), mesh, [Shard(0)], src_data_rank=None)
    bias = distribute_tensor(torch.full((5,), float(step)), mesh, [Replicate()], src_data_rank=None)
    return {"rows": rows, "bias": bias, "step": step}


def assert_is(app, step):
    assert app["step"] == step
    assert torch.equal(app["rows"].full_tensor(), value(step))
    assert app["bias"].full_tensor().unique().tolist() == [step]


def url_of(root, hosts, step=1):
    """A checkpoint's URL on the host of this rank; hosts of one machine have paths of their own."""
    return f"hosts://{root}/host-{hosts[dist.get_rank()]}/run/step-{step}"


def save(root, hosts):
    report = checkpoint.save(url_of(root, hosts), app_of(1))
    assert report.url == url_of(root, hosts)


def load(root, hosts):
    app = app_of(0)
    checkpoint.load(url_of(root, hosts), app)
    assert_is(app, 1)


@pytest.fixture(scope="module")
def on_two_hosts(tmp_path_factory):
    """A checkpoint of four ranks on two hosts, which tests only read."""
    path = tmp_path_factory.mktemp("on_two_hosts")
    run_ranks(4, save, str(path), (0, 0, 1, 1))
    return path


@pytest.mark.parametrize(
    "hosts", [(0, 0, 1, 1), (1, 0), (0, 1, 2), (5, 0, 1)], ids=["the same", "fewer", "one more", "new first"]
)
def test_any_ranks_load_what_all_hosts_together_have(on_two_hosts, hosts):
    assert not list(on_two_hosts.rglob("manifest.json"))  # nobody takes one host's share for a checkpoint
    run_ranks(len(hosts), load, str(on_two_hosts), hosts)


def refused(root, hosts, kind):
    with pytest.raises(kind) as caught:
        load(root, hosts)
    return str(caught.value)


def test_what_hosts_lack_is_named_on_all_ranks(tmp_path):
    run_ranks(4, save, str(tmp_path), (0, 0, 1, 1))
    lost = sorted(path.name for path in (tmp_path / "host-1").rglob("*.safetensors"))
    said = run_ranks(2, refused, str(tmp_path), (0, 2), CheckpointNotFoundError)
    assert all(name in text for text in said for name in lost) and "on none of 2 hosts" in said[0]
    shutil.rmtree(tmp_path / "host-0")
    assert "no record" in run_ranks(1, refused, str(tmp_path), (0,), CheckpointNotFoundError)[0]


def refuse_second(root, hosts):
    with pytest.raises(CheckpointExistsError):
        save(root, hosts)
    with pytest.raises(OptionError, match="refers to nothing"):
        checkpoint.save(url_of(root, hosts, 2), app_of(2), base=url_of(root, hosts))
    load(root, hosts)


def test_a_place_that_is_taken_and_a_base_are_refused(tmp_path):
    run_ranks(2, save, str(tmp_path), (0, 1))
    run_ranks(2, refuse_second, str(tmp_path), (0, 1))


# A run.


def manager_of(root, hosts, **options):
    host = f"{root}/host-{hosts[dist.get_rank()]}"
    copies = options.pop("copies", 2), options.pop("copies_on_disk", 1)
    mirrors = options.pop("mirrors", ())
    tiers = [Tier(f"{host}/memory", every=1, copies=copies[0]), Tier(f"{host}/disk", every=2, copies=copies[1])]
    return checkpoint.Manager(f"{root}/root", destinations=[*tiers, *mirrors], **({"every": 4} | options))


def train(root, hosts, steps, **options):
    """Continues to step `steps`; returns the step that it was restored from, and where each step is then."""
    app, copied = app_of(0), []
    checkpoint.add_listener(lambda event, report: copied.append(report.url) if event == "copy" else None)
    manager = manager_of(root, hosts, **options)
    start = manager.restore(app)
    assert_is(app, start)
    for step in range(start + 1, steps + 1):
        for key, after in app_of(step).items():
            if key == "step":
                app[key] = after
            else:
                app[key].to_local().copy_(after.to_local())
        manager.save(step, app)
    manager.close()
    manager = manager_of(root, hosts)
    where = manager.where()
    manager.close()
    names = {step: {Path(path).name: survives for path, survives in at.items()} for step, at in where.items()}
    return start, names


@pytest.fixture(params=["now", *[pytest.param(each, marks=pytest.mark.exhaustive) for each in (None, "lazy")]])
def stage(request):
    return request.param


def test_a_lost_host_costs_the_steps_since_the_last_copy(tmp_path, stage):
    root = str(tmp_path)
    results = run_ranks(4, train, root, (0, 1, 2, 3), 7, stage=stage)
    start, where = results[0]
    assert start == 0 and where[7]["memory"] == 1 and where[6]["disk"] == 0 and where[4]["root"] is None
    assert all(each == (start, where) for each in results)
    shutil.rmtree(tmp_path / "host-2")
    start, where = run_ranks(3, train, root, (0, 1, 3), 9, stage=stage)[0]
    assert start == 7 and where[9]["memory"] == 1 and where[8] == {"memory": 1, "disk": 0, "root": None}
    shutil.rmtree(tmp_path / "host-0")
    shutil.rmtree(tmp_path / "host-3")  # two of three, where a copy is on one other
    start, where = run_ranks(2, train, root, (1, 5), 8, stage=stage)[0]
    assert start == 8 and where[8]["root"] is None


def test_memory_lost_everywhere_leaves_the_disks_and_disks_lost_too_leave_the_root(tmp_path):
    root = str(tmp_path)
    run_ranks(4, train, root, (0, 0, 1, 1), 7)
    for host in (0, 1):
        shutil.rmtree(tmp_path / f"host-{host}" / "memory")
    assert run_ranks(3, train, root, (0, 1, 1), 6)[0][0] == 6
    for host in (0, 1):
        shutil.rmtree(tmp_path / f"host-{host}")
    assert run_ranks(2, train, root, (0, 1), 4)[0][0] == 4


def test_a_save_that_lacks_a_host_s_record_is_restored_where_its_files_are_there(tmp_path):
    root = str(tmp_path)
    run_ranks(3, train, root, (0, 1, 2), 3, copies=1)
    (tmp_path / "host-2" / "memory" / "step-00000003" / RECORD_NAME).unlink()  # lost in the middle of the commit
    assert run_ranks(3, train, root, (2, 0, 1), 3, copies=1)[0] == (3, {2: ANY, 3: {"memory": 0}})
    assert len(list(tmp_path.glob(f"host-*/memory/step-00000003/{RECORD_NAME}"))) == 3


def test_old_checkpoints_go_while_a_save_to_hosts_is_under_way(tmp_path, monkeypatch):
    write, go_on = Share.write, threading.Event()
    monkeypatch.setattr(Share, "write", lambda *args: write(*args) if go_on.wait(30) else 0)
    pending = checkpoint.async_save(f"hosts://{tmp_path}/memory/step-7", {"x": torch.ones(3)}, stage="now")
    with checkpoint.Manager(tmp_path / "root", keep=1) as manager:
        for step in (1, 2):
            manager.save(step, {"x": torch.ones(3)})
        assert manager.steps() == [2] and not pending.done.is_set()
    go_on.set()
    pending.result(30)


def test_two_of_four_hosts_where_there_are_three_copies(tmp_path):
    root = str(tmp_path)
    run_ranks(4, train, root, (0, 1, 2, 3), 5, copies=3)
    shutil.rmtree(tmp_path / "host-0")
    shutil.rmtree(tmp_path / "host-1")
    assert run_ranks(3, train, root, (3, 4, 2), 5, copies=3)[0][0] == 5


def flip(path, rng, begin=0):
    data = bytearray(path.read_bytes())
    data[rng.randrange(begin, len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def warned(root, hosts, steps, **options):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("shardopt.checkpoint").addHandler(handler)
    return train(root, hosts, steps, **options), records


@pytest.mark.parametrize(
    ("seed", "tier"),
    [(0, "memory"), *[pytest.param(n, ("memory", "disk")[n % 2], marks=pytest.mark.exhaustive) for n in range(1, 100)]],
)
def test_flipped_bits_are_found_named_and_repaired(tmp_path, seed, tier):
    rng, root, hosts = random.Random(seed), str(tmp_path), (0, 1, 2, 3)
    step = {"memory": 3, "disk": 2}[tier]
    run_ranks(4, train, root, hosts, step, copies_on_disk=2)
    files = sorted(tmp_path.glob(f"host-*/{tier}/step-{step:08d}/*.safetensors"))
    damaged = {}
    for path in files:  # one copy of each of the four files
        damaged.setdefault(path.name, []).append(path)
    assert [len(paths) for paths in damaged.values()] == [2] * 4
    damaged = [rng.choice(paths) for paths in damaged.values()]
    before = [path.read_bytes() for path in damaged]
    for path in damaged:
        flip(path, rng)
    if tier == "disk":
        for path in tmp_path.glob("host-*/memory"):
            shutil.rmtree(path)
    results = run_ranks(4, warned, root, hosts, step, copies_on_disk=2)
    assert all(start == step for (start, _), _ in results)
    assert results[0][0][1][step][tier] == 1  # two copies of each, and
    said = "\n".join(line for _, lines in results for line in lines)
    assert all(path.name in said for path in damaged), said
    assert [path.read_bytes() for path in damaged] == before
    shutil.rmtree(tmp_path / f"host-{rng.randrange(HOSTS)}")  # both are whole again, so any host may go
    assert run_ranks(4, train, root, hosts, step, copies_on_disk=2)[0][0] == step


def warned_over_a_bad_wire(root, hosts, steps, rank):
    """As `warned`; to one rank each reply with much in it comes with one bit that is another."""
    receive_into = client.receive_into

    def receive(socket, memory):
        receive_into(socket, memory)
        if memory.nbytes > 1000 and dist.get_rank() == rank:
            memory[memory.nbytes // 2] ^= 1

    client.receive_into = receive
    return warned(root, hosts, steps)


def test_a_bit_that_flips_on_its_way_to_another_host_is_found_and_not_written(tmp_path):
    root, hosts = str(tmp_path), (0, 1, 2, 3)
    results = run_ranks(4, warned_over_a_bad_wire, root, hosts, 1, 2)
    (_, where), _ = results[0]
    assert where[1]["memory"] == 0  # a copy was not made, and
    said = "\n".join(results[2][1])
    assert "copies of hosts://" in said and "were not all made" in said and ".safetensors" in said, said
    assert not any("were not all made" in line for rank in (0, 1, 3) for line in results[rank][1])
    copies = {}
    for path in tmp_path.glob("host-*/memory/step-00000001/*.safetensors"):
        copies.setdefault(path.name, []).append(path.read_bytes())
    assert sorted(len(each) for each in copies.values()) == [1, 2, 2, 2]
    assert all(len(set(each)) == 1 for each in copies.values())
    (start, where), _ = run_ranks(4, warned, root, hosts, 1)[0]  # without the fault it is made
    assert start == 1 and where[1]["memory"] == 1


@pytest.mark.parametrize("seed", [0, *[pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 12)]])
def test_where_every_copy_has_flipped_bits_the_step_before_is_taken(tmp_path, seed):
    rng, root, hosts = random.Random(seed), str(tmp_path), (0, 1, 2, 3)
    run_ranks(4, train, root, hosts, 3)
    name = rng.choice(sorted(tmp_path.glob("host-0/memory/step-00000003/*.safetensors"))).name
    copies = sorted(tmp_path.glob(f"host-*/memory/step-00000003/{name}"))
    assert len(copies) == 2
    for path in copies:
        flip(path, rng, begin=path.stat().st_size - 1000)  # of a tensor: a load does not need what pads the header
    results = run_ranks(4, warned, root, hosts, 2)
    assert all(start == 2 for (start, _), _ in results)
    assert any("step 3 is damaged" in line and name in line for _, lines in results for line in lines)


def test_a_host_that_is_full_goes_to_the_next_tier_with_one_warning(tmp_path):
    full = Fault(1, "shardopt.checkpoint.hosts.share:Share.write", 1, "ENOSPC")
    outcomes = run_ranks_outcomes(3, warned, str(tmp_path), (0, 1, 2), 2, faults=[full])
    (start, where), lines = outcomes[0].value
    assert start == 0 and where[1] == {"root": None}  # no tier but the full one was due
    assert len([line for line in lines if "instead" in line]) == 1 and os.strerror(errno.ENOSPC) in lines[0]
    assert where[2]["memory"] == 1 and where[2]["disk"] == 0


def take_back(root, hosts):
    train(root, hosts, 5)
    manager = manager_of(root, hosts)
    app = app_of(0)
    assert manager.restore(app, step=4) == 4
    app |= app_of(40)  # another future
    app["step"] = 5
    manager.save(5, app)
    manager.close()
    manager = manager_of(root, hosts)
    app = app_of(0)
    assert manager.restore(app) == 5 and manager.branch == 1
    assert torch.equal(app["rows"].full_tensor(), value(40))
    assert manager.restore(app, step=5, branch=0) == 5  # abandoned, and still in memory
    assert_is(app, 5)
    manager.close()


def test_a_rewound_run_resumes_on_its_own_branch(tmp_path):
    run_ranks(2, take_back, str(tmp_path), (0, 1))


def save_alone(root):
    for step in (1, 2):
        manager = checkpoint.Manager(f"{root}/root", destinations=[Tier(f"{root}/memory", every=1, copies=2)], every=2)
        app = {"x": torch.zeros(3), "step": 0}
        assert manager.restore(app) == step - 1 == app["step"]
        assert torch.equal(app["x"], torch.full((3,), step - 1.0))
        manager.save(step, {"x": torch.full((3,), float(step)), "step": step})
        manager.close()
    return manager.where()


def test_one_process_has_tiers_too(tmp_path):
    expected = {1: {f"{tmp_path}/memory": 0}, 2: {f"{tmp_path}/memory": 0, f"{tmp_path}/root": None}}
    assert run_ranks(1, save_alone, str(tmp_path), backend=None) == [expected]


def force(root, hosts, stage):
    manager = manager_of(root, hosts, stage=stage)
    manager.save(1, app_of(1))
    manager.save(1, app_of(1), force=True)
    manager.wait()
    where = manager.where()
    manager.close()
    return {Path(path).name for path in where[1]}


@pytest.mark.parametrize("stage", ["now", pytest.param(None, marks=pytest.mark.exhaustive)])
def test_a_save_that_is_forced_comes_to_the_root_whatever_tier_has_it(tmp_path, stage):
    assert run_ranks(2, force, str(tmp_path), (0, 1), stage) == [{"memory", "root"}] * 2


def in_domains(root, hosts):
    load_first = app_of(1)
    checkpoint.save(url_of(root, hosts, 7), load_first)  # by whom no domain is named
    host = hosts[dist.get_rank()]

    def manager_in(domain):
        tier = Tier(f"{root}/host-{host}/run", every=1, copies=2, domain=domain)
        return checkpoint.Manager(f"{root}/root", destinations=[tier], every=9)

    with manager_in(f"rack-{host // 2}") as manager:
        manager.save(1, app_of(1))
        manager.wait()
    # One host alone has another now: hosts that met again for it used to wait for those that did not.
    with manager_in("rack-9" if host == 0 else f"rack-{host // 2}") as manager:
        assert manager.restore(app_of(0)) == 1


def test_copies_go_to_other_failure_domains(tmp_path):
    run_ranks(4, in_domains, str(tmp_path), (0, 1, 2, 3))
    for rack in ((0, 1), (2, 3)):  # without either of them every file is on the other
        files = {path.name for host in rack for path in tmp_path.glob(f"host-{host}/run/step-00000001/*.safetensors")}
        assert len(files) == 4
