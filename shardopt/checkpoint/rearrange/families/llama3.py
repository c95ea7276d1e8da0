"""Llama 3: Hugging Face's names and order of rotary pairs ↔ Meta's own, which torchtitan also uses.

    H heads, K heads of keys and values, D dimensions of a head

Rotary embeddings turn pairs of dimensions. Meta's pairs are neighbours: a row of wq is (H, D/2, 2). Hugging Face's are
halves of a head: (H, 2, D/2).
"""

from __future__ import annotations

from shardopt.checkpoint.rearrange.rules import AnyRule, Rule, Tie

_ROTARY = "(head two half) ... -> (head half two) ..."


def llama3(n_heads: int, n_kv_heads: int, *, tied: bool = False) -> list[AnyRule]:
    """Returns the rules from Hugging Face's LlamaForCausalLM to Meta's names; `inverse` reverses them.

    Args:
        n_heads: H.
        n_kv_heads: K.
        tied: whether the output layer is the embedding, and has no tensor of its own in the files.
    """
    old, new = "model.layers.{n}.", "layers.{n}."
    rules: list[AnyRule] = [
        Rule("model.embed_tokens.weight", "tok_embeddings.weight"),
        Rule(f"{old}self_attn.q_proj.weight", f"{new}attention.wq.weight", _ROTARY, {"head": n_heads, "two": 2}),
        Rule(f"{old}self_attn.k_proj.weight", f"{new}attention.wk.weight", _ROTARY, {"head": n_kv_heads, "two": 2}),
        Rule(f"{old}self_attn.v_proj.weight", f"{new}attention.wv.weight"),
        Rule(f"{old}self_attn.o_proj.weight", f"{new}attention.wo.weight"),
        Rule(f"{old}mlp.gate_proj.weight", f"{new}feed_forward.w1.weight"),
        Rule(f"{old}mlp.down_proj.weight", f"{new}feed_forward.w2.weight"),
        Rule(f"{old}mlp.up_proj.weight", f"{new}feed_forward.w3.weight"),
        Rule(f"{old}input_layernorm.weight", f"{new}attention_norm.weight"),
        Rule(f"{old}post_attention_layernorm.weight", f"{new}ffn_norm.weight"),
        Rule("model.norm.weight", "norm.weight"),
        Rule("lm_head.weight", "output.weight"),
    ]
    return [*rules, Tie("tok_embeddings.weight", "output.weight")] if tied else rules
