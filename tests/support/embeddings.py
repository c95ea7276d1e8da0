"""Tables, batches and steps for the tests of sharded embeddings, and the same in one process with torch's own."""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from shardopt.nn import ShardedEmbeddingBag, Table
from shardopt.sharding.view import view_of
from tests.support.placement import at

# More rows than ranks; fewer; evenly and unevenly cut; of different widths.
TABLES = (
    Table("sums", 41, 8, mode="sum"),
    Table("means", 7, 3),
    Table("short", 2, 5, mode="sum"),
    Table("none", 12, 4, mode="none"),
    Table("padded", 9, 2, padding_idx=4),
)
STEPS = 5  # in which every kind of batch comes

# torch's own optimizers make sparse tensors without saying whether they are to be checked, and warn of it.
unchecked = partial(torch.sparse.check_sparse_tensor_invariants, enable=False)


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def whole(table):
    """The same first rows in every process."""
    generator = torch.Generator().manual_seed(len(table.name))
    return torch.randn(table.num_embeddings, table.embedding_dim, generator=generator, dtype=table.dtype)


def sharded(tables=TABLES, on=None, **options):
    module = ShardedEmbeddingBag(tables, mesh() if on is None else on, **options)
    with torch.no_grad():
        for table in tables:
            for piece in view_of(getattr(module, table.name).weight).pieces:
                piece.tensor.copy_(whole(table)[at(piece.box)])
    return module


def in_one_process(tables=TABLES):
    return nn.ModuleDict({table.name: nn.Embedding.from_pretrained(whole(table), freeze=False) for table in tables})


def batch(table, step, rank, ranks):
    """Draws the lookups of a rank in a step: bags of 0 to 5 ids with repeats, later of up to 20; at times nothing, or
    all ranks one id, or one rank all of the ids. Weights get gradients in every other step."""
    draw = torch.Generator().manual_seed(1000 * step + 10 * rank + len(table.name))
    idle = (step + rank) % 4 == 3 or (step == 1 and rank != 0)
    bags = 0 if idle else int(torch.randint(1, 6, (), generator=draw))
    lengths = torch.randint(0, 21 if step >= 3 else 6, (bags,), generator=draw)
    largest = 1 if step == 2 else table.num_embeddings
    ids = torch.randint(0, largest, (int(lengths.sum()),), generator=draw)
    offsets = lengths.cumsum(0) - lengths
    if table.mode == "none":
        return (ids,)
    weights = torch.rand(len(ids), generator=draw, dtype=table.dtype) if table.mode == "sum" else None
    return ids, offsets, None if weights is None else weights.requires_grad_(step % 2 == 0)


def torchs(table, weight, ids, offsets=None, weights=None):
    """Looks a batch up with torch's own functions, with sparse gradients."""
    if offsets is None:
        return functional.embedding(ids, weight, sparse=True)
    options = {"mode": table.mode, "per_sample_weights": weights, "padding_idx": table.padding_idx, "sparse": True}
    return functional.embedding_bag(ids, weight, offsets, **options)


def loss_of(vectors):
    """Not linear, so that gradients differ from row to row."""
    return (vectors.sin() * torch.arange(1, 1 + vectors.shape[-1])).sum()
