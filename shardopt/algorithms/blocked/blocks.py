"""The blocks that a parameter is cut into, where their state is, and which rank computes on each. Integers only.

A parameter of D dimensions is cut into a grid of blocks of at most `size` elements along each dimension, by its global
shape alone. State of two kinds is kept for them, in tensors whose global shapes follow from that of the parameter:

    like the parameter      a block is where it is in the parameter
    factors of dimension i  [N_i, n, min(size, N_i)] for a parameter of N_i elements along i, whose grid has n blocks in
                            all other dimensions together: the symmetric matrices [m, m] of the blocks, those along i
                            one behind the other. Of a smaller block at the end, the last columns are padding of zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import ceil, prod

from shardopt.sharding.box import Box


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a parameter.

    Args:
        box: in the parameter.
        factors: for each dimension, the box of its matrix in the factors of that dimension.
    """

    box: Box
    factors: tuple[Box, ...]


@lru_cache(maxsize=4096)
def blocks_of(shape: tuple[int, ...], size: int | None) -> tuple[Block, ...]:
    """Cuts a parameter into blocks, in ascending order; a parameter without elements has none.

    Args:
        shape: of the parameter.
        size: the most elements along any dimension; None for one block.
    """
    if prod(shape) == 0:
        return ()
    steps = [min(size or extent, extent) for extent in shape]
    counts = [ceil(extent / step) for extent, step in zip(shape, steps, strict=True)]
    blocks = []
    for index in product(*map(range, counts)):
        offsets = tuple(i * step for i, step in zip(index, steps, strict=True))
        sizes = tuple(min(step, extent - at) for at, step, extent in zip(offsets, steps, shape, strict=True))
        factors = []
        for dim in range(len(shape)):
            place = 0
            for other, (i, count) in enumerate(zip(index, counts, strict=True)):
                place = place if other == dim else place * count + i
            factors.append(Box((offsets[dim], place, 0), (sizes[dim], 1, steps[dim])))
        blocks.append(Block(Box(offsets, sizes), tuple(factors)))
    return tuple(blocks)


def factor_shape(shape: tuple[int, ...], size: int | None, dim: int) -> tuple[int, int, int]:
    """Returns the global shape of a parameter's factors of one dimension."""
    others = prod(ceil(extent / min(size or extent, extent)) for i, extent in enumerate(shape) if i != dim)
    return shape[dim], others, min(size or shape[dim], shape[dim])


def cost_of(sizes: Sequence[int], dims: Collection[int], refresh_every: int) -> int:
    """Estimates the operations of a step on a block: products with its factors, and its share of the decompositions.

    Args:
        sizes: of the block.
        dims: those with factors.
        refresh_every: so many steps factors are decomposed again.
    """
    elements = prod(sizes)
    # Three products of all elements with a matrix of each dimension, and about 25 m³ for its eigenvectors.
    return elements + sum(6 * elements * sizes[dim] + 25 * sizes[dim] ** 3 // max(refresh_every, 1) for dim in dims)


def assign(
    costs: Mapping[str, Sequence[int]], holders: Mapping[str, Sequence[int]], loads: MutableMapping[int, int]
) -> dict[str, tuple[int, ...]]:
    """Gives each block an owner among its parameter's ranks: the costliest block first, each to the least loaded rank.

    Args:
        costs: name of parameter → cost of each of its blocks.
        holders: name of parameter → ranks that have elements of it.
        loads: rank → cost of what it owns already; added to.

    Returns:
        Name of parameter → the owner of each block. The same on every rank that passes the same.
    """
    owners = {name: [-1] * len(of_blocks) for name, of_blocks in costs.items()}
    blocks = [(cost, name, number) for name, of_blocks in costs.items() for number, cost in enumerate(of_blocks)]
    for cost, name, number in sorted(blocks, key=lambda each: (-each[0], each[1], each[2])):
        owner = min(holders[name], key=lambda rank: (loads.get(rank, 0), rank))
        loads[owner] = loads.get(owner, 0) + cost
        owners[name][number] = owner
    return {name: tuple(of_blocks) for name, of_blocks in owners.items()}
