"""The checkpoints of one training run, by step."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from shardopt.checkpoint.format import MANIFEST_NAME
from shardopt.checkpoint.load import load
from shardopt.checkpoint.save import SaveReport, save
from shardopt.checkpoint.storage import storage_of
from shardopt.ranks import DEADLINE_SECONDS, ranks_of

_NAME = re.compile(r"step-(\d{8,})")


class Manager:
    """Saves a run's state every so many steps under one root, and restores the newest.

    All ranks must make the same calls. Checkpoints are directories `step-00000500`; one without a manifest does not
    exist to anybody, and what a dead save left in it is cleared by the next save to it.

    Args:
        root: a path, or a URL that fsspec knows.
        every: `save` writes at steps that are multiples of this.
        deadline_seconds: how long a rank may show no sign of life before the others give up and name it.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, every: int = 1, deadline_seconds: float = DEADLINE_SECONDS
    ) -> None:
        if every < 1:
            raise ValueError(f"every: found {every}; required at least 1; give the steps between two checkpoints")
        self._storage = storage_of(root)
        self._every = every
        self._deadline_seconds = deadline_seconds
        self._closed = False

    def path(self, step: int) -> str:
        """Where the checkpoint of a step is, or would be."""
        return self._storage.child(f"step-{step:08d}").url

    def steps(self) -> list[int]:
        """The steps of all committed checkpoints, ascending. Local."""
        found = (_NAME.fullmatch(name) for name in self._storage.names())
        return sorted(int(m[1]) for m in found if m and self._storage.child(m[0]).exists(MANIFEST_NAME))

    def should_save(self, step: int) -> bool:
        """Whether `save` would write at this step."""
        return step % self._every == 0

    def save(self, step: int, app: Mapping[str, Any], *, force: bool = False) -> SaveReport | None:
        """Saves if the step is due (or `force`), else returns None. Collective, as `checkpoint.save`."""
        self._require_open()
        if not (force or self.should_save(step)):
            return None
        return save(self.path(step), app, deadline_seconds=self._deadline_seconds)

    def restore(self, app: Mapping[str, Any]) -> int:
        """Loads the newest committed checkpoint into `app`, in place; returns its step, or 0 where there is none.

        Collective, as `checkpoint.load`, and with its errors. All ranks take the step that rank 0 finds.
        """
        self._require_open()
        _, step = ranks_of().agree(
            f"restoring from {self._storage.url}",
            work=lambda: None,
            decide=lambda _: max(self.steps(), default=0),
            deadline_seconds=self._deadline_seconds,
        )
        if step:
            load(self.path(step), app, deadline_seconds=self._deadline_seconds)
        return int(step)

    def close(self) -> None:
        """Ends the use of this manager; saving or restoring with it afterwards is an error."""
        self._closed = True

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("this Manager was closed; make a new one")
