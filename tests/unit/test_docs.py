"""The programs in the documentation run, and do what is said of them."""

import re

import pytest
import torch

import shardopt
from shardopt.algorithms import registry
from tests.support.fake_rank import fake_rank, shard
from tests.support.layout_runs import LAYOUTS
from tests.support.source import ROOT


def test_the_example_of_rearranging_gives_back_what_was_stored(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program, _ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "rearrange.md").read_text(), re.DOTALL)
    names = {}
    exec(compile(program, "docs/rearrange.md", "exec"), names)
    assert capsys.readouterr().out.strip() == "True ('model.embed.weight (_padding: 14)',)"
    queries = names["stored"]["layers.0.q.weight"].reshape(2, 4, 4, 16)
    assert torch.equal(names["model"]["layers.0.qkv.weight"].reshape(2, 6, 4, 16)[:, :4], queries)
    assert not names["model"]["embed.weight"][50:].any()


@pytest.fixture
def signum(monkeypatch, capsys):
    """Runs what the page on algorithms defines, and forgets it afterwards."""
    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "algorithms.md").read_text(), re.DOTALL)
    names = {}
    exec(compile(program, "docs/algorithms.md", "exec"), names)
    assert capsys.readouterr().out.strip() == "['exp_avg']"
    return names["Signum"]


def test_the_example_of_a_registered_algorithm_steps_on_shards(signum):
    full, gradient = torch.randn(9, 5), torch.randn(9, 5)
    whole = torch.nn.Parameter(full.clone())
    whole.grad = gradient
    plain = signum([whole], weight_decay=0.1)
    for _ in range(3):
        plain.step()
    with fake_rank(1, 2) as mesh:
        parameter = torch.nn.Parameter(shard(full, mesh, *LAYOUTS["uneven"].placements))
        parameter.grad = shard(gradient, mesh, *LAYOUTS["uneven"].placements)
        optimizer = shardopt.keyed("signum", {"w": parameter}, weight_decay=0.1)
        optimizer.init_state()
        for _ in range(3):
            optimizer.step()
        assert torch.equal(parameter.to_local(), whole.detach()[5:])
        average = optimizer.state_dict()["state"]["w"]["exp_avg"]
        assert average.placements == parameter.placements
        assert torch.equal(average.to_local(), plain.state[whole]["exp_avg"][5:])
