"""What the program of a life says today: its model, optimizer, schedule, and the rules of names left in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.optim import lr_scheduler as lrs

SHAPES = {"embed": (6, 4), "bias": (5,), "head": (3, 4), "l0": (4, 4), "l1": (4, 4), "l2": (4, 4)}
FIRST = ("embed", "l0", "l1", "head", "bias")  # of a life's first program; a layer may come later

ALGORITHMS = {
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.02, "momentum": 0.9}),
}
# Of each way to group: the canonical names and the options of each group. What is in none is in a last one.
GROUPS = {
    "one": (),
    "bias apart": ((("bias",), {"weight_decay": 0.0}),),
    "layers apart": ((("l0", "l1", "l2"), {"lr": 0.01}),),
    "both apart": ((("bias",), {"weight_decay": 0.0}), (("l0", "l1", "l2"), {"lr": 0.01})),
}
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer, int], lrs.LRScheduler] | None] = {
    "none": None,
    "steps": lambda optimizer, last: lrs.StepLR(optimizer, 3, 0.5, last_epoch=last),
    "cosine": lambda optimizer, last: lrs.CosineAnnealingLR(optimizer, 40, last_epoch=last),
    "one cycle": lambda optimizer, last: lrs.OneCycleLR(optimizer, 0.1, total_steps=500, last_epoch=last),
    "linear": lambda optimizer, last: lrs.LinearLR(optimizer, 0.1, total_iters=9, last_epoch=last),
}


@dataclass
class Script:
    """A program, as its author has it before a start.

    Args:
        params: canonical names of the parameters, in the order in which the model makes them.
        places: canonical → the number of the layer's place in the model.
        stem: what the list of layers is called.
        rename: rules for checkpoints of earlier programs, which their author leaves where they are.
        optimizer: "keyed" or "torch".
        layout: a number, from which the placement of each parameter follows.
        ways: how it saves.
    """

    algorithm: str
    optimizer: str = "keyed"
    groups: str = "one"
    schedule: str = "none"
    averages: bool = False
    ranks: int = 1
    layout: int = 0
    stem: str = "layers"
    params: tuple[str, ...] = FIRST
    places: dict[str, int] = field(default_factory=lambda: {"l0": 0, "l1": 1, "l2": 2})
    frozen: frozenset[str] = frozenset()
    rename: dict[str, str] = field(default_factory=dict)
    ways: dict[str, object] = field(default_factory=dict)

    def name(self, param: str) -> str:
        """Returns the name of a parameter in the model."""
        return f"{self.stem}.{self.places[param]}.weight" if param in self.places else f"{param}.weight"

    def groups_of(self) -> list[tuple[list[str], dict[str, object]]]:
        """Returns the canonical names and options of each group that has any, as the code gives them."""
        left, groups = list(self.params), []
        for members, options in GROUPS[self.groups]:
            if not set(options) <= ALGORITHMS[self.algorithm][1].keys():
                continue  # this algorithm has no such option
            groups.append(([name for name in self.params if name in members], options))
            left = [name for name in left if name not in members]
        return [*groups, (left, {})]


def value(param: str, seed: int) -> torch.Tensor:
    """Known numbers for a whole parameter, or its gradient."""
    generator = torch.Generator().manual_seed(97 * sorted(SHAPES).index(param) + 1009 * seed)
    return torch.randn(SHAPES[param], dtype=torch.float64, generator=generator)
