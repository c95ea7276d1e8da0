"""torch.distributed.checkpoint through our writer and reader, and torch's getters, on real ranks."""

import copy
import os
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.dcp import StorageReader, StorageWriter
from tests.harness import Fault, run_ranks, run_ranks_outcomes
from tests.support.optimizers import same

RANKS_STAY = True

DOORS = ("objects", "nested", "flattened", "ours")
"""How state is handed over: to DCP as objects, by torch's getters in either form, or to `checkpoint` itself."""
SCHEDULE = {
    "last_epoch": 3,
    "milestones": [2, 5],
    "nested": {"rates": [0.1, 0.2], "steps": [{"at": 1}], "pair": (1, "x")},
}


def job(seed, kind="fsdp"):
    """A model whose sizes do not divide by any number of ranks, one bias of a single element, and its optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    if kind == "fsdp":
        fully_shard(model[0], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))  # the second layer stays plain
    elif kind == "all":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    groups = [{"match": "bias", "weight_decay": 0.0}]
    optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=0.05, groups=groups, foreach=False, fused=False)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return model, optimizer, schedule


def train(model, optimizer, schedule, steps, first=0):
    for step in range(first, first + steps):
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        model(inputs).square().sum().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def whole(tree):
    if isinstance(tree, dict):
        return {name: whole(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [whole(value) for value in tree]
    return tree.detach().full_tensor() if isinstance(tree, DTensor) else copy.deepcopy(tree)


def state_of(model, optimizer, schedule):
    options = [{**group, "params": sorted(group["params"])} for group in optimizer.state_dict()["param_groups"]]
    return whole([dict(model.state_dict()), optimizer.state_dict()["state"], options, schedule.state_dict()])


def options_of(door):
    return StateDictOptions(flatten_optimizer_state_dict=door == "flattened")


def handed_over(door, model, optimizer, schedule, extra):
    if door in ("objects", "ours"):
        return {"model": model, "optim": optimizer, "schedule": schedule, "extra": extra, "step": 3}
    of_model, of_optimizer = get_state_dict(model, optimizer.as_torch(), options=options_of(door))
    return {
        "model": of_model,
        "optim": of_optimizer,
        "schedule": schedule.state_dict(),
        "extra": extra,
        "step": 3,
    }


def save_all(root, doors, kind="fsdp"):
    model, optimizer, schedule = job(0, kind)
    train(model, optimizer, schedule, 3)
    for door in doors:
        app = handed_over(door, model, optimizer, schedule, SCHEDULE)
        if door == "ours":
            checkpoint.save(f"{root}/{door}", app)
        else:
            dcp.save(app, storage_writer=StorageWriter(f"{root}/{door}", durable=False))
    return state_of(model, optimizer, schedule)


def load_one(url, door, kind, no_dist=False):
    model, optimizer, schedule = job(1, kind)
    extra = {"last_epoch": 0, "milestones": [], "nested": {"rates": [], "steps": [{"at": 0}], "pair": ()}}
    if door != "ours":
        optimizer.init_state()
    app = {**handed_over(door, model, optimizer, schedule, extra), "step": 0}
    if door == "ours":
        checkpoint.load(url, app, init_state=True)
    else:
        dcp.load(app, storage_reader=StorageReader(url), no_dist=no_dist)
    if door in ("nested", "flattened"):
        set_state_dict(
            model,
            optimizer.as_torch(),
            model_state_dict=app["model"],
            optim_state_dict=app["optim"],
            options=options_of(door),
        )
        schedule.load_state_dict(app["schedule"])
    assert app["step"] == 3 and app["extra"] == SCHEDULE, app
    return state_of(model, optimizer, schedule)


def load_all(root, pairs, kind):
    """Loads what was saved by each door by each door; the states."""
    loaded = {}
    for saved, door in pairs:
        loaded[saved, door] = load_one(f"{root}/{saved}", door, kind)
    return loaded


def without_notes(state):
    """State without what keyed optimizers add to the options of a group, and torch's do not have."""
    model, of_optimizer, groups, schedule = state
    notes = ("algorithm", "given")
    groups = [{name: value for name, value in group.items() if name not in notes} for group in groups]
    return [model, of_optimizer, groups, schedule]


def check_doors(root, wanted, loaded):
    for (saved, door), state in loaded.items():
        assert same(without_notes(state), without_notes(wanted)), (saved, door)
        assert checkpoint.verify(f"{root}/{saved}").ok


PAIRS = [("objects", "ours"), ("flattened", "ours"), ("ours", "nested"), ("ours", "flattened"), ("nested", "objects")]


def test_what_dcp_saves_we_load_and_the_reverse_on_other_ranks(tmp_path):
    root = str(tmp_path)
    wanted, _ = run_ranks(2, save_all, root, DOORS)
    for loaded in run_ranks(3, load_all, root, PAIRS, "fsdp"):
        check_doors(root, wanted, loaded)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("saving", "kind"), [(1, "plain"), (2, "all"), (3, "fsdp"), (4, "all")], ids=str)
@pytest.mark.parametrize(("loading", "onto"), [(1, "plain"), (2, "fsdp"), (4, "all")], ids=str)
def test_every_door_with_every_other_one(tmp_path, saving, kind, loading, onto):
    root = str(tmp_path)
    wanted = run_ranks(saving, save_all, root, DOORS, kind)[0]
    pairs = [(saved, door) for saved in DOORS for door in DOORS]
    for loaded in run_ranks(loading, load_all, root, pairs, onto):
        check_doors(root, wanted, loaded)


def save_alone(root):
    warnings.simplefilter("ignore")  # torch says that it saves in a single process
    return save_all(root, DOORS[:2], "plain")


def load_alone(url):
    warnings.simplefilter("ignore")
    return [load_one(url, door, "plain", no_dist=True) for door in ("objects", "flattened")]


def test_a_process_without_a_group_saves_and_loads(tmp_path):
    root = str(tmp_path)
    (wanted,) = run_ranks(1, save_alone, root, backend=None)
    (loaded,) = run_ranks(1, load_alone, f"{root}/objects", backend=None)
    assert all(same(without_notes(state), without_notes(wanted)) for state in loaded)


def save_in_background(root):
    model, optimizer, schedule = job(0)
    train(model, optimizer, schedule, 2)
    wanted = state_of(model, optimizer, schedule)
    app = {"model": model, "optim": optimizer, "schedule": schedule}
    beside = dist.new_group()  # as torch wants it, where training communicates meanwhile
    saving = dcp.async_save(app, storage_writer=StorageWriter(f"{root}/a"), process_group=beside)
    for step in range(3):  # rounds of the program, beside those of the save
        shardopt.ranks.ranks_of().agree("training", work=lambda: None)
        train(model, optimizer, schedule, 1, first=2 + step)
    saving.result()
    return wanted


def load_ours(url):
    model, optimizer, schedule = job(1)
    checkpoint.load(url, {"model": model, "optim": optimizer, "schedule": schedule}, init_state=True)
    return state_of(model, optimizer, schedule)


def test_async_save_has_the_state_of_the_call_and_does_not_meet_the_program(tmp_path):
    wanted, _ = run_ranks(2, save_in_background, str(tmp_path))
    for loaded in run_ranks(2, load_ours, f"{tmp_path}/a"):
        assert same(loaded, wanted)


def save_and_tell(url):
    model, optimizer, schedule = job(0)
    train(model, optimizer, schedule, 1)
    writer = StorageWriter(url, deadline_seconds=3)
    try:
        dcp.save({"model": model, "optim": optimizer}, storage_writer=writer)
    except CheckpointException as error:
        return str(error)
    except RuntimeError as error:  # gloo's, where a rank died
        return f"gloo: {error}"
    return ""


WRITING = "shardopt.checkpoint.dcp.writer:write_files"
GATHERING = "torch.distributed.checkpoint.utils:_DistWrapper.gather_object"
COMMITTING = "shardopt.checkpoint.dcp.writer:publish_checkpoint"
NO_SPACE = OSError(28, "No space left on device")


def test_a_rank_that_fails_to_write_is_named_and_nothing_is_left(tmp_path):
    url = str(tmp_path / "failed")
    outcomes = run_ranks_outcomes(2, save_and_tell, url, faults=[Fault(1, WRITING, action=NO_SPACE)])
    for outcome in outcomes:
        assert "No space left on device" in outcome.value and "rank 1" in outcome.value, outcome
    assert os.listdir(url) == []
    assert run_ranks(2, save_and_tell, url) == ["", ""]
    for told in run_ranks(2, save_and_tell, url):
        assert "the path is taken" in told
    assert checkpoint.verify(url).ok


@pytest.mark.parametrize(
    "fault",
    [
        Fault(1, WRITING),
        pytest.param(Fault(0, WRITING), marks=pytest.mark.exhaustive),
        Fault(1, GATHERING, at=2),
        pytest.param(Fault(0, COMMITTING), marks=pytest.mark.exhaustive),
    ],
    ids=["a rank", "the first rank", "a rank that has written", "the first rank, committing"],
)
def test_a_rank_that_is_killed_leaves_nothing_that_reads_as_a_checkpoint(tmp_path, fault):
    url, rank = str(tmp_path / "killed"), fault.rank
    outcomes = run_ranks_outcomes(2, save_and_tell, url, faults=[fault])
    assert outcomes[rank].signal is not None
    assert outcomes[1 - rank].value != ""
    with pytest.raises(shardopt.errors.CheckpointNotFoundError):
        checkpoint.open(url)
    if rank:
        assert os.listdir(url) == []
    assert run_ranks(2, save_and_tell, url) == ["", ""]  # and a next one clears away what was left
    assert checkpoint.verify(url).ok
    assert {name.split("-")[0] for name in os.listdir(url)} == {checkpoint.open(url).manifest.save_id, "manifest.json"}


def load_damaged(url):
    model, optimizer, _ = job(1)
    optimizer.init_state()
    try:
        dcp.load({"model": model, "optim": optimizer}, storage_reader=StorageReader(url))
    except CheckpointException as error:
        return str(error)
    return ""


def test_a_byte_that_changed_is_found_on_the_way_in(tmp_path):
    url = str(tmp_path / "damaged")
    run_ranks(2, save_and_tell, url)
    path = next(path for path in (tmp_path / "damaged").iterdir() if path.name.endswith("r00001.safetensors"))
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)
    assert any("fail their checksum" in told for told in run_ranks(2, load_damaged, url))


# Not "full" and "flattened" together: torch's setter takes that of none of its own optimizers (KeyError).
GETTERS = {
    "sharded": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "offloaded": StateDictOptions(cpu_offload=True),
    "full": StateDictOptions(full_state_dict=True),
    "broadcast": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
}


def get_and_set(kinds):
    """Each option of the getters there and back; names those after which training does not continue as without."""
    torn = []
    for kind in kinds:
        for name, options in GETTERS.items():
            run = job(0, kind)
            train(*run, 2)
            state_dict = copy.deepcopy(get_optimizer_state_dict(run[0], run[1].as_torch(), options=options))
            other = job(0, kind)
            train(*other, 2)
            for entries in other[1].state_dict()["state"].values():
                entries["exp_avg"].zero_()
                entries["step"].zero_()
            if name == "broadcast" and dist.get_rank():
                state_dict = {}
            set_optimizer_state_dict(other[0], other[1].as_torch(), state_dict, options=options)
            train(*run, 2, first=2)
            train(*other, 2, first=2)
            if not same(state_of(*other), state_of(*run)):
                torn.append((kind, name))
    return torn


def test_every_option_of_the_getters_on_two_ranks():
    assert run_ranks(2, get_and_set, ["fsdp"]) == [[], []]


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [1, 3, 4])
def test_every_option_of_the_getters_on_other_ranks(size):
    assert run_ranks(size, get_and_set, ["fsdp", "all", "plain"]) == [[]] * size
