"""A position in a data set: every sample of an epoch once, whatever number of ranks resumes."""

import itertools
import re
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import shardopt
from shardopt import checkpoint
from shardopt.errors import MismatchError
from shardopt.integrations.loader import ResumableLoader


def samplers(size, ranks, **options):
    return [shardopt.ResumableSampler(size, rank=rank, ranks=ranks, **options) for rank in range(ranks)]


def take(each, count):
    """Returns the samples that every rank gets in the next `count` batches of this epoch, by batch and rank."""
    streams = [sampler.through(sampler) for sampler in each]
    return [[next(stream) for stream in streams] for _ in range(count)]


def seen(batches):
    return Counter(sample for batch in batches for part in batch for sample in part)


@given(st.data())
def test_any_change_of_ranks_resumes_with_what_was_not_seen(data):
    batch = data.draw(st.integers(1, 12))
    size = data.draw(st.integers(batch, 80))
    drop_last = data.draw(st.booleans())
    options = {"batch_size": batch, "seed": 5, "drop_last": drop_last, "shuffle": data.draw(st.booleans())}
    each = samplers(size, data.draw(st.integers(1, batch)), **options)
    batches = []
    while len(each[0]):
        count = data.draw(st.integers(1, len(each[0])))
        batches += take(each, count)
        (state,) = {tuple(sampler.state_dict().items()) for sampler in each}  # the same on every rank
        each = samplers(size, data.draw(st.integers(1, batch)), **options | {"seed": 0})
        for sampler in each:
            sampler.load_state_dict(dict(state))
    drawn = seen(batches)
    assert all(part for each_batch in batches for part in each_batch)
    whole = size // batch * batch
    assert len(drawn) == (whole if drop_last else size)
    assert all(sum(map(len, each_batch)) == batch for each_batch in batches[: size // batch])
    assert sum(drawn.values()) - len(drawn) < 12  # those that fill up the last batch, if any


def test_the_batches_do_not_depend_on_the_number_of_ranks():
    wanted = [sorted(batch[0]) for batch in take(samplers(50, 1, batch_size=6, seed=1), 8)]
    for ranks in (2, 3, 6):
        drawn = take(samplers(50, ranks, batch_size=6, seed=1), 8)
        assert [sorted(itertools.chain(*batch)) for batch in drawn] == wanted


def test_every_epoch_has_its_own_order():
    (sampler,) = samplers(40, 1, batch_size=4)
    epochs = [list(itertools.chain(*sampler.through(sampler))) for _ in range(3)]
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert (sampler.epoch, sampler.position) == (3, 0)
    other = shardopt.ResumableSampler(40, batch_size=4, seed=1)
    assert list(itertools.chain(*other)) != epochs[0]
    assert list(itertools.chain(*shardopt.ResumableSampler(40, batch_size=4, shuffle=False))) == list(range(40))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_workers_fetch_ahead_does_not_count(tmp_path, workers):
    dataset = TensorDataset(torch.arange(60))

    def loader_of(sampler):
        # Forked: what a test starts must not import torch again.
        context = "fork" if workers else None
        return DataLoader(dataset, batch_sampler=sampler, num_workers=workers, multiprocessing_context=context)

    drawn = []
    for sampler in samplers(60, 2, batch_size=10):
        stream = sampler.through(loader_of(sampler))
        drawn += [next(stream)[0].tolist() for _ in range(2)]
        del stream
    checkpoint.save(tmp_path / "it", {"data": sampler})
    for sampler in samplers(60, 3, batch_size=10, seed=9):
        checkpoint.load(tmp_path / "it", {"data": sampler})
        assert sampler.position == 20
        drawn += [batch[0].tolist() for batch in sampler.through(loader_of(sampler))]
        assert (sampler.epoch, sampler.position) == (1, 0)
    assert sorted(itertools.chain(*drawn)) == list(range(60))


def test_a_position_at_the_end_of_an_epoch_resumes_with_the_next():
    (sampler,) = samplers(10, 1, batch_size=4)
    stream = sampler.through(sampler)
    next(stream), next(stream)
    state = sampler.state_dict()
    (other,) = samplers(10, 1, batch_size=4)
    other.load_state_dict(state)
    assert list(other.through(other)) == []
    assert other.state_dict() == state | {"epoch": 1, "position": 0}


def test_another_data_set_is_refused_before_anything_changes(tmp_path):
    sampler, other = (shardopt.ResumableSampler(size, batch_size=2) for size in (10, 11))
    checkpoint.save(tmp_path / "it", {"data": sampler, "dataset_mean": torch.ones(2)})
    app = {"data": other, "dataset_mean": torch.zeros(2)}
    with pytest.raises(MismatchError, match=r"data\.size: found 10 in the checkpoint; required 11; make") as error:
        checkpoint.load(tmp_path / "it", app)
    assert app["dataset_mean"].sum() == 0
    (select,) = re.findall(r'select=r"(.*?)"', str(error.value))
    checkpoint.load(tmp_path / "it", app, select=select)
    assert app["dataset_mean"].sum() == 2


@pytest.mark.parametrize(
    "wrong",
    [{"batch_size": 3, "ranks": 4, "rank": 0}, {"batch_size": 11}, {"batch_size": 2, "ranks": 3, "rank": 0}],
    ids=str,
)
def test_wrong_options(wrong):
    with pytest.raises(ValueError, match=r"found .*; required .*; "):
        shardopt.ResumableSampler(10, **wrong)


@given(st.data())
def test_a_mixture_gives_each_source_its_share_and_each_sample_before_any_again(data):
    sizes = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    weights = data.draw(st.lists(st.floats(0.5, 4), min_size=len(sizes), max_size=len(sizes)))
    epoch_size, shuffle, drop_last = data.draw(st.integers(20, 60)), data.draw(st.booleans()), data.draw(st.booleans())
    options = {"weights": weights, "batch_size": 4, "shuffle": shuffle, "drop_last": drop_last}
    sampler = shardopt.data.MixtureSampler(sizes, epoch_size=epoch_size, **options, rank=0, ranks=1)
    epoch_size -= epoch_size % 4 if drop_last else 0
    exact = [weight / sum(weights) * epoch_size for weight in weights]
    assert sum(sampler.shares) == epoch_size
    assert all(abs(share - wanted) < 1 for share, wanted in zip(sampler.shares, exact, strict=True))
    drawn = Counter()
    for epoch in range(1, 4):
        drawn.update(itertools.chain(*sampler.through(sampler)))
        first = 0
        for size, share in zip(sizes, sampler.shares, strict=True):
            times = [drawn[number] for number in range(first, first + size)]
            assert sum(times) == epoch * share and max(times) - min(times) <= 1
            first += size
    assert drawn.total() == 3 * epoch_size


def test_a_mixture_resumes_on_other_ranks_and_is_refused_with_other_weights():
    def of(ranks, weights=(3, 1)):
        options = {"weights": weights, "batch_size": 6, "seed": 2, "ranks": ranks}
        return [shardopt.data.MixtureSampler([40, 20], rank=rank, **options) for rank in range(ranks)]

    wanted = [sorted(batch[0]) for batch in take(of(1), 10)]
    each = of(3)
    found = take(each, 4)
    others = of(2)
    for sampler in others:
        sampler.load_state_dict(each[0].state_dict())
    assert [sorted(itertools.chain(*batch)) for batch in found + take(others, 6)] == wanted
    with pytest.raises(MismatchError, match=r"shares: found \[45, 15\] in the checkpoint; required \[30, 30\]; make"):
        of(2, (1, 1))[0].load_state_dict(each[0].state_dict())
    (plain,) = samplers(60, 1, batch_size=6)
    with pytest.raises(MismatchError, match=r"sizes: found no mixture in the checkpoint; required \[40, 20\]"):
        others[0].load_state_dict(plain.state_dict())
    with pytest.raises(MismatchError, match=r"shares: found \[45, 15\] in the checkpoint; required no mixture"):
        plain.load_state_dict(others[0].state_dict())
    evenly = shardopt.data.MixtureSampler([6, 3], weights=[2, 1], batch_size=3, shuffle=False)
    assert [[*batch] for batch in evenly] == [[0, 6, 1], [2, 7, 3], [4, 8, 5]]


def mixture(state=None, batch_size=4, **options):
    sampler = shardopt.data.MixtureSampler(
        [30, 20], **{"weights": [3, 1], "epoch_size": 10} | options, batch_size=batch_size, rank=0, ranks=1
    )
    if state is not None:
        sampler.load_state_dict(state)
    return sampler


def rest(sampler, epochs):
    return [list(sampler.through(sampler)) for _ in range(epochs)]


def test_a_mixture_resumes_in_the_epochs_of_its_checkpoint(caplog):
    new = mixture()
    rest(new, 1)
    state = new.state_dict()
    assert new.shares == state["shares"] == [6, 2] and len(new) == 2
    assert [*itertools.chain(*itertools.chain(*rest(mixture(state, batch_size=2), 3)))] == [
        *itertools.chain(*itertools.chain(*rest(mixture(state), 3)))
    ]
    assert [record.getMessage() for record in caplog.records] == [
        "batch_size is the code's: 2, and 4 in the checkpoint [data-position]"
    ]
    # An earlier version has left out the last 2 of 10.
    earlier = {name: each for name, each in state.items() if name != "epoch_size"} | {"size": 10, "shares": [8, 2]}
    resumed = mixture(earlier)
    assert resumed.state_dict() == earlier | {"epoch_size": 10}
    assert rest(resumed, 2) == [epoch[:2] for epoch in rest(mixture(earlier, drop_last=False), 2)]
    assert "the last 2 of each are left out" in caplog.text
    resumed.load_state_dict(state)
    assert resumed.shares == [6, 2]
    for other in ({"epoch_size": 15}, {"weights": [1, 1]}, {"weights": [9, 8]}):
        for each in (state, earlier):
            with pytest.raises(MismatchError, match=r"found .* in the checkpoint"):
                mixture(each, **other)


def test_epochs_of_a_mixture_are_not_rounded_to_batches_where_a_source_would_give_nothing(caplog):
    options = {"weights": [0.94, 0.06], "epoch_size": 12, "batch_size": 8}
    new = mixture(**options)
    assert new.shares == [11, 1] and len(new) == 1
    assert "the last 4 of each are left out" in caplog.text and "begins anew" not in caplog.text
    rest(new, 1)
    state = new.state_dict()
    earlier = {name: each for name, each in state.items() if name != "epoch_size"}
    assert rest(mixture(state, **options), 2) == rest(mixture(earlier, **options), 2) == rest(new, 2)
    with pytest.raises(ValueError, match=r"shares \[8, 0\] of an epoch of 8 samples"):
        mixture(**options | {"epoch_size": 8})


@pytest.mark.parametrize("wrong", [{"weights": [1]}, {"weights": [1, 0]}, {"weights": [1000, 1]}], ids=str)
def test_wrong_mixtures(wrong):
    with pytest.raises(ValueError, match=r"found .*; required .*; "):
        shardopt.data.MixtureSampler([30, 30], batch_size=4, **wrong)


def drawn_in(steps, state, save_at, workers, resumable):
    """Returns torch's random numbers in a loop over epochs of 8 batches, and the state at one step."""
    torch.manual_seed(3)
    data = shardopt.ResumableSampler(64, batch_size=8, seed=0)
    samples = TensorDataset(torch.zeros(64, 1))
    loader = DataLoader(samples, batch_sampler=data, num_workers=workers)
    if resumable:
        data = loader = ResumableLoader(samples, batch_size=8, num_workers=workers)
    app = {"data": data, "random": shardopt.RandomState(on_resize="raise"), "step": 0}
    if state is not None:
        checkpoint.load(state, app)
    numbers = []
    wrap = prefetched if resumable is None else lambda loader: loader
    while app["step"] < steps:
        for _ in loader if resumable else data.through(wrap(loader)):
            app["step"] += 1
            numbers.append(torch.rand(()).item())
            if save_at is not None and app["step"] == save_at[0]:
                checkpoint.save(save_at[1], app)
            if app["step"] == steps:
                break
    return numbers


def prefetched(loader):
    """Opens the loader when the first batch is asked for, as most that fetch batches ahead do."""
    yield from loader


@pytest.mark.parametrize(
    ("workers", "resumable", "at"),
    [
        *((0, resumable, at) for resumable in (False, True, None) for at in (3, 8, 9)),
        *((1, False, at) if at == 3 else pytest.param(1, False, at, marks=pytest.mark.exhaustive) for at in (3, 8, 9)),
        *((1, None, at) if at == 9 else pytest.param(1, None, at, marks=pytest.mark.exhaustive) for at in (3, 8, 9)),
    ],
)
def test_random_numbers_of_a_resumed_epoch_are_those_of_an_unbroken_one(tmp_path, at, workers, resumable):
    """Each loader draws a seed for its workers as it is opened; an epoch that is resumed is opened twice."""
    unbroken = drawn_in(12, None, None, workers, resumable)
    drawn_in(at, None, (at, tmp_path / "c"), workers, resumable)
    assert drawn_in(12, tmp_path / "c", None, workers, resumable) == unbroken[at:]


def test_seeds_of_workers_differ_by_epoch_and_rank():
    class Opened:
        def __iter__(self):
            seeds.append(torch.initial_seed())
            return iter([])

    seeds = []
    for sampler in samplers(64, 2, batch_size=8):
        for _ in range(3):
            assert list(sampler.through(Opened())) == []
    assert len(set(seeds)) == 6


def test_nothing_is_said_of_a_loader_that_is_opened_before_through(caplog):
    """Usual loops do so, and no mark tells those that a resume gives other random numbers."""
    sampler = shardopt.ResumableSampler(8, batch_size=4)
    list(sampler.through(zip(DataLoader(torch.arange(8), batch_sampler=sampler), range(2), strict=True)))
    assert not caplog.records


@pytest.mark.parametrize("at", [2, 8], ids=["within", "at the end"])
def test_a_loop_that_goes_on_after_a_load_is_refused(at):
    (sampler,) = samplers(64, 1, batch_size=8)
    loop = sampler.through(sampler)
    next(loop)
    state = sampler.state_dict()
    for _ in range(at - 1):
        next(loop)
    sampler.load_state_dict(state)
    with pytest.raises(MismatchError, match=r"sample 8, which was loaded.*begin it again"):
        next(loop)
    assert sampler.state_dict() == state
    assert len(list(sampler.through(sampler))) == 7 and sampler.epoch == 1
