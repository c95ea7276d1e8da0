"""What a conversion is to write, whatever the format: files, and the step after which they are a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from shardopt.checkpoint.convert.choosing import Choice
from shardopt.checkpoint.convert.out_files import (
    OutFile,
    Written,
    begin_journal,
    files_of_earlier,
    receipt_name,
)
from shardopt.checkpoint.format.constants import JOURNAL_NAME, MANIFEST_NAME
from shardopt.checkpoint.sources.dcp import METADATA_NAME
from shardopt.checkpoint.storage import Storage, is_temporary
from shardopt.errors import CheckpointExistsError, Problem

_TEMPORARY_SUFFIX_LENGTH = len(".0123456789ab.tmp")


@dataclass(frozen=True, slots=True)
class OutOptions:
    """Options of what is written.

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

    not_beside: tuple[str, ...] = (MANIFEST_NAME, METADATA_NAME)
    """What makes a directory a checkpoint of another format, which would be the one that is opened, and checked."""

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
        """Whether a file that is whole is of use without the others."""
        return [file.name for file in self.files] != [*self.commits]

    @abstractmethod
    def commit(self, written: Sequence[Written]) -> None:
        """Makes the files a checkpoint. On rank 0, once all are there."""

    def refuse_taken(self) -> None:
        """Raises CheckpointExistsError where there is a checkpoint, or a file that no conversion was to write."""
        earlier = set(files_of_earlier(self.storage))
        for name in [*self.not_beside, *self.commits, *(file.name for file in self.files if file.name not in earlier)]:
            if self.storage.exists(name):
                self.refuse(name)

    def refuse(self, name: str) -> NoReturn:
        """Raises CheckpointExistsError for a file that is there."""
        problem = Problem(f"{self.storage.url}/{name}", "a file of another", "none", "give another path, or remove it")
        raise CheckpointExistsError("the path is taken", [problem])

    def begin(self) -> None:
        """Makes the directory, and removes what is left there of a conversion and of no use to this one. On rank 0."""
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
