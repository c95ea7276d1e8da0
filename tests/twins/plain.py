"""The plain side: torch's own optimizers on whole tensors, in one process, without names, ranks or checkpoints."""

import copy
from dataclasses import dataclass, field

import torch

import shardopt

SHAPES = {
    "expert": (4, 6),
    "head": (3, 2),
    "sub": (5, 4),
    "table": (7, 3),
    "uneven": (2, 3),
    "unused": (4, 4),
    "later": (3, 4),
    "last": (2, 2),
}
ADDED = ("later", "last")  # by add_param_group
CLASSES = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "muon": torch.optim.Muon,
    "rowwiseadagrad": shardopt.optim.RowWiseAdagrad,  # torch has none; on plain tensors it is an optimizer as torch's
}


@dataclass(frozen=True)
class Part:
    """One algorithm, and the parameters that it has.

    Args:
        groups: names, and the options that the code gives beside those of all groups.
    """

    algorithm: str
    options: dict
    groups: tuple = field(default=((("expert", "sub", "unused", "table"), {}), (("head", "uneven"), {"lr": 0.02})))


ADAMW = {"lr": 0.05, "weight_decay": 0.1}
SGD = {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}  # without dampening no step is told from the first
ONE = ((("expert", "unused"), {"lr": 0.03}), (("head",), {"weight_decay": 0.0}))
TWO = ((("sub", "table", "uneven"), {}),)
KINDS = {
    "adamw": [Part("adamw", ADAMW)],
    "sgd": [Part("sgd", SGD)],
    "rmsprop": [Part("rmsprop", {"lr": 0.02, "momentum": 0.9, "centered": True})],
    "adagrad": [Part("adagrad", {"lr": 0.1, "initial_accumulator_value": 0.1})],
    "muon": [Part("muon", {"lr": 0.05})],
    "rowwiseadagrad": [Part("rowwiseadagrad", {"lr": 0.1})],
    "two algorithms": [Part("adamw", ADAMW, ONE), Part("sgd", SGD, TWO)],
    "nested": [Part("adamw", ADAMW, ONE), Part("sgd", SGD, TWO)],
}
WITH_STATE = ("adagrad",)  # of every parameter, from where it is made
OPTIONS = {
    "lr": (0.01, 0.1, 0.05),
    "weight_decay": (0.0, 0.05, 0.2),
    "maximize": (True, False),
    "betas": ((0.9, 0.999), (0.5, 0.9)),
    "momentum": (0.5, 0.9),
    "eps": (1e-8, 1e-6),
}


def value(name, seed):
    """Known numbers for the whole of a parameter or of its gradient."""
    generator = torch.Generator().manual_seed(97 * sorted(SHAPES).index(name) + 1009 * seed)
    return torch.randn(SHAPES[name], dtype=torch.float64, generator=generator)


class Plain:
    """Whole parameters by name, and for each part of a kind a torch optimizer of them.

    Attributes:
        early: names that have state on the sharded side although they never had a step: here they have none.
    """

    def __init__(self, kind):
        self.kind = kind
        self.params = {name: torch.nn.Parameter(value(name, 0)) for part in KINDS[kind] for name in names_of(part)}
        self.optimizers = []
        self.early = set()
        for part in KINDS[kind]:
            groups = [{"params": [self.params[name] for name in names], **options} for names, options in part.groups]
            self.optimizers.append(CLASSES[part.algorithm](groups, **part.options))

    def copied(self):
        return copy.deepcopy(self)

    def groups(self):
        """For each part, names and live options of each of its groups."""
        names = {id(param): name for name, param in self.params.items()}
        return [
            [([names[id(param)] for param in group["params"]], group) for group in optimizer.param_groups]
            for optimizer in self.optimizers
        ]

    def options_of(self, name):
        return next(group for groups in self.groups() for names, group in groups if name in names)

    def layout_of_groups(self):
        return {(i, frozenset(names)) for i, groups in enumerate(self.groups()) for names, _ in groups}

    def state(self):
        """Name → state, of those that have any."""
        every = ((name, param, optimizer) for optimizer in self.optimizers for name, param in self.params.items())
        return {name: optimizer.state[param] for name, param, optimizer in every if optimizer.state.get(param)}

    def names_with_state(self):
        """As a save has them."""
        return self.state().keys() | self.early

    def step(self, gradients):
        """Args: gradients: name → gradient; the others have none."""
        for name, param in self.params.items():
            param.grad = gradients[name].clone() if name in gradients else None
        for optimizer in self.optimizers:
            optimizer.step()
        self.early -= self.state().keys()

    def add(self, part, name, options):
        param = self.params[name] = torch.nn.Parameter(value(name, 0))
        self.optimizers[part].add_param_group({"params": [param], **options})
        if self.kind in WITH_STATE:  # torch's makes it for those that are added at their first step
            alone = CLASSES[self.kind]([param], **KINDS[self.kind][part].options)
            self.optimizers[part].state[param] = alone.state[param]


def names_of(part):
    return [name for names, _ in part.groups for name in names]
