"""How programs use a sampler: lengths in a loop, loops that count nothing, other arguments, ranks known late."""

import logging
import os

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import shardopt
from shardopt import checkpoint
from shardopt.data.sampler import deal
from shardopt.errors import MismatchError, OptionError, RankError
from shardopt.integrations.loader import ResumableLoader, batches_left
from tests.harness import run_ranks

SAMPLES = TensorDataset(torch.arange(40))


def sampler_and_loader(**options):
    sampler = shardopt.ResumableSampler(40, **{"batch_size": 4, **options})
    return sampler, DataLoader(SAMPLES, batch_sampler=sampler)


@pytest.fixture
def lines(caplog):
    """What is logged, by a function that returns it once."""

    def taken():
        messages = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return messages

    with caplog.at_level(logging.WARNING, logger="shardopt"):
        yield taken


def test_a_loop_sees_one_length():
    sampler, loader = sampler_and_loader()
    assert [len(loader) for _ in sampler.through(loader)] == [10] * 10
    assert len(loader) == 10
    for _ in zip(range(4), sampler.through(loader), strict=False):
        assert len(loader) == 10
    state = sampler.state_dict()
    assert len(loader) == 10 - state["position"] // 4  # of the next loop
    again, loader = sampler_and_loader()
    again.load_state_dict(state)
    steps = [i for i, _ in enumerate(again.through(loader)) if i + 1 == len(loader)]
    assert steps == [9 - state["position"] // 4]


def test_a_look_at_batches_within_a_loop_ends_with_the_epoch():
    sampler, loader = sampler_and_loader()
    loop = sampler.through(loader)
    next(loop), next(loop)
    assert len(list(sampler)) == 8 and len(loader) == 10


def test_a_loop_that_counts_nothing_is_warned_of_once(lines):
    sampler, loader = sampler_and_loader()
    next(iter(loader))  # only a look
    sampler.state_dict()
    for number, _ in enumerate(sampler.through(loader)):
        if number == 5:
            break
    sampler.state_dict()
    assert lines() == []
    for _ in loader:
        sampler.state_dict()
    (line,) = lines()
    assert "a resume would repeat them. Loop over sampler.through(loader)" in line
    list(sampler.through(loader))
    list(loader)
    sampler.state_dict()
    assert lines() == []


@pytest.mark.parametrize(
    "options", [{"batch_size": 4}, {"batch_size": 2, "sampler": "it"}, {"batch_size": None}], ids=str
)
def test_batches_of_another_sampler_are_refused(options):
    sampler, _ = sampler_and_loader()
    loader = DataLoader(SAMPLES, **{**options, **({"sampler": sampler} if "sampler" in options else {})})
    with pytest.raises(
        OptionError, match=r"batch_sampler: found a \w+, which is not this sampler; .*; make DataLoader\("
    ):
        next(sampler.through(loader))


def test_batches_that_workers_give_in_any_order_are_refused():
    sampler, _ = sampler_and_loader()
    loader = DataLoader(SAMPLES, batch_sampler=sampler, num_workers=2, in_order=False)
    refused = pytest.raises(OptionError, match=r"in_order: found False, with workers; .*; leave in_order out")
    with refused:
        next(sampler.through(loader))
    with refused:
        ResumableLoader(SAMPLES, batch_size=4, num_workers=2, in_order=False)
    alone = ResumableLoader(SAMPLES, batch_size=4, in_order=False)  # without workers there is one order
    assert len([*alone]) == 10


def test_a_sampler_may_be_that_of_a_loader_without_batches():
    sampler, _ = sampler_and_loader(shuffle=False)
    loader = DataLoader(SAMPLES, sampler=sampler, batch_size=None)
    assert next(sampler.through(loader))[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("shuffle", [True, False])
def test_another_order_is_refused_and_that_of_an_earlier_version_is_taken(shuffle):
    (saved, _), (other, _) = sampler_and_loader(shuffle=shuffle), sampler_and_loader(shuffle=not shuffle)
    state = saved.state_dict()
    with pytest.raises(
        MismatchError, match=rf"shuffle: found {shuffle} in the checkpoint; required {not shuffle}; make"
    ):
        other.load_state_dict(state)
    del state["shuffle"]
    other.load_state_dict(state)


def test_an_epoch_without_batches_after_a_resume_is_told(caplog):
    sampler, loader = sampler_and_loader()
    batches = sampler.through(loader)
    for _ in range(len(sampler)):
        next(batches)
    state = sampler.state_dict()  # as of a save in the loop's last turn
    sampler, loader = sampler_and_loader()
    sampler.load_state_dict(state)
    with caplog.at_level(logging.INFO, logger="shardopt"):
        assert [*sampler.through(loader)] == [] and sampler.epoch == 1
        assert len([*sampler.through(loader)]) == len(loader)
    (line,) = caplog.messages
    assert "epoch 0 has no batch left" in line and "range(data.epoch, epochs)" in line


def test_another_seed_is_told(lines):
    (saved, _), (other, _) = sampler_and_loader(seed=1), sampler_and_loader(seed=7)
    other.load_state_dict(saved.state_dict())
    (line,) = lines()
    assert "seed 7 in the code, 1 in the checkpoint" in line
    other.load_state_dict(saved.state_dict())
    assert other.seed == 1 and lines() == []


def test_a_batch_that_ranks_cannot_divide_is_warned_of_once(lines):
    _, loader = sampler_and_loader(batch_size=6, rank=0, ranks=4)
    list(loader), list(loader)
    (line,) = lines()
    assert "of 6 samples of a batch, 2 ranks get 2 each and 2 get 1: " in line
    _, loader = sampler_and_loader(batch_size=8, rank=0, ranks=4)
    list(loader)
    assert lines() == []


@pytest.mark.parametrize("rank", [-1, 2, 3])
def test_a_rank_that_is_none_of_the_ranks_is_refused(rank):
    with pytest.raises(ValueError, match=rf"rank: found {rank} of 2; required 0 to 1; pass both"):
        sampler_and_loader(rank=rank, ranks=2)
    alone, _ = sampler_and_loader(rank=rank)  # of how many is known at the first use
    with pytest.raises(ValueError, match=rf"rank: found {rank} of 1; required 0 to 0"):
        next(iter(alone))


def test_a_framework_says_who_shares_batches_where_the_program_does_not():
    sampler, loader = sampler_and_loader(shuffle=False)
    deal(sampler, 1, 2)
    deal(sampler, 1, 4)  # another fit
    assert (sampler.rank, sampler.ranks) == (1, 4) and next(sampler.through(loader))[0].tolist() == [1]
    for rank, ranks in ((0, 1), (0, 2)):
        deal(sampler_and_loader(rank=rank, ranks=ranks)[0], 0, 2)
    fewer, _ = sampler_and_loader(rank=0, ranks=1)
    deal(fewer, 1, 2)
    assert (fewer.rank, fewer.ranks) == (0, 1)
    for rank, ranks in ((1, 2), (3, 4)):
        with pytest.raises(
            OptionError, match=rf"rank: found rank {rank} of {ranks}; required rank 0 of 2.*ranks=2 here"
        ):
            deal(sampler_and_loader(rank=rank, ranks=ranks)[0], 0, 2)


def made_before_the_group(store):
    sampler, loader = sampler_and_loader()
    with pytest.raises(RankError, match=r"WORLD_SIZE: found 2, and no process group.*call torch.distributed.init"):
        next(sampler.through(loader))
    checked, _ = sampler_and_loader(batch_size=1)
    dist.init_process_group("gloo", init_method=store, rank=int(os.environ["RANK"]), world_size=2)
    for early in (checked, sampler_and_loader(batch_size=1)[0]):
        with pytest.raises(
            ValueError, match=r"batch_size: found 1; required one for each of 2 ranks; .* rank and ranks"
        ):
            next(iter(early))
    of_both, _ = sampler_and_loader(batch_size=1)
    deal(of_both, 0, 1)  # as Lightning does for two ranks of tensor parallelism
    assert len(next(iter(of_both))) == 1
    return [sample for (batch,) in sampler.through(loader) for sample in batch.tolist()]


def test_a_sampler_made_before_the_process_group_has_its_ranks(tmp_path):
    first, second = run_ranks(2, made_before_the_group, f"file://{tmp_path}/store", backend=None)
    assert len(first) == len(second) == 20 and {*first, *second} == {*range(40)}


def test_a_position_loaded_in_the_middle_of_a_loop_over_a_loader_is_refused():
    loader = ResumableLoader(torch.arange(16), batch_size=4)
    saved = loader.state_dict()
    with pytest.raises(MismatchError, match="leave the loop after a load"):
        for _ in loader:
            loader.load_state_dict(saved)
    assert loader.state_dict() == saved
    assert len([*loader]) == 4


@pytest.mark.parametrize("done", [1, 3, 4, 5, 11, 12])
def test_a_loop_over_epochs_ends_where_it_would_have_without_a_resume(done):
    def loop(loader):
        return (batch.tolist() for _ in range(loader.epoch, 3) for batch in loader)

    whole = [*loop(ResumableLoader(torch.arange(16), batch_size=4))]
    stopped, resumed = (ResumableLoader(torch.arange(16), batch_size=4) for _ in range(2))
    seen = [batch for _, batch in zip(range(done), loop(stopped), strict=False)]
    resumed.load_state_dict(stopped.state_dict())
    assert [*seen, *loop(resumed)] == whole and len(whole) == 12


@pytest.mark.parametrize(("workers", "resumable"), [(0, False), (1, False), (0, True)])
def test_batches_of_another_size_begin_with_a_loop(workers, resumable):
    """A loader goes on with its own, which workers have fetched, and each would be counted as one of the new size."""
    samples = torch.arange(40)
    data = shardopt.ResumableSampler(40, batch_size=4)
    loader = DataLoader(samples, batch_sampler=data, num_workers=workers)
    if resumable:
        loader = ResumableLoader(samples, batch_size=4, num_workers=workers)
        data = loader.position

    def loop(until, size):
        for batch in loader if resumable else data.through(loader):
            seen.append(batch)
            if len(seen) == until:
                data.batch_size = size

    seen = []
    with pytest.raises(OptionError, match=r"batch_size: found 8, set in .*; required 4, .*; leave the loop, set it"):
        loop(2, 8)
    assert len(seen) == 2 and data.position == 8
    loop(6, 10)  # the last batch of the epoch
    assert torch.cat(seen).sort().values.tolist() == [*range(40)] and data.epoch == 1
    del seen[:]
    loop(0, 0)
    assert [*map(len, seen)] == [10] * 4 and torch.cat(seen).sort().values.tolist() == [*range(40)]


class Earlier(shardopt.ResumableSampler):
    """As of a version that saved no batch size."""

    def state_dict(self):
        return {name: each for name, each in super().state_dict().items() if "batch_size" not in name}


def made(kind, batch_size=4):
    if kind == "mixture":
        return shardopt.data.MixtureSampler([20, 20], weights=[1, 1], batch_size=batch_size)
    if kind == "loader":
        return ResumableLoader(SAMPLES, batch_size=batch_size)
    return (Earlier if kind == "earlier" else shardopt.ResumableSampler)(40, batch_size=batch_size)


@pytest.mark.parametrize("kind", ["sampler", "mixture", "loader"])
def test_a_batch_size_that_was_set_is_resumed_and_that_of_other_code_stays(lines, tmp_path, kind):
    def at(loader):
        return getattr(loader, "position", loader) if kind == "loader" else loader

    ramped = made(kind)
    at(ramped).batch_size = 8  # at a step, which a resumed run is behind
    checkpoint.save(tmp_path, {"data": ramped}, durable=False)
    for _ in range(2):  # also from the checkpoint of a resumed run
        resumed = made(kind)
        resumed.load_state_dict(ramped.state_dict())
        ramped = resumed
        assert at(resumed).batch_size == 8
        assert lines() == ["batch_size is the checkpoint's: 4 here, 8 in the checkpoint [data-position]"]
    others = made(kind, 5), made(kind), made(kind)
    at(others[1]).batch_size = 5
    at(others[2]).batch_size = 8
    for other in others:
        checkpoint.load(tmp_path, {"data": other})
    assert [at(other).batch_size for other in others] == [5, 5, 8]
    assert lines() == ["batch_size is the code's: 5, and 8 in the checkpoint [data-position]"] * 2


def test_a_rewind_takes_the_batch_size_of_its_step(lines):
    """That which the run has set since is none of its code."""
    sampler = made("sampler")
    before = sampler.state_dict()
    for _ in sampler.through(torch.utils.data.DataLoader(range(40), batch_sampler=sampler)):
        break
    sampler.batch_size = 8
    sampler.load_state_dict(before)
    assert sampler.batch_size == 4
    assert lines() == ["batch_size is the checkpoint's: 8 here, 4 in the checkpoint [data-position]"]


def test_a_position_of_an_earlier_version_says_nothing_of_batches(lines, tmp_path):
    saved, resumed = made("earlier"), made("sampler", 5)
    next(saved.through(saved))
    checkpoint.save(tmp_path, {"data": saved}, durable=False)
    checkpoint.load(tmp_path, {"data": resumed})
    assert (resumed.batch_size, resumed.position) == (5, 4) and lines() == []


def short_epochs(loader, at, batches, epochs, dies_after=None):
    """Trains epochs of so many batches; returns the samples of each batch, and the state after the last one."""
    seen, state = [], None
    for epoch in range(at.epoch, epochs):
        for batch in loader():
            seen.append(batch[0].tolist())
            if at.position >= batches * at.batch_size:
                at.epoch, at.position = epoch + 1, 0
            state = at.state_dict()
            if len(seen) == dies_after:
                return seen, state
            if at.epoch > epoch:
                break
    return seen, state


@pytest.mark.parametrize("is_loader", [False, True], ids=["through", "ResumableLoader"])
def test_epochs_that_a_program_ends_early_resume(caplog, is_loader):
    def made():
        if is_loader:
            loader = ResumableLoader(SAMPLES, batch_size=4)
            return lambda: loader, loader.position
        sampler, loader = sampler_and_loader()
        return lambda: sampler.through(loader), sampler

    with caplog.at_level(logging.INFO, logger="shardopt"):
        whole, _ = short_epochs(*made(), 6, 3)
        assert len(whole) == 18
        for dies_after in (2, 6, 7, 17, 18):
            seen, state = short_epochs(*made(), 6, 3, dies_after)
            loader, at = made()
            at.load_state_dict(state)
            assert seen + short_epochs(loader, at, 6, 3)[0] == whole
    assert caplog.messages == []


@pytest.mark.parametrize("is_loader", [False, True], ids=["through", "ResumableLoader"])
def test_a_loop_that_goes_on_where_another_was_left_is_told_of_once(caplog, is_loader):
    loader = ResumableLoader(SAMPLES, batch_size=4)
    at = loader.position
    if not is_loader:
        at, batches = sampler_and_loader()

    def loop(batches_of_it):
        for number, _ in enumerate(loader if is_loader else at.through(batches), 1):
            if number == batches_of_it:
                break

    with caplog.at_level(logging.INFO, logger="shardopt"):
        loop(10), loop(None)  # a `break` at the last batch, behind which `through` has an empty epoch
        assert not any(line.startswith("this loop") for line in caplog.messages)
        caplog.clear()
        for _ in range(2):
            at.load_state_dict({**at.state_dict(), "epoch": 5, "position": 12})  # as a rewind
            loop(3)
        assert caplog.messages == []
        loop(2), loop(2)
    (line,) = caplog.messages
    assert line.startswith("this loop goes on in epoch 5 at sample 24, where the loop before it was left")


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_position_past_the_end_of_an_epoch_is_refused_with_the_one_that_is_meant(drop_last):
    """That was the ValueError of a negative length."""
    data = shardopt.ResumableSampler(42, batch_size=4, drop_last=drop_last)
    loader = DataLoader(TensorDataset(torch.arange(42)), batch_sampler=data)
    per_epoch = 10 if drop_last else 11
    data.epoch, data.position = 1, 25 * 4
    ours = ResumableLoader(torch.arange(42), batch_size=4, drop_last=drop_last)
    ours.position.position = 25 * 4
    for call in (
        lambda: len(data),
        lambda: len(loader),
        lambda: next(iter(loader)),
        lambda: next(data.through(loader)),
        lambda: next(iter(ours)),
        lambda: batches_left(data),
    ):
        with pytest.raises(OptionError, match="position 100 is past the 42 samples of the epoch") as caught:
            call()
    (problem,) = caught.value.problems
    assert (problem.key, problem.found, problem.required) == ("position", "100", "0 to 42, the samples of the epoch")
    exec(problem.remedy.removeprefix("set the epoch too: "), {"data": data})
    assert (data.epoch, data.position) == (3, (25 - 2 * per_epoch) * 4)
    assert len(loader) == 3 * per_epoch - 25 == len([*data.through(loader)]) and (data.epoch, data.position) == (4, 0)
    data.position = per_epoch * 4  # where a program counts the last batch as a full one
    assert [*data.through(loader)] == [] and data.epoch == 5
    data.position = -4
    with pytest.raises(OptionError, match="position -4 is before the 42 samples"):
        len(data)
