"""Checks that all ranks that hold a box hold the same bytes; replicas that have drifted are named, not saved.

Hashes are compared. By default they are of at most 64 KiB of each tensor: of all of it up to that size, and of
64 blocks of 1 KiB beyond, the first and the last among them and the others at equal distances (the n-th begins at
element n · ⌊(elements - elements of a block) / 63⌋). Their places follow from the size alone, so that all ranks hash
the same elements in every save.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
import xxhash
from torch import Tensor

from shardopt.checkpoint.format.assign import Member
from shardopt.checkpoint.format.tensor_bytes import bytes_of, flat_bytes, is_plain_memory
from shardopt.sharding.box import Box, cut_in_order, whole
from shardopt.sharding.layout import Layout
from shardopt.sharding.pieces import View, narrowed

CheckReplicas = Literal["sampled", "all", "none"]

SAMPLED_BYTES = 64 << 10  # of a tensor are hashed; all of a smaller one
_BLOCK_BYTES = 1 << 10
_BLOCKS = SAMPLED_BYTES // _BLOCK_BYTES
_COPIED_BYTES = 64 << 20  # are copied from a device together, which bounds the memory that it takes there
_BUFFERS = "buffers "  # begins the names of their groups
_PIECE_BYTES = 2 << 20  # of a tensor that has to be made contiguous first

Contents = Mapping[str, Mapping[str, str]]
"""Key → box → hash of the bytes, for boxes that this rank shares with others."""


def refuse_unknown_choice(which: str) -> None:
    """Raises ValueError for an invalid value of `check_replicas`."""
    choices = get_args(CheckReplicas)
    if which not in choices:
        raise ValueError(f"check_replicas: found {which!r}; required one of {choices}; pass one of them")


def contents_of(views: Mapping[str, View], which: CheckReplicas) -> dict[str, dict[str, str]]:
    """Hashes this rank's replicas: "all" bytes, or a "sampled" part.

    Bytes on an accelerator are copied to the host in one piece (of at most 64 MiB, else in several).
    """
    if which == "none":
        return {}
    places: list[tuple[str, str]] = []
    tensors: list[Tensor] = []
    for key, view in views.items():
        for piece in view.pieces:
            if is_shared(view.layout, piece.box):
                places.append((key, str(piece.box)))
                tensors.append(piece.tensor)
    contents: dict[str, dict[str, str]] = {}
    for (key, box), digest in zip(places, _hashes(tensors, which), strict=True):
        contents.setdefault(key, {})[box] = digest
    return contents


def summary_of(
    contents: Contents,
    views: Mapping[str, View],
    members: Mapping[str, Member],
    buffers: Collection[str] = frozenset(),
) -> dict[str, str]:
    """Returns one hash for all replicas that the same ranks hold, by a hash of their keys, boxes and ranks.

    Args:
        members: of the job, where they are known; they say which ranks have a key, and which hold a box, which is
            otherwise taken from this rank's views. Only summaries that were made with the same members compare.
        buffers: keys of which each rank may have other values, where no member says so: groups of their own.
    """
    return {
        where: xxhash.xxh3_64_hexdigest("".join(digest for _, _, digest in group).encode())
        for where, group in groups_of(contents, views, members, buffers).items()
    }


def groups_of(
    contents: Contents,
    views: Mapping[str, View],
    members: Mapping[str, Member],
    buffers: Collection[str] = frozenset(),
) -> dict[str, list[tuple[str, str, str]]]:
    """Groups key, box and hash of replicas by a hash of their holders, keys and boxes; sorted.

    Args:
        contents, views, members, buffers: as for `summary_of`.
    """
    groups: defaultdict[Any, list[tuple[str, str, str]]] = defaultdict(list)
    everywhere: dict[int, str] = {}  # by identity: thousands of tensors share one tuple of thousands of ranks
    for key, boxes in contents.items():
        member = members.get(key)
        is_buffer = key in buffers if member is None else member.is_buffer
        layout = views[key].layout if member is None else member.layout
        if layout.holders is None and member is not None:
            holders: Any = everywhere.get(id(member.ranks)) or everywhere.setdefault(
                id(member.ranks), str(member.ranks)
            )
            for box, digest in boxes.items():
                groups[is_buffer, holders].append((key, box, digest))
            continue
        for box, digest in boxes.items():
            groups[is_buffer, _shared_by_name(layout).get(box)].append((key, box, digest))
    by_name = {}
    for (is_buffer, holders), group in groups.items():
        group.sort()
        where = "\0".join([str(holders), *(f"{key}\0{box}" for key, box, _ in group)])
        by_name[is_buffer * _BUFFERS + xxhash.xxh3_64_hexdigest(where.encode())] = group
    return by_name


def drifted_in(summaries: Iterable[Mapping[str, str]]) -> list[str]:
    """Returns the groups of replicas, by the keys of summaries, whose hashes differ between ranks."""
    first: dict[str, str] = {}
    drifted = (
        where for each in summaries for where, digest in each.items() if first.setdefault(where, digest) != digest
    )
    return list(dict.fromkeys(drifted))


def are_buffers(group: str) -> bool:
    """Whether a group of replicas, by its name, consists of buffers, which may differ between ranks."""
    return group.startswith(_BUFFERS)


def is_shared(layout: Layout, box: Box) -> bool:
    """Whether other ranks hold a box too, according to the layout."""
    return layout.holders is None or layout.local or box in layout.shared


def sampled_pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the "sampled" parts of a tensor, at most 64 KiB, as flat byte tensors on its device."""
    for piece in _sampled_pieces(_as_integers(tensor)):
        yield flat_bytes(piece)


def sampled_copies(samples: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the places and the `sampled_pieces` of tensors, each given with the memory for all of its pieces."""
    for memory, tensor in samples:
        begin = 0
        for piece in sampled_pieces(tensor):
            yield memory[begin : begin + len(piece)], piece
            begin += len(piece)


def hash_of(sample: Tensor) -> str:
    """Returns the hash of the parts that `sampled_pieces` yielded, concatenated in host memory."""
    return xxhash.xxh3_64_hexdigest(bytes_of(sample))


@lru_cache(maxsize=4096)
def _shared_by_name(layout: Layout) -> Mapping[str, tuple[int, ...]]:
    return {str(box): holders for box, holders in layout.shared.items()}


def _hashes(tensors: Sequence[Tensor], which: CheckReplicas) -> list[str]:
    """Returns the hash of each tensor's bytes in C order, on any device."""
    digests = [""] * len(tensors)
    elsewhere: defaultdict[torch.device, list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        if not is_plain_memory(tensor):
            elsewhere[tensor.device].append(i)
        elif which == "all" or tensor.nbytes <= SAMPLED_BYTES:
            digests[i] = xxhash.xxh3_64_hexdigest(bytes_of(tensor))
        else:
            memory, running = bytes_of(tensor), xxhash.xxh3_64()
            for begin in _block_starts(tensor.numel(), tensor.element_size()):
                running.update(memory[begin * tensor.element_size() :][:_BLOCK_BYTES])
            digests[i] = running.hexdigest()
    pieces_of = _all_pieces if which == "all" else _sampled_pieces
    for numbers in elsewhere.values():
        for i, digest in _hashes_from_device(tensors, numbers, pieces_of):
            digests[i] = digest
    return digests


def _hashes_from_device(
    tensors: Sequence[Tensor], numbers: Sequence[int], pieces_of: Callable[[Tensor], Iterator[Tensor]]
) -> Iterator[tuple[int, str]]:
    """Yields index and hash of the tensors, all on one device; copies their bytes in few batches."""
    running = {i: xxhash.xxh3_64() for i in numbers}
    with torch.no_grad():
        for batch in _batches((i, piece) for i in numbers for piece in pieces_of(_as_integers(tensors[i]))):
            flat = [flat_bytes(piece) for _, piece in batch]
            together = bytes_of(torch.cat(flat).cpu())
            for (i, _), piece in zip(batch, flat, strict=True):
                running[i].update(together[: piece.numel()])
                together = together[piece.numel() :]
    yield from ((i, each.hexdigest()) for i, each in running.items())


def _batches(pieces: Iterable[tuple[int, Tensor]]) -> Iterator[list[tuple[int, Tensor]]]:
    batch: list[tuple[int, Tensor]] = []
    nbytes = 0
    for number, piece in pieces:
        if batch and nbytes + piece.nbytes > _COPIED_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append((number, piece))
        nbytes += piece.nbytes
    if batch:
        yield batch


def _as_integers(tensor: Tensor) -> Tensor:
    """Returns the same memory as integers, which torch can gather and concatenate everywhere, unlike some floats."""
    return tensor.detach().view(_OF_SIZE[tensor.element_size()])


_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _all_pieces(tensor: Tensor) -> Iterator[Tensor]:
    for box in cut_in_order(whole(tensor.shape), _PIECE_BYTES // tensor.element_size()):
        yield narrowed(tensor, box).contiguous()


def _sampled_pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yields all of a small tensor, or some blocks of a large one."""
    numel, itemsize = tensor.numel(), tensor.element_size()
    block = _BLOCK_BYTES // itemsize
    if tensor.nbytes <= SAMPLED_BYTES:
        yield tensor.contiguous()
    elif tensor.is_contiguous():
        flat = tensor.reshape(-1)
        yield flat.as_strided((_BLOCKS - 1, block), (_distance(numel, itemsize), 1)).contiguous()
        yield flat[numel - block :]
    else:
        starts = torch.arange(_BLOCKS, device=tensor.device) * _distance(numel, itemsize)
        starts[-1] = numel - block
        index = (starts[:, None] + torch.arange(block, device=tensor.device)).flatten()
        places = []
        for size in reversed(tensor.shape):  # `unravel_index` sends the sizes, and waits for the device
            places.append(index % size)
            index = index // size
        yield tensor[tuple(reversed(places))]


@lru_cache(maxsize=1024)
def _block_starts(numel: int, itemsize: int) -> tuple[int, ...]:
    """Returns the first element of each block of a tensor that is larger than all blocks together."""
    distance = _distance(numel, itemsize)
    return *range(0, distance * (_BLOCKS - 1), distance), numel - _BLOCK_BYTES // itemsize


def _distance(numel: int, itemsize: int) -> int:
    """Returns the distance in elements between the starts of blocks; the last one may be slightly larger."""
    return (numel - _BLOCK_BYTES // itemsize) // (_BLOCKS - 1)
