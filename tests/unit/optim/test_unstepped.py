"""State that never stepped means the same as none: for some parameters alone it is made, told, dropped and loaded."""

import pytest
import torch
from torch.distributed.tensor import Shard

import shardopt
from shardopt import checkpoint
from shardopt.errors import CorruptionError, MismatchError, StateError
from shardopt.sharding.view import local_tensors
from tests.support.cases import ELEMENTWISE_CASES
from tests.support.fake_rank import fake_rank, shard

# In the default run the first options of each algorithm and implementation.
FIRST = {(case.values[0], case.id.rpartition("-")[2]): case for case in reversed(ELEMENTWISE_CASES)}.values()
CASES = [
    case if case in FIRST else pytest.param(*case.values, id=case.id, marks=pytest.mark.exhaustive)
    for case in ELEMENTWISE_CASES
]
OTHERS = [
    pytest.param("muon", {}, id="muon"),
    pytest.param("adafactor", {}, id="adafactor"),
    pytest.param("rowwiseadagrad", {"initial_accumulator_value": 0.5}, id="rowwiseadagrad"),
    pytest.param("rowwiseadam", {}, id="rowwiseadam"),
]


def parameters(mesh=None):
    numbers = torch.Generator().manual_seed(1)
    full = {name: torch.randn(4, 6, generator=numbers) for name in ("a", "a.b", "c")}
    return {
        name: torch.nn.Parameter(shard(tensor, mesh, Shard(0)) if mesh and name != "c" else tensor)
        for name, tensor in full.items()
    }


def step(optimizer, *names):
    for name, parameter in optimizer.params.items():
        parameter.grad = torch.ones_like(parameter) if name in names else None
    optimizer.step()


def names_with_state(optimizer):
    return sorted(optimizer.state_dict()["state"])


@pytest.mark.parametrize(("name", "options"), [*CASES, *OTHERS])
def test_state_as_it_was_made_is_told_from_what_was_stepped(name, options):
    with fake_rank(0, 2) as mesh:
        try:
            optimizer = shardopt.keyed(name, parameters(mesh if name != "muon" else None), **options)
        except ValueError:
            return  # what torch refuses
        optimizer.init_state(names=["a.b"])
        has_state = bool(optimizer.state_dict()["state"]["a.b"]) if names_with_state(optimizer) else False
        at_construction = name.lower() == "adagrad"  # torch's makes all of it, and none again
        if not at_construction:
            assert names_with_state(optimizer) == (["a.b"] if has_state else [])
        optimizer.init_state()
        all_names = {"a", "a.b", "c"}
        assert optimizer.unstepped_state([*all_names, "?"]) == (
            all_names if has_state and not at_construction else set()
        )
        if name != "SGD" or not options.get("fused"):  # torch's fails where parameters have their first step later
            step(optimizer, "a.b")
            assert optimizer.unstepped_state(all_names) == ({"a", "c"} if has_state and not at_construction else set())


@pytest.mark.parametrize(
    "options", [{"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9, "dampening": 0.5, "fused": True}]
)
def test_what_someone_wrote_is_stepped(options):
    optimizer = shardopt.keyed("sgd", parameters(), lr=0.1, **options)
    optimizer.init_state()
    optimizer.state[optimizer.params["a"]]["momentum_buffer"].fill_(1.0)
    assert optimizer.unstepped_state(["a", "c"]) == {"c"}


def test_names_may_be_those_of_frozen_parameters_and_must_be_known():
    params = parameters()
    params["a"].requires_grad_(False)
    optimizer = shardopt.keyed("adam", params)
    optimizer.init_state(names=[])
    assert names_with_state(optimizer) == []
    optimizer.init_state(names=["a"])
    assert names_with_state(optimizer) == ["a"]
    with pytest.raises(StateError, match=r"names: found weight; required some of .*; mend their spelling"):
        optimizer.init_state(names=["c", "weight"])
    assert names_with_state(optimizer) == ["a"]
    optimizer.drop_state(["a", "c", "nobody's"])
    assert names_with_state(optimizer) == []


def combined():
    first = shardopt.keyed("adam", {"a": parameters()["a"]})
    second = shardopt.keyed("sgd", parameters(), lr=0.1, momentum=0.9)
    warm = shardopt.WarmupOptimizer(second, [shardopt.WarmupStage()], lr=0.1)
    return shardopt.optim.CombinedOptimizer([("x", first), ("y", shardopt.GradientClippingOptimizer(warm))])


def test_names_within_combined_optimizers_and_wrappers():
    optimizer = combined()
    (own,) = names_with_state(optimizer)  # what the warm-up counts
    optimizer.init_state(names=["x.a", "y.a.b"])
    assert names_with_state(optimizer) == sorted(["x.a", "y.a.b", own])
    assert optimizer.unstepped_state(["x.a", "y.a.b", "y.c", own]) == {"x.a", "y.a.b"}
    step(optimizer, "x.a")
    assert optimizer.unstepped_state(["x.a", "y.a.b"]) == {"y.a.b"}
    optimizer.drop_state(["y.a.b", own])
    assert names_with_state(optimizer) == sorted(["x.a", own])
    with pytest.raises(StateError, match=r"names: found y\.d"):
        optimizer.init_state(names=["x.a", "y.d"])


def test_state_of_no_parameter():
    optimizer = shardopt.keyed("lbfgs", parameters())
    optimizer.init_state(names=["c"])
    assert names_with_state(optimizer) == ["c"]
    optimizer.init_state(names=["__global__"])
    assert names_with_state(optimizer) == ["__global__", "c"]
    assert optimizer.unstepped_state(["c", "__global__"]) == {"c", "__global__"}
    optimizer.state["__global__"]["n_iter"] += 1
    assert optimizer.unstepped_state(["c", "__global__"]) == {"c"}
    optimizer.drop_state(["__global__"])
    assert names_with_state(optimizer) == ["c"]


class AsTorchrecs(shardopt.optim.KeyedOptimizerWrapper):
    """One whose `init_state` knows of no names."""

    def init_state(self, sparse_grad_parameter_names=None):
        super().init_state(sparse_grad_parameter_names)


def old_style(params):
    return AsTorchrecs(params, lambda tensors: torch.optim.Adam(tensors))


def test_a_part_that_knows_of_no_names():
    optimizer = shardopt.optim.CombinedOptimizer([("x", old_style(parameters()))])
    step(optimizer, "x.c")
    optimizer.init_state(names=["x.a"])
    assert names_with_state(optimizer) == ["x.a", "x.c"]
    optimizer.init_state()
    assert names_with_state(optimizer) == ["x.a", "x.a.b", "x.c"]


def test_a_whole_that_knows_of_no_names_is_initialized_where_it_has_no_state(tmp_path):
    saved = old_style(parameters())
    step(saved, "a", "a.b", "c")
    checkpoint.save(tmp_path / "c", {"o": saved})
    fresh = old_style(parameters())
    checkpoint.load(tmp_path / "c", {"o": fresh}, init_state=True)
    assert torch.equal(fresh.state[fresh.params["c"]]["exp_avg"], saved.state[saved.params["c"]]["exp_avg"])


def save_stepped(path, *names, options=()):
    optimizer = shardopt.keyed("adamw", parameters(), **dict(options))
    if names:
        step(optimizer, *names)
    checkpoint.save(path, {"o": optimizer})
    return optimizer


def test_a_load_makes_and_drops_state_only_if_it_is_told_to(tmp_path):
    save_stepped(tmp_path / "c", "a")
    for init in (False, True):
        optimizer = shardopt.keyed("adamw", parameters())
        if init:
            optimizer.init_state()
        before = names_with_state(optimizer)
        with pytest.raises(MismatchError, match="init_state"):
            checkpoint.load(tmp_path / "c", {"o": optimizer})
        assert names_with_state(optimizer) == before
        checkpoint.load(tmp_path / "c", {"o": optimizer}, init_state=True)
        assert names_with_state(optimizer) == ["a"]


@pytest.mark.parametrize(("has_state", "times"), [(True, 1), (False, 2)])
def test_the_app_is_looked_at_again_only_where_state_was_made(tmp_path, monkeypatch, has_state, times):
    saved, app = (shardopt.keyed("adamw", parameters(), lr=0.1) for _ in range(2))
    saved.init_state()
    checkpoint.save(tmp_path / "c", {"optimizer": saved})
    if has_state:
        app.init_state()
    calls, state_dict = [], type(app).state_dict
    monkeypatch.setattr(type(app), "state_dict", lambda self: calls.append(self) or state_dict(self))
    checkpoint.load(tmp_path / "c", {"optimizer": app}, init_state=True)
    assert len(calls) == times and set(app.state_dict()["state"]) == {"a", "a.b", "c"}


def test_a_checkpoint_from_before_the_first_step(tmp_path):
    save_stepped(tmp_path / "c")
    optimizer = shardopt.keyed("adamw", parameters())
    optimizer.init_state()
    checkpoint.load(tmp_path / "c", {"o": optimizer}, init_state=True)
    assert names_with_state(optimizer) == []


@pytest.mark.parametrize("early", [False, True])
def test_what_was_stepped_and_is_not_stored_is_refused_and_nothing_changed(tmp_path, early):
    save_stepped(tmp_path / "c", "a", "c")
    optimizer = shardopt.keyed("adamw", parameters())
    if early:
        optimizer.init_state()
    step(optimizer, "a.b")
    before = names_with_state(optimizer)
    with pytest.raises(MismatchError) as caught:
        checkpoint.load(tmp_path / "c", {"o": optimizer}, init_state=True)
    assert [problem.key for problem in caught.value.problems] == ["o.state.a.b"]
    assert optimizer.state_dict()["state"]["a.b"]["step"] == 1
    assert names_with_state(optimizer) == before  # what was made has gone again
    step(optimizer, "a")


def test_what_a_refused_load_had_dropped_is_there_again(tmp_path):
    saved = shardopt.keyed("sgd", parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    step(saved, "a")
    checkpoint.save(tmp_path / "c", {"optimizer": saved, "surplus": 1})
    optimizer = shardopt.keyed("sgd", parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    optimizer.init_state(names=["a.b", "c"])
    with pytest.raises(MismatchError, match="surplus"):
        checkpoint.load(tmp_path / "c", {"optimizer": optimizer}, init_state=True)
    assert names_with_state(optimizer) == ["a.b", "c"]
    assert optimizer.unstepped_state(["a", "a.b", "c"]) == {"a.b", "c"}


def test_names_go_through_the_rules_of_rename(tmp_path):
    saved = save_stepped(tmp_path / "c", "a", "a.b")
    renamed = {f"new.{name}": parameter for name, parameter in parameters().items()}
    optimizer = shardopt.keyed("adamw", renamed)
    rules = {r"^o\.state\.": "o.state.new."}
    checkpoint.load(tmp_path / "c", {"o": optimizer}, rename=rules, init_state=True)
    assert names_with_state(optimizer) == ["new.a", "new.a.b"]
    state = optimizer.state_dict()["state"]
    assert torch.equal(state["new.a.b"]["exp_avg"], saved.state_dict()["state"]["a.b"]["exp_avg"])


def test_what_is_not_selected_is_left_alone(tmp_path):
    optimizer = shardopt.keyed("adamw", parameters())
    weight = torch.zeros(2)
    checkpoint.save(tmp_path / "c", {"o": optimizer, "w": torch.ones(2)})
    optimizer.init_state()
    checkpoint.load(tmp_path / "c", {"o": optimizer, "w": weight}, select="^w", init_state=True)
    assert weight.tolist() == [1, 1] and names_with_state(optimizer) == ["a", "a.b", "c"]


def test_a_load_that_fails_in_the_middle_leaves_no_room_of_its_own(tmp_path):
    save_stepped(tmp_path / "c", "a", "c")
    (file,) = (tmp_path / "c").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[4200] ^= 1
    file.write_bytes(data)
    optimizer = shardopt.keyed("adamw", parameters())
    optimizer.init_state(names=["c"])
    with pytest.raises(CorruptionError):
        checkpoint.load(tmp_path / "c", {"o": optimizer}, init_state=True)
    assert names_with_state(optimizer) == ["c"]


def test_a_load_that_is_interrupted_leaves_no_room_of_its_own(tmp_path):
    save_stepped(tmp_path / "c", "a", "c")
    optimizer = shardopt.keyed("adamw", parameters())
    optimizer.init_state(names=["c"])

    def interrupt(*unused):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.load(tmp_path / "c", {"o": optimizer}, init_state=True, progress=interrupt)
    assert names_with_state(optimizer) == ["c"]


def test_restore_falls_back_to_a_checkpoint_of_fewer_parameters(tmp_path):
    manager = checkpoint.Manager(tmp_path)
    optimizer = shardopt.keyed("adamw", parameters())
    for at, names in ((1, ["a"]), (2, ["a", "a.b"])):
        step(optimizer, *names)
        manager.save(at, {"o": optimizer})
    (file,) = (tmp_path / "step-00000002").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[4200] ^= 1
    file.write_bytes(data)
    fresh = shardopt.keyed("adamw", parameters())
    assert manager.restore({"o": fresh}) == 1
    assert names_with_state(fresh) == ["a"]
    step(fresh, "a", "a.b")


def test_a_state_of_plain_values_alone(tmp_path):
    """Without a tensor anywhere in it, the state of an optimizer is stored as one plain value."""
    optimizer = shardopt.keyed("sgd", parameters(), lr=0.1)
    checkpoint.save(tmp_path / "c", {"o": optimizer})
    with_momentum = shardopt.keyed("sgd", parameters(), lr=0.1, momentum=0.9)
    with_momentum.init_state()
    checkpoint.load(tmp_path / "c", {"o": with_momentum}, init_state=True)
    assert names_with_state(with_momentum) == []


def test_shards_of_a_rank(tmp_path):
    with fake_rank(1, 2) as mesh:
        optimizer = shardopt.keyed("sgd", parameters(mesh), lr=0.1, momentum=0.9)
        optimizer.init_state()
        local_tensors(optimizer.state[optimizer.params["a"]]["momentum_buffer"])[0][0, 0] = 1.0
        assert optimizer.unstepped_state(["a", "a.b", "c"]) == {"a.b", "c"}
