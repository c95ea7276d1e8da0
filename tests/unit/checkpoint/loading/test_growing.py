"""Containers of the app's own that are empty when a program begins, and are filled as it goes."""

import copy
import importlib
import logging
from collections import defaultdict

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardopt import checkpoint
from shardopt.checkpoint import Manager, PerRank, Strictness
from shardopt.errors import MismatchError
from tests.harness import run_ranks


def filled():
    return {
        "best": {"step": 3.0, "weights": torch.full((2, 3), 3.0, dtype=torch.bfloat16)},
        "losses": [torch.tensor([1.0, 2.0]), torch.tensor([3])],
        "by rank": {0: torch.ones(1), "0.1": (torch.zeros(2), {})},
        "note": None,
    }


def app_of(records):
    return {"model": torch.nn.Linear(2, 2), "records": records, "step": 0}


def same(one, other):
    if isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(other, dict):
        return isinstance(one, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


EMPTY = [
    {},
    None,
    [],
    {"best": {}},
    {"best": None, "losses": [], "note": "none"},
    {"best": {"step": 0.0, "of": "nothing"}, "losses": [1.0, 2.0, 3.0], "note": None},
    defaultdict(list),
]


@pytest.mark.parametrize("empty", EMPTY, ids=repr)
def test_what_was_filled_since_comes_back_into_a_fresh_app(tmp_path, empty):
    checkpoint.save(tmp_path / "c", app_of(filled()))
    app = app_of(empty)
    report = checkpoint.load(tmp_path / "c", app)
    assert same(app["records"], {**filled(), "by rank": {**filled()["by rank"]}})
    assert (app["records"] is empty) == isinstance(empty, dict)  # which the program may have by another name
    assert not report.missing and not report.unexpected and "records.best.weights" in report.loaded


@pytest.mark.parametrize("saved", [{}, [], None, {"best": None}, {"losses": [1.0]}], ids=repr)
def test_what_was_emptied_since_is_empty(tmp_path, saved, caplog):
    checkpoint.save(tmp_path / "c", app_of(saved))
    app = app_of({"best": {"step": 1.0}, "losses": [2.0, 3.0]})
    checkpoint.load(tmp_path / "c", app)
    assert same(app["records"], saved)
    assert "these entries of the app are gone: records." in caplog.text


def test_what_may_be_missing_stays(tmp_path):
    checkpoint.save(tmp_path / "c", app_of({"best": {"step": 1.0, "weights": torch.ones(2)}}))
    app = app_of({"best": {"step": 0.0}, "tokens": 5, "seen": []})
    report = checkpoint.load(tmp_path / "c", app, strict=Strictness(missing="ignore"))
    assert same(app["records"], {"best": {"step": 1.0, "weights": torch.ones(2)}, "tokens": 5, "seen": []})
    assert set(report.missing) == {"records.tokens", "records.seen"}
    checkpoint.save(tmp_path / "emptied", app_of({}))
    app["records"]["best"] = None
    checkpoint.load(tmp_path / "emptied", app, strict=Strictness(missing="ignore"), select="^records")
    assert app["records"]["tokens"] == 5


@pytest.mark.parametrize(
    "own",
    [
        {"losses": torch.zeros(2)},
        {"best": {"weights": torch.zeros(2, 3)}},
        {"rng": PerRank(1)},
        {"step": torch.ones(1)},
    ],
    ids=repr,
)
def test_tensors_of_the_app_are_places_as_ever(tmp_path, own):
    checkpoint.save(tmp_path / "c", app_of(filled()))
    app = app_of(own)
    with pytest.raises(MismatchError) as refused:
        checkpoint.load(tmp_path / "c", app)
    assert app["records"] is own and any(problem.key.startswith("records.") for problem in refused.value.problems)


def test_a_tensor_of_the_app_does_not_become_a_plain_value(tmp_path):
    checkpoint.save(tmp_path / "c", app_of({"best": 3.0}))
    with pytest.raises(MismatchError, match=r"records\.best: found a plain value"):
        checkpoint.load(tmp_path / "c", app_of({"best": torch.zeros(1)}))


def test_values_of_single_ranks_need_their_place(tmp_path):
    checkpoint.save(tmp_path / "c", app_of({"rng": PerRank(1)}))
    with pytest.raises(MismatchError, match=r"records\.rng: found a value per rank"):
        checkpoint.load(tmp_path / "c", app_of({}))


def test_containers_that_grow_are_chosen_and_renamed_as_any_key(tmp_path):
    checkpoint.save(tmp_path / "c", app_of({"best": {}, "old": filled()}))
    app = app_of({"old": {}, "best": None})
    checkpoint.load(tmp_path / "c", app, select=r"^model|^records\.old")
    assert same(app["records"]["old"], filled()) and app["records"]["best"] is None
    app = {**app_of({"best": None}), "kept": None, "step": 0}
    checkpoint.load(tmp_path / "c", app, rename={r"^records\.old": "kept"})
    assert same(app["kept"], filled()) and app["records"]["best"] == {}
    app = app_of({})
    checkpoint.load(tmp_path / "c", app, skip=r"by rank|losses")
    assert same(app["records"]["old"], {key: filled()[key] for key in ("best", "note")})


@pytest.mark.parametrize("here", [[], None, [5.0]], ids=repr)
def test_a_list_of_which_elements_are_not_stored_does_not_close_its_gaps(tmp_path, here):
    losses = [torch.ones(1), 2.0, {"x": torch.ones(2)}]
    checkpoint.save(tmp_path / "whole", app_of({"losses": losses}))
    checkpoint.save(tmp_path / "c", app_of({"losses": losses}), select=r"^(?!records\.losses\.1$)")
    app = app_of({"losses": here})
    for load in (
        lambda: checkpoint.load(tmp_path / "c", app),
        lambda: checkpoint.load(tmp_path / "whole", app, skip=r"losses\.1"),
        lambda: checkpoint.load(tmp_path / "whole", app, skip=r"losses\.1", strict=False),
    ):
        with pytest.raises(
            MismatchError, match=r"records\.losses: found elements \[0, 2\] of a list; .* all"
        ) as refused:
            load()
        assert app["records"]["losses"] is here
    remedy = refused.value.problems[0].remedy
    checkpoint.load(tmp_path / "c", app, select=remedy.split('"')[1])
    assert app["records"]["losses"] is here
    app["records"]["losses"] = []
    checkpoint.load(tmp_path / "whole", app, skip=r"losses\.2")  # there is no gap before the last one
    assert same(app["records"]["losses"], losses[:2])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_list_without_the_empty_dicts_that_dcp_leaves_out_is_refused(tmp_path):
    dcp.save({"w": torch.ones(1), "seen": [{}, {"x": 7}], "mixed": [1, {}, 3]}, checkpoint_id=tmp_path, no_dist=True)
    for seen, mixed in (([{}, {"x": 0}], [0, {}, 0]), ([], [])):
        app = {"w": torch.zeros(1), "seen": seen, "mixed": mixed}
        before = copy.deepcopy(app)
        with pytest.raises(MismatchError) as refused:
            checkpoint.load(tmp_path, app)
        assert {(each.key, each.found) for each in refused.value.problems} == {
            ("seen", "elements [1] of a list"),
            ("mixed", "elements [0, 2] of a list"),
        }
        assert same(app, before)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_int_keys_that_grow_are_ints_where_dcp_has_texts(tmp_path):
    dcp.save(
        {"h": {0: {"loss": 1.0, "acc": 2.0}, 1: {"loss": 3.0}}, "n": {"0": 5}},
        checkpoint_id=tmp_path / "dcp",
        no_dist=True,
    )
    for app in ({"h": {0: {"loss": 0.0}}, "n": {}}, {"h": {0: {"loss": 0.0, "acc": 0.0}, 1: {"loss": 0.0}}, "n": {}}):
        checkpoint.load(tmp_path / "dcp", app)
        assert app == {"h": {0: {"loss": 1.0, "acc": 2.0}, 1: {"loss": 3.0}}, "n": {"0": 5}}
    checkpoint.save(tmp_path / "own", {"h": {"0": 1, "2": 5}})
    app = {"h": {0: 0, 1: 7}}
    checkpoint.load(tmp_path / "own", app, strict=Strictness(missing="ignore"))
    assert app == {"h": {0: 1, 1: 7, 2: 5}}


def test_a_run_has_its_records_again(tmp_path, caplog):
    for begin, rename in ((0, None), (2, {"^model": "net"}), (4, {"^model": "net"})):
        records = {"best": None, "losses": []}
        app = {"net" if rename else "model": torch.nn.Linear(2, 2), "records": records}
        with Manager(tmp_path / "run", stage="now") as manager, caplog.at_level(logging.INFO):
            assert manager.restore(app, rename=rename) == begin
            assert same(records["losses"], [torch.tensor(float(step)) for step in range(begin)])
            for step in (begin + 1, begin + 2):
                records["best"] = {"step": step, "weights": torch.full((3,), step)}
                records["losses"].append(torch.tensor(float(step - 1)))
                manager.save(step, app)
    assert "renamed model.bias" in caplog.text


def test_without_anything_to_grow_a_load_plans_once(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / "c", app_of({"best": {"step": 1}, "losses": []}))
    monkeypatch.setattr(importlib.import_module("shardopt.checkpoint.loading.rank_plan"), "growing_in", None)
    app = app_of({"best": {"step": 0}, "losses": []})
    checkpoint.load(tmp_path / "c", app)
    assert app["records"] == {"best": {"step": 1}, "losses": []}


def _on_ranks(root):
    rank = torch.distributed.get_rank()
    checkpoint.save(f"{root}/c", {"records": filled(), "tables": {f"of {rank}": torch.full((2,), float(rank))}})
    app = {"records": {"best": {}}, "tables": {f"of {rank}": torch.zeros(2)}}
    for options in ({}, {"share_reads": "always"}, {"init_state": True}):
        app["records"] = {"best": {}}
        checkpoint.load(f"{root}/c", app, **options)
        assert same(app["records"], filled())
        assert same(app["tables"], {f"of {rank}": torch.full((2,), float(rank))})
    # Of tables, a rank has those that it has places for; where others have these, an empty dict is not filled.
    app = {"records": None, "tables": {"of 0": torch.zeros(2), "of 1": torch.zeros(2)} if rank else {}}
    checkpoint.load(f"{root}/c", app)
    assert same(app["records"], filled())
    assert same(app["tables"], {f"of {each}": torch.full((2,), float(each)) for each in (0, 1)} if rank else {})
    # Filled on one rank alone, it is on all that have it.
    checkpoint.save(f"{root}/d", {"records": {} if rank else filled()})
    app = {"records": {}}
    checkpoint.load(f"{root}/d", app)
    assert same(app["records"], filled())


def test_ranks_have_what_is_stored_each_for_itself(tmp_path):
    run_ranks(2, _on_ranks, str(tmp_path))


def _with_keys_of_ranks(root):
    rank = torch.distributed.get_rank()
    name = f"rank{rank}"

    def app_of(tokens, times, best):
        return {"tokens": tokens, "nested": {"times": times, "best": best}}

    checkpoint.save(f"{root}/c", app_of({name: rank, "all": 2}, {name: {"a": rank, "b": torch.ones(1)}}, {"x": 1}))
    # What a rank has, begun or filled, goes to it; what none has goes to all.
    app = app_of({name: 0}, {name: {}}, {"x": 0} if rank else {})
    checkpoint.load(f"{root}/c", app)
    expected = {name: rank, "all": 2}, {name: {"a": rank, "b": torch.ones(1)}}, {"x": 1} if rank else {}
    assert same(app, app_of(*expected))
    checkpoint.save(f"{root}/d", app)
    app = app_of({name: 0}, {name: {"a": 0}}, None)
    checkpoint.load(f"{root}/c", app)
    assert same(app, app_of(*expected[:2], {"x": 1}))
    checkpoint.load(f"{root}/c", app)
    assert same(app, app_of(*expected[:2], {"x": 1}))
    app = app_of({}, {}, {})
    checkpoint.load(f"{root}/c", app)
    times = {f"rank{each}": {"a": each, "b": torch.ones(1)} for each in (0, 1)}
    assert same(app, app_of({"rank0": 0, "rank1": 1, "all": 2}, times, {"x": 1}))
    app = app_of({name: 0, "mine": 3, **({"rank1": 4} if rank else {})}, {"rank1": {}}, {})
    checkpoint.load(f"{root}/c", app, strict=Strictness(missing="ignore"))
    assert same(app["tokens"], {name: rank, "mine": 3, "all": 2})
    assert same(app["nested"]["times"], {"rank1": times["rank1"], "rank0": times["rank0"]})


def test_what_some_ranks_have_is_for_these_alone(tmp_path):
    run_ranks(2, _with_keys_of_ranks, str(tmp_path))


def _with_lists_of_ranks(root):
    rank = torch.distributed.get_rank()

    def app_of(fill):  # each rank has one element filled, the other empty
        return {"tables": [{f"of {each}": torch.full((2,), fill)} if each == rank else {} for each in (0, 1)]}

    checkpoint.save(f"{root}/c", app_of(3.0))
    app = app_of(0.0)
    checkpoint.load(f"{root}/c", app)
    assert same(app, app_of(3.0))
    app = app_of(0.0)
    app["tables"][rank]["more"] = 1
    checkpoint.load(f"{root}/c", app, strict=Strictness(missing="ignore"))
    assert len(app["tables"]) == 2 and app["tables"][rank][f"of {rank}"].tolist() == [3.0, 3.0]
    for here in ([], None):
        with pytest.raises(MismatchError, match=r"tables: found elements \[1\] of a list"):
            checkpoint.load(f"{root}/c", {"tables": [] if rank else here}, skip=r"^tables\.0")


def test_elements_of_lists_are_for_the_ranks_that_have_them(tmp_path):
    run_ranks(2, _with_lists_of_ranks, str(tmp_path))


@pytest.mark.parametrize("here", [1, 5])
@pytest.mark.parametrize("form", [lambda each: each, lambda each: {"x": [each], "by": 1}], ids=["tensors", "dicts"])
def test_a_list_of_another_length_says_to_empty_it(tmp_path, here, form):
    stored = [form(torch.full((2,), float(i))) for i in range(3)]
    checkpoint.save(tmp_path / "one", {"seen": stored, "step": 1})
    seen = [form(torch.zeros(2)) for _ in range(here)]
    app = {"seen": seen, "step": 0}
    with pytest.raises(MismatchError) as refused:
        checkpoint.load(tmp_path / "one", app)
    assert all("del it[:]" in each.remedy for each in refused.value.problems)
    del seen[:]
    checkpoint.load(tmp_path / "one", app)
    assert same(seen, stored)


def test_of_a_list_of_dicts_that_lack_a_name_it_is_not_said_to_empty_it(tmp_path):
    checkpoint.save(tmp_path / "c", {"seen": [{"x": torch.ones(2), "y": torch.ones(2)}, {"x": torch.ones(2)}]})
    with pytest.raises(MismatchError) as refused:
        checkpoint.load(tmp_path / "c", {"seen": [{"x": torch.ones(2)}, {"x": torch.ones(2), "z": torch.ones(2)}]})
    assert [each.key for each in refused.value.problems] == ["seen.1.z", "seen.0.y"]
    assert not any("del it[:]" in each.remedy for each in refused.value.problems)
