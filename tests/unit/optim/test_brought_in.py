"""Algorithms from outside: `register` and `keyed` refuse a spec that the class contradicts, and say what to write."""

import copy

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

import shardopt
from shardopt.algorithms import (
    AlgorithmSpec,
    AtFirstStep,
    CommunicatingOptimizer,
    Dtype,
    Kind,
    StateEntry,
    StepsOn,
    register,
    registry,
)
from shardopt.errors import AlgorithmError, GradientError
from tests.support.fake_rank import fake_rank, shard

AVERAGE = StateEntry("average", Kind.PARAMETER)
STEP = StateEntry("step", Kind.SCALAR)


class Outside(torch.optim.Optimizer):
    """Steps by the running mean of gradients; subclasses break it."""

    def __init__(self, params, lr=0.1, start=0.0):
        super().__init__(params, {"lr": lr, "start": start})

    def make(self, group, parameter):
        return {"average": torch.full_like(parameter, group["start"]), "step": torch.tensor(0.0)}

    def update(self, group, parameter, state):
        return state["average"]

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state.update(state or self.make(group, parameter))
                state["step"] += 1
                state["average"].add_(parameter.grad).mul_(0.5)
                parameter.sub_(self.update(group, parameter, state) * group["lr"])


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    for known in ("_SPECS", "_VARIANTS"):
        monkeypatch.setattr(registry, known, dict(getattr(registry, known)))


def keyed(methods, state=(AVERAGE, STEP), dtype=torch.float32, more=None, **options):
    """An optimizer of a class like `Outside` but for some methods, with one parameter."""

    class Changed(Outside):
        def step(self, closure=None):
            return Outside.step(self, closure)

    for name, method in methods.items():
        setattr(Changed, name, method)
    register(AlgorithmSpec(Changed, "changed", **{"elementwise": True, "state": state, **(more or {})}))
    return shardopt.keyed("changed", {"w": torch.nn.Parameter(torch.ones(2, 2, dtype=dtype))}, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_scalar_is_a_counter_unless_its_entry_says_otherwise(dtype):
    optimizer = keyed({}, dtype=dtype)
    optimizer.init_state()
    assert optimizer.state_dict()["state"]["w"]["step"].dtype == torch.float32
    assert StateEntry("step", Kind.SCALAR, Dtype.WIDE).dtype is Dtype.WIDE
    assert AVERAGE.dtype is Dtype.PARAMETER


def refusal(*arguments, **options):
    with pytest.raises(AlgorithmError, match="does not do what its AlgorithmSpec says") as caught:
        keyed(*arguments, **options)
    assert caught.value.code == "algorithm-spec"
    (problem,) = caught.value.problems
    return problem


def test_state_that_the_spec_does_not_name_is_refused_with_its_entry():
    problem = refusal({}, state=(STEP,))
    assert (problem.key, problem.remedy) == ("changed.state.average", "add StateEntry('average', Kind.PARAMETER)")
    assert refusal({}, state=(AVERAGE,)).remedy == "add StateEntry('step', Kind.SCALAR)"


@pytest.mark.parametrize("entry", [{"initial": "strat"}, {"exists": lambda options: options["strat"]}])
def test_an_option_that_is_misspelt_in_the_spec_is_refused_at_once(entry):
    problem = refusal({}, state=(StateEntry("average", Kind.PARAMETER, **entry), STEP))
    assert problem.key == "changed.state.average" and problem.found.startswith("KeyError: 'strat'")
    assert problem.remedy == "name one of lr, start"


def test_an_entry_that_suits_no_matrix_is_not_made_for_the_trial():
    vectors = StateEntry("vectors", Kind.PARAMETER, initial="of_vectors", suits=lambda dimensions: dimensions == 1)
    keyed({}, state=(AVERAGE, STEP, vectors))


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16, torch.uint8])
def test_a_plain_count_is_counted_in_fewer_bits_too(state_dtype):
    def make(self, group, parameter):
        return Outside.make(self, group, parameter) | {"seen": 0}

    def update(self, group, parameter, state):
        state["seen"] += 1
        return state["average"]

    seen = StateEntry("seen", Kind.SCALAR, Dtype.PLAIN_COUNT)
    bits = {} if state_dtype is None else {"state_dtype": state_dtype}
    optimizer = keyed({"make": make, "update": update}, state=(AVERAGE, STEP, seen), **bits)
    (parameter,) = optimizer.params.values()
    for _ in range(3):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert optimizer.state_dict()["state"]["w"]["seen"] == 3


def test_state_that_the_class_never_makes_is_refused():
    problem = refusal({}, state=(AVERAGE, STEP, StateEntry("slow", Kind.PARAMETER)))
    assert problem.key == "changed.state.slow" and problem.found == "nothing after 3 steps"


@pytest.mark.parametrize(
    ("made", "found", "remedy"),
    [
        (lambda like: 0, "a plain int", "Dtype.PLAIN_COUNT"),
        (lambda like: torch.zeros((), dtype=torch.int64), "a tensor of torch.int64, shape []", "another Dtype"),
        (lambda like: torch.zeros(1), "a tensor of torch.float32, shape [1]", "another Kind"),
        (lambda like: torch.zeros_like(like), "a tensor of torch.float32, shape [4, 3]", "another Kind"),
    ],
)
def test_state_of_another_kind_is_refused(made, found, remedy):
    def make(self, group, parameter):
        return {**Outside.make(self, group, parameter), "step": made(parameter)}

    problem = refusal({"make": make})
    assert problem.found == found and remedy in problem.remedy
    assert problem.required == "a tensor of torch.float32, shape [], by Kind.SCALAR and Dtype.COUNTER"


def test_a_dtype_that_only_some_parameters_show():
    def make(self, group, parameter):
        return {**Outside.make(self, group, parameter), "average": torch.zeros_like(parameter, dtype=torch.float32)}

    keyed({"make": make})
    problem = refusal({"make": make}, dtype=torch.bfloat16)
    assert problem.key == "changed.state.average" and "Dtype.PARAMETER" in problem.required
    keyed({"make": make}, (StateEntry("average", Kind.PARAMETER, Dtype.AT_LEAST_SINGLE), STEP), torch.bfloat16)


def test_other_first_values_than_those_of_the_class_are_refused():
    assert "initial=" in refusal({}, start=1.0).remedy
    keyed({}, (StateEntry("average", Kind.PARAMETER, initial="start"), STEP), start=1.0)


def test_a_class_that_takes_early_state_for_its_own_second_step_is_refused():
    def make(self, group, parameter):
        parameter.zero_()  # in the first step alone
        return Outside.make(self, group, parameter)

    assert "count steps" in refusal({"make": make}).remedy
    settled = StateEntry("average", Kind.PARAMETER, initial=AtFirstStep.GRADIENT)
    keyed({"make": make}, (settled, STEP))  # a step makes such state again


@pytest.mark.parametrize(
    "update",
    [
        lambda self, group, parameter, state: state["average"] / state["average"].norm(),
        lambda self, group, parameter, state: state["average"] / (1 + parameter.square().mean()),
        lambda self, group, parameter, state: state["average"] / max(1.0, state["average"].square().mean().sqrt()),
        lambda self, group, parameter, state: state["average"] / state["average"].norm(dim=-1, keepdim=True),
        lambda self, group, parameter, state: state["average"] - state["average"].mean(dim=-1, keepdim=True),
    ],
)
def test_an_update_that_takes_from_other_elements_is_not_elementwise(update):
    assert refusal({"update": update}).key == "changed.elementwise"
    keyed({"update": update}, more={"elementwise": False})  # of plain parameters


def test_random_updates_are_not_compared_and_leave_the_generator():
    def update(self, group, parameter, state):
        return state["average"] + torch.randn_like(parameter)

    before = torch.get_rng_state()
    keyed({"update": update})
    assert torch.equal(torch.get_rng_state(), before)


def test_what_raises_is_left_to_the_real_step():
    def update(self, group, parameter, state):
        raise NotImplementedError("on this device")

    optimizer = keyed({"update": update})
    (parameter,) = optimizer.params.values()
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(NotImplementedError, match="on this device"):
        optimizer.step()


def test_options_are_copied_and_a_spec_can_do_without_the_trial():
    rate = torch.tensor(0.5)

    def update(self, group, parameter, state):
        group["lr"].mul_(0.5)
        return state["average"]

    keyed({"update": update}, lr=rate)
    assert rate == 0.5
    keyed({}, state=(), more={"tried": False})


def test_storage_in_fewer_bits_is_tried_as_the_class_itself():
    with pytest.raises(AlgorithmError, match=r"changed\.state\.step"):
        keyed({}, state=(AVERAGE,), state_dtype=torch.bfloat16)
    keyed({}, state_dtype=torch.bfloat16)


class CountsInItsGroup(Outside):
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        super().step(closure)

    def update(self, group, parameter, state):
        return state["average"] / (group["steps"] if self.used else 1)


@pytest.mark.parametrize("options", [{}, {"state_dtype": torch.bfloat16}])
def test_what_a_class_counts_in_its_group_it_may_not_count_in_backward(options):
    for used in (True, False):
        made = type("Counting", (CountsInItsGroup,), {"used": used})
        register(AlgorithmSpec(made, "counting", elementwise=True, state=(AVERAGE, STEP)))
        net = torch.nn.Linear(2, 2)
        shardopt.keyed("counting", net.named_parameters(), **options)
        if not used:
            shardopt.in_backward(net, "counting", **options).stop()
            continue
        with pytest.raises(AlgorithmError, match=r"step in backward.*\n.*one after the other.*not in its group"):
            shardopt.in_backward(net, "counting", **options)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"state": ("average",)}, r"StateEntry\('average', Kind.PARAMETER\)"),
        ({"state": (AVERAGE, AVERAGE)}, "each name once"),
        ({"state": (StateEntry("rows", Kind.ROWS),)}, r"Kind.ROWS in an elementwise algorithm"),
        ({"elementwise": False, "steps_on": StepsOn.PARAMETERS}, "derive it from CommunicatingOptimizer"),
        ({"optimizer": "Outside"}, "a subclass of torch.optim.Optimizer"),
    ],
)
def test_specs_that_cannot_be_right_are_refused(spec, words):
    given = {"optimizer": Outside, "name": "outside", "elementwise": True, **spec}
    with pytest.raises(AlgorithmError, match=words) as caught:
        register(AlgorithmSpec(**given))
    assert caught.value.code == "algorithm-spec"
    with pytest.raises(AlgorithmError, match="not registered"):
        registry.spec_of("outside")


def test_a_class_that_is_defined_again_takes_the_place_of_the_earlier_one():
    first = keyed({})
    with pytest.raises(AlgorithmError, match="algorithm-spec"):
        keyed({}, state=(STEP,))  # as a cell of a notebook that is run again
    second = keyed({}, state=(AVERAGE, STEP), lr=0.5)
    assert [spec.name for spec in registry.algorithms()].count("changed") == 1
    for optimizer in (first, second):
        (parameter,) = optimizer.params.values()
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        copy.deepcopy(optimizer).step()
    with pytest.raises(AlgorithmError, match="another class and name than"):
        register(AlgorithmSpec(Outside, "changed", elementwise=True))
    with pytest.raises(AlgorithmError, match="another class and name than"):
        register(AlgorithmSpec(registry.spec_of("changed").optimizer, "renamed", elementwise=True))


def test_a_misspelt_name_says_which_is_meant_and_where_names_come_from():
    with pytest.raises(AlgorithmError, match=r"did you mean 'adamw'.*import the module that registers it"):
        shardopt.keyed("adammw", {"w": torch.nn.Parameter(torch.ones(1))})


@pytest.mark.parametrize("sharded", [False, True])
def test_a_sparse_gradient_is_refused_before_the_class_meets_it(sharded):
    with fake_rank(0, 2) as mesh:
        register(AlgorithmSpec(Outside, "outside", elementwise=True, state=(AVERAGE, STEP)))
        whole = torch.ones(4, 2)
        parameter = torch.nn.Parameter(shard(whole, mesh, Shard(0)) if sharded else whole.clone())
        optimizer = shardopt.keyed("outside", {"w": parameter})
        local = torch.ones(2 if sharded else 4, 2).to_sparse(1)
        parameter.grad = local if not sharded else DTensor(local, parameter._spec, requires_grad=False)
        with pytest.raises(GradientError, match=r"w\.grad: found a sparse gradient.*takes_sparse=True"):
            optimizer.step()
        assert optimizer.state_dict()["state"] == {}


class Counts(CommunicatingOptimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.counted = []

    def equations(self, step):
        yield [(step.numbers(0, torch.float64), step.cuts)]
        yield [(torch.zeros(1), step.cuts)]  # as often as it likes
        self.counted.append((step.numel, sum(local.numel() for local in step.local_tensors)))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_step_knows_how_many_elements_the_whole_parameter_has(sharded):
    register(AlgorithmSpec(Counts, "counts", elementwise=False, steps_on=StepsOn.PARAMETERS))
    with fake_rank(0, 2) as mesh:
        whole = torch.ones(5, 2)
        parameter = torch.nn.Parameter(shard(whole, mesh, Shard(0)) if sharded else whole)
        parameter.grad = torch.ones_like(parameter)
        optimizer = shardopt.keyed("counts", {"w": parameter})
        optimizer.step()
        assert optimizer._local.optimizer.counted == [(10, 6 if sharded else 10)]
