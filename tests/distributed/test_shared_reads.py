"""Boxes that several ranks load are read by one of them and sent to the others: the same bytes, fewer of them read."""

import importlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.sources.own import OwnSource
from shardopt.checkpoint.sources.reading import broadcast as share
from shardopt.checkpoint.sources.reading.broadcast import BroadcastReads
from shardopt.errors import CorruptionError, PartialLoadError, RankError
from shardopt.ranks import Ranks
from tests.distributed import test_reshard_matrix as matrix
from tests.harness import run_ranks, run_ranks_outcomes

RANKS_STAY = True

MIB = 1 << 20


def load_matrix(path, turns):
    read = wanted = 0
    for turn in turns:
        state = matrix.make_state(turn, filled=False)
        memory = matrix.held(state)
        report = checkpoint.load(path, {"state": dict(state)}, share_reads="always", transactional=turn % 2 == 1)
        assert matrix.held(state) == memory
        assert [key for key, tensor in state.items() if not matrix.is_filled(key, tensor)] == []
        read, wanted = read + report.bytes_read, wanted + report.bytes_wanted
    return read, wanted


@pytest.mark.parametrize("loading", [pytest.param(3, marks=pytest.mark.exhaustive), 4])
def test_every_layout_is_filled_by_exchange(tmp_path, loading, request):
    run_ranks(2, matrix.save, str(tmp_path / "saved"))
    turns = list(range(len(matrix.LAYOUTS))) if request.config.getoption("--exhaustive") else [0, 3]
    run_ranks(loading, load_matrix, str(tmp_path / "saved"), turns, deadline_seconds=200.0)


def big(filled):
    """A replicated tensor, a plain one, one sharded in two replicas, and one that only one rank holds parts of."""
    row = init_device_mesh("cpu", (dist.get_world_size(),))
    square = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    value = torch.arange(3 * MIB, dtype=torch.float32).view(-1, 1024) if filled else torch.zeros(3 * 1024, 1024)
    return {
        "replicated": distribute_tensor(value, row, [Replicate()], src_data_rank=None),
        "plain": value.clone(),
        "hybrid": distribute_tensor(value, square, [Replicate(), Shard(0)], src_data_rank=None),
        "rows": distribute_tensor(value, row, [Shard(0)], src_data_rank=None),
    }


def save_big(path):
    checkpoint.save(path, big(filled=True))


@pytest.fixture(scope="module")
def saved_big(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("big") / "saved")
    run_ranks(4, save_big, path)
    return path


def load_in_inference_mode(path):
    value = torch.arange(12.0)
    checkpoint.save(path, {"a": value})
    with torch.inference_mode():
        app = {"a": torch.zeros(12)}
    checkpoint.load(path, app, share_reads="always")
    return torch.equal(app["a"], value)


def test_boxes_are_sent_into_tensors_made_in_inference_mode(tmp_path):
    assert run_ranks(2, load_in_inference_mode, str(tmp_path / "saved")) == [True, True]


def load_big_in_each_way(path):
    return [load_big(path, share_reads) for share_reads in ("never", "always", "auto")]


def load_big(path, share_reads):
    state = big(filled=False)
    report = checkpoint.load(path, state, share_reads=share_reads)
    for name, tensor in big(filled=True).items():
        loaded = state[name]
        assert torch.equal(*(each.to_local() if name != "plain" else each for each in (loaded, tensor)))
    return report.bytes_read, report.bytes_wanted


def test_each_byte_is_read_by_one_rank(saved_big):
    stored = 4 * 12 * MIB
    apart, together, local_disk = zip(*run_ranks(4, load_big_in_each_way, saved_big), strict=True)
    assert [read / wanted for read, wanted in apart] == pytest.approx([1, 1, 1, 1], abs=0.1)
    assert [wanted for _, wanted in together] == [wanted for _, wanted in apart]
    assert sum(read for read, _ in together) <= 1.1 * stored
    assert max(read for read, _ in together) <= 1.1 * stored / 4 + 2 * MIB
    assert local_disk == apart


def replicated(filled):
    return {"replicated": big(filled)["replicated"]}


def save_replicated(path):
    checkpoint.save(path, replicated(filled=True))


def load_and_list_files(path):
    opened, open_one = [], OwnSource.open_file

    def listing(self, number, keys=None):
        opened.append(number)
        return open_one(self, number, keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OwnSource, "open_file", listing)
        report = checkpoint.load(path, replicated(filled=False), share_reads="always")
    assert report.bytes_wanted == 12 * MIB
    return opened


def test_each_rank_opens_the_files_alone_that_it_reads(tmp_path):
    path = str(tmp_path / "saved")
    run_ranks(4, save_replicated, path)
    opened = run_ranks(4, load_and_list_files, path)
    assert sorted(opened) == [[0], [1], [2], [3]]


def load_without_rows(path):
    """One rank wants one tensor more."""
    value = {"plain": torch.zeros(3 * 1024, 1024)}
    if dist.get_rank() == 0:
        value["replicated"] = torch.zeros(3 * 1024, 1024)
    report = checkpoint.load(path, dict(value), strict=False, share_reads="always")
    for tensor in value.values():
        assert torch.equal(tensor, torch.arange(3 * MIB, dtype=torch.float32).view(-1, 1024))
    return report.bytes_read >= report.bytes_wanted


def test_ranks_that_want_other_tensors_read_for_themselves(saved_big):
    assert run_ranks(3, load_without_rows, saved_big) == [True] * 3


def load_damaged(path):
    state = {"plain": torch.zeros(3 * 1024, 1024)}
    checkpoint.load(path, state, strict=False, share_reads="always")


def test_damage_that_one_rank_reads_is_raised_by_all(tmp_path):
    path = tmp_path / "saved"
    run_ranks(2, save_big, str(path))
    with checkpoint.open(path) as reader:
        shared = reader.manifest.tensors["plain"].layout
        file = reader.manifest.files[shared.files[-1]].name
        entry = next(each for each in reader.source.open_file(shared.files[-1]).entries.values() if each.key == "plain")
    with open(path / file, "r+b") as opened:
        opened.seek(entry.end - 9)
        opened.write(b"\xff\xfe\xfd")
    outcomes = run_ranks_outcomes(3, load_damaged, str(path))
    assert [type(each.error) for each in outcomes] == [CorruptionError] * 3
    assert all("plain" in str(each.error) for each in outcomes)


def load_and_break_on_rank_1(path, broken_method):
    """Returns the error where one rank cannot work out its reads, or cannot read; and if the optimizer may step."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = shardopt.keyed("adam", {"w": weight}, lr=0.5)
    optimizer.init_state()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:

            def broken(*unused):
                raise LookupError("no part")

            load = importlib.import_module("shardopt.checkpoint.loading.load")
            patch.setattr(BroadcastReads if broken_method == "own_pieces" else load, broken_method, broken)
        weight.grad = torch.ones(3)
        with pytest.raises(RankError) as caught:
            checkpoint.load(path, {"w": weight, "optimizer": optimizer}, share_reads="always")
    try:
        optimizer.step()
    except PartialLoadError:
        return str(caught.value), "torn"
    return str(caught.value), "steps"


def save_small(path):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = shardopt.keyed("adam", {"w": weight}, lr=0.5)
    optimizer.init_state()
    checkpoint.save(path, {"w": weight, "optimizer": optimizer})


@pytest.mark.parametrize(("method", "then"), [("fill", "torn"), ("own_pieces", "steps")])
def test_a_rank_that_fails_at_what_is_shared_is_named_to_all_at_once(tmp_path, method, then):
    path = str(tmp_path / "saved")
    run_ranks(1, save_small, path)
    # A rank outside of a round would be missed by the others only after their deadline, which is far longer than this.
    for message, optimizer in run_ranks(3, load_and_break_on_rank_1, path, method, deadline_seconds=30.0):
        assert "rank 1" in message and "LookupError" in message and "no part" in message
        assert optimizer == then


def load_in_rounds(path):
    """Returns the bytes that this rank sends in each exchange."""
    sent_bytes, all_to_all = [], Ranks.all_to_all

    def counting(self, sent, *counts):
        sent_bytes.append(sent.nbytes)
        return all_to_all(self, sent, *counts)

    Ranks.all_to_all = counting
    try:
        load_big(path, "always")
    finally:
        Ranks.all_to_all = all_to_all
    return sent_bytes


def test_rounds_are_of_bounded_size(saved_big):
    rounds = run_ranks(4, load_in_rounds, saved_big)
    assert {len(each) for each in rounds} == {3}
    assert all(0 < nbytes <= share._ROUND_BYTES for each in rounds for nbytes in each)
    sent = 12 * MIB * (3 + 3 + 1)  # to the three others, and to the one other of each half
    assert sum(map(sum, rounds)) == sent
