"""Models of transformers, and small ones under other names that load their checkpoints: the same logits, both ways."""

import re

import pytest
import torch
from torch import nn

from shardopt import checkpoint
from shardopt.checkpoint.rearrange import inverse
from shardopt.checkpoint.rearrange.families import deepseek, gpt2, llama3, qwen3
from tests.families.models import (
    Attention,
    Block,
    Decoder,
    FeedForward,
    LatentAttention,
    MoE,
    PlainFeedForward,
    RMSNorm,
    turn_halves,
    turn_neighbours,
)

transformers = pytest.importorskip("transformers", reason="transformers is not installed (launch/test_integrations.sh)")

SIZES = {"vocab_size": 17, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5}


def blocks(attention, *inner, norm=RMSNorm):
    return [Block(attention(), make(), norm, 16) for make in inner]


def llama():
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))
    ours = blocks(lambda: Attention(16, 4, 2, 4, turn_neighbours), *[lambda: FeedForward(16, 24)] * 2)
    return theirs, Decoder(17, 16, ours), llama3(4, 2)


def tied_llama():
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True)
    ours = blocks(lambda: Attention(16, 4, 2, 4, turn_neighbours), *[lambda: FeedForward(16, 24)] * 2)
    return transformers.LlamaForCausalLM(config), tied(Decoder(17, 16, ours)), llama3(4, 2, tied=True)


def gpt():
    config = transformers.GPT2Config(vocab_size=17, n_embd=16, n_layer=2, n_head=4, n_positions=12)
    layers = [lambda: PlainFeedForward(16, 64)] * 2
    ours = blocks(lambda: Attention(16, 4, 4, 4, None, bias=True), *layers, norm=nn.LayerNorm)
    return transformers.GPT2LMHeadModel(config), tied(Decoder(17, 16, ours, nn.LayerNorm, positions=12)), gpt2()


def qwen():
    config = transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8)
    ours = blocks(lambda: Attention(16, 4, 2, 8, turn_halves, qk_norm=True), *[lambda: FeedForward(16, 24)] * 2)
    return transformers.Qwen3ForCausalLM(config), Decoder(17, 16, ours), qwen3()


def qwen_with_experts():
    config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4, num_key_value_heads=2, head_dim=8)
    ours = blocks(lambda: Attention(16, 4, 2, 8, turn_halves, qk_norm=True), *[lambda: MoE(16, 8, 4, 2)] * 2)
    return transformers.Qwen3MoeForCausalLM(config), Decoder(17, 16, ours), qwen3(experts="fused")


def deepseek_v3():
    experts = {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    config = transformers.DeepseekV3Config(**SIZES, **experts, **LATENT, num_key_value_heads=4)
    layers = [lambda: FeedForward(16, 24), lambda: MoE(16, 8, 4, 2, with_bias=True)]
    ours = blocks(lambda: LatentAttention(16, 4, 8, 6, 4, 5), *layers)
    return transformers.DeepseekV3ForCausalLM(config), Decoder(17, 16, ours), deepseek(experts="fused")


def tied(model):
    model.output.weight = model.tok_embeddings.weight
    return model


FAMILIES = [llama, tied_llama, gpt, qwen, qwen_with_experts, deepseek_v3]


def randomize(model, seed):
    """Fills all of a model, norms and biases too: what is swapped is to show."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator) * 0.3
        tensor.copy_(noise + 1 if "norm" in name and name.endswith("weight") else noise)


def logits(model, ids):
    out = model(ids)
    return out if isinstance(out, torch.Tensor) else out.logits


def assert_same_logits(theirs, ours):
    ids = torch.randint(0, 17, (3, 9), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = logits(theirs.eval(), ids)
        assert expected.std() > 0.1
        torch.testing.assert_close(logits(ours, ids), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
def test_the_logits_are_the_same_both_ways(tmp_path, make):
    theirs, ours, rules = make()
    randomize(theirs, 1)
    checkpoint.save(tmp_path / "theirs", {"model": theirs})
    checkpoint.load(tmp_path / "theirs", {"model": ours}, rearrange=rules)
    assert_same_logits(theirs, ours)
    checkpoint.save(tmp_path / "ours", {"model": ours})
    back, *_ = make()
    randomize(back, 2)
    checkpoint.load(tmp_path / "ours", {"model": back}, rearrange=inverse(rules))
    assert {name: tensor.tolist() for name, tensor in back.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in theirs.state_dict().items()
    }


@pytest.mark.parametrize(("make", "rules"), [(qwen_with_experts, qwen3()), (deepseek_v3, deepseek())])
def test_experts_with_tensors_of_their_own(tmp_path, make, rules):
    theirs, ours, _ = make()
    randomize(theirs, 1)
    published = {}
    for name, tensor in theirs.state_dict().items():
        found = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name)
        if found is None:
            published[name] = tensor
            continue
        for expert, each in enumerate(tensor):
            halves = zip(("gate", "up"), each.chunk(2), strict=True) if found[2] == "gate_up" else [("down", each)]
            published |= {f"{found[1]}.{expert}.{which}_proj.weight": half.clone() for which, half in halves}
    checkpoint.save(tmp_path / "theirs", {"model": published})
    checkpoint.load(tmp_path / "theirs", {"model": ours}, rearrange=rules)
    assert_same_logits(theirs, ours)


@pytest.mark.parametrize("make", [tied_llama, gpt])
def test_an_output_layer_that_is_the_embedding_and_is_not_stored(tmp_path, make):
    theirs, ours, rules = make()
    randomize(theirs, 1)
    published = {name: tensor for name, tensor in theirs.state_dict().items() if name != "lm_head.weight"}
    checkpoint.save(tmp_path / "theirs", {"model": published})
    checkpoint.load(tmp_path / "theirs", {"model": ours}, rearrange=rules)
    assert_same_logits(theirs, ours)


@pytest.mark.parametrize(
    ("make", "rules"),
    [
        (llama, None),
        (tied_llama, None),
        (gpt, None),
        (qwen, None),
        (qwen_with_experts, qwen3()),
        (deepseek_v3, deepseek()),
    ],
)
def test_what_transformers_writes_itself(tmp_path, make, rules):
    """Files as they are published: in safetensors, experts by themselves, tied output layers under one name."""
    theirs, ours, own = make()
    randomize(theirs, 1)
    theirs.save_pretrained(tmp_path / "theirs")
    checkpoint.load(tmp_path / "theirs", {"model": ours}, rearrange=rules or own, rename={"^": "model."})
    assert_same_logits(theirs, ours)
