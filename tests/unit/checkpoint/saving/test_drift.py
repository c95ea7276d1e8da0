"""Replicas that have drifted are named by rounds of hashes that narrow them down, however many there are."""

import json

import pytest

from shardopt.checkpoint.saving.planning import drift
from shardopt.errors import StateError
from shardopt.ranks import as_call
from tests.unit.ranks.test_ranks import Job, stubs_have_no_backend, together

__all__ = ["stubs_have_no_backend"]


def groups_of(rank, changed, sizes):
    return {
        group: [(f"{group}.{i:04}", "[0:4]", "x" * 15 + str(rank) * ((rank, i) in changed)) for i in range(size)]
        for group, size in sizes.items()
    }


def refused_on(tmp_path, changed, sizes=(("a", 1000), ("b", 3)), without=()):
    """The error of each of three ranks, and the largest report of any."""
    largest = [0]

    def refuse(ranks):
        own = {name: size for name, size in sizes if (ranks.rank, name) not in without}
        groups, agree = groups_of(ranks.rank, changed, own), ranks.agree

        def measured(call, work, report, **rest):
            def reported(found):
                largest[0] = max(largest[0], len(json.dumps(report(found))))
                return report(found)

            return agree(call, work=work, report=reported, **rest)

        ranks.agree = measured
        drift.refuse_drifted(ranks, as_call("saving"), groups, [name for name, _ in sizes])

    outcomes = together(Job("hash", tmp_path).start(3), refuse)
    assert all(type(each) is StateError and str(each) == str(outcomes[0]) for each in outcomes), outcomes
    return outcomes[0].problems, largest[0]


def test_each_replica_that_differs_is_named_with_its_ranks(tmp_path):
    problems, largest = refused_on(tmp_path, {(1, 0), (2, 517), (1, 999)})
    assert [(each.key, each.found) for each in problems] == [
        ("a.0000", "other bytes of [0:4] on rank 1 than on rank 0"),
        ("a.0517", "other bytes of [0:4] on rank 2 than on rank 0"),
        ("a.0999", "other bytes of [0:4] on rank 1 than on rank 0"),
        ("b.0000", "other bytes of [0:4] on rank 1 than on rank 0"),
    ]
    assert largest < 4 << 10  # where the hashes of all are 50 KiB


def test_of_state_that_differs_the_causes_are_named(tmp_path):
    def refuse(ranks):
        keys = ("model.w", "optimizer.state.w.momentum_buffer", "optimizer.state.w.step")
        groups = {"g": [(key, "[]", f"{ranks.rank:016}") for key in keys]}
        drift.refuse_drifted(ranks, as_call("saving"), groups, ["g"])

    for outcome in together(Job("hash", tmp_path).start(2), refuse):
        of_weight, of_moment, of_counter = (each.remedy for each in outcome.problems)
        assert "in some step a rank had none" in of_counter
        assert "wrap the value in PerRank" in of_weight and "wrap the value in PerRank" in of_moment
        assert ["state.pop(p, None)" in each for each in (of_weight, of_moment, of_counter)] == [False, True, True]


def test_ranks_that_do_not_hold_a_group_say_nothing_of_it(tmp_path):
    problems, _ = refused_on(tmp_path, {(2, 1)}, (("a", 40), ("b", 3)), without={(0, "b"), (1, "a")})
    assert [(each.key, each.found) for each in problems] == [
        ("a.0001", "other bytes of [0:4] on rank 2 than on rank 0"),
        ("b.0001", "other bytes of [0:4] on rank 2 than on rank 1"),
    ]


@pytest.mark.parametrize("most", [32, 5])
def test_of_very_many_the_first_are_named(tmp_path, monkeypatch, most):
    monkeypatch.setattr(drift, "_MOST_RANGES", 0)
    monkeypatch.setattr(drift, "_LEAST_RANGES", most)
    problems, _ = refused_on(tmp_path, {(1, i) for i in range(700)}, (("a", 1000),))
    assert [each.key for each in problems] == [f"a.{i:04}" for i in range(most)]
