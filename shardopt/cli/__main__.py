"""Runs `python -m shardopt.cli`."""

import sys

from shardopt.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
