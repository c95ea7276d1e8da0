"""Modules over sharded state: embedding tables on many ranks."""

from typing import TYPE_CHECKING

# Imported when a name is first asked for: the shell's `plan` needs neither torch nor these.
if TYPE_CHECKING:
    from shardopt.nn.public import *  # noqa: F403  # re-exports, for type checkers
else:
    from shardopt.runtime.exports import lazily as _lazily

    __getattr__, __dir__ = _lazily(__name__, "shardopt.nn.public")
