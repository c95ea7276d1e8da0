"""A model of the next letter of a text: hashed n-grams of the letters and words before it, in two tables."""

import torch
from common import read_text
from program import Table as Settings
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from shardopt.nn import ShardedEmbeddingBag, Table, plan_tables

BYTES = 256
_BASE, _INVERSE = 0x2545F4914F6CDD1D, 0x59071D96D81ECD35  # their product is 1 modulo 2 ** 64
_MIX = 0x1B873593CC9E2D51


class DataConfig(Settings):
    corpus: str
    batch: PositiveInt


class GramsConfig(Settings):
    letters: PositiveInt
    words: PositiveInt


class RowsConfig(Settings):
    letters: PositiveInt
    words: PositiveInt


class ModelConfig(Settings):
    width: PositiveInt
    hidden: PositiveInt


class OptimizerConfig(Settings):
    tables: PositiveFloat
    dense: PositiveFloat


class PlanConfig(Settings):
    memory_bytes: PositiveInt
    skew: PositiveFloat
    exchange_bandwidth: PositiveFloat
    memory_bandwidth: PositiveFloat
    piece_seconds: PositiveFloat


class CheckpointConfig(Settings):
    every: PositiveInt
    full_every: PositiveInt


class Config(Settings):
    out: str
    seed: int
    steps: PositiveInt
    data: DataConfig
    grams: GramsConfig
    rows: RowsConfig
    model: ModelConfig
    optimizer: OptimizerConfig
    plan: PlanConfig
    checkpoints: CheckpointConfig


class Grams:
    """The letters of a text, each with the n-grams that end before it, as rows of tables.

    Args:
        corpus: a URL, or "" for the text that CPython ships.
        longest: n-gram of "letters", and of "words". The latter begin with a word, and may end within one.
        rows: of the tables of both.
    """

    def __init__(self, corpus: str, longest: dict[str, int], rows: dict[str, int]) -> None:
        self.text = torch.frombuffer(bytearray(read_text(corpus)), dtype=torch.uint8).long()
        self.rows = rows
        self.letters, self.words = (torch.arange(1, longest[name] + 1) for name in ("letters", "words"))
        is_space = torch.isin(self.text, torch.tensor(list(b" \n\t")))
        begins = (~is_space[1:] & is_space[:-1]).nonzero().squeeze(1) + 1
        self.begins = torch.cat(
            [torch.zeros(len(self.words), dtype=torch.int64), begins]
        )  # the first words have none before
        # A hash is the sum of an n-gram's letters times powers, modulo 2 ** 64, as int64 wraps around. It is the
        # difference of two of these sums, times a power: so n-grams of all lengths cost the same.
        self.powers, inverses = (torch.full((len(self.text),), base).cumprod(0) for base in (_BASE, _INVERSE))
        self.sums = torch.cat([torch.zeros(1, dtype=torch.int64), ((self.text + 1) * inverses).cumsum(0)])

    def __len__(self) -> int:
        return len(self.text) - len(self.letters)

    def read(self, numbers: list[int]) -> tuple[dict[str, Tensor], Tensor]:
        """Returns the rows of the n-grams before letters, [b, n] by table, and the letters, [b]; all int64."""
        ends = torch.tensor(numbers, dtype=torch.int64).unsqueeze(1) + len(self.letters)
        word = torch.searchsorted(self.begins, ends)  # how many words have begun
        begins = {"letters": ends - self.letters, "words": self.begins[word - self.words]}
        rows = {name: self._hash(begin, ends) % self.rows[name] for name, begin in begins.items()}
        return rows, self.text[ends.squeeze(1)]

    def _hash(self, begins: Tensor, ends: Tensor) -> Tensor:
        hashed = (self.sums[ends] - self.sums[begins]) * self.powers[begins]
        hashed = (hashed ^ (hashed >> 31)) * _MIX  # the low bits of the sum depend on the low bits of letters alone
        return hashed ^ (hashed >> 29)


class NextLetter(nn.Module):
    """Logits of the next letter, from sums of rows of two tables. Collective, in forward and backward.

    Args:
        config: as in configs/tables.toml.
        cut: of the tables: "planned", or as `Table` takes it.
        mesh: of all ranks.
    """

    def __init__(self, config: Config, cut: str, mesh: DeviceMesh) -> None:
        super().__init__()
        width, hidden = config.model.width, config.model.hidden
        tables = tables_of(config, cut, mesh.size())
        self.tables = ShardedEmbeddingBag(tables, mesh, mean_gradients=True)  # as DDP takes the mean
        # With ReLU in place of GELU, last bits that differ between cuts grew to 1e-5 of a loss in 23 steps.
        dense = nn.Sequential(nn.Linear(width * len(tables), hidden), nn.GELU(), nn.Linear(hidden, BYTES))
        self.dense = DistributedDataParallel(dense.to(mesh.device_type))

    def forward(self, rows: dict[str, Tensor]) -> Tensor:
        """Takes rows of each table, [b, n], to [b, 256]."""
        bags = self.tables({name: (of_table, None) for name, of_table in rows.items()})
        return self.dense(torch.cat([bags[table.name] for table in self.tables.tables], dim=1))

    def bytes_here(self) -> int:
        """Returns the bytes of this rank's pieces of tables, without optimizer state."""
        return sum(parameter.to_local().nbytes for parameter in self.tables.parameters())


def tables_of(config: Config, cut: str, ranks: int) -> list[Table]:
    """Returns the two tables, cut over so many ranks."""
    width = config.model.width
    # Zeros: an n-gram that training has not met adds nothing.
    tables = [
        Table(name, rows, width, mode="sum", init=nn.init.zeros_, cut="rows" if cut == "planned" else cut)
        for name, rows in config.rows.model_dump().items()
    ]
    if cut != "planned":
        return tables
    use = {"batch": config.data.batch / ranks, "pooling": config.grams.model_dump(), "algorithm": "rowwiseadagrad"}
    return list(plan_tables(tables, ranks, **use, **config.plan.model_dump()).tables)
