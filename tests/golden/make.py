"""Writes the golden checkpoint of the current format version: once, when there is a new one.

python -m tests.golden.make
"""

from pathlib import Path

from shardopt import checkpoint
from shardopt.checkpoint.format.constants import FORMAT_VERSION
from tests.golden.state import STATES
from tests.harness import run_ranks


def save(path):
    base, between = (str(Path(path).parent / f"{name}_of_v{FORMAT_VERSION}") for name in ("base", "between"))
    checkpoint.save(base, STATES[FORMAT_VERSION](changed=0))
    checkpoint.save(between, STATES[FORMAT_VERSION](changed=1), base=base)
    checkpoint.save(path, STATES[FORMAT_VERSION](), base=between)


if __name__ == "__main__":
    run_ranks(2, save, str(Path(__file__).parent / f"v{FORMAT_VERSION}"))
