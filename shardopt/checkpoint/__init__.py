"""Checkpoints of sharded state: saved by all ranks, committed by one manifest, loaded in place onto any layout."""

from typing import TYPE_CHECKING

# Imported when a name is first asked for: what lists and verifies checkpoints needs neither torch nor these.
if TYPE_CHECKING:
    from shardopt.checkpoint.public import *  # noqa: F403  # re-exports, for type checkers
else:
    from shardopt.runtime.exports import lazily as _lazily

    __getattr__, __dir__ = _lazily(__name__, "shardopt.checkpoint.public")
