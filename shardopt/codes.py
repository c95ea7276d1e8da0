"""The codes of errors: the `[…]` at the end of an error's first line, which `shardopt explain CODE` explains.

A code stands for a cause and its way out, and each has one section in docs/troubleshooting.md. A class of errors has
one that all of its errors have where they give none (`errors.py`).
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

Code: TypeAlias = Literal[
    # making optimizers
    "bad-parameters",
    "bad-groups",
    "bad-options",
    "stale-parameters",
    "unknown-algorithm",
    "algorithm-spec",
    "unsupported-algorithm",
    "lbfgs",
    "low-precision",
    "semi-sync",
    "combined-optimizers",
    "warm-up",
    "averages",
    "invalid-argument",
    "missing-package",
    # saving
    "path-taken",
    "cannot-store",
    "nothing-selected",
    "replicas-differ",
    "ranks-differ",
    "tied-parameters",
    "bad-layout",
    "files-missing",
    "bad-base",
    "no-space",
    "save-in-flight",
    "changed-while-copied",
    "in-signal-handler",
    # loading
    "no-checkpoint",
    "does-not-fit",
    "optimizer-state",
    "by-position",
    "object-refused",
    "bad-rules",
    "cast-overflow",
    "partial-load",
    "cannot-read-tensor",
    "ranks-see-different",
    "damaged",
    "newer-format",
    "unknown-format",
    # runs and storage
    "run-root",
    "host-directory",
    "storage-failed",
    "following",
    # steps
    "gradient-mismatch",
    "missing-gradient",
    "sparse-gradient",
    "clipping",
    "grad-scaler",
    "step-in-backward",
    "embedding-tables",
    # data and other libraries
    "data-position",
    "framework",
    "dcp-planner",
    "cannot-convert",
    # ranks
    "rank-lost",
    "rank-failed",
    "different-calls",
    "rank-network",
    "process-group",
    # shardopt itself
    "internal",
]

CODES: Final[tuple[Code, ...]] = get_args(Code)
