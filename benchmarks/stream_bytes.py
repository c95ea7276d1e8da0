"""Bytes of a published step: a transformer with bf16 weights, trained by AdamW at several learning rates.

python -m benchmarks.stream_bytes [--width 256] [--layers 6] [--folder /tmp]

The same weights are saved whole, and as changed rows, as an incremental save without deltas would.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import shardopt
from benchmarks.peers import write_table
from shardopt import checkpoint
from shardopt.checkpoint.saving.writing import unchanged

VOCABULARY, TOKENS = 8_000, 64
RATES = (1e-7, 1e-6, 3e-6, 1e-5, 1e-4)
STEPS = 4  # of which the last is counted: moments are there by then
_WORD_AND_SKIP = 3.6


class Transformer(nn.Module):
    """A causal language model."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=self.head.weight.dtype)
        logits: Tensor = self.head(self.body(self.embedding(tokens), mask, is_causal=True))
        return logits


def train(model: nn.Module, optimizer: Any) -> None:
    """Takes a step on random tokens."""
    tokens = torch.randint(0, VOCABULARY, (2, TOKENS))
    logits = model(tokens)[:, :-1].flatten(0, 1).float()
    loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]  # torch's
    optimizer.step()
    optimizer.zero_grad()


def measure(rate: float, width: int, layers: int, folder: Path) -> list[str]:
    """A row of the table."""
    torch.manual_seed(0)
    model = Transformer(width, layers).bfloat16()
    optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=rate, weight_decay=0.0)
    with checkpoint.Publisher(folder / "stream", durable=False) as publisher:
        for step in range(1, STEPS + 1):
            train(model, optimizer)
            before = [each.detach().view(torch.int16).clone() for each in model.parameters()]
            if step == STEPS:
                break
            publisher.publish(step, model).result()
            whole = folder / f"whole-{step}"
            checkpoint.save(whole, dict(model.state_dict()), durable=False)
        last = [each for each in (folder / "stream").iterdir() if each.name == f"step-{STEPS - 1:08d}"]
        with checkpoint.open(last[0]) as reader:
            stored = [reader.read(name).view(torch.int16) for name, _ in model.named_parameters()]
        changed = sum(int((old != new).sum()) for old, new in zip(stored, before, strict=True))
        written = publisher.publish(STEPS, model).result().bytes_total
    full = checkpoint.save(folder / "full", dict(model.state_dict()), durable=False).bytes_total
    with mock.patch.object(unchanged, "delta_of", lambda *_, **__: None):
        rows = checkpoint.save(
            folder / "rows", dict(model.state_dict()), base=folder / f"whole-{STEPS - 1}", durable=False
        ).bytes_total
    elements = sum(each.numel() for each in model.parameters())
    return [
        f"{rate:g}",
        f"{100 * changed / elements:.2f}%",
        f"{full / 1e6:.2f}",
        f"{rows / 1e6:.2f}",
        f"{written / 1e6:.2f}",
        f"{written / (changed * _WORD_AND_SKIP):.2f}" if changed else "",
        f"{full / written:.0f}",
    ]


HEADER = (
    "learning rate",
    "elements changed in a step",
    "MB, full save",
    "MB, changed rows",
    "MB, published",
    "published, of 3.6 bytes a changed element",
    "full save / published",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    given = parser.parse_args()
    rows = []
    for rate in RATES:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            rows.append(measure(rate, given.width, given.layers, Path(folder)))
            print("| " + " | ".join(rows[-1]) + " |", flush=True)
    notes = (
        f"A transformer of width {given.width} with {given.layers} layers and {VOCABULARY:,} tokens, bf16 weights, "
        "AdamW without weight decay. All files of the step count, with headers, checksums and small tensors."
    )
    print(write_table("stream_bytes", "Bytes of a published step", HEADER, rows, notes))


if __name__ == "__main__":
    main()
