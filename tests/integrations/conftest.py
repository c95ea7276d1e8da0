"""Frameworks are imported once, by the server that ranks are forked from: each takes seconds."""

from tests.harness import ranks
from tests.integrations.jobs import is_installed

ranks.PRELOADED += [
    name for name in ("accelerate", "lightning.pytorch", "transformers.trainer") if is_installed(name.split(".")[0])
]
