"""Optimizers and checkpoints for sharded training, keyed by fully qualified parameter name.

Here are the names of a program's first page, which `shardopt.public` lists. All others are in the packages:
`shardopt.optim`, `shardopt.checkpoint`, `shardopt.data`, `shardopt.nn`, `shardopt.algorithms`, `shardopt.sharding`,
`shardopt.errors` and `shardopt.integrations`.
"""

from typing import TYPE_CHECKING

from shardopt.version import __version__ as __version__

# Imported when a name is first asked for: the shell's verbs are modules of this package, and their help needs no torch.
if TYPE_CHECKING:
    from shardopt.public import *  # noqa: F403  # re-exports, for type checkers
else:
    from shardopt.runtime.exports import lazily as _lazily

    __getattr__, __dir__ = _lazily(__name__, "shardopt.public")
