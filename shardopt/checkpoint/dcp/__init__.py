"""torch.distributed.checkpoint on this library's format: for programs that change one line."""

from shardopt.checkpoint.dcp.reader import StorageReader
from shardopt.checkpoint.dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
