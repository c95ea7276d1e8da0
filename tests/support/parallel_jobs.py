"""One small mixture-of-experts model, split over ranks in any way: stages of a pipeline × experts × shards.

V tokens, D features, H hidden features, E experts, which do not divide evenly. `embed.weight` and `head.weight` are
tied: one parameter where the first stage is the last one too, else one on each. Whole values and whole gradients follow
from a name and a step alone, so that every split of the model is to train the same.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.optim.lr_scheduler import LambdaLR

import shardopt
from shardopt import GradientClipping, GradientClippingOptimizer
from shardopt.sharding.view import view_of
from tests.support.fake_rank import shard
from tests.support.placement import at

LAYERS = 4
V, D, H, E = 32, 64, 16, 5
TIED = {"head.weight": "embed.weight"}
_OF_LAYER = {
    "norm.weight": (D,),
    "up.weight": (H, D),
    "down.weight": (D, H),
    "experts.up": (E, H, D),
    "experts.down": (E, D, H),
}
SHAPES = {
    "embed.weight": (V, D),
    **{f"layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in _OF_LAYER.items()},
    "layers.1.late.weight": (D,),
    "layers.2.unused.weight": (D,),
    "final.weight": (D,),
}


@dataclass(frozen=True)
class Split:
    """How many ranks share the model, along which dimensions; `idle` ranks hold none of it.

    Under "fsdp" all ranks of a stage share its dense parameters by rows; under "tp" those of a dimension of the mesh
    share some of them by rows and some by columns, and the rest are replicas.
    """

    stages: int = 1
    experts: int = 1
    shards: int = 1
    style: str = "fsdp"
    idle: int = 0

    @property
    def lanes(self) -> int:
        """The ranks of a stage."""
        return self.experts * self.shards

    @property
    def ranks(self) -> int:
        return self.stages * self.lanes + self.idle

    def __str__(self) -> str:
        idle = f"+{self.idle}" if self.idle else ""
        return f"pp{self.stages}-ep{self.experts}-{self.style}{self.shards}{idle}"


SPLITS = (
    Split(),
    Split(shards=2),
    Split(shards=2, style="tp"),
    Split(experts=2),
    Split(stages=2),
    Split(stages=2, idle=1),
    Split(experts=2, shards=2),
    Split(experts=2, shards=2, style="tp"),
    Split(stages=2, shards=2),
    Split(stages=2, shards=2, style="tp"),
    Split(stages=2, experts=2),
    Split(stages=4),
)


class Place:
    """The part of a split that is on this rank. Collective."""

    def __init__(self, split: Split, layers: int = LAYERS) -> None:
        self.split, self.layers = split, layers
        self.stage: int | None = 0
        self.lane = 0
        self.mesh: DeviceMesh | None = None
        if split.ranks > 1:
            grid = torch.arange(split.ranks - split.idle).view(split.stages, split.experts, split.shards)
            whole = DeviceMesh("cpu", grid, mesh_dim_names=("stage", "expert", "shard"))
            here = whole.get_coordinate()
            self.stage = None if here is None else here[0]
            if here is not None:
                self.lane = here[1] * split.shards + here[2]
                self.mesh = whole["expert", "shard"] if split.lanes > 1 else None

    @property
    def number(self) -> int:
        """Of this rank, where it is not idle."""
        assert self.stage is not None
        return self.stage * self.split.lanes + self.lane

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.split.stages - 1

    def names(self) -> list[str]:
        """The parameters on this rank, under the names that they have in its modules."""
        return [*filter(self._has, SHAPES), *(["head.weight"] if self.is_last else [])]

    def _has(self, name: str) -> bool:
        if name == "embed.weight":
            return self.is_first
        layer = re.match(r"layers\.(\d+)\.", name)
        if layer is None:
            return self.is_last
        number = int(layer[1])
        return number < self.layers and number * self.split.stages // self.layers == self.stage

    def lay_out(self, name: str, whole: Tensor) -> Tensor:
        """A copy of the part of a tensor that this rank has: plain where a stage has one rank."""
        return whole.clone() if self.mesh is None else shard(whole, self.mesh, *self._placements(name))

    def _placements(self, name: str) -> tuple[Placement, ...]:
        by_columns = "down" in name and self.split.style == "tp"
        if "experts" in name:
            return Shard(0), Shard(2 if by_columns else 1)
        if self.split.style == "fsdp":
            return Shard(0), Shard(0)
        return Replicate(), Replicate() if len(SHAPES[name]) == 1 else Shard(int(by_columns))


@dataclass(frozen=True)
class Case:
    """An algorithm and what is special about the job.

    Args:
        exact: whether every split gives the same bits; otherwise numbers are summed over ranks.
        frozen: a regex; parameters without a gradient before the save.
        algorithm_of_vectors: of parameters that the algorithm does not take.
    """

    algorithm: str
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    exact: bool = True
    clipped: bool = False
    frozen: str = r"\.late\."
    algorithm_of_vectors: str = ""

    def groups(self) -> list[dict[str, Any]]:
        """Some of them are of parameters on all stages, some on one, and what is left over is in the middle."""
        vectors = {"algorithm": self.algorithm_of_vectors} if self.algorithm_of_vectors else {}
        decayed = {} if self.algorithm == "sgd" or vectors else {"weight_decay": 0.0}
        return [
            {"match": r"^embed", "lr": 0.02, **vectors},
            {"match": r"norm|late|unused", "lr": 0.03, **decayed, **vectors},
            {"match": r"^final", "lr": 0.04, **vectors},
            {"match": r"layers\.3\.experts", "lr": 0.05},
            {"match": r"layers\.0\.", "lr": 0.06},
        ]


CASES = {
    "adamw": Case("adamw", {"weight_decay": 0.1}),
    "adamw in fp32": Case("adamw", dtype=torch.float32),
    "adamw on stages that have not stepped": Case("adamw", frozen=r"^embed|layers\.[01]\.|late"),
    "adamw that clips": Case("adamw", exact=False, clipped=True),
    "sgd": Case("sgd", {"momentum": 0.9, "dampening": 0.25}, torch.float32),
    "muon": Case("muon", {"ns_dtype": "float64"}, algorithm_of_vectors="adamw"),
    "adafactor": Case("adafactor", exact=False),
    "row-wise adagrad": Case("rowwiseadagrad", exact=False),
}


@cache
def value_of(name: str, step: int, dtype: torch.dtype) -> Tensor:
    """The whole of a parameter before the first step (-1), or of its gradient in a step."""
    generator = torch.Generator().manual_seed(1000 * [*SHAPES].index(name) + step + 1)
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64).to(dtype)


def rate(step: int) -> float:
    return 1.0 / (1 + step)


class Job:
    """The model, its optimizer and its schedule, as they are on this rank.

    Args:
        fresh: whether parameters have other values than those that training begins with, to be loaded into.
    """

    def __init__(self, place: Place, case: Case, fresh: bool = False) -> None:
        self.place, self.case = place, case
        self.model: dict[str, torch.nn.Parameter] = {}
        for name in place.names():
            first = TIED.get(name, name)
            if first in self.model:
                self.model[name] = self.model[first]
                continue
            whole = value_of(first, -1, case.dtype)
            whole = torch.full_like(whole, 7.0) if fresh else whole
            self.model[name] = torch.nn.Parameter(place.lay_out(first, whole))
        optimizer: Any = shardopt.keyed(
            case.algorithm, self.model, groups=case.groups(), tied=TIED, **{"lr": 0.01, **case.options}
        )
        if case.clipped:
            optimizer = GradientClippingOptimizer(optimizer, clipping=GradientClipping.NORM, max_gradient=1.0)
        self.optimizer = optimizer
        self.schedule = LambdaLR(optimizer, rate)
        self.app: dict[str, Any] = {"model": self.model, "optimizer": optimizer, "schedule": self.schedule, "step": 0}

    @property
    def params(self) -> dict[str, torch.nn.Parameter]:
        """The parameters by their own names, each once."""
        return {TIED.get(name, name): parameter for name, parameter in self.model.items()}

    def train(self, steps: int, frozen: bool) -> None:
        """Steps with the given gradients; `frozen` before the save."""
        for _ in range(steps):
            step = self.app["step"]
            for name, parameter in self.params.items():
                absent = "unused" in name or (frozen and re.search(self.case.frozen, name))
                gradient = None if absent else self.place.lay_out(name, value_of(name, step, self.case.dtype))
                parameter.grad = gradient
            self.step()

    def step(self) -> None:
        self.optimizer.step()
        self.schedule.step()
        self.app["step"] += 1

    def state(self) -> dict[str, Any]:
        """All tensors and options on this rank, by key."""
        saved = self.optimizer.state_dict()
        flat: dict[str, Any] = {f"model.{name}": parameter.detach() for name, parameter in self.params.items()}
        flat |= {f"state.{name}.{entry}": v for name, each in saved["state"].items() for entry, v in each.items()}
        for group in saved["param_groups"]:
            options = {name: value for name, value in group.items() if name not in ("params", "untouched")}
            flat |= {f"options.{name}": repr(sorted(options.items())) for name in group["params"]}
        return flat

    def rates(self) -> list[Any]:
        """Of all groups, those without parameters too, and of the schedule."""
        return [[float(group["lr"]) for group in self.optimizer.param_groups], self.schedule.get_last_lr()]


def whole_state(job: Job) -> dict[str, Any]:
    """The state of a job of one process, and the rates."""
    state = {key: each.clone() if isinstance(each, Tensor) else each for key, each in job.state().items()}
    return {**state, "rates": job.rates()}


Held = dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]
"""Key → the boxes that a rank holds; none for a plain value."""


def compare(job: Job, expected: Mapping[str, Any], exact: bool) -> tuple[list[str], Held]:
    """Returns what differs on this rank from a job of one process, and the boxes of what was compared."""
    wrong, held = [], Held()
    if job.rates() != expected["rates"]:
        wrong.append(f"rates: {job.rates()} for {expected['rates']}")
    for key, value in job.state().items():
        want = expected.get(key)
        held[key] = []
        if not isinstance(value, Tensor) or not isinstance(want, Tensor):
            if isinstance(value, Tensor) or isinstance(want, Tensor) or value != want:
                wrong.append(f"{key}: {value} for {want}")
            continue
        scale = want.abs().max().item()
        for piece in view_of(value, key).pieces:
            held[key].append((piece.box.offsets, piece.box.sizes))
            part = want[at(piece.box)]
            if exact:
                is_same = torch.equal(piece.tensor, part)
            else:
                is_same = bool(((piece.tensor - part).abs() <= 1e-9 * scale).all())
            if not is_same or piece.tensor.dtype != want.dtype:
                wrong.append(f"{key} at {piece.box}: off by {(piece.tensor - part).abs().max().item():g}, of {scale:g}")
    return wrong, held


def places() -> Any:
    """Returns split → its place on this rank, made once."""
    return cache(Place)
