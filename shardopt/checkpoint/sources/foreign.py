"""Opens checkpoints of other formats: torch.distributed.checkpoint, Hugging Face, torch.save."""

from __future__ import annotations

from collections.abc import Sequence

from shardopt.checkpoint.format.constants import DATA_SUFFIX, DCP_METADATA_NAME, FILE_NAME
from shardopt.checkpoint.sources.dcp import DcpSource
from shardopt.checkpoint.sources.hugging_face import HuggingFaceSource, safetensors_files
from shardopt.checkpoint.sources.quantized import with_weights
from shardopt.checkpoint.sources.source import Source
from shardopt.checkpoint.sources.torch_files import TorchSource, is_torch_file, torch_files
from shardopt.checkpoint.storage import Storage


def in_directory(storage: Storage, names: Sequence[str]) -> Source | None:
    """Opens the checkpoint in a directory with these file names; None if it is none."""
    if DCP_METADATA_NAME in names:
        return DcpSource(storage)
    tensors = safetensors_files(storage, names)
    if tensors is not None:
        return with_weights(HuggingFaceSource(storage, tensors))
    files = torch_files(storage, names)
    return None if files is None else TorchSource(storage, files)


def in_file(directory: Storage, name: str, url: str) -> Source | None:
    """Opens a checkpoint that is one file, by its name in a directory; None if it is none."""
    if name.endswith(DATA_SUFFIX) and not FILE_NAME.fullmatch(name):
        return with_weights(HuggingFaceSource(directory, {name: None}, url))
    if is_torch_file(directory, name):
        return TorchSource(directory, [name], url)
    return None
