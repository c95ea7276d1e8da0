"""Weights served from the memory of three trainers on two hosts, followed in their job and in another one.

One rank has memory of its own at the root's path: it is on the second host.
"""

import os
import shutil
import signal
import threading
import time

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardopt import checkpoint
from shardopt.errors import CheckpointError, ShardoptError
from tests.harness import run_ranks, run_ranks_outcomes
from tests.support.hosted import Trainer, memory_of_its_own_is_allowed, take_memory_of_its_own, values
from tests.support.streams import same_bits, zeros_like

pytestmark = pytest.mark.usefixtures("no_root_is_known")

TRAINERS = 3
DEADLINE_SECONDS = 5.0


@pytest.fixture
def path(tmp_path):
    if not memory_of_its_own_is_allowed(tmp_path / "tried"):
        pytest.skip("this machine lets nobody here mount memory in a namespace")
    return tmp_path / "weights"


class Turns:
    """Files by which processes of different jobs wait for one another."""

    def __init__(self, folder):
        self.folder = folder

    def done(self, name):
        (self.folder / name).touch()

    def wait(self, name):
        end = time.monotonic() + 60
        while not (self.folder / name).exists():
            assert time.monotonic() < end, name
            time.sleep(0.005)


def options_of(key_file):
    return None if key_file is None else {"key_file": str(key_file)}


def sharded(whole, mesh):
    placements = {"wide": [Shard(0)], "small": [Replicate()]}
    return {name: distribute_tensor(each, mesh, placements[name], src_data_rank=None) for name, each in whole.items()}


def publisher_at(path, key_file, group):
    if dist.get_rank() == 1:
        take_memory_of_its_own(path)
    return checkpoint.Publisher(
        f"hosts://{path}",
        storage_options=options_of(key_file),
        process_group=group,
        keep=2,
        anchor_every=3,
        deadline_seconds=DEADLINE_SECONDS,
    )


def files_here(path):
    return sorted(f"{each.parent.name}/{each.name}" for each in path.glob("step-*/*"))


def in_one_job(path, key_file, steps):
    """Ranks 0 to 2 publish, on two hosts, and the others follow together."""
    rank, size = dist.get_rank(), dist.get_world_size()
    trainers, followers = dist.new_group(range(TRAINERS)), dist.new_group(range(TRAINERS, size))
    if rank < TRAINERS:
        mesh = DeviceMesh.from_group(trainers, "cpu")
        with publisher_at(path, key_file, trainers) as publisher:
            for step in range(1, steps + 1):
                publisher.publish(step, sharded(values(step), mesh)).result()
                dist.barrier()
                dist.barrier()
            return files_here(path)
    app = zeros_like(values(0))
    follower = checkpoint.Follower(
        f"hosts://{path}", app, storage_options=options_of(key_file), process_group=followers, deadline_seconds=20
    )
    whole = []
    for step in range(1, steps + 1):
        dist.barrier()
        whole.append(follower.update().whole)
        assert follower.step == step and same_bits(app, values(step))
        dist.barrier()
    return whole


@pytest.mark.parametrize("has_key_file", [False, True])
def test_ranks_of_the_same_job_follow_with_and_without_a_key_file(path, tmp_path, has_key_file):
    key_file = tmp_path / "key" if has_key_file else None
    first, second, third, *followers = run_ranks(5, in_one_job, path, key_file, 7)
    assert followers[0][1:] == [1] * 6  # of the small box
    steps = [{name.partition("/")[0] for name in files} for files in (first, second)]
    assert steps[0] >= {"step-00000006", "step-00000007"} and "step-00000001" not in steps[0] | steps[1]
    assert [name for name in first if name.endswith("manifest.json")] == [
        f"step-{step:08d}/manifest.json" for step in (6, 7)
    ]
    assert third == first and not set(first) & set(second)
    assert not any("r00001" in name for name in first) and all("r00001" in name for name in second)


def publish_by_turns(path, key_file, folder, steps, victim=None):
    turns, mesh = Turns(folder), DeviceMesh.from_group(dist.group.WORLD, "cpu")
    with publisher_at(path, key_file, None) as publisher:
        for step in range(1, steps + 1):
            publisher.publish(step, sharded(values(step), mesh)).result()
            turns.done(f"published-{step}")
            turns.wait(f"followed-{step}")
        if dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        publisher.publish(steps + 1, sharded(values(steps + 1), mesh)).result()
    return files_here(path)


@pytest.mark.parametrize("victim", [None, 1, 0])
def test_another_job_follows_until_a_host_is_lost(path, tmp_path, victim):
    outcomes, app, turns = [], zeros_like(values(0)), Turns(tmp_path)

    def train():
        outcomes.extend(
            run_ranks_outcomes(TRAINERS, publish_by_turns, path, tmp_path / "key", tmp_path, 3, victim=victim)
        )

    thread = threading.Thread(target=train)
    thread.start()
    follower = checkpoint.Follower(f"hosts://{path}", app, storage_options=options_of(tmp_path / "key"))
    for step in range(1, 4):
        turns.wait(f"published-{step}")
        assert follower.update().step == step and same_bits(app, values(step))
        if step == 3:
            late = zeros_like(values(0))
            checkpoint.load(f"hosts://{path}/step-00000003", late)
            assert same_bits(late, values(3)) and checkpoint.verify(f"hosts://{path}/step-00000003").ok
        turns.done(f"followed-{step}")
    thread.join()
    if victim is None:
        assert all(outcome.ok for outcome in outcomes)
    else:
        assert outcomes[victim].signal == signal.SIGKILL
        assert not any(outcome.ok for outcome in outcomes)
    try:
        assert follower.update() is None
    except CheckpointError as error:
        assert f"hosts://{path}" in str(error)
    assert follower.step == 3 and same_bits(app, values(3))
    with follower.serving() as step:
        assert step == 3


def follow_both_lives(path, key_file, folder):
    """On several ranks, of which the first alone looks for steps."""
    app, turns, steps = zeros_like(values(0)), Turns(folder), []
    follower = checkpoint.Follower(f"hosts://{path}", app, storage_options=options_of(key_file), deadline_seconds=20)
    for life in range(2):
        turns.wait(f"life-{life}")
        while (report := follower.update()) is None:
            pass
        steps.append((report.step, report.whole))
        assert same_bits(app, values(report.step, life))
        dist.barrier()
        turns.done(f"seen-{life}")
    return steps


@pytest.mark.parametrize("has_memory", [True, False])
def test_every_rank_of_a_follower_finds_trainers_that_have_started_again(tmp_path, has_memory):
    path, turns, followed = tmp_path / "weights", Turns(tmp_path), []
    thread = threading.Thread(
        target=lambda: followed.extend(run_ranks(3, follow_both_lives, path, tmp_path / "key", tmp_path))
    )
    thread.start()
    trainers = []
    try:
        for life, steps in enumerate([(1, 2, 3), (2,)]):
            trainers.append(Trainer(f"hosts://{path}", tmp_path / "key", seed=life))
            trainers[-1].publish(*steps)
            turns.done(f"life-{life}")
            turns.wait(f"seen-{life}")
            trainers[-1].send_signal(signal.SIGKILL)
            if not has_memory:
                shutil.rmtree(path)
    finally:
        for trainer in trainers:
            trainer.end()
        thread.join()
    assert [[step for step, _ in each] for each in followed] == [[3, 2]] * 3


def disagree(path):
    """Options that differ between the ranks, or that one of them cannot use."""
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    if dist.get_rank() == 1:
        path.mkdir(mode=0o755)
    dist.barrier()
    with pytest.raises(ShardoptError) as raised:
        checkpoint.Publisher(f"hosts://{path}", deadline_seconds=DEADLINE_SECONDS).publish(
            1, sharded(values(1), mesh)
        ).result()
    return str(raised.value)


def test_a_directory_that_others_may_use_is_refused_on_all_ranks(tmp_path):
    for said in run_ranks(2, disagree, tmp_path / "weights"):
        assert "mode 0755" in said and str(tmp_path / "weights") in said
