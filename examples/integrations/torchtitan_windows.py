"""A run of torchtitan with shardopt's checkpoints and optimizers, whose data goes on on any number of data ranks.

    torchrun --nproc-per-node 2 -m torchtitan.train --module integrations.torchtitan_windows --config small

with this file's folder above on PYTHONPATH (`export PYTHONPATH=examples`). Kill it, and run it again on other GPUs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, ParamGroupConfig
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TrainingConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from shardopt.integrations.torchdata import ResumableStatefulLoader
from shardopt.integrations.torchtitan import ShardoptCheckpoints, ShardoptOptimizers

ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


class Windows(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """The text that CPython ships, in windows of bytes side by side: inputs, and the bytes that follow, [length]."""

    def __init__(self, length: int) -> None:
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        self.text, self.length = torch.frombuffer(bytearray(text), dtype=torch.uint8), length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, number: int) -> tuple[dict[str, Tensor], Tensor]:
        window = self.text[number * self.length :][: self.length + 1].long()
        return {"input": window[:-1], "positions": torch.arange(self.length, dtype=torch.int32)}, window[1:]


class WindowLoader(ResumableStatefulLoader, BaseDataLoader):
    """Windows of text without end, dealt to the data ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        seed: int = 0

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        size = local_batch_size * dp_world_size
        super().__init__(Windows(seq_len), batch_size=size, seed=config.seed, rank=dp_rank, ranks=dp_world_size)

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from super().__iter__()


class Bytes(BaseTokenizer):
    """A byte is a token."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, text: str, **_: Any) -> list[int]:
        return [*text.encode()]

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 256


def small() -> Trainer.Config:
    """A small Llama, each step of which is on 12 windows whatever the number of ranks."""
    model = model_registry("debugmodel")
    del model.model.layers[4:]
    norms = ParamGroupConfig(pattern=r"norm", optimizer_name="AdamW", optimizer_kwargs=ADAMW | {"weight_decay": 0.0})
    rest = ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs=ADAMW)
    return Trainer.Config(
        model_spec=model,
        loss=CrossEntropyLoss.Config(),
        tokenizer=Bytes.Config(),
        dataloader=WindowLoader.Config(),
        optimizer=ShardoptOptimizers.Config(param_groups=[norms, rest]),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=20),
        training=TrainingConfig(
            local_batch_size=2, global_batch_size=12, seq_len=32, steps=12, disable_cuda_graphs=True
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=ShardoptCheckpoints.Config(enable=True, interval=4),
    )
