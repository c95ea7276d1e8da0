"""GPT-2: Hugging Face's joint Conv1D layer for queries, keys and values ↔ one linear layer for each.

A Conv1D's weight is [inputs, outputs], a linear layer's [outputs, inputs].
"""

from __future__ import annotations

from shardopt.checkpoint.rearrange.rules import AnyRule, Drop, Rule, Tie


def gpt2(*, prefix: str = "transformer.") -> list[AnyRule]:
    """Returns the rules from Hugging Face's GPT2LMHeadModel to names in torchtitan's style.

    `inverse` has those of the way back. The new names are tok_embeddings, pos_embeddings, norm and output, and in
    layers.{n} attention.{wq, wk, wv, wo}, feed_forward.{w1, w2}, attention_norm and ffn_norm. The output layer is the
    embedding.

    Args:
        prefix: of the names; "" for files of the model without its head, such as the published ones.
    """
    old, new = f"{prefix}h.{{n}}.", "layers.{n}."
    linear = "i o -> o i"
    qkv = tuple(f"{new}attention.{name}" for name in ("wq", "wk", "wv"))
    rules: list[AnyRule] = [
        Rule(f"{prefix}wte.weight", "tok_embeddings.weight"),
        Rule(f"{prefix}wpe.weight", "pos_embeddings.weight"),
        Rule(f"{old}attn.c_attn.weight", tuple(f"{each}.weight" for each in qkv), "i o+o+o -> o i, o i, o i"),
        Rule(f"{old}attn.c_attn.bias", tuple(f"{each}.bias" for each in qkv), "o+o+o -> o, o, o"),
        Drop(f"{old}attn.bias"),  # the causal mask
        Drop(f"{old}attn.masked_bias"),
        Rule(f"{prefix}ln_f.{{part}}", "norm.{part}"),
        Rule("lm_head.weight", "output.weight"),
        Tie("tok_embeddings.weight", "output.weight"),
    ]
    for conv, its in (
        ("attn.c_proj", "attention.wo"),
        ("mlp.c_fc", "feed_forward.w1"),
        ("mlp.c_proj", "feed_forward.w2"),
    ):
        rules.append(Rule(f"{old}{conv}.weight", f"{new}{its}.weight", linear))
        rules.append(Rule(f"{old}{conv}.bias", f"{new}{its}.bias"))
    for norm, its in (("ln_1", "attention_norm"), ("ln_2", "ffn_norm")):
        rules.append(Rule(f"{old}{norm}.{{part}}", f"{new}{its}.{{part}}"))
    return rules
