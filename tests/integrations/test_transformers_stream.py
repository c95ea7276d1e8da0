"""Models of transformers that follow trainers under `fully_shard`, as docs/streams_into.md has it."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardopt import checkpoint
from shardopt.errors import MismatchError
from tests.harness import run_ranks
from tests.support.streams import full_load, same_bits

transformers = pytest.importorskip("transformers", reason="transformers is not installed (launch/test_integrations.sh)")

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own
STEPS = (1, 2, 3)
PROMPT = torch.arange(10)[None]


def config_of(tied):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    return transformers.LlamaConfig(vocab_size=64, num_hidden_layers=2, tie_word_embeddings=tied, **sizes, **ends)


def publish(root, tied, dtype):
    """Trains within a module that has the model; returns the weights of each step under the names of transformers."""
    torch.manual_seed(0)
    trainer = torch.nn.ModuleDict({"policy": transformers.LlamaForCausalLM(config_of(tied))})
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in trainer["policy"].model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(trainer["policy"], mesh=mesh)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-5)
    published = []
    options = {"rename": {r"^policy\.": ""}, "dtype": dtype, "keep": None, "durable": False}
    with checkpoint.Publisher(root, **options) as publisher:
        for step in STEPS:
            ids = torch.randint(3, 64, (2, 16))
            trainer["policy"](input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            publisher.publish(step, trainer)
            whole = {name: each.full_tensor() for name, each in trainer["policy"].state_dict().items()}
            published.append({name: each.detach().to(dtype or each.dtype).clone() for name, each in whole.items()})
    return published if dist.get_rank() == 0 else None


def made(how, config, folder):
    """A sampler's model, made in one of the ways in which programs make theirs, before any weights are there."""
    if how == "from_config":
        return transformers.AutoModelForCausalLM.from_config(config)
    if how == "in inference mode":
        with torch.inference_mode():
            return transformers.AutoModelForCausalLM.from_config(config)
    if how == "on meta":
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        model.to_empty(device="cpu")
        model.init_weights()
        return model
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


WAYS = [
    (None, "from_config"),
    (torch.bfloat16, "from_pretrained"),
    (torch.bfloat16, "in inference mode"),
    (torch.bfloat16, "on meta"),
]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("dtype", "how"), WAYS)
def test_a_sampler_follows_and_generates_as_a_model_that_was_loaded(tmp_path, tied, dtype, how):
    root = tmp_path / "weights"
    expected = run_ranks(2, publish, str(root), tied, dtype, deadline_seconds=120.0)[0]
    config = config_of(tied)
    config.dtype = dtype or torch.float32
    model = made(how, config, tmp_path / "pretrained").eval()
    assert model.lm_head.weight.is_inference() == (how == "in inference mode")
    assert model.dtype == (dtype or torch.float32)
    follower = checkpoint.Follower(root, model)
    for step, weights in zip(STEPS, expected, strict=True):
        report = follower.update(step)
        assert dtype is None or (report.whole < report.parts) == (step > 1)  # in bf16 few elements change
        assert same_bits(model.state_dict(), weights)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        loaded = transformers.AutoModelForCausalLM.from_config(config).eval()
        loaded.load_state_dict(full_load(report.url, loaded))
        with follower.serving() as serving, torch.inference_mode():
            assert serving == step
            assert torch.equal(model(PROMPT).logits, loaded(PROMPT).logits)
            ours, theirs = (each.generate(PROMPT, max_new_tokens=8, do_sample=False) for each in (model, loaded))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_becomes_a_folder_that_from_pretrained_reads(tmp_path, tied):
    root, folder = tmp_path / "weights", tmp_path / "folder"
    expected = run_ranks(2, publish, str(root), tied, torch.bfloat16, deadline_seconds=120.0)[0]
    steps = checkpoint.Manager(root)
    assert steps.steps() == [*STEPS]
    for step, weights in zip(STEPS, expected, strict=True):
        checkpoint.convert(steps.path(step), folder / str(step), to="huggingface")
        config_of(tied).save_pretrained(folder / str(step))
        model, told = transformers.AutoModelForCausalLM.from_pretrained(
            folder / str(step), dtype="auto", output_loading_info=True
        )
        assert not any(told.values()) and same_bits(model.state_dict(), weights)


def test_a_model_without_memory_is_refused_before_anything_changes(tmp_path):
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config_of(tied=True))
    with checkpoint.Publisher(tmp_path, durable=False) as publisher:
        publisher.publish(1, transformers.LlamaForCausalLM(config_of(tied=True)))
    follower = checkpoint.Follower(tmp_path, model)
    with pytest.raises(MismatchError, match=r"a tensor on the meta device; .*to_empty"):
        follower.update()
