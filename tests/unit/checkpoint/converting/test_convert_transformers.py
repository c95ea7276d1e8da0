"""The folders that are written for Hugging Face, read by `from_pretrained` into models of random numbers."""

import pytest
import torch

from shardopt import checkpoint

transformers = pytest.importorskip("transformers", reason="transformers is not installed (launch/test_integrations.sh)")


def llama():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=12, eos_token_id=1, bos_token_id=0, **sizes)
    return transformers.LlamaForCausalLM(config)


def gpt2():
    sizes = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = transformers.GPT2Config(vocab_size=64, eos_token_id=1, bos_token_id=0, **sizes)
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("most_bytes", [5e9, 20_000])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_from_pretrained_reads_the_folder(tmp_path, make, most_bytes):
    model = make().eval()
    checkpoint.save(tmp_path / "src", {"model": model, "step": 1})
    rename = {r"^model\.": ""}
    report = checkpoint.convert(
        tmp_path / "src", tmp_path / "hf", to="huggingface", rename=rename, max_file_bytes=most_bytes
    )
    assert (report.files == 1) == (most_bytes == 5e9)
    model.config.save_pretrained(tmp_path / "hf")
    read, told = type(model).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(told.values())
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(read.eval()(ids).logits, model(ids).logits)
