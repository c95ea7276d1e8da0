"""The public names of `shardopt.nn`."""

from shardopt.nn.embedding import ShardedEmbedding as ShardedEmbedding
from shardopt.nn.embedding import ShardedEmbeddingBag as ShardedEmbeddingBag
from shardopt.nn.plan.tables import TablePlan as TablePlan
from shardopt.nn.plan.tables import plan_tables as plan_tables
from shardopt.nn.table import Grid as Grid
from shardopt.nn.table import Table as Table
