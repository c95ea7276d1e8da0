"""A language model trained with 8-bit state: as well as with fp32's, and with another package's beside it."""

import importlib.util

import pytest
import torch
from common import Windows
from lm import Transformer
from torch.nn.functional import cross_entropy

import shardopt

STEPS, BATCH, CONTEXT, LAST = 120, 8, 64, 20
OPTIONS = {"lr": 2e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
EVERY = {
    "fp32": lambda named: shardopt.keyed("adamw", named, **OPTIONS),
    "8 bits": lambda named: shardopt.keyed("adamw", named, state_dtype=torch.uint8, **OPTIONS),
    "8 bits at random": lambda named: shardopt.keyed(
        "adamw", named, state_dtype=torch.uint8, rounding="stochastic", **OPTIONS
    ),
}


def loss_after_training(make, seed):
    """The mean of the losses of the last steps."""
    windows = Windows("", CONTEXT)
    torch.manual_seed(seed)
    model = Transformer(layers=2, width=128, heads=4, context=CONTEXT)
    optimizer = make(dict(model.named_parameters()))
    order = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(len(windows), (BATCH,), generator=order).tolist()
        inputs, targets = (torch.stack(each) for each in zip(*(windows[start] for start in starts), strict=True))
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-LAST:]) / LAST


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_8_bit_adamw_trains_within_half_a_percent_of_fp32(capsys):
    makes = dict(EVERY)
    if importlib.util.find_spec("torchao") is not None:
        makes["torchao"] = lambda named: importlib.import_module("torchao.optim").AdamW8bit(
            list(named.values()), **OPTIONS
        )
    losses = {name: [loss_after_training(make, seed) for seed in range(3)] for name, make in makes.items()}
    with capsys.disabled():
        print({name: [round(loss, 4) for loss in each] for name, each in losses.items()})
    for name in ("8 bits", "8 bits at random"):
        for loss, wanted in zip(losses[name], losses["fp32"], strict=True):
            assert abs(loss / wanted - 1) < 0.005, (name, loss, wanted)
