"""Reads Hugging Face's folders of quantized weights as the dequantized weights, and hides codes and scales.

    config.json                            says how: "quantization_config"
    X [R, C] float8, X_scale_inv           the weight X, where "quant_method" is "fp8" with a "weight_block_size"
    X_blocks [E, R, C/32, 16], X_scales    the weight X [E, C, R], as transformers has it, for "mxfp4"

What is quantized in another way is refused by its name, and so are codes and scales without a config.json: read as
weights, codes are wrong by their scales.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import xxhash

from shardopt.checkpoint.format.constants import DTYPES, MANIFEST_LIMIT_BYTES, Dtype, damaged, load_json
from shardopt.checkpoint.format.manifest import DataFile, StoredLayout, StoredTensor, StoredTensors
from shardopt.checkpoint.sources.dequantized import BYTES_PER_SCALE, FP4_PER_SCALE, DequantizedFile, Quantized
from shardopt.checkpoint.sources.hugging_face import HuggingFaceSource
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.sources.reading.open_file import OpenFile
from shardopt.checkpoint.sources.source import Source
from shardopt.checkpoint.storage import Storage, wrap_os_errors
from shardopt.errors import FormatError, Problem

_CONFIG_NAME = "config.json"
_SCALE_DTYPES = {
    "_scale_inv": ("float32", "bfloat16", "float16", "float8_e8m0fnu"),
    "_scales": ("uint8", "float8_e8m0fnu"),
}
_UNQUANTIZED = (
    "take the weights that are published without quantization, or make them with transformers: from_pretrained(...), "
    "then dequantize() and save_pretrained(...)"
)


def with_weights(source: HuggingFaceSource) -> Source:
    """Returns a source of the weights that a Hugging Face folder stores as codes and scales, if it stores any so.

    Raises:
        CorruptionError: config.json is no JSON object, or codes and scales do not fit one another.
        FormatError: weights are quantized in a way that is not known, or codes or scales are missing.
    """
    config, where = _read_config(source.storage), f"{source.storage.url}/{_CONFIG_NAME}"
    quantization = _quantization_in(config)
    if quantization is None:
        _refuse_codes_alone(source)
        return source
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    block: tuple[int, int] | None = None
    if method == "fp8":
        sizes = quantization.get("weight_block_size")
        if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and 0 < n < 2**31 for n in sizes):
            raise _unknown(where, f"fp8 with the weight_block_size {str(sizes)[:80]}")
        block = sizes[0], sizes[1]
    elif method != "mxfp4":
        raise _unknown(where, f"quantization_config of {_name_of(quantization)}")
    weights = _weights_in(source, _dtype_of(config, where), block)
    return DequantizedSource(source, weights) if weights else source


class DequantizedSource(Source):
    """The weights that a folder's codes and scales encode, and all other tensors unchanged.

    Args:
        stored: the folder with codes and scales.
        weights: by key.
    """

    format_name = HuggingFaceSource.format_name

    def __init__(self, stored: HuggingFaceSource, weights: Mapping[str, Quantized]) -> None:
        self.storage, self.url = stored.storage, stored.url
        self._stored, manifest, self.unsummed_bytes = stored, stored.manifest, stored.unsummed_bytes
        self.read_through = frozenset(key for each in weights.values() for key in (each.codes, each.scales))
        by_file: defaultdict[int, dict[str, Quantized]] = defaultdict(dict)
        for key, weight in weights.items():
            by_file[min(manifest.tensors[weight.codes].layout.files)][key] = weight
        reader = CheckpointReader(stored)
        self._files = [
            DequantizedFile(stored.storage, manifest.files[number].name, reader, each)
            for number, each in by_file.items()
        ]
        tensors = StoredTensors(
            (key, tensor) for key, tensor in manifest.tensors.items() if key not in self.read_through
        )
        for number, each in enumerate(by_file.values(), len(manifest.files)):
            for key, (_, _, dtype, sizes, order, _) in each.items():
                shape = tuple(sizes[order.index(dim)] for dim in range(len(sizes)))
                tensors[key] = StoredTensor((key,), dtype, StoredLayout.in_one_box(shape, number))
        self.digest = xxhash.xxh3_64_hexdigest(f"{stored.digest}\0{sorted(weights.items())}".encode())
        files = tuple(DataFile(file.name, 0, "") for file in self._files)
        self.manifest = replace(manifest, save_id=self.digest, files=(*manifest.files, *files), tensors=tensors)

    def open_file(self, number: int, keys: Collection[str] | None = None) -> OpenFile:
        own = number - len(self._stored.manifest.files)
        return self._stored.open_file(number) if own < 0 else self._files[own]


def _read_config(storage: Storage) -> dict[str, Any]:
    where = f"{storage.url}/{_CONFIG_NAME}"
    with wrap_os_errors(f"read {where}"):
        try:
            nbytes = storage.size(_CONFIG_NAME)
            if nbytes > MANIFEST_LIMIT_BYTES:
                raise damaged(where, f"{nbytes} bytes, more than the limit of {MANIFEST_LIMIT_BYTES}")
            return load_json(storage.read(_CONFIG_NAME, 0, nbytes), where)
        except FileNotFoundError:
            return {}


def _quantization_in(config: Mapping[str, Any]) -> Any:
    """Returns how weights are quantized; None if they are not."""
    for part in (config, config.get("text_config")):
        for name in ("quantization_config", "compression_config"):
            if isinstance(part, dict) and part.get(name) is not None:
                return part[name]
    return None


def _name_of(quantization: Any) -> str:
    if not isinstance(quantization, dict):
        return f"type {type(quantization).__name__}"
    if quantization.get("load_in_8bit") or quantization.get("load_in_4bit"):
        return "bitsandbytes"
    return str(quantization.get("quant_method", "a method without a name"))[:80]


def _dtype_of(config: Mapping[str, Any], where: str) -> Dtype:
    """Returns the dtype of the offered weights: the config's dtype of the model, else bfloat16."""
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, dict) else [config]
    names = [part[name] for part in parts for name in ("dtype", "torch_dtype") if part.get(name) is not None]
    name = names[0].removeprefix("torch.") if names and isinstance(names[0], str) else names[0] if names else "bfloat16"
    if name not in ("float64", "float32", "bfloat16", "float16"):
        raise damaged(where, f"the dtype {str(name)[:80]}")
    return DTYPES[name]


def _weights_in(source: HuggingFaceSource, dtype: Dtype, block: tuple[int, int] | None) -> dict[str, Quantized]:
    """Returns the weights that codes and scales encode, by key.

    Args:
        block: the codes under one scale of float8; None for mxfp4.

    Raises:
        CorruptionError, FormatError: as for `with_weights`.
    """
    tensors = source.manifest.tensors
    of_codes, of_scales = ("", "_scale_inv") if block else ("_blocks", "_scales")
    dtype_of_codes = "float8_e4m3fn" if block else "uint8"

    def are_codes(key: str) -> bool:
        return key.endswith(of_codes) and key in tensors and tensors[key].dtype.name == dtype_of_codes

    weights: dict[str, Quantized] = {}
    lacking: list[Problem] = []
    for key, tensor in tensors.items():
        if key.endswith(of_scales) and not are_codes(f"{key.removesuffix(of_scales)}{of_codes}"):
            codes = f"codes of {dtype_of_codes} under {key.removesuffix(of_scales)}{of_codes}"
            lacking.append(_lacking(source, key, "only scales", codes))
        if not are_codes(key):
            continue
        name = key.removesuffix(of_codes)
        scales = tensors.get(f"{name}{of_scales}")
        if scales is None:
            lacking.append(_lacking(source, key, "only codes", f"their scales under {name}{of_scales}"))
            continue
        made = _float8(tensor, scales, block) if block else _mxfp4(tensor, scales)
        if made is None or scales.dtype.name not in _SCALE_DTYPES[of_scales] or (name != key and name in tensors):
            found = f"scales of {_described(scales)} for codes of {_described(tensor)}"
            raise damaged(f"{source.url}: {name}", found)
        weights[name] = Quantized(key, f"{name}{of_scales}", dtype, *made, block)
    if lacking:
        raise FormatError("quantized weights are not complete", lacking)
    return weights


_SizesAndOrder = tuple[tuple[int, ...], tuple[int, ...]]


def _float8(codes: StoredTensor, scales: StoredTensor, block: tuple[int, int]) -> _SizesAndOrder | None:
    """Returns the sizes of the weight and the order of its dimensions; None if codes and scales do not fit."""
    shape = codes.layout.shape
    blocks = tuple(-(-size // of) for size, of in zip(shape[-2:], block, strict=False))
    fits = len(shape) >= 2 and scales.layout.shape == (*shape[:-2], *blocks)
    return (shape, tuple(range(len(shape)))) if fits else None


def _mxfp4(codes: StoredTensor, scales: StoredTensor) -> _SizesAndOrder | None:
    """Like `_float8`, for weights that are stored transposed."""
    shape = codes.layout.shape
    fits = len(shape) == 4 and shape[3] == BYTES_PER_SCALE and scales.layout.shape == shape[:3]
    return ((*shape[:2], shape[2] * FP4_PER_SCALE), (0, 2, 1)) if fits else None


def _described(tensor: StoredTensor) -> str:
    return f"{tensor.dtype.name} {list(tensor.layout.shape)}"


def _lacking(source: Source, key: str, found: str, required: str) -> Problem:
    return Problem(f"{source.url}: {key}", found, required, "give the folder with all its files, as it was published")


def _refuse_codes_alone(source: HuggingFaceSource) -> None:
    """Raises FormatError for codes and scales without a config that says how they encode weights."""
    tensors = source.manifest.tensors
    for key, tensor in tensors.items():
        name = key.removesuffix("_blocks")
        scales = [f"{name}_scales"] if name != key and tensor.dtype.name == "uint8" else []
        scales += [f"{key}_scale_inv", f"{key}_scale"] if tensor.dtype.name.startswith("float8") else []
        for each in scales:
            if each in tensors:
                found = f"codes, whose scales are {each}, and no quantization_config"
                required = f"a {_CONFIG_NAME} beside the files that says how they make weights"
                remedy = f"put the model's {_CONFIG_NAME} there; codes themselves are read by safetensors' safe_open"
                problem = Problem(f"{source.url}: {key}", found, required, remedy)
                raise FormatError("weights are quantized in a way that is not read here", [problem])


def _unknown(where: str, found: str) -> FormatError:
    problem = Problem(where, found, "fp8 with a weight_block_size of two numbers, mxfp4, or none", _UNQUANTIZED)
    return FormatError("weights are quantized in a way that is not read here", [problem])
