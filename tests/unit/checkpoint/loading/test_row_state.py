"""State of table rows that was stored for other parts of the columns: merged by the mean, spread, or refused."""

import logging

import pytest
import torch
import torch.distributed as dist

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint import Strictness
from shardopt.errors import CorruptionError, MismatchError
from shardopt.optim import RowWiseAdagrad, RowWiseAdam
from shardopt.sharding.box import Box
from shardopt.sharding.sharded_tensor import sharded_tensor_at

ROWS, NAME = 5, "tables.user.weight"
KEY = f"optimizer.state.{NAME}.user.momentum1"
MERGE = Strictness(row_state="merge")


@pytest.fixture(autouse=True)
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def cut(weight, widths):
    """The weight in parts of the columns, as torchrec has it; all of them on this rank."""
    parts = [part.contiguous() for part in weight.split(widths, dim=1)]
    offsets = [sum(widths[:number]) for number in range(len(widths))]
    placed = [(Box((0, at), (len(weight), width)), 0) for at, width in zip(offsets, widths, strict=True)]
    return sharded_tensor_at(weight.shape, placed, parts, parts[0])


def app_of(state, widths=(6,)):
    return {
        "model": {NAME: cut(torch.zeros(ROWS, sum(widths)), list(widths))},
        "optimizer": {"state": {NAME: {"user.momentum1": state}}},
    }


def state_of(app):
    return app["optimizer"]["state"][NAME]["user.momentum1"]


def save_parts(path, widths=(1, 2, 3)):
    parts = torch.rand(len(widths), ROWS)
    checkpoint.save(path, app_of(parts.flatten(), widths))
    return parts


def test_a_row_gets_the_mean_of_its_parts_weighted_by_their_columns(tmp_path):
    parts = save_parts(tmp_path / "c")
    app = app_of(torch.zeros(ROWS))
    report = checkpoint.load(tmp_path / "c", app, strict=MERGE)
    torch.testing.assert_close(state_of(app), (1 * parts[0] + 2 * parts[1] + 3 * parts[2]) / 6)
    assert report.merged == (KEY,)


def test_merged_rows_are_reported_also_where_a_container_grows(tmp_path):
    """That takes a second round, which used to find the rows merged already."""
    parts = torch.rand(2, ROWS)
    checkpoint.save(tmp_path / "c", {**app_of(parts.flatten(), (3, 3)), "notes": {"seen": torch.ones(2)}})
    app = {**app_of(torch.zeros(ROWS)), "notes": {}}
    report = checkpoint.load(tmp_path / "c", app, strict=MERGE)
    torch.testing.assert_close(state_of(app), parts.mean(dim=0))
    assert report.merged == (KEY,) and torch.equal(app["notes"]["seen"], torch.ones(2))


@pytest.mark.parametrize("widths", [(3, 3), (1, 2, 3)])
@pytest.mark.parametrize("algorithm", [RowWiseAdagrad, RowWiseAdam])
def test_the_merged_number_is_what_whole_rows_would_have_had(tmp_path, algorithm, widths):
    moment = "sum" if algorithm is RowWiseAdagrad else "exp_avg_sq"
    options = {"initial_accumulator_value": 0.3} if algorithm is RowWiseAdagrad else {}
    wide = torch.nn.Parameter(torch.zeros(ROWS, 6))
    narrow = [torch.nn.Parameter(torch.zeros(ROWS, width)) for width in widths]
    whole, apart = algorithm([wide], **options), algorithm(narrow, **options)
    for _ in range(4):
        ids = torch.randint(ROWS, (1, 3))
        gradient = torch.sparse_coo_tensor(ids, torch.randn(3, 6), (ROWS, 6), check_invariants=True).coalesce()
        wide.grad = gradient
        for part, values in zip(narrow, gradient.values().split(widths, dim=1), strict=True):
            part.grad = torch.sparse_coo_tensor(gradient.indices(), values, part.shape, check_invariants=True)
        whole.step()
        apart.step()
    parts = torch.cat([apart.state[part][moment].flatten() for part in narrow])
    checkpoint.save(tmp_path / "c", app_of(parts, widths))
    app = app_of(torch.zeros(ROWS, 1))
    checkpoint.load(tmp_path / "c", app, strict=MERGE)
    torch.testing.assert_close(state_of(app), whole.state[wide][moment], rtol=1e-6, atol=0)


def test_each_part_of_the_app_gets_the_number_of_its_row(tmp_path):
    stored = torch.rand(ROWS, 1)
    checkpoint.save(tmp_path / "c", app_of(stored))
    app = app_of(torch.zeros(2 * ROWS), (2, 4))
    report = checkpoint.load(tmp_path / "c", app, strict=MERGE)
    assert torch.equal(state_of(app).view(2, ROWS), stored.flatten().expand(2, ROWS))
    assert report.merged == (KEY,)


def test_whole_rows_stay_bit_for_bit_in_the_other_shape_and_are_not_told_of(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    stored = torch.rand(ROWS)
    checkpoint.save(tmp_path / "c", app_of(stored))
    app = app_of(torch.zeros(ROWS, 1))
    assert checkpoint.load(tmp_path / "c", app, strict=MERGE).merged == ()
    assert torch.equal(state_of(app).flatten(), stored)
    assert "parts of the columns" not in caplog.text


def test_equal_numbers_of_parts_are_kept_exactly(tmp_path):
    """Such as counts of steps, which every part has alike."""
    stored = torch.rand(ROWS)
    checkpoint.save(tmp_path / "c", app_of(stored.repeat(3), (1, 2, 3)))
    app = app_of(torch.zeros(2 * ROWS), (3, 3))
    checkpoint.load(tmp_path / "c", app, strict=MERGE)
    assert torch.equal(state_of(app), stored.repeat(2))


def test_the_log_says_in_one_line_what_was_merged(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    save_parts(tmp_path / "c")
    checkpoint.load(tmp_path / "c", app_of(torch.zeros(2 * ROWS), (3, 3)), strict=MERGE)
    (line,) = [each.getMessage() for each in caplog.records if "parts of the columns" in each.getMessage()]
    assert f"{KEY} (3 to 2)" in line


@pytest.mark.parametrize("strict", [True, Strictness(missing="ignore", unexpected="ignore")])
def test_a_strict_load_refuses_to_merge_and_names_the_way(tmp_path, strict):
    save_parts(tmp_path / "c")
    app = app_of(torch.zeros(ROWS))
    with pytest.raises(MismatchError) as raised:
        checkpoint.load(tmp_path / "c", app, strict=strict)
    (problem,) = raised.value.problems
    assert problem.key == KEY and not state_of(app).any()
    assert "rows in 3 parts of the columns" in problem.found and "whole rows" in problem.required
    assert 'Strictness(row_state="merge")' in problem.remedy
    checkpoint.load(tmp_path / "c", app, strict=MERGE)  # as the error advises


def test_a_load_that_is_not_strict_merges(tmp_path):
    save_parts(tmp_path / "c")
    assert checkpoint.load(tmp_path / "c", app_of(torch.zeros(ROWS)), strict=False).merged == (KEY,)


def test_parts_whose_columns_are_not_stored_are_refused(tmp_path):
    """Not taken for equal ones: the mean would be another."""
    checkpoint.save(tmp_path / "c", app_of(torch.rand(3 * ROWS), (6,)))
    app = app_of(torch.zeros(ROWS))
    with pytest.raises(MismatchError, match=r"weights with select=: .* not tell which columns a part had"):
        checkpoint.load(tmp_path / "c", app, strict=MERGE)
    assert checkpoint.load(tmp_path / "c", app, select=r"^model\.").loaded == (f"model.{NAME}",)  # as it advises
    same = app_of(torch.zeros(3 * ROWS), (6,))
    checkpoint.load(tmp_path / "c", same)
    assert state_of(same).all()


def test_state_of_one_of_two_tables_of_a_name_is_refused(tmp_path):
    """A teacher's columns may be cut differently."""
    app = app_of(torch.rand(2 * ROWS), (2, 4))
    checkpoint.save(tmp_path / "c", {"teacher": {NAME: cut(torch.zeros(ROWS, 6), [4, 2])}, **app})
    with pytest.raises(MismatchError, match="do not tell which columns a part had"):
        checkpoint.load(tmp_path / "c", app_of(torch.zeros(ROWS)), strict=MERGE, select=r"^(model|optimizer)\.")


@pytest.mark.parametrize("has_weights", [True, False])
def test_a_table_with_twice_the_rows_is_not_taken_for_one_in_two_parts(tmp_path, has_weights):
    checkpoint.save(tmp_path / "c", app_of(torch.rand(ROWS)))
    table, state = torch.zeros(2 * ROWS, 6), torch.zeros(2 * ROWS)
    app = {"model": {NAME: cut(table, [6])}, "optimizer": app_of(state)["optimizer"]}
    if not has_weights:
        del app["model"]
    for strict in (MERGE, False):
        with pytest.raises(MismatchError) as raised:
            checkpoint.load(tmp_path / "c", app, strict=strict, select="^optimizer")
        assert "columns" not in str(raised.value) and not state.any()


def test_what_is_no_state_of_rows_is_refused_as_before(tmp_path):
    checkpoint.save(tmp_path / "c", app_of(torch.rand(ROWS + 1)))
    with pytest.raises(MismatchError) as raised:
        checkpoint.load(tmp_path / "c", app_of(torch.zeros(ROWS)), strict=MERGE)
    (problem,) = raised.value.problems
    assert "columns" not in str(problem)


def test_state_of_a_keyed_optimizer_is_merged_too(tmp_path):
    """From torchrec's names and shape to ours, which refuses the shape itself unless it is merged."""
    parts = save_parts(tmp_path / "c")
    table = torch.nn.Parameter(torch.zeros(ROWS, 6))
    app = {"model": {NAME: table}, "optimizer": shardopt.keyed(RowWiseAdagrad, {NAME: table})}
    how = {"rename": {r"user\.momentum1$": "sum"}, "init_state": True}
    missing = {"missing": "ignore"}  # the step, which counts for a decay of the rate alone
    with pytest.raises(MismatchError, match=r'row_state="merge"'):
        checkpoint.load(tmp_path / "c", app, strict=Strictness(**missing), **how)
    report = checkpoint.load(tmp_path / "c", app, strict=Strictness(**missing, row_state="merge"), **how)
    mean = torch.tensor([1.0, 2.0, 3.0]) @ parts / 6
    torch.testing.assert_close(app["optimizer"].state[table]["sum"].flatten(), mean)
    assert report.merged == (f"optimizer.state.{NAME}.sum",)


def test_large_tables_are_merged_in_pieces_and_cast(tmp_path, monkeypatch):
    monkeypatch.setattr(__name__ + ".ROWS", 700_001)
    parts = save_parts(tmp_path / "c", (4, 2))
    app = app_of(torch.zeros(3 * ROWS, dtype=torch.float64), (2, 2, 2))
    checkpoint.load(tmp_path / "c", app, strict=Strictness(row_state="merge", dtype="cast"), transactional=True)
    mean = (2 * parts[0] + parts[1]) / 3
    torch.testing.assert_close(state_of(app).view(3, ROWS), mean.double().expand(3, ROWS))


def test_damage_of_a_part_is_found_before_anything_changes(tmp_path):
    save_parts(tmp_path / "c")
    with checkpoint.open(tmp_path / "c") as reader:
        stored = reader.read(KEY).numpy().tobytes()
    (file,) = [each for each in (tmp_path / "c").glob("*.safetensors") if stored in each.read_bytes()]
    data = bytearray(file.read_bytes())
    data[data.index(stored)] ^= 1
    file.write_bytes(data)
    app = app_of(torch.zeros(ROWS))
    with pytest.raises(CorruptionError, match="this load changed nothing"):
        checkpoint.load(tmp_path / "c", app, strict=MERGE, transactional=True)
    assert not state_of(app).any()


def test_tensors_that_are_one_in_the_app_are_compared_in_a_load_that_merges_too(tmp_path):
    def app(widths, embed, head):
        app = app_of(torch.zeros(ROWS * len(widths)), widths)
        return {**app, "model": {**app["model"], "embed": embed, "head": head}}

    checkpoint.save(tmp_path, app((1, 2, 3), torch.ones(4), torch.zeros(4)))
    one = torch.zeros(4)
    with pytest.raises(MismatchError, match="found other values"):
        checkpoint.load(tmp_path, app((6,), one, one), strict=MERGE)
