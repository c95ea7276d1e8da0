"""Checkpoints on object stores, from and to real servers on loopback, through obstore: sound, and under faults."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import urllib.request
import warnings
from collections import Counter
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardopt import checkpoint
from shardopt.checkpoint.format.constants import SEAL_BYTES, seal
from shardopt.checkpoint.storage import remote, retry, storage_of
from shardopt.checkpoint.storage.object_stores import store as object_store
from shardopt.checkpoint.storage.remote import RemoteStorage
from shardopt.errors import CheckpointError, CheckpointNotFoundError, CorruptionError, FormatError, RankError
from shardopt.ranks import Ranks
from tests.harness import Fault, run_ranks, run_ranks_outcomes
from tests.harness.object_stores import object_servers, reached
from tests.harness.programs import run_program

REPOSITORY = Path(__file__).resolve().parents[2]
IMPATIENT = retry.RetryPolicy(attempts=4, pause_seconds=0.01, request_seconds=20.0)
DEADLINE_SECONDS = 5.0
ROWS = 4099  # no multiple of the ranks


@pytest.fixture(scope="module")
def servers():
    with object_servers() as server:
        yield server


@pytest.fixture
def s3(servers):
    return servers("s3")


@pytest.fixture
def here(servers, request, monkeypatch):
    """The server of S3, or of the test's protocol, reached from this process, with small parts and little patience."""
    server = servers(getattr(request, "param", "s3"))
    monkeypatch.setattr(retry, "RETRY_POLICY", IMPATIENT)
    monkeypatch.setattr(remote, "PART_BYTES", 1 << 20)
    server.plan()
    with server.reached():
        yield server
    server.plan()


def on(*protocols, exhaustive=()):
    """Runs a test on the servers of protocols; on some of them only with --exhaustive."""
    marked = [pytest.param(protocol, marks=pytest.mark.exhaustive) for protocol in exhaustive]
    return pytest.mark.parametrize("here", [*protocols, *marked], indirect=True)


def value(step=1):
    return torch.arange(ROWS * 192, dtype=torch.float32).reshape(ROWS, 192) + step  # 3 MiB: four parts


HANGS = {
    "s3": ["POST .*uploadId", "HEAD"],
    "gs": ["partNumber=2", "POST .*uploadId", "manifest.json$"],
    "az": ["comp=block&", "comp=blocklist", "manifest.json$"],
}


def app_of(step=1):
    return {"x": value(step), "small": torch.arange(10.0), "step": step}


def holds(root, step=1):
    with checkpoint.open(root) as reader:
        assert reader.read("step") == step
        assert torch.equal(reader.read("x"), value(step))
        assert torch.equal(reader.read("small"), torch.arange(10.0))
    return True


def uploads_left(server, root):
    """The number of uploads in a bucket that have not ended. Azure has none, but blocks that belong to no blob."""
    if server.protocol == "az":
        return 0
    with urllib.request.urlopen(f"{server.endpoint}/{root.split('/')[2]}?uploads") as answer:
        return answer.read().count(b"</UploadId>")


def test_parts_go_several_at_a_time_and_few_are_in_memory(here, monkeypatch):
    monkeypatch.setattr(object_store, "PARTS_AT_ONCE", 2)
    root = here.new_root() + "/c"
    app = {"x": torch.arange(5 << 20, dtype=torch.float32)}  # 20 MiB: 21 parts
    checkpoint.save(root, app_of())  # what the client makes only once, more than these parts, is not counted
    here.plan({"kind": "slow", "seconds": 0.1, "match": "partNumber", "times": 100})
    tracemalloc.start()
    checkpoint.save(root + "2", app)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    log = here.log()
    assert len([request for request in log["requests"] if "partNumber" in request]) == 21
    assert log["most_at_once"]["PUT"] == 2
    assert peak < 6 << 20  # two parts on their way, which the socket may copy, two in the making, and change
    assert checkpoint.verify(root + "2").ok


USUAL = {("s3", "503"), ("s3", "deaf"), ("gs", "close"), ("az", "deaf")}  # each way to fail on one of the stores


@pytest.mark.parametrize(
    ("here", "kind"),
    [
        pytest.param(protocol, kind, marks=[pytest.mark.exhaustive][: (protocol, kind) not in USUAL])
        for protocol in ("s3", "gs", "az")
        for kind in ("429", "503", "close", "cut", "deaf")
    ],
    indirect=["here"],
)
def test_every_request_fails_once(here, kind):
    """Each distinct one: refused, cut off before it is carried out, or after."""
    root = here.new_root()
    here.plan({"kind": kind})
    manager = checkpoint.Manager(root)
    manager.save(1, app_of())
    app = {"x": torch.zeros(ROWS, 192), "small": torch.zeros(10), "step": 0}
    assert manager.restore(app) == 1
    assert torch.equal(app["x"], value()) and app["step"] == 1
    assert checkpoint.verify(manager.path(1)).ok
    checkpoint.reshard(manager.path(1), root + "/other", world_size=2)
    assert holds(root + "/other")
    log = here.log()
    assert log["struck"] >= 30
    assert log["struck"] == len(set(log["requests"]))


@pytest.mark.parametrize(
    ("here", "match"),
    [
        ("s3", "partNumber=2"),
        pytest.param("s3", "manifest.json$", marks=pytest.mark.exhaustive),
        ("s3", "safetensors bytes="),
        *(
            pytest.param(protocol, match, marks=pytest.mark.exhaustive)
            for protocol, matches in HANGS.items()
            for match in matches
        ),
    ],
    indirect=["here"],
)
def test_a_request_that_hangs_is_abandoned_and_made_again(here, monkeypatch, match):
    monkeypatch.setattr(retry, "RETRY_POLICY", retry.RetryPolicy(attempts=3, pause_seconds=0.01, request_seconds=1.5))
    root = here.new_root() + "/c"
    here.plan({"kind": "hang", "seconds": 30, "match": match, "all": True})
    begin = time.monotonic()
    checkpoint.save(root, app_of())
    assert holds(root)
    assert here.log()["struck"] == 1
    assert time.monotonic() - begin < 12


@on("s3", "gs", "az")
def test_a_part_that_the_store_has_lost_is_sent_again(here):
    root = here.new_root() + "/c"
    here.plan({"kind": "lose", "match": "comp=block&" if here.protocol == "az" else "partNumber=2", "all": True})
    checkpoint.save(root, app_of())
    assert holds(root) and checkpoint.verify(root).ok
    assert here.log()["struck"] == 1
    assert uploads_left(here, root) == 0


@pytest.mark.parametrize("match", ["PUT .*safetensors", "PUT .*manifest"])
@on("gs", exhaustive=["s3", "az"])
def test_a_small_file_that_the_store_has_lost_is_told(here, match):
    root = here.new_root()
    app = {"x": torch.ones(3)}
    checkpoint.save(root + "/a", app)
    here.plan({"kind": "lose", "match": match, "all": True})
    with pytest.raises(CheckpointError, match="no such file"):
        checkpoint.save(root + "/b", app)
    assert here.log()["struck"] == 1
    checkpoint.save(root + "/b", app)
    assert checkpoint.verify(root + "/b").ok


@pytest.mark.parametrize(
    ("here", "match", "doing", "attempts", "left"),
    [
        ("s3", "partNumber=2", r"write s3://.*safetensors", "attempts that failed, the last with Generic S3", 0),
        ("gs", "partNumber=2", r"write gs://.*safetensors", "attempts that failed, the last with Generic GCS", 0),
        ("s3", "PUT .*manifest", r"write s3://.*manifest.json", "12 attempts", 1),
    ],
    indirect=["here"],
)
def test_what_does_not_pass_is_told_and_commits_nothing(here, match, doing, attempts, left):
    """Data files are left where a store may yet carry out the request for the manifest that was given up."""
    root = here.new_root() + "/c"
    here.plan({"kind": "503", "match": match, "times": 1000})
    with pytest.raises(CheckpointError, match=rf"cannot {doing}[^\n]*\n.*found {attempts}.*see whether the store"):
        checkpoint.save(root, app_of())
    here.plan()
    assert len(storage_of(root).names()) == left
    assert uploads_left(here, root) == 0
    with pytest.raises(CheckpointNotFoundError):
        checkpoint.open(root)
    checkpoint.save(root, app_of())
    assert holds(root)


@on("gs", exhaustive=["s3", "az"])
def test_listings_that_lag_lose_nothing(here):
    """Each listing is as it was when it was last asked for: it lacks what was saved since, and has what was removed."""
    root = here.new_root()
    here.plan({"kind": "lag", "times": 10_000})
    with checkpoint.Manager(root, keep=2, incremental=True) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, app_of(step), force=True)
    assert here.log()["struck"] > 10
    here.plan()
    with checkpoint.Manager(root, keep=2) as manager:
        assert manager.steps()[-2:] == [3, 4]
        for step in manager.steps():
            assert checkpoint.verify(manager.path(step)).ok
        app = {"x": torch.zeros(ROWS, 192), "small": torch.zeros(10), "step": 0}
        assert manager.restore(app) == 4
        assert torch.equal(app["x"], value(4))


def test_what_others_write_is_seen_at_once(here):
    """By another client too, s3fs, though that one keeps listings."""
    root = here.new_root()
    storage = storage_of(root)
    other = RemoteStorage(fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=True), root[5:])
    storage.write("a", [memoryview(b"1")])
    assert storage.names() == ["a"]
    other.write("b", [memoryview(b"12")])
    assert storage.names() == ["a", "b"]
    assert storage.names() == ["a", "b"]
    other.write("b", [memoryview(b"123")])
    assert storage.size("b") == 3
    other.remove("a")
    assert not storage.exists("a")


def test_an_interrupted_save_leaves_no_upload(here, monkeypatch):
    root = here.new_root() + "/c"
    sent = []

    def interrupt(self, part):
        sent.append(part)
        if len(sent) == 3:
            raise KeyboardInterrupt
        return write(self, part)

    write = object_store.Upload.write
    monkeypatch.setattr(object_store.Upload, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(root, app_of())
    asked = here.log()["requests"]
    assert any("uploads" in request for request in asked)
    assert not any(request.startswith("POST") and "uploadId" in request for request in asked), "it was completed"
    assert uploads_left(here, root) == 0
    assert storage_of(root).names() == []


def interrupted_while_parts_hang(options, root):
    retry.RETRY_POLICY, remote.PART_BYTES = retry.RetryPolicy(request_seconds=30.0), 1 << 20
    timer = threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    begin = time.monotonic()
    with reached(options), pytest.raises(KeyboardInterrupt):
        checkpoint.save(root, app_of())
    return time.monotonic() - begin


def test_an_interrupt_does_not_wait_for_requests_that_hang(here):
    here.plan({"kind": "hang", "seconds": 25, "match": "partNumber", "times": 100})
    (seconds,) = run_ranks(1, interrupted_while_parts_hang, here.options(), here.new_root() + "/c")
    assert seconds < 15, "far from the deadline of a request"


def test_an_object_that_is_cut_short_is_corruption(here):
    root = here.new_root() + "/c"
    checkpoint.save(root, app_of())
    fs = fsspec.filesystem("s3")
    (name,) = fs.glob(root + "/*.safetensors")
    fs.pipe_file(name, fs.cat_file(name, start=0, end=1000))
    report = checkpoint.verify(root)
    assert not report.ok and "1000 bytes where" in str(report.problems[0])


def test_configuration_and_credentials_are_those_of_fsspec(s3, tmp_path):
    """The endpoint from a file of fsspec's configuration, the keys from the environment; by the command line."""
    with reached(s3.options()):
        root = s3.new_root() + "/c"
        checkpoint.save(root, {"n": 41})
    (tmp_path / "fsspec.ini").write_text(f"[s3]\nendpoint_url = {s3.endpoint}\n")
    keys = {"FSSPEC_CONFIG_DIR": str(tmp_path), "FSSPEC_S3_KEY": "test", "FSSPEC_S3_SECRET": "test"}
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("AWS_", "FSSPEC_"))}
    shown = subprocess.run(
        [sys.executable, "-m", "shardopt.cli", "show", root, "n"],
        cwd=REPOSITORY,
        env={**kept, **keys, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert (shown.returncode, shown.stdout) == (0, "41\n"), shown.stderr


BACKGROUND = """
import sys, fsspec, torch
from shardopt import checkpoint
from shardopt.checkpoint.storage import remote
remote.PART_BYTES = 1 << 20
pending = checkpoint.async_save(sys.argv[1], {"x": torch.arange(2_000_000.0)})
"""


def test_a_program_that_does_not_wait_is_told_and_its_save_is_whole(here):
    root = here.new_root() + "/c"
    here.plan({"kind": "slow", "seconds": 0.3, "match": "partNumber", "times": 100})
    keys = {f"FSSPEC_S3_{name}": value for name, value in (("KEY", "test"), ("SECRET", "test"))}
    # As fsspec reads the variables when it is imported.
    program = f"import fsspec\nfsspec.config.set_conf_env(fsspec.config.conf)\n{BACKGROUND}"
    ended = run_program(program, root, environment={**keys, "FSSPEC_S3_ENDPOINT_URL": here.endpoint})
    assert ended.returncode == 1
    assert "which was committed all the same" in ended.stderr
    assert checkpoint.verify(root).ok


# On ranks.


def state(step):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = distribute_tensor(value(step), mesh, [Shard(0)], src_data_rank=None)
    columns = distribute_tensor(value(step), mesh, [Shard(1)], src_data_rank=None)
    both = distribute_tensor(value(step)[:1500], mesh, [Replicate()], src_data_rank=None)
    return {"rows": rows, "columns": columns, "both": both, "step": step}


def zeros():
    app = state(0)
    return {**{key: torch.zeros_like(tensor) for key, tensor in app.items() if key != "step"}, "step": 0}


def save_on_ranks(options, root, step):
    retry.RETRY_POLICY, remote.PART_BYTES = IMPATIENT, 1 << 19
    with reached(options):
        return checkpoint.Manager(root, options=checkpoint.SaveOptions(deadline_seconds=DEADLINE_SECONDS)).save(
            step, state(step), force=True
        )


def restore_on_ranks(options, root, step):
    retry.RETRY_POLICY = IMPATIENT
    with reached(options):
        app = zeros()
        places = [app[key].to_local().data_ptr() for key in ("rows", "columns", "both")]
        assert checkpoint.Manager(root).restore(app) == step
        assert [app[key].to_local().data_ptr() for key in ("rows", "columns", "both")] == places
        wanted = state(step)
        assert all(torch.equal(app[key].to_local(), wanted[key].to_local()) for key in ("rows", "columns", "both"))
        assert app["step"] == step


def test_saved_on_four_ranks_loaded_on_three(here):
    """All of it while each request fails once, on each of the ranks that make it."""
    root = here.new_root()
    here.plan({"kind": "503", "times": 1})
    reports = run_ranks(4, save_on_ranks, here.options(), root, 1)
    assert sum(report.bytes_written for report in reports) == reports[0].bytes_total
    run_ranks(3, restore_on_ranks, here.options(), root, 1)
    assert here.log()["struck"] >= 30
    here.plan()
    assert checkpoint.verify(checkpoint.Manager(root).path(1)).ok
    checkpoint.reshard(checkpoint.Manager(root).path(1), root + "/step-00000002", world_size=2)
    with checkpoint.open(root + "/step-00000002") as reader:
        assert torch.equal(reader.read("rows"), value())
        assert torch.equal(reader.read("columns"), value())
        assert torch.equal(reader.read("both"), value()[:1500])
    assert checkpoint.Manager(root).steps() == [1, 2]


# One run of three ranks that load from many places, for a client of S3 takes a second to be imported on each.


def newer(manifest):
    return seal(manifest[:-SEAL_BYTES].replace(b'"min_reader_version":1', b'"min_reader_version":99'))


CHANGES = {
    "whole": lambda manifest: manifest,
    "torn": lambda manifest: manifest[: len(manifest) // 2],
    "changed": lambda manifest: manifest.replace(b"float32", b"float16"),
    "newer": newer,
    "unread": lambda manifest: manifest,  # for the store refuses
    "altered": lambda manifest: manifest,  # on its way to rank 1
}
FOREIGN = ["dcp", "index", "file.safetensors", "file.pt"]


def put_all(s3, folder):
    """Puts copies of one checkpoint with different manifests, and what others write, into a bucket; returns its URL."""
    root, value = s3.new_root(), {"x": torch.ones(8, 8)}
    run_ranks(1, save_locally, str(folder / "local"))
    for name, change in CHANGES.items():
        shutil.copytree(folder / "local", folder / name)
        (folder / name / "manifest.json").write_bytes(change((folder / "local/manifest.json").read_bytes()))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save({**value, "n": 3}, checkpoint_id=folder / "dcp")
    (folder / "index").mkdir()
    for i, key in enumerate("xy"):
        save_file({key: value["x"]}, folder / f"index/m-{i}.safetensors")
    index = {"weight_map": {key: f"m-{i}.safetensors" for i, key in enumerate("xy")}}
    (folder / "index/m.safetensors.index.json").write_text(json.dumps(index))
    save_file(value, folder / "file.safetensors")
    torch.save(value, folder / "file.pt")
    fs = fsspec.filesystem("s3")
    for file in [each for each in folder.rglob("*") if each.is_file()]:
        fs.pipe_file(f"{root[5:]}/{file.relative_to(folder)}", file.read_bytes())
    return root


def save_locally(path):
    checkpoint.save(path, state(1))


def load_from(url, app):
    """Returns the rounds that a load takes, and the type and text of its error, if there is one."""
    rounds, one = [], Ranks._round

    def counting(self, *args, **choices):
        rounds.append(args)
        return one(self, *args, **choices)

    Ranks._round = counting
    try:
        checkpoint.load(url, app, strict=False, deadline_seconds=DEADLINE_SECONDS)
    except (CheckpointError, RankError) as error:
        assert not any(torch.count_nonzero(getattr(each, "_local_tensor", each)) for each in app.values())
        return len(rounds), type(error), str(error)
    finally:
        Ranks._round = one
    return len(rounds), None, ""


def load_from_all(options, root, local):
    """Loads from all that `put_all` has put, and more; returns what came of it by name."""
    retry.RETRY_POLICY = IMPATIENT
    found = {}
    in_sections = Ranks.agree_in_sections

    def altered(self, *args, **choices):
        result, decision, section = in_sections(self, *args, **choices)
        return result, decision, section[:-1] + b"?"

    with reached(options):
        for name in [*CHANGES, "nothing"]:
            app = {key: value for key, value in zeros().items() if key in ("rows", "both")}
            if name == "altered" and dist.get_rank() == 1:
                Ranks.agree_in_sections = altered
            found[name] = load_from(f"{root}/{name}", app)
            Ranks.agree_in_sections = in_sections
            if found[name][1] is None:
                assert all(torch.equal(app[key].to_local(), state(1)[key].to_local()) for key in app)
        for name in FOREIGN:
            app = {"x": torch.zeros(8, 8)}
            found[name] = load_from(f"{root}/{name}", app)
            assert (app["x"] == 1).all()
        found["local"] = load_from(local, {key: value for key, value in zeros().items() if key in ("rows", "both")})
        found["both"] = load_from(local if dist.get_rank() == 1 else f"{root}/whole", {"both": torch.zeros(1500, 192)})
    return found


@pytest.fixture(scope="module")
def loaded(servers, tmp_path_factory):
    """What came of all loads, which is the same on all ranks, and what the store was asked."""
    s3, folder = servers("s3"), tmp_path_factory.mktemp("put")
    with reached(s3.options()):
        root = put_all(s3, folder)
    s3.plan({"kind": "503", "match": "GET .*unread/manifest", "times": 1000})
    found = run_ranks(3, load_from_all, s3.options(), root, str(folder / "local"))
    asked = s3.log()["requests"]
    s3.plan()
    assert found == [found[0]] * 3
    return found[0], [request.partition("/run/")[::2] for request in asked if "/run/" in request]


def test_the_manifest_is_read_by_one_rank(loaded):
    found, asked = loaded
    assert found["whole"][1] is None
    of_manifest = [method.split()[0] for method, path in asked if path.startswith("whole/manifest.json")]
    assert sorted(of_manifest) == ["GET", "HEAD"]


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("nothing", CheckpointNotFoundError, "there is no checkpoint"),
        ("torn", CorruptionError, "failed: a checkpoint is damaged.*fail the seal"),
        ("changed", CorruptionError, "failed: a checkpoint is damaged.*fail the seal"),
        ("newer", FormatError, "failed: the checkpoint needs a newer reader.*version 99"),
        ("unread", CheckpointError, "failed on rank 0: cannot read s3://.*manifest"),
        ("altered", CheckpointError, "failed on rank 1: ranks do not see the same.*other bytes on rank 1"),
        ("both", RankError, "loading from a remote store on ranks 0, 2; loading on rank 1"),
    ],
)
def test_what_is_wrong_is_the_same_error_on_all_ranks(loaded, name, error, text):
    found, asked = loaded
    assert found[name][1] is error and re.search(text, found[name][2], re.DOTALL), found[name]
    if name in ("torn", "changed", "newer", "altered"):
        of_manifest = [method.split()[0] for method, path in asked if path.startswith(f"{name}/manifest.json")]
        assert of_manifest.count("GET") == 1


def test_a_local_path_costs_no_round_more(loaded):
    found, _ = loaded
    assert found["local"][1] is None
    assert found["whole"][0] == found["local"][0] + 1


@pytest.mark.parametrize("form", FOREIGN)
def test_what_others_have_written_is_looked_through_by_one_rank(loaded, form):
    """Ranks ask for what has the bytes of tensors, and for nothing else."""
    found, asked = loaded
    assert found[form][1] is None
    # Rank 0 looks twice at some things. Of an archive of DCP each rank reads the head.
    counts = Counter((method, path) for method, path in asked if path.startswith(form) and ".distcp bytes" not in path)
    assert max(counts.values()) <= 2, counts


def save_twice(options, root):
    with reached(options):
        app = {"rows": state(1)["rows"], "both": state(1)["both"]}
        checkpoint.save(f"{root}/first", app)
        report = checkpoint.save(f"{root}/second", app, base=f"{root}/first")
    return report.bytes_unchanged


def test_the_manifest_that_a_save_refers_to_is_read_by_one_rank(here):
    root = here.new_root()
    unchanged = run_ranks(3, save_twice, here.options(), root)
    assert min(unchanged) > 0
    asked = [request for request in here.log()["requests"] if "/first/manifest.json" in request]
    # To open it; before the commit, whether it still stands there.
    assert sum(request.startswith("GET") for request in asked) == 2


def save_and_restore(options, root, step):
    save_on_ranks(options, root, step)
    restore_on_ranks(options, root, step)


def test_a_rank_that_dies_in_an_upload(here):
    """Nothing of its save is seen; the others name it, and what it left is in nobody's way."""
    root = here.new_root()
    fault = Fault(2, "shardopt.checkpoint.storage.object_stores.store:Upload.write", at=3)
    outcomes = run_ranks_outcomes(3, save_on_ranks, here.options(), root, 1, faults=[fault])
    assert outcomes[2].signal is not None
    for rank in (0, 1):
        assert isinstance(outcomes[rank].error, RankError) and "rank 2" in str(outcomes[rank].error)
    assert uploads_left(here, root) == 1, "what it sent, which the store keeps until a rule of the bucket clears it"
    assert checkpoint.Manager(root).steps() == []
    run_ranks(2, save_and_restore, here.options(), root, 1)
    assert checkpoint.verify(checkpoint.Manager(root).path(1)).ok
