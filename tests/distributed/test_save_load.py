"""Saved by some ranks, loaded by others: the same tensors, in the memory that was there."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from shardopt import checkpoint
from shardopt.checkpoint.storage import LocalStorage
from shardopt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    LayoutError,
    MismatchError,
    RankError,
    ShardoptError,
    StateError,
)
from shardopt.ranks import ranks_of
from shardopt.sharding.view import view_of
from tests.harness import Fault, run_ranks, run_ranks_outcomes
from tests.support.sharded_state import SHAPES, check_state, global_value, make_state, memory_of

RANKS_STAY = True


def save_state(path, style):
    progress = {"step": 7, "losses": [1.5, float("inf")]}
    checkpoint.save(path, {"state": make_state(style, filled=True), "progress": progress})


def load_state(path, style):
    state = make_state(style, filled=False)
    app = {"state": state, "progress": {"step": 0, "losses": None}}
    before = memory_of(state)
    report = checkpoint.load(path, app)
    assert memory_of(state) == before
    assert app["progress"] == {"step": 7, "losses": [1.5, float("inf")]}
    assert all(app["state"][name] is state[name] for name in state)
    check_state(state)
    return report


def load_states(paths, styles):
    """Loads what each of several jobs has saved, in each style."""
    for source, path in paths.items():
        for style in styles:
            try:
                load_state(path, style)
            except BaseException as error:
                error.add_note(f"saved by {source}, loaded as {style}")
                raise


SAVED = [(1, "first"), (2, "first"), (4, "first"), (3, "turned"), (4, "replicated")]
LOADED = {1: ["turned"], 2: ["turned"], 3: ["first"], 4: ["turned", "first"]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    made = {}

    def get(size, style):
        if (size, style) not in made:
            made[size, style] = tmp_path_factory.mktemp("saved") / f"{style}-by-{size}"
            run_ranks(size, save_state, str(made[size, style]), style)
        return str(made[size, style])

    return get


@pytest.mark.parametrize("loading", LOADED)
def test_reshards(saved, loading):
    """What each of `SAVED` has, by so many ranks."""
    run_ranks(loading, load_states, {source: saved(*source) for source in SAVED}, LOADED[loading])


def test_whole_tensors_are_read_without_ranks(saved):
    with checkpoint.open(saved(4, "first")) as reader:
        assert reader.keys() == sorted([*(f"state.{name}" for name in SHAPES), "progress.step", "progress.losses"])
        for name, (shape, dtype) in SHAPES.items():
            info = reader.info(f"state.{name}")
            assert (info.shape, info.dtype) == (shape, dtype)
            assert torch.equal(reader.read(f"state.{name}"), global_value(name))
        assert reader.read("progress.losses") == [1.5, float("inf")]
        part = reader.read("state.cube", checkpoint.Box((1, 2, 3), (2, 3, 2)))
        assert torch.equal(part, global_value("cube")[1:3, 2:5, 3:5])


def test_torch_and_safetensors_read_the_files(saved):
    path = saved(4, "first")
    wanted = {f"state.{name}": torch.full_like(global_value(name), -1) for name in SHAPES if name != "scalar"}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(wanted, storage_reader=HuggingFaceStorageReader(path), no_dist=True)
    for key, tensor in wanted.items():
        assert torch.equal(tensor, global_value(key.removeprefix("state."))), key
    seen = set()
    for name in LocalStorage(path).names():
        if name.endswith(".safetensors"):
            with safe_open(f"{path}/{name}", "pt") as file:
                sharding = json.loads(file.metadata()["DCP_SHARDING_INFO"])
                for key in file.keys():  # noqa: SIM118  # not a dict, and cannot be iterated
                    if not key.startswith("state."):
                        continue
                    tensor, offsets = file.get_tensor(key), sharding[key]["saved_offsets"]
                    expected = global_value(key.removeprefix("state."))
                    for dim, offset in enumerate(offsets):
                        expected = expected.narrow(dim, offset, tensor.shape[dim])
                    assert torch.equal(tensor, expected)
                    seen.add(key)
    assert seen == {f"state.{name}" for name in SHAPES}


def test_each_replica_is_written_once(saved):
    """Four ranks that hold all of it write about a quarter each, not all."""
    with checkpoint.open(saved(4, "replicated")) as reader:
        stored = sum(sum(box.numel for box in reader.info(key).boxes) for key in reader.manifest.tensors)
    assert stored == sum(global_value(name).numel() for name in SHAPES)


def save_big_replica(path, kind, check):
    state = {"a": torch.arange(3 << 20, dtype=torch.float32), "b": torch.arange(1 << 20, dtype=torch.float32)}
    if kind == "dtensor":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        state = {
            key: distribute_tensor(tensor, mesh, [Replicate()], src_data_rank=None) for key, tensor in state.items()
        }
    return checkpoint.save(path, state, check_replicas=check).bytes_written


@pytest.mark.parametrize(("kind", "check"), [("dtensor", "sampled"), ("dtensor", "none"), ("plain", "all")])
def test_replicas_share_the_writing(tmp_path, kind, check):
    written = run_ranks(4, save_big_replica, str(tmp_path / "c"), kind, check)
    assert max(written) <= 1.1 * sum(written) / 4 + (1 << 20)
    with checkpoint.open(tmp_path / "c") as reader:
        assert torch.equal(reader.read("a"), torch.arange(3 << 20, dtype=torch.float32))
        assert torch.equal(reader.read("b"), torch.arange(1 << 20, dtype=torch.float32))


@pytest.mark.parametrize("check", ["sampled", "none"])
def test_plain_tensors_that_were_not_compared_whole_are_written_whole(tmp_path, check):
    run_ranks(3, save_big_replica, str(tmp_path / "c"), "plain", check)
    with checkpoint.open(tmp_path / "c") as reader:
        assert [len(reader.info(key).boxes) for key in "ab"] == [1, 1]
        files = {file for key in "ab" for file in reader.manifest.tensors[key].layout.files}
        assert len(files) == 2  # by two ranks


def outcomes_alike(outcomes, kind):
    """Every rank raised the same error; returns its text."""
    errors = [outcome.error for outcome in outcomes]
    assert all(isinstance(error, kind) for error in errors), outcomes
    assert len({str(error) for error in errors}) == 1, errors
    return str(errors[0])


def load_what_does_not_fit(path):
    state = make_state("first", filled=False)
    mesh = state["rows"].device_mesh
    rank = dist.get_rank()
    state["rows"] = distribute_tensor(torch.zeros(8, 7), mesh, [Shard(0)], src_data_rank=None)
    state["counts"] = distribute_tensor(torch.zeros(9), mesh, [Shard(0)], src_data_rank=None)
    state["plain"] = checkpoint.PerRank(3)
    del state["cube"]
    if rank == 1:
        state["extra"] = torch.zeros(3)
    app = {"state": state, "progress": {"step": 0, "losses": None}}
    kept = {name: view_of(t).pieces for name, t in state.items() if isinstance(t, torch.Tensor)}
    copies = {name: [piece.tensor.clone() for piece in pieces] for name, pieces in kept.items()}
    try:
        checkpoint.load(path, app)
    finally:
        for name, pieces in kept.items():
            assert all(torch.equal(p.tensor, c) for p, c in zip(pieces, copies[name], strict=True)), name
        assert app["progress"] == {"step": 0, "losses": None}


def test_what_does_not_fit_is_refused_whole_and_by_all(saved):
    text = outcomes_alike(run_ranks_outcomes(2, load_what_does_not_fit, saved(4, "first")), MismatchError)
    for key in ("state.rows", "state.counts", "state.plain", "state.cube", "state.extra"):
        assert f"- {key}: found" in text
    assert "[8, 6]" in text
    assert "[8, 7]" in text
    assert "int64" in text
    assert "Strictness(" in text


def load_leniently(path):
    state = make_state("first", filled=False)
    del state["cube"]
    state["extra"] = torch.zeros(3)
    report = checkpoint.load(path, {"state": state, "progress": {"step": 0, "losses": None}}, strict=False)
    check_state({name: tensor for name, tensor in state.items() if name != "extra"})
    return report


def test_lenient_load_tells_what_it_left(saved):
    for report in run_ranks(2, load_leniently, saved(4, "first")):
        assert report.missing == ("state.extra",)
        assert report.unexpected == ("state.cube",)


def save_twice(path):
    checkpoint.save(path, {"x": torch.ones(3)})
    checkpoint.save(path, {"x": torch.zeros(3)})


def test_a_committed_path_is_taken(tmp_path):
    outcomes_alike(run_ranks_outcomes(2, save_twice, str(tmp_path / "c")), CheckpointExistsError)
    with checkpoint.open(tmp_path / "c") as reader:
        assert torch.equal(reader.read("x"), torch.ones(3))


def save_and_load_leftovers(path):
    with pytest.raises(CheckpointNotFoundError, match="1 files of a save that was not finished"):
        checkpoint.load(path, {"x": torch.zeros(3)})
    dist.barrier()
    checkpoint.save(path, {"x": torch.ones(3)})
    app = {"x": torch.zeros(3)}
    checkpoint.load(path, app)
    return app["x"].tolist()


def test_files_without_a_manifest_are_no_checkpoint(tmp_path):
    path = tmp_path / "c"
    path.mkdir()
    (path / "0123456789ab-r00000.safetensors").write_bytes(b"left by a save that died")
    assert run_ranks(2, save_and_load_leftovers, str(path)) == [[1.0] * 3] * 2
    assert len(list(path.glob("*.safetensors"))) == 1  # torch's reader would have taken the other one too


def save_with_rank_differences(path, kind):
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    app = {"same": torch.ones(3), "step": 3}
    if kind == "value":
        app["step"] = rank
    if kind == "shape":
        app["same"] = torch.ones(3 + rank)
    if kind == "dtype":
        app["same"] = torch.ones(3, dtype=torch.float64 if rank else torch.float32)
    if kind == "kind":
        app["same"] = 3 if rank else torch.ones(3)
    if kind == "object":
        app["step"] = object() if rank == 1 else 3
    if kind == "partial":
        app["same"] = distribute_tensor(torch.ones(3), mesh, [Shard(0)], src_data_rank=None)
        app["partial"] = torch.distributed.tensor.DTensor.from_local(torch.ones(3), mesh, [Partial()])
    if kind == "drift":
        app["same"] = torch.full((3,), float(rank == 1))
    if kind == "drift of shards":
        rows = init_device_mesh("cpu", (2, 2))
        local = torch.full((2, 5), float(rank))
        app["same"] = torch.distributed.tensor.DTensor.from_local(local, rows, [Replicate(), Shard(0)])
    if kind == "collision":
        app |= {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}
    checkpoint.save(path, app)


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        ("value", StateError, "0 on rank 0, 1 on rank 1"),
        ("shape", StateError, "shape [3] whole on each rank on rank 0"),
        ("dtype", StateError, "float32 on rank 0, float64 on rank 1"),
        ("kind", StateError, "tensors on some ranks"),
        ("object", StateError, "on rank 1: a value cannot be stored"),
        ("drift", StateError, "same: found other bytes of [0:3] on rank 1 than on rank 0"),
        ("drift of shards", StateError, "same: found other bytes of [2:4, 0:5] on rank 3 than on rank 1"),
        ("partial", LayoutError, "artial"),
        ("collision", StateError, "two paths give one key"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_all(tmp_path, kind, error, said):
    size = 4 if kind == "drift of shards" else 3
    text = outcomes_alike(run_ranks_outcomes(size, save_with_rank_differences, str(tmp_path / "c"), kind), error)
    assert said in text
    assert not list(tmp_path.glob("c/*"))


MIB_OF_FLOATS = 1 << 18


def save_drifted(path, check, where):
    """Two MiB that differ between ranks: in all elements, in one that is among the samples, or in one that is not."""
    drifted = torch.zeros(2 * MIB_OF_FLOATS)
    drifted[{"all": slice(None), "last": -1, "unseen": 1024}[where]] += dist.get_rank()
    same = torch.arange(2.0 * MIB_OF_FLOATS)
    checkpoint.save(path, {"drifted": drifted, "same": same, "t": {"x": same[:5]}}, check_replicas=check)


def test_a_tensor_that_is_each_ranks_own_is_refused(tmp_path):
    """As a forgotten PerRank, or the local tensors of tensor parallelism by hand: no mixture of ranks is stored."""
    for check, where in [("sampled", "all"), ("sampled", "last"), ("all", "unseen")]:
        outcomes = run_ranks_outcomes(3, save_drifted, str(tmp_path / "c"), check, where)
        text = outcomes_alike(outcomes, StateError)
        assert "drifted: found other bytes of [0:524288] on rank 1 than on rank 0" in text
        assert "PerRank" in text
        assert "- same" not in text
        assert not list(tmp_path.glob("c/*"))


@pytest.mark.parametrize(("check", "where"), [("sampled", "unseen"), ("none", "all")])
def test_what_is_not_compared_is_stored_as_one_rank_has_it(tmp_path, check, where):
    run_ranks(3, save_drifted, str(tmp_path / "c"), check, where)
    with checkpoint.open(tmp_path / "c") as reader:
        stored = reader.read("drifted")
    if where == "all":
        assert len(stored.unique()) == 1
    assert stored.max() in (0, 1, 2)


def save_other_choices(path):
    checkpoint.save(path, {"x": torch.ones(3)}, check_replicas="all" if dist.get_rank() == 2 else "sampled")


def test_ranks_that_ask_for_other_comparisons_are_refused(tmp_path):
    text = outcomes_alike(run_ranks_outcomes(3, save_other_choices, str(tmp_path / "c")), StateError)
    assert "check_replicas: found 'sampled' on rank 0, 'all' on rank 2" in text
    assert not (tmp_path / "c").exists()


def save_stages_that_drift(folder, kind):
    """Ranks with some keys in common and others of their own; what they have in common drifts after the first save."""
    rank = dist.get_rank()
    shared = torch.zeros(10)
    if kind == "cut mesh":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "copies"))["copies"]
        shared = torch.distributed.tensor.DTensor.from_local(shared, mesh, [Replicate()])
    app = {f"of{rank // 2}": shared, f"own{rank}": torch.ones(3)}
    refused = []
    for number in range(3):
        if number == 2 and rank == 3:
            (shared if kind == "plain" else shared.to_local()).add_(1)
        try:
            checkpoint.save(f"{folder}/{number}", app)
        except StateError as error:
            refused.append((number, error.problems[0].key))
    return refused


@pytest.mark.parametrize("kind", ["plain", "cut mesh"])
def test_drift_between_ranks_of_one_stage_is_found_in_later_saves_too(tmp_path, kind):
    """The plan is kept then, and only a summary of the hashes is exchanged."""
    assert run_ranks(4, save_stages_that_drift, str(tmp_path), kind) == [[(2, "of1")]] * 4


def save_by_stages(path):
    rank = dist.get_rank()
    meshes = [init_device_mesh("cpu", (2,), mesh_dim_names=(f"stage{i}",)) for i in range(1)]
    del meshes
    app = {f"stage{rank}.weight": torch.full((4, 3), float(rank)), "shared": torch.arange(6), f"of{rank % 2}": rank % 2}
    checkpoint.save(path, app)
    again = {f"stage{rank}.weight": torch.zeros(4, 3), "shared": torch.zeros(6, dtype=torch.int64)}
    checkpoint.load(path, again, strict=False)
    return [again[f"stage{rank}.weight"][0, 0].item(), again["shared"].tolist()]


def test_ranks_with_other_keys_make_one_checkpoint(tmp_path):
    results = run_ranks(4, save_by_stages, str(tmp_path / "c"))
    assert results == [[float(rank), list(range(6))] for rank in range(4)]
    with checkpoint.open(tmp_path / "c") as reader:
        assert reader.keys() == ["of0", "of1", "shared", *(f"stage{rank}.weight" for rank in range(4))]
        assert torch.equal(reader.read("stage2.weight"), torch.full((4, 3), 2.0))


def save_per_rank(path):
    rank = dist.get_rank()
    torch.manual_seed(rank)
    app = {"rng": checkpoint.PerRank({"torch": torch.get_rng_state(), "rank": rank}), "x": torch.ones(2)}
    checkpoint.save(path, app)
    expected = torch.rand(3)
    app["rng"] = checkpoint.PerRank(None)
    checkpoint.load(path, app)
    assert app["rng"].value["rank"] == rank
    torch.set_rng_state(app["rng"].value["torch"])
    assert torch.equal(torch.rand(3), expected)


def load_per_rank(path, on_resize):
    app = {"rng": checkpoint.PerRank("mine", on_resize), "x": torch.zeros(2)}
    checkpoint.load(path, app)
    return app["rng"].value


def test_values_per_rank(tmp_path):
    path = str(tmp_path / "c")
    run_ranks(3, save_per_rank, path)
    text = outcomes_alike(run_ranks_outcomes(2, load_per_rank, path, "raise"), MismatchError)
    assert "values of 3 ranks" in text
    assert run_ranks(2, load_per_rank, path, "keep") == ["mine", "mine"]


def save_under_a_fault(path):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shared = distribute_tensor(torch.zeros(1 << 21), mesh, [Replicate()], src_data_rank=None)  # each writes a part
    checkpoint.save(path, {"x": torch.ones(3), "y": shared}, deadline_seconds=3)


def test_a_rank_that_cannot_write_is_named_by_all(tmp_path):
    fault = Fault(rank=2, operation="os:fsync", action="ENOSPC")
    outcomes = run_ranks_outcomes(3, save_under_a_fault, str(tmp_path / "c"), faults=[fault])
    text = outcomes_alike(outcomes, ShardoptError)
    assert "rank 2" in text
    assert "No space left" in text
    assert not list(tmp_path.glob("c/*"))  # rank 0 has cleared up what all have written
    with pytest.raises(CheckpointNotFoundError):
        checkpoint.open(tmp_path / "c")


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_is_named_by_all(tmp_path, victim):
    fault = Fault(rank=victim, operation="os:fsync", action="kill")
    outcomes = run_ranks_outcomes(3, save_under_a_fault, str(tmp_path / "c"), faults=[fault])
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    text = outcomes_alike(survivors, RankError)
    assert f"rank {victim} died" in text or f"rank {victim} gave no sign of life for 3 s" in text
    with pytest.raises(CheckpointNotFoundError):
        checkpoint.open(tmp_path / "c")


def save_and_load_in_memory():
    url = "memory://shardopt-tests/checkpoint"
    app = {"state": make_state("first", filled=True), "step": 3}
    checkpoint.save(url, app)
    other = {"state": make_state("turned", filled=False), "step": 0}
    checkpoint.load(url, other)
    check_state(other["state"])
    assert other["step"] == 3


def save_again(path):
    """The bytes that a rank sends in each of three saves, of a state whose values change and whose layouts do not."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.ones(8, 2)
    model = {f"w{i}": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None) for i in range(300)}
    links = ranks_of().channel.node.hub.links
    sent_bytes = []
    for step in range(3):
        before = sum(link.sent_bytes for link in links.values())
        checkpoint.save(f"{path}/{step}", {"model": model, "step": step})
        sent_bytes.append(sum(link.sent_bytes for link in links.values()) - before)
    return sent_bytes


def test_a_second_save_of_the_same_layouts_says_little(tmp_path):
    sent_bytes = run_ranks(4, save_again, str(tmp_path))
    assert all(second <= 512 for _, *later in sent_bytes[1:] for second in later)
    assert all(second <= 3 * 512 for second in sent_bytes[0][1:])  # to three others
    assert all(second > 0 for _, *later in sent_bytes for second in later)


def test_memory_filesystem_takes_the_same_line():
    run_ranks(1, save_and_load_in_memory)


def load_what_one_rank_cannot_hold(path, share_reads):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.ones(6, 4)
    whole[5, 3] = 70000.0
    sharded, copies = ([Shard(0)], [Replicate()])
    saved = {name: distribute_tensor(whole, mesh, placed) for name, placed in (("rows", sharded), ("copies", copies))}
    checkpoint.save(path, saved)
    for dtype in (torch.float16, torch.bfloat16):
        app = {name: torch.zeros_like(tensor, dtype=dtype) for name, tensor in saved.items()}
        strict = checkpoint.Strictness(dtype="cast")
        if dtype == torch.float16:
            with pytest.raises(MismatchError, match=r"found 70000\.0 in float32; required numbers that float16"):
                checkpoint.load(path, app, strict=strict, share_reads=share_reads)
            assert not any(tensor.to_local().any() for tensor in app.values())
        else:
            assert len(checkpoint.load(path, app, strict=strict, share_reads=share_reads).cast) == 2


@pytest.mark.parametrize("share_reads", ["never", "always"])
def test_a_number_that_one_rank_cannot_hold_is_told_by_all(tmp_path, share_reads):
    run_ranks(2, load_what_one_rank_cannot_hold, str(tmp_path / "c"), share_reads)
