"""Calls that go wrong raise the code whose section of docs/troubleshooting.md has their way out."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import shardopt
from shardopt import checkpoint
from shardopt.errors import ShardoptError
from shardopt.optim import CombinedOptimizer


def model():
    return torch.nn.Linear(2, 2)


def adam(**options):
    return shardopt.keyed("adamw", model().named_parameters(), lr=0.1, **options)


def damage(path):
    (path / "saved" / "manifest.json").write_text("{")
    checkpoint.open(path / "saved")


class Refuses:
    def state_dict(self):
        return {"a": 1}

    def load_state_dict(self, state):
        raise KeyError("a")


def refuse(path):
    checkpoint.save(path / "c", {"it": Refuses()})
    checkpoint.load(path / "c", {"it": Refuses()})


def step_on_sparse(path):
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = shardopt.keyed("lion", table.named_parameters(), lr=0.1)
    table(torch.tensor([1])).sum().backward()
    optimizer.step()


def cast(path):
    checkpoint.save(path / "c", {"a": torch.full((2,), 1e5)})
    checkpoint.load(path / "c", {"a": torch.zeros(2, dtype=torch.float16)}, strict=checkpoint.Strictness(dtype="cast"))


CALLS = {
    "averages": lambda path: shardopt.EMA(model(), decay=2),
    "bad-base": lambda path: checkpoint.save(path / "c", {"a": 1}, base=path / "elsewhere" / "c"),
    "bad-groups": lambda path: adam(groups=[{"match": "nothing", "lr": 0.2}]),
    "bad-layout": lambda path: checkpoint.save(path / "c", {"a": torch.eye(2).to_sparse()}),
    "bad-options": lambda path: adam(momentun=0.9),
    "bad-parameters": lambda path: shardopt.keyed("adamw", [], lr=0.1),
    "bad-rules": lambda path: checkpoint.load(path / "saved", {"c": 1}, rename={"[ab]": "c"}),
    "by-position": lambda path: get_optimizer_state_dict(model(), adam()),
    "cannot-convert": lambda path: checkpoint.convert(path / "saved", path / "c", to="nonsense"),
    "cannot-read-tensor": lambda path: checkpoint.open(path / "saved").read("nothing"),
    "cannot-store": lambda path: checkpoint.save(path / "c", {"a": object()}),
    "cast-overflow": cast,
    "combined-optimizers": lambda path: CombinedOptimizer([]),
    "damaged": damage,
    "does-not-fit": lambda path: checkpoint.load(path / "saved", {"a": torch.zeros(2), "c": 1}),
    "invalid-argument": lambda path: checkpoint.Manager(path, every=0),
    "no-checkpoint": lambda path: checkpoint.load(path / "nowhere", {"a": 1}),
    "nothing-selected": lambda path: checkpoint.save(path / "c", {"a": 1}, select="nothing"),
    "object-refused": refuse,
    "optimizer-state": lambda path: adam().load_state_dict({"state": {"x": {}}, "param_groups": []}),
    "path-taken": lambda path: checkpoint.save(path / "saved", {"a": 1}),
    "run-root": lambda path: checkpoint.Manager(path / "saved").restore({"b": 1}),
    "sparse-gradient": step_on_sparse,
    "storage-failed": lambda path: checkpoint.open("nonsense://x"),
    "tied-parameters": lambda path: checkpoint.save(path / "c", {"a": 1}, tied={"a": 2}),
}


@pytest.mark.parametrize("code", CALLS)
def test_a_wrong_call_has_the_code_that_explains_it(code, tmp_path):
    checkpoint.save(tmp_path / "saved", {"a": torch.zeros(2), "b": 1})
    with pytest.raises(ShardoptError) as caught:
        CALLS[code](tmp_path)
    assert caught.value.code == code
    assert str(caught.value).splitlines()[0].endswith(f" [{code}]")
