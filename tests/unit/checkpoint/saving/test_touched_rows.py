"""Incremental saves of tables of which steps touch some rows: one process; several ranks are in tests/distributed."""

import random

import numpy as np
import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.saving import save as saving
from shardopt.checkpoint.saving.async_save import AsyncSaver
from shardopt.checkpoint.saving.options import SaveTerms
from shardopt.checkpoint.saving.writing import row_prints
from shardopt.checkpoint.saving.writing.earlier import OnDisk
from shardopt.checkpoint.saving.writing.row_prints import RowPrints, prints_of
from tests.unit.checkpoint.saving.test_deltas import deltas_of, filled, is_as_saved, save

ROWS, COLUMNS = 6000, 64
ROW_BYTES = 4 * COLUMNS


@pytest.fixture(autouse=True)
def no_prints(monkeypatch):
    monkeypatch.setattr(saving, "_prints", RowPrints())


@pytest.fixture
def unread(monkeypatch):
    """Begins to fail each reading of the base."""

    def refuse(self):
        raise AssertionError("the base was read")

    return lambda: monkeypatch.setattr(OnDisk, "reading", refuse)


def table(rows=ROWS, columns=COLUMNS, dtype=torch.float32):
    return {"table": filled(dtype, (rows, columns)), "sum": filled(torch.float32, (rows, 1), 1)}


def touch(app, seed, share=0.01):
    rows = torch.from_numpy(
        np.random.default_rng(seed).permutation(len(app["table"]))[: int(share * len(app["table"]))]
    )
    app["table"][rows] = filled(app["table"].dtype, (len(rows), app["table"].shape[1]), seed + 7)
    app["sum"][rows] = filled(torch.float32, (len(rows), 1), seed + 8)
    return rows


def begun(root, app):
    """Saves 0 and 1, of which the second finds changed rows: from then on their prints are known."""
    save(root, 0, app)
    touch(app, 0)
    save(root, 1, app, base=0)


@pytest.mark.parametrize("columns", [COLUMNS, 96, 100, 33, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_touched_rows_are_found_without_the_bytes_of_the_base(tmp_path, unread, columns, dtype):
    app = table(columns=columns, dtype=dtype)
    begun(tmp_path, app)
    unread()
    for step in (2, 3):
        touch(app, step)
        save(tmp_path, step, app, base=step - 1)
        assert deltas_of(tmp_path, step, "table") == [step]
    assert is_as_saved(tmp_path / "3", app)


def test_a_save_writes_at_most_1_3_of_the_touched_bytes(tmp_path):
    app = table(rows=100_000)
    begun(tmp_path, app)
    rows = touch(app, 2)
    save(tmp_path, 2, app, base=1)
    written = sum(file.stat().st_size for file in (tmp_path / "2").iterdir())
    assert written <= 1.3 * len(rows) * (ROW_BYTES + 4)


def by_data(app):
    app["table"].data[17] += 1


def by_numpy(app):
    app["table"].numpy()[3001, 5] = 9


def by_other_memory(app):
    app["table"] = app["table"].clone()
    app["table"][44] = 0


def by_a_swap(app):
    app["table"].set_(torch.cat([app["table"][:500] * 2, app["table"][500:]]))


@pytest.mark.parametrize("change", [by_data, by_numpy, by_other_memory, by_a_swap])
def test_a_change_that_nobody_told_is_saved_with_the_touched_rows(tmp_path, change, unread):
    app = {name: torch.nan_to_num(each) for name, each in table().items()}
    begun(tmp_path, app)
    unread()
    touch(app, 2)  # in every segment
    change(app)
    save(tmp_path, 2, app, base=1)
    assert is_as_saved(tmp_path / "2", app)


def test_rows_of_a_failed_save_are_in_the_next_one(tmp_path, monkeypatch):
    app = table()
    begun(tmp_path, app)
    touch(app, 2)
    with monkeypatch.context() as context:

        def fail(*_, **__):
            raise OSError("no disk")

        context.setattr(saving, "write_files", fail)
        with pytest.raises(Exception, match="no disk"):
            save(tmp_path, 2, app, base=1)
    touch(app, 3)
    save(tmp_path, 3, app, base=1)
    assert deltas_of(tmp_path, 3, "table") == [2]
    assert is_as_saved(tmp_path / "3", app)


def test_rows_touched_while_a_save_writes_belong_to_the_next_one(tmp_path):
    app, saver = table(), AsyncSaver()
    states = []
    for step in range(5):
        options = SaveTerms(durable=False, base=str(tmp_path / str(step - 1)) if step else None)
        saver.save(tmp_path / str(step), app, options)
        states.append({name: each.clone() for name, each in app.items()})
        touch(app, step)
    saver.close()
    assert deltas_of(tmp_path, 4, "table") == [4]
    assert all(is_as_saved(tmp_path / str(step), states[step]) for step in range(5))


def test_two_series_of_saves_each_find_the_rows_since_their_own_last_one(tmp_path):
    app = {"app": table()}
    with (
        checkpoint.Manager(tmp_path / "run", incremental=True) as manager,
        checkpoint.Publisher(tmp_path / "stream", durable=False) as publisher,
    ):
        for step in range(1, 10):
            touch(app["app"], step)
            if step % 2:
                manager.save(step, app)
                assert is_as_saved(manager.path(step), {f"app.{name}": each for name, each in app["app"].items()})
            if step % 3 != 1:
                publisher.publish(step, {"table": app["app"]["table"]}).result()
                (newest,) = (tmp_path / "stream").glob(f"step-{step:08d}*")
                assert is_as_saved(newest, {"table": app["app"]["table"]})


def test_another_base_than_the_last_save_is_compared_whole(tmp_path):
    app = table()
    begun(tmp_path, app)
    touch(app, 2)
    save(tmp_path, 2, app, base=1)
    touch(app, 3)
    save(tmp_path, 3, app, base=0)
    assert deltas_of(tmp_path, 3, "table") == [1]
    assert is_as_saved(tmp_path / "3", app)


def test_a_box_that_was_unchanged_in_a_save_is_still_known(tmp_path, unread):
    app = {**table(), "step": torch.zeros(3)}
    begun(tmp_path, app)
    app["step"] += 1
    save(tmp_path, 2, app, base=1)
    unread()
    touch(app, 3)
    save(tmp_path, 3, app, base=2)
    assert is_as_saved(tmp_path / "3", app)


def test_stores_that_nobody_reads_again_get_deltas_too(tmp_path, unread):
    app, root = table(), f"memory://shardopt-touched/{tmp_path.name}"
    begun(root, app)
    unread()
    touch(app, 2)
    report = save(root, 2, app, base=1)
    assert deltas_of(root, 2, "table") == [1]
    assert report.bytes_total < 0.1 * app["table"].nbytes
    assert is_as_saved(f"{root}/2", app)


def test_a_segment_that_changed_without_a_row_makes_the_save_read_the_base(tmp_path, monkeypatch):
    """As if a changed row had its old print: what a reader gets must still be what is here."""
    app = table()
    begun(tmp_path, app)
    real = row_prints._Prints.changed

    def misses(self, *args):
        rows, prints = real(self, *args)
        return rows[rows >= 2000], prints[rows >= 2000]

    monkeypatch.setattr(row_prints._Prints, "changed", misses)
    touch(app, 2)
    save(tmp_path, 2, app, base=1)
    assert deltas_of(tmp_path, 2, "table") == [2]
    assert is_as_saved(tmp_path / "2", app)


def test_a_tensor_of_which_all_rows_change_is_not_asked_for_rows_again(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(row_prints, "prints_of", lambda *args: calls.append(args) or prints_of(*args))
    root = f"memory://shardopt-touched-dense/{tmp_path.name}"
    app = table()
    for step in range(5):
        save(root, step, app, base=step - 1 if step else None)
        app["table"] += 1
        app["sum"] += 1
        if step >= 2:
            calls.clear()
    save(root, 5, app, base=4)
    assert not calls and is_as_saved(f"{root}/5", app)


def test_who_saves_whole_or_changes_elements_computes_no_prints(tmp_path, monkeypatch):
    def fail(*_):
        raise AssertionError("prints were computed")

    monkeypatch.setattr(row_prints, "prints_of", fail)
    app = {"weight": torch.arange(4096.0 * 64).reshape(4096, 64)}
    save(tmp_path, 0, app)
    save(tmp_path, 1, app)
    for step in (2, 3):
        app["weight"].view(-1)[step::37] += 1
        save(tmp_path, step, app, base=step - 1)
    assert deltas_of(tmp_path, 3, "weight") == [2]


def test_signs_and_places_alone_make_other_prints():
    rows = torch.arange(1.0, 8 * 64 + 1).reshape(8, 64)
    before = prints_of(memoryview(rows.numpy()).cast("B"), 256)
    upper = rows.clone()
    upper[:, 1:5:2] *= -1  # the highest bits of two words
    lower = rows.clone()
    lower[:, 0:4:2] *= -1
    swapped = rows[:, torch.arange(64).roll(2)].contiguous()
    for each in (upper, lower, -rows, swapped):
        assert (prints_of(memoryview(each.numpy()).cast("B"), 256) != before).all()


class Job:
    """A job that is killed now and then: tables under sparse optimizers, in the ways in which their rows may change."""

    def __init__(self, root, seed):
        self.root, self.pick = root, random.Random(seed)
        torch.manual_seed(seed)
        self.saved = {}
        self.deltas = 0
        self.start()

    def start(self):
        self.model = torch.nn.ModuleDict(
            {name: torch.nn.Embedding(2500, 24, sparse=True) for name in ("SparseAdam", "RowWiseAdagrad", "SGD")}
        )
        self.optimizers = {
            name: shardopt.keyed(name, self.model[name].named_parameters(), lr=0.1) for name in self.model
        }
        self.app = {"model": self.model, **self.optimizers, "step": 0}
        self.stage = self.pick.choice([None, "now"])
        self.manager = checkpoint.Manager(self.root, incremental=True, keep=2, stage=self.stage)
        self.manager.restore(self.app)
        if self.saved:
            assert self.app["step"] == max(self.saved)
            self.check(self.saved[self.app["step"]])

    def tensors(self):
        weights = {name: each.weight.detach().clone() for name, each in self.model.items()}
        states = {
            f"{name}.{key}": torch.as_tensor(each).clone()
            for name, optimizer in self.optimizers.items()
            for state in optimizer.state.values()
            for key, each in state.items()
        }
        return weights | states

    def check(self, wanted):
        here = self.tensors()
        assert here.keys() == wanted.keys()
        assert all(torch.equal(here[name], each) for name, each in wanted.items())

    def update(self):
        for _ in range(self.pick.randrange(1, 4)):
            ids = torch.randint(0, 2500, (self.pick.choice([3, 25, 60]),))
            sum(each(ids).square().sum() for each in self.model.values()).backward()
            for optimizer in self.optimizers.values():
                optimizer.step()
                optimizer.zero_grad()

    def change(self):
        weight = self.pick.choice(list(self.model.values())).weight
        how = self.pick.randrange(4)
        if how == 0:
            weight.data[self.pick.randrange(2500)] = 0
        elif how == 1:
            weight.detach().numpy()[self.pick.randrange(2500), 3] += 1
        elif how == 2:
            weight.data = weight.data.clone() * (2 if self.pick.random() < 0.3 else 1)
        else:
            with torch.no_grad():
                weight[self.pick.randrange(2000) :][:400] += 1

    def save(self, monkeypatch):
        self.app["step"] += 1
        step, fails = self.app["step"], self.pick.random() < 0.2
        with monkeypatch.context() as context:
            if fails:
                context.setattr(saving, "write_files", lambda *_, **__: [][0])
            try:
                pending = self.manager.save(step, self.app)
                wanted = self.tensors()
                if self.stage is not None:
                    self.update()
                    pending.result()
            except Exception:
                assert fails
            else:
                assert not fails
                self.saved[step] = wanted
                with checkpoint.open(self.manager.path(step)) as reader:
                    layout = reader.manifest.tensors["model.SGD.weight"].layout
                    self.deltas = max(self.deltas, len(layout.entry(0).deltas))


@pytest.mark.parametrize("seed", [1, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in range(2, 20))])
def test_any_sequence_of_updates_changes_and_faults_restores_bit_for_bit(tmp_path, monkeypatch, seed):
    job = Job(tmp_path / "run", seed)
    for _ in range(40 if seed == 1 else 150):
        how = job.pick.random()
        if how < 0.5:
            job.update()
        elif how < 0.6:
            job.change()
        elif how < 0.95:
            job.save(monkeypatch)
        elif job.saved:
            job.start()
    job.start()
    assert job.deltas > 1
