"""Weights that are stored as codes and scales are read as weights; what is quantized otherwise is refused by name."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

from shardopt import checkpoint
from shardopt.checkpoint.rearrange import Rule, families
from shardopt.errors import CorruptionError, FormatError, ShardoptError
from shardopt.sharding.box import Box
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}


def numbers(seed):
    return torch.Generator().manual_seed(seed)


def float8(*shape, block=(128, 128), seed=0):
    """Codes and scales as DeepSeek publishes them."""
    # Those beyond the largest would be nan with torch up to 2.12.
    codes = torch.randn(*shape, generator=numbers(seed)).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
    cut = [-(-size // of) for size, of in zip(shape[-2:], block, strict=True)]
    return codes, torch.rand(*shape[:-2], *cut, generator=numbers(seed + 1)).mul_(1e-3).add_(1e-5)


def mxfp4(experts, rows, groups, seed=0):
    """Codes and scales as gpt-oss has them."""
    codes = torch.randint(0, 256, (experts, rows, groups, 16), dtype=torch.uint8, generator=numbers(seed))
    return codes, torch.randint(100, 140, (experts, rows, groups), dtype=torch.uint8, generator=numbers(seed + 1))


def write(path, tensors, quantization=None, files=1, **config):
    """A folder in Hugging Face's layout, with codes and scales in different files where there are several."""
    path.mkdir(exist_ok=True)
    keys = sorted(tensors)
    names = {key: f"model-{1 + i % files:05d}-of-{files:05d}.safetensors" for i, key in enumerate(keys)}
    for name in set(names.values()):
        save_file({key: tensors[key].contiguous() for key in keys if names[key] == name}, path / name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    if quantization is not None:
        config["quantization_config"] = quantization
    (path / "config.json").write_text(json.dumps(config))
    return path


def by_peer(path, key, shape, dtype):
    """What torch's own reader makes of it."""
    state = {key: torch.empty(shape, dtype=dtype)}
    dcp.load(state, storage_reader=QuantizedHuggingFaceStorageReader(str(path), target_dtype=dtype), no_dist=True)
    return state[key]


def mxfp4_by_peer(path, codes, scales):
    """What torch's own reader makes of codes and scales; its `load` itself fills a part of the weight alone."""
    sizes = [*codes.shape[:2], 32 * codes.shape[2]]
    request = SimpleNamespace(storage_offsets=[0, 0, 0], lengths=sizes)
    peer = QuantizedHuggingFaceStorageReader(str(path), target_dtype=torch.bfloat16)
    return peer._dequantize_tensor_mxfp4(codes, scales, request, 0, 0)


@pytest.mark.parametrize("shape", [(256, 384), (300, 130), (1, 1), (129, 700)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_float8_has_the_values_that_the_peer_gives(tmp_path, shape, dtype):
    codes, scales = float8(*shape)
    config = {"torch_dtype": str(dtype).removeprefix("torch.")}
    write(tmp_path, {"m.weight": codes, "m.weight_scale_inv": scales, "m.norm": torch.ones(3)}, FP8, files=2, **config)
    with checkpoint.open(tmp_path) as reader:
        assert reader.keys() == ["m.norm", "m.weight"]
        read = reader.read("m.weight")
    assert read.dtype == dtype and torch.equal(read, by_peer(tmp_path, "m.weight", shape, dtype))
    assert checkpoint.verify(tmp_path).ok


def test_any_box_of_float8(tmp_path):
    codes, scales = float8(3, 300, 260, block=(64, 32))
    quantization = {**FP8, "weight_block_size": [64, 32]}
    write(tmp_path, {"w": codes, "w_scale_inv": scales}, quantization, dtype="float32")
    expanded = scales.repeat_interleave(64, 1).repeat_interleave(32, 2)[:, :300, :260]
    wanted = codes.float() * expanded
    with checkpoint.open(tmp_path) as reader:
        for seed in range(20):
            offsets = tuple(int(torch.randint(0, size, (), generator=numbers(seed))) for size in wanted.shape)
            sizes = tuple(
                int(torch.randint(0, size - begin + 1, (), generator=numbers(seed + 50)))
                for begin, size in zip(offsets, wanted.shape, strict=True)
            )
            here = wanted[tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))]
            assert torch.equal(reader.read("w", Box(offsets, sizes)), here), (offsets, sizes)


def test_large_float8_is_read_in_several_batches(tmp_path):
    codes, scales = float8(1500, 3001)
    write(tmp_path, {"m.weight": codes, "m.weight_scale_inv": scales}, FP8)
    wanted = by_peer(tmp_path, "m.weight", codes.shape, torch.bfloat16)
    app = {"m": {"weight": torch.zeros(1500, 3001)}}
    checkpoint.load(tmp_path, app, strict=checkpoint.Strictness(dtype="cast"), transactional=True)
    assert torch.equal(app["m"]["weight"], wanted.float())


def test_mxfp4_is_the_peers_transposed_as_the_model_has_it(tmp_path):
    codes, scales = mxfp4(3, 10, 4)
    write(tmp_path, {"e.down_proj_blocks": codes, "e.down_proj_scales": scales, "e.bias": torch.ones(2)}, MXFP4)
    wanted = mxfp4_by_peer(tmp_path, codes, scales).transpose(1, 2)
    with checkpoint.open(tmp_path) as reader:
        assert reader.keys() == ["e.bias", "e.down_proj"] and reader.info("e.down_proj").shape == (3, 128, 10)
        assert torch.equal(reader.read("e.down_proj"), wanted)
        assert torch.equal(reader.read("e.down_proj", Box((1, 30, 2), (2, 35, 7))), wanted[1:3, 30:65, 2:9])
    assert checkpoint.verify(tmp_path).ok
    out_in = {"w": torch.zeros(3, 10, 128, dtype=torch.bfloat16)}
    checkpoint.load(tmp_path, out_in, rearrange=[Rule("e.down_proj", "w", "e i o -> e o i")], skip="bias")
    assert torch.equal(out_in["w"], wanted.transpose(1, 2))


def test_the_values_of_mxfp4_are_those_of_its_table(tmp_path):
    codes = torch.tensor([[[[lower | (15 - lower) << 4 for lower in range(16)]]]], dtype=torch.uint8)
    write(tmp_path, {"w_blocks": codes, "w_scales": torch.tensor([[[128]]], dtype=torch.uint8)}, MXFP4)
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    with checkpoint.open(tmp_path) as reader:
        read = reader.read("w").flatten().tolist()
    assert read == [2 * table[i] for lower in range(16) for i in (lower, 15 - lower)]


def test_rules_of_a_family_work_over_codes(tmp_path):
    tensors, wanted = {}, []
    for expert in range(3):
        codes, scales = float8(130, 200, seed=expert)
        name = f"model.layers.0.mlp.experts.{expert}.gate_proj.weight"
        tensors |= {name: codes, f"{name}_scale_inv": scales}
    write(tmp_path, tensors, FP8, files=3)
    wanted = [by_peer(tmp_path, key, (130, 200), torch.bfloat16) for key in sorted(tensors) if key.endswith("weight")]
    app = {"layers": {"0": {"moe": {"experts": {"w1": torch.zeros(3, 130, 200, dtype=torch.bfloat16)}}}}}
    checkpoint.load(tmp_path, app, rearrange=families.deepseek())
    assert torch.equal(app["layers"]["0"]["moe"]["experts"]["w1"], torch.stack(wanted))


def test_a_conversion_writes_the_weights(tmp_path):
    codes, scales = float8(300, 130)
    write(tmp_path / "in", {"m.weight": codes, "m.weight_scale_inv": scales}, FP8)
    checkpoint.convert(tmp_path / "in", tmp_path / "out", "huggingface", check=True)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == {"m.weight"}
    assert torch.equal(written["m.weight"], by_peer(tmp_path / "in", "m.weight", (300, 130), torch.bfloat16))


def load_shards(path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (3,))
    app = {
        key: distribute_tensor(torch.zeros(shape, dtype=torch.bfloat16), mesh, [Shard(dim)])
        for key, shape, dim in [("a", (300, 200), 0), ("b", (150, 301), 1), ("e", (2, 64, 7), 1)]
    }
    checkpoint.load(path, app)
    return {key: tensor.full_tensor() for key, tensor in app.items()}


@pytest.mark.exhaustive
def test_shards_that_cross_blocks(tmp_path):
    a, b = float8(300, 200), float8(150, 301, seed=7)
    tensors = {"a": a[0], "a_scale_inv": a[1], "b": b[0], "b_scale_inv": b[1], "e": torch.zeros(2, 64, 7).bfloat16()}
    write(tmp_path, tensors, FP8, files=2)
    with checkpoint.open(tmp_path) as reader:
        wanted = {key: reader.read(key) for key in reader.keys()}  # noqa: SIM118  # not a dict
    for result in run_ranks(3, load_shards, str(tmp_path)):
        assert all(torch.equal(result[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq"}, "awq"),
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "fp8"}, "fp8 with the weight_block_size None"),
        ({"quant_method": ["fp8"]}, "fp8"),
        ("fp8", "type str"),
        ({**FP8, "weight_block_size": [128, 0]}, r"\[128, 0\]"),
    ],
)
def test_what_is_quantized_otherwise_is_refused_by_name(tmp_path, quantization, name):
    codes, scales = float8(10, 10)
    write(tmp_path, {"m.weight": codes, "m.weight_scale": scales}, quantization)
    for call in (
        lambda: checkpoint.open(tmp_path),
        lambda: checkpoint.open(tmp_path / "model-00001-of-00001.safetensors"),
        lambda: checkpoint.load(tmp_path, {"m": {"weight": torch.zeros(10, 10)}}, strict=False),
        lambda: checkpoint.convert(tmp_path, tmp_path / "out", "torch"),
    ):
        with pytest.raises(FormatError, match=name):
            call()


@pytest.mark.parametrize("tensors", [("w", "w_scale_inv"), ("w", "w_scale"), ("w_blocks", "w_scales")])
def test_codes_and_scales_without_a_config_are_refused(tmp_path, tensors):
    codes, scales = mxfp4(1, 2, 1) if "_blocks" in tensors[0] else float8(10, 10)
    write(tmp_path, {tensors[0]: codes, tensors[1]: scales})
    with pytest.raises(FormatError, match=f"{tensors[1]}, and no quantization_config"):
        checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("kept", "quantization", "found"),
    [
        ("w", FP8, "w: found only codes; required their scales under w_scale_inv"),
        ("w_scale_inv", FP8, "w_scale_inv: found only scales; required codes of float8_e4m3fn under w"),
        ("w_blocks", MXFP4, "w_blocks: found only codes; required their scales under w_scales"),
        ("w_scales", MXFP4, "w_scales: found only scales; required codes of uint8 under w_blocks"),
    ],
)
def test_codes_or_scales_that_are_missing_are_named(tmp_path, kept, quantization, found):
    codes, scales = mxfp4(1, 2, 1) if quantization is MXFP4 else float8(10, 10)
    write(tmp_path, {kept: scales if "scale" in kept else codes}, quantization)
    with pytest.raises(FormatError, match=found):
        checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "quantization"),
    [
        ({"w": float8(10, 10)[0], "w_scale_inv": torch.ones(2, 1)}, FP8),
        ({"w": float8(10, 10)[0], "w_scale_inv": torch.ones(1, 1, dtype=torch.int32)}, FP8),
        ({"w": float8(10, 10)[0][0], "w_scale_inv": torch.ones(1)}, FP8),
        ({"w_blocks": mxfp4(1, 2, 1)[0][..., :8], "w_scales": mxfp4(1, 2, 1)[1]}, MXFP4),
        ({"w_blocks": mxfp4(1, 2, 1)[0], "w_scales": mxfp4(1, 2, 2)[1]}, MXFP4),
        ({"w_blocks": mxfp4(1, 2, 1)[0], "w_scales": mxfp4(1, 2, 1)[1], "w": torch.ones(1)}, MXFP4),
    ],
)
def test_scales_that_do_not_fit_their_codes_are_damage(tmp_path, tensors, quantization):
    with pytest.raises(CorruptionError, match="w: found scales of"):
        checkpoint.open(write(tmp_path, tensors, quantization))


@pytest.mark.parametrize("config", [b"", b"[]", b"{", b'{"quantization_config": {"quant_method": "fp8"}, "dtype": 3}'])
def test_a_config_that_is_none(tmp_path, config):
    write(tmp_path, {"w": torch.ones(2)})
    (tmp_path / "config.json").write_bytes(config)
    with pytest.raises(ShardoptError, match=r"config\.json"):
        checkpoint.open(tmp_path)


def test_an_export_beside_the_config_of_a_quantized_model_is_read_as_it_is(tmp_path):
    write(tmp_path, {"w": torch.ones(2, 2)}, FP8)
    with checkpoint.open(tmp_path) as reader:
        assert torch.equal(reader.read("w"), torch.ones(2, 2))
