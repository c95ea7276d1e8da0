"""Resume is exact: four steps, save, load into a fresh optimizer in another order, four steps more = eight in one go.

Every elementwise algorithm, option set and implementation, over parameters in every layout at once, on real ranks.
"""

import os

import pytest
import torch
import torch.distributed as dist

import shardopt
from shardopt import checkpoint
from shardopt.sharding.view import view_of
from tests.harness import run_ranks
from tests.support.cases import ELEMENTWISE, ELEMENTWISE_CASES, astray
from tests.support.layout_runs import MIXED, STEPS, Place, Run, absent

HALF = STEPS // 2
LATE = "columns"
"""A parameter whose first gradient comes after the checkpoint, so that it is saved before it had a step."""
FLIPPED = "even|plain|grid"
DEADLINE_SECONDS = 140.0


def without_gradient(name, step, alone):
    return absent(name, step, alone) or (name == LATE and step <= HALF)


def a_run(name, options, dtype, place, backwards):
    """Two groups; parameters and groups in one order or in the other."""
    groups = [{"match": f"^({FLIPPED})$", "maximize": not options.get("maximize", False)}, {"match": "."}]
    if backwards:
        groups = [{"match": f"^(?!({FLIPPED})$)"}, groups[0]]
    return Run(
        reversed(MIXED) if backwards else MIXED,
        dtype,
        lambda parameters: shardopt.keyed(name, parameters, groups=groups, **options),
        place,
        without_gradient,
    )


def app(run):
    return {"model": run.parameters, "optimizer": run.optimizer}


def pieces(run):
    """Everything that training depends on, as this rank holds it: name → box → values, or a plain value."""
    tree = {"": run.parameters, **run.optimizer.state_dict()["state"]}
    held = {f"{key}.{name}": value for key, own in tree.items() for name, value in own.items()}
    for key, value in held.items():
        if isinstance(value, torch.Tensor):
            held[key] = {piece.box: piece.tensor.clone() for piece in view_of(value).pieces}
    return held


def save_and_continue(root, cases):
    place, after = Place(dist.get_world_size()), []  # whose meshes have groups
    for number, (name, options, dtype) in enumerate(cases):
        run = a_run(name, options, dtype, place, backwards=False)
        run.optimizer.init_state()
        run.steps(0, HALF)
        checkpoint.save(os.path.join(root, str(number)), app(run))
        after.append(pieces(run.steps(HALF, STEPS)))
    return after


def resume(root, cases):
    place, after = Place(dist.get_world_size()), []  # whose meshes have groups
    for number, (name, options, dtype) in enumerate(cases):
        run = a_run(name, options, dtype, place, backwards=True)
        with torch.no_grad():
            for parameter in run.parameters.values():
                parameter.zero_()
        run.optimizer.init_state()
        checkpoint.load(os.path.join(root, str(number)), app(run))
        after.append(pieces(run.steps(HALF, STEPS)))
    return after


def put_together(by_rank):
    """Whole values of what all ranks hold; boxes that several hold must be equal to the bit."""
    wholes = {}
    for key in by_rank[0]:
        parts = [(box, tensor) for held in by_rank if isinstance(held[key], dict) for box, tensor in held[key].items()]
        if not parts:
            (wholes[key],) = {repr(held[key]) for held in by_rank}
            continue
        shape = [max(ends) for ends in zip(*(box.ends for box, _ in parts), strict=True)]
        wholes[key] = torch.full(shape, float("nan"), dtype=parts[0][1].dtype)
        for box, tensor in parts:
            part = wholes[key][tuple(map(slice, box.offsets, box.ends))]
            assert tensor.dtype == part.dtype
            assert part.isnan().all() or torch.equal(part, tensor), key
            part.copy_(tensor)
    return wholes


def differing(one, other, exact):
    """The keys of those values that are not equal: to the bit, or up to a few units in the last place."""
    if one.keys() != other.keys():
        return sorted(one.keys() ^ other.keys())
    return [key for key in one if not equal(one[key], other[key], exact)]


def equal(one, other, exact):
    if not isinstance(one, torch.Tensor):
        return one == other
    if exact:
        return one.dtype == other.dtype and torch.equal(one, other)
    largest = other.abs().max().item()
    return one.dtype == other.dtype and (one - other).abs().max().item() <= 8 * torch.finfo(one.dtype).eps * largest


def cases_of(algorithm, usual):
    """All in fp32, and the first of each implementation in bf16; the usual ones are those first, in both."""
    met, cases = set(), []
    for case in ELEMENTWISE_CASES:
        name, options = case.values
        if name != algorithm:
            continue
        kind = (options.get("foreach"), options.get("fused"))
        if kind not in met or not usual or "dampening" in options:
            cases.append((name, options, torch.float32))
        if kind not in met and not astray(name, options, torch.bfloat16):
            cases.append((name, options, torch.bfloat16))
        met.add(kind)
    return cases


def check(root, cases, saved_by, loaded_by):
    saved = run_ranks(saved_by, save_and_continue, root, cases, deadline_seconds=DEADLINE_SECONDS)
    for ranks in loaded_by:
        loaded = run_ranks(ranks, resume, root, cases, deadline_seconds=DEADLINE_SECONDS)
        for number, (name, options, dtype) in enumerate(cases):
            one, other = ([after[number] for after in run] for run in (loaded, saved))
            exact = ranks == saved_by or (dtype == torch.float32 and not options.get("fused"))
            actual = differing(put_together(one), put_together(other), exact)
            assert actual == [], (name, options, dtype, saved_by, ranks)


def test_resume_is_exact(tmp_path):
    """The first case of each algorithm, on other ranks."""
    usual = [cases_of(algorithm, usual=True)[0] for algorithm in ELEMENTWISE]
    check(str(tmp_path), usual, 2, (4,))


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_resume_is_exact_for_the_usual(tmp_path):
    usual = [case for algorithm in ELEMENTWISE for case in cases_of(algorithm, usual=True)]
    check(str(tmp_path), usual, 2, (2, 4))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, (1, 4)), (2, (2, 1)), (4, (4, 2, 1))], ids=str)
@pytest.mark.parametrize("algorithm", ELEMENTWISE)
def test_resume_is_exact_for_all(tmp_path, algorithm, saved_by, loaded_by):
    check(str(tmp_path), cases_of(algorithm, usual=False), saved_by, loaded_by)
