"""The private parts of torch.optim that shardopt relies on: a later torch that differs fails here, by name."""

import gc
import weakref
from functools import wraps

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from shardopt.algorithms import StepsOn, algorithms
from shardopt.runtime.torch_gradients import (
    BatchNorm,
    ScalerStages,
    at_end_of_backward,
    backward_under_way,
    gradient_hooks,
    groups_of_parameters,
    in_forward_of_ddp,
    inverse_scale,
    is_flattened,
    reduced_by_ddp,
    reshard,
    reshard_before_writing,
    scale_and_look,
    scaler_that_steps,
)
from shardopt.runtime.torch_private import (
    before_step,
    can_make_lazy_state,
    gather_lists,
    gathers_as_torch,
    has_modes,
    in_eval,
    is_torchs_getter_asking,
    lazy_state,
    step_with_lists,
    step_without_hooks,
    take_torchs_attributes,
    without_hooks,
)
from tests.support.fake_rank import fake_rank

WITH_INIT_GROUP = [
    spec for spec in algorithms() if spec.steps_on is StepsOn.LOCAL_TENSORS and hasattr(spec.optimizer, "_init_group")
]


@pytest.mark.parametrize("spec", algorithms(), ids=lambda spec: spec.name)
def test_hooks_are_one_wrapper_around_step(spec):
    optimizer = spec.optimizer([torch.zeros(1, 1)])
    assert spec.optimizer.step.hooked
    assert not hasattr(step_without_hooks(spec.optimizer), "hooked")
    weight = torch.ones(2, 2, requires_grad=True)
    optimizer = spec.optimizer([weight])
    fired = []
    optimizer.register_step_pre_hook(lambda *_: fired.append(None))

    def closure():
        weight.grad = torch.ones(2, 2).to_sparse() if spec.name == "SparseAdam" else torch.ones(2, 2)
        return weight.sum()

    for _ in range(2):  # SOAP's first step only looks at the gradients
        step_without_hooks(type(optimizer))(optimizer, closure)
    assert fired == []
    assert not torch.equal(weight.detach(), torch.ones(2, 2))


@pytest.mark.parametrize("spec", WITH_INIT_GROUP, ids=lambda spec: spec.name)
def test_init_group_makes_what_the_first_step_makes(spec):
    stepped, asked = torch.ones(2, 2), torch.ones(2, 2)
    optimizers = [spec.optimizer([tensor]) for tensor in (stepped, asked)]
    stepped.grad = torch.ones(2, 2)
    optimizers[0].step()
    optimizers[1].state.clear()  # Adagrad has state from the beginning
    assert can_make_lazy_state(optimizers[1])
    made = lazy_state(optimizers[1], optimizers[1].param_groups[0], asked)
    assert made.keys() == optimizers[0].state[stepped].keys()
    assert all(made[name].shape == value.shape for name, value in optimizers[0].state[stepped].items())
    assert asked.grad is None
    assert len(optimizers[1].state) == 0


class LooksForState(torch.optim.Adagrad):
    """As Adagrad of torch 2.11: the constructor alone makes state."""

    def _init_group(self, group, *lists):
        for parameter in group["params"]:
            self.state[parameter]["sum"]
        return super()._init_group(group, *lists)


@pytest.mark.parametrize("fused", [None, True])
def test_state_that_only_a_constructor_makes_is_made_by_one(fused):
    tensor = torch.ones(2, dtype=torch.bfloat16)
    optimizer = LooksForState([tensor], initial_accumulator_value=0.5, fused=fused)
    (constructed,) = optimizer.state.values()
    optimizer.state.clear()
    made = lazy_state(optimizer, optimizer.param_groups[0], tensor)
    assert made["sum"].tolist() == [0.5, 0.5] and made.keys() == constructed.keys()
    assert all(made[name].dtype == value.dtype for name, value in constructed.items())
    assert tensor.grad is None and not optimizer.state


def test_init_group_that_fails_in_the_middle_leaves_no_state(monkeypatch):
    zeros_like, made = torch.zeros_like, []

    def without_memory(*args, **kwargs):
        made.append(args)
        if len(made) == 2:  # after the gradient the first moment; there is a step counter by then
            raise MemoryError
        return zeros_like(*args, **kwargs)

    tensor = torch.ones(2)
    optimizer = torch.optim.AdamW([tensor])
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(torch, "zeros_like", without_memory)
        lazy_state(optimizer, optimizer.param_groups[0], tensor)
    assert tensor.grad is None and not optimizer.state


def test_torchs_way_of_gathering_is_known_once_the_compiler_is_loaded():
    """Which wraps it, and is loaded for good."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    assert gathers_as_torch(torch.optim.AdamW([torch.ones(2)]))


def test_a_step_that_the_compiler_has_wrapped_is_found_without_hooks():
    """Once it is loaded, it puts a wrapper with the same attributes around SparseAdam's, which has hooks by then."""
    torch.optim.SparseAdam([torch.zeros(1, 1)])

    class Wrapped(torch.optim.SparseAdam):
        step = wraps(torch.optim.SparseAdam.step)(lambda self: None)

    assert not hasattr(step_without_hooks(Wrapped), "hooked")


@pytest.mark.parametrize("spec", [spec for spec in WITH_INIT_GROUP if spec.elementwise], ids=lambda spec: spec.name)
def test_a_step_changes_in_place_what_init_group_gathers(spec):
    torchs = spec.optimizer.__module__.startswith("torch.optim.")
    assert gathers_as_torch(spec.optimizer([torch.ones(2, 2)])) == torchs
    if not torchs:
        return
    received = [torch.ones(2, 2), torch.ones(3)]
    optimizer = spec.optimizer(received)
    gathered = []

    def hand_over(group, lists):
        for each, ahead in zip(lists, gathered[-1], strict=True):
            each.extend(ahead)
        return reported

    for _ in range(3):
        for local in received:
            local.grad = torch.ones_like(local)
        lists, reported = gather_lists(optimizer, optimizer.param_groups[0])
        gathered.append(lists)
        step_with_lists(optimizer, hand_over)
    assert "_init_group" not in vars(optimizer)
    stepped, gradients, *state = gathered[-1]
    assert all(a is b for a, b in zip(stepped, received, strict=True))
    assert all(a is local.grad for a, local in zip(gradients, received, strict=True))
    held = {id(value) for entries in optimizer.state.values() for value in entries.values()}
    assert {id(value) for each in state for value in each} == {each for each in held if each != id(None)}


def test_hooks_before_a_step_may_change_its_arguments_in_one_way_only():
    optimizer = torch.optim.SGD([torch.zeros(1)])
    assert before_step(optimizer) == ((optimizer, None), {})
    optimizer.register_step_pre_hook(lambda who, args, kwargs: ((*args, 1), {"a": 2}))
    assert before_step(optimizer) == ((optimizer, None, 1), {"a": 2})
    optimizer.register_step_pre_hook(lambda *_: 3)
    with pytest.raises(RuntimeError, match="must return None"):
        before_step(optimizer)


def test_each_backward_has_a_number_of_its_own():
    weight = torch.ones(2, requires_grad=True)
    assert backward_under_way() == -1 and gradient_hooks(weight) == []
    seen = []

    def note(parameter):
        seen.append(backward_under_way())

    weight.register_post_accumulate_grad_hook(note)
    assert gradient_hooks(weight) == [note]
    for _ in range(2):
        (weight + weight.exp()).sum().backward()
    assert len(set(seen)) == len(seen) == 2 and -1 not in seen


def test_ddp_tells_that_it_runs_a_forward():
    with fake_rank(0, 1):
        inside = []
        module = torch.nn.Linear(1, 1)
        module.register_forward_pre_hook(lambda *_: inside.append(in_forward_of_ddp()))
        module(torch.ones(1))
        torch.nn.parallel.DistributedDataParallel(module)(torch.ones(1))
    assert inside == [False, True] and not in_forward_of_ddp()


def test_every_batch_norm_has_one_base():
    for layer in (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm):
        assert issubclass(layer, BatchNorm)
    assert not issubclass(torch.nn.InstanceNorm1d, BatchNorm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scaling_multiplies_in_fp32_and_tells_what_is_not_finite(dtype):
    tensors = [torch.tensor([3.0, 1 / 3]).to(dtype), torch.empty(0, dtype=dtype), torch.ones(2, 2, dtype=dtype).t()]
    expected = [(tensor.float() * 0.3337).to(dtype) for tensor in tensors]
    actual = torch.zeros(())
    scale_and_look(tensors, torch.tensor(0.3337), actual)
    assert all(map(torch.equal, tensors, expected))
    assert actual == 0
    scale_and_look([torch.tensor([1.0, torch.nan]).to(dtype)], torch.tensor(1.0), actual)
    assert actual == 1


class CallsAtTheEnd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, call):
        ctx.call = call
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.call(backward_under_way())
        return gradient, None


def test_calls_at_the_end_of_backward():
    """After all gradients are there, once for each time that it was asked; what a call raises, backward raises."""
    value, seen = torch.ones(2, requires_grad=True), []
    assert backward_under_way() == -1

    def note(number):
        seen.append((number, value.grad))
        at_end_of_backward(lambda: seen.append((number, value.grad.tolist())))

    first = CallsAtTheEnd.apply(value, note)
    (first + CallsAtTheEnd.apply(value, note)).sum().backward()
    number = seen[0][0]
    assert number >= 0
    assert seen == [(number, None), (number, None), (number, [2.0, 2.0]), (number, [2.0, 2.0])]

    def fail(_):
        at_end_of_backward(lambda: [].pop())

    with pytest.raises(IndexError):
        CallsAtTheEnd.apply(value, fail).sum().backward()


def test_a_scaler_is_known_in_its_step_and_tells_what_it_has_unscaled():
    seen = []

    class Asked(torch.optim.SGD):
        @property
        def _step_supports_amp_scaling(self):
            seen.append(scaler_that_steps())
            return False

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = Asked([weight]), torch.amp.GradScaler("cpu", init_scale=8.0)
    stages = ScalerStages(scaler)
    assert getattr(optimizer, "_step_supports_amp_scaling") is False and seen == [None]  # noqa: B009  # as torch asks
    scaler.scale(weight.sum()).backward()
    assert stages.stage(optimizer) is OptState.READY and inverse_scale(scaler).item() == 0.125
    scaler.unscale_(optimizer)
    assert stages.stage(optimizer) is OptState.UNSCALED
    assert {device.type: value.item() for device, value in stages.found_inf(optimizer).items()} == {"cpu": 0.0}
    scaler.step(optimizer)
    assert seen[1:] == [scaler] and stages.stage(optimizer) is OptState.STEPPED
    other = torch.optim.SGD([weight])
    stages.set(other, OptState.UNSCALED, {torch.device("cpu"): torch.ones(())})
    assert scaler.step(other) is None  # not finite, as it was told


def test_torchs_getters_are_known_by_where_they_ask_from():
    seen = []

    class Asked(torch.optim.SGD):
        @property
        def state(self):
            return self._look()

        @state.setter
        def state(self, state):
            pass

        def _look(self):
            seen.append(is_torchs_getter_asking())
            return {None: None}

        def state_dict(self):
            self._look()
            return {"state": {}, "param_groups": []}

    model = torch.nn.Linear(1, 1)
    optimizer = Asked(model.parameters())
    seen.clear()
    optimizer.state, optimizer.state_dict()
    assert seen == [False, False]
    get_optimizer_state_dict(model, optimizer)
    assert seen[2:] == [True, True]  # before a step with gradients of zeros, which state that is there spares it


def test_a_step_that_is_marked_gets_no_hooks():
    class Passing(torch.optim.SGD):
        @without_hooks
        def step(self, closure=None):
            return closure

    optimizer = Passing([torch.zeros(1)])
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook fired"))
    assert optimizer.step(3) == 3


def test_fsdp1_marks_what_it_takes_up():
    with fake_rank(0, 2):
        module, free = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))
        assert all(map(is_flattened, module.parameters())) and not any(map(is_flattened, free.parameters()))


class OwnDistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """One of a program's own."""


def test_ddp_is_known_by_its_parameters(monkeypatch):
    # Only what is made here is looked at, and not all that the tests of this process have imported and collected.
    gc.freeze()
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda: None)
    with fake_rank(0, 1):
        module, own, free = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        wrapped = [torch.nn.parallel.DistributedDataParallel(module), OwnDistributedDataParallel(own)]
        assert reduced_by_ddp([free.weight, module.bias]) and reduced_by_ddp([free.weight, own.bias])
        assert not reduced_by_ddp(free.parameters())
        for each in wrapped:
            each.itself = each
        del each, wrapped
        assert not reduced_by_ddp([module.weight, own.weight])


def test_a_search_for_ddp_leaves_no_garbage_among_what_is_frozen():
    with fake_rank(0, 1):
        gc.freeze()  # else nothing is frozen again
        module, cycle = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        cycle.itself = [cycle]
        is_alive = weakref.ref(cycle)
        del cycle
        assert not reduced_by_ddp(module.parameters())
        assert is_alive() is None and gc.get_freeze_count()


class Unhashable(type):
    """A metaclass that compares its classes by what they say."""

    def __eq__(cls, other):
        raise AssertionError("compared")


class OfUnhashable(metaclass=Unhashable):
    """A class without a hash."""


def test_a_search_for_ddp_passes_by_objects_whose_class_has_no_hash():
    with fake_rank(0, 1):
        module, other = torch.nn.Linear(1, 1), OfUnhashable()
        wrapped = torch.nn.parallel.DistributedDataParallel(module)
        assert gc.is_tracked(other) and reduced_by_ddp(wrapped.parameters())


def test_without_a_process_group_nothing_is_searched_for_ddp(monkeypatch):
    with monkeypatch.context() as patches:
        for name in ("collect", "get_objects", "unfreeze"):  # which take seconds in a process of many objects
            patches.setattr(gc, name, None)
        assert not reduced_by_ddp(torch.nn.Linear(1, 1).parameters())


def test_modules_of_fully_shard_are_listed_also_where_they_are_frozen():
    with fake_rank(0, 2):
        module = fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,)))
        weight = module.weight
        gc.freeze()  # what this keeps out of collections is in no list of the garbage collector
        with torch.no_grad():
            module(torch.ones(1, 2))
        assert not isinstance(module.weight, DTensor)
        for elsewhere in (torch.ones(2), DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)))):
            reshard_before_writing([elsewhere])  # a rank may write this alone
            assert not isinstance(module.weight, DTensor)
        reshard_before_writing([weight.detach()])
        assert isinstance(module.weight, DTensor)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gather_of_fully_shard_that_is_under_way_is_freed(ranks):
    with fake_rank(0, ranks):
        module = fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (ranks,)))
        module.unshard(async_op=True)
        reshard([module])
        assert isinstance(module.weight, DTensor)
        with torch.no_grad():
            module.weight.to_local().fill_(7)
            module(torch.ones(1, 2))
        assert not isinstance(module.weight, DTensor) and (module.weight[0] == 7).all()  # this rank's row


class Grouped(nn.Module):
    """A norm and a head in one group of `fully_shard`; the loss calls the head by itself, in pieces."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)
        fully_shard([self.norm, self.head], reshard_after_forward=False)
        fully_shard(self)

    def forward(self, inputs):
        return self.norm(inputs)

    def loss(self):
        return sum(self.head(piece).square().sum() for piece in self(torch.randn(4, 4)).chunk(2))

    @property
    def is_sharded(self):
        return all(isinstance(parameter, DTensor) for parameter in self.parameters())


def fails():
    raise OSError("in forward")


@pytest.mark.parametrize("raises", [False, True])
def test_a_forward_of_fully_shard_that_nothing_ends_is_ended_and_its_parameters_freed(raises):
    with fake_rank(0, 1):
        model = Grouped()
        model.set_requires_gradient_sync(False)
        model.loss().backward()  # its gradients are accumulated
        if raises:
            model.head.register_forward_hook(lambda *_: fails())
            with pytest.raises(OSError, match="in forward"):
                model.loss()
        else:
            with torch.no_grad():
                model.loss()
        assert not model.is_sharded
        reshard(model.modules())
        assert model.is_sharded
        states = [each._get_fsdp_state() for each in (model, model.head)]
        assert states[0]._state_ctx.iter_forward_root is None  # the next forward waits for the current stream
        for state in states:
            assert {state._training_state, *(each._training_state for each in groups_of_parameters(state))} == {
                TrainingState.IDLE
            }
            assert not state._modules_to_run_forward
        params = [each.unsharded_param for each in groups_of_parameters(states[1])[0].fsdp_params]
        assert all(each.grad is not None for each in params)


def test_a_forward_of_fully_shard_that_raised_in_a_root_without_parameters_is_ended():
    with fake_rank(0, 1):
        model = fully_shard(nn.Sequential(fully_shard(nn.Linear(2, 2)), nn.Identity()))
        model[1].register_forward_hook(lambda *_: fails())
        with pytest.raises(OSError, match="in forward"):
            model(torch.ones(1, 2))
        state = model._get_fsdp_state()
        assert state._training_state is TrainingState.FORWARD
        reshard_before_writing([model[0].weight])
        assert state._training_state is TrainingState.IDLE and state._state_ctx.iter_forward_root is None


def test_a_forward_of_fully_shard_goes_on_where_its_own_code_frees_parameters():
    with fake_rank(0, 1):
        model, found = Grouped(), []

        def free(*_):
            reshard(model.modules())
            found.append(model.is_sharded)

        model.head.register_forward_pre_hook(free)
        model.head.register_full_backward_hook(free)
        model.loss().backward()
        assert found == [False] * 4
        assert all(each.grad is not None for each in model.head.parameters())


def test_a_backward_of_fully_shard_keeps_the_parameters_that_it_needs_still():
    with fake_rank(0, 1):
        model = fully_shard(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))))
        model[1].register_full_backward_hook(lambda *_: reshard(model.modules()))
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
        assert all(isinstance(each, DTensor) and each.grad is not None for each in model.parameters())


class Scored(nn.Linear):
    def score(self):
        reshard([self])
        return isinstance(self.weight, DTensor)


def test_a_forward_that_is_another_method_goes_on_where_its_own_code_frees_parameters():
    with fake_rank(0, 1):
        model = fully_shard(Scored(2, 2))
        register_fsdp_forward_method(model, "score")
        assert not model.score()


def test_modes_of_a_program_are_seen():
    assert not has_modes()
    for mode in (torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta")):
        with mode:
            assert has_modes()
        assert not has_modes()
    torch.set_default_device("meta")
    assert has_modes()
    torch.set_default_device(None)
    with torch.no_grad():
        assert not has_modes()


def test_an_optimizer_without_torchs_constructor_has_all_that_it_sets_but_values():
    class Bare(torch.optim.Optimizer):
        def __init__(self):
            take_torchs_attributes(self)

        def step(self, closure=None):
            stepped.append(self)

    stepped = []
    whole = torch.optim.SGD([torch.zeros(1)])
    bare = Bare()
    assert vars(whole).keys() - vars(bare).keys() == {"state", "param_groups", "defaults"}
    bare.register_step_pre_hook(lambda *_: stepped.append("before"))
    bare.step()
    assert stepped == ["before", bare]
    assert whole._optimizer_step_pre_hooks is not bare._optimizer_step_pre_hooks
    assert Bare()._optimizer_step_pre_hooks == {}  # nobody else's


def test_parts_in_eval_are_named_by_their_top():
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.Dropout()), nn.BatchNorm1d(1))
    model[1].register_module("nothing", None)
    assert in_eval(model) == []
    model[0][1].eval()
    assert in_eval(model) == ["0.1"]
    model[0][0].eval()  # the mode of what holds them says nothing
    assert in_eval(model) == ["0"] and in_eval(model[0]) is None
    model[1].eval()
    assert in_eval(model) is None and in_eval(model[1]) is None and in_eval(nn.Linear(1, 1)) == []
