"""Frameworks are imported once, by the server that ranks are forked from: each takes seconds."""

from tests import fork_server
from tests.integrations.jobs import is_installed

fork_server.PRELOADED += [
    name for name in ("accelerate", "lightning.pytorch", "transformers.trainer") if is_installed(name.split(".")[0])
]
