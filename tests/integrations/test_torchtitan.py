"""torchtitan 0.3.0's own trainer with our checkpoints and optimizers: killed, and resumed on other meshes."""

import importlib
import importlib.metadata
import importlib.util
import shutil
import types

import pytest
import torch

from shardopt import checkpoint
from shardopt.errors import MismatchError
from tests.harness import run_ranks, run_ranks_outcomes
from tests.integrations.rank_faults import KILL, TERMINATE, exit_code_of
from tests.integrations.titan_job import train, train_in_plain_torch
from tests.integrations.titan_on_cpu import on_cpu

VERSION = "0.3.0"
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("torchtitan") is None,
        reason="torchtitan is not installed (launch/test_integrations.sh)",
    ),
    pytest.mark.exhaustive,
    pytest.mark.timeout(900),  # minutes of imports, on two busy cores
]
DEADLINE = 400
ONE_PART = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}
INTERLEAVED = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"}  # two parts a rank
SIZES = ("batch_size", "made_with_batch_size")  # what all ranks load at one time: several of those are one step


@pytest.fixture(autouse=True)
def pinned():
    assert importlib.metadata.version("torchtitan") == VERSION, "the stand-ins for GPUs are for this version alone"


def leave(folder, fault):
    return exit_code_of(lambda: train(folder, 50, fault))


def folder_of(run, step):
    return f"{run}/checkpoint/step-{step:08}"


def compare(one, other, exact):
    """Compares two checkpoints: options and plain values are equal, and tensors to the bit where `exact`.

    Elsewhere batches may have been cut for another number of ranks: their size is then that of the run.
    """
    with checkpoint.open(one) as got, checkpoint.open(other) as wanted:
        assert set(got.keys()) == set(wanted.keys())
        for key in sorted(wanted.keys()):
            found, expected = got.read(key), wanted.read(key)
            if not isinstance(expected, torch.Tensor):
                if key == "dataloader" and not exact:
                    found, expected = ({**each, **dict.fromkeys(SIZES)} for each in (found, expected))
                assert found == expected, key
            elif exact:
                assert torch.equal(found, expected), key
            else:
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4, msg=key)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing happened to: its folder, losses and counters."""
    run = str(tmp_path_factory.mktemp("whole"))
    losses, state = run_ranks(2, train, run, deadline_seconds=DEADLINE)[0]
    assert [*losses] == [*range(1, 13)] and losses[12] < losses[1]
    return run, losses, state


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a run of which a rank was killed after step 10."""
    run = str(tmp_path_factory.mktemp("killed"))
    outcomes = run_ranks_outcomes(2, train, run, 12, (1, 10, KILL), deadline_seconds=DEADLINE)
    assert not any(outcome.ok for outcome in outcomes)
    return run


@pytest.mark.parametrize(
    ("ranks", "parallelism"),
    [
        (2, {}),
        (1, {}),
        (3, {}),
        (2, ONE_PART),
        (2, INTERLEAVED),
    ],
    ids=["same", "one", "three", "stages", "interleaved"],
)
def test_a_run_resumes_after_a_kill(tmp_path, whole, killed, ranks, parallelism):
    reference, expected, counters = whole
    run = str(tmp_path / "run")
    shutil.copytree(killed, run)
    outcomes = run_ranks(ranks, train, run, **parallelism, deadline_seconds=DEADLINE)
    losses, state = outcomes[-1]  # the last stage of a pipeline has the loss
    assert [*losses] == [9, 10, 11, 12]
    exact = ranks == 2 and not parallelism
    for step, loss in losses.items():
        assert loss == expected[step] if exact else loss == pytest.approx(expected[step], rel=1e-5), step
    assert state["step"] == counters["step"]
    compare(folder_of(run, 12), folder_of(reference, 12), exact)


def train_on(folder, steps, change=None, **options):
    """As `train`, begun with a checkpoint of another program."""

    def begin(config):
        config.checkpoint.initial_load_path = change
        config.checkpoint.initial_load_model_only = False
        config.checkpoint.exclude_from_loading = ["lr_scheduler", "train_state"]

    return train(folder, steps, change=begin, **options)


@pytest.mark.parametrize("parallelism", [{}, INTERLEAVED], ids=["sharded", "interleaved"])
def test_saved_in_torchtitan_resumed_in_plain_torch_and_back(tmp_path, whole, parallelism):
    reference, expected, _ = whole
    plain, run, loaded = (str(tmp_path / name) for name in ("plain", "run", "loaded"))
    (losses,) = run_ranks(1, train_in_plain_torch, folder_of(reference, 8), 1, plain, deadline_seconds=DEADLINE)
    assert losses == pytest.approx([expected[9], expected[10]], rel=1e-5)  # the second after a step of the optimizer
    run_ranks(2, train_on, run, 1, plain, loaded=loaded, **parallelism, deadline_seconds=DEADLINE)
    with checkpoint.open(plain) as saved, checkpoint.open(loaded) as found:
        keys = {key for key in sorted(saved.keys()) if not key.startswith("dataloader") and ".param_groups." not in key}
        assert len(keys) > 100 and keys == {key for key in sorted(found.keys()) if ".param_groups." not in key}
        for key in sorted(keys):
            one, other = saved.read(key), found.read(key)
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, key


def test_several_model_parts_resume_without_stages(tmp_path, whole):
    """Saved by two stages of two parts each; resumed by the other schedule, and by one rank without any."""
    reference, expected, _ = whole
    staged = str(tmp_path / "staged")
    shutil.copytree(folder_of(reference, 4), folder_of(staged, 4))  # a model in parts begins with other weights
    run_ranks(2, train, staged, 8, **INTERLEAVED, deadline_seconds=DEADLINE)
    compare(folder_of(staged, 8), folder_of(reference, 8), exact=False)
    for ranks, parallelism in ((1, {}), (2, ONE_PART)):
        run = str(tmp_path / f"{ranks}")
        shutil.copytree(staged, run)
        losses, _ = run_ranks(ranks, train, run, 10, **parallelism, deadline_seconds=DEADLINE)[-1]
        assert losses == pytest.approx({step: expected[step] for step in (9, 10)}, rel=1e-5)


def test_sigterm_saves_and_leaves(tmp_path):
    run = str(tmp_path / "run")
    assert run_ranks(2, leave, run, (1, 5, TERMINATE), deadline_seconds=DEADLINE) == [143, 143]
    losses, _ = run_ranks(1, train, run, 10, deadline_seconds=DEADLINE)[0]
    assert min(losses) in (6, 7, 8) and max(losses) == 10


def train_stock(folder, steps):
    on_cpu()
    return train(folder, steps, change=importlib.import_module("tests.integrations.titan_stock").stock)[0]


def refuse_stock(folder):
    try:
        train_stock(folder, 5)
    except MismatchError as error:
        return [(problem.key, problem.remedy) for problem in error.problems]
    return []


def test_torchtitans_own_optimizers_and_loader_resume_on_as_many_ranks_and_are_refused_on_others(tmp_path):
    whole, run = str(tmp_path / "whole"), str(tmp_path / "run")
    expected = run_ranks(2, train_stock, whole, 5, deadline_seconds=DEADLINE)[0]
    shutil.copytree(whole, run)
    shutil.rmtree(folder_of(run, 5))
    assert run_ranks(2, train_stock, run, 5, deadline_seconds=DEADLINE)[0] == {5: expected[5]}
    compare(folder_of(run, 5), folder_of(whole, 5), exact=True)
    (problems,) = run_ranks(1, refuse_stock, run, deadline_seconds=DEADLINE)
    assert [key for key, _ in problems] == ["dataloader.dp_rank_1"]
    assert "says nothing for another number of them" in problems[0][1]


def train_by_itself(folder, steps):
    """With torchtitan's own checkpoints, saved after step 4, and optimizers."""
    stock = importlib.import_module("benchmarks.frameworks_sharded").stock
    return train(folder, steps, change=lambda config: stock(config, own_loader=False))[0]


def train_moved(folder, steps, begin):
    def change(config):
        config.checkpoint.initial_load_path, config.checkpoint.initial_load_model_only = begin, False

    return train(folder, steps, change=change)[0]


def test_a_checkpoint_that_torchtitan_wrote_by_itself_is_moved_over(tmp_path):
    expected = run_ranks(2, train_by_itself, str(tmp_path / "whole"), 8, deadline_seconds=DEADLINE)[0]
    run_ranks(2, train_by_itself, str(tmp_path / "theirs"), 4, deadline_seconds=DEADLINE)
    of_the_model = r"^(?!optimizer\.|lr_scheduler\.|dataloader\.|train_state\.)"  # as docs/moving/torchtitan.md has it
    moved = str(tmp_path / "moved")
    checkpoint.convert(tmp_path / "theirs/checkpoint/step-4", moved, to="shardopt", rename={of_the_model: "model."})
    for ranks in (2, 3):
        losses = run_ranks(ranks, train_moved, str(tmp_path / f"on-{ranks}"), 8, moved, deadline_seconds=DEADLINE)[0]
        assert losses == pytest.approx({step: expected[step] for step in range(5, 9)}, rel=1e-5 if ranks == 3 else 0)


def small_job(folder, steps, rate=1e-3, algorithm="AdamW", whole_schedules=False, **options):
    """A job of torchtitan's parts around one layer: loads, and trains. Returns where it began, and its rates.

    Args:
        whole_schedules: whether schedules store all of their state, not their step alone.
    """
    on_cpu()
    parts = importlib.import_module("torchtitan.components.optimizer")
    ours = importlib.import_module("shardopt.integrations.torchtitan")

    class Trained:
        step = ntokens_seen = 0
        parallel_dims = types.SimpleNamespace(dp_cp_enabled=False)

        def state_dict(self):
            return {"step": self.step, "ntokens_seen": self.ntokens_seen}

        def load_state_dict(self, state):
            self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    model, trained = torch.nn.Linear(4, 4), Trained()
    named = {"bias": "AdamW", ".*": algorithm}
    kwargs = {"optimizer_kwargs": {"lr": rate}}
    groups = [parts.ParamGroupConfig(pattern=each, optimizer_name=name, **kwargs) for each, name in named.items()]
    config = ours.ShardoptOptimizers.Config(param_groups=groups, implementation="for-loop")
    optimizers = ours.ShardoptOptimizers(config, model_parts=[model])

    class Whole(parts.LRSchedulersContainer):
        def state_dict(self):
            return {"schedules": [schedule.state_dict() for schedule in self.schedulers]}

        def load_state_dict(self, state):
            for schedule, own in zip(self.schedulers, state["schedules"], strict=True):
                schedule.load_state_dict(own)

    schedules = (Whole if whole_schedules else parts.LRSchedulersContainer)(optimizers, lambda step: 0.5**step)
    config = ours.ShardoptCheckpoints.Config(enable=True, folder=folder, interval=2, stage="none", **options)
    given = {"optimizers": optimizers, "lr_schedulers": schedules, "states": {"train_state": trained}}
    manager = ours.ShardoptCheckpoints(config, dataloader=None, model_parts=[model], **given)
    manager.load(config.load_step)
    began, rates = trained.step, []
    while trained.step < steps:
        trained.step += 1
        rates.append(optimizers.keyed.param_groups[0]["lr"])
        model(torch.ones(2, 4)).square().mean().backward()
        optimizers.step()
        schedules.step()
        manager.save(trained.step)
    manager.close()
    return began, rates


@pytest.mark.parametrize("algorithm", ["Muon", "ScheduleFreeAdamW", "Adafactor", "SGD"])
def test_algorithms_without_fused_or_foreach_steps_are_taken_beside_others(tmp_path, algorithm):
    run = str(tmp_path / "run")
    small_job(run, 4, algorithm=algorithm)
    assert small_job(run, 6, algorithm=algorithm)[0] == 4


def test_a_step_that_is_only_looked_at_does_not_rewind_the_run(tmp_path, caplog):
    caplog.set_level("INFO", "shardopt")
    run = str(tmp_path / "run")
    assert small_job(run, 6)[0] == 0
    assert small_job(run, 4, load_only=True, load_step=4) == (4, [])
    assert f"loaded step 4 from {run}/step-00000004; the run stays as it is" in caplog.text
    assert small_job(run, 6) == (6, [])
    assert small_job(run, 5, load_step=4)[0] == 4
    assert checkpoint.Manager(run).abandoned_steps() == {0: [6]}


def test_a_rate_that_the_config_changes_holds_from_the_first_step_and_no_warning_denies_it(tmp_path, caplog):
    run = str(tmp_path / "run")
    small_job(run, 4)
    began, rates = small_job(run, 6, rate=3e-4)
    assert (began, rates) == (4, [3e-4 * 0.5**4, 3e-4 * 0.5**5])
    assert "options of the checkpoint" not in caplog.text
    assert small_job(run, 7) == (6, [1e-3 * 0.5**6])


def test_rates_of_schedules_that_store_theirs_are_those_of_the_checkpoint_and_a_warning_says_so(tmp_path, caplog):
    run = str(tmp_path / "run")
    small_job(run, 4, whole_schedules=True)
    assert small_job(run, 6, rate=3e-4, whole_schedules=True) == (4, [1e-3 * 0.5**4, 1e-3 * 0.5**5])
    assert "options of the checkpoint" in caplog.text


def test_a_model_alone_is_loaded_without_schedules(tmp_path):
    run = str(tmp_path / "run")
    small_job(run, 4)
    ours, model = importlib.import_module("shardopt.integrations.torchtitan"), torch.nn.Linear(4, 4)
    options = {"folder": str(tmp_path / "other"), "initial_load_path": f"{run}/step-00000004"}
    config = ours.ShardoptCheckpoints.Config(enable=True, initial_load_model_only=True, **options)
    given = {"optimizers": None, "lr_schedulers": None, "states": {}}
    manager = ours.ShardoptCheckpoints(config, dataloader=None, model_parts=[model], **given)
    assert manager.load()
    manager.close()
    with checkpoint.open(config.initial_load_path) as saved:
        assert torch.equal(model.weight, saved.read("model.weight"))


def test_a_schedule_that_begins_anew_has_the_rates_of_the_config_from_its_first_step(tmp_path):
    run = str(tmp_path / "run")
    small_job(run, 4)
    assert small_job(run, 6, rate=3e-4, exclude_from_loading=["lr_scheduler"]) == (4, [3e-4, 3e-4 * 0.5])
