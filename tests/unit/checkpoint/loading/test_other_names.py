"""The error of a refused load names the rule of `rename` that it lacked, if one is enough."""

import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.errors import MismatchError


def tensors(*names, size=3):
    return {name: torch.zeros(size) for name in names}


@pytest.mark.parametrize(
    ("stored", "app", "rule"),
    [
        ({"app": {"model": tensors("a.w", "b.w")}}, {"model": tensors("a.w", "b.w")}, r'{r"^app\.": ""}'),
        ({"net": tensors("a.w"), "x": 1}, {"net": tensors("inner.a.w"), "x": 1}, None),  # a segment more, within
        (tensors("a.w", "b.w"), {"model": tensors("a.w", "b.w")}, '{r"^": "model."}'),
        (
            {"model": tensors("l.0.up.w", "l.1.up.w", "l.0.down.w")},
            {"model": tensors("l.0.fc.w", "l.1.fc.w", "l.0.down.w")},
            r'{r"\bup\.": "fc."}',
        ),
        ({"model": tensors("up.w")}, {"model": tensors("fc.w", size=4)}, None),  # another shape
        ({"model": tensors("up.w", "also.up.w")}, {"model": tensors("fc.w", "also.up.w")}, None),  # would harm another
        ({"model": tensors("l.3.w")}, {"model": tensors("l.2.w")}, None),  # another layer is no other name
        ({"model": tensors("up.w", "a.w")}, {"model": tensors("fc.w", "b.w")}, None),  # two rules
    ],
)
def test_one_rule_that_would_do_is_named(tmp_path, stored, app, rule):
    checkpoint.save(tmp_path / "c", stored)
    with pytest.raises(MismatchError) as caught:
        checkpoint.load(tmp_path / "c", app)
    first, *others = str(caught.value).split("\n")
    assert first.endswith("[does-not-fit]")
    if rule is None:
        assert "Stored tensors have" not in str(caught.value)
        return
    assert others[0] == f"Stored tensors have the missing names after rename={rule}."
    checkpoint.load(tmp_path / "c", app, rename=eval(rule), strict=checkpoint.Strictness(unexpected="ignore"))


def test_state_of_optimizers_follows_the_rule_of_weights(tmp_path):
    def make(name):
        model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2)})
        optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=1e-3)
        optimizer.init_state()
        return {"model": model, "optimizer": optimizer}

    checkpoint.save(tmp_path / "c", make("up"))
    app = make("fc")
    with pytest.raises(MismatchError, match=r'rename=\{r"\\bup\\\.": "fc\."\}'):
        checkpoint.load(tmp_path / "c", app)
    checkpoint.load(tmp_path / "c", app, rename={r"\bup\.": "fc."})
