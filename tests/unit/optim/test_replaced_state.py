"""Changes of an optimizer from outside, as torch lets anybody make them: steps and saves follow, or it is refused."""

import copy
import pickle
from collections import defaultdict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import shardopt
from shardopt import GradientClipping, GradientClippingOptimizer
from shardopt.algorithms import algorithms
from shardopt.errors import StateError
from shardopt.optim import CombinedOptimizer, OptimizerWrapper
from shardopt.optim.keyed import KeyedOptimizerWrapper
from shardopt.sharding.swapped import note_swapped
from tests.support.fake_rank import fake_rank, shard

FULL = torch.arange(8.0).view(4, 2)


def wrapped(optimizer):
    return OptimizerWrapper(GradientClippingOptimizer(optimizer, GradientClipping.NONE))


def combined(optimizer):
    other = shardopt.keyed("sgd", {"other": nn.Parameter(FULL.clone())}, momentum=0.9)
    return CombinedOptimizer([("a", optimizer), ("b", CombinedOptimizer([other]))])


NESTINGS = {
    "alone": lambda it: it,
    "wrapped": wrapped,
    "combined": combined,
    "both": lambda it: wrapped(combined(wrapped(it))),
}
CHANGES = {
    "defaultdict": lambda it, params: setattr(it, "state", defaultdict(dict)),
    "clear": lambda it, params: it.state.clear(),
    "dict": lambda it, params: setattr(it, "state", {}),
    "delete": lambda it, params: [it.state.__delitem__(param) for param in params],
    "pop": lambda it, params: [it.state.pop(param) for param in params],
    "empty": lambda it, params: [it.state.__setitem__(param, {}) for param in params],
    "given": lambda it, params: setattr(it, "state", {param: {} for param in params}),
    "popitem": lambda it, params: [it.state.popitem() for _ in list(it.state)],
}


@pytest.fixture(params=["plain", "sharded"])
def parameters(request):
    """Makes pairs of a parameter and what holds it locally."""
    if request.param == "plain":
        yield lambda: nn.Parameter(FULL.clone())
    else:
        with fake_rank(0, 2) as mesh:
            yield lambda: nn.Parameter(shard(FULL, mesh, Shard(0)))


def give(*params):
    for param in params:
        param.grad = torch.ones_like(param.detach())


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("change", CHANGES)
def test_state_that_is_taken_away_begins_anew(parameters, nesting, change):
    param, fresh = parameters(), parameters()
    inner, twin = (shardopt.keyed("adam", {"w": own}, lr=0.1) for own in (param, fresh))
    optimizer = NESTINGS[nesting](inner)
    for _ in range(3):
        give(param)
        optimizer.step()
    with torch.no_grad():
        fresh.copy_(param)
    CHANGES[change](optimizer, [param])
    saved = optimizer.state_dict()["state"]
    assert len(inner.state) == 0 and not any(name.endswith("w") for name in saved)
    for _ in range(2):
        give(param, fresh)
        optimizer.step()
        twin.step()
    assert torch.equal(param, fresh)
    assert inner.state_dict()["state"]["w"]["step"] == 2


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("whole", [False, True], ids=["entry", "mapping"])
def test_state_that_is_set_is_stepped_with_and_saved(parameters, nesting, whole):
    param, fresh = parameters(), parameters()
    inner, twin = (shardopt.keyed("adam", {"w": own}, lr=0.1) for own in (param, fresh))
    optimizer = NESTINGS[nesting](inner)
    for _ in range(3):
        give(fresh)
        twin.step()
    entries = {name: value.clone() for name, value in twin.state[fresh].items()}
    if whole:
        optimizer.state = {param: entries}
    else:
        optimizer.state[param] = entries
    with torch.no_grad():
        param.copy_(fresh)
    give(param, fresh)
    optimizer.step()
    twin.step()
    assert torch.equal(param, fresh)
    assert inner.state_dict()["state"]["w"]["step"] == 4


def test_the_mapping_that_is_set_for_a_plain_parameter_stays_the_state():
    """As in torch, where who holds it sees what steps make of it."""
    param = nn.Parameter(FULL.clone())
    optimizer = shardopt.keyed("sgd", {"w": param}, momentum=0.9)
    optimizer.state[param] = held = {"momentum_buffer": torch.ones(4, 2)}
    give(param)
    optimizer.step()
    assert held["momentum_buffer"][0, 0].item() == pytest.approx(1.9)


def test_state_of_another_optimizer_or_of_its_own_can_be_set(parameters):
    param = parameters()
    one = shardopt.keyed("adam", {"w": param})
    give(param)
    one.step()
    two = wrapped(shardopt.keyed("adam", {"v": param}))
    for state in (lambda: one.state, lambda: two.state, lambda: dict(two.state)):
        two.state = state()
        assert two.state_dict()["state"]["v"]["step"] == 1
    assert one.state.pop(nn.Parameter(FULL), "none") == "none"
    with pytest.raises(KeyError):
        one.state.pop("nobody")
    with pytest.raises(KeyError):
        del one.state[nn.Parameter(FULL)]


@pytest.mark.parametrize("name", [spec.name for spec in algorithms() if not spec.needs_closure])
def test_every_algorithm_continues_after_a_reset(name):
    param, fresh = nn.Parameter(FULL.clone()), nn.Parameter(FULL.clone())
    optimizer = shardopt.keyed(name, {"w": param}, lr=0.1)
    sparse = name == "SparseAdam"
    for step in range(3):
        if step == 2:
            optimizer.state = defaultdict(dict)
            with torch.no_grad():
                fresh.copy_(param)
            twin = shardopt.keyed(name, {"w": fresh}, lr=0.1)
            fresh.grad = FULL.cos().to_sparse(1) if sparse else FULL.cos()
            twin.step()
        param.grad = FULL.cos().to_sparse(1) if sparse else FULL.cos()
        optimizer.step()
    assert torch.equal(param, fresh)


@pytest.mark.parametrize("nesting", ["alone", "wrapped"])
def test_groups_that_are_set_are_stepped_and_saved(parameters, nesting):
    first, second = parameters(), parameters()
    inner = shardopt.keyed("sgd", {"a": first, "b": second}, lr=0.1)
    optimizer = NESTINGS[nesting](inner)
    (group,) = optimizer.param_groups
    optimizer.param_groups = groups = [
        {**group, "params": [second], "lr": 1.0},
        {**group, "params": (first,), "lr": 0.0},
    ]
    assert optimizer.param_groups is inner.param_groups is groups
    give(first, second)
    optimizer.step()
    assert torch.equal(first.detach(), parameters().detach()) and not torch.equal(second, first)
    assert [(own["params"], own["lr"]) for own in optimizer.state_dict()["param_groups"]] == [
        (["b"], 1.0),
        (["a"], 0.0),
    ]
    for copied in (copy.deepcopy(inner), pickle.loads(pickle.dumps(inner))) if type(first.data) is torch.Tensor else ():
        copied.param_groups[0]["lr"] = 7.0
        assert copied.state_dict()["param_groups"][0]["lr"] == 7.0
    groups.pop(0)
    before = second.detach().clone()
    optimizer.step()
    assert torch.equal(second, before)
    assert [group["params"] for group in optimizer.state_dict()["param_groups"]] == [["a"]]


def test_options_of_new_groups_follow_the_defaults_that_are_set():
    optimizer = wrapped(shardopt.keyed("sgd", {"a": nn.Parameter(FULL.clone())}, lr=0.1))
    optimizer.defaults = {**optimizer.defaults, "lr": 0.7}
    optimizer.add_param_group({"params": {"b": nn.Parameter(FULL.clone())}})
    assert optimizer.param_groups[1]["lr"] == 0.7


def group_with(optimizer, **changes):
    return {**optimizer.param_groups[0], **changes}


REFUSED = {
    "a stranger": (
        lambda it, new: [group_with(it, params=[*it.params.values(), new])],
        r'\["params"\]\[1\]: found a tensor of torch.float32 and shape \(4, 2\)',
    ),
    "no tensor": (lambda it, new: [group_with(it, params=["w"])], "found a str"),
    "a name": (lambda it, new: [group_with(it, params={"w": new})], 'found "params" in a dict'),
    "no params": (lambda it, new: [{"lr": 1.0}], "found a dict"),
    "no group": (lambda it, new: [it.params["w"]], "found a (Parameter|DTensor)"),
    "twice": (
        lambda it, new: [group_with(it, params=[*it.params.values()] * 2)],
        r'found w, which param_groups\[0\]\["params"\]\[0\] is',
    ),
    "in two groups": (
        lambda it, new: [*it.param_groups, group_with(it)],
        r'param_groups\[1\]\["params"\]\[0\]: found w',
    ),
    "an option less": (
        lambda it, new: [{"params": [*it.params.values()], "lr": 1.0}],
        r"param_groups\[0\]\.momentum: found nothing",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("name", ["sgd", "rowwiseadam"])
def test_groups_that_cannot_be_stepped_are_refused(parameters, case, name):
    """When they are set; and where a list was changed in place, by the next step, save, load and clip."""
    param, new = parameters(), nn.Parameter(FULL.clone())
    optimizer = wrapped(shardopt.keyed(name, {"w": param}))
    make, message = REFUSED[case]
    message = message.replace("momentum", "eps") if name == "rowwiseadam" else message
    before = optimizer.param_groups
    with pytest.raises(StateError, match=message):
        optimizer.param_groups = make(optimizer, new)
    assert optimizer.param_groups is before
    give(param)
    optimizer.step()
    values = param.detach().clone()
    other = nn.Linear(1, 1)
    note_swapped(other, dict(other.named_parameters()))  # averages of another model, which are looked for first
    if case == "an option less":
        return
    before[:] = make(optimizer, new)
    clipped = GradientClippingOptimizer(optimizer, GradientClipping.VALUE)
    calls = [optimizer.state_dict, lambda: optimizer.load_state_dict({"state": {}, "param_groups": []})]
    stepped = [optimizer.step, clipped.step]
    if not dist.is_initialized():  # these ask other ranks
        calls.append(optimizer.check_agreement)
        stepped.append(GradientClippingOptimizer(optimizer, GradientClipping.NORM).step)
    if case not in (
        "twice",
        "in two groups",
    ):  # what stands in two places is stepped twice, as by torch's, and cannot be saved
        calls += stepped
    for call in calls:
        with pytest.raises(StateError, match=message):
            call()
    assert torch.equal(param, values)


@pytest.mark.parametrize("nesting", NESTINGS)
def test_state_of_a_stranger_is_refused(nesting):
    inner = shardopt.keyed("sgd", {"w": nn.Parameter(FULL.clone())}, momentum=0.9)
    optimizer, stranger = NESTINGS[nesting](inner), torch.zeros(3, dtype=torch.int64)
    for change in (
        lambda: setattr(optimizer, "state", {stranger: {}}),
        lambda: optimizer.state.__setitem__(stranger, {}),
        lambda: optimizer.state.update({stranger: {}}),
    ):
        with pytest.raises((StateError, KeyError), match=r"a tensor of torch.int64 and shape \(3,\)|0, 0, 0"):
            change()
    assert len(inner.state) == 0
    optimizer.state_dict()


@pytest.mark.parametrize("name", [spec.name for spec in algorithms() if not spec.needs_closure])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_has_groups_that_fit(name, copied):
    """Although torch gives the defaults of every copy an option that not all algorithms have."""
    # With its default some blocks' turn comes by their parameters' names.
    options = {"stagger": False} if name in ("SOAP", "Shampoo") else {}
    optimizer = copied(shardopt.keyed(name, {"w": nn.Parameter(FULL.clone())}, lr=0.1, **options))
    optimizer.add_param_group({"params": {"v": nn.Parameter(FULL.clone())}})
    optimizer.param_groups = list(reversed(optimizer.param_groups))
    for _ in range(2):  # SOAP's first step only looks at the gradients
        for param in optimizer.params.values():
            param.grad = FULL.cos().to_sparse(1) if name == "SparseAdam" else FULL.cos()
        optimizer.step()
    assert torch.equal(optimizer.params["w"], optimizer.params["v"]) and not torch.equal(optimizer.params["w"], FULL)


def test_options_of_the_users_own_may_be_called_as_what_is_saved_besides():
    def made(value):
        param = nn.Parameter(FULL.clone())
        group = {"params": [param], "algorithm": value, "given": {"lr": value}}
        optimizer = shardopt.KeyedOptimizer({"w": param}, {}, [group])
        optimizer.save_param_groups(True)
        return optimizer

    into = made("b")
    assert into.load_state_dict(made("a").state_dict()) == ([], [])
    assert into.param_groups[0]["algorithm"] == "a" and into.param_groups[0]["given"] == {"lr": "a"}


def test_state_of_a_stranger_in_a_mapping_of_the_users_own_is_not_lost_silently():
    state, param = {}, nn.Parameter(FULL.clone())
    optimizer = shardopt.KeyedOptimizer({"w": param}, state, [{"params": [param]}])
    state[nn.Parameter(torch.ones(5))] = {"step": 1}
    with pytest.raises(StateError, match=r"state: found a tensor of torch.float32 and shape \(5,\)"):
        optimizer.state_dict()
    optimizer.state = {param: {"step": 2}}
    assert optimizer.state_dict()["state"] == {"w": {"step": 2}}


def test_a_group_that_is_appended_to_a_combined_optimizer_is_refused():
    optimizer = combined(shardopt.keyed("sgd", {"w": nn.Parameter(FULL.clone())}))
    with pytest.raises(StateError, match="param_groups: found a new param_groups"):
        optimizer.param_groups = []
    with pytest.raises(StateError, match="defaults: found a new defaults"):
        optimizer.defaults = {}
    with pytest.raises(AttributeError):
        optimizer.param_groups.append({})


def test_a_replaced_parameter_in_the_factorys_optimizer_is_refused():
    param = nn.Parameter(FULL.clone())
    optimizer = KeyedOptimizerWrapper({"w": param}, lambda tensors: torch.optim.SGD(tensors, lr=0.1))
    optimizer.param_groups[0]["params"] = [nn.Parameter(param.detach().clone())]
    with pytest.raises(StateError, match=r"a tensor of torch.float32 and shape \(4, 2\) that the optimizer does not"):
        optimizer.step()


def test_replicas_take_state_that_is_set():
    with fake_rank(0, 2) as mesh:
        param = nn.Parameter(shard(FULL, mesh, Replicate()))
        optimizer = shardopt.keyed("sgd", {"w": param}, momentum=0.9)
        optimizer.state = {param: {"momentum_buffer": torch.ones_like(param.detach())}}
        give(param)
        optimizer.step()
        assert optimizer.state_dict()["state"]["w"]["momentum_buffer"].to_local()[0, 0].item() == pytest.approx(1.9)
