"""Checkpoints of sharded state: saved by all ranks, committed by one manifest, loaded in place onto any layout."""

from shardopt.checkpoint.convert.convert import ConvertReport as ConvertReport
from shardopt.checkpoint.convert.convert import convert as convert
from shardopt.checkpoint.convert.peft import export_peft as export_peft
from shardopt.checkpoint.convert.peft import peft_rename as peft_rename
from shardopt.checkpoint.convert.reshard import reshard as reshard
from shardopt.checkpoint.convert.verify import VerifyReport as VerifyReport
from shardopt.checkpoint.convert.verify import verify as verify
from shardopt.checkpoint.loading.load import load as load
from shardopt.checkpoint.loading.strictness import Strictness as Strictness
from shardopt.checkpoint.progress import progress_bar as progress_bar
from shardopt.checkpoint.reports import LoadReport as LoadReport
from shardopt.checkpoint.reports import SaveReport as SaveReport
from shardopt.checkpoint.reports import add_listener as add_listener
from shardopt.checkpoint.reports import report_metrics as report_metrics
from shardopt.checkpoint.run.destinations import Mirror as Mirror
from shardopt.checkpoint.run.destinations import Tier as Tier
from shardopt.checkpoint.run.export import Export as Export
from shardopt.checkpoint.run.manager import Manager as Manager
from shardopt.checkpoint.run.mirror import MirrorCopier as MirrorCopier
from shardopt.checkpoint.run.mirror import UploadReport as UploadReport
from shardopt.checkpoint.run.options import Preemption as Preemption
from shardopt.checkpoint.run.retention import Retention as Retention
from shardopt.checkpoint.saving.async_save import async_save as async_save
from shardopt.checkpoint.saving.save import SaveOptions as SaveOptions
from shardopt.checkpoint.saving.save import save as save
from shardopt.checkpoint.saving.writing.pending import PendingSave as PendingSave
from shardopt.checkpoint.sources.open import open as open
from shardopt.checkpoint.sources.reader import CheckpointReader as CheckpointReader
from shardopt.checkpoint.sources.reader import TensorInfo as TensorInfo
from shardopt.runtime.exports import offer as _offer
from shardopt.sharding.box import Box as Box
from shardopt.state.state import PerRank as PerRank

_offer(__name__)
