"""Every kind of keyed optimizer over the same three parameters, each to train as torch's Adam does."""

import copy
from collections.abc import Callable

import torch

import shardopt
from shardopt import (
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizer,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
)
from shardopt.optim import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper

Parameters = dict[str, torch.nn.Parameter]
# The for-loop, which computes the same bits however parameters are sharded.
OPTIONS = {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1, "foreach": False}


def parameters(seed=0) -> Parameters:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"layer.w": (4, 2), "layer.b": (2,), "head.w": (3,)}
    return {name: torch.nn.Parameter(torch.rand(shape, generator=generator)) for name, shape in shapes.items()}


def give_gradients(params: Parameters, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in params.values():
        parameter.grad = torch.rand(parameter.shape, generator=generator) - 0.5


def train(optimizer, params: Parameters, steps=1, first=0) -> None:
    for step in range(first, first + steps):
        give_gradients(params, step)
        optimizer.step()


def same(one, other) -> bool:
    """Whether nested state is equal in every value, type and dtype; a fused step's count is on the device."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other.to(one.device))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def snapshot(optimizer, params: Parameters):
    """A copy of all that a step or a load could change."""
    return copy.deepcopy((list(params.values()), optimizer.state_dict(), [_options(g) for g in optimizer.param_groups]))


def _options(group):
    return {name: value for name, value in group.items() if name != "params"}


def inner(params: Parameters, prefix: str) -> Parameters:
    return {name.removeprefix(prefix): tensor for name, tensor in params.items() if name.startswith(prefix)}


class OwnOptimizer(KeyedOptimizer):
    """A user's own optimizer: the base class around state and groups that are made elsewhere."""

    def __init__(self, params: Parameters) -> None:
        self.adam = torch.optim.Adam(list(params.values()), **OPTIONS)
        super().__init__(params, self.adam.state, self.adam.param_groups)
        self.defaults = self.adam.defaults
        self.save_param_groups(True)

    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            type(self.adam).step.__wrapped__(self.adam)
        return loss

    def init_state(self, sparse_grad_parameter_names=None):
        super().init_state(sparse_grad_parameter_names)
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state.get(parameter):
                    zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    self.state[parameter] = {"step": torch.tensor(0.0), **zeros}

    def __getstate__(self):
        return {**super().__getstate__(), "adam": self.adam}


class Counting(OptimizerWrapper):
    """A wrapper with state of its own: how often it stepped."""

    def __init__(self, optimizer: KeyedOptimizer, name: str = "__count") -> None:
        super().__init__(optimizer)
        self.name = name
        self.position = {"steps": 0, "sum": torch.zeros(())}

    def _before_step(self) -> None:
        self.position["steps"] += 1
        self.position["sum"] += self.position["steps"]

    def _own_state(self):
        return {self.name: self.position}


def adam(params: Parameters) -> KeyedOptimizer:
    return shardopt.keyed("adam", params, **OPTIONS)


def keyed_wrapper(params: Parameters) -> KeyedOptimizer:
    optimizer = KeyedOptimizerWrapper(params, lambda tensors: torch.optim.Adam(tensors, **OPTIONS))
    optimizer.save_param_groups(True)
    return optimizer


def wrapper(params: Parameters) -> KeyedOptimizer:
    return OptimizerWrapper(adam(params))


def counting(params: Parameters) -> KeyedOptimizer:
    return Counting(adam(params))


def warm(optimizer: KeyedOptimizer) -> KeyedOptimizer:
    """Its stages are over, so that the rates are the user's; what they are before is for test_warmup.py."""
    warmup = WarmupOptimizer(optimizer, [WarmupStage(WarmupPolicy.NONE, max_iters=1)], lr=OPTIONS["lr"])
    warmup.state_dict()["state"]["__warmup"]["warmup"].fill_(1)
    return warmup


def warmed_up(params: Parameters) -> KeyedOptimizer:
    return warm(adam(params))


def clipped(params: Parameters) -> KeyedOptimizer:
    """So widely that nothing is clipped; what clipping does is for test_clipping.py."""
    return GradientClippingOptimizer(adam(params), GradientClipping.NORM, max_gradient=1e6)


def combined(params: Parameters) -> KeyedOptimizer:
    return CombinedOptimizer([("layer", adam(inner(params, "layer."))), ("head", adam(inner(params, "head.")))])


def combined_without_keys(params: Parameters) -> KeyedOptimizer:
    weights = {name: tensor for name, tensor in params.items() if name.endswith("w")}
    return CombinedOptimizer([adam(weights), adam({"layer.b": params["layer.b"]})])


def nested(params: Parameters) -> KeyedOptimizer:
    layer = inner(params, "layer.")
    children = CombinedOptimizer([Counting(adam({"w": layer["w"]})), OptimizerWrapper(adam({"b": layer["b"]}))])
    head = CombinedOptimizer([("head", Counting(OptimizerWrapper(adam(inner(params, "head.")))))])
    return Counting(CombinedOptimizer([("layer", OptimizerWrapper(children)), head]), "__outer")


def everything(params: Parameters) -> KeyedOptimizer:
    head = OptimizerWrapper(GradientClippingOptimizer(adam(inner(params, "head."))))
    children = CombinedOptimizer([("layer", clipped(inner(params, "layer."))), ("head", head)])
    return GradientClippingOptimizer(warm(children), GradientClipping.VALUE, max_gradient=1e6)


BUILDERS: dict[str, Callable[[Parameters], KeyedOptimizer]] = {
    "own": OwnOptimizer,
    "keyed": adam,
    "keyed wrapper": keyed_wrapper,
    "wrapper": wrapper,
    "wrapper with state": counting,
    "warmed up": warmed_up,
    "clipped": clipped,
    "combined": combined,
    "combined without keys": combined_without_keys,
    "nested": nested,
    "everything": everything,
}
