"""What the cases share: a call that is refused, with the remedy that is meant, and small apps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardopt
from shardopt.errors import Problem, ShardoptError
from tests.remedies.collected import pattern


def refused(remedy: str, call: Callable[..., Any], *args: Any, **options: Any) -> Problem:
    """Makes a call that has to be refused with this remedy, or this part of one; returns the problem."""
    with pytest.raises(ShardoptError) as caught:
        call(*args, **options)
    found = pattern(remedy)
    for problem in caught.value.problems:
        if found.search(problem.remedy):
            return problem
    raise AssertionError(f"not refused with {remedy!r}: {caught.value}")


def stepped(app: dict[str, Any], steps: int = 2) -> dict[str, Any]:
    """Steps the optimizer of an app, whose model has 3 inputs, and its schedule, by gradients that are alike."""
    for step in range(steps):
        for number, parameter in enumerate(app["model"].parameters()):
            parameter.grad = torch.full_like(parameter, number + step + 1.0)
        app["optimizer"].step()
        if "schedule" in app:
            app["schedule"].step()
    return app


def app_of(form: str = "keyed", steps: int = 0, algorithm: str = "adamw", **options: Any) -> dict[str, Any]:
    """A model of one layer, and its optimizer: a keyed one or torch's."""
    torch.manual_seed(steps)
    model = torch.nn.Linear(3, 2)
    options = {"lr": 0.125, **options}
    if form == "keyed":
        optimizer = shardopt.keyed(algorithm, model.named_parameters(), **options)
    else:
        classes = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adam": torch.optim.Adam}
        optimizer = classes[algorithm](model.parameters(), **options)
    return stepped({"model": model, "optimizer": optimizer}, steps)


def weights_of(app: dict[str, Any]) -> list[float]:
    return [number for value in app["model"].parameters() for number in value.flatten().tolist()]


def moments_of(app: dict[str, Any]) -> list[float]:
    """The state of all parameters, in their order."""
    optimizer = app["optimizer"]
    held = [entries for _, entries in sorted(optimizer.state_dict()["state"].items())]
    values = [each for entries in held for _, each in sorted(entries.items())]
    return [number for each in values for number in torch.as_tensor(each).flatten().tolist()]


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Asserts that two apps have the same weights and state, and continue alike."""
    assert weights_of(one) == weights_of(other) and moments_of(one) == moments_of(other)
    stepped(one, 1), stepped(other, 1)
    assert weights_of(one) == weights_of(other)
