"""A host's own directory: whose it may be, and what is opened in it for others."""

import os
import threading

import pytest

from shardopt.checkpoint.hosts.directory import HostDirectory
from shardopt.errors import CheckpointError


def test_it_is_made_for_this_user_alone_and_keeps_its_identity(tmp_path):
    path = tmp_path / "made" / "run"
    first = HostDirectory(str(path))
    assert os.stat(path).st_mode & 0o777 == 0o700
    assert HostDirectory(str(path)).identity == first.identity != HostDirectory(str(tmp_path / "other")).identity


def test_those_who_make_it_at_the_same_time_agree_on_its_identity(tmp_path):
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(HostDirectory(str(tmp_path / "run")).identity)) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16 and len(set(found)) == 1
    assert sorted(os.listdir(tmp_path / "run")) == [".host"]


def _open_to_others(path):
    path.mkdir(mode=0o777)
    path.chmod(0o777)


def _link(path):
    target = path.with_name("elsewhere")
    target.mkdir(mode=0o700)
    path.symlink_to(target)


def _of_another_user(path):
    path.mkdir(mode=0o700)
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    os.chown(path, 12345, 12345)


def _file(path):
    path.write_text("")


def _with_a_false_identity(path):
    path.mkdir(mode=0o700)
    (path / ".host").write_text("../../etc")


def _with_an_identity_elsewhere(path):
    path.mkdir(mode=0o700)
    path.with_name("identity").write_text("0" * 32)
    (path / ".host").symlink_to(path.with_name("identity"))


STRANGERS = [
    _open_to_others,
    _link,
    _of_another_user,
    _file,
    _with_a_false_identity,
    _with_an_identity_elsewhere,
]


@pytest.mark.parametrize("make", STRANGERS, ids=lambda make: make.__name__.strip("_"))
def test_what_a_stranger_has_made_is_refused(tmp_path, make):
    make(tmp_path / "run")
    with pytest.raises(CheckpointError, match="a host's own directory cannot be used"):
        HostDirectory(str(tmp_path / "run"))


def test_a_link_above_that_somebody_else_has_made_is_not_followed(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a link away")
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(own)
    os.chown(link, 12345, 12345, follow_symlinks=False)
    for path in (link / "run", link / "below" / "run"):
        with pytest.raises(CheckpointError, match=f"leads through {link}, a link that somebody else has made"):
            HostDirectory(str(path))
    assert not any(own.iterdir())


def test_a_link_of_this_user_above_is_followed_where_nobody_else_can_change_what_is_there(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("./real")
    assert HostDirectory(str(tmp_path / "link" / "run")).identity
    assert (tmp_path / "real" / "run" / ".host").exists()
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "real").mkdir(mode=0o700)
    (tmp_path / "out").symlink_to(shared / "real")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    with pytest.raises(CheckpointError, match=f"chmod \\+t {shared}, so that"):
        HostDirectory(str(shared / "real" / "run"))
    for name in ("out", "round"):
        with pytest.raises(CheckpointError, match="a host's own directory cannot be used"):
            HostDirectory(str(tmp_path / name / "run"))
    shared.chmod(0o1777)
    assert HostDirectory(str(shared / "real" / "run")).identity


def test_nothing_but_regular_files_of_its_own_is_opened(tmp_path):
    directory = HostDirectory(str(tmp_path / "run"))
    step = tmp_path / "run" / "step-1"
    step.mkdir()
    (step / "data").write_bytes(b"bytes")
    (tmp_path / "secret").write_bytes(b"secret")
    (step / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "run" / "out").symlink_to(tmp_path)
    os.mkfifo(step / "pipe")
    with open(directory.open_file("step-1", "data"), "rb") as file:
        assert file.read() == b"bytes"
    refused = [
        ("step-1", "link"),
        ("step-1", "pipe"),
        ("step-1", "../.host"),
        ("step-1", ".."),
        ("step-1", ""),
        ("step-1", "none"),
        ("..", "secret"),
        ("out", "secret"),
        ("step-1/../..", "secret"),
        ("/etc", "passwd"),
        (str(tmp_path), "secret"),
        (".", ".host"),
    ]
    for within, name in refused:
        with pytest.raises(OSError):
            os.close(directory.open_file(within, name))


def test_threads_that_list_at_one_time_each_get_all_names(tmp_path):
    directory, found = HostDirectory(str(tmp_path / "run")), []
    names = [f"step-{number:08d}" for number in range(3000)]  # which the system gives in several parts
    for name in names:
        (tmp_path / "run" / name).touch()

    def work():
        for _ in range(50):
            found.append(len(set(directory.names(""))))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [len([".host", *names])] * 200
