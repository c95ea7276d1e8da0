"""Checkpoints of sharded state: saved by all ranks, committed by one manifest, loaded in place onto any layout."""

from shardopt.checkpoint.async_save import async_save
from shardopt.checkpoint.convert.convert import ConvertReport, convert
from shardopt.checkpoint.load import load
from shardopt.checkpoint.matching.strictness import Strictness
from shardopt.checkpoint.peft import export_peft
from shardopt.checkpoint.progress import progress_bar
from shardopt.checkpoint.reports import LoadReport, SaveReport, add_listener, figures
from shardopt.checkpoint.reshard import reshard
from shardopt.checkpoint.run.export import Export
from shardopt.checkpoint.run.manager import Manager
from shardopt.checkpoint.run.mirror import Mirror, UploadReport
from shardopt.checkpoint.run.preemption import Preemption
from shardopt.checkpoint.run.retention import Retention
from shardopt.checkpoint.run.tiers.tier import Tier
from shardopt.checkpoint.save import SaveOptions, save
from shardopt.checkpoint.sources.open import open_checkpoint as open
from shardopt.checkpoint.sources.reader import CheckpointReader, TensorInfo
from shardopt.checkpoint.verify import VerifyReport, verify
from shardopt.checkpoint.writing.pending import PendingSave
from shardopt.sharding.box import Box
from shardopt.state import PerRank

__all__ = [
    "Box",
    "CheckpointReader",
    "ConvertReport",
    "Export",
    "LoadReport",
    "Manager",
    "Mirror",
    "PendingSave",
    "PerRank",
    "Preemption",
    "Retention",
    "SaveOptions",
    "SaveReport",
    "Strictness",
    "TensorInfo",
    "Tier",
    "UploadReport",
    "VerifyReport",
    "add_listener",
    "async_save",
    "convert",
    "export_peft",
    "figures",
    "load",
    "open",
    "progress_bar",
    "reshard",
    "save",
    "verify",
]
