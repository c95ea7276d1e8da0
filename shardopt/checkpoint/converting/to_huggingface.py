"""Writes the layout of Hugging Face: whole tensors in safetensors files, with an index if there are several."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Sequence

from shardopt.checkpoint.converting.choosing import Choice, ChosenTensor
from shardopt.checkpoint.converting.out_files import OutFile, Written, files_of_earlier, nbytes_of, pack
from shardopt.checkpoint.converting.plan import OutOptions, OutPlan, refuse_file
from shardopt.checkpoint.converting.streaming import Part
from shardopt.checkpoint.converting.zip_bytes import Take
from shardopt.checkpoint.format.constants import DATA_SUFFIX, HEADER_LIMIT_BYTES
from shardopt.checkpoint.storage import storage_of
from shardopt.errors import MismatchError, Problem, StateError
from shardopt.sharding.box import whole

_ONE_FILE = f"model{DATA_SUFFIX}"
_INDEX = f"model{DATA_SUFFIX}.index.json"
_RESERVED = "__metadata__"
_ALIGNMENT_BYTES = 64  # of the first tensor; the format asks for 8


def plan_huggingface(choice: Choice, dst: str, durable: bool, options: OutOptions) -> OutPlan:
    """Plans a folder of safetensors.

    Raises:
        StateError: a dtype or key that safetensors has no form for.
        MismatchError: there is no tensor.
    """
    _refuse_unknown(choice)
    written = sorted(choice.written, key=lambda tensor: natural_order(tensor.key))
    groups = pack(written, options.most_bytes)
    names = [f"model-{i:05d}-of-{len(groups):05d}{DATA_SUFFIX}" for i in range(1, len(groups) + 1)]
    if len(groups) == 1:
        names = [_ONE_FILE]
    files = [SafetensorsFile(name, group) for name, group in zip(names, groups, strict=True)]
    return HuggingFacePlan(storage_of(dst, durable), choice, files, [_INDEX] if len(files) > 1 else [_ONE_FILE])


class HuggingFacePlan(OutPlan):
    """A folder that `transformers` reads once its index, or its only file, exists."""

    taken_by = ()  # beside models there are files of torch with other things in them

    def refuse_taken(self) -> None:
        super().refuse_taken()
        known = {*(file.name for file in self.files), *files_of_earlier(self.storage)}
        for name in self.storage.names():  # all files of safetensors in a folder are taken for one checkpoint
            if name.endswith(DATA_SUFFIX) and name not in known:
                refuse_file(self.storage, name)

    def commit(self, written: Sequence[Written]) -> None:
        if self.commits == [_ONE_FILE]:
            return
        weight_map = {part.key: file.name for file in self.files for part in file.parts}
        total = sum(map(nbytes_of, self.choice.written))
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        self.storage.publish(_INDEX, (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode())


class SafetensorsFile(OutFile):
    """A file of whole tensors, ordered by descending item size, so that all are aligned."""

    def __init__(self, name: str, tensors: Sequence[ChosenTensor]) -> None:
        ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)  # else in the order that they came in
        parts = [Part(each.key, each.stored, each.dtype, whole(each.shape)) for each in ordered]
        table: dict[str, object] = {_RESERVED: {"format": "pt"}}
        offset = 0
        begins = []
        for part in parts:
            begins.append(offset)
            offsets = [offset, offset := offset + part.nbytes]
            table[part.key] = {"dtype": part.dtype.safetensors, "shape": part.box.sizes, "data_offsets": offsets}
        text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
        length = -(-(8 + len(text)) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if length > HEADER_LIMIT_BYTES:
            problem = Problem(
                name, f"a header of {length} bytes", f"at most {HEADER_LIMIT_BYTES}", "set max_file_bytes"
            )
            raise StateError("a file would be unreadable", [problem])
        self._header = struct.pack("<Q", length - 8) + text.ljust(length - 8)
        super().__init__(name, parts, [length + begin for begin in begins], length + offset, self._header)

    def body(self, take: Take) -> Iterator[memoryview]:
        yield memoryview(self._header)
        for _ in self.parts:
            yield from take()


def natural_order(key: str) -> list[tuple[int, str]]:
    """Returns a sort key that orders names as people do: "layers.2" before "layers.10"."""
    return [(int(text), "") if text.isdecimal() else (-1, text) for text in re.split(r"(\d+)", key)]


def _refuse_unknown(choice: Choice) -> None:
    problems = [
        Problem(tensor.key, tensor.dtype.name, "a dtype that safetensors has a name for", "cast it, or leave it out")
        for tensor in choice.written
        if tensor.dtype.safetensors is None
    ]
    if _RESERVED in choice.tensors:
        problems.append(Problem(_RESERVED, "the name of a tensor", "another name", "rename it"))
    if problems:
        raise StateError("tensors cannot be written as safetensors", problems, code="cannot-convert")
    if not choice.tensors:
        keys = ", ".join(choice.left_out[:20])
        problem = Problem("tensors", "none", "one at least", f"give select=; there are: {keys}")
        raise MismatchError("there is nothing to convert", [problem], code="nothing-selected")
