"""A small mixture-of-experts transformer over bytes: cut into stages of a pipeline, its experts spread over ranks.

Shapes: N tokens of this rank, W width, H hidden width of an expert, E experts of a layer, C of them for each token,
R ranks that the experts are spread over.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lm import BYTES, Attention
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

TIED = {"head.weight": "byte.weight"}  # one matrix, of which the first stage and the last have a copy each


class Exchange(torch.autograd.Function):
    """Sends rows to the ranks of a group, so many to each, and gets theirs; backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> Tensor:
        ctx.back = received, sent, group
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), list(received), list(sent), group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return Exchange.apply(gradient, *ctx.back), None, None, None


class Experts(nn.Module):
    """Feed-forward layers, [E, W, H] and [E, H, W], each of which lies on one of R ranks."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)
        self.group: ProcessGroup | None = None

    def spread(self, mesh: DeviceMesh) -> None:
        """Cuts the experts over the ranks of a mesh, which divide their number and all have the same ones."""
        self.up, self.down = (
            nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None))
            for whole in (self.up, self.down)
        )
        self.group = mesh.get_group()

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Has each row computed by its expert, wherever that is. All ranks that share the experts call it.

        Args:
            rows: [n, W], those of the first expert first, and so on.
            counts: [E] int64, how many of them are each expert's.
        """
        ranks = dist.get_world_size(self.group)
        sends = counts.view(ranks, -1)  # [R, E / R]
        receives = torch.empty_like(sends)
        dist.all_to_all_single(receives, sends, group=self.group)
        sent, received = sends.sum(dim=1).tolist(), receives.sum(dim=1).tolist()
        rows = Exchange.apply(rows, sent, received, self.group)
        # They come by rank, and for each rank by expert.
        numbers = torch.arange(sends.shape[1], device=rows.device).repeat(ranks)
        by_expert = numbers.repeat_interleave(receives.flatten()).argsort(stable=True)
        parts = rows[by_expert].split(receives.sum(dim=0).tolist())
        experts = zip(parts, self.up.to_local(), self.down.to_local(), strict=True)
        computed = torch.cat([functional.gelu(part @ up) @ down for part, up, down in experts])
        return Exchange.apply(computed[by_expert.argsort()], received, sent, self.group)


class Block(nn.Module):
    """Pre-norm attention and C of E experts, weighted by a gate, each added to its input."""

    def __init__(self, width: int, heads: int, experts: int, chosen: int, hidden: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_experts = nn.LayerNorm(width)
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, W) to the same."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.mix(self.norm_experts(x).flatten(0, 1)).view_as(x)

    def mix(self, x: Tensor) -> Tensor:
        """[N, W] to the same."""
        best, numbers = self.gate(x).softmax(dim=1).topk(self.chosen + 1)
        # By how far each is above the first that is not chosen: where rounding may choose another one, the weight is 0,
        # so that the loss does not jump.
        weights = best[:, :-1] - best[:, -1:]
        numbers = numbers[:, :-1].flatten()  # [N × C]
        order = numbers.argsort(stable=True)
        outputs = self.experts(x[order // self.chosen], numbers.bincount(minlength=self.gate.out_features))
        return torch.einsum("nc,ncw->nw", weights, outputs[order.argsort()].unflatten(0, weights.shape))


class MixtureOfExperts(nn.Module):
    """Logits of the next byte at every position, for at most `context` bytes; or one stage of that."""

    def __init__(self, layers: int, context: int, width: int, **block: int) -> None:
        super().__init__()
        self.byte: nn.Embedding | None = nn.Embedding(BYTES, width)
        self.position: nn.Embedding | None = nn.Embedding(context, width)
        self.blocks = nn.ModuleDict({str(number): Block(width, **block) for number in range(layers)})
        self.norm: nn.LayerNorm | None = nn.LayerNorm(width)
        self.head: nn.Linear | None = nn.Linear(width, BYTES, bias=False)
        self.head.weight = self.byte.weight
        nn.init.normal_(self.byte.weight, std=width**-0.5)
        nn.init.normal_(self.position.weight, std=0.1 * width**-0.5)

    def keep_stage(self, stage: int, stages: int) -> None:
        """Drops what belongs to other stages. The rest keeps its names: a layer has one, whichever stage has it."""
        layers = len(self.blocks)
        for number in range(layers):
            if number * stages // layers != stage:
                del self.blocks[str(number)]
        if stage > 0:
            self.byte = self.position = None
        if stage < stages - 1:
            self.norm = self.head = None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time) int64 on the first stage, (batch, time, W) on others, to that or (batch, time, 256)."""
        if self.byte is not None and self.position is not None:
            x = self.byte(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))
