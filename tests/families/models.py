"""Small decoders under the names that torchtitan's and Meta's models have, written for themselves: the other side of
the rules of families."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def angles(length, dim, theta=10000.0):
    frequencies = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return torch.outer(torch.arange(length, dtype=torch.float32), frequencies)


def turn_neighbours(x):
    """Turns pairs of neighbours, as complex numbers. x: [batch, heads, length, dim]."""
    turns = torch.polar(torch.ones(()), angles(x.shape[-2], x.shape[-1]))
    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous()) * turns).flatten(-2)


def turn_halves(x):
    """Turns each dimension of the first half of a head with its like of the second."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles(x.shape[-2], x.shape[-1]).cos(), angles(x.shape[-2], x.shape[-1]).sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def attend(q, k, v, scale):
    scores = q @ k.transpose(-1, -2) * scale
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


def heads_of(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, dim, heads, kv_heads, head_dim, turn, qk_norm=False, bias=False):
        super().__init__()
        self.heads, self.kv_heads, self.turn = heads, kv_heads, turn
        self.wq = nn.Linear(dim, heads * head_dim, bias=bias)
        self.wk = nn.Linear(dim, kv_heads * head_dim, bias=bias)
        self.wv = nn.Linear(dim, kv_heads * head_dim, bias=bias)
        self.wo = nn.Linear(heads * head_dim, dim, bias=bias)
        if qk_norm:
            self.q_norm, self.k_norm = RMSNorm(head_dim), RMSNorm(head_dim)

    def forward(self, x):
        q, k, v = (
            heads_of(self.wq(x), self.heads),
            heads_of(self.wk(x), self.kv_heads),
            heads_of(self.wv(x), self.kv_heads),
        )
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        if self.turn is not None:
            q, k = self.turn(q), self.turn(k)
        k, v = (each.repeat_interleave(self.heads // self.kv_heads, dim=1) for each in (k, v))
        return self.wo(attend(q, k, v, q.shape[-1] ** -0.5).transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    """Keys and values through a narrow layer, and one rotary key for all heads."""

    def __init__(self, dim, heads, rank, nope, rope, value):
        super().__init__()
        self.heads, self.nope, self.rope, self.rank = heads, nope, rope, rank
        self.wq_a, self.q_norm = nn.Linear(dim, rank, bias=False), RMSNorm(rank)
        self.wq_b = nn.Linear(rank, heads * (nope + rope), bias=False)
        self.wkv_a, self.kv_norm = nn.Linear(dim, rank + rope, bias=False), RMSNorm(rank)
        self.wkv_b = nn.Linear(rank, heads * (nope + value), bias=False)
        self.wo = nn.Linear(heads * value, dim, bias=False)

    def forward(self, x):
        q = heads_of(self.wq_b(self.q_norm(self.wq_a(x))), self.heads)
        latent, k_rope = self.wkv_a(x).split([self.rank, self.rope], dim=-1)
        kv = heads_of(self.wkv_b(self.kv_norm(latent)), self.heads)
        k_rope = turn_neighbours(k_rope[:, None]).expand(-1, self.heads, -1, -1)
        q = torch.cat([q[..., : self.nope], turn_neighbours(q[..., self.nope :])], dim=-1)
        k = torch.cat([kv[..., : self.nope], k_rope], dim=-1)
        scale = (self.nope + self.rope) ** -0.5
        return self.wo(attend(q, k, kv[..., self.nope :], scale).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):
    def __init__(self, count, dim, hidden):
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(torch.empty(count, hidden, dim)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(count, dim, hidden))

    def forward(self, x):
        """Returns what each expert makes of each token: [tokens, experts, dim]."""
        gate, up = (torch.einsum("tm,efm->tef", x, w) for w in (self.w1, self.w3))
        return torch.einsum("tef,emf->tem", F.silu(gate) * up, self.w2)


class Router(nn.Module):
    def __init__(self, dim, count):
        super().__init__()
        self.gate = nn.Linear(dim, count, bias=False)


class MoE(nn.Module):
    """All experts are computed; those that are not chosen weigh nothing."""

    def __init__(self, dim, hidden, count, chosen, with_bias=False):
        super().__init__()
        self.router, self.experts, self.chosen = Router(dim, count), Experts(count, dim, hidden), chosen
        if with_bias:
            self.shared_experts = FeedForward(dim, hidden)
            self.register_buffer("expert_bias", torch.zeros(count))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        logits = self.router.gate(tokens)
        if hasattr(self, "expert_bias"):
            scores = logits.sigmoid()
            best = (scores + self.expert_bias).topk(self.chosen).indices
            weights = torch.zeros_like(scores).scatter(1, best, scores.gather(1, best))
            weights = 2.5 * weights / weights.sum(-1, keepdim=True)
        else:
            scores = logits.softmax(-1)
            weights = torch.zeros_like(scores).scatter(1, *reversed(scores.topk(self.chosen)))
        out = torch.einsum("te,tem->tm", weights, self.experts(tokens)).view_as(x)
        return out + self.shared_experts(x) if hasattr(self, "shared_experts") else out


class Block(nn.Module):
    def __init__(self, attention, inner, norm, dim):
        super().__init__()
        self.attention, self.attention_norm, self.ffn_norm = attention, norm(dim), norm(dim)
        self.add_module("moe" if isinstance(inner, MoE) else "feed_forward", inner)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + (self.moe if hasattr(self, "moe") else self.feed_forward)(self.ffn_norm(x))


class Decoder(nn.Module):
    def __init__(self, vocabulary, dim, blocks, norm=RMSNorm, positions=None):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, dim)
        if positions:
            self.pos_embeddings = nn.Embedding(positions, dim)
        self.layers = nn.ModuleList(blocks)
        self.norm, self.output = norm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, ids):
        x = self.tok_embeddings(ids)
        if hasattr(self, "pos_embeddings"):
            x = x + self.pos_embeddings(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class PlainFeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.w2(F.gelu(self.w1(x), approximate="tanh"))
