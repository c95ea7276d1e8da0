"""Checkpoints of sharded state: saved by all ranks, committed by one manifest, loaded in place onto any layout."""

from shardopt.checkpoint.async_save import async_save
from shardopt.checkpoint.load import LoadReport, load
from shardopt.checkpoint.manager import Manager
from shardopt.checkpoint.mirror import Mirror, UploadReport
from shardopt.checkpoint.pending import PendingSave
from shardopt.checkpoint.progress import progress_bar
from shardopt.checkpoint.reader import CheckpointReader, TensorInfo
from shardopt.checkpoint.reader import open_checkpoint as open
from shardopt.checkpoint.reports import add_listener, figures
from shardopt.checkpoint.reshard import reshard
from shardopt.checkpoint.save import SaveReport, save
from shardopt.checkpoint.strictness import Strictness
from shardopt.checkpoint.verify import VerifyReport, verify
from shardopt.sharding.box import Box
from shardopt.state import PerRank

__all__ = [
    "Box",
    "CheckpointReader",
    "LoadReport",
    "Manager",
    "Mirror",
    "PendingSave",
    "PerRank",
    "SaveReport",
    "Strictness",
    "TensorInfo",
    "UploadReport",
    "VerifyReport",
    "add_listener",
    "async_save",
    "figures",
    "load",
    "open",
    "progress_bar",
    "reshard",
    "save",
    "verify",
]
