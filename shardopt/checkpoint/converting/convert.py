"""Converts a checkpoint to another format, or to our own again:

    open → choose → plan → write → commit → check

Each process plans all and writes its share of the files; rank 0 commits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import xxhash

from shardopt.checkpoint.converting.choosing import Choice, ChosenTensor, choose
from shardopt.checkpoint.converting.out_files import (
    Written,
    deal,
    find_written,
    keep_receipt,
    nbytes_of,
    remove_notes,
    write_file,
)
from shardopt.checkpoint.converting.plan import OutOptions, OutPlan
from shardopt.checkpoint.converting.streaming import digests_of, keys_in_order
from shardopt.checkpoint.converting.to_dcp import plan_dcp
from shardopt.checkpoint.converting.to_huggingface import plan_huggingface
from shardopt.checkpoint.converting.to_own import chunked_layout, plan_own
from shardopt.checkpoint.converting.to_torch import plan_torch
from shardopt.checkpoint.progress import Counter, Progress
from shardopt.checkpoint.rearrange.reader import rearranged
from shardopt.checkpoint.rearrange.rules import AnyRule
from shardopt.checkpoint.reports import OfUrl, emit_report
from shardopt.checkpoint.saving.writing.no_space import explain_no_space
from shardopt.checkpoint.sources.open import open as open_checkpoint
from shardopt.checkpoint.storage import absolute_url, storage_of, wrap_os_errors
from shardopt.errors import CorruptionError, MismatchError, OptionError, Problem
from shardopt.ranks import DEADLINE_SECONDS, Group, Ranks, call_on, ranks_of, refuse_lone_processes
from shardopt.sharding.layout import Layout
from shardopt.world import world

Format = Literal["shardopt", "dcp", "huggingface", "torch"]
MAX_FILE_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True)
class ConvertReport(OfUrl):
    """The report of a conversion.

    Args:
        url: what was written.
        to: its format.
        tensors: how many tensors it holds, tied ones included.
        files: how many files with tensors it has.
        bytes_written: by this process.
        bytes_total: of these files.
        bytes_reused: of files among them that an earlier conversion, which was killed, had written.
        seconds: on this process.
        digests: key → the xxh3-128 of the tensor's bytes in C order, in hexadecimal digits: whatever boxes and files it
            is stored in. A tied tensor has that of the one that stands for it.
        left_out: stored keys that were not converted, by `select`, `skip` or for want of a form.
    """

    url: str
    to: str
    tensors: int
    files: int
    bytes_written: int
    bytes_total: int
    bytes_reused: int
    seconds: float
    digests: Mapping[str, str]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """The options of `convert`: what is converted, and how."""

    rearrange: Sequence[AnyRule] = ()
    rename: Mapping[str, str] | None = None
    select: str | None = None
    skip: str | None = None
    dtype: torch.dtype | None = None
    max_file_bytes: float = MAX_FILE_BYTES
    world_size: int | None = None
    drop_per_rank: bool = False
    check: bool = False
    durable: bool = True
    weights: str | None = None


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    to: Format = "shardopt",
    *,
    rearrange: Sequence[AnyRule] = (),
    rename: Mapping[str, str] | None = None,
    select: str | None = None,
    skip: str | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: float = MAX_FILE_BYTES,
    world_size: int | None = None,
    drop_per_rank: bool = False,
    check: bool = False,
    durable: bool = True,
    weights: str | None = None,
    progress: Progress | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    process_group: Group | None = None,
) -> ConvertReport:
    """Writes the checkpoint at `src` to `dst` in another format. Collective if torch.distributed is initialized.

    Tensors are streamed: some 40 MiB of them are in a process's memory at a time, more where they are cast. Processes
    share the files, by bytes. Nothing at `dst` is a checkpoint before all of it is durable; if a process fails, all
    raise the same error. Called again with the same arguments it resumes: whole files are not written again.

    Args:
        src: of a committed checkpoint.
        dst: a directory without a checkpoint; for "torch" a path without a file.
        to: the format.

            - "shardopt": as `world_size` ranks would have saved it.
            - "dcp": a directory that `torch.distributed.checkpoint.load` reads, with the boxes that are stored.
            - "huggingface": `model.safetensors`, or several such files and their index, which `from_pretrained` reads.
              Tied tensors are written once. Plain values are left out, and so are the state of optimizers and averages
              of weights (EMA, SWA, AveragedModel) without `select`.
            - "torch": one file, nested as the app was, which `torch.load(weights_only=True)` reads. One process writes
              it.
        rearrange: rules by which tensors are joined, split, stacked, … on their way (as for `load`); first.
        rename: regex → replacement, applied in turn, as by `re.sub`, to stored keys: `{r"^model\\.": ""}` takes the
            app's prefix away. Options of a parameter are renamed as its state is.
        select: a regex; only keys, as `rename` has made them, in which it is found are converted.
        skip: a regex; keys as they are stored (and rearranged) in which it is found are not. What is stored in a way
            that is not known has to be skipped so.
        dtype: of floating-point tensors that are no state of an optimizer; None keeps what is stored.
        max_file_bytes: of tensors in a file, for "dcp" and "huggingface"; a tensor that is larger has a file of its
            own. Several processes make files small enough that each has one.
        world_size: for "shardopt", the ranks that share the tensors and the files; default: as many as convert.
        drop_per_rank: leave out values per rank, which only "shardopt" has, for the number of ranks that saved them.
        check: read all that was written, and compare its digests.
        durable: whether local files are flushed to the disk.
        weights: the app's key of averages, such as "ema". They are written in place of the weights, under the model's
            keys, in the averages' dtype. A weight without an average is written itself.
        progress: called with the bytes that this process has written, and those that it is to write.
        deadline_seconds: how long a process may show no sign of life before the others give up and name it.
        process_group: the processes that convert, where they are not all of the job.

    Raises:
        CheckpointNotFoundError, CorruptionError, FormatError: as for `open`; with `check`, what was written is damaged.
        CheckpointExistsError: there is a checkpoint at `dst` already.
        MismatchError: names collide, nothing is left, `weights` names no averages, or values per rank have no place.
        StateError: a value or dtype has no form in the format.
        CheckpointError: a number cannot be cast, or files cannot be written.
        RankError: a process died, or did not make the call.
    """
    refuse_lone_processes(f"converting to {os.fspath(dst)}")
    options = ConvertOptions(
        rearrange=tuple(rearrange),
        rename=rename,
        select=select,
        skip=skip,
        dtype=dtype,
        max_file_bytes=max_file_bytes,
        world_size=world_size,
        drop_per_rank=drop_per_rank,
        check=check,
        durable=durable,
        weights=weights,
    )
    return convert_on(ranks_of(process_group, deadline_seconds), src, dst, to, options, progress)


def convert_on(
    ranks: Ranks,
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    to: Format,
    options: ConvertOptions,
    progress: Progress | None = None,
) -> ConvertReport:
    """Converts a checkpoint on the ranks that call, or in one process alone; see `convert`."""
    begin = world().monotonic()
    dst = absolute_url(dst)
    _refuse_options(to, options.max_file_bytes, options.world_size)
    call = call_on("converting to", dst)
    with ranks.beating(), ExitStack() as stack:

        def plan_here() -> OutPlan:
            reader = stack.enter_context(rearranged(open_checkpoint(src), options.rearrange))
            choice = choose(
                reader,
                options.select,
                options.skip,
                options.rename,
                options.dtype,
                tensors_of_models_alone=to == "huggingface",
                weights=options.weights,
            )
            total = sum(map(nbytes_of, choice.written))
            most_bytes = max(int(min(options.max_file_bytes, -(-total // ranks.size))), 1)
            of_files = OutOptions(most_bytes, options.world_size or ranks.size, options.drop_per_rank)
            planned.append(plan_for(to, choice, dst, options.durable, of_files))
            return planned[0]

        planned: list[OutPlan] = []
        plan, _ = ranks.agree(call, plan_here, _fingerprint, lambda reports: _begin(planned[0], reports))
        writing = Writing(plan, ranks)
        written, done = ranks.agree(
            call,
            lambda: writing.write(progress),
            writing.report,
            lambda reports: _commit(plan, reports),
        )
        if options.check:
            ranks.agree(call, lambda: writing.check(done["digests"]))
    report = ConvertReport(
        url=plan.url,
        to=to,
        tensors=len(plan.choice.tensors),
        files=len(plan.files),
        bytes_written=sum(file.nbytes for file in written.values() if not file.reused),
        bytes_total=sum(file.nbytes for file in plan.files),
        bytes_reused=done["bytes_reused"],
        seconds=world().monotonic() - begin,
        digests=done["digests"],
        left_out=plan.choice.left_out,
    )
    emit_report("convert", report)
    return report


def plan_for(to: Format, choice: Choice, dst: str, durable: bool, options: OutOptions) -> OutPlan:
    """Plans the files of the chosen format."""
    if to == "shardopt":
        tensors = choice.tensors

        def layout_of(key: str) -> Layout:
            return chunked_layout(tensors[key].shape, tensors[key].boxes, options.world_size)

        return plan_own(choice, storage_of(dst, durable), layout_of, options.world_size, None, options.drop_per_rank)
    return _PLANS[to](choice, dst, durable, options)


_PLANS = {"dcp": plan_dcp, "huggingface": plan_huggingface, "torch": plan_torch}


class Writing:
    """One process's share of a conversion.

    Args:
        plan: the same in every process.
    """

    def __init__(self, plan: OutPlan, ranks: Ranks) -> None:
        self.plan, self._rank, self._size = plan, ranks.rank, ranks.size
        self._files = deal(plan.files, lambda file: file.nbytes, ranks.size)[ranks.rank]
        in_files = {key for file in plan.files for key in keys_in_order(file.parts, plan.shapes)}
        # Tensors that are cut over several files, or not in C order, are read once more for their digests.
        self._scattered = self._share([each for each in plan.choice.written if each.key not in in_files])
        self._digests: dict[str, str] = {}

    def write(self, progress: Progress | None) -> dict[str, Written]:
        """Writes this process's files, except those that are already whole; returns all of them by name."""
        plan, written = self.plan, dict[str, Written]()
        total = sum(file.nbytes for file in self._files)
        done = Counter(total, progress)
        reader = plan.choice.reader
        with (
            wrap_os_errors(f"write to {plan.url}"),
            explain_no_space(
                plan.storage,
                "the files of this process",
                lambda: total,
                lambda: sum(file.nbytes for file in written.values()),
            ),
        ):
            for file in self._files:
                before = find_written(plan.storage, file, reader, plan.shapes, done.add) if plan.resumes else None
                written[file.name] = before or write_file(plan.storage, file, reader, plan.shapes, done.add)
                if plan.resumes and before is None:
                    keep_receipt(plan.storage, written[file.name], file.fingerprint(reader.digest))
        self._digests = digests_of(reader, self._scattered, stored=True)
        return written

    def report(self, written: Mapping[str, Written]) -> Any:
        """Returns what rank 0 needs to know, as JSON."""
        return [[asdict(file) for file in written.values()], self._digests]

    def check(self, digests: Mapping[str, str]) -> None:
        """Reads and compares this process's share of the written files. Raises CorruptionError."""
        plan = self.plan
        with open_checkpoint(plan.url) as reader:
            mine = self._share(plan.choice.written)
            read = digests_of(reader, mine, stored=False)
        problems = [
            Problem(f"{plan.url}: {key}", f"bytes with the digest {digest}", digests[key], "convert it again")
            for key, digest in read.items()
            if digest != digests[key]
        ]
        if problems:
            raise CorruptionError("what was written is not what was read", problems)

    def _share(self, tensors: Sequence[ChosenTensor]) -> list[ChosenTensor]:
        """Returns this process's share of tensors, by bytes."""
        return deal(tensors, nbytes_of, self._size)[self._rank]


def _fingerprint(plan: OutPlan) -> str:
    source = plan.choice.reader.digest
    return xxhash.xxh3_128_hexdigest("".join(file.fingerprint(source) for file in plan.files).encode())


def _begin(plan: OutPlan, fingerprints: Sequence[str]) -> None:
    if len(set(fingerprints)) > 1:
        strangers = [rank for rank, each in enumerate(fingerprints) if each != fingerprints[0]]
        problem = Problem(
            f"ranks {strangers}", "another source, or other arguments", "those of rank 0", "pass the same everywhere"
        )
        raise MismatchError("processes are to convert different things", [problem], code="ranks-differ")
    with wrap_os_errors(f"make {plan.url}"):
        plan.refuse_taken()
        plan.begin()


def _commit(plan: OutPlan, reports: Sequence[Any]) -> dict[str, Any]:
    files = {file["name"]: Written(**file) for files, _ in reports for file in files}
    written = [files[file.name] for file in plan.files]
    digests = {key: digest for _, scattered in reports for key, digest in scattered.items()}
    for file in written:
        digests |= file.digests
    digests |= {key: digests[each.tied_to] for key, each in plan.choice.tensors.items() if each.tied_to is not None}
    with wrap_os_errors(f"commit {plan.url}"):
        plan.commit(written)
        if plan.resumes:
            remove_notes(plan.storage)
    return {
        "digests": dict(sorted(digests.items())),
        "bytes_reused": sum(file.nbytes for file in written if file.reused),
    }


def _refuse_options(to: str, max_file_bytes: float, world_size: int | None) -> None:
    problems = []
    if to not in ("shardopt", *_PLANS):
        problems.append(Problem("to", repr(to), f"one of {', '.join(('shardopt', *_PLANS))}", "name one of them"))
    if not max_file_bytes >= 1:
        problems.append(Problem("max_file_bytes", str(max_file_bytes), "a number of bytes", "leave it out for 5e9"))
    if world_size is not None and world_size < 1:
        problems.append(Problem("world_size", str(world_size), "1 at least", "leave it out"))
    if world_size is not None and to != "shardopt":
        problems.append(Problem("world_size", str(world_size), 'to="shardopt"', "leave it out"))
    if problems:
        raise OptionError("invalid arguments of a conversion", problems, code="cannot-convert")
