"""Saves in the background copy what a rank writes of what several hold, and still find replicas that have drifted."""

import importlib
import threading
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardopt
from shardopt import checkpoint
from shardopt.checkpoint.saving import background_save
from shardopt.checkpoint.saving.options import SaveTerms
from shardopt.checkpoint.saving.writing import staging
from shardopt.errors import NoSpaceError, StateError
from tests.harness.ranks import run_ranks

saving = importlib.import_module("shardopt.checkpoint.saving.save")
async_save = importlib.import_module(
    "shardopt.checkpoint.saving.async_save"
)  # the package has the function of this name
WHOLE = torch.arange(4 << 20, dtype=torch.float32).reshape(4096, 1024)  # 16 MiB


def app_of(mesh):
    """A plain tensor, one on a mesh of shards and replicas, and small ones; 24 MiB on each of four ranks."""
    plain, placed = WHOLE.clone(), WHOLE.clone().chunk(2)[mesh.get_coordinate()[1]]
    tensor = DTensor.from_local(placed, mesh, [Replicate(), Shard(0)], shape=WHOLE.shape, stride=WHOLE.stride())
    return {
        "plain": plain,
        "placed": tensor,
        "small": torch.ones(3),
        "count": 5,
        "mine": dist.get_rank() * torch.ones(0),
    }


def copied_bytes():
    parts = async_save._default._memories[0][1].parts
    return sum(tensor.nbytes for tensor in parts._tensors)


def loaded(path):
    with checkpoint.open(path) as reader:
        return {key: reader.read(key) for key in ("plain", "placed", "small", "count")}


def is_as_saved(path, added=0.0):
    got = loaded(path)
    return all(torch.equal(got[key], WHOLE + added) for key in ("plain", "placed")) and got["count"] == 5


def save_shares(folder):
    background_save._PLAN_SECONDS = 60.0
    mesh = init_device_mesh("cpu", (2, 2))
    app, copied = app_of(mesh), []
    for number in range(2):
        pending = checkpoint.async_save(f"{folder}/{number}", app)
        copied.append(copied_bytes())
        for key in ("plain", "placed"):  # at once: the state of the call is what is saved
            (app[key].to_local() if key == "placed" else app[key]).add_(1)
        pending.result(60)
    right = [
        is_as_saved(f"{folder}/{number}", number) and checkpoint.verify(f"{folder}/{number}").ok for number in (0, 1)
    ]
    pending = checkpoint.async_save(f"{folder}/2", app, base=f"{folder}/1")
    changed = pending.result(60).bytes_unchanged
    pending = checkpoint.async_save(f"{folder}/3", app, base=f"{folder}/2")
    unchanged = pending.result(60).bytes_unchanged
    right += [is_as_saved(f"{folder}/2", 2), is_as_saved(f"{folder}/3", 2)]

    staging_of_all = checkpoint.async_save(f"{folder}/all", app, check_replicas="all")
    staging_of_all.result(60)
    problems = []
    for check in ("sampled", "none"):
        if dist.get_rank() == 3:
            app["plain"][-1, -1] = -1
            app["placed"].to_local()[0, 0] = -1
        pending = checkpoint.async_save(f"{folder}/drifted-{check}", app, check_replicas=check)
        try:
            pending.result(60)
        except StateError as error:
            problems.append([(each.key, each.found) for each in error.problems])
    return copied, right, changed, unchanged, problems


def test_what_a_rank_writes_is_copied_and_no_more(tmp_path):
    results = run_ranks(4, save_shares, str(tmp_path))
    for _, right, _, _, problems in results:
        assert right == [True] * 4
        (drifted,) = problems
        assert [key for key, _ in drifted] == ["placed", "plain"]
        assert [text.split(" on ")[1:] for _, text in drifted] == [["rank 3 than", "rank 1"], ["rank 3 than", "rank 0"]]
    for number in (0, 1):
        # Each holds 24 MiB. The plain tensor is not cut: one writes it.
        assert sorted(copied[number] >> 20 for copied, *_ in results) == [4, 4, 4, 20]
    assert sum(changed for _, _, changed, _, _ in results) == 0
    assert sum(unchanged for *_, unchanged, _ in results) == (32 << 20) + 12


def save_lazily(folder):
    staging.LEAST_SHARED_BYTES = 0
    model = torch.nn.Linear(512, 512)
    with torch.no_grad():
        model.weight.copy_(WHOLE[:512, :512])
    optimizer = shardopt.keyed(torch.optim.SGD, model.named_parameters(), lr=1.0)
    app = {"model": model, "optimizer": optimizer}
    kept = []
    for number in range(3):
        before = model.weight.detach().clone()
        pending = checkpoint.async_save(f"{folder}/{number}", app, stage="lazy")
        model(torch.ones(1, 512)).sum().backward()
        optimizer.step()  # waits for the copy
        optimizer.zero_grad()
        pending.result(60)
        with checkpoint.open(f"{folder}/{number}") as reader:
            kept.append(torch.equal(reader.read("model.weight"), before) and not torch.equal(before, model.weight))
    copied = copied_bytes()
    changed_by_hand = checkpoint.async_save(f"{folder}/changed", app, stage="lazy")
    with torch.no_grad():
        model.weight.add_(1)
    try:
        changed_by_hand.result(60)
    except StateError as error:
        return kept, copied, str(error.problems[0].key)
    return kept, copied, "not seen: it was copied before"


def test_lazy_copies_are_of_what_is_written_too(tmp_path):
    for kept, copied, changed in run_ranks(2, save_lazily, str(tmp_path)):
        assert kept == [True] * 3
        assert copied < 514 * 1024 * 4
        assert changed in ("model.weight", "not seen: it was copied before")


def save_where_one_is_late(folder):
    background_save._PLAN_SECONDS = 0.2
    app = {"plain": WHOLE.clone()}
    if dist.get_rank() == 1:
        time.sleep(1.5)
    pending = checkpoint.async_save(f"{folder}/late", app)
    copied = copied_bytes()
    app["plain"].zero_()
    pending.result(60)
    with checkpoint.open(f"{folder}/late") as reader:
        return torch.equal(reader.read("plain"), WHOLE), copied


def test_where_a_rank_is_late_the_others_copy_all_and_continue(tmp_path):
    (right, copied), (other_right, _) = run_ranks(2, save_where_one_is_late, str(tmp_path))
    assert right and other_right
    assert copied == WHOLE.nbytes


def fail_for_space(owner, name, when):
    """Has the first call of a function find no space, once `when` is set."""
    function, failed = getattr(owner, name), []

    def full_once(*args):
        if not failed:
            failed.append(when.wait(30))
            raise NoSpaceError("a disk is full")
        return function(*args)

    setattr(owner, name, full_once)


def save_where_there_is_room(folder):
    staging.LEAST_SHARED_BYTES = 0
    background_save._PLAN_SECONDS = 60.0
    model = torch.nn.Linear(64, 64)
    with torch.no_grad():
        model.weight.copy_(WHOLE[:64, :64])
    optimizer = shardopt.keyed(torch.optim.SGD, model.named_parameters(), lr=1.0, fused=True)  # counted by no version
    app, saver, right = {"model": model, "optimizer": optimizer}, async_save.AsyncSaver(), []
    for stage in ("lazy", "now"):
        before, stepped = model.weight.detach().clone(), threading.Event()
        fail_for_space(saving, "write_files", stepped)
        terms = SaveTerms(durable=False, fallback_urls=(f"{folder}/{stage}",))
        pending = saver.save(f"{folder}/full-{stage}", app, terms, stage=stage)
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        stepped.set()
        assert pending.result(60).url == f"{folder}/{stage}"
        with checkpoint.open(f"{folder}/{stage}") as reader:
            right.append(torch.equal(reader.read("model.weight"), before) and not torch.equal(before, model.weight))

    copy_on_host = staging.copy_on_host

    def changed_by_hand(host, source):
        copy_on_host(host, source)
        if dist.get_rank() and threading.current_thread() is not threading.main_thread():
            with torch.no_grad():
                source.add_(1)

    staging.copy_on_host, staging.LEAST_SHARED_BYTES = changed_by_hand, 1 << 20
    if dist.get_rank() == 0:
        fail_for_space(saving.SaveTarget, "open", stepped)
    try:
        saver.save(f"{folder}/full", app, replace(terms, fallback_urls=(f"{folder}/changed",)), stage="lazy").result(60)
    except StateError as error:
        return right, error.code
    return right, "saved all the same"


def test_a_save_that_goes_elsewhere_for_space_has_the_state_of_the_call(tmp_path):
    """The training has gone on by then. What a rank refuses it refuses there too, though another had no space."""
    assert run_ranks(2, save_where_there_is_room, str(tmp_path)) == [([True, True], "changed-while-copied")] * 2
