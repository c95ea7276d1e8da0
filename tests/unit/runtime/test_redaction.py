"""No password and no signature of a URL is said: in errors with their causes, logs, reports, reprs, in the shell."""

import itertools
import json
import logging
import re
import traceback
import warnings

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from shardopt import checkpoint
from shardopt.cli import main
from shardopt.errors import CheckpointError, Problem
from shardopt.ranks.connections.join import Entry
from shardopt.redaction import LOGGERS, redacted, without_secrets
from tests.support.source import PACKAGE

ROOT = "vault://user:SECRET@host/run?sig=SECRET&part=SECRET"


class Refused(PermissionError):
    """As clients over HTTP have them."""

    def __repr__(self):
        return f"{super().__repr__()}, headers={{'Authorization': 'Basic SECRET'}}"


class VaultFileSystem(MemoryFileSystem):
    """A file system whose paths have all of the URL, as those over HTTP do, and whose errors say it."""

    protocol = "vault"
    store = {}  # noqa: RUF012  # as its base class has it
    pseudo_dirs = [""]  # noqa: RUF012  # likewise
    closed = False

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("vault://").strip("/")

    def unstrip_protocol(self, name):
        return "vault://" + name.lstrip("/")

    def _refused(self, path):
        if self.closed:
            raise Refused(f"401, url={self.unstrip_protocol(path)!r}")

    def _naming(self, method, path, *args, **kwargs):
        self._refused(path)
        try:
            return getattr(super(), method)(path, *args, **kwargs)
        except FileNotFoundError:
            raise FileNotFoundError(self.unstrip_protocol(path)) from None

    def ls(self, path, *args, **kwargs):
        return self._naming("ls", path, *args, **kwargs)

    def info(self, path, *args, **kwargs):
        return self._naming("info", path, *args, **kwargs)

    def cat_file(self, path, *args, **kwargs):
        return self._naming("cat_file", path, *args, **kwargs)

    def pipe_file(self, path, *args, **kwargs):
        return self._naming("pipe_file", path, *args, **kwargs)

    def rm_file(self, path):
        return self._naming("rm_file", path)


@pytest.fixture
def vault(monkeypatch):
    fsspec.register_implementation("vault", VaultFileSystem, clobber=True)
    VaultFileSystem.store.clear()
    monkeypatch.setattr(VaultFileSystem, "closed", False)


def state(step=1):
    return {"w": torch.full((2000,), float(step)), "step": step}


def calls(root):
    """Each public call that takes a URL; some of them fail where there is nothing, others where there is something."""
    one = f"{root}/step-00000001"
    yield lambda: checkpoint.save(one, state())
    yield lambda: checkpoint.save(one, state())
    yield lambda: checkpoint.async_save(f"{root}/other", state()).result()
    yield lambda: checkpoint.save(f"{root}/based", state(), base=one)
    yield lambda: checkpoint.load(one, state())
    yield lambda: checkpoint.load(one, {"w": torch.zeros(3), "other": 1})
    yield lambda: checkpoint.load(f"{root}/none", state())
    yield lambda: checkpoint.verify(one)
    yield lambda: checkpoint.verify(f"{root}/none")
    yield lambda: checkpoint.open(f"{root}/none")
    yield lambda: checkpoint.open(one).read("nothing")
    yield lambda: checkpoint.reshard(one, f"{root}/resharded", world_size=2)
    yield lambda: checkpoint.reshard(f"{root}/none", f"{root}/resharded", world_size=2)
    for to in ("torch", "dcp", "huggingface", "shardopt"):
        yield lambda to=to: checkpoint.convert(one, f"{root}/{to}", to, drop_per_rank=True)
    yield lambda: manage(root)
    yield lambda: manage(root, destinations=[checkpoint.Mirror(f"{root}/mirror")])
    yield lambda: checkpoint.Manager(root).restore(state(), step=77)
    yield lambda: checkpoint.Export(f"{root}/exports")


def manage(root, **options):
    with checkpoint.Manager(root, keep=1, incremental=True, **options) as manager:
        restored = manager.restore(state())
        reports = [manager.save(step, state(step), metrics={"loss": 1.0}) for step in (10, 11, 12)]
    return restored, reports


def damage():
    for path in [path for path in VaultFileSystem.store if "step-" in path]:
        data = bytearray(VaultFileSystem.store[path].getvalue())
        data[len(data) // 2] ^= 1
        VaultFileSystem.store[path].seek(0)
        VaultFileSystem.store[path].write(bytes(data))


@pytest.mark.parametrize("fault", ["none", "damaged", "closed"])
def test_no_call_says_a_secret_of_its_url(fault, vault, caplog, monkeypatch):
    said = []
    remove = checkpoint.add_listener(lambda event, report: said.append(repr(report)))
    if fault != "none":
        checkpoint.save(f"{ROOT}/step-00000001", state())
        damage() if fault == "damaged" else monkeypatch.setattr(VaultFileSystem, "closed", True)
    failed = 0
    with caplog.at_level(logging.DEBUG, "shardopt"), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for call in calls(ROOT):
            try:
                said.append(repr(call()))
            except Exception as error:
                failed += 1
                said += [str(error), *traceback.format_exception(error)]
                said += [json.dumps(error.to_json())] if hasattr(error, "to_json") else []
    remove()
    said += [str(each.message) for each in warned] + caplog.messages + [caplog.text]
    lines = [line for text in said for line in text.splitlines() if "SECRET" in line]
    assert not lines, lines[:5]
    assert failed > 4 and "***@host" in "".join(said)


@pytest.mark.parametrize("is_closed", [False, True])
def test_no_verb_says_a_secret_of_its_url(is_closed, vault, capsys, monkeypatch):
    one = f"{ROOT}/step-00000001"
    checkpoint.save(one, state())
    checkpoint.save(f"{ROOT}/step-00000002", state(2))
    monkeypatch.setattr(VaultFileSystem, "closed", is_closed)
    verbs = [["ls", ROOT], ["ls", one], ["show", one], ["diff", one, one], ["verify", one, f"{ROOT}/none"]]
    verbs += [["reshard", one, f"{ROOT}/r", "--world-size", "2"], ["convert", one, f"{ROOT}/t", "--to", "torch"]]
    verbs += [["prune", ROOT, "--keep-last", "1"], ["ls", "no-such-protocol://user:SECRET@h/a?sig=SECRET"]]
    for verb, form in itertools.product(verbs, ([], ["--json"])):
        main([*verb, *form])
    assert main(["prune", ROOT, "--keep-last", "1", "--yes"]) == int(is_closed)
    printed = capsys.readouterr()
    assert "SECRET" not in printed.out + printed.err and "***@host" in printed.out + printed.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("read s3://bucket/run/a b: no", "read s3://bucket/run/a b: no"),
        ("at http://user:SECRET@h:80/p?sig=SECRET&x=SECRET: 404", "at http://***@h:80/p?sig=***&x=***: 404"),
        ("simplecache::https://SECRET@h/x.zip", "simplecache::https://***@h/x.zip"),
        ("zip://a/b::https://u:SECRET@h/x.zip?sig=SECRET", "zip://a/b::https://***@h/x.zip?sig=***"),
        ("abfs://data@account.dfs/a?SECRET", "abfs://data@account.dfs/a?***"),
        ("abfs://data:SECRET@account.dfs/a", "abfs://***@account.dfs/a"),
        ("ftp://u:p/SECRET@h/x", "ftp://***@h/x"),
        ("ftp://u:SECRET@SECRET@h/x", "ftp://***@h/x"),
        ("http://[::1]:80/a@b and s3://b/user@x", "http://[::1]:80/a@b and s3://b/user@x"),
        ("url='http://h/a?sig=SECRET'), url", "url='http://h/a?sig=***'), url"),
        ("Max retries exceeded with url: /p?sig=SECRET (Caused", "Max retries exceeded with url: /p?sig=*** (Caused"),
        ("/data/lr=1?a=b@c", "/data/lr=1?a=b@c"),
    ],
)
def test_what_is_said_of_a_url(text, said):
    assert redacted(text) == said and redacted(said) == said


def test_causes_keep_their_kind():
    error = FileNotFoundError(2, "no http://u:SECRET@h/a")
    other = without_secrets(error)
    assert type(other) is FileNotFoundError and other.errno == 2 and "SECRET" not in f"{other} {other!r}"
    assert without_secrets(plain := OSError("no s3://bucket/a")) is plain
    outer = CheckpointError("x", [Problem("http://u:SECRET@h", "y", "z", "w")])
    assert "SECRET" not in repr(outer) + str(outer) + repr(outer.problems)


def test_a_sessions_key_is_in_no_repr():
    assert "c0ffee" not in repr(Entry("name", "c0ffee", ()))


def test_every_logger_of_the_package_redacts():
    """A filter does not hold for the loggers below its own."""
    texts = [path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "redaction.py"]
    names = [name for text in texts for name in re.findall(r"^\w+ = logging.getLogger\((.*)\)", text, re.MULTILINE)]
    assert len(names) > 20 and {name.strip('"') for name in names} <= set(LOGGERS)
    assert sum(text.count("getLogger(") for text in texts) == len(names) + 1  # one in a docstring
