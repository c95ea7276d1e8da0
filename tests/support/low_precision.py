"""Parameters under the same names in every layout, and what a run in one process leaves of them."""

import functools

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import shardopt
from shardopt.sharding.view import is_held, view_of
from tests.support.fake_rank import shard
from tests.support.layouts import give_gradient, meshes, trained
from tests.support.placement import runs, same, sharded_tensor_of, two_on_first_none_on_last

# Blocks of 256 that end where no shard does, rows shorter than a block, fp32 state (of 1 dimension, few elements, or
# short rows), and fewer rows than ranks.
SHAPES = {
    "wide": (9, 601),
    "short.rows": (67, 70),
    "cube": (3, 31, 60),
    "few": (2, 2100),
    "vector": (4201,),
    "small": (7, 11),
    "thin": (301, 15),
    "scalar": (),
}
LAYOUTS = ("plain", "rows", "columns", "last", "both", "fsdp_tp", "hsdp", "table", "table_columns", "table_grid")


def values(seed, dtype):
    """Global values by name, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def place(full, layout):
    """A global value in a layout; one without dimensions is on all ranks."""
    if layout == "plain" or (layout.startswith("table") and not full.ndim):
        return full.clone()
    row, square = meshes()
    last = max(full.ndim - 1, 0)
    second = min(1, last)
    if not full.ndim:
        return shard(full, row, Replicate())
    if layout == "fsdp_tp":
        return shard(full, square, _StridedShard(0, split_factor=square.size(1)), Shard(0))
    placements = {
        "rows": (row, Shard(0)),
        "columns": (row, Shard(second)),
        "last": (row, Shard(last)),
        "both": (square, Shard(0), Shard(second)),
        "hsdp": (square, Replicate(), Shard(0)),
    }
    if layout in placements:
        mesh, *placed = placements[layout]
        return shard(full, mesh, *placed)
    return _table(full, {"table": 0, "table_columns": last}.get(layout))


def _table(full, dim):
    """A ShardedTensor of uneven shards: rank 0 has two, the last of several ranks none; None cuts rows and columns."""
    ranks = dist.get_world_size()
    if dim is None and full.ndim > 1:
        cuts = [[(0, size // 3), (size // 3, size)] for size in full.shape[:2]]
        box = type(runs(full.shape, 0, [full.shape[0]])[0])
        boxes = [
            box((a, c, *[0] * (full.ndim - 2)), (b - a, d - c, *full.shape[2:])) for a, b in cuts[0] for c, d in cuts[1]
        ]
        return sharded_tensor_of(full, boxes, [number % ranks for number in range(4)])
    holders, size = two_on_first_none_on_last(ranks), full.shape[dim or 0]
    ends = [*(min(3 * number, size) for number in range(1, len(holders))), size]
    return sharded_tensor_of(full, runs(full.shape, dim or 0, ends), holders)


BF16, FP32 = torch.bfloat16, torch.float32
OPTIONS = {
    "codes": (FP32, {"state_dtype": torch.uint8, "rounding": "nearest"}),
    "codes, at random": (BF16, {"state_dtype": torch.uint8, "rounding": "stochastic"}),
    "codes, master": (BF16, {"state_dtype": torch.uint8, "master_dtype": FP32}),
    "bf16, at random": (BF16, {"state_dtype": BF16, "rounding": "stochastic"}),
    "bf16, master": (BF16, {"state_dtype": BF16, "master_dtype": FP32, "rounding": "stochastic"}),
    "master": (BF16, {"master_dtype": FP32}),
    "at random": (BF16, {"rounding": "stochastic"}),
}
ALGORITHMS = {
    "lion": {"lr": 0.01},
    "ademamix": {"lr": 0.05},
    "adadelta": {},
    "adagrad": {"initial_accumulator_value": 0.1},
    "adam": {"amsgrad": True},
    "adamw": {"lr": 1e-2},
    "adamax": {},
    "asgd": {"t0": 1.0},
    "nadam": {},
    "radam": {"betas": (0.5, 0.7)},
    "rmsprop": {"momentum": 0.9, "centered": True},
    "rprop": {},
    "sgd": {"momentum": 0.9, "nesterov": True},
}
REFUSED = {("adadelta", "codes, at random"), ("adadelta", "codes, master")}
CASES = [(algorithm, how) for algorithm in ALGORITHMS for how in OPTIONS if (algorithm, how) not in REFUSED]


@functools.cache
def finished(case, steps=3):
    """Everything after some steps in one process; `case` is an algorithm, and how it stores."""
    training = Training.of(case)
    training.steps(0, steps)
    return training.whole()


class Training:
    """Parameters in a layout, and their optimizer."""

    def __init__(self, layout, algorithm, options, dtype, seed=0):
        self.layout, self.dtype = layout, dtype
        self.params = {name: trained(place(full, layout)) for name, full in values(seed, dtype).items()}
        self.optimizer = shardopt.keyed(algorithm, self.params, **options)

    @classmethod
    def of(cls, case, layout="plain", seed=0):
        algorithm, how = case
        dtype, options = OPTIONS[how]
        return cls(layout, algorithm, {**ALGORITHMS[algorithm], **options}, dtype, seed)

    def steps(self, first, last):
        for step in range(first, last):
            gradients = values(100 + step, self.dtype)
            for name, parameter in self.params.items():
                gradient = place(gradients[name] * 10.0 ** (step % 3), self.layout)
                give_gradient(parameter, None if (name, step) == ("few", 1) else gradient)
            self.optimizer.step()

    @property
    def app(self):
        return {"model": self.params, "optimizer": self.optimizer}

    def tensors(self):
        """Everything that is trained and kept, by key; of parameters with elements on this rank."""
        kept = {name: parameter for name, parameter in self.params.items() if is_held(parameter)}
        for name, entries in self.optimizer.state_dict()["state"].items():
            kept |= {f"{name}/{entry}": value for entry, value in entries.items()}
        return kept

    def whole(self):
        """Copies of everything, of a run in one process."""
        return {key: value.detach().clone() for key, value in self.tensors().items()}

    def differences(self, whole):
        """The keys of what has other bits, shapes or dtypes than in one process."""
        found = []
        for key, value in self.tensors().items():
            wanted, view = whole[key], view_of(value)
            if not same(value, wanted) or view.dtype != wanted.dtype or view.shape != tuple(wanted.shape):
                found.append(key)
        missing = {key.split("/")[0] for key in whole} - {key.split("/")[0] for key in self.tensors()}
        return found + [name for name in missing if is_held(self.params[name])]


def dequantized(codes, scales, signed):
    """What codes stand for, by their definition: fp32 [R, D] of uint8 [R, D] and fp32 [R, B]."""
    binades = 15 if signed else 31
    least, rows, width = 2.0**-binades, codes.shape[0], codes[0].numel()
    table: list[float] = []
    for code in range(256):
        magnitude = min(code & 127 if signed else code, 8 * binades)
        number = (2.0 ** (magnitude // 8 - binades) * (1 + magnitude % 8 / 8) - least) / (1 - least)
        table.append(-number if signed and code > 127 else number)
    numbers = torch.tensor(table)[codes.reshape(rows, -1).long()]
    block = min(width, 256)
    return numbers * scales.repeat_interleave(block, 1)[:, :width]
