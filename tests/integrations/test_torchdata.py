"""torchdata's StatefulDataLoader over a change of ranks: each sample of an epoch once."""

import copy
import importlib.util
import itertools
import os
import pickle
import re
import signal
import subprocess
import sys
import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, TensorDataset

from shardopt import RandomState, ResumableSampler, checkpoint
from shardopt.errors import MismatchError, OptionError
from shardopt.runtime.signals import Listener
from tests.harness import RanksFailed, run_ranks

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("torchdata") is None,
        reason="torchdata is not installed (launch/test_integrations.sh)",
    ),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # by torchdata, at each loader
]

SIZE, BATCH = 120, 12
SOURCES = range(50), range(50, 80), range(80, 96)


class Stream(IterableDataset):
    """Numbers of a rank's own."""

    def __iter__(self):
        return iter(range(dist.get_rank(), SIZE, dist.get_world_size()))


def loader_of(workers):
    from shardopt.integrations.torchdata import ResumableStatefulLoader

    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    mixed = ConcatDataset([TensorDataset(torch.arange(50)), TensorDataset(torch.arange(50, SIZE))])
    # The ranks of tests are made by a fork server, which would import torch for each worker.
    options = {"multiprocessing_context": "fork"} if workers else {}
    return ResumableStatefulLoader(mixed, batch_size=BATCH, seed=3, num_workers=workers, **options)


def mixture():
    """Three sources, of 50, 30 and 16 numbers."""
    return ConcatDataset([TensorDataset(torch.tensor(part)) for part in SOURCES])


def mixed_loader():
    """An epoch of 96: 48, 36 and 12 of the sources."""
    from shardopt.integrations.torchdata import ResumableStatefulLoader

    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    return ResumableStatefulLoader(mixture(), batch_size=BATCH, seed=3, weights=[4, 3, 1])


def packed_loader():
    """Documents of 1 to 7 tokens, packed into samples of 16."""
    from shardopt.integrations.packed import Packed
    from shardopt.integrations.torchdata import ResumableStatefulLoader

    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    lengths = [1 + number % 7 for number in range(SIZE)]
    packed = Packed(torch.arange(SIZE), lengths, capacity=16)
    assert all(sum(lengths[each] for each in packed[i]) <= 16 for i in range(len(packed)))
    return ResumableStatefulLoader(
        packed,
        batch_size=BATCH,
        seed=3,
        drop_last=False,
        collate_fn=lambda packs: (torch.tensor([*itertools.chain(*packs)]),),
    )


def see(source, path, batches, workers, make=None):
    """Resumes from a checkpoint, takes so many batches, saves. Returns the samples that this rank was given."""
    loader = make() if make is not None else loader_of(workers)
    app = {"data": loader}
    if source:
        checkpoint.load(source, app)
    seen = [number for (batch,) in itertools.islice(loader, batches) for number in batch.tolist()]
    checkpoint.save(path, app)
    return seen, loader.state_dict()["epoch"]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_four_ranks_then_two_then_three_see_each_sample_of_an_epoch_once(tmp_path, workers):
    a, b, c = (str(tmp_path / name) for name in "abc")
    parts = [
        run_ranks(4, see, None, a, 3, workers),
        run_ranks(2, see, a, b, 4, workers),
        run_ranks(3, see, b, c, None, workers),
    ]
    seen = [number for ranks in parts for numbers, _ in ranks for number in numbers]
    assert sorted(seen) == [*range(SIZE)]
    assert [len(numbers) for ranks in parts for numbers, _ in ranks] == [9] * 4 + [24] * 2 + [12] * 3
    assert {epoch for _, epoch in parts[2]} == {1}
    again = run_ranks(1, see, c, str(tmp_path / "d"), None, workers)
    assert sorted(again[0][0]) == [*range(SIZE)] and again[0][0] != seen


def test_a_mixture_resumes_on_other_ranks_and_sees_each_sample_of_a_source_before_any_again(tmp_path):
    a, b, c, d = (str(tmp_path / name) for name in "abcd")
    parts = [
        run_ranks(4, see, None, a, 3, 0, mixed_loader),
        run_ranks(2, see, a, b, 2, 0, mixed_loader),
        run_ranks(3, see, b, c, None, 0, mixed_loader),
    ]
    first = Counter(number for ranks in parts for numbers, _ in ranks for number in numbers)
    shares = [sum(times for number, times in first.items() if number in source) for source in SOURCES]
    assert shares == [48, 36, 12]
    second = first + Counter(run_ranks(1, see, c, d, None, 0, mixed_loader)[0][0])
    for seen, passes in ((first, (48 / 50, 36 / 30, 12 / 16)), (second, (96 / 50, 72 / 30, 24 / 16))):
        for source, done in zip(SOURCES, passes, strict=True):
            assert {seen[number] for number in source} == {int(done), int(done) + 1}, (source, done)
    with pytest.raises(RanksFailed, match=r"data\.(size|sizes|shares): found .*; make the sampler .* weights"):
        run_ranks(2, see, a, d, 1, 0, loader_of_another_mixture)


def loader_of_another_mixture():
    from shardopt.integrations.torchdata import ResumableStatefulLoader

    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    return ResumableStatefulLoader(mixture(), batch_size=BATCH, weights=[1, 1, 1])


def test_packed_documents_resume_on_other_ranks(tmp_path):
    a, b, c = (str(tmp_path / name) for name in "abc")
    parts = [
        run_ranks(4, see, None, a, 1, 0, packed_loader),
        run_ranks(2, see, a, b, 1, 0, packed_loader),
        run_ranks(3, see, b, c, None, 0, packed_loader),
    ]
    seen = [number for ranks in parts for numbers, _ in ranks for number in numbers]
    assert sorted(seen) == [*range(SIZE)]


def save_as(path, plain):
    """Takes a batch of torch's DataLoader, or of torchdata's, and saves; returns it, and the rest of the epoch."""
    batches, data = either(plain)
    seen = next(batches)[0].tolist()
    checkpoint.save(path, {"data": data})
    return seen, [number for (batch,) in batches for number in batch.tolist()]


def load_as(path, plain):
    batches, data = either(plain)
    checkpoint.load(path, {"data": data})
    return [number for (batch,) in batches for number in batch.tolist()]


def either(plain):
    if not plain:
        loader = loader_of(0)
        return iter(loader), loader
    data = TensorDataset(torch.arange(SIZE))
    sampler = ResumableSampler(SIZE, batch_size=BATCH, seed=3)
    loader = DataLoader(data, batch_sampler=sampler)
    return sampler.through(loader), sampler


@pytest.mark.parametrize("plain", [False, True], ids=["to plain torch", "from plain torch"])
def test_positions_go_between_torchdata_and_plain_torch(tmp_path, plain):
    path = str(tmp_path / "saved")
    saved = run_ranks(2, save_as, path, plain)
    rest = run_ranks(2, load_as, path, not plain)
    assert rest == [rest_of_it for _, rest_of_it in saved]
    assert sorted(number for (seen, left) in saved for number in seen + left) == [*range(SIZE)]


def stream(source, path, batches):
    from torchdata.stateful_dataloader import StatefulDataLoader

    from shardopt.integrations.torchdata import RankPosition

    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    loader = StatefulDataLoader(Stream(), batch_size=2)
    app = {"data": RankPosition(loader)}
    if source:
        try:
            checkpoint.load(source, app)
        except MismatchError as error:
            (select,) = re.findall(r'select=(r".*")', error.problems[0].remedy)
            return [(problem.key, problem.found, problem.required, select) for problem in error.problems]
    seen = [number for batch in itertools.islice(loader, batches) for number in batch.tolist()]
    checkpoint.save(path, app)
    return seen


def test_a_stream_resumes_on_as_many_ranks_and_is_refused_on_others(tmp_path):
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    first, then = run_ranks(2, stream, None, a, 5), run_ranks(2, stream, a, b, 5)
    assert [one + other for one, other in zip(first, then, strict=True)] == [[*range(0, 40, 2)], [*range(1, 40, 2)]]
    assert (
        run_ranks(3, stream, a, b, 5)
        == [[("data.position", "values of 2 ranks", "3 ranks", 'r"^(?!data(\\.|$))"')]] * 3
    )


def of_workers(workers):
    from torchdata.stateful_dataloader import StatefulDataLoader

    from shardopt.integrations.torchdata import RankPosition

    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    options = {"multiprocessing_context": "fork"} if workers else {}
    loader = StatefulDataLoader(Pids(), batch_size=1, num_workers=workers, **options)
    return loader, RankPosition(loader)


class Pids(TensorDataset):
    """Each sample is the process that made it."""

    def __init__(self):
        super().__init__(torch.arange(8))

    def __getitem__(self, number):
        return os.getpid()


def signalled(path):
    """SIGTERM to the process group, as by torchrun; then a load by loaders of other workers."""
    os.setsid()
    loader, position = of_workers(1)
    app = {"step": 1, "data": position}
    batches = iter(loader)  # before anything listens
    (worker,) = next(batches).tolist()
    listener = Listener(signal.SIGTERM, lambda: None, lambda: None)
    sender = f"import os, signal; os.killpg({os.getpid()}, signal.SIGTERM)"
    subprocess.run([sys.executable, "-c", sender], start_new_session=True, check=True)
    then = next(batches).tolist() == [worker]
    checkpoint.save(path, app)
    listener.close()
    told = []
    for workers in (0, 2):
        app = {"step": 0, "data": of_workers(workers)[1]}
        with pytest.raises(MismatchError) as caught:
            checkpoint.load(path, app)
        (problem,) = caught.value.problems
        told.append((problem.key, problem.found, problem.required, app["step"]))
        (select,) = re.findall(r'select=r"(.*)"', problem.remedy)
        told.append((checkpoint.load(path, app, select=select).loaded, app["step"]))
    return then, told


def test_a_position_outlives_a_signal_to_the_group_and_is_refused_by_other_workers(tmp_path):
    found, rest = "the position of 1 workers", (("step",), 1)
    told = [each for n in (0, 2) for each in (("data.position", found, f"that of num_workers={n}", 0), rest)]
    assert run_ranks(1, signalled, str(tmp_path)) == [(True, told)]


def stream_of_mesh(source, path, tensor):
    """As `stream`, with so many neighbouring ranks that share a batch."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    from shardopt.integrations.torchdata import RankPosition

    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    rank, ranks = dist.get_rank() // tensor, dist.get_world_size() // tensor
    loader = StatefulDataLoader(range(rank, SIZE, ranks), batch_size=2)
    app = {"data": RankPosition(loader, rank=rank, ranks=ranks)}
    if source:
        try:
            checkpoint.load(source, app)
        except MismatchError as error:
            return sorted(problem.key for problem in error.problems)
    seen = [number for batch in itertools.islice(loader, 3) for number in batch.tolist()]
    checkpoint.save(path, app)
    return seen


def test_a_stream_resumes_in_the_same_mesh_and_is_refused_in_another_of_as_many_ranks(tmp_path):
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert run_ranks(2, stream_of_mesh, None, a, 2) == [[*range(6)]] * 2
    assert run_ranks(2, stream_of_mesh, a, b, 2) == [[*range(6, 12)]] * 2
    keys = ["data.position of rank 0 of 1", "data.position of rank 0 of 2", "data.position of rank 1 of 2"]
    assert run_ranks(2, stream_of_mesh, a, b, 1) == [keys] * 2


def test_a_stream_has_no_position_for_other_ranks():
    from shardopt.integrations.torchdata import ResumableStatefulLoader

    with pytest.raises(OptionError, match="a stream: what a rank has seen"):
        ResumableStatefulLoader(Stream(), batch_size=4)
    with pytest.raises(OptionError, match=r"ConcatDataset\(\[\.\.\.\]\), which tells its sources"):
        ResumableStatefulLoader(TensorDataset(torch.arange(9)), batch_size=4, weights=[1, 2])
    with pytest.raises(OptionError, match="the order is this loader's"):
        ResumableStatefulLoader(TensorDataset(torch.arange(9)), batch_size=4, sampler=[1, 2])


@pytest.mark.filterwarnings("ignore:using in_order=False")
def test_batches_that_workers_give_in_any_order_are_refused():
    from shardopt.integrations.torchdata import ResumableStatefulLoader

    with pytest.raises(OptionError, match="in_order: found False, with workers"):
        ResumableStatefulLoader(TensorDataset(torch.arange(8)), batch_size=4, num_workers=2, in_order=False)


def test_the_epoch_of_a_loader_is_that_of_its_next_batch():
    loader = loader_of(workers=0)
    at = [loader.epoch for _ in range(2) for _ in loader]
    assert at == [0] * 9 + [1] * 10 + [2]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_is_opened_again_draws_none_of_the_programs_random_numbers(workers):
    loader = loader_of(workers)
    torch.manual_seed(0)
    expected = torch.get_rng_state()
    for _ in range(2):
        next(iter(loader))
        assert torch.equal(torch.get_rng_state(), expected)


@pytest.mark.parametrize("order", [("data", "random"), ("random", "data")], ids="-".join)
@pytest.mark.parametrize("at", [0, 2])
def test_a_stream_resumes_beside_the_random_state_of_dropout(tmp_path, at, order):
    path, whole, resumed = str(tmp_path), [], []
    torch.manual_seed(0)
    app = app_beside_random_state(order)
    if not at:
        checkpoint.save(path, app)
    for number, batch in enumerate(app["data"]._loader, 1):
        whole.append((batch.tolist(), torch.rand(1).item()))
        if number == at:
            checkpoint.save(path, app)
    torch.manual_seed(1)
    app = app_beside_random_state(order)
    checkpoint.load(path, app)
    for batch in app["data"]._loader:
        resumed.append((batch.tolist(), torch.rand(1).item()))
    assert len(whole) == 6 and resumed == whole[at:]


def app_beside_random_state(order):
    from torchdata.stateful_dataloader import StatefulDataLoader

    from shardopt.integrations.torchdata import RankPosition

    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    data = RankPosition(StatefulDataLoader(range(12), batch_size=2))
    entries = {"data": data, "random": RandomState(on_resize="raise")}
    return {name: entries[name] for name in order}


def test_a_position_loaded_in_the_middle_of_a_loop_is_refused():
    loader = loader_of(0)
    saved = loader.state_dict()
    with pytest.raises(MismatchError, match="leave the loop after a load"):
        for _ in loader:
            loader.load_state_dict(saved)


def test_a_ranks_position_loaded_in_the_middle_of_a_loop_is_refused_and_after_it_is_not():
    data, seen = app_beside_random_state(["data"])["data"], []
    saved = data.state_dict()
    for batch in data._loader:
        seen.append(batch.tolist())
        break
    data.load_state_dict(saved)
    with pytest.raises(MismatchError, match="leave the loop after a load"):
        for batch in data._loader:
            seen.append(batch.tolist())
            data.load_state_dict(saved)
    assert next(iter(data._loader)).tolist() == [0, 1] and seen == [[0, 1]] * 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_loader_is_copied_with_the_position_that_was_loaded(copied):
    data = app_beside_random_state(["data"])["data"]
    next(iter(data._loader))
    saved = data.state_dict()
    data = app_beside_random_state(["data"])["data"]
    data.load_state_dict(saved)
    assert [next(iter(each)).tolist() for each in (copied(data._loader), data._loader)] == [[2, 3]] * 2
