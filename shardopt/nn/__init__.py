"""Modules over sharded state: embedding tables whose rows lie on many ranks."""

from shardopt.exports import offer as _offer
from shardopt.nn.embedding import ShardedEmbedding as ShardedEmbedding
from shardopt.nn.embedding import ShardedEmbeddingBag as ShardedEmbeddingBag
from shardopt.nn.table import Table as Table

_offer(__name__)
