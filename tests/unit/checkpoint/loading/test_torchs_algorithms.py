"""torch's own optimizers in `app`, and state of another algorithm than theirs."""

import pytest
import torch
from torch import nn

import shardopt
from shardopt import checkpoint
from shardopt.errors import MismatchError

ALGORITHMS = {
    "adafactor": (torch.optim.Adafactor, {}),
    "adamw": (torch.optim.AdamW, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.5}),
    "muon": (torch.optim.Muon, {}),
}


def app_of(name, **options):
    model = nn.Linear(3, 2, bias=False)
    cls, own = ALGORITHMS[name]
    return {"model": model, "optimizer": cls(model.parameters(), **own, **options)}


def stepped(app):
    app["model"](torch.ones(1, 3)).sum().backward()
    app["optimizer"].step()
    return app


@pytest.mark.parametrize("here", ALGORITHMS)
@pytest.mark.parametrize("stored", ALGORITHMS)
def test_each_has_its_name_in_checkpoints(tmp_path, stored, here):
    checkpoint.save(tmp_path / "c", stepped(app_of(stored)))
    (cls, _), (other, _) = ALGORITHMS[stored], ALGORITHMS[here]
    if cls is other:
        checkpoint.load(tmp_path / "c", app_of(here), init_state=True)
    else:
        with pytest.raises(MismatchError, match=f"found {cls.__name__}, by which it was saved; required"):
            checkpoint.load(tmp_path / "c", app_of(here), init_state=True)


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_checkpoints_without_the_name_load(tmp_path, name, monkeypatch):
    cls, _ = ALGORITHMS[name]
    with monkeypatch.context() as patched:
        patched.setattr(cls, "__module__", "shardopt.elsewhere")
        checkpoint.save(tmp_path / "c", stepped(app_of(name, lr=0.5)))
    with checkpoint.open(tmp_path / "c") as reader:
        assert "algorithm" not in reader.manifest.values["optimizer.param_groups.weight"][1]
    app = app_of(name)
    checkpoint.load(tmp_path / "c", app, init_state=True)
    assert app["optimizer"].param_groups[0]["lr"] == 0.5


class AdamW(torch.optim.AdamW):
    """One of the program's own."""


class Renamed(torch.optim.AdamW):
    pass


def keyed(parameters):
    return shardopt.keyed("adamw", dict(zip(["weight"], parameters, strict=True)))


@pytest.mark.parametrize(
    ("stored", "here", "told"),
    [
        (AdamW, Renamed, "saved by the program's AdamW, the program's Renamed here"),
        (AdamW, torch.optim.AdamW, "saved by the program's AdamW, AdamW here"),
        (torch.optim.AdamW, Renamed, "saved by AdamW, the program's Renamed here"),
        (Renamed, keyed, "saved by the program's Renamed, AdamW here"),
        (keyed, Renamed, "saved by AdamW, the program's Renamed here"),
        (AdamW, AdamW, ""),
        (torch.optim.AdamW, keyed, ""),
    ],
)
def test_a_class_of_the_programs_own_is_told_of_if_another_has_saved(tmp_path, caplog, stored, here, told):
    def made(cls):
        model = nn.Linear(3, 2, bias=False)
        return {"model": model, "optimizer": cls(model.parameters())}

    saved = stepped(made(stored))
    checkpoint.save(tmp_path / "c", saved)
    app = made(here)
    checkpoint.load(tmp_path / "c", app, init_state=True)
    lines = [f"optimizer: {told}"] if told else []
    assert [each for message in caplog.messages for each in message.split("\n  ")[1:]] == lines
    saved["optimizer"].zero_grad()
    assert torch.equal(stepped(app)["model"].weight, stepped(saved)["model"].weight)


def test_muon_goes_on_sharded(tmp_path):
    saved = stepped(app_of("muon", lr=0.5))
    checkpoint.save(tmp_path / "c", saved)
    model = nn.Linear(3, 2, bias=False)
    app = {"model": model, "optimizer": shardopt.keyed("muon", model.named_parameters())}
    checkpoint.load(tmp_path / "c", app, init_state=True)
    (group,) = app["optimizer"].param_groups
    assert (group["lr"], group["ns_dtype"], group["split"]) == (0.5, "bfloat16", None)
    torch.testing.assert_close(stepped(app)["model"].weight, stepped(saved)["model"].weight)
    other = shardopt.keyed("muon", model.named_parameters(), ns_dtype="float32")
    with pytest.raises(MismatchError, match="ns_dtype: found nothing"):
        checkpoint.load(tmp_path / "c", {"model": model, "optimizer": other}, init_state=True)


def _lbfgs_after(steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    app = {"model": model, "optimizer": torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=8)}
    return _lbfgs_on(app, range(steps))


def _lbfgs_on(app, steps):
    model, optimizer = app["model"], app["optimizer"]
    for step in steps:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))

        def closure(x=x):
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return app


@pytest.mark.parametrize("before", range(6))
def test_l_bfgs_resumes_at_every_length_of_its_history(tmp_path, before):
    app = _lbfgs_after(before)
    with checkpoint.Manager(tmp_path / "run") as manager:
        manager.save(3, _lbfgs_after(3), force=True)
    with checkpoint.Manager(tmp_path / "run") as manager:
        assert manager.restore(app) == 3
    wanted = _lbfgs_after(6)["model"].state_dict()
    for name, weight in _lbfgs_on(app, range(3, 6))["model"].state_dict().items():
        assert torch.equal(weight, wanted[name])


def test_a_failed_load_leaves_l_bfgs_as_it_was(tmp_path):
    checkpoint.save(tmp_path / "c", _lbfgs_after(3))
    app = {**_lbfgs_after(1), "other": torch.zeros(1)}
    before = app["optimizer"].state_dict()["state"][0]
    with pytest.raises(MismatchError, match="other: found nothing"):
        checkpoint.load(tmp_path / "c", app, init_state=True)
    after = app["optimizer"].state_dict()["state"][0]
    assert after["n_iter"] == before["n_iter"] and torch.equal(after["d"], before["d"])


WHOLE = ("Adam", "SGD")  # whose state is among AdamW's, or nothing
OTHERS = ["Adafactor", "Adadelta", "Adagrad", "Adam", "Adamax", "NAdam", "RMSprop", "Rprop", "SGD"]


@pytest.mark.parametrize("name", OTHERS)
def test_of_another_algorithm_only_state_of_its_own_is_taken(tmp_path, caplog, name):
    checkpoint.save(tmp_path / "c", stepped(app_of("adamw", lr=0.25)))
    app = app_of("adamw")
    cls = getattr(torch.optim, name)
    app["optimizer"] = cls(app["model"].parameters(), lr=0.5)
    before = {**app["optimizer"].param_groups[0]}
    checkpoint.load(tmp_path / "c", app, strict=False, init_state=True)
    assert app["optimizer"].param_groups[0] == before
    told = [line for line in caplog.messages if "[optimizer-state]" in line]
    assert told[0] == (
        "loaded with strict=False from another algorithm [optimizer-state]:\n"
        f"  optimizer: saved by AdamW; {name} takes the state that fits, with its own options"
    )
    assert [line.partition(":")[0] for line in told[1:]] == (
        []
        if name in WHOLE
        else ["stored state that does not fit was left out, and that of its parameters stays as it is"]
    )
    entries = {entry for state in stepped(app)["optimizer"].state.values() for entry in state}
    fresh = app_of("adamw")
    fresh["optimizer"] = cls(fresh["model"].parameters(), lr=0.5)
    assert entries == {entry for state in stepped(fresh)["optimizer"].state.values() for entry in state}
    checkpoint.save(tmp_path / "again", app)
    checkpoint.load(tmp_path / "again", fresh)
