"""Objects whose `load_state_dict` refuses what was saved: seen before a byte has changed, or told how far it came."""

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint import Strictness
from shardopt.errors import CheckpointError, MismatchError, PartialLoadError


class Object:
    """Takes a state, or refuses it."""

    def __init__(self, refuses=None):
        self.state, self.refuses = {"count": 1}, refuses

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        if self.refuses:
            raise self.refuses
        self.state = state


def test_a_scaler_that_was_saved_disabled_is_refused_before_anything_changes(tmp_path):
    saved = {"weight": torch.ones(2), "scaler": torch.amp.GradScaler("cpu", enabled=False)}
    checkpoint.save(tmp_path / "c", saved)
    loaded = {"weight": torch.zeros(2), "scaler": torch.amp.GradScaler("cpu", init_scale=8.0)}
    with pytest.raises(MismatchError, match="a GradScaler that was disabled"):
        checkpoint.load(tmp_path / "c", loaded)
    assert not loaded["weight"].any()
    without = {"weight": loaded["weight"]}
    checkpoint.load(tmp_path / "c", without, strict=Strictness(unexpected="ignore"))  # the remedy, followed
    assert loaded["weight"].all() and loaded["scaler"].get_scale() == 8.0
    checkpoint.load(tmp_path / "c", {**without, "scaler": torch.amp.GradScaler("cpu", enabled=False)})


def without_frozen(module, state, prefix, *unused):
    del state[f"{prefix}1.weight"], state[f"{prefix}1.bias"]


def test_a_module_whose_state_leaves_out_its_frozen_part_is_loaded(tmp_path):
    def made():
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False))
        model.register_state_dict_post_hook(without_frozen)
        return model

    saved, loaded = made(), made()
    kept = loaded[1].weight.clone()
    checkpoint.save(tmp_path / "c", {"model": saved})
    checkpoint.load(tmp_path / "c", {"model": loaded})
    assert torch.equal(loaded[0].weight, saved[0].weight) and torch.equal(loaded[1].weight, kept)

    def loses(module, state, prefix, *unused):
        del state[f"{prefix}0.weight"]

    loaded.register_load_state_dict_pre_hook(loses)
    with pytest.raises(CheckpointError, match=r"found KeyError: .*0\.weight"):
        checkpoint.load(tmp_path / "c", {"model": loaded})


class Fused(torch.nn.Module):
    """Has two parameters, of which its state has one tensor; its load may take the first alone."""

    def __init__(self, is_right):
        super().__init__()
        self.q, self.k = (torch.nn.Parameter(torch.randn(2)) for _ in range(2))
        self.is_right = is_right
        self.register_state_dict_post_hook(Fused.fuse)
        self.register_load_state_dict_pre_hook(Fused.split)

    def fuse(self, state, prefix, *unused):
        state[f"{prefix}qk"] = torch.cat([state.pop(f"{prefix}q"), state.pop(f"{prefix}k")]).detach()

    def split(self, state, prefix, *unused):
        state[f"{prefix}q"], k = state.pop(f"{prefix}qk").split(2)
        if self.is_right:
            state[f"{prefix}k"] = k


def test_what_a_modules_hooks_lose_of_a_state_that_they_have_made_is_refused_as_by_torch(tmp_path):
    saved = Fused(is_right=True)
    checkpoint.save(tmp_path / "c", {"model": saved})
    loaded = Fused(is_right=True)
    checkpoint.load(tmp_path / "c", {"model": loaded})
    assert torch.equal(loaded.k, saved.k)
    with pytest.raises(CheckpointError, match=r"found KeyError: .* k'; required a Fused"):
        checkpoint.load(tmp_path / "c", {"model": Fused(is_right=False)})


def test_a_refusal_in_the_middle_says_what_was_loaded(tmp_path):
    weight = torch.nn.Parameter(torch.ones(2))
    app = {"a": Object(), "optimizer": torch.optim.SGD([weight], 0.1), "b": Object(), "c": Object()}
    checkpoint.save(tmp_path / "c", app)
    app["a"].state = {"count": 7}
    app["b"].refuses = ValueError("not this one")
    with pytest.raises(CheckpointError, match="not this one") as caught:
        checkpoint.load(tmp_path / "c", app)
    assert "objects loaded: a, optimizer; not loaded: b, c." in caught.value.message
    assert isinstance(caught.value.__cause__, ValueError)
    assert app["a"].state == {"count": 1}
    with pytest.raises(PartialLoadError):
        app["optimizer"].step()
    app["b"].refuses = None
    checkpoint.load(tmp_path / "c", app)  # the remedy, followed
    app["optimizer"].step()
