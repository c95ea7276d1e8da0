"""Paths and URLs: a path is itself, whatever is in its name, and means the same after the directory has changed."""

import os
import re
import zipfile
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardopt import checkpoint
from shardopt.checkpoint import Manager, Tier
from shardopt.checkpoint.dcp import StorageReader, StorageWriter
from shardopt.checkpoint.storage import LocalStorage, absolute_url, register_storage, storage_of
from shardopt.checkpoint.storage import open as storage_open
from shardopt.checkpoint.storage.remote import RemoteStorage
from shardopt.errors import CheckpointError, OptionError


def app(number=0.0):
    return {"x": torch.full((3,), number)}


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize("name", ["out/lr::1e-4", "lr::1e-4", "memory::x", "local:x", "data:x", "file:x"])
def test_a_path_without_a_protocol_is_itself(here, name):
    with Manager("out/lr") as manager:
        manager.save(1, app(1.0))
    with Manager(name) as manager:
        assert manager.restore(app()) == 0
        manager.save(2, app(2.0))
        assert manager.path(2) == os.path.join(here, name, "step-00000002")
    checkpoint.save(f"{name}/own", app(3.0))
    checkpoint.convert(f"{name}/own", f"{name}.pt", to="torch")
    target = app()
    assert Manager(name).restore(target) == 2
    assert target["x"][0] == 2
    for each in (f"{name}/own", f"{name}.pt"):
        checkpoint.load(each, target)
        assert target["x"][0] == 3


@pytest.mark.parametrize("url", ["memory://urls/lr::1e-4", "file://{here}/lr::1e-4", "file:{here}/lr::1e-4"])
def test_a_chain_names_its_protocols(here, url):
    url = url.format(here=here)
    checkpoint.save(url.partition("::")[0], app(1.0))
    checkpoint.save(url, app(2.0))
    target = app()
    checkpoint.load(url, target)
    assert target["x"][0] == 2


def test_chains_are_read(here):
    checkpoint.save("run", app(1.0))
    with zipfile.ZipFile("runs.zip", "w") as archive:
        for name in os.listdir("run"):
            archive.write(f"run/{name}")
    checkpoint.save("memory://urls/chained", app(2.0))
    target = app()
    for url, number in (
        (f"zip://run::file://{here}/runs.zip", 1),
        ("zip://run::file://runs.zip", 1),
        ("simplecache::memory://urls/chained", 2),
    ):
        checkpoint.load(url, target)
        assert target["x"][0] == number
    for url in ("zip://run::runs.zip", "zip://run::memory://urls/lr::1e-4"):
        with pytest.raises(CheckpointError, match=re.escape("zip://run::file:///data/runs.zip")):
            checkpoint.load(url, target)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_urls_are_made_absolute_in_the_call(here):
    pending = checkpoint.async_save("in background", app(1.0))
    manager = Manager("root", destinations=[Tier("tier", every=1), checkpoint.Mirror("mirror")], every=2)
    written = checkpoint.save("first", app(2.0)).url
    reader, writer = StorageReader("first"), StorageWriter("of dcp")
    os.chdir("../there")
    assert pending.result().url == str(here / "in background")
    assert written == str(here / "first")
    for step in (1, 2):
        manager.save(step, app(float(step)))
    manager.close()
    dcp.save(app(), storage_writer=writer, no_dist=True)
    target = app()
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert target["x"][0] == 2
    assert os.listdir() == []
    assert sorted(os.listdir(here)) == ["first", "in background", "mirror", "of dcp", "root", "tier"]


def test_a_base_is_meant_from_where_the_call_was(here):
    checkpoint.save("runs/first", app())
    pending = checkpoint.async_save("runs/second", app(), base="runs/first")
    os.chdir("../there")
    assert pending.result().bytes_unchanged > 0


def test_homes_and_dots_are_resolved(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here / "home"))
    assert absolute_url("~/run") == str(here / "home" / "run") == storage_of("~/run").url == Tier("~/run", every=1).path
    assert absolute_url("../run/") == str(here.parent / "run")
    for url in ("s3://bucket/../a", "simplecache::s3://bucket/a", "hosts:///dev/shm/run/step-1"):
        assert absolute_url(url) == url


@pytest.mark.parametrize("path", [Path("s3://bucket/run"), Path("gs://bucket/run"), "memory:/run"])
def test_a_url_that_has_been_a_path_is_refused(here, path):
    with pytest.raises(OptionError, match=r"pass '[a-z0-9]+://[a-z/]+' as a str: pathlib drops a slash"):
        Manager(path)
    assert os.listdir() == []


@pytest.mark.parametrize("call", [Manager, checkpoint.open, lambda url: checkpoint.save(url, app())])
def test_a_path_with_a_nul_character_is_refused(here, call):
    with pytest.raises(OptionError, match="required no NUL character"):
        call("run\0s")


def test_a_file_system_that_stands_only_before_others_is_refused(here):
    with (
        Manager(f"dir::file://{here}/run") as manager,
        pytest.raises(CheckpointError, match="leave out its first part"),
    ):
        manager.save(1, app())


def test_file_urls_may_name_this_host_or_a_home(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here / "home"))
    assert absolute_url(f"file://localhost{here}/run") == str(here / "run")
    assert absolute_url("file://~/run") == str(here / "home" / "run")
    assert absolute_url("file://localhost") == str(here / "localhost")


def test_what_lies_on_hosts_has_an_absolute_path():
    with pytest.raises(OptionError, match="an absolute path"):
        checkpoint.save("hosts://run/step-1", app())


def test_a_protocol_of_the_programs_own_is_opened_by_it(monkeypatch):
    monkeypatch.setattr(storage_open, "_own", {})
    with pytest.raises(CheckpointError, match="the protocol 'own'"):
        storage_of("own://a/b")
    opened = []

    def opener(url):
        opened.append(url)
        return LocalStorage("/nowhere")

    register_storage("own", opener)
    assert isinstance(storage_of("own://a/b"), LocalStorage) and opened == ["own://a/b"]
    register_storage("own", lambda url: RemoteStorage(fsspec.filesystem("memory"), url))  # again, in its place
    assert isinstance(storage_of("own://a/b"), RemoteStorage)
    with pytest.raises(OptionError, match="pathlib drops a slash"):
        storage_of("own:/a")


def test_what_an_opener_gets_and_what_it_may_not_do(monkeypatch, tmp_path):
    monkeypatch.setattr(storage_open, "_own", {})
    monkeypatch.setattr(storage_open, "_options", {})
    opened = []

    def opener(url, token=None):
        opened.append((url, token))
        if "#" not in url:
            raise ValueError("write own:///path#prefix")
        return None if url.endswith("none") else LocalStorage(str(tmp_path / url.rpartition("#")[2]))

    with pytest.raises(CheckpointError, match=r"on this rank; .*register_storage.*--import"):
        storage_of("own:///db#run")
    register_storage("own", opener)
    storage_of("own:///db#run/")
    assert opened == [("own:///db#run", None)]
    checkpoint.save("own:///db#run/a", {"n": 1}, storage_options={"token": "t"})
    assert opened[-1] == ("own:///db#run/a", "t")
    with pytest.raises(OptionError, match="storage_options: found key"):
        checkpoint.save("own:///db#run/b", {"n": 1}, storage_options={"key": "t"})
    for url, found in [("own:///db", "ValueError: write own:///path#prefix"), ("own:///db#none", "a NoneType")]:
        with pytest.raises(CheckpointError, match=f"cannot open {url}.*\n.*found {found}"):
            storage_of(url)


@pytest.mark.parametrize("protocol", ["file", "local", "", "a", "a://", "a b"])
def test_what_is_no_protocol_is_refused(protocol):
    with pytest.raises(OptionError, match="protocol: found"):
        register_storage(protocol, LocalStorage)


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run", "abfss://container/run"])
def test_the_package_of_an_object_store_is_not_imported_to_see_that_it_is_no_archive(monkeypatch, url):
    monkeypatch.setattr(fsspec, "get_filesystem_class", lambda protocol: pytest.fail(f"{protocol} is imported"))
    assert not storage_open.is_in_archive(url)
