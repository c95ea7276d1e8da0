"""Files that were just written as a source of their own: to read back what stands in them, whatever the format."""

from __future__ import annotations

from collections.abc import Iterator

from shardopt.checkpoint.convert.plan import OutPlan
from shardopt.checkpoint.format.data_file import Entry
from shardopt.checkpoint.format.manifest import DataFile, Manifest, StoredLayout, StoredTensor, StoredTensors
from shardopt.checkpoint.reading.open_file import Form, OpenFile, ReadChunks
from shardopt.checkpoint.sources.source import Source
from shardopt.checkpoint.storage import Storage
from shardopt.errors import Problem
from shardopt.sharding.box import Box


class WrittenSource(Source):
    """The tensors of a conversion, in the places where its plan has put them.

    Args:
        plan: all of whose files are there.
    """

    format_name = "what was converted"
    digest = ""

    def __init__(self, plan: OutPlan) -> None:
        super().__init__(plan.storage)
        boxes: dict[str, list[Box]] = {}
        numbers: dict[str, list[int]] = {}
        files: list[_WrittenFile] = []
        for out in plan.files:
            for part, begin in zip(out.parts, out.begins, strict=True):
                number = len(files)
                files.append(_WrittenFile(plan.storage, out.name, part.key, begin))  # one for each box
                boxes.setdefault(part.key, []).append(part.box)
                numbers.setdefault(part.key, []).append(number)
        self._files = files
        tensors = StoredTensors()
        for each in plan.choice.written:
            layout = StoredLayout(each.shape, tuple(boxes.get(each.key, ())), tuple(numbers.get(each.key, ())))
            tensors[each.key] = StoredTensor(each.path, each.dtype, layout)
        self.manifest = Manifest("", 1, tuple(DataFile(file.name, 0, "") for file in files), tensors)

    def open_file(self, number: int) -> OpenFile:
        return self._files[number]


class _WrittenFile(OpenFile):
    """One box of a tensor in a file."""

    def __init__(self, storage: Storage, name: str, key: str, begin: int) -> None:
        super().__init__(storage, name)
        self._key, self._begin = key, begin

    def entry(self, key: str, form: Form) -> Entry:
        return Entry(key, form.dtype, form.shape, self._begin, self._begin + form.nbytes, 0)

    def check(self, entry: Entry, read: ReadChunks) -> Iterator[Problem]:
        return iter(())
