"""A sample of what a rank writes: as many small tensors a byte as it has, and as many large ones, each cut shorter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardopt.checkpoint.format.assign import Member
from shardopt.checkpoint.format.constants import Dtype, file_name
from shardopt.checkpoint.format.tensor_bytes import torch_dtype
from shardopt.checkpoint.saving.commit import make_manifest
from shardopt.checkpoint.saving.planning.describe import Geometry
from shardopt.checkpoint.saving.planning.save_plan import RankWrites, SavePlan
from shardopt.checkpoint.sources.own import OwnSource
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.storage import Storage
from shardopt.sharding.box import whole
from shardopt.sharding.layout import Layout
from shardopt.sharding.pieces import Piece

_LARGE_BYTES = 1 << 20  # from here on a tensor's bytes take longer than all else that is done for it
_ALIGNMENT_BYTES = 64  # of tensors in the memory of a sample, so that each may be of its dtype

Sizes = Sequence[tuple[Dtype, int]]
"""Dtype and number of elements of each box that a rank writes."""


def sizes_of(writes: RankWrites) -> Sizes:
    """Returns the sizes of all boxes that a rank writes."""
    return [(each.dtype, each.box.numel) for slot in writes.slots.values() for each in slot]


def nbytes_of(sizes: Sizes) -> int:
    """Returns the bytes of all boxes."""
    return sum(dtype.itemsize * numel for dtype, numel in sizes)


def part_of(sizes: Sizes, fraction: float) -> Sizes:
    """Returns about this fraction of the boxes' bytes: some small ones, and parts of large ones."""
    if fraction >= 1:
        return sizes
    small = sorted((each for each in sizes if nbytes_of([each]) < _LARGE_BYTES), key=lambda each: nbytes_of([each]))
    large = [each for each in sizes if nbytes_of([each]) >= _LARGE_BYTES]
    count = round(len(small) * fraction)
    chosen = [small[int(number * len(small) / count)] for number in range(count)]
    return [*chosen, *((dtype, max(round(numel * fraction), 1)) for dtype, numel in large)]


@dataclass(frozen=True, slots=True)
class Sample:
    """A data file like those of a save, with its contents, and memory to read it into.

    Args:
        name: of the file.
        tensors: by key, the source of each box.
    """

    save_id: str
    plan: SavePlan
    writes: RankWrites
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, sizes: Sizes, save_id: str, noise: Tensor) -> Sample:
        """Makes a sample of boxes.

        Args:
            noise: uint8, `room_for(sizes)` of it; the boxes lie in it one after the other.
        """
        members, tensors, begin = {}, {}, 0
        for number, (dtype, numel) in enumerate(sizes):
            key, nbytes = f"sample.{number}", dtype.itemsize * numel
            tensors[key] = noise[begin : begin + nbytes].view(torch_dtype(dtype))
            begin += _padded(nbytes)
            members[key] = Member((key,), dtype, Layout.replicated((numel,)), (0,))
        plan = SavePlan(Geometry(members, {}), 1)
        return cls(save_id, plan, RankWrites(plan, 0), tensors)

    @property
    def name(self) -> str:
        """The name of its data file."""
        return file_name(self.save_id, 0, 0)

    def reader(self, storage: Storage, nbytes: int, digest: str) -> CheckpointReader:
        """Opens the file, of which no manifest is ever stored. Raises CorruptionError when it reads other bytes."""
        _, data = make_manifest(self.save_id, self.plan, {}, [[[self.name, nbytes, digest]]])
        return CheckpointReader(OwnSource(storage, data))

    def pieces(self, targets: Tensor) -> list[tuple[str, list[Piece]]]:
        """Returns where to read the boxes to, one after the other in `targets` (uint8) as they lie in the noise."""
        wanted: list[tuple[str, list[Piece]]] = []
        for key, tensor in self.tensors.items():
            begin: Any = tensor.storage_offset() * tensor.element_size()
            target = targets[begin : begin + tensor.nbytes].view(tensor.dtype)
            wanted.append((key, [Piece(whole(tuple(tensor.shape)), target)]))
        return wanted


def room_for(sizes: Sizes) -> int:
    """Returns how much memory a sample needs, in bytes."""
    return sum(_padded(dtype.itemsize * numel) for dtype, numel in sizes)


def noise_of(nbytes: int, device: torch.device) -> Tensor:
    """Returns memory that no file system makes smaller."""
    own = torch.Generator()  # the run's random numbers stay as they are
    own.seed()  # by the system: other bytes on each rank
    return torch.randint(256, (nbytes,), dtype=torch.uint8, device="cpu", generator=own).to(device)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
