"""The sharded side: shardopt's optimizers on parameters in any layout, and the app that is saved and loaded."""

import random

import torch
import torch.distributed as dist

import shardopt
from shardopt.sharding.view import local_tensors, view_of
from tests.sub_meshes import give_gradient, lacks, part, placed
from tests.twins.plain import KINDS, value

UNNAMED = ("foreach", "fused", "capturable", "differentiable")  # how to compute: not part of what is saved
TOLERANCES = {"rowwiseadagrad": {"rtol": 1e-6, "atol": 1e-6}}  # its moments are of fp32
TOLERANCE = {"rtol": 1e-11, "atol": 1e-12}
MODULES = ("block", "layer")  # what modules are called, before and after a renaming
KEYS = ("one", "two.deep")  # of nested optimizers
MESHES = {}  # of this process, by their ranks; a new process group begins with none


class Sharded:
    """Parameters as a rank has them, and their optimizer.

    Args:
        plain: what the optimizer is to have: parameters, algorithms and groups, but neither values nor options.
        layout: name → where it is placed.
        module: what stands before the names of most parameters.
        frozen: names of parameters that are not trained.
        order: a seed; of parameters and groups, and how groups are made.
    """

    def __init__(self, plain, layout, module, frozen, order):
        self.kind, self.layout, self.module = plain.kind, layout, module
        draw = random.Random(order)
        names = draw.sample(list(plain.params), len(plain.params))
        self.params = {name: placed(value(name, 0), layout.get(name), MESHES) for name in names}
        for name in frozen:
            self.train(name, False)
        self.optimizer = self._made(plain, draw)
        self.app = {"model": {self.name(each): self.params[each] for each in names}, "optimizer": self.optimizer}

    def name(self, name):
        """The name in the model. The least one of a group is another before and after a renaming."""
        return name if name in ("head", "later") else f"{self.module}.0.{name}"

    def saved_name(self, name):
        """The name in the state of the optimizer."""
        key = f"{KEYS[self._part_of(name)]}." if self.kind == "nested" else ""
        return key + self.name(name)

    def _part_of(self, name):
        with_it = (i for i, each in enumerate(KINDS[self.kind]) if any(name in names for names, _ in each.groups))
        return next(with_it, 0)  # what was added is in the first part

    def _made(self, plain, draw):
        parts = []
        for each, groups in zip(KINDS[self.kind], plain.groups(), strict=True):
            options = {frozenset(names): options for names, options in each.groups}
            named = [
                ({self.name(name): self.params[name] for name in draw.sample(names, len(names))},
                 options.get(frozenset(names), {"lr": 0.07}))
                for names, _ in draw.sample(groups, len(groups))
            ]  # fmt: skip
            parts.append((each, named))
        by_pattern = draw.random() < 0.5
        if by_pattern and self.kind == "two algorithms":
            rules = [
                {"match": _pattern(names), "algorithm": each.algorithm, **each.options, **options}
                for each, named in parts
                for names, options in named
            ]
            every = {name: param for _, named in parts for names, _ in named for name, param in names.items()}
            return shardopt.keyed("adamw", every, groups=rules)
        made = [self._of_one(each, named, by_pattern) for each, named in parts]
        if len(made) == 1:
            return made[0]
        if self.kind == "nested":
            made = [(key, optimizer) for key, optimizer in zip(KEYS, made, strict=True)]
        combined = shardopt.optim.CombinedOptimizer(made)
        if self.kind == "nested":
            combined = shardopt.GradientClippingOptimizer(combined, shardopt.GradientClipping.NORM, 1e9)
        combined.save_param_groups(True)
        return combined

    @staticmethod
    def _of_one(each, named, by_pattern):
        every = {name: param for names, _ in named for name, param in names.items()}
        first, others = (every, []) if by_pattern else (named[0][0], named[1:])
        rules = [{"match": _pattern(names), **options} for names, options in (named if by_pattern else named[:1])]
        made = shardopt.keyed(each.algorithm, first, groups=rules, **each.options)
        for names, options in others:
            made.add_param_group({"params": names, **options})
        return made

    def train(self, name, trained):
        """Unfreezes a parameter, or freezes it."""
        param = self.params[name]
        if isinstance(param, torch.nn.Parameter):
            param.requires_grad_(trained)
            return
        param.metadata().tensor_properties.requires_grad = trained  # a ShardedTensor's own requires_grad_ warns
        for leaf in local_tensors(param):
            leaf.requires_grad_(trained)

    def step(self, gradients):
        for name, param in self.params.items():
            give_gradient(param, gradients.get(name))
        self.optimizer.step()
        self.optimizer.check_agreement()

    def add(self, name, options):
        self.params[name] = placed(value(name, 0), self.layout.get(name), MESHES)
        self.app["model"][self.name(name)] = self.params[name]
        if self.kind == "two algorithms":
            child = next(child for _, child in self.optimizer.optimizers if child.algorithm == "AdamW")
            child.add_param_group({"params": {self.name(name): self.params[name]}, **options})
        else:
            self.optimizer.add_param_group({"params": {self.saved_name(name): self.params[name]}, **options})

    def set_option(self, name, option, new):
        self._group_of(name)[option] = new

    def _group_of(self, name):
        groups = self.optimizer.param_groups
        return next(group for group in groups if any(param is self.params[name] for param in group["params"]))

    def check(self, plain):
        """That this rank has what the plain side has, as far as it lies here: values, options, and which state."""
        held = {name for name in self.params if not lacks(self.layout.get(name), dist.get_rank())}
        assert self.params.keys() == plain.params.keys()
        for name in held:
            self._check_tensor(self.params[name], plain.params[name].detach(), name)
            _check_options(self._group_of(name), plain.options_of(name), name)
        state = self.optimizer.state_dict()["state"]
        expected = {self.saved_name(name) for name in plain.names_with_state() & held}
        assert state.keys() == expected, f"state of {sorted(state)}; expected of {sorted(expected)}"
        stepped = plain.state()
        for name in stepped.keys() & held:
            mine, theirs = state[self.saved_name(name)], stepped[name]
            assert mine.keys() == theirs.keys(), name
            for entry, whole in theirs.items():
                self._check_tensor(mine[entry], whole, f"{name}.{entry}")
        early = {self.saved_name(name) for name in plain.early & held}
        assert self.optimizer.unstepped_state(early) == early

    def _check_tensor(self, mine, whole, what):
        view = view_of(mine, what)
        assert (view.shape, view.dtype) == (tuple(whole.shape), whole.dtype), what
        for piece in view.pieces:
            there, tolerance = part(whole, piece), TOLERANCES.get(self.kind, TOLERANCE)
            if not torch.equal(piece.tensor, there):  # which is fast, and mostly so
                torch.testing.assert_close(piece.tensor, there, **tolerance, msg=lambda text: f"{what}: {text}")


def _check_options(mine, theirs, name):
    ours, plain = ({key: each[key] for key in each if key not in ("params", *UNNAMED)} for each in (mine, theirs))
    differing = {key: (ours.get(key), value) for key, value in plain.items() if key not in ours or ours[key] != value}
    assert not differing, f"options of {name}: {differing}"


def _pattern(names):
    return "^(" + "|".join(name.replace(".", r"\.") for name in names) + ")$"
