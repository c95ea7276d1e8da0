"""Lightning with accumulation, validation within epochs, and loaders that have a state."""

import shutil
import signal

import pytest

from tests.harness import RanksFailed, run_ranks, run_ranks_outcomes
from tests.integrations import jobs, lightning_job

pytestmark = pytest.mark.skipif(not jobs.is_installed("lightning"), reason="lightning is not installed")
DEADLINE = 300
NEEDS_TORCHDATA = pytest.mark.skipif(not jobs.is_installed("torchdata"), reason="torchdata is not installed")


def run(tmp_path, kind, dies_at):
    """Runs without a fault, and with one; returns the first's losses."""
    whole = run_ranks(2, lightning_job.train, str(tmp_path / "whole"), kind, deadline_seconds=DEADLINE)[0]
    assert len(whole[0]) == 15 and [*whole[1]] == [1, 2, 4, 5, 7, 8]
    killed = run_ranks_outcomes(
        2, lightning_job.train, str(tmp_path / "killed"), kind, dies_at, deadline_seconds=DEADLINE
    )
    assert killed[1].signal == signal.SIGKILL and not killed[0].ok
    return whole


@pytest.mark.parametrize("dies_at", [(1, 3), (2, 0)], ids=["in accumulation", "at an epoch's begin"])
@pytest.mark.parametrize("kind", ["ResumableLoader", pytest.param("ResumableStatefulLoader", marks=NEEDS_TORCHDATA)])
def test_accumulation_and_validation_within_epochs_resume(tmp_path, kind, dies_at):
    losses, validated = run(tmp_path, kind, dies_at)
    begin = (1, 2) if dies_at == (1, 3) else (2, 0)  # behind the last step: a batch before it is not resumed
    left = {at: loss for at, loss in losses.items() if at >= begin}
    # Step 5 is saved before it is validated, and so validated again: none is lost.
    later = {step: loss for step, loss in validated.items() if step >= (5 if dies_at == (1, 3) else 7)}
    for ranks in (2, 1, 3):
        resumed = tmp_path / f"on {ranks}"
        shutil.copytree(tmp_path / "killed", resumed)
        found = run_ranks(ranks, lightning_job.train, str(resumed), kind, deadline_seconds=DEADLINE)[0]
        if ranks == 2:
            assert found == (left, later)
        else:
            assert found[0] == pytest.approx(left, rel=1e-5) and found[1] == pytest.approx(later, rel=1e-5), ranks


@NEEDS_TORCHDATA
def test_a_stateful_loader_resumes_on_as_many_ranks_and_is_refused_on_others(tmp_path):
    losses, validated = run(tmp_path, "StatefulDataLoader", (1, 3))
    for ranks in (1, 2):
        shutil.copytree(tmp_path / "killed", tmp_path / f"on {ranks}")
    found = run_ranks(2, lightning_job.train, str(tmp_path / "on 2"), "StatefulDataLoader", deadline_seconds=DEADLINE)[
        0
    ]
    assert found[0] == {at: loss for at, loss in losses.items() if at >= (1, 2)}
    assert found[1] == {step: loss for step, loss in validated.items() if step >= 5}
    with pytest.raises(RanksFailed, match="positions of data loaders on another number of ranks"):
        run_ranks(1, lightning_job.train, str(tmp_path / "on 1"), "StatefulDataLoader", deadline_seconds=DEADLINE)
