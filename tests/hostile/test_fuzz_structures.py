"""Files of every format whose structure was changed: opened, shown, verified and loaded within 2 s and 200 MiB each."""

import random
import shutil

import pytest

from tests.hostile.bounds import CALLS, use
from tests.hostile.structures import FORMATS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def run(tmp_path, make, seeds):
    """Makes and uses a file for each seed; returns how many calls were refused, of how many."""
    refused = 0
    for seed in seeds:
        path = tmp_path / "c"
        path.mkdir()
        make(random.Random(seed), path)
        try:
            refused += len(use(path))
        except Exception as error:
            raise AssertionError(f"{make.__name__} of seed {seed}: {type(error).__name__}: {error}") from error
        shutil.rmtree(path)
    return refused, len(CALLS) * len(seeds)


@pytest.mark.parametrize("name", FORMATS)
def test_a_sample_of_changed_structures(tmp_path, name):
    refused, calls = run(tmp_path, FORMATS[name], range(10))
    assert 0 < refused <= calls


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("name", FORMATS)
def test_twenty_thousand_changed_structures(tmp_path, name, part):
    refused, calls = run(tmp_path, FORMATS[name], range(1000 + 500 * part, 1500 + 500 * part))
    assert calls / 8 < refused < calls
