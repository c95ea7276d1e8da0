"""Trains vectors of words (skip-gram with negative sampling) in tables whose rows are cut over all ranks.

    torchrun --standalone --nproc-per-node 4 examples/train_embeddings.py configs/embeddings.toml
    torchrun --standalone --nproc-per-node 3 examples/train_embeddings.py configs/embeddings.toml --resume

A step touches few rows: ids travel to the ranks that have them, vectors travel back, and backward updates the rows
where they are. There is no gradient of a table, and one number of optimizer state for a row.
"""

import re
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from common import log_loss, read_text
from program import Table as Settings
from program import launch
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import logsigmoid, normalize

import shardopt
from shardopt import checkpoint
from shardopt.nn import ShardedEmbedding, Table

RARE = 1e-3  # words of a larger share of the text are thinned out, to the root of what they exceed it by


class DataConfig(Settings):
    corpus: str
    batch: PositiveInt
    window: PositiveInt
    negatives: PositiveInt
    min_count: PositiveInt


class ModelConfig(Settings):
    width: PositiveInt


class OptimizerConfig(Settings):
    lr: PositiveFloat


class Config(Settings):
    out: str
    seed: NonNegativeInt
    steps: PositiveInt
    save_every: PositiveInt
    show: list[str]
    data: DataConfig
    model: ModelConfig
    optimizer: OptimizerConfig


class Pairs:
    """All pairs of words of a text that stand at most `window` words apart, by number."""

    def __init__(self, corpus: str, window: int, min_count: int, seed: int) -> None:
        words = re.findall(r"[a-z_]+", read_text(corpus).decode(errors="replace").lower())
        counts = [(word, n) for word, n in Counter(words).most_common() if n >= min_count]
        self.words = [word for word, _ in counts]
        self.number = {word: number for number, word in enumerate(self.words)}
        self.window = window
        often = torch.tensor([n for _, n in counts], dtype=torch.float64)
        self.drawn = often**0.75  # how often a word is drawn as one that does not stand near
        text = torch.tensor([self.number[word] for word in words if word in self.number])
        share = (often / often.sum())[text]
        keep = torch.rand(len(text), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        self.text = text[keep < (RARE / share).sqrt()]

    def __len__(self) -> int:
        return (len(self.text) - 2 * self.window) * 2 * self.window

    def read(self, numbers: list[int]) -> tuple[Tensor, Tensor]:
        """Returns the words and those that stand near them, each [b], of the pairs with these numbers."""
        pairs = torch.tensor(numbers)
        at, distance = self.window + pairs // (2 * self.window), pairs % (2 * self.window) - self.window
        return self.text[at], self.text[at + distance + (distance >= 0)]

    def others(self, count: int, draw: torch.Generator) -> Tensor:
        """Draws so many words at random, the frequent ones more often."""
        return torch.multinomial(self.drawn, count, replacement=True, generator=draw)


def train(config: Config, device: torch.device, resume: bool) -> None:
    """Trains until `config.steps` steps are done. Every rank calls it, in an initialized process group."""
    rank, ranks, steps = dist.get_rank(), dist.get_world_size(), config.steps
    batch, negatives = config.data.batch, config.data.negatives
    pairs = Pairs(config.data.corpus, config.data.window, config.data.min_count, config.seed)
    # The order of pairs follows from the seed, and not from the number of ranks; what was seen of it is saved.
    data = shardopt.ResumableSampler(len(pairs), batch_size=batch, seed=config.seed)

    torch.manual_seed(config.seed)  # the same rows on any number of ranks
    rows, width = len(pairs.words), config.model.width
    tables = ShardedEmbedding(
        [
            Table("word", rows, width, init=lambda block: block.uniform_(-0.5 / width, 0.5 / width)),
            Table("near", rows, width, init=torch.Tensor.zero_),
        ],
        init_device_mesh(device.type, (ranks,)),
    )
    optimizer = tables.fuse(shardopt.optim.RowWiseAdagrad, lr=config.optimizer.lr)

    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    app = {"tables": tables, "optimizer": optimizer, "data": data, "step": 0}
    manager = checkpoint.Manager(out / "checkpoints", every=config.save_every)
    if resume:
        manager.restore(app)
    elif manager.latest_step is not None:
        raise SystemExit(f"{config.out}: found checkpoints; required none: add --resume, or choose another --out")
    if rank == 0:
        local_rows = tables.word.weight.to_local().shape[0]
        print(f"{ranks} ranks, from step {app['step']}: {rows} words, of which this one has {local_rows}", flush=True)

    while app["step"] < steps:
        for numbers in data.through(data):
            words, near = pairs.read(numbers)
            # Drawn for the whole batch on every rank, which takes as many as it has pairs: again whatever their number.
            draw = torch.Generator().manual_seed(data.epoch * data.size + data.position)
            others = pairs.others(batch * negatives, draw).view(batch, negatives)[rank::ranks]
            near = torch.cat([near.unsqueeze(1), others], dim=1)
            vectors = tables({"word": words.to(device), "near": near.to(device)})
            alike = (vectors["near"] @ vectors["word"].unsqueeze(2)).squeeze(2)
            # The sum over ranks is the global batch's mean, and so are the gradients, which ranks add up.
            loss = -(logsigmoid(alike[:, 0]) + logsigmoid(-alike[:, 1:]).sum(dim=1)).sum() / batch
            loss.backward()  # updates the rows
            app["step"] += 1

            total = log_loss(out, app["step"], loss.detach().double())
            if rank == 0 and app["step"] % config.save_every == 0:
                print(f"step {app['step']:4d} of {steps}  loss {total:.4f}", flush=True)
            manager.save(app["step"], app, force=app["step"] == steps)
            if app["step"] == steps:
                break
    manager.close()

    vectors = normalize(tables.word.weight.full_tensor().detach())
    if rank == 0:
        for word in filter(pairs.number.__contains__, config.show):
            nearest = (vectors @ vectors[pairs.number[word]]).topk(6).indices.tolist()[1:]
            print(f"{word:>12}: {', '.join(pairs.words[number] for number in nearest)}", flush=True)


if __name__ == "__main__":
    launch(train, Config, __doc__)
