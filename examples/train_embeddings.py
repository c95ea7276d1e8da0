"""Train vectors of words (skip-gram with negative sampling) in tables whose rows are cut over all ranks.

    torchrun --standalone --nproc-per-node 4 examples/train_embeddings.py configs/embeddings.toml

A step touches few rows: ids travel to the ranks that have them, vectors travel back, and backward updates the rows
where they are. There is no gradient of a table, and one number of optimizer state for a row. Run it again on any
number of ranks: it goes on from the newest checkpoint.
"""

import argparse
import json
import os
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.functional import logsigmoid, normalize
from train_lm import override, read_text

import shardopt
from shardopt import checkpoint
from shardopt.nn import ShardedEmbedding, Table

RARE = 1e-3  # words of a larger share of the text are thinned out, to the root of what they exceed it by


class Pairs:
    """Pairs of words that stand near each other. They depend on seed and position, never on the number of ranks."""

    def __init__(self, corpus: str, batch: int, window: int, negatives: int, min_count: int, seed: int) -> None:
        words = re.findall(r"[a-z_]+", read_text(corpus).decode(errors="replace").lower())
        counts = [(word, n) for word, n in Counter(words).most_common() if n >= min_count]
        self.words = [word for word, _ in counts]
        self.number = {word: number for number, word in enumerate(self.words)}
        self.batch, self.window, self.negatives, self.seed = batch, window, negatives, seed
        self.position = 0
        often = torch.tensor([n for _, n in counts], dtype=torch.float64)
        self.drawn = often**0.75  # how often a word is drawn as one that does not stand near
        text = torch.tensor([self.number[word] for word in words if word in self.number])
        share = (often / often.sum())[text]
        keep = torch.rand(len(text), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        self.text = text[keep < (RARE / share).sqrt()]

    def next_slice(self, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        """This rank's part of the next global batch: words [b], and one near each and some that are not [b, 1 + n]."""
        draw = torch.Generator().manual_seed((self.seed << 32) + self.position)
        self.position += 1
        at = torch.randint(self.window, len(self.text) - self.window, (self.batch,), generator=draw)
        distance = torch.randint(1, self.window + 1, (self.batch,), generator=draw)
        side = 2 * torch.randint(2, (self.batch,), generator=draw) - 1
        others = torch.multinomial(self.drawn, self.batch * self.negatives, replacement=True, generator=draw)
        near = torch.cat([self.text[at + side * distance].unsqueeze(1), others.view(self.batch, -1)], dim=1)
        return self.text[at][rank::ranks], near[rank::ranks]

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.position = state["seed"], state["position"]


def train(config: dict[str, Any], device: torch.device) -> None:
    """Train until `config["steps"]` steps are done. Every rank calls it, in an initialized process group."""
    rank, ranks, steps = dist.get_rank(), dist.get_world_size(), config["steps"]
    data = Pairs(**config["data"], seed=config["seed"])

    torch.manual_seed(config["seed"])  # the same rows on any number of ranks
    rows, width = len(data.words), config["model"]["width"]
    tables = ShardedEmbedding(
        [
            Table("word", rows, width, init=lambda block: block.uniform_(-0.5 / width, 0.5 / width)),
            Table("near", rows, width, init=torch.Tensor.zero_),
        ],
        init_device_mesh(device.type, (ranks,)),
    )
    optimizer = tables.fuse(shardopt.RowWiseAdagrad, **config["optimizer"])

    out = Path(config["out"])
    out.mkdir(parents=True, exist_ok=True)
    app = {"tables": tables, "optimizer": optimizer, "data": data, "step": 0}
    manager = checkpoint.Manager(out / "checkpoints", every=config["save_every"])
    manager.restore(app)
    if rank == 0:
        held = tables.word.weight.to_local().shape[0]
        print(f"{ranks} ranks, from step {app['step']}: {rows} words, of which this one holds {held}", flush=True)

    while app["step"] < steps:
        words, near = (part.to(device) for part in data.next_slice(rank, ranks))
        found = tables({"word": words, "near": near})
        alike = (found["near"] @ found["word"].unsqueeze(2)).squeeze(2)
        # The sum over ranks is the global batch's mean, and so are the gradients, which ranks add up.
        loss = -(logsigmoid(alike[:, 0]) + logsigmoid(-alike[:, 1:]).sum(dim=1)).sum() / data.batch
        loss.backward()  # updates the rows
        app["step"] += 1

        total = loss.detach().double()
        dist.all_reduce(total)
        if rank == 0:
            with open(out / "loss.jsonl", "a") as log:
                log.write(json.dumps({"step": app["step"], "loss": total.item(), "ranks": ranks}) + "\n")
            if app["step"] % config["save_every"] == 0:
                print(f"step {app['step']:4d} of {steps}  loss {total.item():.4f}", flush=True)
        manager.save(app["step"], app, force=app["step"] == steps)
    manager.close()

    vectors = normalize(tables.word.weight.full_tensor().detach())
    if rank == 0:
        for word in filter(data.number.__contains__, config["show"]):
            nearest = (vectors @ vectors[data.number[word]]).topk(6).indices.tolist()[1:]
            print(f"{word:>12}: {', '.join(data.words[number] for number in nearest)}", flush=True)


@record  # so that torchrun's report has the traceback of the rank that failed first
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="TOML file, such as configs/embeddings.toml")
    parser.add_argument("--out", help="where losses and checkpoints go, instead of the file's `out`")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other settings, values as in TOML")
    arguments = parser.parse_args()
    config = tomllib.loads(arguments.config.read_text())
    override(config, tomllib.loads("\n".join(arguments.set)))
    config["out"] = arguments.out or config["out"]

    use_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # NCCL wants one for each rank
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpus else torch.device("cpu")
    if use_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_gpus else "gloo")
    train(config, device)
    dist.barrier()  # a rank that leaves while another still talks to it aborts that one
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
