"""A publisher that serves from its memory, and a follower in another process: lives of both, and losses."""

import logging
import os
import shutil
import signal
import threading
import time
from dataclasses import replace

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.hosts import served
from shardopt.checkpoint.hosts.admission import KeyFile, decode_invitation
from shardopt.errors import CheckpointError, OptionError, ShardoptError, StateError
from shardopt.ranks.files import client as client_module
from shardopt.ranks.files.client import FileClient
from tests.harness import Fault
from tests.support.hosted import Trainer, memory_of_its_own_is_allowed, values
from tests.support.streams import files_of, flip, same_bits, train, zeros_like

pytestmark = pytest.mark.usefixtures("no_root_is_known")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights"


@pytest.fixture
def key_file(tmp_path):
    return tmp_path / "key"


@pytest.fixture
def start(path, key_file):
    """Starts trainers at one root."""
    trainers = []

    def make(*steps, key_file=key_file, **options):
        trainers.append(Trainer(f"hosts://{path}", key_file, **options))
        trainers[-1].publish(*steps)
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.end()


@pytest.fixture
def app():
    return zeros_like(values(0))


@pytest.fixture
def follower(path, key_file, app):
    return following(path, key_file, app)


def following(path, key_file, app, **options):
    return checkpoint.Follower(f"hosts://{path}", app, storage_options={"key_file": key_file}, **options)


def is_at(follower, app, step, seed=0):
    with follower.serving() as now:
        return now == step and same_bits(app, values(step, seed))


def test_steps_flow_between_processes_by_their_changes(start, follower, app):
    trainer = start(1)
    assert follower.update().step == 1 and is_at(follower, app, 1)
    for step in range(2, 7):
        trainer.publish(step)
        report = follower.update()
        assert report.whole <= 1 and report.bytes_read < 80_000 and is_at(follower, app, step)
    assert follower.update() is None
    trainer.close()


def test_a_follower_may_be_there_before_its_publisher(start, follower, app, caplog):
    for _ in range(2):
        assert follower.update() is None and follower.poll() is None
    with pytest.raises(StateError, match="no published weights yet"), follower.serving():
        pass
    start(1)
    assert follower.update().step == 1 and is_at(follower, app, 1)
    assert not caplog.records


def test_a_trainer_that_starts_again_is_followed_by_its_new_key(start, follower, app, key_file, caplog):
    trainer = start(1, 2, 3)
    assert follower.update().step == 3
    before = decode_invitation(key_file.read_bytes(), "key")
    trainer.send_signal(signal.SIGKILL)
    for _ in range(2):
        assert follower.update() is None and is_at(follower, app, 3)
    assert [each.message.count("cannot be reached, looking again later") for each in caplog.records] == [1]
    trainer = start(4)
    after = decode_invitation(key_file.read_bytes(), "key")
    assert before.key != after.key and before.name != after.name
    assert follower.update().step == 4 and is_at(follower, app, 4)
    trainer.publish(5)
    assert follower.update().whole <= 1 and is_at(follower, app, 5)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("first", [2, 4, 6])
def test_a_trainer_that_lost_its_memory_is_followed_from_its_step_on(start, follower, app, path, first, seed, caplog):
    trainer = start(1, 2, 3, 4)
    assert follower.update().step == 4
    trainer.send_signal(signal.SIGKILL)
    shutil.rmtree(path)
    trainer = start(first, seed=seed)
    assert is_at(follower, app, 4)
    assert [follower.update() is not None for _ in range(2)] == [True, False]
    assert is_at(follower, app, first, seed)
    assert any("was begun again" in each.message for each in caplog.records)
    trainer.publish(first + 1)
    assert follower.update().step == first + 1 and is_at(follower, app, first + 1, seed)


def test_a_stream_begins_again_where_the_host_that_had_its_record_is_lost(start, follower, app, path, caplog):
    """The record was in the memory of rank 0's host, and other hosts still have their shares of the steps."""
    trainer = start(1, 2, 3)
    assert follower.update().step == 3
    trainer.send_signal(signal.SIGKILL)
    trainer = start(2, 3)
    assert follower.update().step == 3
    trainer.send_signal(signal.SIGKILL)
    for record in ("stream.json", "branch-00001.json"):
        (path / record).unlink()
    trainer = start(4, seed=1)
    assert follower.update().step == 4 and is_at(follower, app, 4, 1)
    assert any("was begun again" in each.message for each in caplog.records)


def test_a_trainer_that_is_killed_in_a_publish_leaves_whole_weights(start, follower, app):
    trainer = start(1, 2)
    assert follower.update().step == 2
    with pytest.raises(EOFError):
        trainer.publish(3, faults=[Fault(0, "os:link", action="kill")])
    assert follower.update() is None and is_at(follower, app, 2)
    trainer = start(3)
    assert follower.update().step == 3 and is_at(follower, app, 3)


@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_trainer_that_goes_in_a_read_leaves_weights_whole_or_torn(
    start, path, key_file, app, monkeypatch, number, memory_bytes
):
    """With no host memory they are changed as they are read."""
    monkeypatch.setattr(client_module, "SILENT_SECONDS", 0.5)
    trainer = start(1, anchor_every=1)  # so that all is read
    follower = following(path, key_file, app, memory_bytes=memory_bytes)
    follower.update()
    trainer.publish(2)
    read_into = FileClient.read_into

    def read_until_it_goes(self, directory, name, spans):
        if sum(memory.nbytes for _, memory in spans) > 4096:
            trainer.send_signal(number)
        read_into(self, directory, name, spans)

    monkeypatch.setattr(FileClient, "read_into", read_until_it_goes)
    for each in app.values():
        each.view(-1)[0] += 1  # so that all is read
    begin = time.monotonic()
    with pytest.raises(CheckpointError, match=rf"host 0 of hosts://{path} \(127.0.0.1:"):
        follower.update()
    assert time.monotonic() - begin < 8
    if memory_bytes:
        assert follower.step == 1
    else:
        assert follower.step is None
        with pytest.raises(StateError), follower.serving():
            pass
    monkeypatch.setattr(FileClient, "read_into", read_into)
    if number == signal.SIGSTOP:
        trainer.send_signal(signal.SIGCONT)
    else:
        start(3)
    assert follower.update().step == (2 if number == signal.SIGSTOP else 3)
    assert is_at(follower, app, follower.step)


def test_a_trainer_that_is_stopped_is_waited_for_no_longer_than_it_may_be_silent(start, follower, app, monkeypatch):
    monkeypatch.setattr(client_module, "SILENT_SECONDS", 0.5)
    trainer = start(1)
    follower.update()
    trainer.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    for _ in range(2):  # on the connection that there is, and on a new one
        assert follower.update() is None and is_at(follower, app, 1)
    assert time.monotonic() - begin < 5
    trainer.send_signal(signal.SIGCONT)
    trainer.publish(2)
    assert follower.update().step == 2 and is_at(follower, app, 2)


def test_damage_in_memory_is_never_taken(start, follower, app, path, caplog):
    trainer = start(1, 2)
    follower.update()
    trainer.publish(3)
    for file in files_of(path, 3):
        flip(file, file.stat().st_size // 2)
    assert follower.update() is None and is_at(follower, app, 2)
    assert any("step 3 cannot be taken" in each.message for each in caplog.records)
    trainer.publish(4, 5)
    assert follower.update().step == 5 and is_at(follower, app, 5)


def test_a_key_file_of_another_publisher_is_refused_until_it_is_the_right_one(start, follower, app, key_file, tmp_path):
    start(1)
    follower.update()
    own = key_file.read_bytes()
    other = Trainer(f"hosts://{tmp_path}/others", tmp_path / "other.key")
    try:
        other.publish(7)
        KeyFile(key_file).write((tmp_path / "other.key").read_bytes())
        for _ in range(2):
            with pytest.raises(OptionError, match=f"{key_file}: found hosts://{tmp_path}/others"):
                follower.update()
            assert is_at(follower, app, 1)
    finally:
        other.end()
    KeyFile(key_file).write(own)
    assert follower.update() is None and is_at(follower, app, 1)


def test_a_wrong_key_opens_nothing(start, path, key_file, app, caplog):
    start(1)
    invitation = decode_invitation(key_file.read_bytes(), "key")
    KeyFile(key_file).write(replace(invitation, key="00" * 32).pack())
    assert following(path, key_file, app).update() is None
    assert any("cannot be reached" in each.message for each in caplog.records)


def test_two_jobs_with_roots_of_one_name_are_followed_in_one_process(start, path, key_file, tmp_path):
    if not memory_of_its_own_is_allowed(tmp_path / "tried"):
        pytest.skip("this machine lets nobody here mount memory in a namespace")
    start(1, 2, seed=0)
    start(1, 3, seed=1, key_file=tmp_path / "other.key", on_host=True)
    apps = [zeros_like(values(0)) for _ in range(2)]
    one, other = following(path, key_file, apps[0]), following(path, tmp_path / "other.key", apps[1])
    assert (one.update().step, other.update().step) == (2, 3)
    assert is_at(one, apps[0], 2, 0) and is_at(other, apps[1], 3, 1)


def test_an_invitation_that_failed_is_repeated(path, tmp_path):
    weights = values(0)
    publisher = checkpoint.Publisher(f"hosts://{path}", storage_options={"key_file": tmp_path / "none" / "key"})
    for _ in range(2):
        with pytest.raises(CheckpointError, match="followers cannot be invited"):
            publisher.publish(1, weights)
    (tmp_path / "none").mkdir()
    publisher.publish(1, weights).result()
    assert decode_invitation((tmp_path / "none" / "key").read_bytes(), "key").root == str(path)
    threads = [each.name for each in threading.enumerate() if each.name.startswith("shardopt-files")]
    assert len(threads) == 1
    publisher.close()


def publisher_at(path, key_file):
    return checkpoint.Publisher(f"hosts://{path}", storage_options={"key_file": key_file})


def test_the_hosts_listen_where_they_are_told_to(path, key_file, monkeypatch):
    with publisher_at(path, key_file) as publisher:
        monkeypatch.setenv("SHARDOPT_NETWORK", "nosuch")
        with pytest.raises(ShardoptError, match="SHARDOPT_NETWORK=nosuch: found no interface nosuch"):
            publisher.publish(1, values(1))
        assert not key_file.exists()
        monkeypatch.setenv("SHARDOPT_NETWORK", "lo:20000-29999")
        publisher.publish(1, values(1)).result()
        ((at, *others),) = decode_invitation(key_file.read_bytes(), "key").hosts
        assert at[0] == "127.0.0.1" and 20000 <= at[1] < 30000
        assert all(host == "::1" for host, _ in others)


def test_of_two_publishers_of_one_process_the_later_one_serves(path, key_file, app):
    first = publisher_at(path, key_file)
    first.publish(1, values(1)).result()
    with publisher_at(path, key_file) as second:
        second.publish(2, values(2)).result()
        first.close()
        served._roots.clear()  # as in another process
        follower = following(path, key_file, app)
        assert follower.update().step == 2 and is_at(follower, app, 2)


def test_who_has_published_may_follow_another_job_afterwards(start, path, key_file, app, tmp_path):
    with publisher_at(path, tmp_path / "own.key") as publisher:
        publisher.publish(9, values(9, 1)).result()
    if not memory_of_its_own_is_allowed(tmp_path / "tried"):
        pytest.skip("this machine lets nobody here mount memory in a namespace")
    start(2, on_host=True)
    follower = following(path, key_file, app)
    assert follower.update().step == 2 and is_at(follower, app, 2)


def test_closing_ends_what_followers_read_and_leaves_nothing(path, key_file):
    def left():
        names = (each.name for each in threading.enumerate())
        return sum(name.startswith("shardopt-files") for name in names), len(os.listdir("/proc/self/fd"))

    weights, seen = values(0), []
    for step in range(1, 5):
        publisher = publisher_at(path, key_file)
        train(weights, step)
        publisher.publish(step, weights).result()
        invitation = decode_invitation(key_file.read_bytes(), "key")
        client = FileClient(client_module.Entry(invitation.name, invitation.key, invitation.hosts[0]), 0, 0, "it")
        assert client.names("")
        begin = time.monotonic()
        publisher.close()
        assert time.monotonic() - begin < 2
        for _ in range(2):
            with pytest.raises(ConnectionError, match="it"):
                client.names("")
        client.close()
        seen.append(left())
    assert seen[1:] == seen[:-1] and seen[0][0] == 0


def test_every_update_has_a_line_in_the_log(start, follower, caplog):
    start(1)
    with caplog.at_level(logging.INFO, "shardopt"):
        assert follower.update().step == 1
    assert any(each.message.startswith("updated to step 1: ") for each in caplog.records)


def test_a_published_step_keeps_the_dtype_and_names_that_it_is_given(start, path, key_file):
    start(1, dtype=torch.bfloat16, rename={"^": "model."})
    app = {f"model.{name}": torch.zeros_like(each, dtype=torch.bfloat16) for name, each in values(0).items()}
    assert following(path, key_file, app).update().step == 1
    assert same_bits(app, {f"model.{name}": each.bfloat16() for name, each in values(1).items()})


def test_retention_removes_what_no_kept_step_needs(path, key_file, caplog):
    weights = {"w": torch.arange(4000.0)}
    options = {"key_file": key_file}
    with checkpoint.Publisher(f"hosts://{path}", keep=2, anchor_every=3, storage_options=options) as publisher:
        for step in range(1, 9):
            weights["w"][step] = -1
            publisher.publish(step, weights).result()
    assert not caplog.records
    left = [".host", "step-00000007", "step-00000008", "stream.json"]  # an anchor, and what is after it
    assert sorted(os.listdir(path)) == left
