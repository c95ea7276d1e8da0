"""Ranks that do not do the same: one lacks a tensor, sees another directory, or meets damage that others do not."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.dcp import StorageReader
from shardopt.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptionError,
    LayoutError,
    MismatchError,
    OptionError,
    PartialLoadError,
    RankError,
    StateError,
)
from shardopt.runtime.partial_loads import PartialLoad
from tests.distributed.test_save_load import outcomes_alike
from tests.harness import run_ranks, run_ranks_outcomes

RANKS_STAY = True

VALUE = torch.arange(24.0).reshape(8, 3)


def spread(value, placement):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(value, mesh, [placement], src_data_rank=None)


def save_without(path, placement, others):
    """The last rank does not pass the tensor; it writes another, so that its file is there."""
    app = {"x": spread(VALUE, placement)} | ({"y": spread(VALUE, Shard(0))} if others else {})
    if dist.get_rank() == 2:
        del app["x"]
    checkpoint.save(path, app)


@pytest.mark.parametrize("others", [True, False])
def test_a_shard_that_its_rank_does_not_pass_is_a_hole(tmp_path, others):
    outcomes = run_ranks_outcomes(3, save_without, str(tmp_path / "c"), Shard(0), others)
    text = outcomes_alike(outcomes, LayoutError)
    assert "x: found no box holds offsets (6, 0) sizes (2, 3)" in text
    assert not list(tmp_path.glob("c/*"))


def test_a_replica_that_its_rank_does_not_pass_is_written_by_others(tmp_path):
    run_ranks(3, save_without, str(tmp_path / "c"), Replicate(), True)
    assert checkpoint.verify(tmp_path / "c").ok
    with checkpoint.open(tmp_path / "c") as reader:
        assert torch.equal(reader.read("x"), VALUE)


def save_to_own(folder):
    checkpoint.save(f"{folder}/{dist.get_rank()}", {"x": spread(VALUE, Shard(0))})


def test_ranks_that_save_to_other_places_make_no_checkpoint(tmp_path):
    """A time in the path. Where only disks differ: tests/distributed/test_in_step.py."""
    text = outcomes_alike(run_ranks_outcomes(2, save_to_own, str(tmp_path)), RankError)
    assert "ranks are in different calls: saving 0 on rank 0; saving 1 on rank 1" in text
    assert not list(tmp_path.iterdir())
    with pytest.raises(CheckpointNotFoundError):
        checkpoint.open(tmp_path / "0")


def load_own(folder):
    rank, errors = dist.get_rank(), []
    for other in range(2):
        checkpoint.save(f"{folder}/{other}/c", {"x": torch.full((3,), float(other))})
    target = {"x": torch.full((3,), 9.0)}
    for load in (checkpoint.load, lambda url, app: dcp.load(app, storage_reader=StorageReader(url))):
        try:
            load(f"{folder}/{rank}/c", target)
        except (Exception, dcp.api.CheckpointException) as error:
            errors.append(str(error))
    assert target["x"].eq(9).all()
    return errors


def test_ranks_that_load_from_other_paths_are_told_both(tmp_path):
    for errors in run_ranks(2, load_own, str(tmp_path)):
        assert len(errors) == 2
        for text in errors:
            assert f"{tmp_path}/0/c: found another checkpoint on rank 1 ({tmp_path}/1/c) than on rank 0" in text
            assert "give all ranks one path" in text


def use_unknown_protocol(call):
    url = "nosuch://x" if dist.get_rank() == 1 else "memory://shardopt-tests/x"
    getattr(checkpoint, call)(url, {"x": torch.ones(1)}, deadline_seconds=20)


@pytest.mark.parametrize("call", ["save", "load"])
def test_a_path_that_one_rank_cannot_open_is_everybodys_error(call):
    text = outcomes_alike(run_ranks_outcomes(2, use_unknown_protocol, call), CheckpointError)
    assert "rank 1" in text and "nosuch" in text


def save_of_some(path):
    """Only the first rank has a value of its own."""
    app = {"x": torch.ones(2)} | ({"mine": checkpoint.PerRank("first")} if dist.get_rank() == 0 else {})
    checkpoint.save(path, app)
    app = {"x": torch.zeros(2)} | ({"mine": checkpoint.PerRank("")} if dist.get_rank() == 0 else {})
    report = checkpoint.load(path, app, strict=False)
    all_have = {"x": torch.zeros(2), "mine": checkpoint.PerRank("")}
    with pytest.raises(MismatchError, match="on ranks 1, 2: the checkpoint does not fit") as caught:
        checkpoint.load(path, all_have)
    assert not all_have["x"].any()
    return app["x"].tolist(), app.get("mine"), report.unexpected, [problem.found for problem in caught.value.problems]


def test_a_value_that_only_some_ranks_saved(tmp_path):
    outcomes = run_ranks(3, save_of_some, str(tmp_path / "c"))
    missing = ["no value of rank 1", "no value of rank 2"]
    assert outcomes[0] == ([1, 1], checkpoint.PerRank("first"), (), missing)
    assert outcomes[1:] == [([1, 1], None, (), missing)] * 2


# Strictness is over all ranks.


def load_parts(path, mine):
    """Each rank loads the keys that it is told, strictly; what it gets, or the problems."""
    app = {key: torch.zeros(2) for key in mine[dist.get_rank()]}
    try:
        report = checkpoint.load(path, app, deadline_seconds=20)
    except MismatchError as error:
        assert not any(value.any() for value in app.values())
        return [(problem.key, problem.found) for problem in error.problems], str(error).splitlines()[0]
    return {key: value.tolist() for key, value in app.items()}, report.unexpected


def test_ranks_may_load_different_keys_if_together_they_load_all(tmp_path):
    stored = {key: torch.full((2,), float(i)) for i, key in enumerate("abc")}
    checkpoint.save(tmp_path / "c", stored)
    outcomes = run_ranks(3, load_parts, str(tmp_path / "c"), ["ab", "bc", "b"])
    assert [set(loaded) for loaded, _ in outcomes] == [{"a", "b"}, {"b", "c"}, {"b"}]
    assert all(loaded[key] == stored[key].tolist() for loaded, _ in outcomes for key in loaded)
    assert [unexpected for _, unexpected in outcomes] == [()] * 3


def load_keys_and_entries(path, keys, entries):
    return *load_parts(f"{path}/c", keys), load_parts(f"{path}/entries", entries)


def test_a_key_that_no_rank_has_is_told_once_with_what_single_ranks_miss(tmp_path):
    checkpoint.save(tmp_path / "c", {key: torch.ones(2) for key in "abc"})
    stored = ("a.0", "b.0", "b.1", "c.0", "c.1", "d.0", "e.0", "e.1", "e.2")
    checkpoint.save(tmp_path / "entries", {key: torch.ones(2) for key in stored})
    entries = [["a.0", "x.0"], ["a.0", "b.2"], ["a.0", "x.1", "e.0"]]
    outcomes = run_ranks(3, load_keys_and_entries, str(tmp_path), ["ax", "b", "bx"], entries)
    problems, message, (of_entries, _) = outcomes[0]
    assert problems == [
        ("x", "nothing in the checkpoint (on ranks 0, 2)"),
        ("c", "a tensor of float32 [2] in the checkpoint"),
    ]
    assert "the checkpoint does not fit the app; nothing was changed" in message
    assert of_entries == [  # "x" has keys on two ranks, and "b" and "e" are there on one
        ("b.2", "nothing in the checkpoint (on rank 1)"),
        ("b.0", "a tensor of float32 [2] in the checkpoint"),
        ("b.1", "a tensor of float32 [2] in the checkpoint"),
        ("e.1", "a tensor of float32 [2] in the checkpoint"),
        ("e.2", "a tensor of float32 [2] in the checkpoint"),
        ("x.*", "nothing in the checkpoint"),
        ("c.*", "2 keys in the checkpoint, such as c.0"),
        ("d.0", "a tensor of float32 [2] in the checkpoint"),
    ]
    assert outcomes[1:] == outcomes[:1] * 2


def load_stages(path, mine):
    app = {key: torch.zeros(2) for key in mine[dist.get_rank()]}
    with pytest.raises(MismatchError) as caught:
        checkpoint.load(path, app)
    (regex,) = {*re.findall(r'select=r"(.*?)"', str(caught.value))}
    return checkpoint.load(path, app, select=regex).loaded


@pytest.mark.parametrize("mine", [(["a"], ["b"]), (["a", "x.0", "x.1"], ["a"], ["a", "b", "c.0", "c.1"])])
def test_a_regex_of_what_both_have_names_what_any_rank_has(tmp_path, mine):
    checkpoint.save(tmp_path / "c", {key: torch.ones(2) for key in ("a", "b", "c.0", "c.1")})
    outcomes = run_ranks(len(mine), load_stages, str(tmp_path / "c"), mine)
    assert outcomes == [tuple(key for key in own if key[0] != "x") for own in mine]


def load_adapters(path, mine, missing):
    """Rank r has the adapters that it is told, which are not stored."""
    app = {"a": torch.zeros(2)} | {key: torch.ones(2) for key in mine[dist.get_rank()]}
    try:
        report = checkpoint.load(path, app, strict=checkpoint.Strictness(missing=re.compile(missing)))
    except OptionError as error:
        assert not app["a"].any()
        return [problem.found for problem in error.problems]
    return app["a"].tolist(), report.missing


def test_a_regex_for_missing_keys_has_to_be_found_on_some_rank(tmp_path):
    checkpoint.save(tmp_path / "c", {"a": torch.ones(2)})
    outcomes = run_ranks(2, load_adapters, str(tmp_path / "c"), [[], ["lora_A"]], "lora_")
    assert outcomes == [([1, 1], ()), ([1, 1], ("lora_A",))]
    outcomes = run_ranks(2, load_adapters, str(tmp_path / "c"), [[], ["lora_A"]], "lora_C")
    assert outcomes == [["'lora_C', which is found in no key of the app"]] * 2


def load_uninitialized(path):
    """Rank 1 forgot `init_state`, so that state of a parameter that it has would be lost."""
    model = torch.nn.Linear(2, 1)
    optimizer = shardopt.keyed("adamw", model.named_parameters())
    if dist.get_rank() == 0:
        optimizer.init_state()
    app = {"model": model, "optimizer": optimizer}
    with pytest.raises(MismatchError) as caught:
        checkpoint.load(path, app, deadline_seconds=20)
    return [(problem.key, problem.found, problem.remedy) for problem in caught.value.problems]


def test_state_that_another_rank_has_a_place_for_is_not_lost_on_this_one(tmp_path):
    model = torch.nn.Linear(2, 1)
    optimizer = shardopt.keyed("adamw", model.named_parameters())
    optimizer.init_state()
    checkpoint.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    outcomes = run_ranks(2, load_uninitialized, str(tmp_path / "c"))
    ((key, kind, remedy),) = outcomes[0]
    assert (key, kind) == ("optimizer.state", "state in the checkpoint (on rank 1)") and "init_state()" in remedy
    assert outcomes[1] == outcomes[0]


# The plan that is kept for the next save.


def save_again_and_again(folder):
    """The same tensors in other places, of other types, with other values, and back; plans are kept for two of them."""
    rank = dist.get_rank()
    states = [
        {"x": spread(VALUE, Shard(0)), "n": 1},
        {"x": spread(VALUE + 1, Shard(0)), "n": 2},
        {"x": spread(VALUE + 2, Shard(1)), "n": 3},
        {"x": spread((VALUE + 3).bfloat16(), Shard(0)), "n": 4},
        {"x": spread(VALUE + 4, Shard(0)), "n": 5, "mine": checkpoint.PerRank([rank])},
        {"x": spread(VALUE + 5, Shard(0)), "n": 6},
        {"x": spread(VALUE + 6, Shard(0)), "n": 7} | ({"only": torch.ones(1)} if rank == 1 else {}),
        {"x": spread(VALUE + 7, Shard(0)), "n": 8} | ({"only": torch.ones(1)} if rank == 0 else {}),
        {"x": spread(VALUE + 8, Shard(0)), "n": {"a": rank}},
        {"x": spread(VALUE + 9, Shard(0)), "n": 10},
    ]
    refused = []
    for number, state in enumerate(states):
        try:
            checkpoint.save(f"{folder}/{number}", state)
        except StateError:
            refused.append(number)
    return refused


def test_a_kept_plan_is_only_used_for_what_it_was_made_for(tmp_path):
    assert run_ranks(2, save_again_and_again, str(tmp_path)) == [[8]] * 2
    for number in [0, 1, 2, 3, 4, 5, 6, 7, 9]:
        assert checkpoint.verify(tmp_path / str(number)).ok
        with checkpoint.open(tmp_path / str(number)) as reader:
            expected = (VALUE + number).bfloat16() if number == 3 else VALUE + number
            assert torch.equal(reader.read("x"), expected), number
            assert reader.read("n") == number + 1
            assert ("only" in [*reader.keys()]) == (number in (6, 7))
    with checkpoint.open(tmp_path / "4") as reader:
        assert [reader.per_rank(rank) for rank in (0, 1)] == [{"mine": [0]}, {"mine": [1]}]


def in_turn_of_ranks(folder):
    """A process that is another rank in the next process group."""
    store, rank = f"file://{folder}/store", dist.get_rank()
    for number, own in enumerate([rank, 1 - rank]):
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"{store}-{number}", rank=own, world_size=2)
        checkpoint.save(f"{folder}/{number}", {"x": spread(VALUE + number, Shard(0))})


def test_a_process_that_became_another_rank_plans_anew(tmp_path):
    run_ranks(2, in_turn_of_ranks, str(tmp_path))
    for number in (0, 1):
        with checkpoint.open(tmp_path / str(number)) as reader:
            assert torch.equal(reader.read("x"), VALUE + number)


# Damage that one rank alone meets.


def load_damaged(path, sound):
    rank = dist.get_rank()
    weight = torch.nn.Parameter(spread(torch.zeros(64, 50), Shard(0)))
    optimizer = shardopt.keyed("adam", {"w": weight}, lr=0.1)
    optimizer.init_state()
    errors = []
    for _ in range(2):
        with pytest.raises(CorruptionError) as caught:
            checkpoint.load(path, {"optimizer": optimizer, "w": weight})
        errors.append(str(caught.value))
        weight.grad = spread(torch.ones(64, 50), Shard(0))
        with pytest.raises(PartialLoadError):
            optimizer.step()
    dist.barrier()
    if rank == 0:
        mend(path, sound)
    dist.barrier()
    checkpoint.load(path, {"optimizer": optimizer, "w": weight})
    optimizer.step()

    # A load that leaves something out on one rank alone mends nothing on any: a step that one refuses stops all.
    PartialLoad(optimizer, "a load").begin()
    checkpoint.load(path, {"optimizer": optimizer}, select="^optimizer" if rank else r"^optimizer(?!.*exp_avg$)")
    with pytest.raises(PartialLoadError, match="a load did not end well"):
        optimizer.step()
    checkpoint.load(path, {"optimizer": optimizer}, select="^optimizer")
    optimizer.step()
    return errors


def save_trained(path):
    weight = torch.nn.Parameter(spread(torch.ones(64, 50), Shard(0)))
    optimizer = shardopt.keyed("adam", {"w": weight}, lr=0.1)
    weight.grad = spread(torch.ones(64, 50), Shard(0))
    optimizer.step()
    checkpoint.save(path, {"optimizer": optimizer, "w": weight})


def mend(path, sound):
    for name, data in sound.items():
        with open(f"{path}/{name}", "wb") as file:
            file.write(data)


def test_damage_in_the_second_file_tears_the_optimizers_of_all_ranks(tmp_path):
    path = tmp_path / "c"
    run_ranks(2, save_trained, str(path))
    file = max(path.glob("*.safetensors"))
    sound = {file.name: file.read_bytes()}
    with checkpoint.open(path) as reader:
        at = reader.source.open_file(1).entries["optimizer.state.w.exp_avg"].begin
    file.write_bytes(sound[file.name][:at] + b"\xff" + sound[file.name][at + 1 :])
    first, second = run_ranks(2, load_damaged, str(path), sound)
    assert first == second
    assert "on rank 1: a checkpoint is damaged" in first[0]
    assert f"{file}: found segment 0 of 'optimizer.state.w.exp_avg'" in first[0]
