import copy
import gc

import pytest
import torch

import shardopt
from shardopt import checkpoint
from shardopt.errors import MismatchError, PartialLoadError, ShardoptError
from shardopt.optim import CombinedOptimizer
from shardopt.runtime.partial_loads import PartialLoad


def stepped_with(model):
    optimizer = shardopt.keyed("adamw", [each for each in model.named_parameters() if each[1].requires_grad])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def stepped():
    model = torch.nn.Linear(2, 2)
    return model, stepped_with(model)


def interrupted(monkeypatch, optimizer, state, **options):
    """Loads a state, and is interrupted at the second tensor."""
    copy, copied = torch.Tensor.copy_, []

    def copy_(into, *args):
        copied.append(into)
        if len(copied) == 2:
            raise KeyboardInterrupt
        return copy(into, *args)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(torch.Tensor, "copy_", copy_)
        optimizer.load_state_dict(state, **options)


def test_an_optimizer_whose_own_load_was_interrupted_refuses_to_step_until_one_is_whole(monkeypatch, tmp_path):
    model, optimizer = stepped()
    state = stepped()[1].state_dict()
    checkpoint.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    for load_whole in (
        lambda: optimizer.load_state_dict(state),
        lambda: checkpoint.load(tmp_path / "c", {"model": model, "optimizer": optimizer}),
    ):
        interrupted(monkeypatch, optimizer, state)
        with pytest.raises(PartialLoadError, match="load_state_dict did not end well"):
            optimizer.step()
        with pytest.raises(MismatchError):
            optimizer.load_state_dict({})
        with pytest.raises(PartialLoadError):  # a load that changed nothing did not mend it
            optimizer.step()
        with pytest.raises(PartialLoadError, match="optimizer: found an optimizer that may be half changed"):
            checkpoint.save(tmp_path / "half", {"model": model, "optimizer": optimizer})
        load_whole()
        optimizer.step()
    with pytest.raises(MismatchError):
        optimizer.load_state_dict({})
    optimizer.step()


@pytest.mark.parametrize("whole", ["load_state_dict", "checkpoint.load"])
def test_a_part_whose_load_was_interrupted_is_whole_after_a_load_of_the_composite(monkeypatch, tmp_path, whole):
    model, inner = stepped()
    optimizer = CombinedOptimizer([("all", inner)])
    app = {"model": model, "optimizer": optimizer}
    state = optimizer.state_dict()
    checkpoint.save(tmp_path / "c", app)
    interrupted(monkeypatch, inner, stepped()[1].state_dict())
    for refused in (optimizer.step, lambda: checkpoint.save(tmp_path / "half", app)):
        with pytest.raises(PartialLoadError):
            refused()
    if whole == "load_state_dict":
        optimizer.load_state_dict(state)
    else:
        checkpoint.load(tmp_path / "c", app)
    optimizer.step()
    checkpoint.save(tmp_path / "again", app)


def test_a_load_of_the_optimizer_alone_does_not_mend_one_of_more(monkeypatch):
    _, optimizer = stepped()
    state = stepped()[1].state_dict()
    interrupted(monkeypatch, optimizer, state)
    PartialLoad(optimizer, "loading x", written=[1]).begin()
    interrupted(monkeypatch, optimizer, state)
    optimizer.load_state_dict(state)
    with pytest.raises(PartialLoadError):
        optimizer.step()
    PartialLoad(optimizer, "").end(mends=True)
    optimizer.step()


def two():
    """Two optimizers with state, the same combined, an app of it, and its state of other values."""
    (first_model, first), (second_model, second) = stepped(), stepped()
    whole = CombinedOptimizer([("a", first), ("b", second)])
    other = copy.deepcopy(whole.state_dict())
    for entries in other["state"].values():
        entries["exp_avg"].fill_(7.0)
    return first, second, whole, {"models": [first_model, second_model], "optimizer": whole}, other


def refuses(*calls):
    for call in calls:
        with pytest.raises(PartialLoadError):
            call()


def interrupted_load(path, app, **options):
    def interrupt(*unused):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.load(path, app, progress=interrupt, **options)


def test_loads_that_leave_something_out_mend_nothing_unless_what_failed_left_out_the_same(monkeypatch, tmp_path):
    _, second, whole, app, other = two()
    checkpoint.save(tmp_path / "c", app)
    only_first = {"state": {name: entries for name, entries in other["state"].items() if name.startswith("a.")}}

    def load(of, **options):
        return lambda: checkpoint.load(tmp_path / "c", app, select=rf"^optimizer\..*{of}", **options)

    interrupted(monkeypatch, second, stepped()[1].state_dict())
    for of_less in (
        lambda: whole.load_state_dict(only_first, strict=False),
        lambda: whole.load_state_dict({}, strict=False),
        lambda: second.load_state_dict({"state": {}}, strict=False),
        load(r"\ba\."),
        load(r"b\.bias\.step"),
    ):
        of_less()
        refuses(whole.step, second.step, lambda: checkpoint.save(tmp_path / "half", app))
    checkpoint.load(tmp_path / "c", app)
    whole.step()

    interrupted_load(tmp_path / "c", app, select=r"\bb\.")
    load(r"b\.bias")()
    refuses(whole.step)
    load(r"\bb\.")()  # all that the interrupted one may have changed
    whole.step()

    interrupted(monkeypatch, whole, only_first, strict=False)
    whole.load_state_dict({"state": {"a.bias": other["state"]["a.bias"]}}, strict=False)
    refuses(whole.step)
    unexpected = {**only_first["state"], "a.gone": {"exp_avg": torch.zeros(2)}}
    whole.load_state_dict({"state": unexpected}, strict=False)
    whole.step()


def test_what_a_load_changes_last_is_whole_where_it_ended_before_that(tmp_path):
    class Refuses(dict):
        def load_state_dict(self, state):
            raise ValueError

        def state_dict(self):
            return {"value": 1}

    model, optimizer = stepped()
    app = {"first": Refuses(), "model": model, "optimizer": optimizer}
    checkpoint.save(tmp_path / "c", app)
    interrupted_load(tmp_path / "c", app)
    checkpoint.load(tmp_path / "c", {"another": [0], **app}, select=r"^model|^optimizer\.state")
    optimizer.step()
    with pytest.raises(ShardoptError):
        checkpoint.load(tmp_path / "c", app)
    checkpoint.load(tmp_path / "c", app, select=r"^model|^optimizer\.state")
    refuses(optimizer.step)


class WithOwnStateDict(torch.nn.Linear):
    def state_dict(self, *args, **options):
        return super().state_dict(*args, **options)


@pytest.mark.parametrize("kind", [torch.nn.Linear, WithOwnStateDict])
def test_a_load_mends_an_optimizer_if_it_replaces_its_parameters_too_by_whatever_names(tmp_path, kind):
    model = kind(2, 2)
    optimizer = stepped_with(model)
    other = torch.zeros(3)
    forms = [model, model.state_dict(), dict(model.named_parameters())]
    for number, form in enumerate(forms):
        checkpoint.save(tmp_path / f"{number}", {f"model-{number}": form, "optimizer": optimizer})
    ignoring = checkpoint.Strictness(unexpected="ignore")
    for failed, form in enumerate(forms):
        for whole, again in enumerate(forms):
            interrupted_load(tmp_path / f"{failed}", {f"model-{failed}": form, "optimizer": optimizer})
            checkpoint.load(tmp_path / f"{whole}", {"optimizer": optimizer}, strict=ignoring)
            refuses(optimizer.step)
            checkpoint.load(tmp_path / f"{whole}", {f"model-{whole}": again, "optimizer": optimizer})
            optimizer.step()

    app = {"model": model, "optimizer": optimizer, "other": other}
    checkpoint.save(tmp_path / "c", app)
    interrupted_load(tmp_path / "c", app)
    checkpoint.load(tmp_path / "c", app, select=r"^(model|optimizer)")
    refuses(optimizer.step)
    checkpoint.load(tmp_path / "c", {"model": model, "optimizer": optimizer}, strict=ignoring)
    optimizer.step()


def with_(layers, trained=None):
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(layers)))
    model[trained or layers :].requires_grad_(False)
    return {"model": model, "optimizer": stepped_with(model)}


@pytest.mark.parametrize("kind", ["trained", "state dict", "frozen", "average"])
def test_a_load_of_less_of_the_app_than_an_interrupted_one_mends_no_optimizer_and_says_so(tmp_path, caplog, kind):
    app = with_(2, trained=1 if kind == "frozen" else None)
    older = with_(1)
    if kind == "state dict":
        app["model"], older["model"] = app["model"].state_dict(), older["model"].state_dict()
    if kind == "average":
        older, app = app, {**app, "ema": shardopt.optim.EMA(app["model"], decay=0.5)}
    checkpoint.save(tmp_path / "older", older)
    checkpoint.save(tmp_path / "newer", app)
    interrupted_load(tmp_path / "newer", app)
    warning = "So optimizer will raise PartialLoadError"
    lenient = checkpoint.Strictness(missing="ignore")
    checkpoint.load(tmp_path / "older", app, strict=lenient, init_state=True)
    assert warning in caplog.text  # what it leaves of the app may be half that of the newer one
    refuses(app["optimizer"].step)
    caplog.clear()
    checkpoint.load(tmp_path / "newer", app, init_state=True)
    app["optimizer"].step()
    assert warning not in caplog.text


def test_marks_go_to_all_parts_and_their_composites_before_any_part_steps(monkeypatch, tmp_path):
    first, second, whole, app, other = two()
    checkpoint.save(tmp_path / "c", app)
    before = copy.deepcopy(app["models"][0].state_dict())
    again = CombinedOptimizer([("first", first)])
    interrupted(monkeypatch, second, stepped()[1].state_dict())
    refuses(whole.step)
    assert all(torch.equal(before[name], value) for name, value in app["models"][0].state_dict().items())
    first.step()
    again.step()
    whole.load_state_dict(other)
    for interrupt in (
        lambda: interrupted(monkeypatch, whole, other),
        lambda: interrupted_load(tmp_path / "c", app),
    ):
        interrupt()
        refuses(whole.step, first.step, second.step, again.step, CombinedOptimizer([("x", second)]).step)
        refuses(lambda: checkpoint.save(tmp_path / "half", {"model": app["models"][0], "first": first}))
        checkpoint.load(tmp_path / "c", app)
        first.step()
        whole.step()


def test_parts_are_whole_after_a_load_of_each_by_its_key(tmp_path):
    first, second, whole, app, _ = two()
    parts = {"models": app["models"], "first": first, "second": second}
    checkpoint.save(tmp_path / "whole", app)
    checkpoint.save(tmp_path / "parts", parts)
    interrupted_load(tmp_path / "whole", app)
    checkpoint.load(tmp_path / "parts", {**parts, "models": app["models"][:1]}, select=r"^(models\.0|first)")
    first.step()
    refuses(second.step)
    checkpoint.load(tmp_path / "parts", parts)
    second.step()
    refuses(whole.step)


def test_a_view_is_the_optimizer_that_it_views(tmp_path):
    model, optimizer = stepped()
    for name, each in (("view", optimizer.as_torch()), ("keyed", optimizer)):
        checkpoint.save(tmp_path / name, {"model": model, "optimizer": each})
    views = {"view": optimizer.as_torch, "keyed": lambda: optimizer}
    for interrupted_in, whole_in in (("view", "view"), ("view", "keyed"), ("keyed", "view")):
        interrupted_load(tmp_path / interrupted_in, {"model": model, "optimizer": views[interrupted_in]()})
        gc.collect()
        refuses(optimizer.step, optimizer.as_torch().step)
        for view in views.values():
            refuses(lambda view=view: checkpoint.save(tmp_path / "half", {"model": model, "optimizer": view()}))
        checkpoint.load(tmp_path / whole_in, {"model": model, "optimizer": views[whole_in]()})
        optimizer.step()
        checkpoint.save(tmp_path / f"{interrupted_in}-{whole_in}", {"model": model, "optimizer": optimizer.as_torch()})


def test_a_refused_save_names_the_optimizer_and_the_load_that_helps_and_one_of_other_keys_passes(monkeypatch, tmp_path):
    (model, optimizer), (model_2, other) = stepped(), stepped()
    app = {"model": [model, model_2], "mine": optimizer, "other": other}
    checkpoint.save(tmp_path / "c", {"model": model, "mine": optimizer})
    interrupted(monkeypatch, optimizer, stepped()[1].state_dict())
    with pytest.raises(PartialLoadError, match=r"- mine: .*by load_state_dict or checkpoint\.load$"):
        checkpoint.save(tmp_path / "half", app)
    interrupted_load(tmp_path / "c", {"model": model, "mine": optimizer})
    with pytest.raises(PartialLoadError, match=r"- mine: .*load_state_dict does not do$"):
        checkpoint.save(tmp_path / "half", app)
    checkpoint.save(tmp_path / "model", app, select="^model")


class Refusing:
    """An object that refuses its state, once loads have saved it."""

    refuses = False

    def state_dict(self):
        return {"number": 1}

    def load_state_dict(self, state):
        if self.refuses:
            raise OSError("refused")


def test_an_optimizer_that_got_its_state_back_stays_marked_where_its_load_failed(tmp_path):
    (_, optimizer), last = stepped(), Refusing()
    app = {"optimizer": optimizer, "zlast": last}
    checkpoint.save(tmp_path / "c", app)
    last.refuses = True
    interrupted_load(tmp_path / "c", app, select=r"\.weight\.")
    for select in (r"\.bias\.|^zlast", None):
        with pytest.raises(ShardoptError, match="refused"):
            checkpoint.load(tmp_path / "c", app, select=select)
        refuses(optimizer.step)
    checkpoint.load(tmp_path / "c", app, select=r"\.bias\.")  # what the first one may have changed is left out
    refuses(optimizer.step)
    last.refuses = False
    checkpoint.load(tmp_path / "c", app)
    optimizer.step()


def test_a_load_of_the_optimizer_alone_mends_none_of_more_also_where_parameters_have_other_memory(tmp_path):
    model, optimizer = stepped()
    app = {"model": model, "optimizer": optimizer}
    checkpoint.save(tmp_path / "c", app)
    interrupted_load(tmp_path / "c", app)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    checkpoint.load(tmp_path / "c", {"optimizer": optimizer}, strict=checkpoint.Strictness(unexpected="ignore"))
    refuses(optimizer.step)
    checkpoint.load(tmp_path / "c", app)
    optimizer.step()
