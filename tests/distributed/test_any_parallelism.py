"""Any split of a model over ranks, saved strictly, and loaded strictly into any other: it trains as on one process."""

from itertools import groupby

import pytest
import torch

from shardopt import checkpoint
from shardopt.sharding.box import Box, cover_faults
from tests.harness import run_ranks
from tests.support import pipelined
from tests.support.parallel_jobs import CASES, SPLITS, TIED, Job, Split, compare, places, whole_state

RANKS_STAY = True

AFTER = 3  # steps after the load

_BY_RANKS = {ranks: [*splits] for ranks, splits in groupby(sorted(SPLITS, key=lambda s: s.ranks), lambda s: s.ranks)}


def train_alone(path):
    """What one process makes of every case, without a checkpoint."""
    place = places()
    expected = {}
    for name, case in CASES.items():
        job = Job(place(SPLITS[0]), case)
        job.train(case.before, frozen=True)
        job.train(AFTER, frozen=False)
        expected[name] = whole_state(job)
    torch.save(expected, path)


def save(path, chosen):
    """Trains and saves each split under its cases."""
    place = places()
    for split, cases in chosen:
        for name in cases:
            job = Job(place(split), CASES[name])
            job.train(CASES[name].before, frozen=True)
            checkpoint.save(f"{path}/{split}/{name}", job.app, tied=TIED)


def load(path, chosen):
    """Loads what was saved by one split into another, trains, and compares; returns what differs and what is held."""
    expected = torch.load(f"{path}/expected", weights_only=False)
    place = places()
    results = {}
    for source, split, name in chosen:
        job = Job(place(split), CASES[name], fresh=True)
        checkpoint.load(f"{path}/{source}/{name}", job.app, init_state=True, tied=TIED)
        job.train(AFTER, frozen=False)
        job.optimizer.check_agreement()
        results[source, split, name] = compare(job, expected[name], CASES[name].exact)
    return results


def check(path, saved, loaded):
    """Loads by the ranks that each split takes; every value of one process is to be on some rank, and right."""
    for ranks, splits in _BY_RANKS.items():
        chosen = [each for each in loaded if each[1] in splits]
        if not chosen:
            continue
        by_rank = run_ranks(ranks, load, str(path), chosen, deadline_seconds=600.0)
        for each in chosen:
            wrong = [f"rank {rank}: {line}" for rank, of_rank in enumerate(by_rank) for line in of_rank[each][0]]
            assert wrong == [], [*map(str, each)]
            held = {}
            for of_rank in by_rank:
                for key, boxes in of_rank[each][1].items():
                    held.setdefault(key, set()).update(boxes)
            whole = saved[each[2]]
            assert held.keys() == whole.keys() - {"rates"}
            for key, boxes in held.items():
                if isinstance(whole[key], torch.Tensor):
                    assert cover_faults(tuple(whole[key].shape), [Box(*box) for box in boxes]) == [], key


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    made = tmp_path_factory.mktemp("splits")
    run_ranks(1, train_alone, str(made / "expected"))
    return made


@pytest.fixture(scope="module")
def expected(path):
    return torch.load(path / "expected", weights_only=False)


def save_all(path, cases_of):
    for ranks, splits in _BY_RANKS.items():
        run_ranks(ranks, save, str(path), [(s, cases_of(s)) for s in splits], deadline_seconds=600.0)


def test_each_split_into_another(path, expected):
    """Each split is saved once and loaded once, each into one far from it; each case comes up at least once."""
    names, count = [*CASES], len(SPLITS)
    case_of = {split: names[i % len(names)] for i, split in enumerate(SPLITS)}
    save_all(path / "few", lambda split: [case_of[split]])
    (path / "few" / "expected").symlink_to(path / "expected")
    check(path / "few", expected, [(s, SPLITS[(i + 5) % count], case_of[s]) for i, s in enumerate(SPLITS)])


@pytest.fixture(scope="module")
def all_saved(path):
    save_all(path / "all", lambda split: [*CASES])
    (path / "all" / "expected").symlink_to(path / "expected")
    return path / "all"


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", SPLITS, ids=str)
def test_every_split_into_every_split(all_saved, expected, target):
    check(all_saved, expected, [(source, target, name) for source in SPLITS for name in CASES])


PIPELINED = ("adamw in fp32", "adamw that clips")
BEFORE = 3


def train_pipeline_alone(path):
    place = places()
    expected = {}
    for name in PIPELINED:
        job = Job(place(SPLITS[0]), CASES[name])
        losses = pipelined.train(job, BEFORE + AFTER)
        expected[name] = losses, whole_state(job)
    torch.save(expected, path)


def save_pipeline(path, splits):
    expected = torch.load(path.parent / "expected", weights_only=False)
    place = places()
    for split in splits:
        for name in PIPELINED:
            job = Job(place(split), CASES[name])
            assert pipelined.train(job, BEFORE) == pytest.approx(expected[name][0][:BEFORE], rel=1e-5)
            checkpoint.save(f"{path}/{split}/{name}", job.app, tied=TIED)


def load_pipeline(path, sources, splits):
    expected = torch.load(path.parent / "expected", weights_only=False)
    place = places()
    for split in splits:
        for source in sources:
            for name in PIPELINED:
                losses, state = expected[name]
                job = Job(place(split), CASES[name], fresh=True)
                checkpoint.load(f"{path}/{source}/{name}", job.app, init_state=True, tied=TIED)
                assert pipelined.train(job, AFTER) == pytest.approx(losses[BEFORE:], rel=1e-5)
                if CASES[name].dtype == torch.float64:
                    assert compare(job, state, exact=False)[0] == [], [str(source), str(split), name]


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory):
    made = tmp_path_factory.mktemp("pipelines")
    run_ranks(1, train_pipeline_alone, str(made / "expected"))
    return made


@pytest.fixture
def pipeline_path(trained_alone, request):
    """A folder of the test's own, beside what a job of one process has trained."""
    return trained_alone / request.node.name


@pytest.mark.exhaustive
def test_losses_continue_where_gradients_are_summed(pipeline_path):
    """Forward and backward through stages, and losses and gradients added up over ranks."""
    first, second = Split(stages=2, shards=2), Split(experts=2, shards=2, style="tp")
    run_ranks(4, save_pipeline, pipeline_path, [first, second])
    run_ranks(4, load_pipeline, pipeline_path, [first, second], [Split(stages=4), Split(stages=2, experts=2)])


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_losses_continue_by_every_split(pipeline_path):
    for ranks, splits in _BY_RANKS.items():
        run_ranks(ranks, save_pipeline, pipeline_path, splits, deadline_seconds=300.0)
    for ranks, splits in _BY_RANKS.items():
        run_ranks(ranks, load_pipeline, pipeline_path, SPLITS, splits, deadline_seconds=600.0)
