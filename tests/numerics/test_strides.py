"""Parameters, gradients and state that lie in memory in any way: torch's for-loop is right there, and so must we be.

Everything lies in memory of its own with NaN around it, so that a kernel that walks past what it was given is seen:
it reads a NaN, or writes over one. Wherever it may, ours steps with torch's fused kernels; these take the memory of a
parameter, its gradient and its state for runs that lie alike. Twins step with torch's own optimizers, on tensors that
lie as ours do.
"""

import itertools

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

import shardopt
from shardopt.algorithms import algorithms, spec_of
from shardopt.errors import AlgorithmError
from shardopt.sharding.view import leaves_of
from tests.cases import ELEMENTWISE
from tests.fake_rank import fake_rank

SHAPE, IMAGES = (18, 12), (2, 6, 5, 4)  # of images the second dimension are channels
MARGIN = 64
STEPS = 6
CHANGE = 3  # the step from which on something lies otherwise
FUSED = {spec.name for spec in algorithms() if spec.fused_agrees}
OPTIONS = {
    "SGD": [{"momentum": 0.9, "dampening": 0.5}, {}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
    "Adam": [{"amsgrad": True}, {"weight_decay": 0.1, "maximize": True}],
    "AdamW": [{}, {"amsgrad": True, "maximize": True}],
    "Adagrad": [{}, {"weight_decay": 0.1, "maximize": True}],
    "RMSprop": [{"centered": True, "momentum": 0.9}, {"weight_decay": 0.1, "maximize": True}],
    "NAdam": [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
}


def steps_of(shape, how):
    """The strides of a tensor that lies in some way; a negative one stands for a wider row."""
    wide = how == "slice"
    order = {"transposed": (*range(len(shape) - 1, -1, -1),), "channels_last": (0, 2, 3, 1)}.get(how, range(len(shape)))
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim] + (5 if wide and dim == len(shape) - 1 else 0)
    if how == "every other row":
        strides[0] *= 2
    if how == "one element":
        return (0,) * len(shape)
    if how == "one row":
        strides[0] = 0
    return tuple(strides)


def lay(values, how):
    """A tensor with these values (as far as elements have places of their own), in memory with NaN around it."""
    strides = steps_of(values.shape, how)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(values.shape, strides, strict=True))
    memory = torch.full((extent + 2 * MARGIN,), torch.nan, dtype=values.dtype)
    tensor = memory.as_strided(values.shape, strides, MARGIN)
    first = tuple(slice(None) if stride else slice(1) for stride in strides)
    tensor[first] = values[first]
    return tensor


def is_guarded(tensor):
    """Whether all that lies around it is untouched."""
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    inside = torch.zeros(len(memory), dtype=torch.bool)
    inside.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
    return bool(memory[~inside].isnan().all()) and not bool(memory[inside].isnan().any())


def is_dense(tensor):
    step = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ):
        if stride != step:
            return False
        step *= size
    return True


def fused_is_right(parameter, state):
    """Whether the memory of a parameter, its gradient and its state are runs that lie alike."""
    together = [parameter.grad, *(value for value in state.values() if torch.is_tensor(value) and value.dim())]
    return is_dense(parameter) and all(each.stride() == parameter.stride() for each in together)


class Twins:
    """A parameter under our optimizer and a twin of it under torch's, whose implementation each step is told."""

    def __init__(self, name, options, how, place, dtype=torch.float32, shape=SHAPE, mesh=None):
        generator = torch.Generator().manual_seed(3)
        self.numbers = [
            torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(STEPS + 1)
        ]
        self.place, self.how, self.mesh = place, how, mesh
        self.leaf, self.twin, self.whole = (lay(self.numbers[0], place) for _ in range(3))
        self.leaves = [self.leaf]
        self.twin = torch.nn.Parameter(self.twin)
        self.whole = torch.nn.Parameter(self.whole.double().contiguous())
        self.parameter = torch.nn.Parameter(self.leaf if mesh is None else self.sharded(self.leaf))
        self.leaf = leaves_of(self.parameter)[0]
        kind = getattr(torch.optim, name)
        loop = {"lr": 0.05, "foreach": how == "foreach", **options}
        self.torchs, self.oracle = kind([self.twin], **loop), kind([self.whole], **{**loop, "foreach": False})
        named = {"foreach": {"foreach": True}, "fused": {"fused": True}, "default": {}}[how]
        self.ours = shardopt.keyed(name, {"w": self.parameter}, lr=0.05, **options, **named)
        self.fuses = how == "fused" or (how == "default" and dtype in spec_of(name).fused_agrees)

    def sharded(self, local):
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False)

    @property
    def state(self):
        return {key: leaves_of(value)[0] for key, value in self.ours.state.get(self.parameter, {}).items()}

    def step(self, number, gradient_place):
        """One step of both; False where ours refused it, and rightly."""
        values = self.numbers[number + 1]
        gradient, self.twin.grad = lay(values, gradient_place), lay(values, gradient_place)
        self.whole.grad = gradient.double().contiguous()
        self.parameter.grad = gradient if self.mesh is None else self.sharded(gradient)
        fits = fused_is_right(self.twin, self.torchs.state.get(self.twin, {}))
        if self.how == "fused" and not fits:
            before = self.bits()
            with pytest.raises(AlgorithmError, match=r"w(\.grad|\.[a-z_]+)?: found"):
                self.ours.step()
            assert self.bits() == before and self.guarded()
            return False
        self.torchs.param_groups[0]["fused"] = True if self.fuses and fits else None
        self.torchs.param_groups[0]["foreach"] = self.how == "foreach"
        self.ours.step()
        self.torchs.step()
        self.oracle.step()
        assert is_guarded(gradient) and self.guarded()
        self.check()
        return True

    def bits(self):
        return [(each.stride(), each.data_ptr(), each.tolist()) for each in (self.leaf.detach(), *self.state.values())]

    def guarded(self):
        return all(map(is_guarded, self.leaves))

    def check(self):
        assert torch.equal(self.leaf.detach(), self.twin.detach())
        wanted = self.torchs.state[self.twin]
        assert self.state.keys() == wanted.keys()
        for key, value in self.state.items():
            assert value is wanted[key] is None or torch.equal(value, wanted[key]), key
        eps = 2 * STEPS * torch.finfo(self.twin.dtype).eps
        off = (self.leaf.detach().double() - self.whole.detach()).abs().max() / self.whole.detach().abs().max()
        assert off <= 4 * eps, off.item()

    def lay_parameter(self, how):
        """As `model.to(memory_format=...)` does it with plain parameters."""
        for tensor in (self.leaf, self.twin):
            tensor.data = lay(tensor.detach(), how)
        self.leaves.append(self.leaf)

    def lay_state(self, how):
        """As someone does who replaces it by what he loaded."""
        theirs, ours = self.torchs.state[self.twin], self.ours.state[self.parameter]
        for key, value in theirs.items():
            if torch.is_tensor(value) and value.dim():
                theirs[key], mine = lay(value, how), lay(value, how)
                self.leaves.append(mine)
                ours[key] = mine if self.mesh is None else self.sharded(mine)
                if self.mesh is not None:
                    self.leaves[-1] = leaves_of(ours[key])[0]


MATRICES = ("contiguous", "transposed", "slice", "every other row")
GRADIENTS = (*MATRICES, "one element", "one row")
EVENTS = ("gradient", "steady", "parameter", "state")


def train(twins, event, other):
    """Steps in which something lies otherwise from the third on: the gradient from the first on where it is steady."""
    for number in range(STEPS):
        if number == CHANGE and event == "parameter":
            twins.lay_parameter(other)
        if number == CHANGE and event == "state":
            twins.lay_state(other)
        late = event == "steady" or (event == "gradient" and number >= CHANGE)
        if not twins.step(number, other if late else twins.place):
            return


def cases():
    """Algorithm, options, implementation, whether it is sharded, dtype; what is not usual is exhaustive."""
    for name in ELEMENTWISE:
        for how in ("default", "fused", "foreach") if name in FUSED else ("default", "foreach"):
            for i, options in enumerate(OPTIONS.get(name, [{}])):
                for sharded in (True, False):
                    for dtype in (torch.float32, torch.float64, torch.bfloat16):
                        usual = i == 0 and dtype == torch.float32 and sharded == (name in FUSED)
                        id = f"{name}-{i}-{how}-{'sharded' if sharded else 'plain'}-{str(dtype).removeprefix('torch.')}"
                        marks = () if usual else pytest.mark.exhaustive
                        yield pytest.param(name, options, how, sharded, dtype, id=id, marks=marks)


@pytest.fixture(scope="module")
def mesh():
    with fake_rank(0, 2) as mesh:
        yield mesh


@pytest.mark.parametrize(("name", "options", "how", "sharded", "dtype"), list(cases()))
def test_memory_of_any_kind(name, options, how, sharded, dtype, mesh, request):
    if how == "fused" and dtype not in spec_of(name).fused_agrees:
        pytest.skip("torch's kernel is wrong in this dtype, however the memory lies")
    full = request.config.getoption("--exhaustive")
    for event in EVENTS:
        for place, other in itertools.product(MATRICES, GRADIENTS if event in ("gradient", "steady") else MATRICES):
            if not full and "slice" not in (place, other) and (place, other, event) not in USUAL:
                continue
            train(Twins(name, options, how, place, dtype, mesh=mesh if sharded else None), event, other)
        if full or event == "parameter":
            for place, other in itertools.permutations(("contiguous", "channels_last"), 2):
                train(Twins(name, options, how, place, dtype, IMAGES, mesh if sharded else None), event, other)


USUAL = {
    ("transposed", "transposed", "steady"),
    ("transposed", "contiguous", "steady"),
    ("contiguous", "contiguous", "steady"),
    ("contiguous", "one element", "steady"),
    ("transposed", "one row", "gradient"),
    ("contiguous", "transposed", "gradient"),
    ("transposed", "contiguous", "state"),
}
