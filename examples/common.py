"""Shared by the training programs: the text they train on, rates, the log of losses."""

import json
import math
from pathlib import Path
from pydoc_data.topics import topics

import fsspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset


def read_text(url: str) -> bytes:
    """Returns what lies at any URL that fsspec opens; for an empty one the text that CPython ships."""
    if not url:
        return "\n".join(topics[name] for name in sorted(topics)).encode()
    with fsspec.open(url, "rb") as file:
        return file.read()


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Every window of a text: `context` bytes, and the byte that follows each of them, as int64."""

    def __init__(self, corpus: str, context: int) -> None:
        self.text = torch.frombuffer(bytearray(read_text(corpus)), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return len(self.text) - self.context

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


def learning_rate_factor(step: int, steps: int, warmup_steps: int) -> float:
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup_steps) / (steps - warmup_steps)))


def log_loss(out: Path, step: int, share: Tensor) -> float:
    """Adds a step to `loss.jsonl`, on rank 0, and returns its loss. Collective.

    Args:
        share: the rank's addend of the loss, a double on its device; replaced by the sum over ranks.
    """
    dist.all_reduce(share)
    if dist.get_rank() == 0:
        with open(out / "loss.jsonl", "a") as log:
            log.write(json.dumps({"step": step, "loss": share.item(), "ranks": dist.get_world_size()}) + "\n")
    return share.item()
