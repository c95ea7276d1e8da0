"""DeepSeek V2 and V3: Hugging Face's names ↔ torchtitan's, with the experts of a layer stacked.

Both have rotary pairs as neighbours.
"""

from __future__ import annotations

from shardopt.checkpoint.rearrange.families.qwen3 import Experts, feed_forward, stacked_experts
from shardopt.checkpoint.rearrange.rules import AnyRule, Rule


def deepseek(*, experts: Experts = "single") -> list[AnyRule]:
    """Returns the rules from Hugging Face's DeepseekV3ForCausalLM to torchtitan's names; `inverse` reverses them.

    Args:
        experts: see `qwen3`.
    """
    old, new = "model.layers.{n}.", "layers.{n}."
    attention = {
        "q_proj": "wq",
        "q_a_proj": "wq_a",
        "q_a_layernorm": "q_norm",
        "q_b_proj": "wq_b",
        "kv_a_proj_with_mqa": "wkv_a",
        "kv_a_layernorm": "kv_norm",
        "kv_b_proj": "wkv_b",
        "o_proj": "wo",
    }
    return [
        Rule("model.embed_tokens.weight", "tok_embeddings.weight"),
        *(Rule(f"{old}self_attn.{name}.weight", f"{new}attention.{its}.weight") for name, its in attention.items()),
        Rule(f"{old}input_layernorm.weight", f"{new}attention_norm.weight"),
        Rule(f"{old}post_attention_layernorm.weight", f"{new}ffn_norm.weight"),
        *feed_forward(f"{old}mlp.", f"{new}feed_forward."),
        Rule(f"{old}mlp.gate.weight", f"{new}moe.router.gate.weight"),
        Rule(f"{old}mlp.gate.e_score_correction_bias", f"{new}moe.expert_bias"),
        *stacked_experts(f"{old}mlp.experts.", f"{new}moe.experts.", experts),
        *feed_forward(f"{old}mlp.shared_experts.", f"{new}moe.shared_experts."),
        Rule("model.norm.weight", "norm.weight"),
        Rule("lm_head.weight", "output.weight"),
    ]
