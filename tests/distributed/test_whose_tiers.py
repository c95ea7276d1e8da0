"""Tiers know whose steps they have: what is of another run is neither read nor removed, and named."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardopt import checkpoint
from shardopt.checkpoint import Tier
from shardopt.checkpoint.run.root import RunIdentity, decode_run
from shardopt.errors import CheckpointError, CorruptionError
from tests.harness import run_ranks


def app_of(step):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"x": distribute_tensor(torch.full((8,), float(step)), mesh, [Shard(0)], src_data_rank=None), "step": step}


class Job:
    """A job's runs, whose hosts are directories of this machine, one for each rank."""

    def __init__(self, path):
        self.path = Path(path)
        self.host = self.path / f"host-{dist.get_rank()}"

    def manager(self, root, *, mirrors=(), **options):
        tiers = [Tier(str(self.host / "memory"), every=1, copies=2), Tier(str(self.host / "disk"), every=2)]
        return checkpoint.Manager(self.path / root, destinations=[*tiers, *mirrors], every=4, **options)

    def save(self, root, step, **options):
        with self.manager(root, **options) as manager:
            manager.save(step, app_of(step))

    def restored(self, root, **options):
        """The step that a run is restored from, in a job that has just begun."""
        with self.manager(root, **options) as manager:
            app = app_of(0)
            step = manager.restore(app)
            assert app["step"] == step and set(app["x"].full_tensor().tolist()) == {float(step)}
            return step

    def refused(self, call, *args, **options):
        before = self.contents()
        with pytest.raises(CheckpointError) as caught:
            call(*args, **options)
        assert self.contents() == before  # nothing is changed, and no root made
        return str(caught.value)

    def contents(self):
        dist.barrier()
        found = {path: path.is_file() and path.read_bytes() for path in self.path.rglob("*")}
        dist.barrier()
        return found

    def on_rank_0(self, change, *args):
        dist.barrier()
        if dist.get_rank() == 0:
            change(*args)
        dist.barrier()


def whose(path):
    job = Job(path)
    root, moved = job.path / "root", job.path / "moved"
    assert job.restored("root") == 0 and not root.exists()  # as a root that is not mounted
    job.save("root", 3)
    for call in (job.restored, lambda root: job.save(root, 1), lambda root: job.manager(root).where()):
        said = job.refused(call, "another")  # that is new
        assert all(f"host-{host}/memory (rank {host})" in said for host in range(2))
        assert str(root) in said and "copy .run from there" in said
    job.on_rank_0(root.rename, moved)
    assert job.restored("moved") == 3
    said = job.refused(job.restored, "root")  # begun anew, where a run was
    job.on_rank_0(root.mkdir)
    job.on_rank_0(shutil.copy, job.host / "memory" / ".run", root / "run.json")
    assert job.restored("root") == 3


def whose_with_a_mirror(path):
    job = Job(path)
    assert job.restored("root") == 3  # one host is new
    job.on_rank_0((job.host / "memory" / ".run").unlink)
    said = job.refused(job.restored, "root")
    assert "host-0/memory (rank 0)" in said and "host-1" not in said and "no .run" in said
    job.on_rank_0(shutil.copy, job.path / "root/run.json", job.host / "memory" / ".run")
    job.save("root", 4, mirrors=[checkpoint.Mirror(job.path / "mirror")])
    job.save("root", 5, mirrors=[checkpoint.Mirror(job.path / "mirror")])
    job.on_rank_0((job.path / "root").rename, job.path / "lost")
    assert job.restored("second", mirrors=[checkpoint.Mirror(job.path / "mirror")]) == 5
    assert (job.path / "second/run.json").read_bytes() == (job.path / "mirror/run.json").read_bytes()
    job.on_rank_0(shutil.rmtree, job.path / "second")
    job.on_rank_0(another_run, job.path / "second")
    assert "two runs" in job.refused(job.restored, "second", mirrors=[checkpoint.Mirror(job.path / "mirror")])


def another_run(root):
    root.mkdir()
    (root / "run.json").write_bytes(RunIdentity("0123456789abcdef" * 2, str(root)).pack())


def test_what_is_of_another_run_is_neither_read_nor_removed(tmp_path):
    run_ranks(2, whose, str(tmp_path))
    shutil.rmtree(tmp_path / "host-1")
    run_ranks(2, whose_with_a_mirror, str(tmp_path))


def test_a_record_that_is_damaged_is_refused():
    run = RunIdentity("0123456789abcdef" * 2, "s3://bucket/run")
    data = run.pack()
    assert decode_run(data, "here") == run
    wrong = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(len(data))]
    wrong += [b"", data[:-1], run._replace(id="0123").pack(), run._replace(root=7).pack()]
    for each in wrong:
        with pytest.raises(CorruptionError, match="here"):
            decode_run(each, "here")
