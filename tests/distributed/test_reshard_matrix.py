"""The whole matrix of resharding: every layout into every layout, by 1 to 4 ranks on either side, in every dtype.

A job saves one tensor for each layout, shape and dtype under the name of its layout. Others load it as many times as
there are layouts, each time with the layouts turned on by one, so that every name is loaded into every layout.
"""

import functools
import itertools
import json
from collections.abc import Iterator
from math import prod

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard

from shardopt import checkpoint
from shardopt.checkpoint.format.constants import DTYPES
from shardopt.checkpoint.format.tensor_bytes import dtype_name
from shardopt.checkpoint.storage import LocalStorage
from shardopt.sharding.box import Box
from shardopt.sharding.view import view_of
from tests.harness import run_ranks
from tests.support.fake_rank import shard
from tests.support.placement import sharded_tensor_of

RANKS_STAY = True

RANKS = (1, 2, 3, 4)
DTYPE_NAMES = (
    *("float64", "float32", "bfloat16", "float16", "int64", "int8", "bool"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "complex64", "complex128"),
)
ROW, SQUARE = "row", "square"
PLACED = {
    "replicate": (ROW, Replicate()),
    "rows": (ROW, Shard(0)),
    "columns": (ROW, Shard(1)),
    "rows and columns": (SQUARE, Shard(0), Shard(1)),
    "columns and rows": (SQUARE, Shard(1), Shard(0)),
    "rows twice": (SQUARE, Shard(0), Shard(0)),
    "hybrid": (SQUARE, Replicate(), Shard(0)),
    "strided": (SQUARE, _StridedShard(0, split_factor=2), Shard(0)),
}
LAYOUTS = ("plain", *PLACED, "sharded tensor", "columns of a sharded tensor", "shards in a wrapper")
SHAPES = {"long": (11, 6), "short": (2, 7)}  # of the short one some of three and four ranks hold nothing
OTHERS = {"scalar": (), "nothing": (0, 5)}  # placed in no more ways than these
PLAINLY = ("plain", "replicate")


def names() -> Iterator[tuple[str, str, str]]:
    """Layout, shape and dtype of each tensor."""
    yield from itertools.product(LAYOUTS, SHAPES, DTYPE_NAMES)
    yield from itertools.product(PLAINLY, OTHERS, DTYPE_NAMES)


@functools.cache
def full(shape: str, dtype: str) -> Tensor:
    """Random bytes, not to be written to: no two elements are taken for each other, and NaN is among them."""
    sizes = (SHAPES | OTHERS)[shape]
    generator = torch.Generator().manual_seed(len(sizes) + DTYPE_NAMES.index(dtype))
    count = prod(sizes) * DTYPES[dtype].itemsize
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (count,), generator=generator).to(torch.uint8)
    return raw.view(getattr(torch, dtype)).reshape(sizes)


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def lay_out(value: Tensor, layout: str, meshes: dict[str, DeviceMesh]) -> Tensor:
    """A copy of the part of a value that this rank holds, as a tensor of that layout."""
    if layout in PLACED:
        kind, *placements = PLACED[layout]
        return as_dtensor(value, meshes[kind], tuple(placements))
    if layout == "plain":
        return value.clone()
    dim = int(layout.startswith("columns"))
    parts = list(uneven_parts(value, dim))
    rank, mesh = dist.get_rank(), meshes[ROW]
    if layout == "shards in a wrapper":
        own = [(part.clone(), offsets) for part, offsets, holder in parts if holder == rank]
        wrapper = LocalShardsWrapper([part for part, _ in own], [offsets for _, offsets in own])
        return DTensor.from_local(wrapper, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride())
    parts.sort(key=lambda each: each[-1])  # by rank, as torch describes shards that ranks have told each other
    boxes = [Box(at, tuple(part.shape)) for part, at, _ in parts]
    return sharded_tensor_of(value, boxes, [holder for *_, holder in parts])


def as_dtensor(value: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    if isinstance(placements[0], _StridedShard):  # tells over how many ranks tensor parallelism goes
        placements = (_StridedShard(0, split_factor=mesh.size(1)), *placements[1:])
    numbers = numbers_held(tuple(value.shape), mesh, placements)
    items = raw(value).view(value.numel(), value.itemsize)[numbers.flatten()]  # float8 cannot be indexed
    local = items.flatten().view(value.dtype).view(numbers.shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())


@functools.cache
def numbers_held(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    """Which elements of a tensor this rank has, by number."""
    return shard(torch.arange(prod(shape)).view(shape), mesh, *placements).to_local()


def uneven_parts(value: Tensor, dim: int) -> Iterator[tuple[Tensor, tuple[int, ...], int]]:
    """Pieces, their offsets and holders: the first rank has two, and the last of several none."""
    size = dist.get_world_size()
    holders = [0, *range(1, size - 1), 0]
    length = value.shape[dim]
    cuts = [min(i * (i + 1) // 2, length) for i in range(len(holders))] + [length]
    for holder, (begin, end) in zip(holders, itertools.pairwise(cuts), strict=True):
        if end > begin:
            offsets = [0] * value.ndim
            offsets[dim] = begin
            yield value.narrow(dim, begin, end - begin), tuple(offsets), holder


@functools.cache
def meshes_of_job() -> dict[str, DeviceMesh]:
    size = dist.get_world_size()
    rows = 2 if size % 2 == 0 else 1
    return {ROW: init_device_mesh("cpu", (size,)), SQUARE: init_device_mesh("cpu", (rows, size // rows))}


def make_state(turn: int, filled: bool) -> dict[str, Tensor]:
    """All tensors by name, in the layout that is `turn` further on than the one they are named for."""
    meshes = meshes_of_job()
    state = {}
    for layout, shape, dtype in names():
        among = LAYOUTS if shape in SHAPES else PLAINLY
        value = full(shape, dtype)
        if not filled:
            value = (~raw(value)).view(value.dtype).view(value.shape) if dtype != "bool" else ~value
        chosen = among[(among.index(layout) + turn) % len(among)]
        state[f"{layout}/{shape}/{dtype}"] = lay_out(value, chosen, meshes)
    return state


def held(state: dict[str, Tensor]) -> dict[str, list[int]]:
    return {key: [piece.tensor.data_ptr() for piece in view_of(tensor, key).pieces] for key, tensor in state.items()}


def is_filled(key: str, tensor: Tensor) -> bool:
    """Whether every piece that this rank holds has its part of the value, to the bit."""
    value = full(*key.split("/")[1:])
    return all(
        torch.equal(raw(value[tuple(map(slice, piece.box.offsets, piece.box.ends))]), raw(piece.tensor))
        for piece in view_of(tensor, key).pieces
    )


def save(path: str) -> None:
    checkpoint.save(path, {"state": make_state(0, filled=True)})


def load(path: str, turns: list[int]) -> None:
    for turn in turns:
        state = make_state(turn, filled=False)
        app, memory = {"state": dict(state)}, held(state)
        assert not any(is_filled(key, tensor) for key, tensor in state.items() if any(memory[key]))
        checkpoint.load(path, app)
        assert held(state) == memory
        assert all(app["state"][key] is state[key] for key in state)
        assert [key for key, tensor in state.items() if not is_filled(key, tensor)] == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    made = {}

    def get(ranks):
        if ranks not in made:
            made[ranks] = str(tmp_path_factory.mktemp("saved") / str(ranks))
            run_ranks(ranks, save, made[ranks])
        return made[ranks]

    return get


USUAL = {(4, 3): (1, 8), (2, 4): (3,), (3, 4): (5,), (4, 1): (6,), (1, 2): (9,)}
"""Ranks that save and that load, and the turns that are looked at; the others are exhaustive."""


@pytest.mark.parametrize(("saving", "loading"), list(USUAL))
def test_some_layouts_into_others(saved, saving, loading):
    run_ranks(loading, load, saved(saving), USUAL[saving, loading])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("saving", "loading"), list(itertools.product(RANKS, RANKS)))
def test_every_layout_into_every_layout(saved, saving, loading):
    run_ranks(loading, load, saved(saving), list(range(len(LAYOUTS))), deadline_seconds=300.0)


@pytest.mark.parametrize("saving", [pytest.param(n, marks=pytest.mark.exhaustive if n != 3 else ()) for n in RANKS])
def test_torch_and_safetensors_read_every_file(saved, saving):
    """torch's reader knows F16, F32, F64, BF16 and the signed integers, and no tensors without dimensions."""
    path = saved(saving)
    known = ("float64", "float32", "bfloat16", "float16", "int64", "int8")
    named = {f"state.{'/'.join(name)}": full(*name[1:]) for name in names()}
    wanted = {
        key: torch.zeros_like(value) for key, value in named.items() if value.ndim and dtype_name(value.dtype) in known
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(wanted, storage_reader=HuggingFaceStorageReader(path), no_dist=True)
    assert [key for key in wanted if not torch.equal(raw(wanted[key]), raw(named[key]))] == []
    seen: dict[str, int] = {}
    for name in LocalStorage(path).names():
        if not name.endswith(".safetensors"):
            continue
        with safe_open(f"{path}/{name}", "pt") as file:
            sharding = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for key in filter(named.__contains__, file.keys()):
                if DTYPES[key.split("/")[2]].safetensors is None:
                    continue  # stored as bytes
                tensor, offsets = file.get_tensor(key), sharding[key]["saved_offsets"]
                part = named[key]
                for dim, offset in enumerate(offsets):
                    part = part.narrow(dim, offset, tensor.shape[dim])
                assert torch.equal(raw(tensor), raw(part)), key
                seen[key] = seen.get(key, 0) + tensor.numel()
    assert seen == {k: v.numel() for k, v in named.items() if DTYPES[dtype_name(v.dtype)].safetensors is not None}
