"""Semi-synchronous optimizers in one process: schedules, the outer step, state, what is refused; torchrec's facts."""

import contextlib
import copy
import functools

import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.errors import (
    AlgorithmError,
    GradientError,
    LayoutError,
    MismatchError,
    OptionError,
    PartialLoadError,
    StateError,
)
from shardopt.optim.backward import in_backward
from shardopt.optim.semi_sync import SemisyncOptimizer
from shardopt.optim.semi_sync import outer as outer_half
from shardopt.optim.semi_sync.islands.buckets import Buckets
from shardopt.optim.semi_sync.islands.schedule import SyncSchedule, fragments_by_name
from shardopt.optim.semi_sync.weights import Weights
from tests.support.islands import FRAGMENT_OF, assert_close, batch_of, loss_of, plain_model, simulate

FRAGMENTS = {"every": 6, "fragments": 2, "delay": 2, "alpha": 0.25}


def alone(model=None, algorithm="adamw", inner=None, **options):
    model = plain_model() if model is None else model
    optimizer = shardopt.keyed(algorithm, model.named_parameters(), **({"lr": 0.05} | (inner or {})))
    return model, shardopt.SemiSync(optimizer, process_group=None, **({"every": 4} | options))


def train(model, optimizer, steps):
    for step in steps:
        loss_of(model, batch_of(0, step, next(model.parameters()).dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_every_fragment_is_due_once_an_interval_and_merged_after_the_delay():
    for every in range(1, 9):
        for fragments in range(1, every + 1):
            for delay in range(every):
                schedule = SyncSchedule(every, fragments, delay)
                due = {step: schedule.due(step) for step in range(-9, 3 * every + 1)}
                firsts = [(k + 1) * every // fragments for k in range(fragments)]
                wanted = {first + n * every: k for k, first in enumerate(firsts) for n in range(3)}
                assert {step: k for step, k in due.items() if k is not None} == {
                    step: k for step, k in wanted.items() if step <= 3 * every
                }
                for step in range(3 * every):
                    assert schedule.merged(step) == due.get(step - delay)
                    begun = [due[s] for s in range(max(1, step - delay + 1), step + 1) if due[s] is not None]
                    assert list(schedule.in_flight(step)) == begun


@pytest.mark.parametrize(
    ("options", "name"),
    [
        *(({"every": 0}, "every"), ({"every": 2.0}, "every"), ({"fragments": 5}, "fragments")),
        *(({"delay": 4}, "delay"), ({"delay": -1}, "delay"), ({"alpha": 1.0}, "alpha"), ({"alpha": "x"}, "alpha")),
    ],
)
def test_options_out_of_range(options, name):
    with pytest.raises(OptionError, match=name):
        alone(**options)


def test_fragments_follow_from_names_and_sizes_alone():
    assert fragments_by_name({name: 1 for name in ("l.10.w", "l.9.w", "l.1.w", "l.2.w")}, 2) == {
        **{"l.1.w": 0, "l.2.w": 0},
        **{"l.9.w": 1, "l.10.w": 1},
    }
    sizes = {name: p.numel() for name, p in plain_model().named_parameters()}
    assert fragments_by_name(dict(reversed(sizes.items())), 2) == FRAGMENT_OF
    assert set(fragments_by_name({"a": 0, "b": 0}, 2).values()) == {0, 1}


@pytest.mark.parametrize("options", [{"every": 4}, FRAGMENTS], ids=["whole", "fragments"])
def test_one_island_trains_what_the_papers_say(options):
    model, optimizer = alone(**options)
    train(model, optimizer, range(15))
    (wanted,), anchors = simulate(1, 15, **options)
    assert_close(weights(model), wanted)
    assert_close(dict(optimizer.anchors), anchors)


@pytest.mark.parametrize("options", [{"every": 4}, FRAGMENTS], ids=["whole", "fragments"])
@pytest.mark.parametrize("resumed_at", [3, 4, 7, 9])
def test_state_resumes_exactly_and_looking_at_it_changes_nothing(options, resumed_at):
    model, optimizer = alone(**options)
    train(model, optimizer, range(resumed_at))
    state, model_state = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    copied_model, copied = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(resumed_at, 15))
    other, resumed = alone(plain_model(seed=1), **options)
    resumed.init_state(names=state["state"])
    other.load_state_dict(model_state)
    resumed.load_state_dict(state)
    train(other, resumed, range(resumed_at, 15))
    never_looked, plain = alone(**options)
    train(never_looked, plain, range(15))
    train(copied_model, copied, range(resumed_at, 15))
    for each in (other, never_looked, copied_model):
        assert all(torch.equal(weights(each)[name], value) for name, value in weights(model).items())
    train(model, optimizer, range(15, 17))  # and back, by what has an exchange under way
    if state["state"].keys() == optimizer.state_dict()["state"].keys():
        train(model, optimizer, range(17, 19))
        model.load_state_dict(model_state)
        optimizer.load_state_dict(state)
        train(model, optimizer, range(resumed_at, 15))
        assert all(torch.equal(weights(other)[name], value) for name, value in weights(model).items())


def test_a_load_of_nothing_changes_nothing_while_an_exchange_is_under_way():
    (model, optimizer), (other, plain) = alone(**FRAGMENTS), alone(**FRAGMENTS)
    for each in (model, optimizer), (other, plain):
        train(*each, range(4))
        if each[1] is optimizer:
            optimizer.load_state_dict({"state": {}}, strict=False)
        train(*each, range(4, 9))
    assert all(torch.equal(weights(other)[name], value) for name, value in weights(model).items())


@pytest.mark.parametrize(
    ("saved", "here", "name"),
    [
        *(({"every": 4}, {"every": 5}, "every"), ({}, {"alpha": 0.5}, "alpha"), ({"delay": 2}, {"delay": 1}, "delay")),
        *(({}, {"fragments": 2}, "fragments"), ({}, {"outer": "adamw"}, "algorithm")),
    ],
)
def test_other_options_in_the_middle_of_an_interval_are_refused_by_name(saved, here, name):
    model, optimizer = alone(**saved)
    train(model, optimizer, range(6))
    _, resumed = alone(**{**saved, **here})
    resumed.init_state()
    before = copy.deepcopy(resumed.state_dict())
    with pytest.raises(MismatchError, match=name):
        resumed.load_state_dict(optimizer.state_dict())
    assert str(before) == str(resumed.state_dict())


def test_where_islands_have_met_any_interval_follows():
    model, optimizer = alone(every=4, fragments=2, delay=1, alpha=0.5)
    train(model, optimizer, range(7))
    assert not optimizer.at_sync_point
    averages = shardopt.EMA(model)
    averages.attach(optimizer)
    with averages.swap(), pytest.raises(StateError, match="averages"):
        optimizer.sync()
    optimizer.sync()
    assert optimizer.at_sync_point
    now = weights(model)
    assert all(torch.equal(anchor, now[name]) for name, anchor in optimizer.anchors.items())
    optimizer.sync()  # of nothing
    assert all(torch.equal(value, now[name]) for name, value in weights(model).items())
    _, resumed = alone(every=3)
    resumed.init_state()
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.at_sync_point


def test_bf16_parameters_have_fp32_anchors():
    model, optimizer = alone(plain_model(torch.bfloat16))
    before = weights(model)
    train(model, optimizer, range(4))
    anchors = optimizer.anchors
    assert all(anchor.dtype == torch.float32 for anchor in anchors.values())
    for name, value in weights(model).items():
        assert value.dtype == torch.bfloat16 and torch.equal(value, anchors[name].bfloat16())
        assert not torch.equal(anchors[name], value.float()) or before[name].numel() < 9
    # Weights that no step changes have no outer gradient, though they cannot hold the anchor.
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.0, 0.0
    optimizer.outer.param_groups[0]["momentum"] = 0.0
    still = {name: anchor.clone() for name, anchor in anchors.items()}
    train(model, optimizer, range(4, 8))
    assert all(torch.equal(anchor, still[name]) for name, anchor in optimizer.anchors.items())


def test_masters_meet_in_the_place_of_the_parameters_made_from_them():
    model, optimizer = alone(plain_model(torch.bfloat16), inner={"master_dtype": torch.float32})
    train(model, optimizer, range(4))
    for name, param in model.named_parameters():
        master = optimizer.inner.state[param]["master"]
        assert torch.equal(master, optimizer.anchors[name])
        assert torch.equal(param.detach(), master.bfloat16())
    train(model, optimizer, range(4, 6))  # steps the masters on from there
    moved = [
        (optimizer.inner.state[p]["master"] - optimizer.anchors[n]).abs().max() for n, p in model.named_parameters()
    ]
    assert 0 < max(moved) < 0.2


def test_an_outer_optimizer_of_another_kind():
    seen = []
    model, optimizer = alone(outer="adamw", outer_options={"lr": 0.1})
    assert optimizer.outer.algorithm == "AdamW" and optimizer.outer.param_groups[0]["lr"] == 0.1
    model, optimizer = alone(
        outer=lambda anchors: shardopt.GradientClippingOptimizer(
            shardopt.keyed("sgd", anchors, lr=1.0), shardopt.GradientClipping.NORM, 1e-3
        )
    )
    optimizer.outer.register_step_post_hook(lambda *unused: seen.append(1))
    before = weights(model)
    train(model, optimizer, range(8))
    assert len(seen) == 2
    moved = sum((value - before[name]).square().sum() for name, value in weights(model).items()).sqrt()
    assert 0 < moved <= 2e-3
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(model, optimizer, range(1))
    schedule.step()
    assert optimizer.inner.param_groups[0]["lr"] == 0.025 and optimizer.outer.param_groups[0]["lr"] == 1.0


def test_what_cannot_be_synchronized():
    model = plain_model()
    with pytest.raises(AlgorithmError, match="Schedule-Free"):
        alone(model, "schedulefreeadamw")
    with pytest.raises(AlgorithmError, match="evaluates"):
        alone(model, outer="lbfgs")
    with pytest.raises(StateError, match="KeyedOptimizer"):
        shardopt.SemiSync(torch.optim.SGD(model.parameters(), 0.1), every=2, process_group=None)
    for outer in (3, torch.optim.SGD(model.parameters(), 0.1)):
        with pytest.raises(OptionError, match="outer"):
            alone(model, outer=outer)
    with pytest.raises(StateError, match="anchors"):
        alone(model, outer=lambda anchors: shardopt.keyed("sgd", dict(list(anchors.items())[1:]), lr=1.0))
    with pytest.raises(LayoutError, match="complex"):
        alone(torch.nn.ParameterDict({"w": torch.zeros(2, dtype=torch.complex64)}), "sgd")
    with pytest.raises(AlgorithmError, match="in backward"):
        shardopt.SemiSync(in_backward(plain_model(), "sgd", lr=0.1), every=2, process_group=None)
    _, optimizer = alone(model)
    with pytest.raises(StateError, match=r"inner\.as_torch"):
        optimizer.as_torch()


def test_groups_are_added_where_islands_have_met():
    model, optimizer = alone()
    extra = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    train(model, optimizer, range(3))
    with pytest.raises(StateError, match="sync"):
        optimizer.add_param_group({"params": {"extra": extra}})
    assert "extra" not in optimizer.inner.params
    train(model, optimizer, range(3, 4))
    optimizer.add_param_group({"params": {"extra": extra}, "lr": 0.5})
    for step in range(4):
        extra.grad = torch.ones_like(extra)
        train(model, optimizer, [step])
    assert torch.equal(optimizer.anchors["extra"], extra.detach()) and float(extra.detach()[0]) != 1.0
    assert {"islands.0.extra", "global.extra", "global.anchors.extra"} <= optimizer.state_dict()["state"].keys()


def test_a_group_that_is_refused_leaves_the_fragments_as_they_were():
    model, optimizer = alone(every=4, fragments=2)
    plainly_trained, plain = alone(every=4, fragments=2)
    with pytest.raises(AlgorithmError, match="weight_decy"):
        optimizer.add_param_group({"params": {"a": torch.nn.Parameter(torch.zeros(500))}, "weight_decy": 1})
    train(model, optimizer, range(6))
    train(plainly_trained, plain, range(6))
    assert all(torch.equal(weights(plainly_trained)[name], value) for name, value in weights(model).items())


def test_frozen_parameters_stay_as_they_are():
    model = plain_model()
    model[0].weight.requires_grad_(False)
    before = weights(model)
    _, optimizer = alone(model, outer="adamw", outer_options={"lr": 0.1, "weight_decay": 0.5}, every=2)
    train(model, optimizer, range(5))
    assert [name for name, value in weights(model).items() if torch.equal(value, before[name])] == ["0.weight"]
    assert torch.equal(optimizer.anchors["0.weight"], before["0.weight"])


def test_an_outer_step_that_fails_is_not_taken_for_one_that_was_taken():
    def make(anchors):
        inner = shardopt.keyed("sgd", anchors, lr=1.0)
        return shardopt.GradientClippingOptimizer(inner, "norm", 1.0, error_if_nonfinite=True)

    model, optimizer = alone(outer=make, every=2, delay=1)
    train(model, optimizer, range(1))
    model[0].bias.grad = torch.full_like(model[0].bias, torch.inf)
    optimizer.step()
    for _ in range(2):
        with pytest.raises(GradientError, match="finite"):
            optimizer.state_dict()


@contextlib.contextmanager
def raising(monkeypatch, error, place, name, call=None):
    """Patches a function so that it raises this after its own work, or after `call`."""
    call = call or getattr(place, name)

    def raises(*args):
        call(*args)
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(place, name, raises)
        yield


def resumable(**options):
    model, optimizer = alone(**options)
    optimizer.init_state()
    train(model, optimizer, range(2))
    return model, optimizer, {"optimizer": optimizer, **optimizer.own({"model": model})}


def test_an_outer_step_that_a_save_began_and_an_interrupt_ended_is_in_no_save_until_a_load(monkeypatch, tmp_path):
    model, optimizer, app = resumable(every=4, delay=2)
    checkpoint.save(tmp_path / "good", app)
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(2, 5))
    with pytest.raises(KeyboardInterrupt), raising(monkeypatch, KeyboardInterrupt, outer_half, "step_by"):
        checkpoint.save(tmp_path / "bad", app)
    refused_save = functools.partial(checkpoint.save, tmp_path / "bad", app)
    copied = functools.partial(copy.deepcopy, optimizer)
    for refused in (refused_save, optimizer.step, optimizer.sync, optimizer.state_dict, copied):
        with pytest.raises(PartialLoadError, match=r"an outer step \(KeyboardInterrupt\) did not end well"):
            refused()
    # What has nothing of it is saved, and a save of it in the background fails until a load, not after it.
    other, other_optimizer, other_app = resumable(every=4)
    for name, saved in (("0", {"model": model}), ("1", {"model": model, "inner": optimizer.inner}), ("2", other_app)):
        checkpoint.save(tmp_path / name, saved)
    train(other, other_optimizer, range(2, 5))
    pending = checkpoint.async_save(tmp_path / "bad", app)
    pending.done.wait(30)
    assert isinstance(pending.failure, PartialLoadError)
    checkpoint.load(tmp_path / "good", app)
    train(model, optimizer, range(2, 8))
    checkpoint.save(tmp_path / "bad", app)
    same, other = alone(every=4, delay=2)
    train(same, other, range(8))
    assert_close(weights(model), weights(same))

    optimizer.load_state_dict(state)
    with pytest.raises(KeyboardInterrupt), raising(monkeypatch, KeyboardInterrupt, outer_half, "step_by"):
        train(model, optimizer, range(5))
    optimizer.load_state_dict(state)
    train(model, optimizer, range(1))


def test_a_merge_that_was_interrupted_is_mended_by_a_load_of_the_weights_too(monkeypatch, tmp_path):
    model, optimizer, app = resumable(every=4, delay=2)
    checkpoint.save(tmp_path / "good", app)
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, range(2, 5))
    with pytest.raises(KeyboardInterrupt), raising(monkeypatch, KeyboardInterrupt, Weights, "mix"):
        train(model, optimizer, range(5, 7))
    optimizer.load_state_dict(state)
    for refused in (optimizer.step, optimizer.sync, lambda: checkpoint.save(tmp_path / "bad", app)):
        with pytest.raises(PartialLoadError, match=r"an outer step \(KeyboardInterrupt\) did not end well"):
            refused()
    checkpoint.load(tmp_path / "good", app)
    train(model, optimizer, range(2, 8))


def test_an_outer_step_that_failed_before_it_changed_anything_is_taken_again(monkeypatch, tmp_path):
    ends = []
    for fails in (True, False):
        model, optimizer, app = resumable(every=4, delay=2)
        train(model, optimizer, range(2, 5))
        if fails:
            with pytest.raises(KeyboardInterrupt), raising(monkeypatch, KeyboardInterrupt, Buckets, "wait"):
                checkpoint.save(tmp_path / "a", app)
            hook = optimizer.outer.register_step_pre_hook(lambda *_: [][1])
            with pytest.raises(IndexError):
                checkpoint.save(tmp_path / "a", app)
            hook.remove()
        checkpoint.save(tmp_path / f"saved-{fails}", app)
        train(model, optimizer, range(5, 8))
        ends.append(weights(model))
    assert_close(*ends)


def test_an_outer_optimizer_whose_first_part_alone_has_stepped_is_not_saved(tmp_path):
    def make(anchors):
        return shardopt.keyed("sgd", anchors, lr=1.0, groups=[{"match": "bias", "algorithm": "adamw", "lr": 0.1}])

    model, optimizer, app = resumable(outer=make, every=4, delay=2)
    checkpoint.save(tmp_path / "good", app)
    train(model, optimizer, range(2, 5))

    def refuse(*unused):
        raise GradientError("no")

    hook = optimizer.outer._children[1].register_step_pre_hook(refuse)
    with pytest.raises(GradientError):
        checkpoint.save(tmp_path / "bad", app)
    hook.remove()
    with pytest.raises(PartialLoadError, match="optimizer: found an optimizer that may be half changed"):
        checkpoint.save(tmp_path / "bad", app)
    checkpoint.load(tmp_path / "good", app)
    train(model, optimizer, range(2, 5))
    checkpoint.save(tmp_path / "bad", app)


def test_a_load_that_was_interrupted_while_an_exchange_runs_is_mended_by_another(tmp_path):
    model, optimizer, app = resumable(every=4, delay=2)
    checkpoint.save(tmp_path / "good", app)
    train(model, optimizer, range(2, 5))

    def interrupt(*unused):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.load(tmp_path / "good", app, progress=interrupt)
    for refused in (optimizer.step, optimizer.state_dict, lambda: checkpoint.save(tmp_path / "bad", app)):
        with pytest.raises(PartialLoadError, match=r"loading .*/good did not end well"):
            refused()
    checkpoint.load(tmp_path / "good", app)
    train(model, optimizer, range(2, 8))


def test_weights_of_every_combined_optimizer_are_those_of_an_island():
    pairs = [alone(), alone()]
    for model, optimizer in pairs:
        train(model, optimizer, range(1))
    combined = shardopt.optim.CombinedOptimizer([(str(i), optimizer) for i, (_, optimizer) in enumerate(pairs)])
    unshared = {id(tensor) for _, tensors in combined.unshared_tensors() for tensor in tensors}
    assert unshared == {id(p) for model, _ in pairs for p in model.parameters()}


def test_buckets_hold_every_tensor_once():
    like = [torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64), torch.zeros(0, 4), torch.zeros(()), torch.zeros(40)]
    buckets = Buckets(like, bucket_bytes=32)
    assert [view.shape for view in buckets.views] == [tensor.shape for tensor in like]
    assert sorted(flat.numel() for flat in buckets.flats) == [4, 4, 40]
    for number, view in enumerate(buckets.views):
        view.fill_(number)
    assert [float(view.sum()) for view in buckets.views] == [0.0, 4.0, 0.0, 3.0, 160.0]
    assert [flat.numel() for flat in Buckets([torch.zeros(n) for n in (1, 2, 4)], [(0,), None, (0,)]).flats] == [5, 2]


# What torchrec's own tests of its SemisyncOptimizer say of it.


class Recorder(torch.optim.SGD):
    """An optimizer with a global step of its own, as torchrec's global optimizers have."""

    calls: list

    def global_step(self, local_step_counter, closure):
        self.calls.append(int(local_step_counter))


def torchrecs(steps=16, recorder=True, **options):
    torch.manual_seed(0)
    params = {"dense": torch.nn.Parameter(torch.randn(5, 5)), "dense2": torch.nn.Parameter(torch.randn(5, 5))}
    made = []

    def make(tensors):
        made.append((Recorder if recorder else torch.optim.SGD)(tensors, lr=0.1, momentum=0.9))
        made[0].calls = []
        return made[0]

    local = shardopt.optim.KeyedOptimizerWrapper(
        params, lambda tensors: torch.optim.SGD(tensors, lr=0.01, momentum=0.5)
    )
    outer = shardopt.optim.KeyedOptimizerWrapper(params, make)
    optimizer = SemisyncOptimizer(list(params.values()), local, outer, steps, **options)
    return params, local, outer, optimizer, made[0]


def give_gradients(params):
    for number, param in enumerate(params.values()):
        param.grad = torch.full_like(param, number + 1.0)


def test_torchrecs_attributes_counters_groups_and_names():
    params, local, outer, optimizer, _ = torchrecs(12)
    assert optimizer._optimizer is local and optimizer._global_optimizer is outer and optimizer._num_local_steps == 12
    assert torchrecs()[3]._num_local_steps == 16
    counters = [optimizer._local_step_counter, optimizer._global_step_counter]
    assert counters[0] is not counters[1]
    for counter in counters:
        assert counter.dtype == torch.int64 and counter.device.type == "cpu" and counter.ndim == 0 and counter == 0
    groups = optimizer.param_groups
    assert [group["lr"] for group in groups] == [0.01, 0.1]
    assert all({*map(id, group["params"])} == {*map(id, params.values())} for group in groups)
    names = optimizer.params
    assert names.keys() == {*params, "__semisync_global_step_counter__", "__semisync_local_step_counter__"}
    assert all(names[name] is param for name, param in params.items())
    assert names["__semisync_local_step_counter__"] is counters[0]
    assert all(key in repr(optimizer) for key in ("semi_sync_local_optim", "semi_sync_global_optim"))
    grouped = [{"params": [each]} for each in params.values()]
    assert [*map(id, SemisyncOptimizer(grouped, local, outer)._worker_model_params)] == [*map(id, params.values())]


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_torchrecs_global_steps_follow_every_so_many_local_ones(steps):
    params, local, _, optimizer, recorder = torchrecs(steps)
    stepped = []
    local.register_step_post_hook(lambda *unused: stepped.append(1))
    for done in range(1, 8):
        give_gradients(params)
        optimizer.step()
        assert len(stepped) == done == int(optimizer._local_step_counter)
        assert recorder.calls == [*range(steps, done + 1, steps)]
        assert int(optimizer._global_step_counter) == done // steps


def test_torchrecs_state_has_prefixes_and_counters():
    params, local, outer, optimizer, _ = torchrecs()
    local.state[params["dense"]] = {"momentum_buffer": torch.full((5, 5), 1.5)}
    outer.state[params["dense"]] = {"momentum_buffer": torch.full((5, 5), 2.5)}
    entries = optimizer.state[params["dense"]]
    counters = {"__semisync_global_step_counter__", "__semisync_local_step_counter__"}
    both = {"semi_sync_local_momentum_buffer", "semi_sync_global_momentum_buffer"}
    assert entries.keys() == both | counters
    assert entries["semi_sync_local_momentum_buffer"][0, 0] == 1.5
    assert entries["semi_sync_global_momentum_buffer"][0, 0] == 2.5
    assert all(entries[name] == 0 for name in counters)
    state = {"semi_sync_local_momentum": 1, "semi_sync_local_step": 2, "other_key": 3, "semi_sync_global_momentum": 4}
    extract = SemisyncOptimizer._extract_prefixed_state
    assert extract(state, "semi_sync_local_") == {"momentum": 1, "step": 2}
    assert extract(state, "semi_sync_global_") == {"momentum": 4} and extract(state, "nonexistent_") == {}


def test_torchrecs_delegations():
    params, local, outer, optimizer, _ = torchrecs()
    give_gradients(params)
    optimizer.zero_grad(set_to_none=False)
    assert all(param.grad.eq(0).all() for param in params.values())
    optimizer.zero_grad()
    assert all(param.grad is None for param in params.values())
    for save in (True, False):
        optimizer.save_param_groups(save)
        assert optimizer.defaults["_save_param_groups"] == save
        assert ("param_groups" in local.state_dict()) == ("param_groups" in outer.state_dict()) == save
    seen = []
    local.set_optimizer_step = outer.set_optimizer_step = seen.append
    optimizer.set_optimizer_step(7)
    optimizer.update_hyper_parameters({})  # neither takes them
    assert seen == [7, 7]
    with pytest.raises(IndexError, match="global_params"):
        SemisyncOptimizer([], local, outer)


def test_torchrecs_optimizer_makes_dilocos_steps_by_itself():
    params, _, _, optimizer, _ = torchrecs(3, recorder=False)
    anchors = {name: param.detach().clone() for name, param in params.items()}
    plain = {name: torch.nn.Parameter(anchor.clone()) for name, anchor in anchors.items()}
    semi = shardopt.SemiSync(
        shardopt.keyed(torch.optim.SGD, plain, lr=0.01, momentum=0.5),
        outer_options={"lr": 0.1, "momentum": 0.9},
        every=3,
        process_group=None,
    )
    for step in range(7):
        if step == 4:
            state = copy.deepcopy((optimizer.state_dict(), [param.detach() for param in params.values()]))
        for each, stepping in ((params, optimizer), (plain, semi)):
            give_gradients(each)
            stepping.step()
    for name, param in params.items():
        assert_close({name: param.detach()}, {name: plain[name].detach()}, 1e-6)
    other, _, _, resumed, _ = torchrecs(3, recorder=False)
    resumed.init_state()
    for param, value in zip(other.values(), state[1], strict=True):
        param.data.copy_(value)
    resumed.load_state_dict(state[0])
    for _ in range(4, 7):
        give_gradients(other)
        resumed.step()
    assert all(torch.equal(other[name], param) for name, param in params.items())
    assert int(resumed._local_step_counter) == 7 and int(resumed._global_step_counter) == 2


def test_torchrecs_global_step_that_was_interrupted_is_mended_by_a_load(tmp_path):
    def interrupt(*unused):
        raise KeyboardInterrupt

    param = torch.nn.Parameter(torch.ones(2))
    local, outer = (shardopt.keyed("sgd", {"w": param}, lr=0.5) for _ in range(2))
    optimizer = SemisyncOptimizer([param], local, outer, 1)
    app = {"w": param, "optimizer": optimizer}
    checkpoint.save(tmp_path / "good", app)
    param.grad = torch.ones_like(param)
    hook = outer.register_step_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    hook.remove()
    for refused in (optimizer.step, lambda: checkpoint.save(tmp_path / "bad", app)):
        with pytest.raises(PartialLoadError, match=r"a global step \(KeyboardInterrupt\) did not end well"):
            refused()
    checkpoint.load(tmp_path / "good", app)
    optimizer.step()


@pytest.mark.parametrize("has_global_step", [False, True])
def test_torchrecs_global_steps_reach_the_masters_of_the_local_optimizer(has_global_step):
    param = torch.nn.Parameter(torch.full((5,), 3.0, dtype=torch.bfloat16))
    local = shardopt.keyed("adamw", {"w": param}, lr=0.1, weight_decay=0.0, master_dtype=torch.float32)
    outer = shardopt.keyed("sgd", {"w": param}, lr=0.5)
    if has_global_step:
        outer.global_step = lambda counter, closure: param.data.fill_(1.0)
    optimizer = SemisyncOptimizer([param], local, outer, 2)
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
    met, master = param.detach().clone(), local.state[param]["master"]
    torch.testing.assert_close(met.float(), torch.full((5,), 1.0 if has_global_step else 2.9), atol=0.02, rtol=0)
    assert torch.equal(master, met.float())
    param.grad = torch.zeros_like(param)
    local.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(param, met)
