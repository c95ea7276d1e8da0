"""`shardopt export-peft`: writes the low-rank adapters of a checkpoint as a PEFT folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardopt import checkpoint
from shardopt.cli.output import Output
from shardopt.errors import OptionError, Problem


def export_peft(
    output: Output,
    *,
    src: str,
    dst: str,
    lora_alpha: float | None,
    base_model: str | None,
    config: str | None,
    model: str | None,
    adapter: str | None,
) -> int:
    """Writes the adapters of the checkpoint at `src` to the folder `dst`."""
    entries = {} if config is None else _read_config(config)
    if lora_alpha is not None:
        entries["lora_alpha"] = int(lora_alpha) if lora_alpha.is_integer() else lora_alpha
    if base_model is not None:
        entries["base_model_name_or_path"] = base_model
    checkpoint.export_peft(src, dst, entries, model=model or "model", adapter=adapter)
    output.line(f"{dst}: the adapters of {src}, for PeftModel.from_pretrained")
    output.data({"src": src, "dst": dst, "config": entries})
    return 0


def _read_config(path: str) -> dict[str, Any]:
    try:
        entries = json.loads(Path(path).read_bytes())
    except ValueError as error:
        entries = str(error)
    if not isinstance(entries, dict):
        found = entries if isinstance(entries, str) else f"a {type(entries).__name__}"
        problem = Problem("--config", found, "a JSON object", 'write one, such as {"lora_dropout": 0.1}')
        raise OptionError("invalid arguments", [problem])
    return entries
