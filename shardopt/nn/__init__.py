"""Modules over sharded state: embedding tables on many ranks."""

from shardopt.nn.embedding import ShardedEmbedding as ShardedEmbedding
from shardopt.nn.embedding import ShardedEmbeddingBag as ShardedEmbeddingBag
from shardopt.nn.table import Grid as Grid
from shardopt.nn.table import Table as Table
from shardopt.runtime.exports import offer as _offer

_offer(__name__)
