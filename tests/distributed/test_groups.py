"""Groups of ranks within one job: each trains, saves and restores as a job of its own, whatever the others do."""

import copy
import logging
import os
import pickle
import signal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.run.mirror import MirrorCopier
from shardopt.errors import LayoutError, MismatchError, OptionError, RankError, ShardoptError, StateError
from shardopt.ranks import ranks_of
from shardopt.sharding.view import local_tensors
from tests.harness import run_ranks, run_ranks_outcomes

RANKS_STAY = True

APART = ((0, 1), (2, 3))
MIXED = ((0, 2), (1, 3))
SECONDS = 60.0


def mesh_over(halves):
    """The mesh of this rank's half. Collective over all, as torch makes groups."""
    made = [DeviceMesh("cpu", list(half)) for half in halves]
    return next(mesh for mesh in made if mesh.get_coordinate() is not None)


def groups_by_kind(halves, kind):
    """The group of this rank, of the two halves of a job of four, and its members. Collective over all."""
    mine = next(half for half in halves if dist.get_rank() in half)
    if kind == "process group":
        made = [dist.new_group(list(half)) for half in halves]
        return made[halves.index(mine)], mine
    if kind == "mesh":
        return mesh_over(halves), mine
    if kind == "mesh of two dimensions":
        made = [DeviceMesh("cpu", [[rank] for rank in half]) for half in halves]
        return made[halves.index(mine)], mine
    assert kind == "slice"
    names = ("other", "own") if halves == APART else ("own", "other")
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)["own"], mine


def app_of(mesh, group, which, value=1.0, algorithm="adamw"):
    """A model of its own, as wide as the group's number says."""
    whole = torch.arange(15.0).view(5, 3).repeat(1, which + 1) * 0.1 + value
    rows, copies = (
        torch.nn.Parameter(distribute_tensor(whole, mesh, [placement], src_data_rank=None))
        for placement in (Shard(0), Replicate())
    )
    model = {"rows": rows, "copies": copies, f"plain{which}": torch.nn.Parameter(whole[0] - 1)}
    options = {"lr": 0.1} if algorithm == "adamw" else {"max_iter": 3, "line_search_fn": "strong_wolfe"}
    optimizer = shardopt.keyed(algorithm, model, process_group=group, **options)
    own = checkpoint.PerRank({"member": ranks_of(group).rank, "of": which})
    return {"model": model, "optimizer": optimizer, "own": own, "step": 0}


def pieces(tensor):
    return [local.detach().clone() for local in local_tensors(tensor)]


def give_gradients(app, step):
    for number, (name, parameter) in enumerate(app["model"].items()):
        whole = torch.arange(parameter.numel() * 1.0).view(parameter.shape).cos() * (step + number + 1)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = whole
        assert name


def train(app, group, which, steps, spoiled=None):
    """Steps with a clipped norm and a scaler; in the step `spoiled` the last rank of group 1 has an infinite gradient.

    Returns:
        The norms and scales.
    """
    clipped = shardopt.GradientClippingOptimizer(app["optimizer"], "norm", 0.5)
    assert clipped.process_group is group
    scaler = shardopt.GradScaler("cpu", init_scale=8.0, growth_interval=100, process_group=group)
    seen = []
    for step in steps:
        give_gradients(app, step)
        ranks = ranks_of(group)
        if step == spoiled and which and ranks.rank == ranks.size - 1:
            local_tensors(app["model"]["rows"].grad)[0][0, 0] = torch.inf
        scaler.unscale_(clipped)
        scaler.step(clipped)
        scaler.update()
        seen.append((float(clipped.total_norm), scaler.get_scale()))
        app["step"] = step + 1
    app["optimizer"].check_agreement()
    return seen


def minimize(app, group):
    """L-BFGS on the distance to a target; the loss is that of the group."""
    ranks = ranks_of(group)

    def closure():
        own = torch.zeros(())
        for name, parameter in app["model"].items():
            (value,) = local_tensors(parameter)
            share = 1 if name == "rows" else ranks.size  # each rank has all of the others
            own = own + (value.detach() - 3).square().sum() / share
            gradient = 2 * (value.detach() - 3)
            if isinstance(parameter, DTensor):
                spec = parameter.device_mesh, parameter.placements
                gradient = DTensor.from_local(
                    gradient, *spec, run_check=False, shape=parameter.shape, stride=parameter.stride()
                )
            parameter.grad = gradient
        return ranks.all_reduce_sum(own)

    for _ in range(3):
        app["optimizer"].step(closure)


def state_of(app):
    saved = app["optimizer"].state_dict()
    state = {
        name: {entry: pieces(value) if isinstance(value, torch.Tensor) else value for entry, value in entries.items()}
        for name, entries in saved["state"].items()
    }
    return repr(({name: pieces(tensor) for name, tensor in app["model"].items()}, state, app["own"].value, app["step"]))


def both(root, mesh, group, which):
    """All that one group does; a job of its own gives the same."""
    results = []
    app = app_of(mesh, group, which)
    results.append(train(app, group, which, range(3), spoiled=1))
    results.append(state_of(app))
    for stage in (None, "now", "lazy"):
        url = f"{root}/{which}-{stage}"
        if stage is None:
            checkpoint.save(url, app, process_group=group, deadline_seconds=SECONDS)
        else:
            checkpoint.async_save(url, app, stage=stage, process_group=group, deadline_seconds=SECONDS).result()
        for share_reads in ("never", "always"):
            other = app_of(mesh, group, which, value=9.0)
            other["own"] = checkpoint.PerRank(None)
            checkpoint.load(
                url, other, init_state=True, share_reads=share_reads, process_group=group, deadline_seconds=SECONDS
            )
            assert state_of(other) == results[1]
    results.append(train(other, group, which, range(3, 5)))
    results.append(state_of(other))
    smooth = app_of(mesh, group, which, algorithm="lbfgs")
    minimize(smooth, group)
    results.append(state_of(smooth))
    checkpoint.save(f"{root}/{which}-lbfgs", smooth, process_group=group)
    other = app_of(mesh, group, which, value=7.0, algorithm="lbfgs")
    checkpoint.load(f"{root}/{which}-lbfgs", other, init_state=True, process_group=group)
    minimize(smooth, group), minimize(other, group)
    assert state_of(smooth) == state_of(other)
    if which == 0:
        app["optimizer"].param_groups[0]["lr"] = 1.0 + ranks_of(group).rank
        with pytest.raises(StateError, match=r"1\.0 on rank \d; 2\.0 on rank \d") as drifted:
            app["optimizer"].check_agreement()
        results.append(str(drifted.value).split("found")[0])
    return results


def both_in_one_job(root, halves, kind):
    group, members = groups_by_kind(halves, kind)
    return both(root, mesh_over(halves), group, halves.index(members))


def one_alone(root, which):
    return both(root, mesh_over([(0, 1)]), None, which)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What jobs of two ranks do, by the number of the group, and where they have saved."""
    root = str(tmp_path_factory.mktemp("alone"))
    return [run_ranks(2, one_alone, root, which) for which in (0, 1)], root


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """What two groups of one job do, and where they have saved."""
    root = tmp_path_factory.mktemp("together")
    return run_ranks(4, both_in_one_job, str(root), APART, "process group"), root


MORE_KINDS = [
    (MIXED, "slice"),
    (APART, "mesh"),
    (MIXED, "mesh of two dimensions"),
    (APART, "slice"),
    (MIXED, "process group"),
]
KINDS = [(APART, "process group"), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE_KINDS)]


@pytest.mark.parametrize(("halves", "kind"), KINDS)
def test_two_groups_do_what_two_jobs_do(tmp_path, alone, together, halves, kind):
    (expected, elsewhere), (results, root) = alone, together
    if (halves, kind) != (APART, "process group"):
        results, root = run_ranks(4, both_in_one_job, str(tmp_path), halves, kind), tmp_path
    for which, half in enumerate(halves):
        assert [results[rank] for rank in half] == expected[which]
    for stage in (None, "now", "lazy"):
        for which in (0, 1):
            path = f"{which}-{stage}"
            assert checkpoint.verify(root / path).ok
            with checkpoint.open(root / path) as one, checkpoint.open(f"{elsewhere}/{path}") as other:
                assert one.manifest.world_size == 2
                assert [one.per_rank(rank) for rank in (0, 1)] == [other.per_rank(rank) for rank in (0, 1)]
                stored = [(file.name.rpartition("-")[2], file.nbytes) for file in one.manifest.files]
                assert stored == [(file.name.rpartition("-")[2], file.nbytes) for file in other.manifest.files]
                assert [*one.manifest.tensors] == [*other.manifest.tensors]
                for key, tensor in one.manifest.tensors.items():
                    twin = other.manifest.tensors[key].layout
                    assert (tensor.layout.boxes, tensor.layout.files) == (twin.boxes, twin.files)


def load_elsewhere(root, which, halves):
    group, members = groups_by_kind(halves, "mesh") if halves else (None, None)
    if halves and halves.index(members) != 1:
        return None
    app = app_of(group or mesh_over([(0, 1)]), group, which, value=5.0)
    checkpoint.load(f"{root}/{which}-None", app, init_state=True, process_group=group, deadline_seconds=SECONDS)
    return state_of(app)


def test_a_group_and_a_job_load_each_others(alone, together):
    (_, elsewhere), (_, root) = alone, together
    by_job = run_ranks(2, load_elsewhere, str(root), 1, None)
    by_group = run_ranks(4, load_elsewhere, elsewhere, 1, APART)
    assert by_job == by_group[2:] and by_group[:2] == [None, None]


# --- who is not in it ------------------------------------------------------------------------------------------------


def refused_everywhere(root, url, group):
    app, parameter = {"x": torch.ones(3)}, torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = shardopt.keyed("sgd", {"x": parameter}, lr=0.1)
    for call in (
        lambda: checkpoint.save(url, app, process_group=group),
        lambda: checkpoint.async_save(url, app, process_group=group),
        lambda: checkpoint.load(url, app, process_group=group),
        lambda: checkpoint.Manager(f"{root}/run", process_group=group),
        lambda: shardopt.keyed("sgd", {"x": parameter}, process_group=group),
        lambda: optimizer.check_agreement(process_group=group),
        lambda: shardopt.GradientClippingOptimizer(optimizer, "norm", 1.0, process_group=group).step(),
        lambda: shardopt.GradScaler("cpu", process_group=group).unscale_(optimizer),
        lambda: MirrorCopier(root, f"{root}/copies", process_group=group).prepare(),
    ):
        with pytest.raises(OptionError, match=rf"group: found one that rank {dist.get_rank()} is not in"):
            call()
    assert app["x"].eq(1).all() and parameter.eq(1).all()


def calls_from_outside(root):
    """Trainers 1 and 2 of four ranks; the others are refused by name whatever they call, or evaluate meanwhile."""
    rank = dist.get_rank()
    evaluators, mesh = dist.new_group([0, 3]), DeviceMesh("cpu", [1, 2])
    results = []
    for kind, group in (
        ("process group", dist.new_group([1, 2])),
        ("mesh", DeviceMesh("cpu", [1, 2])),
        ("mesh of two dimensions", DeviceMesh("cpu", [[1], [2]])),
    ):
        url = f"{root}/{kind}"
        if rank in (1, 2):
            app = app_of(mesh, group, 0)
            train(app, group, 0, range(2))
            checkpoint.save(url, app, process_group=group)
            with checkpoint.Manager(
                f"{root}/run {kind}", process_group=group, destinations=[checkpoint.Mirror(f"{root}/copies {kind}")]
            ) as manager:
                manager.save(1, app)
                assert manager.restore(app) == 1
            results.append(checkpoint.load(url, app, process_group=group).world_size)
            continue
        for _ in range(3):
            dist.all_reduce(torch.ones(2), group=evaluators)
        refused_everywhere(root, url, group)
        results.append("refused")
    return results


def test_ranks_outside_are_refused_by_name_and_disturb_nobody(tmp_path):
    results = run_ranks(4, calls_from_outside, str(tmp_path))
    assert results == [["refused"] * 3, [2] * 3, [2] * 3, ["refused"] * 3]


def no_groups():
    for group in ([0, 1], "world", 3):
        with pytest.raises(OptionError, match=r"group: found a \w+; required"):
            checkpoint.save("/nowhere/at/all", {"x": 1}, process_group=group)


def test_what_is_no_group():
    no_groups()
    run_ranks(2, no_groups)


def group_of_one(root):
    """Each rank by itself, and all at the same time; the last is no group but the number is 0 in each."""
    rank = dist.get_rank()
    groups = [dist.new_group([each]) for each in range(3)]
    mesh = mesh_over([(0,), (1,), (2,)])
    for name, group in (("process group", groups[rank]), ("mesh", mesh)):
        url = f"{root}/{rank} {name}"
        app = app_of(mesh, group, rank)
        train(app, group, rank, range(2))
        checkpoint.save(url, app, process_group=group)
        checkpoint.async_save(f"{url} async", app, stage="lazy", process_group=group).result()
        for each in (url, f"{url} async"):
            other = app_of(mesh, group, rank, value=4.0)
            checkpoint.load(each, other, init_state=True, process_group=group)
            assert state_of(other) == state_of(app)
            with checkpoint.open(each) as reader:
                assert reader.manifest.world_size == 1
                assert [file.name[-17:] for file in reader.manifest.files] == ["00000.safetensors"]
                assert reader.per_rank(0)["own"] == {"member": 0, "of": rank}


def test_groups_of_one_rank(tmp_path):
    run_ranks(3, group_of_one, str(tmp_path))


def held_outside(root, members):
    """Tensors of a mesh of all four ranks in a save, a norm and L-BFGS of two of them."""
    rank = dist.get_rank()
    group, mesh = dist.new_group(list(members)), init_device_mesh("cpu", (4,))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    cut, copies, hybrid = (
        torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), on, placements, src_data_rank=None))
        for on, placements in ((mesh, [Shard(0)]), (mesh, [Replicate()]), (pairs, [Replicate(), Shard(0)]))
    )
    if rank not in members:
        return None
    texts = []
    optimizer = shardopt.keyed("sgd", {"cut": cut}, process_group=group, lr=0.1)
    cut.grad = DTensor.from_local(torch.ones(1, 2), mesh, [Shard(0)], run_check=False)
    for call in (
        lambda: checkpoint.save(f"{root}/no", {"cut": cut, "plain": torch.ones(2)}, process_group=group),
        lambda: checkpoint.async_save(f"{root}/no", {"cut": cut}, process_group=group).result(),
        lambda: shardopt.GradientClippingOptimizer(optimizer, "norm", 1.0).step(),
        lambda: shardopt.keyed("lbfgs", {"cut": cut}, process_group=group).step(lambda: 1.0),
    ):
        with pytest.raises(LayoutError, match=r"cut: found boxes that only ranks") as caught:
            call()
        texts.append(str(caught.value))
    assert not os.path.exists(f"{root}/no/manifest.json")
    app = {"copies": copies} | ({"hybrid": hybrid} if set(members) in ({0, 1}, {2, 3}) else {})
    for number in range(2):
        checkpoint.save(f"{root}/{number}", app, process_group=group)
    with torch.no_grad():
        local_tensors(copies)[0].zero_()
    checkpoint.load(f"{root}/1", app, process_group=group)
    assert local_tensors(copies)[0].eq(1).all()
    assert checkpoint.verify(f"{root}/1").ok
    return texts


@pytest.mark.parametrize(
    "members", [(0, 1), *(pytest.param(each, marks=pytest.mark.exhaustive) for each in [(1, 3), (2, 3)])]
)
def test_a_tensor_that_lies_in_part_outside(tmp_path, members):
    results = run_ranks(4, held_outside, str(tmp_path), members)
    assert results[members[0]] == results[members[1]]
    for text in results[members[0]]:
        assert f"required all of it on ranks {list(members)}" in text


# --- ranks that are lost ---------------------------------------------------------------------------------------------


def lose_a_rank(root, dead, stage):
    """Two groups save every step; one rank dies between two of them. The others of its group are told, not the rest."""
    group, members = groups_by_kind(APART, "process group")
    which, rank = APART.index(members), dist.get_rank()
    mesh = mesh_over(APART)
    app = app_of(mesh, group, which)
    manager = checkpoint.Manager(
        f"{root}/{which}", process_group=group, stage=stage, options=checkpoint.SaveOptions(deadline_seconds=SECONDS)
    )
    try:
        for step in range(6):
            train(app, group, which, [step]) if dead not in members or step < 3 else None
            if rank == dead and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            manager.save(step + 1, app)
        manager.close()
    except RankError as error:
        return "lost", str(error)
    other = app_of(mesh, group, which, value=4.0)
    with checkpoint.Manager(
        f"{root}/{which}", process_group=group, options=checkpoint.SaveOptions(deadline_seconds=SECONDS)
    ) as restoring:
        assert restoring.restore(other) == 6
    assert state_of(other) == state_of(app)
    return "continued", ""


MORE_DEATHS = [(1, "lazy"), (3, None), (2, "now")]


@pytest.mark.parametrize(
    ("dead", "stage"), [(3, "lazy"), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in MORE_DEATHS)]
)
def test_one_group_loses_a_rank_and_the_other_continues(tmp_path, dead, stage):
    outcomes = run_ranks_outcomes(4, lose_a_rank, str(tmp_path), dead, stage)
    assert outcomes[dead].signal is signal.SIGKILL
    losers = next(half for half in APART if dead in half)
    for outcome in outcomes:
        if outcome.rank == dead:
            continue
        what, text = outcome.value
        assert what == ("lost" if outcome.rank in losers else "continued")
        assert outcome.rank not in losers or f"rank {dead} died" in text
    lost, going = (tmp_path / str(APART.index(half)) for half in (losers, *(h for h in APART if h != losers)))
    assert checkpoint.Manager(going).steps() == [1, 2, 3, 4, 5, 6]
    assert checkpoint.Manager(lost).steps() in ([[1, 2, 3]] if stage is None else [[1, 2], [1, 2, 3]])
    for root in (lost, going):
        manager = checkpoint.Manager(root)
        assert all(checkpoint.verify(manager.path(step)).ok for step in manager.steps())


def errors_in_a_group(root):
    """Errors of a round in a group, by the numbers of its ranks in the job."""
    group, members = groups_by_kind(APART, "process group")
    rank, texts = dist.get_rank(), []
    for app in (
        {"same": torch.full((3,), float(rank))},  # drifted
        {"value": rank},
        {"shape": torch.ones(3 + rank)},
        {"bad": torch.ones(2, device="meta")} if rank in (1, 3) else {"bad": torch.ones(2)},
    ):
        with pytest.raises(ShardoptError) as caught:
            checkpoint.save(f"{root}/{members[0]}", app, process_group=group)
        texts.append(str(caught.value))
    checkpoint.save(f"{root}/{members[0]}", {"x": torch.ones(2)}, process_group=group)
    with pytest.raises(MismatchError) as mismatch:
        checkpoint.load(
            f"{root}/{members[0]}", {"x": torch.ones(2), **({"y": 1} if rank in (1, 3) else {})}, process_group=group
        )
    with pytest.raises(RankError) as different:
        checkpoint.save(f"{root}/{rank}-other", {"x": 1}, process_group=group)
    return [*texts, str(mismatch.value), str(different.value)]


def test_errors_name_ranks_as_the_job_does(tmp_path):
    results = run_ranks(4, errors_in_a_group, str(tmp_path))
    assert results[0] == results[1] and results[2] == results[3]
    drifted, value, shape, bad, mismatch, different = results[2]
    for text in (drifted, value, shape):
        assert "of the ranks of this group, 0 is 2 of the job, 1 is 3 of the job" in text, text
    assert "failed on rank 3:" in bad
    assert "failed on rank 3:" in mismatch and "(on rank 3)" in mismatch
    assert "on rank 2" in different and "on rank 3" in different
    for text in results[0]:
        assert "of the job" not in text and "rank 3" not in text


# --- ranks in several groups -----------------------------------------------------------------------------------------


def in_turns(root):
    """Rank 1 is in two groups, and saves in the background with each in turns; ranks 0 and 2 with one of them."""
    rank = dist.get_rank()
    groups = {"low": dist.new_group([0, 1]), "high": dist.new_group([1, 2])}
    groups = {name: group for name, group in groups.items() if group is not dist.GroupMember.NON_GROUP_MEMBER}
    apps = {name: {"weight": torch.zeros(4), "name": name} for name in groups}
    pending = []
    for step in range(4):
        for name, group in groups.items():
            apps[name]["weight"].fill_(step)
            pending.append(
                checkpoint.async_save(f"{root}/{name}-{step}", apps[name], process_group=group, deadline_seconds=20)
            )
    for each in pending:
        each.result()
    # One of them fails: those who have saved there are told, each at the next call of that group, and nobody else.
    outcome = {}
    for name, group in groups.items():
        failing = f"{root}/low-0" if name == "low" else f"{root}/{name}-5"
        outcome[name] = checkpoint.async_save(failing, apps[name], process_group=group, deadline_seconds=20)
    for each in outcome.values():
        each.done.wait()
    told = {}
    for name, group in groups.items():
        try:
            checkpoint.async_save(f"{root}/{name}-6", apps[name], process_group=group, deadline_seconds=20).result()
            told[name] = ""
        except ShardoptError as error:
            told[name] = type(error).__name__
    for name, group in groups.items():
        checkpoint.save(f"{root}/{name}-7", apps[name], process_group=group)
    if rank == 1:
        with pytest.raises(checkpoint.CheckpointError if hasattr(checkpoint, "CheckpointError") else ShardoptError):
            checkpoint.async_save(f"{root}/low-8", {"x": object()}, process_group=groups["low"]).result()
    elif rank == 0:
        with pytest.raises(ShardoptError):
            checkpoint.async_save(f"{root}/low-8", {"x": 1}, process_group=groups["low"]).result()
    return told


def test_a_rank_in_two_groups_saves_in_turns(tmp_path):
    low, both_, high = run_ranks(3, in_turns, str(tmp_path))
    assert low == {"low": "CheckpointExistsError"} and high == {"high": ""}
    assert both_ == low | high
    for name in ("low", "high"):
        for step in (0, 1, 2, 3, 6, 7):
            if (name, step) != ("low", 6):
                assert checkpoint.verify(tmp_path / f"{name}-{step}").ok
                with checkpoint.open(tmp_path / f"{name}-{step}") as reader:
                    assert reader.read("weight").eq(min(step, 3)).all() and reader.read("name") == name
                    assert reader.manifest.world_size == 2


# --- what is made for a group ----------------------------------------------------------------------------------------


def copies_of_optimizers():
    group, members = groups_by_kind(APART, "process group")
    mesh = mesh_over(APART)
    for of in (group, mesh):
        app = app_of(mesh, of, APART.index(members))
        clipped = shardopt.GradientClippingOptimizer(app["optimizer"], "norm", 0.5)
        train(app, of, 0, range(2))
        copied = copy.deepcopy(clipped)
        assert copied.process_group is of
        for optimizer in (clipped, copied):
            parameters = optimizer.params
            give_gradients({"model": parameters}, 5)
            optimizer.step()
        assert repr([*map(pieces, clipped.params.values())]) == repr([*map(pieces, copied.params.values())])
        assert float(copied.total_norm) == float(clipped.total_norm)
    plain = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(StateError, match=r"group: found a process group, which is nothing in another process"):
        pickle.dumps(shardopt.keyed("sgd", {"x": plain}, process_group=group, lr=0.1))
    again = pickle.loads(pickle.dumps(shardopt.keyed("sgd", {"x": plain}, process_group=mesh, lr=0.1)))
    again.check_agreement()
    assert again.process_group == mesh


def test_copies_keep_the_group():
    run_ranks(4, copies_of_optimizers)


def stopped_and_mirrored(root):
    """A signal to one rank of a group stops that group; the other continues. Each has its copies, and logs once."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("shardopt").addHandler(handler)
    group, members = groups_by_kind(APART, "mesh")
    which, rank = APART.index(members), dist.get_rank()
    app = app_of(group, group, which)
    options = {"stop_on": checkpoint.Preemption(signal.SIGUSR2, exit_code=7, seconds=50.0), "process_group": group}
    manager = checkpoint.Manager(
        f"{root}/{which}", destinations=[checkpoint.Mirror(f"{root}/copies-{which}")], keep=2, **options
    )
    left = None
    try:
        for step in range(1, 6):
            if rank == 3 and step == 3:
                os.kill(os.getpid(), signal.SIGUSR2)
            train(app, group, which, [step])
            manager.save(step, app)
    except SystemExit as stop:
        left = stop.code
    manager.close()
    return left, app["step"], sum("stop requested" in line for line in lines)


def test_a_signal_stops_one_group(tmp_path):
    results = run_ranks(4, stopped_and_mirrored, str(tmp_path))
    assert [left for left, _, _ in results] == [None, None, 7, 7]
    assert results[2][1] == results[3][1]
    assert [lines for *_, lines in results] == [0, 0, 1, 0]
    for which, last in enumerate((5, results[2][1] - 1)):
        for root in (tmp_path / str(which), tmp_path / f"copies-{which}"):
            manager = checkpoint.Manager(root)
            assert manager.steps() == [last - 1, last]
            assert all(checkpoint.verify(manager.path(step)).ok for step in manager.steps())
