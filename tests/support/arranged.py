"""A small model in the arrangement of its trainers, the rules to that of those who serve it, and the same by hand."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardopt.checkpoint.rearrange import AnyRule, Drop, Rule, Tie

LAYERS = 2
SHAPES = {
    "embed": (53, 24),
    "head": (24, 53),
    "mask": (9,),
    "norm": (24,),
    **{
        f"layers.{n}.{name}": shape
        for n in range(LAYERS)
        for name, shape in {
            "qkv.weight": (60, 24),  # 3 groups of 2 + 1 + 1 heads of 5
            "qkv.bias": (60,),
            "wk.weight": (42, 24),  # 3 heads of 7 pairs
            "back.weight": (42, 24),  # the same the other way round
            "up.weight": (37, 50),
            "stack": (5, 14, 60),
            "apart.0.w": (14, 60),
            "apart.1.w": (14, 60),
            "apart.2.w": (14, 60),
            "flat": (6, 7, 24),
            "plain": (11, 13),
        }.items()
    },
}

RULES: list[AnyRule] = [
    Rule("embed", "embed_tokens.weight", "v i -> v+_more i", {"_more": 11}),
    Rule("head", "lm_head.weight", "i v -> v i"),
    Tie("final.norm.weight", "norm_again.weight"),
    Rule("norm", "final.norm.weight"),
    Drop("mask"),
    Rule(
        "layers.{n}.qkv.{x}",
        tuple(f"h.{{n}}.{each}_proj.{{x}}" for each in "qkv"),
        "(g r+1+1 d) ... -> (g r d) ..., (g d) ..., (g d) ...",
        {"g": 3, "d": 5, "r": 2},
    ),
    Rule("layers.{n}.wk.weight", "h.{n}.rotary", "(h half two) i -> (h two half) i", {"h": 3, "two": 2}),
    Rule("layers.{n}.back.weight", "h.{n}.pairs", "(h two half) i -> (h half two) i", {"h": 3, "two": 2}),
    Rule("layers.{n}.up.weight", "h.{n}.up_proj.weight", "i o -> o i"),
    Rule("layers.{n}.stack", "h.{n}.experts.{e}.weight", "e i o -> o i"),
    Rule("layers.{n}.apart.{e}.w", "h.{n}.stacked", "o i -> e o i"),
    Rule("layers.{n}.flat", "h.{n}.flat.weight", "h d i -> (h d) i", {"h": 6}),
]


def by_hand(whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The whole tensors as they are to be published, by torch's own operations."""
    made = {
        "embed_tokens.weight": torch.cat([whole["embed"], whole["embed"].new_zeros(11, 24)]),
        "lm_head.weight": whole["head"].t(),
        "final.norm.weight": whole["norm"],
        "norm_again.weight": whole["norm"],
    }
    for n in range(LAYERS):
        old, new = f"layers.{n}.", f"h.{n}."
        for kind in ("weight", "bias"):
            groups = whole[f"{old}qkv.{kind}"].reshape(3, 4, 5, -1)
            for name, part in (("q", groups[:, :2]), ("k", groups[:, 2:3]), ("v", groups[:, 3:])):
                made[f"{new}{name}_proj.{kind}"] = part.flatten(0, 2) if kind == "weight" else part.flatten()
        made[f"{new}rotary"] = whole[f"{old}wk.weight"].reshape(3, 7, 2, 24).transpose(1, 2).reshape(42, 24)
        made[f"{new}pairs"] = whole[f"{old}back.weight"].reshape(3, 2, 7, 24).transpose(1, 2).reshape(42, 24)
        made[f"{new}up_proj.weight"] = whole[f"{old}up.weight"].t()
        made |= {f"{new}experts.{e}.weight": whole[f"{old}stack"][e].t() for e in range(5)}
        made[f"{new}stacked"] = torch.stack([whole[f"{old}apart.{e}.w"] for e in range(3)])
        made[f"{new}flat.weight"] = whole[f"{old}flat"].reshape(42, 24)
        made[f"{old}plain"] = whole[f"{old}plain"]
    return {name: each.contiguous() for name, each in made.items()}


def module_of(tensors: Mapping[str, Tensor]) -> nn.Module:
    """A module whose parameters have these names and values."""
    module = nn.Module()
    for name, tensor in tensors.items():
        *folders, last = name.split(".")
        inner = module
        for folder in folders:
            if not hasattr(inner, folder):
                inner.add_module(folder, nn.Module())
            inner = getattr(inner, folder)
        inner.register_parameter(last, nn.Parameter(tensor.clone()))
    return module
