"""Qwen 3, dense and with experts: Hugging Face's names ↔ torchtitan's, with the experts of a layer stacked.

    E experts, F features within one, M features of the model

Both have Hugging Face's order of rotary pairs.
"""

from __future__ import annotations

from typing import Literal

from shardopt.checkpoint.rearrange.rules import AnyRule, Rule, Tie

Experts = Literal["single", "fused"]


def qwen3(*, tied: bool = False, experts: Experts = "single") -> list[AnyRule]:
    """Returns the rules from Hugging Face's Qwen3ForCausalLM and Qwen3MoeForCausalLM to torchtitan's names.

    `inverse` has those of the way back.

    Args:
        tied: whether the output layer is the embedding, and has no tensor of its own in the files.
        experts: "single" where each expert has its own tensors, as in published files; "fused" where a layer has
            `gate_up_proj` [E, 2 F, M] and `down_proj` [E, M, F], as models of transformers 5 have them.
    """
    old, new = "model.layers.{n}.", "layers.{n}."
    rules: list[AnyRule] = [
        Rule("model.embed_tokens.weight", "tok_embeddings.weight"),
        *(Rule(f"{old}self_attn.{x}_proj.weight", f"{new}attention.w{x}.weight") for x in "qkvo"),
        *(Rule(f"{old}self_attn.{x}_norm.weight", f"{new}attention.{x}_norm.weight") for x in "qk"),
        Rule(f"{old}input_layernorm.weight", f"{new}attention_norm.weight"),
        Rule(f"{old}post_attention_layernorm.weight", f"{new}ffn_norm.weight"),
        *feed_forward(f"{old}mlp.", f"{new}feed_forward."),
        Rule(f"{old}mlp.gate.weight", f"{new}moe.router.gate.weight"),
        *stacked_experts(f"{old}mlp.experts.", f"{new}moe.experts.", experts),
        Rule("model.norm.weight", "norm.weight"),
        Rule("lm_head.weight", "output.weight"),
    ]
    return [*rules, Tie("tok_embeddings.weight", "output.weight")] if tied else rules


def feed_forward(old: str, new: str) -> list[Rule]:
    """Returns the rules of a gated feed-forward layer, in which gate, down and up become w1, w2 and w3."""
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    return [Rule(f"{old}{name}.weight", f"{new}{its}.weight") for name, its in names.items()]


def stacked_experts(old: str, new: str, experts: Experts) -> list[Rule]:
    """Returns the rules of the experts of a layer, which become w1 [E, F, M], w2 [E, M, F] and w3 [E, F, M]."""
    if experts == "fused":
        return [
            Rule(f"{old}gate_up_proj", (f"{new}w1", f"{new}w3"), "e f+f m -> e f m, e f m"),
            Rule(f"{old}down_proj", f"{new}w2"),
        ]
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    return [Rule(f"{old}{{e}}.{name}.weight", f"{new}{its}", "o i -> e o i") for name, its in names.items()]
