"""Writes one file as `torch.save` does, nested like the app, for `torch.load(weights_only=True)`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardopt.checkpoint.converting.choosing import Choice
from shardopt.checkpoint.converting.nested_values import groups_of_equal, is_torchs, nested, split_options
from shardopt.checkpoint.converting.out_files import OutFile, Written
from shardopt.checkpoint.converting.pickle_bytes import StoredElsewhere, pickle_of
from shardopt.checkpoint.converting.plan import OutOptions, OutPlan, refuse_file
from shardopt.checkpoint.converting.streaming import Part
from shardopt.checkpoint.converting.zip_bytes import Take, ZipArchive, torch_members
from shardopt.checkpoint.format.tensor_bytes import flat_bytes
from shardopt.checkpoint.storage import storage_of
from shardopt.errors import MismatchError, Problem, StateError
from shardopt.sharding.box import whole
from shardopt.state.param_groups import ALGORITHM, GIVEN
from shardopt.state.paths import PARAM_GROUPS, Path, join

_log = logging.getLogger("shardopt.checkpoint")


def plan_torch(choice: Choice, dst: str, durable: bool, options: OutOptions) -> OutPlan:
    """Plans a file.

    Raises:
        StateError: a plain value has no form in it. MismatchError: values per rank, or what cannot be nested.
    """
    refuse_per_rank(choice, options)
    folder, _, name = dst.rstrip("/").rpartition("/")
    if not name:
        problem = Problem("dst", dst, "the path of a file", "name it: model.pt")
        raise MismatchError("there is no file to write", [problem], code="cannot-convert")
    in_root = dst.startswith("/") and not folder
    file = TorchFile(name, choice)
    return TorchPlan(storage_of(folder or ("/" if in_root else os.curdir), durable), choice, [file], [name])


class TorchPlan(OutPlan):
    """One file, which is whole as soon as it has its name."""

    @property
    def url(self) -> str:
        return f"{self.storage.url}/{self.commits[0]}"

    def refuse_taken(self) -> None:
        if self.storage.exists(self.commits[0]):  # it is opened by its own path, whatever lies beside it
            refuse_file(self.storage, self.commits[0])

    def commit(self, written: Sequence[Written]) -> None:
        pass


class TorchFile(OutFile):
    """An archive with one pickle, and one record per tensor; tied tensors share one."""

    def __init__(self, name: str, choice: Choice) -> None:
        numbers = {tensor.key: str(i) for i, tensor in enumerate(choice.written)}
        records: list[tuple[str, bytes | int]] = []
        parts = []
        for tensor in choice.written:
            parts.append(Part(tensor.key, tensor.stored, tensor.dtype, whole(tensor.shape)))
            records.append((numbers[tensor.key], parts[-1].nbytes))

        def keep(value: Tensor) -> str:
            records.append((str(len(records)), raw_bytes(value)))
            return str(len(records) - 1)

        others, options = split_options(choice.values)
        leaves: dict[Path, Any] = {
            tensor.path: StoredElsewhere(numbers[tensor.tied_to or tensor.key], tensor.dtype, tensor.shape)
            for tensor in choice.tensors.values()
        }
        lists = {
            (*root, PARAM_GROUPS): [_as_torchs(each) for each in groups_of_equal(by_member, choice.tensors)]
            for root, by_member in options.items()
        }
        _warn_of_positions(lists)
        try:
            data_pkl = pickle_of(nested({**leaves, **others, **lists}), name, keep)
        except StateError:  # told under the key of what has no form, as skip= knows it
            for path, value in {**others, **lists}.items():
                pickle_of(value, join(path), lambda _: "")
            raise
        self._archive = ZipArchive(torch_members(data_pkl, records))
        streamed = zip(self._archive.members, self._archive.begins, strict=True)
        begins = [begin for member, begin in streamed if member.data is None]
        known = b"".join(member.data for member in self._archive.members if member.data is not None)
        super().__init__(name, parts, begins, self._archive.nbytes, known)

    def body(self, take: Take) -> Iterator[memoryview]:
        return self._archive.body(take)


def _as_torchs(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group; one that torch.optim saved is without our note, as torch's setters refuse unknown options."""
    if GIVEN in group or not is_torchs(group.get(ALGORITHM)):  # a keyed one's says to others of ours what saved it
        return {**group}
    return {name: value for name, value in group.items() if name != ALGORITHM}


def _warn_of_positions(lists: Mapping[Path, Sequence[Any]]) -> None:
    """Logs a warning of optimizers with several groups: torch.optim takes them by position, in whatever order it has.

    No checkpoint says which order that is.
    """
    for path, groups in lists.items():
        if len(groups) > 1:
            _log.warning(
                "%s: the file has %d groups with names, in the model's order; load_state_dict of torch.optim goes by "
                "position, and so gives options and moments to others if the program's groups or their order differ. "
                "set_optimizer_state_dict of torch.distributed.checkpoint.state_dict goes by names [by-position]",
                *(join(path[:-1]) or "the optimizer", len(groups)),
            )


def raw_bytes(tensor: Tensor) -> bytes:
    """Returns the bytes of a small tensor in C order."""
    return flat_bytes(tensor.resolve_conj().resolve_neg()).numpy().tobytes()


def refuse_per_rank(choice: Choice, options: OutOptions) -> None:
    """Raises MismatchError if there are values per rank, which other formats lack, unless they are dropped."""
    if choice.per_rank and not options.drop_per_rank:
        found = f"values of each of {choice.reader.manifest.world_size} ranks"
        problem = Problem(", ".join(choice.per_rank), found, "values of the whole job", "drop_per_rank=True, or skip=")
        raise MismatchError("the format has no values per rank", [problem], code="cannot-convert")
