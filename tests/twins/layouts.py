"""Where parameters lie, in jobs of one rank and of three."""

from torch.distributed.tensor import Replicate, Shard

# For each number of ranks some layouts, each as `tests.sub_meshes` has them; what is not named is whole on every rank.
LAYOUTS = {
    1: [
        {"expert": ([0], Shard(0)), "sub": ([0], Replicate()), "table": [(3, 0), (4, 0)], "later": ([0], Shard(1))},
        {"expert": [(4, 0)], "uneven": ([0], Shard(1)), "unused": ([0], Shard(0)), "last": [(1, 0), (1, 0)]},
    ],
    3: [
        {
            "expert": ([2], Shard(0)),
            "sub": ([0, 1], Shard(0)),
            "table": [(3, 0), (0, 1), (4, 2)],
            "uneven": ([0, 1, 2], Shard(0)),
            "unused": ([1, 2], Shard(0)),
            "later": ([0], Replicate()),
            "last": ([1, 2], Replicate()),
        },
        {
            "expert": ([0, 1], Shard(1)),
            "sub": ([1], Replicate()),
            "table": [(7, 1)],
            "uneven": [(2, 0)],
            "unused": ([0], Shard(0)),
            "later": [(1, 2), (2, 1)],
            "last": ([0, 1, 2], Shard(0)),
        },
        {
            "expert": ([0, 1, 2], Shard(0)),
            "sub": [(2, 2), (1, 0), (2, 1)],
            "table": ([1, 2], Shard(0)),
            "uneven": ([0, 2], Shard(1)),
            "unused": ([0, 1], Replicate()),
        },
    ],
}  # fmt: skip
