"""Parameters that are declared as tied: one name stands for both, whichever of them a process has."""

import pytest
import torch
from torch import nn

import shardopt
from shardopt import checkpoint
from shardopt.errors import MismatchError, StateError

TIED = {"head.weight": "embed.weight"}
NAMES = (("embed.weight", "body"), ("head.weight", "body"), ("embed.weight", "head.weight", "body"))


class Model(nn.Module):
    """An embedding, a head, or both with one weight, as stages of a pipeline have them."""

    def __init__(self, names, value):
        super().__init__()
        for name in names:
            if "." in name:
                module = nn.Linear(2, 3, bias=False)
                self.add_module(name.partition(".")[0], module)
                nn.init.constant_(module.weight, value)
            else:
                self.register_parameter(name, nn.Parameter(torch.full((4,), value)))
        if len(names) == 3:
            self.head.weight = self.embed.weight


def app_of(names, value, tied, steps):
    """A model, its optimizer with or without the declaration, and averages, which cannot have one."""
    model = Model(names, value)
    optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=0.5, tied=tied)
    average = shardopt.EMA(model, decay=0.5)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        average.update()
    return {"model": model, "optimizer": optimizer, "average": average}


def values_of(app):
    """All values under the names that stand for others."""
    parts = {
        "model": app["model"].state_dict(),
        "optimizer": app["optimizer"].state_dict()["state"],
        "average": app["average"].state_dict()["state"],
    }
    return {part: {TIED.get(name, name): repr(each) for name, each in parts[part].items()} for part in parts}


@pytest.mark.parametrize("saved_tied", [TIED, None])
@pytest.mark.parametrize("loaded_tied", [TIED, None])
@pytest.mark.parametrize("saved", NAMES)
def test_whichever_of_the_names_is_there(tmp_path, saved, saved_tied, loaded_tied):
    """Also where the optimizer has no declaration, or is none that could have one."""
    app = app_of(saved, 1.0, saved_tied, 2)
    checkpoint.save(tmp_path / "c", app, tied=TIED)
    wanted = values_of(app)
    for names in NAMES:
        for steps in (0, 1):
            into = app_of(names, 7.0, loaded_tied, steps)
            checkpoint.load(tmp_path / "c", into, init_state=not steps, tied=TIED)
            assert values_of(into) == wanted, names


def test_tensors_that_were_stored_apart_must_be_equal(tmp_path):
    for stored_as, rename in (("head.weight", None), ("output.weight", {r"output\.": "head."})):
        for value in (1.0, 2.0):
            path = tmp_path / f"{stored_as} {value}"
            apart = {"embed.weight": torch.ones(3), stored_as: torch.full((3,), value)}
            checkpoint.save(path, {"model": apart})
            for name in TIED:  # a stage has either of them
                app = {"model": {name: torch.zeros(3)}}
                if value == 1.0:
                    checkpoint.load(path, app, rename=rename, tied=TIED)
                    assert torch.equal(app["model"][name], torch.ones(3))
                else:
                    with pytest.raises(MismatchError, match=r"model\.head\.weight: found other values"):
                        checkpoint.load(path, app, rename=rename, tied=TIED)
                    assert not app["model"][name].any()


def test_two_tensors_are_not_one(tmp_path):
    app = {"model": {"embed.weight": torch.ones(3), "head.weight": torch.ones(3)}}
    with pytest.raises(StateError, match=r"model\.head.*: found another tensor on this rank than model\.embed"):
        checkpoint.save(tmp_path / "c", app, tied=TIED)
    twice = {"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.ones(1)}}
    with pytest.raises(StateError, match="two paths give one key"):
        checkpoint.save(tmp_path / "c", twice, tied=TIED)


def test_a_plan_of_other_ties_is_not_used_again(tmp_path):
    row = torch.ones(3)
    app = {"a": row, "b": row.clone(), "c": row}
    checkpoint.save(tmp_path / "0", app, tied={"c": "a"})
    app["c"] = app["b"]
    checkpoint.save(tmp_path / "1", app, tied={"c": "b"})
    for number, name in enumerate("ab"):
        with checkpoint.open(tmp_path / str(number)) as reader:
            assert reader.info("c").tied_to == name
