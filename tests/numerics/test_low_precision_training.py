"""The demo's language model trained with 8-bit state: as well as with fp32's, and with another package's beside it."""

import importlib.util
import tomllib
import warnings

import pytest
import torch
from common import Windows, learning_rate_factor
from lm import Transformer
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

import shardopt
from tests.support.source import ROOT

CONFIG = tomllib.loads((ROOT / "configs" / "lm.toml").read_text())
SEEDS, LAST = range(3), 10
NO_DECAY = {"match": r"norm|bias", "weight_decay": 0.0}


def keyed(named, **options):
    return shardopt.keyed("adamw", named, groups=[NO_DECAY], **CONFIG["optimizer"], **options)


def torchao(named):
    """Its optimizer, not compiled: what it computes is the same."""
    plain = [parameter for name, parameter in named.items() if "norm" in name or "bias" in name]
    others = [parameter for name, parameter in named.items() if not ("norm" in name or "bias" in name)]
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": others}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of parts that were built for GPUs
        return importlib.import_module("torchao.optim").AdamW8bit(groups, **CONFIG["optimizer"])


EVERY = {
    "fp32": keyed,
    "8 bits": lambda named: keyed(named, state_dtype=torch.uint8),
    "8 bits to nearest": lambda named: keyed(named, state_dtype=torch.uint8, rounding="nearest"),
    "torchao": torchao,
}


def loss_after_training(make, seed):
    """The mean of the losses of the last steps of the demo's run, in one process."""
    steps, batch, context = CONFIG["steps"], CONFIG["data"]["batch"], CONFIG["data"]["context"]
    windows = Windows(CONFIG["data"]["corpus"], context)
    torch.manual_seed(seed)
    model = Transformer(context=context, **CONFIG["model"])
    optimizer = make(dict(model.named_parameters()))
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps, **CONFIG["schedule"]))
    data = shardopt.ResumableSampler(len(windows), batch_size=batch, seed=seed)
    losses = []
    for chosen in data:
        inputs, targets = (torch.stack(each) for each in zip(*(windows[start] for start in chosen), strict=True))
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if len(losses) == steps:
            break
    return sum(losses[-LAST:]) / LAST


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore")  # of torchao's, in every step
def test_8_bit_adamw_trains_the_demos_model_within_half_a_percent_of_fp32(capsys):
    losses = {name: [] for name in EVERY if name != "torchao" or importlib.util.find_spec("torchao") is not None}
    with torch.compiler.set_stance("force_eager"):
        for seed in SEEDS:
            for name, found in losses.items():
                found.append(loss_after_training(EVERY[name], seed))
            with capsys.disabled():
                print({name: round(found[-1], 4) for name, found in losses.items()}, flush=True)
    for name in ("8 bits", "8 bits to nearest"):
        for loss, wanted in zip(losses[name], losses["fp32"], strict=True):
            assert abs(loss / wanted - 1) < 0.005, (name, loss, wanted)
