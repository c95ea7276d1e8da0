"""Saves of changed elements by several ranks: a chain saved on two is loaded on one, two and three."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardopt import checkpoint
from shardopt.checkpoint.saving import save as saving
from shardopt.checkpoint.saving.removal import remove_checkpoint
from shardopt.checkpoint.saving.writing.earlier import OnDisk
from shardopt.checkpoint.sources.own import read_manifest
from shardopt.checkpoint.storage import storage_of
from tests.harness import run_ranks

RANKS_STAY = True

FORMS = {
    "rows": (torch.bfloat16, (900, 301)),
    "columns": (torch.float32, (500, 402)),
    "uneven": (torch.int32, (7, 30_011)),
    "replicas": (torch.float16, (120_001,)),
    "plain": (torch.int16, (150_000,)),
    "small": (torch.float32, (5,)),
    "few": (torch.float64, (1, 40_000)),  # of which a second rank has nothing
}
PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "uneven": Shard(0), "replicas": Replicate(), "few": Shard(0)}


def full(name, step):
    """The global value: each step changes some elements everywhere, and step 3 some rows as well."""
    dtype, shape = FORMS[name]
    count = torch.Size(shape).numel()
    words = torch.arange(count * dtype.itemsize // 2, dtype=torch.int32).to(torch.int16)
    for each in range(1, step + 1):
        words[each * 5 :: 997] += each
    if step >= 3:
        words[: len(words) // 8] += 1
    return words.view(dtype).reshape(shape)


def state(step):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    app = {}
    for name in FORMS:
        tensor, placement = full(name, step), PLACEMENTS.get(name)
        app[name] = tensor if placement is None else distribute_tensor(tensor, mesh, [placement], src_data_rank=None)
    return {**app, "step": step}


def bits(tensor):
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.contiguous().reshape(-1).view(torch.uint8)


def save(root, steps):
    for step in steps:
        checkpoint.save(f"{root}/{step}", state(step), base=f"{root}/{step - 1}" if step else None, durable=False)


def load(root, step):
    app, wanted = state(0), state(step)
    checkpoint.load(f"{root}/{step}", app)
    for name in FORMS:
        assert torch.equal(bits(app[name]), bits(wanted[name])), name
    assert app["step"] == step


def most_deltas(root, step):
    tensors = read_manifest(storage_of(f"{root}/{step}"))[0].tensors
    return {
        key: max((len(each.deltas) for each in tensor.layout.entries), default=0) for key, tensor in tensors.items()
    }


def test_a_chain_of_two_ranks_is_loaded_on_any_number(tmp_path):
    run_ranks(2, save, str(tmp_path), range(5))
    of_two, of_four = most_deltas(tmp_path, 2), most_deltas(tmp_path, 4)
    assert {name for name, most in of_two.items() if most == 2} == FORMS.keys() - {"small"}
    assert of_four["plain"] >= 3
    remove_checkpoint(storage_of(f"{tmp_path}/1"))  # whose files the others need
    for step in (2, 4):
        checkpoint.verify(tmp_path / str(step)).raise_if_damaged()
    for ranks in (1, 2, 3):
        run_ranks(ranks, load, str(tmp_path), 4)


def test_a_job_resumes_the_chain_on_other_numbers_of_ranks(tmp_path):
    for ranks, steps in ((2, [0, 1]), (3, [2]), (1, [3, 4]), (2, [5])):
        run_ranks(ranks, save, str(tmp_path), steps)
        checkpoint.verify(tmp_path / str(steps[-1])).raise_if_damaged()
        run_ranks(2, load, str(tmp_path), steps[-1])


def strided(step):
    """Of which each of four ranks has two boxes, in two files."""
    mesh = init_device_mesh("cpu", (2, 2))
    words = torch.arange(1 << 19, dtype=torch.int32)
    for each in range(1, step + 1):
        words[each::997] += each
    placements = [_StridedShard(0, split_factor=4), Shard(0)]
    return {"x": distribute_tensor(words.reshape(-1, 128), mesh, placements, src_data_rank=None)}, words.reshape(
        -1, 128
    )


def save_strided(root):
    for step in range(3):
        app, whole = strided(step)
        checkpoint.save(f"{root}/{step}", app, base=f"{root}/{step - 1}" if step else None, durable=False)
        with checkpoint.open(f"{root}/{step}") as reader:
            assert torch.equal(reader.read("x"), whole)
    target, _ = strided(0)
    checkpoint.load(f"{root}/2", target)
    assert torch.equal(target["x"].to_local(), app["x"].to_local())


def test_ranks_with_several_boxes_of_a_tensor(tmp_path):
    """The deltas of two boxes of one tensor would have one key in a file."""
    run_ranks(4, save_strided, str(tmp_path))
    entries = read_manifest(storage_of(f"{tmp_path}/2"))[0].tensors["x"].layout.entries
    assert [len(entry.deltas) for entry in entries] == [2] * 8
    assert len({entry.deltas for entry in entries}) == 8
    checkpoint.verify(tmp_path / "2").raise_if_damaged()


def save_without_base_on_rank_1(root):
    save(root, [0, 1])
    with pytest.MonkeyPatch.context() as monkeypatch:
        if dist.get_rank() == 1:
            monkeypatch.setattr(saving, "open_found", lambda *found: None)
        save(root, [2])
    load(root, 2)


def test_a_rank_that_sees_another_base_writes_all_of_its_own(tmp_path):
    run_ranks(2, save_without_base_on_rank_1, str(tmp_path))
    entries = read_manifest(storage_of(f"{tmp_path}/2"))[0].tensors["rows"].layout.entries
    assert [len(entry.deltas) for entry in entries] == [2, 0]
    checkpoint.verify(tmp_path / "2").raise_if_damaged()


def touched(step):
    """A table after some steps: each touches other rows."""
    table = torch.arange(5000 * 48, dtype=torch.float32).reshape(5000, 48)
    for each in range(1, step + 1):
        table[each * 3 :: 97] *= -1.5
    return table


def place(step, placement):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"table": distribute_tensor(touched(step), mesh, [placement], src_data_rank=None)}


def save_touched(root, steps):
    with pytest.MonkeyPatch.context() as monkeypatch:
        for step in range(steps):
            app = place(step, Shard(0))
            checkpoint.save(f"{root}/{step}", app, base=f"{root}/{step - 1}" if step else None, durable=False)
            if step == 1:  # from now on rows are known
                monkeypatch.setattr(OnDisk, "reading", None)


def load_columns(root, step):
    app = place(0, Shard(1))
    checkpoint.load(f"{root}/{step}", app)
    assert torch.equal(bits(app["table"]), bits(place(step, Shard(1))["table"]))


def test_touched_rows_saved_by_rows_are_loaded_by_columns(tmp_path):
    run_ranks(2, save_touched, str(tmp_path), 5)
    assert most_deltas(tmp_path, 4) == {"table": 4}
    for ranks in (1, 3):
        run_ranks(ranks, load_columns, str(tmp_path), 4)
