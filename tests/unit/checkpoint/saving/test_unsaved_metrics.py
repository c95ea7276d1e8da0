"""A metric in the app that saves nothing is told of once; one that saves its states, or that a model has, is not."""

import torch

from shardopt import checkpoint


class Metric(torch.nn.Module):
    """As torchmetrics': states are attributes; metrics are equal by a metric of their values."""

    def __init__(self):
        super().__init__()
        self.total, self.is_persistent = torch.zeros(()), False

    @property
    def metric_state(self):
        return {"total": self.total}

    def persistent(self, mode):
        self.is_persistent = mode

    def state_dict(self, *args, **kwargs):
        return self.metric_state if self.is_persistent else {}

    def load_state_dict(self, state): ...

    def __hash__(self):
        return hash(id(self.total))

    def __eq__(self, other):
        return Metric()


def test_a_metric_that_saves_nothing_is_told_of_once(tmp_path, caplog):
    model = torch.nn.Linear(2, 1)
    model.accuracy = Metric()
    metrics = torch.nn.ModuleDict({"a": Metric(), "b": Metric()})
    saved = Metric()
    saved.persistent(True)
    app = {"model": model, "auc": Metric(), "metrics": metrics, "saved": saved, "empty": torch.nn.Identity()}
    for number in range(2):
        checkpoint.save(tmp_path / str(number), app)
        (line,) = [each.message for each in caplog.records if "persistent(True)" in each.message]
        assert line.startswith("nothing of auc, metrics is saved")


class Loss(torch.nn.Module):
    """One of the program's own, without parameters, that logs by a metric."""

    def __init__(self):
        super().__init__()
        self.seen = Metric()


def test_only_saves_of_the_metric_itself_tell(tmp_path, caplog):
    """A save of the model alone, or an estimate, used to use up the one warning."""
    app = {"model": torch.nn.Linear(2, 1), "auc": Metric(), "loss": Loss()}
    checkpoint.save(tmp_path / "1", app, select=r"^model\.")
    checkpoint.estimate(app, tmp_path / "2", measure_seconds=0)
    assert not caplog.text
    checkpoint.async_save(tmp_path / "3", app).result()
    assert caplog.text.count("nothing of auc is saved") == 1


class Collection(torch.nn.ModuleDict):
    """As torchmetrics': asked for its states, it copies those of one member to the others."""

    @property
    def metric_state(self):
        raise AssertionError("a save changes metrics")


def test_a_collection_is_not_asked_for_its_states(tmp_path, caplog):
    around = Metric()
    around.inner = Collection({"a": Metric()})
    checkpoint.save(tmp_path, {"around": around, "metrics": Collection({"a": Metric()}), "x": torch.zeros(1)})
    assert "nothing of around, metrics is saved" in caplog.text
