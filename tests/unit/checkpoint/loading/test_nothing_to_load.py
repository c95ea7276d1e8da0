"""A load that would load nothing is refused: it looks like one that has loaded everything."""

import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.errors import MismatchError


@pytest.fixture
def url(tmp_path):
    checkpoint.save(tmp_path / "step-00000001", {"model": {"weight": torch.ones(2)}, "step": 1})
    return tmp_path / "step-00000001"


def app(name="model"):
    return {name: {"weight": torch.zeros(2)}}


@pytest.mark.parametrize("options", [{}, {"init_state": True}, {"strict": False}])
def test_select_that_finds_nothing_is_refused(url, options):
    with pytest.raises(MismatchError, match=r"nothing to load.*\n.*select: found 'modle'.*model.weight"):
        checkpoint.load(url, app(), select="modle", **options)
    target = app()
    checkpoint.load(url, target, select=r"model", **options)  # as the error advises
    assert target["model"]["weight"][0] == 1


def test_nothing_in_common_is_refused_however_lenient(url):
    lenient = checkpoint.Strictness(missing="warn", unexpected="ignore")
    for strict in (False, lenient):
        with pytest.raises(MismatchError, match=r"nothing to load.*\n.*app: found no key.*model.weight"):
            checkpoint.load(url, app("net"), strict=strict)
    with pytest.raises(MismatchError, match="nothing to load"):
        checkpoint.Manager(url.parent).restore(app("net"), strict=False)
    target = app("net")
    checkpoint.load(url, target, strict=False, rename={"^model": "net"})
    assert target["net"]["weight"][0] == 1


def test_nothing_is_loaded_into_nothing(tmp_path):
    checkpoint.save(tmp_path / "empty", {})
    assert checkpoint.load(tmp_path / "empty", {}).loaded == ()
    assert checkpoint.load(tmp_path / "empty", {}, strict=False).loaded == ()


def test_weights_alone_are_loaded_as_the_error_advises(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = shardopt.keyed("adamw", model.named_parameters())
    optimizer.init_state()
    checkpoint.save(tmp_path / "run", {"model": model, "optimizer": optimizer, "step": 7})
    with pytest.raises(MismatchError) as caught:
        checkpoint.load(tmp_path / "run", {"model": torch.nn.Linear(2, 2)})
    remedies = {problem.remedy for problem in caught.value.problems}
    assert all('strict=Strictness(unexpected="ignore")' in each and "select=" in each for each in remedies)
    assert not any("strict=False" in each for each in remedies)
    for options in ({"strict": checkpoint.Strictness(unexpected="ignore")}, {"select": r"^model\."}):
        loaded = torch.nn.Linear(2, 2)
        checkpoint.load(tmp_path / "run", {"model": loaded}, **options)
        assert torch.equal(loaded.weight, model.weight)
        with pytest.raises(MismatchError, match="nothing in the checkpoint"):  # weights that lack are no less refused
            checkpoint.load(tmp_path / "run", {"model": torch.nn.ModuleDict({"a": loaded}), "step": 0}, **options)
    with pytest.raises(MismatchError) as caught:
        checkpoint.load(tmp_path / "run", {"model": model, "optimizer": optimizer, "step": 0, "more": 1})
    (problem,) = caught.value.problems
    assert problem.key == "more" and 'strict=Strictness(missing="ignore")' in problem.remedy
    app = {"model": model, "optimizer": optimizer, "step": 0, "more": 1}
    checkpoint.load(tmp_path / "run", app, strict=checkpoint.Strictness(missing="ignore"))
    assert (app["step"], app["more"]) == (7, 1)
