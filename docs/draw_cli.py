"""Draws the pictures of docs/cli.md: what the verbs print about a run that is made here, in memory.

python docs/draw_cli.py [FOLDER]     # docs/cli, if none is given
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.format.manifest import StoredLayout
from shardopt.checkpoint.storage import storage_of
from shardopt.cli.output import Output
from shardopt.cli.plot.plot_layout import plot_layout
from shardopt.cli.plot.plot_run import plot_run
from shardopt.cli.verbs.diff import diff
from shardopt.cli.verbs.fit import fit
from shardopt.cli.verbs.ls import ls
from shardopt.cli.verbs.show import show
from shardopt.sharding.layout import Layout
from shardopt.sharding.mesh import Mesh, Split, mesh_layout

RUN, SCRATCH = "memory://runs/lm", "memory://scratch/lm"
LAYERS, DIM, WORDS, SAVE_EVERY = 12, 64, 500, 5
SHOW = dict(key=None, glob=None, regex=None, depth=None, flat=False, all=False, boxes=False, no_stats=False)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        names = ("wq", "wk", "wv", "wo")
        self.attn = torch.nn.ModuleDict({name: torch.nn.Linear(DIM, DIM, bias=False) for name in names})
        self.mlp = torch.nn.ModuleDict({"up": torch.nn.Linear(DIM, 4 * DIM), "down": torch.nn.Linear(4 * DIM, DIM)})
        self.norm = torch.nn.RMSNorm(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.attn[name](self.norm(x)) for name in ("wq", "wk", "wv"))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["wo"](mixed)
        return x + self.mlp["down"](torch.relu(self.mlp["up"](self.norm(x))))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, DIM)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = torch.nn.Linear(DIM, WORDS, bias=False)
        torch.nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(torch.nn.functional.rms_norm(x, (DIM,)))


def of_four_ranks(key: str, stored: StoredLayout) -> Layout:
    """FSDP over two ranks by tensor parallelism over two."""
    mesh = Mesh((2, 2), (0, 1, 2, 3))
    if len(stored.shape) == 2:
        return mesh_layout(stored.shape, mesh, (Split(0, 0), Split(1, 0 if ".up." in key else 1)))
    return mesh_layout(stored.shape, mesh, (Split(0, 0),)) if stored.shape else Layout.replicated(stored.shape)


def make_run(log: Path) -> None:
    """Trains a small language model to know a text of noise by heart, rewinds the run once, and resumes.

    It is saved by this process alone, in the background; RUN has what four ranks would have written.
    """
    handler = logging.FileHandler(log)
    logging.getLogger("shardopt").addHandler(handler)
    logging.getLogger("shardopt").setLevel(logging.DEBUG)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    no_decay = {"match": "norm|bias", "weight_decay": 0.0}
    optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=1e-3, groups=[no_decay])
    app = {"model": model, "optimizer": optimizer, "step": 0, "data": {"epoch": 0, "seed": 17}}
    ids = torch.randint(WORDS, (4, 33))
    manager = checkpoint.Manager(SCRATCH, every=SAVE_EVERY, stage="now")

    def train(steps: int) -> None:
        while app["step"] < steps:
            logits = model(ids[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            app["step"] += 1
            accuracy = (logits.argmax(-1) == ids[:, 1:]).float().mean().item()
            manager.save(app["step"], app, metrics={"loss": loss.item(), "accuracy": accuracy})

    train(8 * SAVE_EVERY)
    manager.restore(app, step=4 * SAVE_EVERY)
    for group in optimizer.param_groups:
        group["lr"] = 5e-4
    train(7 * SAVE_EVERY)
    manager.close()
    logging.getLogger("shardopt").removeHandler(handler)
    scratch, run = storage_of(SCRATCH), storage_of(RUN)
    for name in scratch.names():
        if name.startswith("step-"):
            checkpoint.reshard(f"{SCRATCH}/{name}", f"{RUN}/{name}", layout=of_four_ranks)
        elif name.startswith("branch-"):
            run.publish_new(name, scratch.read(name))


def draw_text(path: Path, title: str, verb: Callable[[Output], int]) -> None:
    """Draws what a verb prints to a terminal."""
    with open("/dev/null", "w") as nowhere:
        console = Console(record=True, width=124, file=nowhere, force_terminal=True, markup=False, highlight=False)
        verb(Output(console=console))
    path.write_text(console.export_svg(title=title, unique_id=path.stem))


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "run.log"
        make_run(log)
        plot_run(Output(), root=RUN, log=[str(log)], out=str(folder / "run.png"))
    first, last = f"{RUN}/step-00000020", f"{RUN}/step-00000035-b1"
    rules = {"keep_last": 2, "keep_every": 10, "best": "loss:min:1", "keep_seconds": None}
    draw_text(
        folder / "ls.svg",
        f"shardopt ls {RUN} --keep-last 2 --keep-every 10 --best loss:min:1",
        lambda output: ls(output, url=RUN, verify=False, **rules),
    )
    draw_text(folder / "show.svg", f"shardopt show {last}", lambda output: show(output, url=last, **SHOW))
    key = "model.layers.0.attn.wq.weight"
    draw_text(
        folder / "tensor.svg",
        f"shardopt show {last} {key}",
        lambda output: show(output, url=last, **SHOW | {"key": key}),
    )
    select = r"^model|^data|^step|param_groups"
    draw_text(
        folder / "diff.svg",
        f"shardopt diff {first} {last} --select '{select}'",
        lambda output: diff(output, a=first, b=last, rename=None, select=select, all=False),
    )
    sizes = {"ranks": 8, "steps": 10_000, "every": 500, "keep_last": 3, "keep_every": 2_500}
    draw_text(
        folder / "fit.svg",
        f"shardopt fit {RUN} --ranks 8 --steps 10000 --every 500 --keep-last 3 --keep-every 2500",
        lambda output: fit(output, url=RUN, **sizes, best=None, keep_seconds=None, seconds_per_step=None, measure=None),
    )
    plot_layout(Output(), url=last, world_size=3, glob="model.*", out=str(folder / "layout.png"))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "cli")
