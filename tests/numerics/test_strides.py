"""Parameters, gradients and state that lie in memory in any way: torch's for-loop is right there, and so must we be.

Everything lies in memory of its own with NaN around it, so that a kernel that walks past what it was given is seen:
it reads a NaN, or writes over one. Wherever it may, ours steps with torch's fused kernels; these take the memory of a
parameter, its gradient and its state for runs that lie alike. Twins step with torch's own optimizers, on tensors that
lie as ours do.
"""

import itertools
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

import shardopt
from shardopt.algorithms import algorithms, spec_of
from shardopt.errors import AlgorithmError
from shardopt.sharding.view import local_tensors
from tests.support.cases import ELEMENTWISE, plain_class
from tests.support.fake_rank import fake_rank

SHAPE, IMAGES = (18, 12), (2, 6, 5, 4)  # of images the second dimension are channels
MARGIN = 64
STEPS = 5
CHANGE = 2  # the step from which on something lies otherwise
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
        self.local, self.twin, self.whole = (lay(self.numbers[0], place) for _ in range(3))
        self.local_tensors = [self.local]
        self.twin = torch.nn.Parameter(self.twin)
        self.whole = torch.nn.Parameter(self.whole.double().contiguous())
        self.parameter = torch.nn.Parameter(self.local if mesh is None else self.sharded(self.local))
        self.local = local_tensors(self.parameter)[0]
        kind = plain_class(name)
        loop = {"lr": 0.05, "foreach": how == "foreach", **options}
        self.torchs, self.oracle = kind([self.twin], **loop), kind([self.whole], **{**loop, "foreach": False})
        named = {"foreach": {"foreach": True}, "fused": {"fused": True}, "default": {}}[how]
        self.ours = shardopt.keyed(name, {"w": self.parameter}, lr=0.05, **options, **named)
        self.fuses = how == "fused" or (how == "default" and dtype in spec_of(name).fused_agrees)

    def sharded(self, local):
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False)

    @property
    def state(self):
        return {key: local_tensors(value)[0] for key, value in self.ours.state.get(self.parameter, {}).items()}

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
        return [(each.stride(), each.data_ptr(), each.tolist()) for each in (self.local.detach(), *self.state.values())]

    def guarded(self):
        return all(map(is_guarded, self.local_tensors))

    def check(self):
        assert torch.equal(self.local.detach(), self.twin.detach())
        wanted = self.torchs.state[self.twin]
        assert self.state.keys() == wanted.keys()
        for key, value in self.state.items():
            assert value is wanted[key] is None or torch.equal(value, wanted[key]), key
        # ASGD has two numbers in fp32, whatever its parameters are in.
        dtype = torch.float32 if "ax" in wanted and self.twin.dtype == torch.float64 else self.twin.dtype
        eps = 2 * STEPS * torch.finfo(dtype).eps
        off = (self.local.detach().double() - self.whole.detach()).abs().max() / self.whole.detach().abs().max()
        assert off <= 4 * eps, off.item()

    def lay_parameter(self, how):
        """As `model.to(memory_format=...)` does it with plain parameters."""
        for tensor in (self.local, self.twin):
            tensor.data = lay(tensor.detach(), how)
        self.local_tensors.append(self.local)

    def lay_state(self, how):
        """As someone does who replaces it by what he loaded."""
        theirs, ours = self.torchs.state[self.twin], self.ours.state[self.parameter]
        for key, value in theirs.items():
            if torch.is_tensor(value) and value.dim():
                theirs[key], mine = lay(value, how), lay(value, how)
                self.local_tensors.append(mine)
                ours[key] = mine if self.mesh is None else self.sharded(mine)
                if self.mesh is not None:
                    self.local_tensors[-1] = local_tensors(ours[key])[0]


MATRICES = ("contiguous", "transposed", "slice", "every other row")
GRADIENTS = (*MATRICES, "one element", "one row")
EVENTS = ("gradient", "steady", "parameter", "state")


def train(twins, event, other):
    """Steps in which something lies otherwise after a while: the gradient from the first on where it is steady."""
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
                        if how == "fused" and dtype not in spec_of(name).fused_agrees:
                            continue  # refused, however the memory lies
                        usual = i == 0 and dtype == torch.float32 and sharded == (name in FUSED) and name != "Adam"
                        id = f"{name}-{i}-{how}-{'sharded' if sharded else 'plain'}-{str(dtype).removeprefix('torch.')}"
                        marks = () if usual else pytest.mark.exhaustive
                        yield pytest.param(name, options, how, sharded, dtype, id=id, marks=marks)


@pytest.fixture(scope="module")
def mesh():
    with fake_rank(0, 1) as mesh:  # of more, collectives would leave what was in their memory
        yield mesh


@pytest.mark.parametrize(("name", "options", "how", "sharded", "dtype"), list(cases()))
def test_memory_of_any_kind(name, options, how, sharded, dtype, mesh, request):
    full = request.config.getoption("--exhaustive")
    for event in EVENTS:
        for place, other in itertools.product(MATRICES, GRADIENTS if event in ("gradient", "steady") else MATRICES):
            if full or (place, other) in USUAL[event]:
                train(Twins(name, options, how, place, dtype, mesh=mesh if sharded else None), event, other)
        if full or event == "parameter":
            for place, other in itertools.permutations(("contiguous", "channels_last"), 2):
                train(Twins(name, options, how, place, dtype, IMAGES, mesh if sharded else None), event, other)


USUAL = {
    "gradient": [("contiguous", "transposed"), ("contiguous", "one row"), ("transposed", "contiguous")],
    "steady": [
        ("contiguous", "contiguous"),
        ("contiguous", "one element"),
        ("transposed", "transposed"),
        ("slice", "slice"),
        ("every other row", "contiguous"),
    ],
    "parameter": [("contiguous", "transposed"), ("contiguous", "slice")],
    "state": [("contiguous", "transposed"), ("contiguous", "slice"), ("transposed", "contiguous")],
}


def local(tensor):
    return local_tensors(tensor)[0].detach()


def places_of_all():
    """Where a parameter, its gradients, and its state from the third step on lie."""
    for place, gradient in itertools.product(MATRICES, GRADIENTS):
        yield place, gradient, None
    yield from itertools.product(MATRICES[:3], ("contiguous", "one row"), MATRICES[1:3])


@pytest.mark.parametrize(
    ("name", "sharded"),
    [
        ("AdamW", False),
        ("SGD", True),
        *(
            pytest.param(name, sharded, marks=pytest.mark.exhaustive)
            for name, sharded in [("SGD", False), ("RMSprop", False), ("AdamW", True), ("RMSprop", True)]
        ),
    ],
)
@mock.patch("shardopt.optim.backward.reduced_by_ddp", lambda parameters: False)  # looks at every object there is
def test_updates_in_backward(name, sharded, mesh):
    """Where autograd lays gradients as their parameters lie, or contiguous where these have gaps."""
    options = {"lr": 0.05, **OPTIONS[name][0]}
    for place in (*MATRICES, "channels_last"):
        shape = IMAGES if place == "channels_last" else SHAPE
        numbers = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(STEPS + 1)]
        local_tensor, twin = lay(numbers[0], place), torch.nn.Parameter(lay(numbers[0], place))
        whole = DTensor.from_local(local_tensor, mesh, [Shard(0)], run_check=False) if sharded else local_tensor
        parameter = torch.nn.Parameter(whole)
        optimizer = shardopt.in_backward({"w": parameter}, name, **options)
        torchs = plain_class(name)([twin], **options, foreach=False)
        for factor in numbers[1:]:
            (twin * factor).sum().backward()
            fits = name in FUSED and fused_is_right(twin, torchs.state.get(twin, {}))
            torchs.param_groups[0]["fused"] = fits or None
            torchs.step()
            torchs.zero_grad()
            if sharded:
                factor = DTensor.from_local(factor, mesh, [Shard(0)], run_check=False)
                (parameter * factor).to_local().sum().backward()
            else:
                (parameter * factor).sum().backward()
            assert torch.equal(local(parameter), twin.detach()) and is_guarded(local(parameter)), place
        optimizer.stop()


def placed(local, mesh, like=None):
    """A plain tensor, or a DTensor around it."""
    if mesh is None:
        return local
    if like is not None:
        return DTensor(local, like._spec, requires_grad=False)  # sparse ones can be made in this way only
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


def gradient_of(values, place, sparse):
    gradient = lay(values, place)
    if not sparse:
        return gradient
    rows = torch.tensor([1, 5, 11])
    return torch.sparse_coo_tensor(rows[None], gradient[rows], SHAPE, check_invariants=True)


def trained(name, options, mesh, place, gradient_place, state_place, sparse):
    """The local tensor and state after some steps of an algorithm that is not elementwise."""
    numbers = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(i)) for i in range(STEPS + 1)]
    parameter = torch.nn.Parameter(placed(lay(numbers[0], place), mesh))
    optimizer = shardopt.keyed(name, {"w": parameter}, lr=0.05, **options)

    def closure():
        difference = local(parameter) - lay(numbers[1], gradient_place)
        parameter.grad = placed(gradient_of(difference, gradient_place, sparse), mesh, parameter)
        return difference.square().sum() / 2

    for number, values in enumerate(numbers[1:]):
        if number == CHANGE and state_place is not None:
            for key, value in list(optimizer.state[parameter].items()):
                if torch.is_tensor(value) and value.shape == parameter.shape:
                    optimizer.state[parameter][key] = placed(lay(local(value), state_place), mesh)
        if name == "LBFGS":
            optimizer.step(closure)
        else:
            parameter.grad = placed(gradient_of(values, gradient_place, sparse), mesh, parameter)
            optimizer.step()
    assert is_guarded(local(parameter))
    state = optimizer.state[parameter].values()
    return [local(parameter), *(local(value) for value in state if torch.is_tensor(value))]


OTHERS = {
    "Muon": [{"ns_dtype": "float32"}],
    "Adafactor": [{}, {"foreach": True}],
    "RowWiseAdagrad": [{}],
    "RowWiseAdam": [{"weight_decay": 0.1}],
    "LBFGS": [{"max_iter": 1, "history_size": 3}],
}


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize(
    ("name", "options", "sparse"),
    [
        *((name, options, False) for name, sets in OTHERS.items() for options in sets),
        *((name, {}, True) for name in ("RowWiseAdagrad", "RowWiseAdam", "SparseAdam")),
    ],
    ids=str,
)
def test_algorithms_that_are_not_elementwise(name, options, sparse, sharded, mesh, request):
    """They compute the same wherever their tensors lie."""
    mesh = mesh if sharded else None
    full = request.config.getoption("--exhaustive")
    wanted = {}
    for place, gradient, state in places_of_all():
        if not full and (place, gradient, state) not in SOME:
            continue
        kind = gradient if gradient.startswith("one") else "contiguous"
        if kind not in wanted:
            wanted[kind] = trained(name, options, mesh, "contiguous", kind, None, sparse)
        for one, other in zip(trained(name, options, mesh, place, gradient, state, sparse), wanted[kind], strict=True):
            assert (one - other).abs().max() <= 1e-5 * other.abs().max(), (place, gradient, state)


SOME = {
    ("transposed", "contiguous", None),
    ("slice", "transposed", None),
    ("every other row", "one element", None),
    ("contiguous", "one row", "slice"),
    ("transposed", "contiguous", "transposed"),
}


@pytest.mark.parametrize("kind", [shardopt.EMA, shardopt.SWA])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_averages(kind, dtype, mesh):
    for place, changed in itertools.permutations(MATRICES, 2):
        for wrapped in (None, mesh):
            models = []
            for where in (place, "contiguous"):
                model = torch.nn.Module()
                model.w = torch.nn.Parameter(placed(lay(torch.ones(SHAPE), where), wrapped))
                averages = kind(model, dtype=dtype)
                for number in range(4):
                    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(number))
                    if number == 2 and where != "contiguous":
                        local_tensors(model.w)[0].data = lay(local(model.w), changed)
                    local(model.w).copy_(values)
                    averages.update()
                with averages.swap():
                    models.append(local(model.w).clone())
                    assert is_guarded(local(model.w))
                assert torch.equal(local(model.w), values) and is_guarded(local(model.w))
                models.append(local(averages.state_dict()["state"]["w"][kind._entry]))
            assert torch.equal(models[0], models[2]) and torch.equal(models[1], models[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["norm", "value", "scaler"])
def test_gradients_that_are_scaled(how, dtype, mesh):
    """Also those whose elements share memory, which cannot be scaled where they lie."""
    for place, wrapped in itertools.product(GRADIENTS, (None, mesh)):
        start = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)
        parameter = torch.nn.Parameter(placed(lay(start, "slice"), wrapped))
        gradient = lay(torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype), place)
        parameter.grad, exact = placed(gradient, wrapped), gradient.double()
        optimizer = shardopt.keyed("sgd", {"w": parameter}, lr=1.0)
        if how == "scaler":
            scaler = shardopt.GradScaler("cpu", init_scale=4.0)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            exact /= 4
        else:
            clipping = shardopt.GradientClipping(how)
            shardopt.GradientClippingOptimizer(optimizer, clipping, 0.5).step()
            exact = exact.clamp(-0.5, 0.5) if how == "value" else exact * min(0.5 / float(exact.norm()), 1)
        off = (local(parameter).double() - (start.double() - exact)).abs().max()
        assert off <= 8 * torch.finfo(dtype).eps and is_guarded(local(parameter)) and is_guarded(gradient)


def test_momentum_that_is_resumed_into_other_strides():
    """The buffer of `init_state` lies as its parameter; the gradients that come do not."""
    runs = []
    for fused in (None, False):
        first = {"w": torch.nn.Parameter(lay(torch.ones(SHAPE), "contiguous"))}
        second = {"w": torch.nn.Parameter(lay(torch.ones(SHAPE), "transposed"))}
        saved = shardopt.keyed("sgd", first, lr=0.1, momentum=0.9, fused=fused)
        loaded = shardopt.keyed("sgd", second, lr=0.1, momentum=0.9, fused=fused)
        for number in range(4):
            params, optimizer = (first, saved) if number < 2 else (second, loaded)
            params["w"].grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(number))
            optimizer.step()
            if number == 1:
                loaded.init_state()
                loaded.load_state_dict(saved.state_dict())
        runs.append(second["w"].detach())
    assert torch.equal(*runs)


@pytest.mark.parametrize("fused", [None, True])
def test_state_that_is_replaced_by_one_with_other_strides(fused):
    """SGD has no buffer yet when its first step looks at how memory lies: it is looked at in the steps after it."""
    ours, theirs = (torch.nn.Parameter(torch.ones(SHAPE)) for _ in range(2))
    optimizer = shardopt.keyed("sgd", {"w": ours}, lr=0.1, momentum=0.9, fused=fused)
    twin = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, foreach=False)
    for step in range(STEPS):
        if step == CHANGE:
            state = optimizer.state[ours]
            state["momentum_buffer"] = state["momentum_buffer"].t().contiguous().t()
        gradient = torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))
        ours.grad, theirs.grad = gradient, gradient.clone()
        if fused and step == CHANGE:
            with pytest.raises(AlgorithmError, match=r"w\.momentum_buffer: .*strides"):
                optimizer.step()
            return
        optimizer.step()
        twin.step()
        torch.testing.assert_close(ours, theirs)


def test_a_parameter_that_has_grown_is_not_stepped_with_state_that_has_not():
    """The for-loop takes the step, and says what does not fit; a fused kernel would read past the state's end."""
    params = {"w": torch.nn.Parameter(lay(torch.ones(SHAPE), "contiguous"))}
    optimizer = shardopt.keyed("adamw", params)
    for rows in (18, 18, 40):
        if rows > len(params["w"]):
            params["w"].data = lay(torch.ones(rows, 12), "contiguous")
        params["w"].grad = torch.ones(rows, 12)
        if rows == 18:
            optimizer.step()
        else:
            with pytest.raises(RuntimeError, match="size of tensor"):
                optimizer.step()
            optimizer.param_groups[0]["fused"] = True
            with pytest.raises(AlgorithmError, match=r"w\.exp_avg: found shape \(18, 12\)"):
                optimizer.step()
    assert is_guarded(params["w"].detach())


def test_a_group_is_refused_before_another_one_has_stepped():
    params = {
        name: torch.nn.Parameter(lay(torch.ones(SHAPE), place)) for name, place in (("a", "contiguous"), ("b", "slice"))
    }
    optimizer = shardopt.keyed("adamw", params, fused=True, groups=[{"match": "a"}])
    for parameter in params.values():
        parameter.grad = torch.ones(SHAPE)
    with pytest.raises(AlgorithmError, match=r"b: found shape .* with strides") as caught:
        optimizer.step()
    assert [problem.key for problem in caught.value.problems] == ["b"]
    assert torch.equal(params["a"], torch.ones(SHAPE)) and not optimizer.state_dict()["state"]
    optimizer.init_state()
    with pytest.raises(AlgorithmError):
        optimizer.step()
    assert all(float(state["step"]) == 0 for state in optimizer.state_dict()["state"].values())
    for group in optimizer.param_groups:
        group["fused"] = None
    optimizer.step()
    assert all(float(state["step"]) == 1 for state in optimizer.state_dict()["state"].values())


def test_a_parameter_that_was_laid_out_anew_in_a_sharded_model(mesh):
    """`to(memory_format=...)` gives a DTensor another local tensor, and its state stays as it was."""
    runs = []
    for options in ({}, {"foreach": False}):
        layer = torch.nn.Conv2d(4, 6, 3, bias=False)
        values = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(0))
        layer.weight = torch.nn.Parameter(placed(values.clone(), mesh))
        optimizer = shardopt.keyed("adamw", layer.named_parameters(), lr=0.1, **options)
        for number in range(6):
            if number == 3:
                layer.to(memory_format=torch.channels_last)
                assert not local(layer.weight).is_contiguous()
            gradient = torch.randn(values.shape, generator=torch.Generator().manual_seed(number + 1))
            layer.weight.grad = placed(gradient.to(memory_format=torch.channels_last) if number > 3 else gradient, mesh)
            optimizer.step()
        runs.append(local(layer.weight))
    assert (runs[0] - runs[1]).abs().max() <= 1e-6
