"""`python -m shardopt.cli`."""

import sys

from shardopt.cli.entry import main

sys.exit(main())
