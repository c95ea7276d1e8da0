"""Generated runs on three ranks: sub-meshes, uneven shards, shards that are empty."""

import pytest

from tests.harness import run_ranks
from tests.twins.machine import play
from tests.twins.plain import KINDS

SEQUENCES = 2  # of each kind, and one in the usual run


@pytest.mark.parametrize(
    ("number", "sequences"),
    [(0, 1), *(pytest.param(i, SEQUENCES, marks=pytest.mark.exhaustive) for i in range(26))],
)
def test_same_values_throughout(tmp_path, number, sequences):
    played = run_ranks(3, play, str(tmp_path), sequences, 8, number, deadline_seconds=140)
    assert len(set(played)) == 1 and played[0] >= sequences * len(KINDS)
