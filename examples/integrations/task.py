"""What the examples of frameworks train: a small network that is to learn the sum of its inputs."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

SAMPLES, INPUTS, BATCH, SEED = 30, 6, 6, 1


class Sums(Dataset[dict[str, Tensor]]):
    """`inputs`, float32 [6], and their sum as `labels`, float32 [1]."""

    def __init__(self) -> None:
        self.inputs = torch.randn(SAMPLES, INPUTS, generator=torch.Generator().manual_seed(SEED))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[i], "labels": self.inputs[i].sum(0, keepdim=True)}


class Network(nn.Sequential):
    """A network with the same weights on any number of ranks, which gives the loss with its outputs."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        super().__init__(nn.Linear(INPUTS, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(super().forward(inputs), labels)}
