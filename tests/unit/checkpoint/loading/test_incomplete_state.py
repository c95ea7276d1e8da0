"""Stored state that lacks what goes with it: of another algorithm, without masters, or with a part left out."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardopt
from shardopt import checkpoint
from shardopt.algorithms import algorithms
from shardopt.checkpoint import Manager, Strictness
from shardopt.errors import MismatchError
from shardopt.optim import CombinedOptimizer
from shardopt.sharding.view import view_of
from tests.harness import run_ranks

NAMES = [spec.name for spec in algorithms()]
LENIENT = Strictness(missing="ignore", unexpected="ignore", dtype="cast")


def of_one(name, gradient=None):
    """An optimizer of one matrix, two steps on unless the gradient is None."""
    weight = nn.Parameter(torch.arange(12.0).reshape(4, 3))
    optimizer = shardopt.keyed(name, {"w": weight}, **({"history_size": 2} if name == "LBFGS" else {"lr": 0.125}))
    for _ in range(0 if gradient is None else 2):
        step(optimizer, torch.full((4, 3), gradient) + torch.arange(3.0))
    return optimizer


def step(optimizer, gradient):
    weight = optimizer.params["w"]
    weight.grad = gradient.to_sparse(1) if optimizer.algorithm == "SparseAdam" else gradient
    optimizer.step(*([lambda: (weight * gradient).sum()] if optimizer.algorithm == "LBFGS" else []))


@cache
def offered_by(name):
    return of_one(name, gradient=1.0).state_dict()


@pytest.mark.parametrize("here", NAMES)
def test_state_of_another_algorithm_is_taken_whole_or_not_at_all(here):
    fresh = of_one(here)
    step(fresh, torch.ones(4, 3))
    for name in NAMES:
        into, offered = of_one(here), offered_by(name)
        into.init_state()
        try:
            into.load_state_dict(offered, strict=False)
        except MismatchError:  # entries of one name and another shape
            continue
        state, there = into.state_dict()["state"].get("w", {}), offered["state"].get("w", {})
        if state.keys() <= there.keys():
            assert all(torch.equal(torch.as_tensor(state[each]), torch.as_tensor(there[each])) for each in state)
            continue
        step(into, torch.ones(4, 3))
        assert torch.equal(into.params["w"], fresh.params["w"]), name


def test_entries_that_are_left_out_are_among_the_unexpected():
    offered = offered_by("AdamW")
    for into, prefix in ((of_one("Rprop"), ""), (CombinedOptimizer([("part", of_one("Rprop"))]), "part.")):
        into.init_state()
        saved = offered if not prefix else CombinedOptimizer([("part", of_one("AdamW", gradient=1.0))]).state_dict()
        unmatched = into.load_state_dict(saved, strict=False)
        entries = [f"state.{prefix}w.{entry}" for entry in offered["state"]["w"]]
        assert set(entries) <= {*unmatched.unexpected_keys} and f"state.{prefix}w" in unmatched.missing_keys


@pytest.mark.parametrize("whose", ["keyed", "torch's"])
def test_state_that_lacks_but_a_maximum_is_taken(tmp_path, caplog, whose):
    of = {"keyed": ("adam", "adamw"), "torch's": (torch.optim.Adam, torch.optim.AdamW)}[whose]
    saved = stepped(app_of(of[0], 0))
    checkpoint.save(tmp_path / "c", saved)
    into = app_of(of[1], amsgrad=True)
    checkpoint.load(tmp_path / "c", into, strict=False, init_state=True)
    assert "does not fit" not in caplog.text
    for there, here in zip(saved["model"].parameters(), into["model"].parameters(), strict=True):
        state = into["optimizer"].state[here]
        assert_equal([state["exp_avg_sq"]], [saved["optimizer"].state[there]["exp_avg_sq"]])
        assert state["step"] == 2 and not state["max_exp_avg_sq"].any()
    if whose == "keyed":
        into["optimizer"].load_state_dict(saved["optimizer"].state_dict(), strict=False)
        assert into["optimizer"].state[next(into["model"].parameters())]["step"] == 2


def app_of(algorithm, seed=1, dtype=torch.float32, part="", is_sharded=False, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(dtype)
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    if isinstance(algorithm, str):
        optimizer = shardopt.keyed(algorithm, model.named_parameters(), lr=0.0625, **options)
        optimizer = CombinedOptimizer([(part, optimizer)]) if part else optimizer
    else:
        optimizer = algorithm(model.parameters(), lr=0.0625, **options)
    return {"model": model, "optimizer": optimizer}


def stepped(app, steps=2):
    for seed in range(steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        app["model"](x.to(next(app["model"].parameters()).dtype)).square().mean().backward()
        app["optimizer"].step()
        app["optimizer"].zero_grad()
    return app


def weights(app):
    return [getattr(each, "full_tensor", lambda each=each: each)().clone() for each in app["model"].parameters()]


def begun_anew(url, app):
    """An app with stored weights and an optimizer of its own."""
    checkpoint.load(url, {"model": app["model"]}, strict=Strictness(unexpected="ignore"))
    return weights(stepped(app))


def assert_equal(found, wanted):
    assert all(map(torch.equal, found, wanted))


ANEW = [("schedule_free_adamw", way) for way in ("made before", "combined", "in two loads", "restored")]
ANEW += [
    (name, "made for the load") for name in ("schedule_free_adamw", "schedule_free_sgd", "shampoo", "soap", "asgd")
]


@pytest.mark.parametrize(("name", "way"), ANEW)
def test_optimizers_begin_anew_on_state_of_another_algorithm(tmp_path, caplog, name, way):
    part = "all" if way == "combined" else ""
    options = {"precondition_1d": True} if name == "soap" else {}  # without, AdamW has all that vectors need
    with Manager(tmp_path / "run") as manager:
        manager.save(2, stepped(app_of("adamw", 0, part=part)))
    url, into = tmp_path / "run" / "step-00000002", app_of(name, part=part, **options)
    if way == "restored":
        with Manager(tmp_path / "run") as manager:
            assert manager.restore(into, strict=False) == 2
    else:
        if way == "made before":
            into["optimizer"].init_state()
        if way == "in two loads":
            checkpoint.load(url, {"model": into["model"]}, strict=Strictness(unexpected="ignore"))
        report = checkpoint.load(
            url,
            into,
            strict=False,
            init_state=way != "made before",
            **({"select": r"^optimizer\."} if way == "in two loads" else {}),
        )
        assert any(key.endswith(".step") for key in report.left_out)
    assert "stored state that does not fit was left out" in caplog.text
    assert_equal(weights(stepped(into)), begun_anew(url, app_of(name, **options)))


def _on_shards(root):
    checkpoint.save(f"{root}/c", stepped(app_of("adamw", 0, is_sharded=True)))
    into = app_of("schedule_free_adamw", is_sharded=True)
    checkpoint.load(f"{root}/c", into, strict=False, init_state=True)
    assert_equal(weights(stepped(into)), begun_anew(f"{root}/c", app_of("schedule_free_adamw", is_sharded=True)))
    bf16, master = torch.bfloat16, {"master_dtype": torch.float32}
    checkpoint.save(f"{root}/b", saved := stepped(app_of("adamw", 0, bf16, is_sharded=True)))
    into = app_of("adam", 1, bf16, is_sharded=True, **master)
    checkpoint.load(f"{root}/b", into, strict=LENIENT, init_state=True)
    assert_equal(weights(into), weights(saved))

    _ranks_without_elements_say_no_other(root)


def _ranks_without_elements_say_no_other(root):
    """A bias of one element: state that was loaded is stepped state, also by the rank that has none of it."""

    def made():
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(4, 1), mesh=init_device_mesh("cpu", (2,)))
        return {"model": model, "optimizer": shardopt.keyed("sgd", model.named_parameters(), lr=0.1, momentum=0.5)}

    checkpoint.save(f"{root}/s", stepped(app := made()))
    wanted = weights(stepped(app))
    for way in ("made for the load", "made before"):
        into = made()
        if way == "made before":
            into["optimizer"].init_state()
        checkpoint.load(f"{root}/s", into, init_state=way != "made before")
        checkpoint.save(f"{root}/{way}", into)
        again = made()
        checkpoint.load(f"{root}/{way}", again, init_state=True)
        assert all(group["untouched"] == [] for group in again["optimizer"].state_dict()["param_groups"])
        assert_equal(weights(stepped(again)), wanted)


def test_so_they_do_on_shards(tmp_path):
    run_ranks(2, _on_shards, str(tmp_path))


@pytest.mark.parametrize("cls", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.Rprop, torch.optim.Adagrad])
def test_so_do_torchs_own(tmp_path, cls):
    checkpoint.save(tmp_path / "c", stepped(app_of("adamw", 0)))
    into = app_of(cls)
    checkpoint.load(tmp_path / "c", into, strict=False, init_state=True)
    assert_equal(weights(stepped(into)), begun_anew(tmp_path / "c", app_of(cls)))


def test_so_they_do_on_files_of_torch_which_name_no_algorithm(tmp_path):
    app = stepped(app_of(torch.optim.AdamW, 0))
    torch.save({key: each.state_dict() for key, each in app.items()}, tmp_path / "c.pt")
    into, fresh = (app_of("schedule_free_adamw") for _ in range(2))
    checkpoint.load(tmp_path / "c.pt", into, strict=False, init_state=True)
    fresh["optimizer"].param_groups[0].update(
        {**into["optimizer"].param_groups[0], "params": [*fresh["model"].parameters()]}
    )
    assert_equal(weights(stepped(into)), begun_anew(tmp_path / "c.pt", fresh))


def test_so_they_do_where_a_part_of_their_own_was_left_out(tmp_path):
    checkpoint.save(tmp_path / "c", stepped(app_of("schedule_free_sgd", 0)), select=r"^(?!.*\.z$)")
    into = app_of("schedule_free_sgd")
    checkpoint.load(tmp_path / "c", into, strict=Strictness(missing="ignore"), init_state=True)
    assert_equal(weights(stepped(into)), begun_anew(tmp_path / "c", app_of("schedule_free_sgd")))


def test_state_without_a_part_is_made_at_the_first_step_if_nothing_of_it_was_loaded():
    saved, into, fresh = (app_of("schedule_free_sgd", seed) for seed in (0, 1, 1))
    into["optimizer"].init_state()
    into["optimizer"].load_state_dict(saved["optimizer"].state_dict(), strict=False)
    into["optimizer"].load_state_dict(into["optimizer"].state_dict())
    assert_equal(weights(stepped(into)), weights(stepped(fresh)))


MASTERS = {"dtype": torch.bfloat16, "master_dtype": torch.float32}


WAYS = ["made for the load", "made before", "stepped before", "in two loads", "converted"]


@pytest.mark.parametrize(("name", "way"), [("adam", WAYS[0]), ("adamw", WAYS[0]), *(("lion", way) for way in WAYS)])
def test_masters_that_are_not_stored_are_made_of_the_loaded_parameters(tmp_path, caplog, name, way):
    saved = stepped(app_of("adamw", 0, **(MASTERS if name == "adamw" else {"dtype": torch.bfloat16})))
    checkpoint.save(tmp_path / "c", saved, select=r"^(?!.*\.master$)")
    if way == "converted":
        checkpoint.convert(tmp_path / "c", tmp_path / "c.pt", "torch")
    into = app_of(name, **MASTERS)
    if "before" in way:
        into["optimizer"].init_state()
        stepped(into, 1 if "stepped" in way else 0)
    if way == "in two loads":
        checkpoint.load(tmp_path / "c", {"model": into["model"]}, strict=Strictness(unexpected="ignore"))
    select = r"^optimizer\." if way == "in two loads" else None
    checkpoint.load(
        tmp_path / ("c.pt" if way == "converted" else "c"), into, strict=LENIENT, init_state=True, select=select
    )
    assert_equal(weights(into), weights(saved))
    held = into["optimizer"].state_dict()["state"]
    assert_equal([held[name]["master"].bfloat16() for name, _ in into["model"].named_parameters()], weights(saved))
    assert "without their fp32 masters" not in caplog.text
    assert all(each["step"] == 2 for each in held.values())


def test_so_are_those_that_a_state_dict_lacks():
    saved, into = stepped(app_of("adamw", 0, **MASTERS)), app_of("adamw", **MASTERS)
    state = saved["optimizer"].state_dict()
    for entries in state["state"].values():
        del entries["master"]
    into["optimizer"].init_state()
    into["model"].load_state_dict(saved["model"].state_dict())
    into["optimizer"].load_state_dict(state, strict=False)
    assert_equal(weights(into), weights(saved))
    loaded = into["optimizer"].state_dict()["state"]
    assert_equal(
        [loaded[name]["master"] for name, _ in into["model"].named_parameters()],
        [each.float() for each in weights(saved)],
    )


SHAPES = [(3,), (1,), (), (40, 30), (2, 3, 4), (0, 3)]
BOUNDED = {"SOAP": {"max_precondition_dim": 32}, "LBFGS": {"history_size": 2}}
KINDS = [(name, BOUNDED.get(name, {})) for name in NAMES]
KINDS += [
    ("SOAP", {}),
    ("SOAP", {"precondition_1d": True}),
    ("SOAP", {"block_size": 16}),
    ("Shampoo", {"block_size": 16}),
]
KINDS += [
    ("AdamW", {"state_dtype": "uint8"}),
    ("AdEMAMix", {"state_dtype": "bfloat16"}),
    ("RMSprop", {"centered": True}),
]


@pytest.mark.parametrize(("name", "options"), KINDS)
@pytest.mark.parametrize("way", ["a state_dict", "a checkpoint"])
def test_state_of_the_same_code_is_taken_whole_whatever_the_shapes(tmp_path, name, options, way):
    unsuitable = {spec.name: spec.unsuitable for spec in algorithms()}[name]
    is_sparse = name == "SparseAdam"
    shapes = [each for each in SHAPES if not unsuitable(view_of(torch.zeros(each))) and (each or not is_sparse)]

    def made():
        params = {
            f"w{n}": nn.Parameter(torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape))
            for n, shape in enumerate(shapes)
        }
        return shardopt.keyed(name, params, **options)

    def step_all(optimizer):
        for each in optimizer.params.values():
            gradient = torch.linspace(1, 2, each.numel()).reshape(each.shape)
            each.grad = gradient.to_sparse(1) if is_sparse else gradient
        optimizer.step(*([lambda: torch.ones(())] if name == "LBFGS" else []))

    saved, strict, into = made(), made(), made()
    for _ in range(2):
        step_all(saved)
    if way == "a checkpoint":
        checkpoint.save(tmp_path / "c", {"optimizer": saved})
        report = checkpoint.load(tmp_path / "c", {"optimizer": into}, strict=False, init_state=True)
        assert not report.left_out
    strict.init_state()
    strict.load_state_dict(saved.state_dict())
    if way == "a state_dict":
        into.init_state()
        assert into.load_state_dict(saved.state_dict(), strict=False) == ([], [])
    wanted, found = strict.state_dict()["state"], into.state_dict()["state"]
    assert found.keys() == wanted.keys()
    for key, entries in wanted.items():
        assert found[key].keys() == entries.keys()
        assert all(torch.equal(torch.as_tensor(found[key][each]), torch.as_tensor(entries[each])) for each in entries)
