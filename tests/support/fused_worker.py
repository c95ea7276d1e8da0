"""A worker as vLLM has them, for recipes: its model takes whole tensors by name, and keeps a share of fused ones.

Of vLLM's interface it has what the recipes use: `worker.model_runner.model.load_weights(pairs)`. What is fused, and how
ranks divide it, is as vLLM documents it for Llama: rows of `q`, `k`, `v` (and of `gate`, `up`) follow one another in a
rank's share, columns of `o` and `down` are divided, and the vocabulary is padded.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

HIDDEN, INNER, VOCABULARY, PADDED = 64, 96, 50, 64
ROWS = {"q": 64, "k": 32, "v": 32, "gate": INNER, "up": INNER}
FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
LAYERS = 2


def published_shapes(tied: bool) -> dict[str, tuple[int, ...]]:
    """The names and shapes that Hugging Face gives the weights."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (ROWS[name], HIDDEN) for name in "qkv"}
        shapes[f"{layer}.self_attn.o_proj.weight"] = (HIDDEN, ROWS["q"])
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (HIDDEN, INNER)
        shapes |= {f"{layer}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    shapes["model.norm.weight"] = (HIDDEN,)
    return shapes if tied else shapes | {"lm_head.weight": (VOCABULARY, HIDDEN)}


class FusedModel(nn.Module):
    """The parameters of one rank, by name, and `load_weights`."""

    def __init__(self, rank: int, ranks: int, tied: bool) -> None:
        super().__init__()
        self._rank, self._ranks, self._tied = rank, ranks, tied
        self.loaded: list[str] = []
        shares: dict[str, Tensor] = {}
        for name, shape in published_shapes(tied).items():
            fused, _, part = self._place(name)
            share = torch.zeros(self._share(name, torch.empty(shape)).shape)
            if part is None:
                shares[fused] = share
            else:
                shares[fused] = torch.cat([shares.get(fused, share[:0]), share])
        self._of_name = shares  # vLLM's are modules; the names are what matters here

    def state(self) -> dict[str, Tensor]:
        return self._of_name

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        for name, whole in weights:
            if self._tied and name.startswith("lm_head."):
                continue
            assert tuple(whole.shape) == published_shapes(self._tied)[name]
            fused, begin, _ = self._place(name)
            share = self._share(name, whole)
            self._of_name[fused][begin : begin + len(share)].copy_(share)
            self.loaded.append(name)
        return set(self.loaded)

    def _place(self, name: str) -> tuple[str, int, str | None]:
        """Returns the parameter that a tensor goes to, the first row of its share there, and its part."""
        for fused, parts in FUSED.items():
            for i, part in enumerate(parts):
                if f".{part}_proj." in name:
                    begin = sum(ROWS[each] for each in parts[:i]) // self._ranks
                    return name.replace(f".{part}_proj.", f".{fused}_proj."), begin, part
        return name, 0, None

    def _share(self, name: str, whole: Tensor) -> Tensor:
        if "norm" in name:
            return whole
        if name.startswith(("model.embed_tokens", "lm_head")):
            padded = torch.cat([whole, torch.zeros(PADDED - VOCABULARY, HIDDEN, dtype=whole.dtype)])
            return padded.chunk(self._ranks)[self._rank]
        dim = 1 if ".o_proj." in name or ".down_proj." in name else 0
        return whole.chunk(self._ranks, dim)[self._rank]


class Worker:
    """What an extension's methods find in `self`."""

    def __init__(self, rank: int, ranks: int, tied: bool = False) -> None:
        self.model_runner = SimpleNamespace(model=FusedModel(rank, ranks, tied))
