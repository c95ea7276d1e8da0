"""Optimizers of a program's own resume in a fresh process, whatever state they keep, and whenever they make it."""

from contextlib import nullcontext

import pytest
import torch

from shardopt import checkpoint
from shardopt.checkpoint.loading.torchs.made_state import TorchsState
from shardopt.errors import MismatchError


class Own(torch.optim.Optimizer):
    """The base of these: each makes its state otherwise."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.begin()

    def begin(self):
        """What the constructor makes."""

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=0.1 / float(self.factor(parameter, self.state[parameter])))


class Counts(Own):
    """State without a tensor."""

    def factor(self, parameter, state):
        state["step"] = state.get("step", 0) + 1
        return state["step"]


class Partly(Own):
    """Some entries made by the constructor, others by the first step, or later."""

    def begin(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"sum": torch.zeros_like(parameter), "step": 0}

    def factor(self, parameter, state):
        state["step"] += 1
        state["sum"] += parameter.grad
        state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
        if state["step"] > 1:
            state.setdefault("late", []).append(state["step"])
        return 1 + state["sum"].square().mean() + state["mean"].abs().mean() + sum(state.get("late", ()))


class PartlyCounts(Partly):
    """Of which the constructor makes no tensor."""

    def begin(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"step": 0}

    def factor(self, parameter, state):
        state.setdefault("sum", torch.zeros_like(parameter))
        return super().factor(parameter, state)


class OfAll(Own):
    """State under keys of its own."""

    def factor(self, parameter, state):
        of_all = self.state.setdefault("all", {"step": 0, "norm": torch.zeros(2)})
        of_all["step"] += 1
        of_all["norm"] += parameter.grad.norm()
        self.state.setdefault("count", torch.zeros(1, dtype=torch.int64)).add_(1)
        self.state["plain"] = {"step": of_all["step"]}
        return of_all["norm"].sum() + self.state["count"]


class Further(Own):
    """Parts of its state beside torch's, which are None until a step."""

    def begin(self):
        self.means, self.of_all = None, None

    def factor(self, parameter, state):
        parameters = self.param_groups[0]["params"]
        self.means = self.means or [torch.zeros(()) for _ in parameters]
        mean = self.means[[each is parameter for each in parameters].index(True)]
        mean += parameter.grad.norm()
        self.of_all = {"step": 1 + (self.of_all or {"step": 0})["step"]}
        return mean + self.of_all["step"]

    def state_dict(self):
        return {**super().state_dict(), "means": self.means, "of_all": self.of_all}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.means, self.of_all = state_dict["means"], state_dict["of_all"]


def app_of(make):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    return {"model": model, "optimizer": make(model.parameters())}


def train(app, steps=2):
    for _ in range(steps):
        app["model"].zero_grad()
        app["model"](torch.ones(1, 2)).square().sum().backward()
        app["optimizer"].step()


def state_of(app):
    entries = {key: each for key, each in app["optimizer"].state_dict()["state"].items() if len(each)}
    in_order = {key: sorted(each.items()) if isinstance(each, dict) else each for key, each in entries.items()}
    return repr(sorted(in_order.items(), key=str)), repr(app["model"].state_dict())


@pytest.mark.parametrize("make", [Counts, Partly, PartlyCounts, OfAll, Further])
def test_a_fresh_optimizer_goes_on_as_the_one_that_was_saved(tmp_path, make):
    saved, app = app_of(make), app_of(make)
    train(saved)
    checkpoint.save(tmp_path / "c", saved)
    for _ in range(2):  # also into what has it all
        checkpoint.load(tmp_path / "c", app, init_state=True)
    train(saved), train(app)
    assert torch.equal(app["model"][0].weight, saved["model"][0].weight)
    checkpoint.save(tmp_path / "d", app)
    last = app_of(make)
    checkpoint.load(tmp_path / "d", last, init_state=True)
    assert state_of(last) == state_of(saved)


@pytest.mark.parametrize("make", [Counts, Partly, OfAll])
def test_a_failed_load_leaves_state_as_it_was(tmp_path, make):
    saved, app = app_of(make), app_of(make)
    train(saved)
    checkpoint.save(tmp_path / "c", {**saved, "more": torch.zeros(2)})
    before = state_of(app)
    with pytest.raises(MismatchError, match="more"):
        checkpoint.load(tmp_path / "c", app, init_state=True)
    assert state_of(app) == before


def test_state_of_no_parameter_is_on_the_device_of_parameters(tmp_path):
    """No device is stored; a step that finds it on another one would fail."""
    saved = app_of(OfAll)
    train(saved)
    saved["optimizer"].state["all"]["mean"] = torch.zeros(2, 2)
    checkpoint.save(tmp_path / "c", saved)
    with checkpoint.open(tmp_path / "c") as reader:
        stored = {(key,): reader.manifest.tensors[f"optimizer.state.all.{key}"] for key in ("norm", "mean")}
    parameter = torch.nn.Parameter(torch.ones(2, 2, device="meta"))
    optimizer = OfAll([parameter])
    made = TorchsState(optimizer, {"weight": parameter}, {"all": stored, "weight": stored}, (), dict)
    made.init_state(names=["all", "weight"])
    of_all, own = ({key: each.device.type for key, each in made.state[at].items()} for at in ("all", parameter))
    assert of_all == own == {"norm": "meta", "mean": "meta"}


def test_entries_that_the_constructor_made_stay_the_same_tensors(tmp_path):
    """Which may be views of one buffer."""
    saved, app = app_of(Partly), app_of(Partly)
    train(saved)
    checkpoint.save(tmp_path / "c", saved)
    weight = app["model"][0].weight
    own = app["optimizer"].state[weight]["sum"]
    checkpoint.load(tmp_path / "c", app, init_state=True)
    assert app["optimizer"].state[weight]["sum"] is own and own.any()


class Another(Partly):
    """Has state of another form under the same names."""


@pytest.mark.parametrize(("make", "strict"), [(Another, True), (Another, False), (Partly, False)])
def test_state_that_is_there_gets_no_entries_of_another_class_or_that_a_load_leaves_out(tmp_path, make, strict):
    saved, app = app_of(Partly), app_of(make)
    train(saved)
    checkpoint.save(tmp_path / "c", saved)
    with pytest.raises(MismatchError, match="mean") if strict else nullcontext():
        checkpoint.load(tmp_path / "c", app, init_state=True, strict=strict)
    assert all(each.keys() == {"sum", "step"} for each in app["optimizer"].state.values())


@pytest.mark.parametrize(
    "make",
    [
        lambda params, more: torch.optim.AdamW(params, amsgrad=more),
        lambda params, more: torch.optim.RMSprop(params, momentum=0.9 if more else 0),
    ],
)
@pytest.mark.parametrize("strict", [False, checkpoint.Strictness(unexpected="ignore")])
def test_torchs_classes_get_what_the_stored_options_need_whatever_a_load_leaves_out(tmp_path, make, strict):
    saved, app = (app_of(lambda params, more=more: make(params, more)) for more in (True, False))
    train(saved), train(app)
    checkpoint.save(tmp_path / "c", saved)
    checkpoint.load(tmp_path / "c", app, init_state=True, strict=strict)
    train(saved, 1), train(app, 1)
    assert torch.equal(app["model"][0].weight, saved["model"][0].weight)


def test_state_of_a_layer_that_the_app_lacks_is_no_state_under_a_key_of_its_own(tmp_path):
    saved, app = app_of(Counts), app_of(Counts)
    saved["optimizer"].add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    saved["model"].register_parameter("more", saved["optimizer"].param_groups[1]["params"][0])
    train(saved)
    saved["optimizer"].state[saved["model"].more]["step"] = 3
    checkpoint.save(tmp_path / "c", saved)
    with pytest.raises(MismatchError, match=r"optimizer\.state\.more"):
        checkpoint.load(tmp_path / "c", app, init_state=True)
    assert "more" not in app["optimizer"].state


@pytest.mark.parametrize("own", [torch.float32, None])
def test_dtypes_in_groups_come_back(tmp_path, own):
    saved, app = app_of(Counts), app_of(Counts)
    saved["optimizer"].param_groups[0] |= {"compute": torch.bfloat16, "name": "torch.bfloat16"}
    app["optimizer"].param_groups[0] |= {"compute": own, "name": ""}
    checkpoint.save(tmp_path / "c", saved)
    checkpoint.load(tmp_path / "c", app)
    assert app["optimizer"].param_groups[0]["compute"] is torch.bfloat16
    assert app["optimizer"].param_groups[0]["name"] == "torch.bfloat16"


def test_the_error_of_a_tensor_that_grew_says_what_can_grow(tmp_path):
    checkpoint.save(tmp_path / "c", {"seen": torch.ones(3, 2), "list": [torch.ones(2)]})
    with pytest.raises(MismatchError, match=r"seen: .* keep a list of tensors"):
        checkpoint.load(tmp_path / "c", {"seen": torch.ones(0, 2), "list": []})


class Adaptive(torch.optim.Optimizer):
    """Keeps in its groups how far it has come, as Prodigy does."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "distance": 1e-6, "k": 0})

    def step(self):
        self.param_groups[0] |= {"distance": 0.5, "k": self.param_groups[0]["k"] + 1}


def test_progress_in_groups_is_no_option_of_the_code(tmp_path, caplog):
    def adaptive(lr):
        return app_of(lambda params: Adaptive(params, lr))

    saved = adaptive(0.1)
    train(saved)
    checkpoint.save(tmp_path / "c", saved)
    app = adaptive(0.1)
    checkpoint.load(tmp_path / "c", app)
    assert app["optimizer"].param_groups[0]["k"] == 2 and not caplog.records
    checkpoint.load(tmp_path / "c", adaptive(0.2))
    assert "lr: 0.2 here, 0.1 stored" in caplog.text and "distance" not in caplog.text


class Derived(torch.optim.AdamW):
    """Passes options on to its base."""

    def __init__(self, params, lr=0.1, **others):
        super().__init__(params, lr=lr, **others)


class Short(Adaptive):
    """Calls an option otherwise than its groups do, and takes what it does not know, as well as progress."""

    def __init__(self, params, lr=0.1, wd=0.1, **others):
        super().__init__(params, lr)
        self.defaults |= {"weight_decay": wd, **others}
        self.param_groups[0] |= {"weight_decay": wd}


@pytest.mark.parametrize(("make", "option"), [(Derived, "weight_decay"), (Short, "wd")])
def test_options_are_compared_whatever_the_constructor_calls_them(tmp_path, caplog, make, option):
    saved = app_of(lambda params: make(params, **{option: 0.1}))
    train(saved)
    checkpoint.save(tmp_path / "c", saved)
    caplog.clear()
    checkpoint.load(tmp_path / "c", app_of(lambda params: make(params, **{option: 0.5})), init_state=True)
    assert "weight_decay: 0.5 here, 0.1 stored" in caplog.text and "distance" not in caplog.text
