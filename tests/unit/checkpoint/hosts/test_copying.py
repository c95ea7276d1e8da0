"""What a host fetches of a checkpoint, also where it has another save's share of that name."""

from types import SimpleNamespace

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.format.constants import RECORD_NAME
from shardopt.checkpoint.format.decoding import decode_manifest
from shardopt.checkpoint.hosts import copying
from shardopt.checkpoint.hosts.directory import HostDirectory
from shardopt.checkpoint.hosts.share import Share
from shardopt.checkpoint.hosts.whole import WholeCheckpoint


def save(path, value):
    """Saves to a host alone; returns its directory of the checkpoint."""
    checkpoint.save(f"hosts://{path}/step-00000001", {"x": torch.full((9,), value)})
    return path / "step-00000001"


@pytest.mark.parametrize("has_files", [False, True])
def test_the_record_of_an_earlier_save_is_replaced(tmp_path, monkeypatch, has_files):
    """It used to stay: without the hosts that had the new one, all copies of a save were worth nothing."""
    old, new = save(tmp_path / "here", 1.0), save(tmp_path / "there", 2.0)
    record, directory = (new / RECORD_NAME).read_bytes(), HostDirectory(str(tmp_path / "here"))
    manifest = decode_manifest(record, "record")
    (name,) = [file.name for file in manifest.files]
    hosts = SimpleNamespace(
        number=0,
        count=2,
        domains=(None, None),
        url=lambda name: f"hosts://here/{name}",
        share=lambda name: Share(directory, name, True),
    )
    if has_files:
        (old / name).write_bytes((new / name).read_bytes())

    def copy_file(whole, target, file, _):
        assert not has_files
        target.write(file.name, [memoryview((new / file.name).read_bytes())])

    monkeypatch.setattr(copying, "copy_file", copy_file)
    whole = WholeCheckpoint(hosts, "step-00000001", record, manifest, {name: [0] if has_files else [1]})
    assert copying.fetch_copies(hosts, whole, 2, None)
    assert (old / RECORD_NAME).read_bytes() == record and (old / name).read_bytes() == (new / name).read_bytes()
    assert len(list(old.glob("*.safetensors"))) == (2 if has_files else 1)  # what was of another save is gone
