"""What an estimate says, as values and as a short table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardopt.checkpoint.estimating.kept import Kept
from shardopt.checkpoint.estimating.measure import Measured
from shardopt.checkpoint.estimating.planned import PlannedSave
from shardopt.checkpoint.reports import OfUrl
from shardopt.checkpoint.text import nbytes_text, plural, seconds_text

_STAGES = {
    "plan": "to plan a save",
    "stage": "kept by async_save",
    "write": "to write",
    "load": "to load",
}


@dataclass(frozen=True, slots=True)
class Estimate(OfUrl):
    """The costs of one checkpoint, and of those that a run keeps. The same on all ranks. `str` of it is a table.

    Args:
        url: where checkpoints would be.
        tensors: how many a checkpoint holds.
        bytes_by_rank: of the data files that each rank writes, with headers and checksums. Equal to what a save of the
            same state writes.
        manifest_bytes: of the manifest. The digits of times and of plain values such as a step change it.
        host_bytes: of the rank that takes the most, beside the state itself, by stage: "plan", "stage" (the copy that
            `async_save` keeps), "write", "load".
        save_seconds: of a save that blocks, after the first one, on the slowest rank; None if not measured.
        load_seconds: of a load, likewise; None if not measured.
        measured_bytes: that the rank with the most bytes wrote at a time to measure that; 0 if not measured.
        kept: of the run; None without `steps`.
        uncounted: keys of optimizers whose state does not exist yet and is not counted, as only a step can make it.
    """

    url: str
    tensors: int
    bytes_by_rank: tuple[int, ...]
    manifest_bytes: int
    host_bytes: Mapping[str, int]
    save_seconds: float | None = None
    load_seconds: float | None = None
    measured_bytes: int = 0
    kept: Kept | None = None
    uncounted: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        url: str,
        planned: PlannedSave,
        measured: Measured,
        load_seconds: float,
        kept: Kept | None,
        uncounted: tuple[str, ...] = (),
    ) -> Estimate:
        """Makes an estimate of a plan and a measurement.

        Args:
            load_seconds: of a load, for what is no work of the storage.
        """
        nbytes, write, read, publish = measured
        return cls(
            url=url,
            tensors=planned.tensors,
            bytes_by_rank=planned.bytes_by_rank,
            manifest_bytes=planned.manifest_bytes,
            host_bytes=planned.host_bytes,
            save_seconds=None if write is None else planned.seconds + write + publish,
            load_seconds=None if read is None else load_seconds + read,
            measured_bytes=nbytes,
            kept=kept,
            uncounted=uncounted,
        )

    @property
    def nbytes(self) -> int:
        """The bytes of one checkpoint, with its manifest."""
        return sum(self.bytes_by_rank) + self.manifest_bytes

    def to_json(self) -> dict[str, Any]:
        """Returns the estimate as a JSON document."""
        kept = None if self.kept is None else self.kept._asdict()
        return {**asdict(self), "nbytes": self.nbytes, "kept": kept}

    def rows(self) -> list[tuple[str, str]]:
        """Returns the lines of the table: what, and how much."""
        least, most = min(self.bytes_by_rank, default=0), max(self.bytes_by_rank, default=0)
        each = nbytes_text(most) if least == most else f"{nbytes_text(least)} to {nbytes_text(most)}"
        ranks = plural(len(self.bytes_by_rank), "rank")
        rows = [
            ("a checkpoint", f"{nbytes_text(self.nbytes)}, {plural(self.tensors, 'tensor')}"),
            ("a rank writes", f"{each} ({ranks})"),
        ]
        rows += [(f"host memory {text}", nbytes_text(self.host_bytes[stage])) for stage, text in _STAGES.items()]
        for what, seconds in (("a save", self.save_seconds), ("a load", self.load_seconds)):
            rows.append((what, "not measured" if seconds is None else f"about {seconds_text(seconds)}"))
        if self.kept is not None:
            saves, kept, nbytes, peak = self.kept
            rows.append(("the run keeps", f"{kept:,} of {plural(saves, 'checkpoint')}, {nbytes_text(nbytes)}"))
            rows.append(("at most", nbytes_text(peak)))
        if self.uncounted:
            rows.append(("not counted", f"state of {', '.join(self.uncounted)}: only a step can make it"))
        return rows

    def __str__(self) -> str:
        width = max(len(what) for what, _ in self.rows())
        return "\n".join([self.url, *(f"  {what.ljust(width)}  {how_much}" for what, how_much in self.rows())])
