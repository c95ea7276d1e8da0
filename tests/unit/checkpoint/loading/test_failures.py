"""Errors between ranks: bounded by how many ranks there are, the same on all of them, and never without a problem."""

import copy
import json
import pickle

from shardopt.checkpoint.loading.reconcile import _pack, _unpack
from shardopt.errors import MismatchError, Problem, RankError, ShardoptError, StateError
from shardopt.ranks.failures import describe, merge

RANKS = 16_384


def problems_of(rank, count=1000, remedy="add it"):
    return [Problem(f"stage.{rank}.layers.{i}.weight", "nothing", "a tensor", remedy) for i in range(count)]


def sent_by(rank, ranks, count=1000, **rest):
    return json.loads(json.dumps(describe(MismatchError("does not fit", problems_of(rank, count, **rest)), ranks)))


def counted(wire):
    return len(wire["problems"]) + sum(wire.get("left_out", {}).values())


def test_a_rank_of_many_sends_its_first_problems_and_counts_of_the_rest():
    sent = sent_by(7, RANKS)
    assert len(json.dumps(sent)) < 6 << 10
    assert [Problem(**each) for each in sent["problems"]] == problems_of(7)[: len(sent["problems"])]
    assert counted(sent) == 1000 and sent["left_out"].keys() == {"add it"}
    assert sent_by(7, RANKS) == sent  # the same of equal ones


def test_ranks_of_a_small_job_send_all():
    sent = sent_by(0, 16)
    assert len(sent["problems"]) == 1000 and "left_out" not in sent
    merged = merge("loading", [(rank, sent_by(rank, 2)) for rank in range(2)], 2)
    assert len(merged["problems"]) == 2000 and "left_out" not in merged


def test_what_all_get_is_bounded_though_every_rank_has_other_problems():
    ranks = 1024
    failures = [(rank, sent_by(rank, RANKS, 40)) for rank in range(ranks)]
    merged = merge("loading", failures, RANKS)
    assert len(json.dumps(merged)) < 80 << 10
    assert counted(merged) == 40 * ranks
    shown = [problem["key"] for problem in merged["problems"]]
    assert shown == [f"stage.{rank}.layers.0.weight" for rank in range(len(shown))]  # in turns


def test_one_rank_does_not_hide_the_others():
    failures = [(0, sent_by(0, 1, 3000)), (1, sent_by(1, 1, 2))]
    merged = merge("loading", failures, 4096)
    assert [each["key"] for each in merged["problems"][:4]] == [
        "stage.0.layers.0.weight",
        "stage.1.layers.0.weight",
        "stage.0.layers.1.weight",
        "stage.1.layers.1.weight",
    ]
    assert counted(merged) == 3002


def test_equal_problems_are_there_once_and_counted_once():
    sent = sent_by(3, RANKS)
    merged = merge("loading", [(rank, dict(sent)) for rank in range(RANKS)], RANKS)
    assert counted(merged) == 1000 and merged["message"] == "loading failed: does not fit"


def test_many_messages_and_long_ones_are_cut():
    failures = [(rank, describe(OSError(f"{rank}" * 100_000), RANKS)) for rank in range(100)]
    merged = merge("saving", failures, RANKS)
    assert len(merged["message"]) < 64 << 10
    assert "in other words on ranks 17, 18" in merged["message"]


def test_many_kinds_are_summed_up():
    problems = [problem for i in range(50) for problem in problems_of(0, 50, f"do {i}")]
    sent = describe(MismatchError("does not fit", problems), RANKS)
    assert len(sent["left_out"]) == 9 and counted(sent) == 2500


def test_a_problem_that_is_larger_than_the_bound_is_there_shortened():
    sent = describe(StateError("wrong", [Problem("k" * 10_000, "x", "y", "z")]), RANKS)
    assert sent["problems"][0]["key"].startswith("kkk") and len(json.dumps(sent)) < 2000


def test_the_code_goes_wherever_the_error_goes():
    sent = [(rank, describe(StateError("wrong", code="tied-parameters"), 2)) for rank in range(2)]
    error = ShardoptError.from_json(merge("saving", sent, 2))
    assert isinstance(error, StateError) and str(error) == "saving failed: wrong [tied-parameters]"
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error), ShardoptError.from_json(error.to_json())):
        assert (same.code, str(same)) == (error.code, str(error))
    assert ShardoptError.from_json({**error.to_json(), "code": "of-a-later-version"}).code == StateError.code
    other = ShardoptError.from_json(describe(KeyError("x")))
    assert isinstance(other, RankError) and other.code == "rank-failed"


def test_a_code_stands_at_the_end_of_the_first_line():
    error = RankError("rank 1 is elsewhere:\n  train.py:3 step", [Problem("a", "b", "c", "d")])
    assert str(error).splitlines()[:2] == ["rank 1 is elsewhere: [rank-lost]", "  train.py:3 step"]


def test_the_error_says_how_many_more_there_are_wherever_it_goes():
    error = ShardoptError.from_json(merge("loading", [(0, sent_by(0, RANKS)), (1, sent_by(1, RANKS))], RANKS))
    assert isinstance(error, MismatchError)
    count = 2000 - len(error.problems)
    for same in (error, pickle.loads(pickle.dumps(error)), ShardoptError.from_json(error.to_json())):
        assert f"... and {count} more that ranks have met: add it" in str(same)


def test_keys_travel_as_runs_of_places():
    stored = [f"k{i:03}" for i in range(200)]
    for keys in ([], stored, stored[5:17], [stored[0], *stored[50:60], stored[199]]):
        assert _unpack(_pack(keys, stored), stored) == keys
        assert _unpack(_pack(keys, None), None) == keys
    assert _pack(stored[5:17], stored) == [5, 1, 12]


class Odd(Exception):
    def __str__(self):
        return self.text  # which it lacks


def test_an_error_that_has_no_text_is_reported_by_its_type():
    [problem] = [describe(Odd())["message"]]
    assert "Odd: an error without a text (AttributeError)" in problem
