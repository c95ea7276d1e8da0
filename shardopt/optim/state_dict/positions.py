"""State by position: the forms that torch's functions take, and what does not fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardopt.errors import Problem
from shardopt.param_groups import PARAM_GROUPS, PARAMS
from shardopt.sharding.view import local_tensors
from shardopt.values import decode_value, encode_value

REMEDY = "load what as_torch() of an optimizer with the same groups gave, or torch's getters with it"


def different_groups(here: Any, given: Any) -> list[Problem]:
    """Returns the problems of groups that are not as many, or not of as many parameters, as those here."""
    if not isinstance(given, list) or not all(isinstance(group, Mapping) and PARAMS in group for group in given):
        return [Problem(PARAM_GROUPS, f"a {type(given).__name__}", "a list of groups with their parameters", REMEDY)]
    if len(given) != len(here):
        return [Problem(PARAM_GROUPS, f"{len(given)} groups", f"{len(here)}", REMEDY)]
    counts = [(len(group[PARAMS]), len(own[PARAMS])) for group, own in zip(given, here, strict=True)]
    return [
        Problem(f"{PARAM_GROUPS}[{i}].{PARAMS}", f"{count} parameters", f"{own}", REMEDY)
        for i, (count, own) in enumerate(counts)
        if count != own
    ]


def to_torch(value: Any, key: str) -> Any:
    """Returns a value of state in the forms that torch flattens; see `from_torch`."""
    if isinstance(value, Mapping):
        return {name: to_torch(inner, f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, Tensor) or type(value) in (int, float):
        return value
    text = json.dumps(encode_value(value, key)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def from_torch(value: Any, live: Any) -> Any:
    """Returns a value that `to_torch` gave as it was; `live` has the kinds."""
    if isinstance(value, Mapping) and isinstance(live, Mapping):
        return {name: from_torch(inner, live.get(name)) for name, inner in value.items()}
    if isinstance(value, Tensor) and not isinstance(live, Tensor) and value.dtype == torch.uint8:
        return decode_value(json.loads(value.cpu().numpy().tobytes()))
    return value


def is_same_memory(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the state of a parameter has its tensors in the same memory, and equal plain values."""

    def places(entries: Mapping[str, Any]) -> Any:
        return {
            name: [local.data_ptr() for local in local_tensors(value)] if isinstance(value, Tensor) else value
            for name, value in entries.items()
        }

    return bool(places(one) == places(other))
