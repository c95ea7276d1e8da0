import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.errors import MismatchError, PartialLoadError
from shardopt.optim import CombinedOptimizer
from shardopt.runtime.partial_loads import mark_partial_load, unmark_partial_load


def stepped():
    model = torch.nn.Linear(2, 2)
    optimizer = shardopt.keyed("adamw", model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def interrupted(monkeypatch, optimizer, state):
    """Loads a state, and is interrupted at the second tensor."""
    copy, copied = torch.Tensor.copy_, []

    def copy_(into, *args):
        copied.append(into)
        if len(copied) == 2:
            raise KeyboardInterrupt
        return copy(into, *args)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(torch.Tensor, "copy_", copy_)
        optimizer.load_state_dict(state)


def test_an_optimizer_whose_own_load_was_interrupted_refuses_to_step_until_one_is_whole(monkeypatch, tmp_path):
    model, optimizer = stepped()
    state = stepped()[1].state_dict()
    checkpoint.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    for load_whole in (
        lambda: optimizer.load_state_dict(state),
        lambda: checkpoint.load(tmp_path / "c", {"model": model, "optimizer": optimizer}),
    ):
        interrupted(monkeypatch, optimizer, state)
        with pytest.raises(PartialLoadError, match="load_state_dict did not end well"):
            optimizer.step()
        with pytest.raises(MismatchError):
            optimizer.load_state_dict({})
        with pytest.raises(PartialLoadError):  # a load that changed nothing did not mend it
            optimizer.step()
        with pytest.raises(PartialLoadError, match="partly loaded"):
            checkpoint.save(tmp_path / "half", {"model": model, "optimizer": optimizer})
        load_whole()
        optimizer.step()
    with pytest.raises(MismatchError):
        optimizer.load_state_dict({})
    optimizer.step()


@pytest.mark.parametrize("whole", ["load_state_dict", "checkpoint.load"])
def test_a_part_whose_load_was_interrupted_is_whole_after_a_load_of_the_composite(monkeypatch, tmp_path, whole):
    model, inner = stepped()
    optimizer = CombinedOptimizer([("all", inner)])
    app = {"model": model, "optimizer": optimizer}
    state = optimizer.state_dict()
    checkpoint.save(tmp_path / "c", app)
    interrupted(monkeypatch, inner, stepped()[1].state_dict())
    for refused in (optimizer.step, lambda: checkpoint.save(tmp_path / "half", app)):
        with pytest.raises(PartialLoadError):
            refused()
    if whole == "load_state_dict":
        optimizer.load_state_dict(state)
    else:
        checkpoint.load(tmp_path / "c", app)
    optimizer.step()
    checkpoint.save(tmp_path / "again", app)


def test_a_load_of_the_optimizer_alone_does_not_mend_one_of_more(monkeypatch):
    _, optimizer = stepped()
    state = stepped()[1].state_dict()
    interrupted(monkeypatch, optimizer, state)
    mark_partial_load([optimizer], "loading x")
    interrupted(monkeypatch, optimizer, state)
    optimizer.load_state_dict(state)
    with pytest.raises(PartialLoadError):
        optimizer.step()
    unmark_partial_load([optimizer])
    optimizer.step()
