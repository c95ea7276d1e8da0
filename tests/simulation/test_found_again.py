"""Faults of old, put back one by one, are found: the schedules below fail with them, and pass without."""

from dataclasses import replace

import pytest

from tests.simulation import broken
from tests.simulation.schedule import DEADLINE_SECONDS, Fault, Job, Schedule
from tests.simulation.simulate import simulate
from tests.simulation.streams.schedule import Following, Hit, Publishing, Stream
from tests.simulation.streams.simulate import simulate as simulate_stream

LONG = 1.6 * DEADLINE_SECONDS
STOPPED = Schedule(3, (Job(ranks=1, saves=1, leaves_stopped=True),))
CLEARED = replace(STOPPED, jobs=(*STOPPED.jobs, Job(ranks=1, saves=2, bad_metrics=1, leaves_stopped=True)))
ON_A_BRANCH = (Job(saves=3), Job(back=1, saves=1), Job(misfit=True, saves=1))
LEFT_BEHIND = Schedule(
    1,
    (
        Job(ranks=1, saves=4, keep_last=2, leaves_stopped=True),
        Job(ranks=1, back=1, saves=0),
        Job(ranks=1, saves=1),
    ),
)
FAILING = Schedule(4, (Job(stage="now", hears=(0,), saves=3),))
INTERRUPTED = Schedule(6, (Job(saves=1), Job(saves=1)))

FOUND = {
    broken.remains_removed_before_the_commit: [
        replace(STOPPED, faults=(Fault("stop", 0, at=at, beside=200),)) for at in range(8, 40)
    ],
    broken.published_over_others: [
        replace(STOPPED, faults=(Fault("stop", 0, at=at, beside=200),)) for at in range(18, 22)
    ],
    broken.no_second_look_for_a_manifest: [
        replace(CLEARED, faults=(Fault("stop", 0, at=20, beside=at), Fault("stop", 1, at=at, seconds=0.05)))
        for at in range(36, 52)
    ],
    broken.branches_known_only_after_the_load: [Schedule(1, ON_A_BRANCH)],
    broken.no_branches: [Schedule(1, (Job(saves=3, keep_last=2), Job(back=1, saves=2, keep_last=2)))],
    broken.removals_for_a_run_as_it_was: [
        replace(LEFT_BEHIND, faults=(Fault("stop", 0, at=at, beside=beside),))
        for at, beside in ((90, 18), (92, 20), (94, 22))
    ],
    broken.failures_raised_by_each_rank_alone: [
        replace(FAILING, faults=(Fault("disk", 0, rank=1, at=at, detail="EIO"),)) for at in range(4, 20)
    ],
    broken.no_beats_between_rounds: [Schedule(1, (Job(slow_rank=1, planning_seconds=LONG),))],
    broken.no_beats_while_state_is_copied: [Schedule(1, (Job(stage="now", slow_rank=1, state_seconds=LONG),))],
    broken.names_from_counters: [Schedule(1, (Job(stage="now", mirror=True, looks_alone=True),))],
    broken.unreadable_is_no_damage: [Schedule(1, (Job(saves=3),), (Fault("unreadable", 1),))],
    broken.files_of_users_removed: [Schedule(1, (Job(saves=3, keep_last=1),))],
    broken.metrics_looked_at_outside_of_a_round: [Schedule(1, (Job(bad_metrics=1),))],
    broken.rounds_without_names: [Schedule(1, (Job(astray=(1, 1)),))],
    broken.rounds_of_a_restore_with_one_name: [
        replace(INTERRUPTED, faults=(Fault("interrupt", 1, rank=1, at=at),)) for at in range(1, 12)
    ],
    broken.leave_taken_once: [
        Schedule(7707, (Job(saves=1),), (Fault("reset", 0, at=first), Fault("reset", 0, at=at)))
        for first in (24, 26, 28)
        for at in range(38, 48)
    ],
    broken.no_more_frames_than_it_said: [
        Schedule(2, (Job(saves=1),), (Fault("reset", 0, rank=1, at=at),)) for at in range(8, 14)
    ],
}


def finds(fault, schedules, run, in_full):
    """Whether some schedule fails with the fault; and passes without it, as all of them do in full."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        broken.put_back(fault, monkeypatch)
        finding = next((schedule for schedule in schedules if run(schedule).problems), None)
    sound = [finding] if finding is not None and not in_full else schedules
    assert [each.problems for each in map(run, sound) if each.problems] == []
    return finding is not None


@pytest.fixture
def in_full(request):
    return request.config.getoption("--exhaustive")


@pytest.mark.parametrize("fault", FOUND, ids=lambda fault: fault.__name__)
def test_fault_is_found_again(fault, in_full):
    assert finds(fault, FOUND[fault], simulate, in_full)


SLOW = Publishing(changes=("few",) * 4, seconds=0.05)
SEEDS = range(1, 13)  # of races: any change of the code is another order
FAST = Publishing(changes=("few",) * 8, seconds=0.0)


def followed(following, publishing=SLOW, seed=1):
    return Stream(seed, (publishing,), (following,))


FOUND_IN_STREAMS = {
    broken.applied_before_all_ranks_agreed: [
        followed(Following(ranks=2, updates=8, hits=(Hit("disk", 1, at, detail="ENOSPC"),))) for at in (2, 4, 6)
    ],
    broken.applied_without_a_pause: [followed(Following(updates=8, threads=1), seed=seed) for seed in SEEDS],
    broken.not_marked_as_torn: [  # one rank cannot read what has no room before the pause
        followed(Following(ranks=2, updates=8, threads=1, memory_bytes=0, hits=(Hit("disk", 1, at, detail="EIO"),)))
        for at in (20, 24, 28)
    ],
    broken.files_removed_that_kept_steps_need: [followed(Following(), Publishing(changes=("few",) * 4, keep=1))],
    broken.deltas_on_any_state: [followed(Following(updates=3, seconds=0.1))],
    broken.bridges_on_any_state: [
        followed(Following(updates=3, seconds=seconds), Publishing(changes=("few",) * 4, anchor_every=2))
        for seconds in (0.046, 0.106, 0.11)
    ],
    broken.weights_not_known_again: [followed(Following(updates=8, spoils=5))],
    broken.steps_left_when_taken_back: [Stream(1, (SLOW, Publishing(back=2)))],
    broken.newest_step_looked_for_by_each_rank: [
        followed(Following(ranks=2, updates=8, seconds=0.0), FAST, seed) for seed in SEEDS
    ],
    broken.step_told_after_the_pause: [followed(Following(updates=8, threads=1), seed=seed) for seed in SEEDS],
}


@pytest.mark.parametrize("fault", FOUND_IN_STREAMS, ids=lambda fault: fault.__name__)
def test_fault_of_a_stream_is_found_again(fault, in_full):
    assert finds(fault, FOUND_IN_STREAMS[fault], simulate_stream, in_full)


@pytest.mark.parametrize("rank", [2, 3])
def test_who_dies_at_any_operation_is_named(rank):
    """Two blocks of two ranks: 2 leads 3, and may die when it has reported and 3 has not."""
    job = Job(ranks=4, ranks_per_block=2, saves=1, stages=True, stage="now", keep_last=2, hears=(0,))
    for at in range(1, 40):
        outcome = simulate(Schedule(54, (job,), (Fault("kill", 0, rank, at),)))
        assert outcome.problems == [], f"killed at {at}"


@pytest.mark.parametrize("beside", range(2, 6))
def test_who_has_joined_late_takes_nobody_elses_session_away(beside):
    """Rank 0 of the first job is stopped as it empties its session's store, and continues as the next one joins."""
    jobs = (Job(saves=1, leaves_stopped=True), Job(ranks=4, ranks_per_block=2, saves=1, new_store=False))
    for at in (4, 5):
        outcome = simulate(Schedule(1, jobs, (Fault("stop", 0, at=at, beside=beside),)))
        assert outcome.problems == [], f"stopped at {at}"


@pytest.mark.parametrize("fault", [Fault("disk", 0, at=7, detail="ESTALE"), Fault("kill", 0, at=8)], ids=str)
def test_a_directory_is_durable_though_whoever_made_it_failed_or_was_killed(fault):
    jobs = (Job(ranks=1, saves=2), Job(ranks=1, saves=2), Job(ranks=1, saves=1))
    assert simulate(Schedule(6163, jobs, (fault, Fault("power", 2, at=2)))).problems == []


def test_a_session_whose_host_takes_no_connections_is_left_for_the_next():
    jobs = (Job(saves=1, leaves_stopped=True), Job(saves=1, new_store=False, looks_alone=True))
    assert simulate(Schedule(5689, jobs, (Fault("cut", 0, seconds=15.0),))).problems == []


def test_a_restore_does_not_mix_a_new_branch_with_those_that_it_knew():
    """The first job is stopped between its looks at the branches and at the steps; two others run meanwhile."""
    jobs = (Job(ranks=1, saves=1, looks_alone=True, leaves_stopped=True), Job(ranks=1), Job(ranks=1, saves=1, back=2))
    assert simulate(Schedule(19192, jobs, (Fault("stop", 0, at=4, seconds=3.0),))).problems == []


def test_who_ends_while_it_is_asked_where_it_is_has_ended():
    """Rank 0 gives up for another's sake while rank 2 waits for it, and leaves when rank 2 has begun to ask it."""
    faults = (Fault("signal", 0, at=15), Fault("stop", 0, rank=1, at=9, beside=18))
    outcome = simulate(Schedule(40333, (Job(ranks=3, saves=1, stops=True),), faults))
    assert outcome.problems == []
    (told,) = [what for _, who, what in outcome.trace if who == "job 0 rank 2" and "RankError" in what]
    assert "rank 0 died, or ended before this call" in told
