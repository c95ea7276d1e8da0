"""A served root over two hosts: where files are found, what may be done there, and that nothing leads out of it."""

import os
from contextlib import suppress

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.hosts import served
from shardopt.checkpoint.hosts.admission import Invitation, KeyFile
from shardopt.checkpoint.hosts.directory import HostDirectory
from shardopt.checkpoint.hosts.host_files import HostFiles, ReadOnlyFiles, SharesOnly
from shardopt.checkpoint.hosts.served import ServedStorage, follow_at, is_on_hosts, publish_at
from shardopt.checkpoint.hosts.served_roots import FollowedRoot, PublishedRoot
from shardopt.checkpoint.storage import Span, storage_of
from shardopt.cli import main
from shardopt.errors import CheckpointError, CheckpointNotFoundError, OptionError
from shardopt.ranks.connections.address import Network
from shardopt.ranks.connections.join import Entry
from shardopt.ranks.files.client import FileClient
from shardopt.ranks.files.server import FileServer
from tests.support.streams import same_bits, train, zeros_like

pytestmark = pytest.mark.usefixtures("no_root_is_known")

ROOT = "/dev/shm/none-of-this-name"
NAME, KEY = "aa" * 8, "bb" * 32
OF_RANK_0, OF_RANK_1 = "abc123-r00000.safetensors", "abc123-r00001.safetensors"


@pytest.fixture
def serve():
    """Serves a directory; returns where."""
    servers = []

    def start(path, files=ReadOnlyFiles, number=0):
        directory = HostDirectory(str(path))
        server = FileServer(Entry(NAME, KEY, ()), number, Network(("127.0.0.1",)), files(directory))
        servers.append(server)
        return server.at

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def hosts(tmp_path):
    """The directories of two hosts."""
    paths = [tmp_path / "host0", tmp_path / "host1"]
    for path, name in zip(paths, (OF_RANK_0, OF_RANK_1), strict=True):
        HostDirectory(str(path))
        (path / "step-00000001").mkdir()
        (path / "step-00000001" / name).write_bytes(name.encode())
    (paths[0] / "step-00000001" / "manifest.json").write_bytes(b"manifest")
    return paths


@pytest.fixture
def followed(tmp_path, hosts, serve):
    """The root as followers have it."""
    at = [serve(path, number=number) for number, path in enumerate(hosts)]
    KeyFile(tmp_path / "key").write(Invitation(ROOT, NAME, KEY, tuple(at), (0, 1)).pack())
    root = FollowedRoot(ROOT, KeyFile(tmp_path / "key"))
    root.refresh()
    yield root
    for client in root.files:
        client.close()


@pytest.fixture
def published(hosts, serve):
    """The root as rank 1 has it, on the second host."""
    root = PublishedRoot(ROOT, "key")
    root.number, root.of_rank = 1, (0, 1)
    client = FileClient(Entry(NAME, KEY, serve(hosts[0], HostFiles)), 1, 0)
    root.files = (client, HostFiles(HostDirectory(str(hosts[1]))))
    yield root
    client.close()


@pytest.fixture(params=["followed", "published"])
def root(request):
    return request.getfixturevalue(request.param)


def test_names_are_those_on_all_hosts(root, hosts):
    (hosts[1] / "step-00000002").mkdir()
    assert [name for name in ServedStorage(root).names() if name != ".host"] == ["step-00000001", "step-00000002"]
    step = ServedStorage(root).child("step-00000001")
    assert step.names() == [OF_RANK_0, OF_RANK_1, "manifest.json"]
    assert ServedStorage(root).child("step-00000003").names() == []


def test_a_file_is_read_from_the_host_that_has_it(root):
    step = ServedStorage(root).child("step-00000001")
    for name in (OF_RANK_0, OF_RANK_1):
        assert step.read(name) == name.encode() and step.read(name, 3, 9) == name.encode()[3:9]
        assert step.size(name) == len(name) and step.exists(name)
        memory = [memoryview(bytearray(2)), memoryview(bytearray(3))]
        step.read_into(name, [Span(1, memory[0]), Span(7, memory[1])])
        assert [bytes(each) for each in memory] == [name.encode()[1:3], name.encode()[7:10]]
    assert step.read_record("manifest.json") == b"manifest"


def test_a_file_on_another_host_than_its_rank_says_is_found(root, hosts):
    for number, name in ((0, "abc123-r00001-1.safetensors"), (1, "def456-r00007.safetensors"), (1, "metrics.json")):
        (hosts[number] / "step-00000001" / name).write_bytes(b"found")
        step = ServedStorage(root).child("step-00000001")
        assert step.read(name) == b"found" and step.size(name) == 5 and step.exists(name)


def test_a_file_that_is_nowhere_is_not_found(root):
    step = ServedStorage(root).child("step-00000001")
    assert not step.exists("abc123-r00005.safetensors")
    with pytest.raises(FileNotFoundError):
        step.read("abc123-r00000-9.safetensors")


def test_a_publishing_rank_writes_to_its_own_host_and_removes_on_all(published, hosts):
    step = ServedStorage(published).child("step-00000002")
    assert step.write(OF_RANK_1, [memoryview(b"data")]) == 4
    step.publish("manifest.json", b"manifest")
    assert step.publish_new("more", b"more")
    assert sorted(os.listdir(hosts[1] / "step-00000002")) == [OF_RANK_1, "manifest.json", "more"]
    assert not (hosts[0] / "step-00000002").exists()
    (hosts[0] / "step-00000002").mkdir()
    (hosts[0] / "step-00000002" / "manifest.json").write_bytes(b"of an earlier job")
    step.remove_durably("manifest.json")
    assert not any((path / "step-00000002" / "manifest.json").exists() for path in hosts)
    for name in step.names():
        step.remove(name)
    step.remove("none")
    step.remove_if_empty()
    assert not any((path / "step-00000002").exists() for path in hosts)
    ServedStorage(published).child("step-00000001").remove_if_empty()  # which is not empty
    assert all((path / "step-00000001").exists() for path in hosts)


def everything(paths):
    return {
        str(each): each.read_bytes() if each.is_file() else b"" for path in paths for each in sorted(path.rglob("*"))
    }


def test_a_follower_changes_nothing(followed, hosts):
    before, step = everything(hosts), ServedStorage(followed).child("step-00000001")
    tries = [
        step.make,
        step.remove_if_empty,
        lambda: step.remove("manifest.json"),
        lambda: step.write("more", [memoryview(b"x")]),
        lambda: step.publish("more", b"x"),
        lambda: step.publish_new("more", b"x"),
    ]
    tries += [lambda client=client: client.remove("step-00000001", "manifest.json") for client in followed.files]
    for attempt in tries:
        with pytest.raises(OSError):
            attempt()
    assert step.free_bytes() is None and everything(hosts) == before


WAYS_OUT = [
    ("..", "secret"),
    ("", "../secret"),
    ("step-00000001", "../../secret"),
    ("step-00000001/../..", "secret"),
    ("{parent}", "secret"),
    ("", "{parent}/secret"),
    ("step-00000001", "link"),
    ("linked", "secret"),
    ("step-00000001", "pipe"),
    (".", "secret"),
    ("step-00000001", ".."),
    ("step-00000001", ""),
    ("step-00000001\0", "manifest.json"),
    ("step-00000001", "manifest.json\0"),
]


def put_ways_out(path):
    (path.parent / "secret").write_bytes(b"secret")
    (path / "step-00000001" / "link").symlink_to(path.parent / "secret")
    (path / "linked").symlink_to(path.parent)
    os.mkfifo(path / "step-00000001" / "pipe")


@pytest.mark.parametrize(("directory", "name"), WAYS_OUT)
@pytest.mark.parametrize("files", [ReadOnlyFiles, HostFiles, SharesOnly])
def test_with_the_key_nothing_is_reached_outside_of_the_directory(tmp_path, hosts, serve, files, directory, name):
    put_ways_out(hosts[0])
    before = everything([tmp_path / "secret", *hosts])
    client = FileClient(Entry(NAME, KEY, serve(hosts[0], files)), 0, 0)
    directory, name = (each.format(parent=tmp_path) for each in (directory, name))
    for ask in (client.size, lambda *at: client.read(*at, 0, 0), lambda *at: client.read_rest(*at, 0, 9)):
        with pytest.raises(OSError):
            ask(directory, name)
    if files is not HostFiles:
        with pytest.raises(OSError):
            client.remove(directory, name)
    elif name != "link":  # which is in the directory
        with suppress(OSError):
            client.remove("", directory) if not name else client.remove(directory, name)
    gone = before.keys() - everything([tmp_path / "secret", *hosts]).keys()
    assert (tmp_path / "secret").exists() and gone <= {str(hosts[0] / "step-00000001" / "pipe")}
    client.close()


@pytest.mark.parametrize("files", [ReadOnlyFiles, HostFiles])
@pytest.mark.parametrize("directory", ["..", "step-00000001/../..", "linked", "{parent}", ".", "/"])
def test_no_names_are_told_of_what_is_outside(tmp_path, hosts, serve, files, directory):
    put_ways_out(hosts[0])
    client = FileClient(Entry(NAME, KEY, serve(hosts[0], files)), 0, 0)
    with suppress(OSError):
        assert client.names(directory.format(parent=tmp_path)) == []
    client.close()


def test_hidden_files_are_served_to_nobody_but_the_job(hosts, serve):
    (hosts[0] / "step-00000001" / ".manifest.json.abc.tmp").write_bytes(b"half")
    client = FileClient(Entry(NAME, KEY, serve(hosts[0])), 0, 0)
    for directory, name in (("", ".host"), ("step-00000001", ".manifest.json.abc.tmp")):
        assert name not in client.names(directory)
        with pytest.raises(FileNotFoundError):
            client.size(directory, name)
    client.close()


def test_of_two_roots_below_one_another_each_has_its_own_steps(tmp_path):
    for path in ("/dev/shm/a", "/dev/shm/a/b", "/dev/shm/ab"):
        follow_at(f"hosts://{path}", {"key_file": tmp_path / "key"})
    for url, root, directory in [
        ("/dev/shm/a", "/dev/shm/a", ""),
        ("/dev/shm/a/b", "/dev/shm/a/b", ""),
        ("/dev/shm/a/b/", "/dev/shm/a/b", ""),
        ("/dev/shm/a/b/step-00000001", "/dev/shm/a/b", "step-00000001"),
        ("/dev/shm/a/step-00000001", "/dev/shm/a", "step-00000001"),
        ("/dev/shm/ab/step-00000001", "/dev/shm/ab", "step-00000001"),
    ]:
        storage = storage_of(f"hosts://{url}")
        assert (storage._root.path, storage._directory) == (root, directory)
    assert is_on_hosts("hosts:///dev/shm/abc/step-00000001") and is_on_hosts("hosts:///dev/shm/a/c/step-00000001")
    assert not is_on_hosts("hosts:///dev/shm/a/step-00000001") and not is_on_hosts("/dev/shm/a/step-00000001")


@pytest.mark.parametrize(
    "url", ["hosts://", "hosts:///", "hosts://a/b", "hosts:///a/../b", "hosts:///a//b", "hosts:////a"]
)
@pytest.mark.parametrize("use", [publish_at, follow_at])
def test_a_url_without_an_absolute_path_is_refused(url, use):
    with pytest.raises(OptionError, match="root: found hosts://"):
        use(url, {"key_file": "key"})


@pytest.mark.parametrize(
    "options",
    [
        {"max_connections": 0},
        {"max_connections": 2.5},
        {"max_connections": True},
        {"max_bytes_per_second": 0},
        {"max_bytes_per_second": -1.0},
        {"max_bytes_per_second": float("nan")},
        {"max_bytes_per_second": "fast"},
        {"max_bytes_per_second": True},
        {"keyfile": "key"},
    ],
)
def test_bad_options_of_a_publisher_are_refused_by_name(options):
    with pytest.raises(OptionError, match=next(iter(options))):
        publish_at("hosts:///dev/shm/a", {"key_file": "key"} | options)
    assert served._roots == {}


@pytest.mark.parametrize("options", [{"keyfile": "key"}, {"key_file": "key", "max_connections": 3}, {"key_file": 3}])
def test_bad_options_of_a_follower_are_refused_by_name(options):
    with pytest.raises(OptionError, match=next(reversed(options))):
        follow_at("hosts:///dev/shm/a", options)


@pytest.fixture
def stream(tmp_path):
    """Steps of a publisher, as other jobs see them: this process forgets it as a publisher."""
    weights = {"wide": torch.randn(300, 500), "small": torch.randn(7)}
    root, options = f"hosts://{tmp_path}/weights", {"key_file": str(tmp_path / "key")}
    with checkpoint.Publisher(root, storage_options=options) as publisher:
        for step in (1, 2):
            train(weights, step)
            publisher.publish(step, weights).result()
        served._roots.clear()
        yield f"{root}/step-00000002", options, weights


def test_a_step_is_loaded_by_the_key_file(stream):
    url, options, weights = stream
    app = zeros_like(weights)
    checkpoint.load(url, app, storage_options=options)
    assert same_bits(app, weights)
    assert checkpoint.verify(url).ok  # this process knows it now
    with checkpoint.open(url) as reader:
        assert torch.equal(reader.read("wide"), weights["wide"])
    app = zeros_like(weights)
    checkpoint.load(url, app, storage_options=options | {"max_connections": 5})  # the options of the publisher
    assert same_bits(app, weights)


def test_what_is_opened_by_its_url_alone_takes_the_key_file_of_the_environment(stream, monkeypatch):
    url, options, _ = stream
    for use in (checkpoint.verify, checkpoint.open):
        with pytest.raises(OptionError, match="set SHARDOPT_KEY_FILE to it"):
            use(url)
    monkeypatch.setenv("SHARDOPT_KEY_FILE", options["key_file"])
    assert checkpoint.verify(url).ok
    with pytest.raises(CheckpointNotFoundError):
        checkpoint.verify(url.replace("00000002", "00000003"))


def test_the_shell_follows_and_verifies_with_the_key_file_of_the_environment(stream, monkeypatch, capsys):
    url, options, _ = stream
    assert main(["verify", url]) == 1 and "SHARDOPT_KEY_FILE" in capsys.readouterr().err
    monkeypatch.setenv("SHARDOPT_KEY_FILE", options["key_file"])
    assert main(["verify", url]) == 0 and "every byte is as it was written" in capsys.readouterr().out
    assert main(["follow", url.rpartition("/")[0], "--count", "1"]) == 0
    assert "step 2: " in capsys.readouterr().out


def test_a_key_file_that_others_may_read_opens_nothing(stream):
    url, options, weights = stream
    os.chmod(options["key_file"], 0o644)
    with pytest.raises(CheckpointError, match="others may read the key"):
        checkpoint.load(url, zeros_like(weights), storage_options=options)


def test_an_option_that_no_root_has_is_refused(stream):
    url, options, weights = stream
    with pytest.raises(OptionError, match="keyfile"):
        checkpoint.load(url, zeros_like(weights), storage_options={"keyfile": options["key_file"]})
