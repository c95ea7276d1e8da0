"""`shardopt convert`: converts a checkpoint to another format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from shardopt import checkpoint
from shardopt.checkpoint.converting.convert import MAX_FILE_BYTES
from shardopt.cli.output import Output
from shardopt.cli.rules import parse_rename
from shardopt.errors import OptionError, Problem


def convert(
    output: Output,
    *,
    src: str,
    dst: str,
    to: Any,
    rename: Sequence[str] | None,
    dtype: str | None,
    max_file_bytes: int | None,
    check: bool,
    digests: bool,
    **options: Any,
) -> int:
    """Writes the checkpoint at `src` to `dst` in the format `to`, with other options of `checkpoint.convert`."""
    wanted = None if dtype is None else getattr(torch, dtype.removeprefix("torch."), None)
    if dtype is not None and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
        problem = Problem("--dtype", dtype, "a floating-point dtype of torch", "such as bfloat16")
        raise OptionError("invalid arguments", [problem])
    with checkpoint.progress_bar("converting") as progress:
        report = checkpoint.convert(
            src,
            dst,
            to,
            rename=parse_rename(rename or ()),
            dtype=wanted,
            max_file_bytes=MAX_FILE_BYTES if max_file_bytes is None else max_file_bytes,
            check=check,
            progress=progress,
            **options,
        )
    for key, digest in report.digests.items() if digests else ():
        output.line(f"{digest}  {key}")
    checked = ", compared with what was read" if check else ""
    left_out = f"; {len(report.left_out)} keys left out" if report.left_out else ""
    output.line(f"{report.url}: {report.tensors} tensors, {report.bytes_total:,} bytes as {to}{checked}{left_out}")
    output.data(asdict(report))
    return 0
