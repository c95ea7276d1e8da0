"""torch.distributed.checkpoint on shardopt's format, for programs that change one line."""

from shardopt.checkpoint.dcp.reader import StorageReader as StorageReader
from shardopt.checkpoint.dcp.writer import StorageWriter as StorageWriter
from shardopt.runtime.exports import offer as _offer

_offer(__name__)
