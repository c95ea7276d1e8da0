"""torchdata's StatefulDataLoader over a change of ranks: each sample of an epoch once."""

import importlib.util
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import ConcatDataset, IterableDataset, TensorDataset

from shardopt import checkpoint
from shardopt.errors import MismatchError, OptionError
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("torchdata") is None,
        reason="torchdata is not installed (launch/test_integrations.sh)",
    ),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # by torchdata, at each loader
]

SIZE, BATCH = 120, 12


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


def see(source, path, batches, workers):
    """Goes on from a checkpoint, takes so many batches, saves. Returns the samples that this rank was given."""
    loader = loader_of(workers)
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
            return [(problem.key, problem.found, problem.required) for problem in error.problems]
    seen = [number for batch in itertools.islice(loader, batches) for number in batch.tolist()]
    checkpoint.save(path, app)
    return seen


def test_a_stream_goes_on_on_as_many_ranks_and_is_refused_on_others(tmp_path):
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    first, then = run_ranks(2, stream, None, a, 5), run_ranks(2, stream, a, b, 5)
    assert [one + other for one, other in zip(first, then, strict=True)] == [[*range(0, 40, 2)], [*range(1, 40, 2)]]
    assert run_ranks(3, stream, a, b, 5) == [[("data.position", "values of 2 ranks", "3 ranks")]] * 3


def test_a_stream_has_no_position_for_other_ranks():
    from shardopt.integrations.torchdata import ResumableStatefulLoader

    with pytest.raises(OptionError, match="which is a stream"):
        ResumableStatefulLoader(Stream(), batch_size=4)
    with pytest.raises(OptionError, match="the order is this loader's"):
        ResumableStatefulLoader(TensorDataset(torch.arange(9)), batch_size=4, sampler=[1, 2])
