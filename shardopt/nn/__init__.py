"""Modules over sharded state: embedding tables whose rows lie on many ranks."""

from shardopt.nn.embedding import ShardedEmbedding, ShardedEmbeddingBag
from shardopt.nn.table import Table

__all__ = ["ShardedEmbedding", "ShardedEmbeddingBag", "Table"]
