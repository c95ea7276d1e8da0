"""Generated runs on three ranks: sub-meshes, uneven shards, shards that are empty."""

import pytest

from tests.harness import run_ranks
from tests.twins.machine import play
from tests.twins.plain import KINDS

SEQUENCES = 2  # of each kind


@pytest.mark.parametrize("number", [0, *(pytest.param(i, marks=pytest.mark.exhaustive) for i in range(1, 26))])
def test_same_values_throughout(tmp_path, number):
    played = run_ranks(3, play, str(tmp_path), SEQUENCES, 8, number, deadline_seconds=140)
    assert len(set(played)) == 1 and played[0] >= SEQUENCES * len(KINDS)
