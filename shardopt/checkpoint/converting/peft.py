"""Converts adapters between checkpoints and PEFT's folders (`adapter_model.safetensors`, `adapter_config.json`).

model.layers.0.q_proj.weight                                      in a Hugging Face folder
base_model.model.model.layers.0.q_proj.base_layer.weight          the same in a model of PEFT's
base_model.model.model.layers.0.q_proj.lora_A.weight              in PEFT's folder
base_model.model.model.layers.0.q_proj.lora_A.default.weight      the same in a model of PEFT's
base_model.model.lm_head.weight                                   a layer trained whole (modules_to_save), in its folder
base_model.model.lm_head.modules_to_save.default.weight           the same in a model of PEFT's
base_model.model.lm_head.original_module.weight                   what it was before, in a model of PEFT's
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from shardopt.checkpoint.converting.choosing import ChosenTensor
from shardopt.checkpoint.converting.out_files import write_file
from shardopt.checkpoint.converting.to_huggingface import SafetensorsFile
from shardopt.checkpoint.format.constants import Dtype
from shardopt.checkpoint.sources.open import open as open_checkpoint
from shardopt.checkpoint.sources.reader import CheckpointReader
from shardopt.checkpoint.storage import storage_of, wrap_os_errors
from shardopt.errors import CheckpointExistsError, MismatchError, OptionError, Problem
from shardopt.sharding.box import whole
from shardopt.state.names import plain_name

TENSORS_NAME, CONFIG_NAME = "adapter_model.safetensors", "adapter_config.json"

_SAVED_WHOLE = "modules_to_save"
_PREFIX = "base_model.model."  # of PEFT's keys, whatever the model
_PART = re.compile(r"(?P<module>.+)\.(?P<part>lora_[AB])(\.(?P<adapter>[^.]+(?=\.)))?(\.weight)?")
# Layers that are trained whole, beside the adapters; and what other kinds of adapters have.
_WHOLE = re.compile(r"(?P<module>.+)\.(?P<part>modules_to_save)\.(?P<adapter>[^.]+)\.(?P<name>.+)")
_UNKNOWN = re.compile(r".+\.(lora_(?![AB]\b)\w+|trainable_tokens_\w+)\b.*")


class _Tensor(NamedTuple):
    """A tensor of an adapter: its key in the checkpoint, its module and part ("lora_A"), its dtype and shape."""

    stored: str
    module: str
    part: str
    dtype: Dtype
    shape: tuple[int, ...]


def peft_rename(model: torch.nn.Module, *, key: str = "model", adapter: str = "default") -> dict[str, str]:
    """Returns rules for `load(rename=)` that give stored weights their names in a PEFT model. Local.

    They are for the folder of the base model, and for a folder of PEFT's that has its adapter:

        app = {"model": get_peft_model(base, LoraConfig(...))}
        rename = checkpoint.peft_rename(app["model"])
        checkpoint.load("hf-folder", app, rename=rename, strict=checkpoint.Strictness(missing=re.compile("lora_")))
        checkpoint.load("peft-folder", app, rename=rename, select="lora_")

    Args:
        model: a model that PEFT has put adapters into, sharded or not. Only its names are looked at.
        key: the key of the model in the app.
        adapter: the name of the adapter.

    Raises:
        OptionError: the model has no module with that adapter.
    """
    names = [plain_name(name) for name, _ in model.named_parameters(remove_duplicate=False)]
    part = re.compile(rf"(.+)\.lora_[AB]\.{re.escape(adapter)}\.weight")
    modules = {found[1].removeprefix(_PREFIX): None for name in names if (found := part.fullmatch(name))}
    if not modules:
        required = f"parameters named ….lora_A.{adapter}.weight, as PEFT makes them"
        problem = Problem("model", "none", required, "pass what get_peft_model returns, and adapter= as it was named")
        raise OptionError("there is no adapter in the model", [problem], code="cannot-convert")
    root, within = f"{key}.{_PREFIX}", "|".join(map(re.escape, modules))
    found_whole = (_WHOLE.fullmatch(name) for name in names)
    whole_modules = {found["module"]: None for found in found_whole if found and found["adapter"] == adapter}
    trained, before = _rules_of_whole(key, adapter, whole_modules)
    return {
        **trained,
        rf"^({re.escape(_PREFIX)})?": root,
        rf"^({re.escape(root)}(?:{within}))\.(weight|bias)$": r"\1.base_layer.\2",
        r"\.(lora_[AB])\.weight$": rf".\1.{adapter}.weight",
        **before,
    }


def _rules_of_whole(key: str, adapter: str, modules: Collection[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns rules for layers that are trained whole: for PEFT's folder, as trained; for the base's, as before."""
    if not modules:
        return {}, {}
    names = "|".join(map(re.escape, modules))
    tail = r"\.(?!(?:modules_to_save|original_module)\.)"
    trained = {rf"^({names}){tail}": rf"\1.modules_to_save.{adapter}."}
    return trained, {rf"^({re.escape(key)}\.(?:{names})){tail}": r"\1.original_module."}


def export_peft(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    config: Mapping[str, Any],
    *,
    model: str = "model",
    adapter: str | None = None,
    base_root: str | os.PathLike[str] | None = None,
) -> None:
    """Writes the low-rank adapters of a checkpoint as a folder for PEFT's `from_pretrained`. Local.

    They are the tensors of the model whose names have a part `lora_A` or `lora_B`: `layers.0.q_proj.lora_A.weight`, or
    as PEFT's own modules have them, `base_model.model.layers.0.q_proj.lora_A.default.weight`. A [r, in], B [out, r].
    Layers that PEFT trains whole (`modules_to_save`) are written too. At most some 40 MiB are in memory.

    Args:
        src: of a committed checkpoint.
        dst: a directory without such files.
        config: entries of `adapter_config.json`; "lora_alpha" is needed. "peft_type", "r", "rank_pattern",
            "target_modules" and "modules_to_save" follow from the tensors, unless they are given.
        model: the key of the model in the app that was saved.
        adapter: the name of the adapter, where the model has several.
        base_root: as for `open`.

    Raises:
        CheckpointNotFoundError, CorruptionError, FormatError: as for `open`.
        CheckpointExistsError: there are such files at `dst`.
        MismatchError: there is no adapter, or half of one, or several, or one of another kind (DoRA, embeddings); or
            `config` lacks or contradicts what there is.
    """
    target = storage_of(dst)
    with open_checkpoint(src, base_root) as reader, wrap_os_errors(f"write {target.url}"):
        tensors = _adapter_of(reader, model, adapter)
        text = json.dumps(_config_of(tensors, config), indent=2, sort_keys=True) + "\n"
        taken = [name for name in (TENSORS_NAME, CONFIG_NAME) if target.exists(name)]
        if taken:
            problem = Problem(f"{target.url}/{taken[0]}", "a file", "none", "give another directory")
            raise CheckpointExistsError("the path is taken", [problem])
        target.make()
        written = [
            ChosenTensor(key, (key,), each.stored, each.dtype, each.shape, (whole(each.shape),))
            for key, each in tensors.items()
        ]
        write_file(target, SafetensorsFile(TENSORS_NAME, written), reader, {each.key: each.shape for each in written})
        target.publish(CONFIG_NAME, text.encode())


def _adapter_of(reader: CheckpointReader, model: str, adapter: str | None) -> dict[str, _Tensor]:
    """Returns the tensors of an adapter by their keys in PEFT's file."""
    found: dict[str, _Tensor] = {}
    adapters: set[str] = set()
    problems = []
    for stored, tensor in reader.manifest.tensors.items():
        if not stored.startswith(f"{model}."):
            continue
        name = stored.removeprefix(f"{model}.")
        match = _PART.fullmatch(name) or _WHOLE.fullmatch(name)
        if match is None:
            if _UNKNOWN.fullmatch(name):
                required = "lora_A, lora_B and modules_to_save, which this call writes"
                problems.append(Problem(stored, "another kind of adapter", required, "use PEFT's save_pretrained"))
            continue
        if adapter not in (None, match["adapter"]):
            continue
        adapters.add(match["adapter"] or "")
        module, part = match["module"].removeprefix(_PREFIX), match["part"]
        key = f"{_PREFIX}{module}.{match['name'] if part == _SAVED_WHOLE else f'{part}.weight'}"
        found[key] = _Tensor(stored, module, part, tensor.dtype, tensor.layout.shape)
    if all(each.part == _SAVED_WHOLE for each in found.values()):
        required = f"tensors named {model}.….lora_A.weight and …lora_B.weight"
        problems.append(Problem("lora_A", "none", required, "name the model by model="))
    if len(adapters) > 1:
        problems.append(Problem("adapter", ", ".join(sorted(adapters)), "one of them", "give adapter="))
    for key, each in found.items():
        other = f"{_PREFIX}{each.module}.{'lora_B' if each.part == 'lora_A' else 'lora_A'}.weight"
        if each.part != _SAVED_WHOLE and other not in found:
            problems.append(Problem(key, "without its other half", "A and B of each module", "save both"))
        if each.dtype.safetensors is None or (each.part != _SAVED_WHOLE and len(each.shape) != 2):
            form = f"{each.dtype.name} {list(each.shape)}"
            problems.append(Problem(key, form, "a matrix of a dtype that safetensors has", "convert it"))
    if problems:
        raise MismatchError("there is no adapter that could be written", problems, code="cannot-convert")
    return dict(sorted(found.items()))


def _config_of(tensors: Mapping[str, _Tensor], config: Mapping[str, Any]) -> dict[str, Any]:
    ranks = {each.module: each.shape[0] for each in tensors.values() if each.part == "lora_A"}
    usual = Counter(ranks.values()).most_common(1)[0][0]
    derived = {
        "peft_type": "LORA",
        "r": usual,
        "rank_pattern": {module: rank for module, rank in sorted(ranks.items()) if rank != usual},
        "target_modules": sorted({module.rpartition(".")[2] for module in ranks}),
    }
    if whole_layers := {each.module.rpartition(".")[2] for each in tensors.values() if each.part == _SAVED_WHOLE}:
        derived["modules_to_save"] = sorted(whole_layers)
    merged = {**derived, "bias": "none", "inference_mode": True, **config}
    problems = []
    if "lora_alpha" not in config:
        remedy = "give it: the product of A and B is scaled by lora_alpha / r"
        problems.append(Problem("lora_alpha", "nothing", "a number", remedy))
    pattern = merged["rank_pattern"] or {}
    for module, rank in ranks.items():
        if pattern.get(module, merged["r"]) != rank:
            given = pattern.get(module, merged["r"])
            problems.append(Problem(f"r of {module}", str(given), f"{rank}, as its tensors have", "leave it out"))
            break
    if problems:
        raise MismatchError("the config does not fit the adapter", problems, code="cannot-convert")
    return merged
