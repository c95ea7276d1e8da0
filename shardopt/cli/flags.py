"""Rewrites errors for the shell: replaces the names of call arguments by the flags that set them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from shardopt.cli.table import Argument
from shardopt.errors import OptionError, ShardoptError


def put_flags(error: ShardoptError, arguments: Iterable[Argument]) -> None:
    """Replaces argument names in an error by the flags of the verb that made the call.

    "drop_per_rank=True" becomes "--drop-per-rank", and "skip=..." becomes "--skip ...".
    """
    flags = {flag[2:].replace("-", "_"): flag for each in arguments for flag in each.names if flag.startswith("--")}
    of_arguments = flags if isinstance(error, OptionError) else {}  # else "steps" may be a stored key
    error.problems = tuple(
        replace(
            each,
            key=of_arguments.get(each.key) or _with_flags(each.key, flags, in_key=True),
            remedy=_with_flags(each.remedy, flags),
        )
        for each in error.problems
    )


def _with_flags(text: str, flags: Mapping[str, str], in_key: bool = False) -> str:
    if in_key and not re.match(rf"({'|'.join(flags)})(=|$)", text):
        return text  # a path or a stored key
    for name, flag in flags.items():
        text = re.sub(rf"(?<![\w-]){name}=True\b", flag, text)
        text = re.sub(rf"(?<![\w-]){name}=(?=[^\s,;)])", f"{flag} ", text)
        text = re.sub(rf"(?<![\w-]){name}=", flag, text)
        if "_" in name:  # "select" may be a word of a sentence
            text = re.sub(rf"(?<![\w-]){name}\b", flag, text)
    return text
