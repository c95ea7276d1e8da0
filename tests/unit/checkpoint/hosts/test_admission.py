"""The invitation by which followers find a publisher: who may have written its file, and what stands in it."""

import os
import stat
from contextlib import suppress
from dataclasses import replace

import pytest
import torch.distributed as dist

from shardopt.checkpoint.format.constants import pack_record, unpack_record
from shardopt.checkpoint.hosts.admission import InStore, Invitation, KeyFile, decode_invitation, invitation_at
from shardopt.checkpoint.hosts.served_roots import FollowedRoot
from shardopt.errors import CheckpointError, OptionError

ROOT = "/dev/shm/weights"
INVITATION = Invitation(ROOT, "aa" * 8, "bb" * 32, ((("10.0.0.1", 4100), ("::1", 4101)), (("10.0.0.2", 4100),)), (0, 1))


@pytest.fixture
def key_file(tmp_path):
    return KeyFile(tmp_path / "key")


def test_what_is_written_is_read_by_its_owner_alone(tmp_path, key_file):
    assert key_file.read() is None
    os.umask(os.umask(0))
    key_file.write(INVITATION.pack())
    assert stat.S_IMODE(os.stat(tmp_path / "key").st_mode) == 0o600
    assert decode_invitation(key_file.read(), "key") == INVITATION
    key_file.write(b"later")
    assert key_file.read() == b"later" and os.listdir(tmp_path) == ["key"]
    assert INVITATION.key not in repr(INVITATION)


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o640, 0o601])
def test_one_that_others_may_use_is_refused(tmp_path, key_file, mode):
    key_file.write(INVITATION.pack())
    os.chmod(tmp_path / "key", mode)
    with pytest.raises(CheckpointError, match=f"found mode {mode:04o}, of user") as raised:
        key_file.read()
    assert raised.value.code == "following" and "chmod 600" in str(raised.value)


def test_one_of_another_user_is_refused(tmp_path, key_file):
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    key_file.write(INVITATION.pack())
    os.chown(tmp_path / "key", 12345, 12345)
    with pytest.raises(CheckpointError, match="of user 12345; required a file of mode 0600, of user 0"):
        key_file.read()


def test_what_is_no_file_is_refused_at_once(tmp_path):
    (tmp_path / "directory").mkdir(mode=0o700)
    os.mkfifo(tmp_path / "pipe", 0o600)
    KeyFile(tmp_path / "key").write(INVITATION.pack())
    (tmp_path / "link").symlink_to(tmp_path / "key")
    opened = len(os.listdir("/proc/self/fd"))
    for name in ("directory", "pipe", "link"):
        with pytest.raises(CheckpointError, match=str(tmp_path / name)):
            KeyFile(tmp_path / name).read()
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_link_is_replaced_and_not_written_through(tmp_path):
    (tmp_path / "other").write_bytes(b"other")
    (tmp_path / "key").symlink_to(tmp_path / "other")
    KeyFile(tmp_path / "key").write(INVITATION.pack())
    assert (tmp_path / "other").read_bytes() == b"other" and not (tmp_path / "key").is_symlink()


def test_a_file_system_on_which_others_may_read_all_gets_no_key(tmp_path, key_file, monkeypatch):
    (tmp_path / "key").write_bytes(b"before")
    fstat = os.fstat

    def open_to_all(fd):
        fields = list(fstat(fd))
        fields[0] |= 0o077
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", open_to_all)
    with pytest.raises(CheckpointError, match="on a file system that keeps modes"):
        key_file.write(INVITATION.pack())
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["key"] and (tmp_path / "key").read_bytes() == b"before"


@pytest.mark.parametrize("path", ["none/key", "."])
def test_where_no_file_can_be_written_nobody_is_invited(tmp_path, path):
    with pytest.raises(CheckpointError, match="followers cannot be invited") as raised:
        KeyFile(tmp_path / path).write(b"x")
    assert str(tmp_path) in str(raised.value) and os.listdir(tmp_path) == []


def test_a_path_may_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    invitation_at(ROOT, "~/key").write(b"x")
    assert (tmp_path / "key").read_bytes() == b"x"


def test_a_relative_path_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = invitation_at(ROOT, "key")
    monkeypatch.chdir("/")
    made.write(b"x")
    assert (tmp_path / "key").read_bytes() == b"x"


WIRE = unpack_record(INVITATION.pack(), "where")


def sealed(wire):
    return pack_record(wire["format"], **{name: value for name, value in wire.items() if name != "format"})


def test_a_part_of_a_file_is_no_invitation(key_file):
    data = INVITATION.pack()
    for length in range(len(data) - 1):
        with pytest.raises(CheckpointError, match="key: found no invitation, or a part of one"):
            decode_invitation(data[:length], "key")


@pytest.mark.parametrize(
    "change",
    [
        {"format": "shardopt-run"},
        {"root": None},
        {"name": 3},
        {"key": "no digits"},
        {"key": 5},
        {"hosts": []},
        {"hosts": [[["10.0.0.1", "4100"]], []]},
        {"hosts": [[["10.0.0.1", True]], []]},
        {"hosts": [[["10.0.0.1"]], []]},
        {"hosts": 5},
        {"hosts": [[["10.0.0.1", 1 << 16]], []]},
        {"hosts": [[["10.0.0.1", 0]], []]},
        {"of_rank": [0, 2]},
        {"of_rank": [-1]},
        {"of_rank": [True]},
        {"of_rank": None},
    ],
)
def test_what_is_no_invitation_is_refused(change):
    with pytest.raises(CheckpointError, match="where: found no invitation") as raised:
        decode_invitation(sealed(WIRE | change), "where")
    assert type(raised.value) is CheckpointError  # and no damage of a checkpoint


def test_one_to_another_root_is_refused_each_time_and_changes_nothing(tmp_path, key_file):
    root = FollowedRoot(ROOT, key_file)
    root.refresh()
    assert root.files == ()
    key_file.write(INVITATION.pack())
    root.refresh()
    files = root.files
    assert len(files) == 2 and root.of_rank == (0, 1)
    others = replace(INVITATION, root="/dev/shm/another").pack(), INVITATION.pack()[:-20]
    for data in others:
        key_file.write(data)
        for _ in range(2):
            with pytest.raises((OptionError, CheckpointError), match=str(tmp_path / "key")):
                root.refresh()
            assert root.files is files
    key_file.write(INVITATION.pack())
    root.refresh()
    assert root.files is files
    os.unlink(tmp_path / "key")
    root.refresh()
    assert root.files == ()


@pytest.mark.parametrize("key_file", ["", 3, b"key", ["key"]])
def test_what_is_no_path_of_a_key_file_is_refused(key_file):
    with pytest.raises(OptionError, match="key_file: found"):
        invitation_at(ROOT, key_file)


def test_without_a_job_there_must_be_a_key_file():
    with pytest.raises(OptionError, match="no key_file, and no process group") as raised:
        invitation_at(ROOT, None)
    assert "hosts:///dev/shm/weights" in str(raised.value) and "hosts://hosts" not in str(raised.value)


def test_in_the_store_of_a_job_it_stands_under_its_root(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        here = invitation_at(ROOT, None)
        assert isinstance(here, InStore) and here.read() is None
        here.write(INVITATION.pack())
        assert decode_invitation(here.read(), "store") == INVITATION
        here.write(b"later")
        assert here.read() == b"later" and InStore("/dev/shm/other").read() is None
    finally:
        dist.destroy_process_group()
    with suppress(OptionError):
        assert InStore(ROOT).read() is None
