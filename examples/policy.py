"""A small language model over letters that writes words, and the rule by which they are scored."""

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

LETTERS = " abcdefghijklmnopqrstuvwxyz"
LENGTH = 8
WIDTH, HEADS, LAYERS = 96, 6, 2
_IS_VOWEL = torch.tensor([letter in "aeiou" for letter in LETTERS])


class Linear(nn.Linear):
    """Weights in bf16, products in fp32: many CPUs have no fast ones in bf16."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight.float())


class Norm(nn.LayerNorm):
    """Weights in bf16, computed in fp32."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight.float(), self.bias.float())


class Attention(nn.Module):
    """Causal self-attention. Its heads may be spread over ranks: those of this rank are told by what `query` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        heads = [linear(x).unflatten(-1, (-1, WIDTH // HEADS)) for linear in (self.query, self.key, self.value)]
        mixed = functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in heads), is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm attention and a feed-forward layer, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_feed = Norm(WIDTH), Norm(WIDTH)
        self.attention = Attention()
        self.up = Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        x = x + self.attention(self.norm_attention(x))
        return x + self.down(functional.gelu(self.up(self.norm_feed(x))))


class Policy(nn.Module):
    """Logits of the next letter at every position: 230,000 weights, in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.letter, self.position = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm(WIDTH)
        self.head = Linear(WIDTH, len(LETTERS), bias=False)
        self.bfloat16()

    def forward(self, letters: Tensor) -> Tensor:
        """(batch, time) int64 to (batch, time, letters)."""
        x = self.letter(letters) + self.position(torch.arange(letters.shape[1]))
        x = x.float()
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def for_training(mesh: DeviceMesh) -> Policy:
    """Returns a model in shards, with the same weights on any number of ranks. Gradients are averaged in fp32."""
    torch.manual_seed(1)
    model = Policy()
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=precision)
    return model


def for_serving(mesh: DeviceMesh) -> Policy:
    """Returns a model whose heads, inner features and letters are spread over the mesh, without published weights."""
    model = Policy().requires_grad_(False)
    parallelize_module(
        model,
        mesh,
        {
            "letter": RowwiseParallel(input_layouts=Replicate()),
            "blocks.*.attention.query": ColwiseParallel(),
            "blocks.*.attention.key": ColwiseParallel(),
            "blocks.*.attention.value": ColwiseParallel(),
            "blocks.*.attention.out": RowwiseParallel(),
            "blocks.*.up": ColwiseParallel(),
            "blocks.*.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        },
    )
    return model


@torch.no_grad()
def write_words(model: nn.Module, count: int) -> Tensor:
    """Returns new words: a space and what the model draws after it, (count, LENGTH + 1) int64. Collective."""
    words = torch.zeros(count, 1, dtype=torch.int64)
    for _ in range(LENGTH):
        drawn = torch.multinomial(functional.softmax(model(words)[:, -1], dim=-1), 1)
        dist.broadcast(drawn, 0)  # one rank draws for all
        words = torch.cat([words, drawn], dim=1)
    return words


def score(words: Tensor) -> Tensor:
    """Returns the reward of each letter: 1 where a vowel follows a consonant, or the other way round."""
    is_vowel = _IS_VOWEL[words]
    hits = (is_vowel[:, 1:] != is_vowel[:, :-1]) & (words[:, 1:] != 0)
    hits[:, 0] = words[:, 1] != 0  # any letter may come first
    return hits.float()


def text_of(word: Tensor) -> str:
    """Returns the letters of a word, without the space that it begins with."""
    return "".join(LETTERS[letter] for letter in word[1:].tolist())


@torch.no_grad()
def hash_of_weights(model: nn.Module) -> str:
    """Returns a hash of all weights in the order of the model, the same in any layout. Collective."""
    running = xxhash.xxh3_128()
    for name, weight in model.state_dict().items():
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        running.update(f"{name} {tuple(full.shape)} {full.dtype}".encode())
        running.update(full.contiguous().view(torch.uint8).numpy())
    return running.hexdigest()
