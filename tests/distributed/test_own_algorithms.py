"""Algorithms that torch lacks, on real ranks: the same bits as over whole parameters, also through checkpoints.

Parameters lie in every way that `matrices` knows: plain, rows, columns, both, FSDP2 over tensor parallel, HSDP, a
ShardedTensor of which a rank holds nothing, one mesh for each half of the ranks.
"""

import copy
import gc
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import shardopt
from shardopt import checkpoint
from shardopt.algorithms import AlgorithmSpec, CommunicatingOptimizer, Kind, StateEntry, StepsOn, register
from shardopt.algorithms.blocked.optimizer import BlockOptimizer
from shardopt.errors import GradientError, MismatchError
from shardopt.sharding.pieces import narrowed
from shardopt.sharding.view import is_held, local_tensors, view_of
from tests.harness import run_ranks, run_ranks_outcomes
from tests.support.matrices import SHAPES, matrices, value
from tests.support.placement import give_gradient, same

RANKS_STAY = True

STEPS = 6
HALF = 3
ABSENT = {2: {"plain", "rows", "table", "grid"}, 4: SHAPES.keys() - {"uneven"}}
FREE = {"lr": 0.1, "warmup_steps": 2, "weight_decay": 0.1}
CASES = {
    "LAMB": ("LAMB", {"lr": 0.05, "weight_decay": 0.1, "most_norm": 5.0}),
    "LARS": ("LARS", {"lr": 0.5, "weight_decay": 0.1, "trust_coefficient": 0.1, "nesterov": True}),
    "Lion": ("Lion", {"lr": 0.01, "weight_decay": 0.1}),
    "AdEMAMix": ("AdEMAMix", {"t_alpha_beta3": 3, "weight_decay": 0.1}),
    "ScheduleFreeAdamW": ("ScheduleFreeAdamW", FREE),
    "ScheduleFreeSGD": ("ScheduleFreeSGD", FREE),
    "SOAP": ("SOAP", {"lr": 0.05, "precondition_frequency": 2}),
    "SOAP-blocks": ("SOAP", {"precondition_frequency": 2, "block_size": 8, "max_precondition_dim": 7}),
    "Shampoo": ("Shampoo", {"lr": 0.05, "precondition_frequency": 2, "block_size": 8, "weight_decay": 0.1}),
    "Shampoo-plain": ("Shampoo", {"betas": (0.0, 1.0), "graft": None, "eps": 1e-3, "stagger": False}),
}
NORMED = ("LAMB", "LARS")  # whose factors, sums over ranks in fp64, are rounded in fp32 and narrower dtypes alone
USUAL = ["LAMB", "Lion", "ScheduleFreeAdamW", "SOAP"]  # of each kind one


def gradient(name, step, dtype):
    return None if name in ABSENT.get(step, ()) else value(name, step + 1, dtype)


def train(optimizer, parameters, steps, dtype):
    for step in steps:
        for name, parameter in parameters.items():
            give_gradient(parameter, gradient(name, step, dtype))
        if step in (1, HALF):  # as around an evaluation
            optimizer.eval()
            optimizer.train()
        optimizer.step()


def differing(optimizer, parameters, case, dtype, steps=STEPS):
    """Names of parameters and state on this rank that differ from those of a run over whole parameters."""
    name, options = CASES[case]
    whole = {
        key: torch.nn.Parameter(value(key, 0, dtype)) for key in SHAPES if 0 not in SHAPES[key] and key in parameters
    }
    alone = shardopt.keyed(name, whole, **options)
    train(alone, whole, range(steps), dtype)
    state, wanted = optimizer.state_dict()["state"], alone.state_dict()["state"]
    fits = close if case in NORMED and dtype is torch.float64 else same
    found = [key for key in whole if not fits(parameters[key], whole[key].detach())]
    for key in whole:
        if not is_held(parameters[key]):
            assert key not in state
            continue
        assert list(state[key]) == list(wanted[key]), key
        found += [f"{key}.{entry}" for entry in state[key] if not fits(state[key][entry], wanted[key][entry])]
    return found


def close(tensor, wanted, within=1e-12):
    """Whether what this rank has of a tensor is what it has of `wanted`, up to the last bits of float64."""
    pieces = view_of(tensor).pieces
    return all(
        (piece.tensor - narrowed(wanted, piece.box)).abs().max() <= within for piece in pieces if piece.box.numel
    )


def trained(case, dtype):
    name, options = CASES[case]
    parameters = matrices(dtype)
    names = sorted(parameters, reverse=dist.get_rank() % 2 == 1)  # another order on each rank
    optimizer = shardopt.keyed(name, {key: parameters[key] for key in names}, **options)
    train(optimizer, parameters, range(STEPS), dtype)
    return differing(optimizer, parameters, case, dtype)


def all_trained(cases, dtypes):
    return {(case, dtype): found for case in cases for dtype in dtypes if (found := trained(case, dtype))}


def test_same_bits_on_four_ranks():
    assert run_ranks(4, all_trained, USUAL, [torch.float32]) == [{}] * 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_same_bits_on_any_mesh(ranks):
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    assert run_ranks(ranks, all_trained, list(CASES), dtypes, deadline_seconds=500) == [{}] * ranks


def save_halfway(cases, dtype, folder, mode):
    for case in cases:
        name, options = CASES[case]
        parameters = matrices(dtype)
        optimizer = shardopt.keyed(name, parameters, **options)
        train(optimizer, parameters, range(HALF), dtype)
        optimizer.train(mode)
        checkpoint.save(f"{folder}/{case}", {"model": parameters, "optimizer": optimizer})


def resume(cases, dtype, folder, mode):
    """The rest of the steps, after a load into an optimizer over another order of parameters."""
    result = {}
    for case in cases:
        name, options = CASES[case]
        parameters = dict(reversed(matrices(dtype).items()))
        optimizer = shardopt.keyed(name, parameters, **{**options, "lr": 7.0})
        optimizer.init_state()
        checkpoint.load(f"{folder}/{case}", {"model": parameters, "optimizer": optimizer})
        assert optimizer.evaluating == (not mode and name.startswith("ScheduleFree"))
        optimizer.train()
        train(optimizer, parameters, range(HALF, STEPS), dtype)
        found = differing_when_saved(optimizer, parameters, case, dtype, mode)
        if found:
            result[case] = found
    return result


def differing_when_saved(optimizer, parameters, case, dtype, mode):
    """As `differing`; a run that was not interrupted has evaluated where the other one was saved."""
    if mode or not case.startswith("ScheduleFree"):
        return differing(optimizer, parameters, case, dtype)
    name, options = CASES[case]
    whole = {
        key: torch.nn.Parameter(value(key, 0, dtype)) for key in SHAPES if 0 not in SHAPES[key] and key in parameters
    }
    alone = shardopt.keyed(name, whole, **options)
    train(alone, whole, range(HALF), dtype)
    alone.eval()
    alone.train()
    train(alone, whole, range(HALF, STEPS), dtype)
    return [key for key in whole if not same(parameters[key], whole[key].detach())]


@pytest.mark.parametrize(
    ("saved", "resumed", "mode", "cases"),
    [
        (4, 3, False, USUAL),  # on four ranks one matrix lies on two meshes, each by itself
        *(
            pytest.param(*pair, mode, list(CASES), marks=pytest.mark.exhaustive)
            for pair in [(1, 4), (4, 1), (4, 2), (3, 4), (2, 2)]
            for mode in (True, False)
        ),
    ],
)
def test_resume_is_exact_on_any_number_of_ranks(saved, resumed, mode, cases, tmp_path):
    folder, dtype = str(tmp_path), torch.float32
    run_ranks(saved, save_halfway, cases, dtype, folder, mode, deadline_seconds=300)
    assert run_ranks(resumed, resume, cases, dtype, folder, mode, deadline_seconds=300) == [{}] * resumed


# --- blocks and their owners -----------------------------------------------------------------------------------------


class Memo(dict):
    """The memo of a deep copy, which is a leaf for torch: it goes over a plain one for each ShardedTensor."""


def ownership():
    """Bytes of state on this rank, what copies train, and errors that every rank has to see."""
    parameters = matrices()
    optimizer = shardopt.keyed("SOAP", parameters, block_size=8, precondition_frequency=2)
    train(optimizer, parameters, range(2), torch.float32)
    inner = optimizer._local.optimizer
    assert isinstance(inner, BlockOptimizer)
    sharded = {name: state for name, state in optimizer.state_dict()["state"].items() if name != "plain"}
    nbytes = sum(
        local.nbytes for state in sharded.values() for value_ in state.values() for local in local_tensors(value_)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, of ShardedTensors
        copied = copy.deepcopy(optimizer, Memo())
    later = torch.nn.Parameter(
        distribute_tensor(torch.ones(40, 8), init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    )
    before = dict(inner._owners)
    optimizer.add_param_group({"params": {"later": later}})
    train(copied, dict(copied.params), range(2, 4), torch.float32)
    assert copied._local.optimizer._owners == {
        copied.params[name]: inner._owners[parameter] for name, parameter in parameters.items()
    }
    optimizer.zero_grad()
    train(optimizer, parameters, range(2, 4), torch.float32)
    assert all(inner._owners[parameter] == owners for parameter, owners in before.items())
    same_bits = all(
        torch.equal(one, other)
        for name, parameter in parameters.items()
        for one, other in zip(local_tensors(parameter), local_tensors(copied.params[name]), strict=True)
    )
    with pytest.raises(GradientError, match=r"rows\.grad"):
        give_gradient(parameters["rows"], None if dist.get_rank() == 1 else value("rows", 1))
        optimizer.step()
    return nbytes, same_bits, inner._owners[later]


def test_blocks_are_dealt_by_work_and_stay_with_their_owners():
    (of_one,) = [nbytes for nbytes, *_ in run_ranks(1, bytes_before_the_first_step)]
    of_ranks = run_ranks(4, ownership)
    assert all(same_bits for _, same_bits, _ in of_ranks)
    assert len({owners for *_, owners in of_ranks}) == 1 and len(set(of_ranks[0][2])) == 4
    assert max(nbytes for nbytes, *_ in of_ranks) <= 0.45 * of_one


def bytes_before_the_first_step():
    parameters = matrices()
    optimizer = shardopt.keyed("SOAP", parameters, block_size=8, precondition_frequency=2)
    optimizer.init_state()
    state = {name: state for name, state in optimizer.state_dict()["state"].items() if name != "plain"}
    return (
        sum(local.nbytes for each in state.values() for value_ in each.values() for local in local_tensors(value_)),
    )


def with_fully_shard(folder):
    """A model of fully_shard: evaluated with averages, whose unsharded copies must not be trained on."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    whole = copy.deepcopy(net)
    for layer in (net[0], net):  # the root has the last layer, whose copy stays unsharded after a forward
        fully_shard(layer)
    gc.freeze()  # as programs do that want short collections
    pairs = []
    for model in (net, whole):
        optimizer = shardopt.keyed("ScheduleFreeSGD", model.named_parameters(), lr=0.5)
        for step in range(4):
            batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.eval()
            with torch.no_grad():
                evaluated = model(batch)
            if model is net:
                net[0].unshard(async_op=True)  # of the averages, while the weights take their place
            optimizer.train()
        pairs.append((optimizer, evaluated))
    (sharded, one), (alone, other) = pairs
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    for name, parameter in sharded.params.items():
        torch.testing.assert_close(parameter.full_tensor(), alone.params[name].detach(), rtol=1e-6, atol=1e-6)
    # Another algorithm in the checkpoint is refused by name, whichever it is.
    checkpoint.save(folder, {"optimizer": sharded})
    for algorithm in ("SOAP", "Lion"):
        strange = shardopt.keyed(algorithm, net.named_parameters())
        strange.init_state()
        with pytest.raises(MismatchError, match="ScheduleFreeSGD"):
            checkpoint.load(folder, {"optimizer": strange})
    return True


def test_evaluation_of_fully_sharded_models(tmp_path):
    assert run_ranks(2, with_fully_shard, str(tmp_path / "saved")) == [True] * 2


def other_blocks(folder):
    """A vector's state lies in blocks that its shape does not tell: another block_size is refused before any change."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = []
    for size in (8, 4, None):
        parameter = torch.nn.Parameter(distribute_tensor(torch.arange(20.0), mesh, [Shard(0)]))
        optimizer = shardopt.keyed("SOAP", {"vector": parameter}, block_size=size)
        give_gradient(parameter, torch.ones(20))
        optimizer.step()
        made.append(optimizer)
    checkpoint.save(folder, {"optimizer": made[0]})
    for optimizer in made[1:]:
        state = optimizer.state_dict()["state"]["vector"]
        for local in local_tensors(state["exp_avg"]):
            local.fill_(7)
        with pytest.raises(MismatchError, match=r"vector\.block_size: found 8.*resume with block_size=8"):
            checkpoint.load(folder, {"optimizer": optimizer})
        assert all((local == 7).all() for local in local_tensors(state["exp_avg"]))
        optimizer.step()
    return True


def test_another_block_size_is_refused_before_anything_changes(tmp_path):
    assert run_ranks(2, other_blocks, str(tmp_path / "saved")) == [True] * 2


# --- an algorithm that is its equations and its spec -----------------------------------------------------------------


class Normed(CommunicatingOptimizer):
    """Steps by an average of gradients, each divided by its norm over the whole parameter; that of the tutorial."""

    def __init__(self, params, lr=0.1, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def equations(self, step):
        numbers = step.numbers(1, torch.float64)
        for each in step.gradients or ():
            numbers[0] += each.double().square().sum()
        yield [(numbers, step.cuts)]
        if not step.is_due():
            return
        averages = local_tensors(step.counted_state()["average"])
        for local, average, each in zip(step.local_tensors, averages, step.gradients, strict=True):
            average.lerp_(each / numbers[0].sqrt().to(each.dtype), 1 - step.group["momentum"])
            local.sub_(average, alpha=step.group["lr"])


def equations_alone(folder):
    """Trains on parameters of every layout, through a checkpoint; then a gradient that one rank lacks."""
    average = StateEntry("average", Kind.PARAMETER)
    register(AlgorithmSpec(Normed, "normed", elementwise=False, steps_on=StepsOn.PARAMETERS, state=(average,)))
    parameters = matrices()
    optimizer = shardopt.keyed("normed", parameters)
    train(optimizer, parameters, range(HALF), torch.float32)
    checkpoint.save(folder, {"model": parameters, "optimizer": optimizer})
    parameters = dict(reversed(matrices().items()))
    optimizer = shardopt.keyed("normed", parameters)
    checkpoint.load(folder, {"model": parameters, "optimizer": optimizer}, init_state=True)
    train(optimizer, parameters, range(HALF, STEPS), torch.float32)
    whole = {name: torch.nn.Parameter(value(name, 0)) for name in parameters if 0 not in SHAPES[name]}
    alone = shardopt.keyed("normed", whole)
    train(alone, whole, range(STEPS), torch.float32)
    apart = [name for name in whole if not close(parameters[name], whole[name].detach(), 1e-6)]
    before = [local.clone() for local in local_tensors(parameters["rows"])]
    for name, parameter in parameters.items():
        give_gradient(parameter, None if name == "rows" and dist.get_rank() == 1 else value(name, 1))
    with pytest.raises(GradientError, match=r"rows\.grad: found one on 1 of its ranks, none on 1"):
        optimizer.step()
    return apart, all(map(torch.equal, before, local_tensors(parameters["rows"])))


def test_an_algorithm_of_equations_and_a_spec_steps_and_resumes_on_shards(tmp_path):
    assert run_ranks(2, equations_alone, str(tmp_path / "saved")) == [([], True)] * 2


# --- norms of whole parameters ---------------------------------------------------------------------------------------


def norms_of_whole_parameters():
    """Two steps of each on parameters of one mesh; then a gradient that one rank refuses, or lacks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in NORMED:
        parameters = {
            f"w{dim}": torch.nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(dim)])) for dim in (0, 1)
        }
        parameters["plain"] = torch.nn.Parameter(torch.ones(3))
        optimizer = shardopt.keyed(name, parameters)
        for step in range(2):
            for parameter in parameters.values():
                give_gradient(parameter, torch.full(tuple(parameter.shape), 1.0 + step))
            optimizer.step()
            dist.barrier()
        before = copy.deepcopy({key: local_tensors(parameter) for key, parameter in parameters.items()})
        state = copy.deepcopy(optimizer.state_dict()["state"])
        for bad in ("absent", "sparse"):
            whole = torch.ones(6, 4)
            give_gradient(parameters["w1"], whole)
            if dist.get_rank() == 1:
                give_gradient(parameters["w1"], None if bad == "absent" else whole.to_sparse(1))
            with pytest.raises(GradientError, match=r"w1\.grad"):
                optimizer.step()
        for key, parameter in parameters.items():
            assert all(map(torch.equal, local_tensors(parameter), before[key]))
        for key, entries in optimizer.state_dict()["state"].items():
            assert all(same_bits(value_, state[key][entry]) for entry, value_ in entries.items())


def same_bits(one, other):
    return all(map(torch.equal, local_tensors(one), local_tensors(other)))


def test_norms_of_all_parameters_take_one_exchange_and_a_refused_gradient_changes_nothing():
    for outcome in run_ranks_outcomes(2, norms_of_whole_parameters, trace=["torch.distributed:all_reduce"]):
        assert outcome.ok, outcome
        assert len(outcome.calls) == 4 * len(NORMED)
