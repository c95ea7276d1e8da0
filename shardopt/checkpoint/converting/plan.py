"""The files that a conversion writes, in any format, and the last step, which makes them a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from shardopt.checkpoint.converting.choosing import Choice
from shardopt.checkpoint.converting.out_files import (
    OutFile,
    Written,
    begin_journal,
    files_of_earlier,
    receipt_name,
)
from shardopt.checkpoint.format.constants import (
    DATA_SUFFIX,
    DCP_METADATA_NAME,
    FILE_NAME,
    JOURNAL_NAME,
    MANIFEST_NAME,
    TORCH_SUFFIXES,
)
from shardopt.checkpoint.sources.torch_files import is_torch_file
from shardopt.checkpoint.storage import Storage, is_temporary
from shardopt.errors import CheckpointExistsError, Problem

_TEMPORARY_SUFFIX_LENGTH = len(".0123456789ab.tmp")


@dataclass(frozen=True, slots=True)
class OutOptions:
    """Options of the written files.

    Args:
        most_bytes: of tensors in a file.
        world_size: of the job that is to have written it.
        drop_per_rank: leave out values per rank.
    """

    most_bytes: int
    world_size: int
    drop_per_rank: bool = False


class OutPlan(ABC):
    """All files of a conversion, and its commit.

    Args:
        storage: the directory that they are written to.
        choice: what is converted.
        files: those that are written beforehand, by any process.
        commits: names of the files of which one makes it a checkpoint.
    """

    taken_by: tuple[str, ...] = TORCH_SUFFIXES
    """Suffixes of torch's files that would make the directory a checkpoint of theirs."""

    def __init__(self, storage: Storage, choice: Choice, files: Sequence[OutFile], commits: Sequence[str]) -> None:
        self.storage, self.choice, self.files, self.commits = storage, choice, files, commits

    @property
    def url(self) -> str:
        return self.storage.url

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: tensor.shape for key, tensor in self.choice.tensors.items()}

    @property
    def resumes(self) -> bool:
        """Whether one whole file is of use without the others."""
        return [file.name for file in self.files] != [*self.commits]

    @abstractmethod
    def commit(self, written: Sequence[Written]) -> None:
        """Makes the files a checkpoint, on rank 0, once all files exist."""

    def refuse_taken(self) -> None:
        """Raises CheckpointExistsError if there is a checkpoint, or a file that no conversion planned to write."""
        earlier = set(files_of_earlier(self.storage))
        for name in [*self.commits, *(file.name for file in self.files if file.name not in earlier)]:
            if self.storage.exists(name):
                refuse_file(self.storage, name)
        refuse_checkpoints(self.storage, earlier, self.taken_by)

    def begin(self) -> None:
        """Makes the directory; removes leftovers of an earlier conversion that this one cannot use. On rank 0."""
        self.storage.make()
        own, earlier = {file.name for file in self.files}, files_of_earlier(self.storage)
        for name in earlier:
            if name not in own:
                self.storage.remove(name)
                self.storage.remove(receipt_name(name))
        mine = {*own, *earlier, *self.commits, JOURNAL_NAME}
        mine |= {*map(receipt_name, mine)}
        for name in self.storage.names():
            if is_temporary(name) and name[1:-_TEMPORARY_SUFFIX_LENGTH] in mine:
                self.storage.remove(name)
        if self.resumes:
            begin_journal(self.storage, sorted(own))


def refuse_checkpoints(
    storage: Storage, known: Collection[str] = (), suffixes_of_torch: tuple[str, ...] = TORCH_SUFFIXES
) -> None:
    """Raises CheckpointExistsError if a directory is a checkpoint of any format, as one of the two would be hidden.

    Args:
        known: names of files that are known to be none.
        suffixes_of_torch: of names that are looked into.
    """
    for name in storage.names():
        is_data = name.endswith((DATA_SUFFIX, f"{DATA_SUFFIX}.index.json")) and not FILE_NAME.fullmatch(name)
        if name in (MANIFEST_NAME, DCP_METADATA_NAME) or (is_data and name not in known):
            refuse_file(storage, name)
        if suffixes_of_torch and name.endswith(suffixes_of_torch) and name not in known:
            with suppress(FileNotFoundError, IsADirectoryError):
                if is_torch_file(storage, name):
                    refuse_file(storage, name)


def refuse_file(storage: Storage, name: str) -> NoReturn:
    """Raises CheckpointExistsError for an existing file."""
    problem = Problem(f"{storage.url}/{name}", "a file of another", "none", "give another path, or remove it")
    raise CheckpointExistsError("the path is taken", [problem])
