"""A gradient that one rank lacks, on an accelerator: the step is taken, and no checkpoint has it."""

import shutil
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardopt
from shardopt import checkpoint
from shardopt.errors import GradientError
from tests.accelerator.support import needs_standin, on_accelerator

pytestmark = needs_standin

BAD = 3  # the step before which rank 1 has no gradient
ROWS, COLUMNS = Shard(0), Shard(1)
CASES = {
    "muon": ({}, ROWS),
    "soap": ({}, ROWS),
    "adafactor": ({}, ROWS),
    "lamb": ({}, ROWS),
    "lars": ({}, ROWS),
    "adamw": ({"state_dtype": "uint8"}, COLUMNS),
}  # row-wise algorithms ask before they step


def make(case):
    options, placement = CASES[case]
    mesh = init_device_mesh("standin", (2,))
    whole = torch.linspace(-1, 1, 64 * 128).reshape(64, 128).to("standin")
    weight = nn.Parameter(distribute_tensor(whole, mesh, [placement]))
    return weight, shardopt.keyed(case, {"w": weight}, lr=0.1, **options)


def step(weight, optimizer, number):
    weight.grad = torch.full_like(weight, 0.1 * number)
    if number == BAD and dist.get_rank() == 1:
        weight.grad = None
    optimizer.step()


def folder_of_all():
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return folder[0]


def error_of(call):
    try:
        call()
    except GradientError as error:
        return str(error)
    return ""


def kept_by_a_manager(standin, stage, cases):
    """Saves each step, the bad one last; returns by case what was raised, what is there, and whether it is restored."""
    found = {}
    for case in cases:
        weight, optimizer = make(case)
        folder = folder_of_all()
        manager = checkpoint.Manager(folder, stage=stage)
        app = {"w": weight, "optimizer": optimizer}
        raised, good = [], None
        for number in range(1, BAD + 1):
            step(weight, optimizer, number)
            if number == BAD - 1:
                good = weight.full_tensor().cpu()

            def save(number=number, manager=manager, app=app):
                pending = manager.save(number, app)
                if stage is not None:
                    pending.result(60)

            raised.append(error_of(save))
        again = error_of(lambda m=manager, app=app: m.save(BAD + 1, app)) if stage is None else ""
        steps = manager.steps()
        restored = manager.restore(app)
        same = torch.equal(weight.full_tensor().cpu(), good)
        step(weight, optimizer, BAD + 1)
        manager.save(BAD + 1, app)
        manager.close()
        dist.barrier()
        found[case] = raised, again, steps, restored, same, manager.steps()
        dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)
    return found


@pytest.mark.parametrize(
    ("stage", "cases"), [(None, tuple(CASES)), ("now", ("muon", "adafactor")), ("lazy", ("adamw", "lamb"))]
)
def test_a_step_that_lacked_a_gradient_is_in_no_checkpoint_until_a_load(stage, cases):
    for of_rank in on_accelerator(2, kept_by_a_manager, stage, cases):
        for case, (raised, again, steps, restored, same, afterwards) in of_rank.items():
            assert raised[:-1] == [""] * (BAD - 1), (case, raised)
            assert "w" in raised[-1] and "load a checkpoint" in raised[-1] and "drifted" not in raised[-1], case
            assert bool(again) == (stage is None), case
            assert steps == [*range(1, BAD)] and restored == BAD - 1 and same, case
            assert afterwards == [*range(1, BAD), BAD + 1], case


def other_ends(standin):
    """Returns what `state_dict`, `close`, and a save of the parameters alone raise after the bad step."""
    raised = []
    for case in ("muon", "adamw"):
        for end in ("state_dict", "close", "weights"):
            weight, optimizer = make(case)
            folder, app = folder_of_all(), {"w": weight, "optimizer": optimizer}
            optimizer.init_state()
            checkpoint.save(f"{folder}/good", app)
            with checkpoint.Manager(f"{folder}/run") as manager:
                for number in range(1, BAD + 1):
                    step(weight, optimizer, number)
                if end == "state_dict":
                    raised += [error_of(optimizer.state_dict), error_of(optimizer.state_dict)]
                if end == "weights":
                    raised.append(error_of(lambda manager=manager, weight=weight: manager.save(BAD, {"w": weight})))
                    assert manager.steps() == []
                if end == "close":
                    raised.append(error_of(manager.close))
            for more in (1, 2, 3):
                raised.append(error_of(lambda w=weight, o=optimizer, n=more: step(w, o, BAD + n)))
            checkpoint.load(f"{folder}/good", app)
            shutil.rmtree(folder, ignore_errors=True)
            dist.barrier()
    return raised


def test_what_else_looks_at_a_step_that_lacked_a_gradient():
    """The step after the next raises once more what a save has raised; `state_dict` raises each time."""
    steps = [False, True, False]
    for raised in on_accelerator(2, other_ends):
        assert [bool(each) for each in raised] == [True, True, *steps, True, *steps, True, *steps] * 2


def raised_by_steps(standin, late):
    """Returns by case the step that raises, where the device of one rank is late, and what steps have waited for."""
    found = {}
    if late and dist.get_rank() == 1:
        standin.Event.query = lambda self: False
    for case in CASES:
        weight, optimizer = make(case)
        raised, waits = [], []
        for number in range(1, BAD + 4):
            standin.C.reset()
            raised.append(error_of(lambda n=number, w=weight, o=optimizer: step(w, o, n)))
            waits.append(standin.waits().get("wait: synchronize an event", 0))
        found[case] = [bool(each) for each in raised].index(True) + 1, sum(map(bool, raised)), waits
    return found


@pytest.mark.parametrize("late", [False, True])
def test_ranks_raise_in_the_same_step_and_wait_for_no_device_that_is_not_late(late):
    for rank, found in enumerate(on_accelerator(2, raised_by_steps, late)):
        for case, (number, count, waits) in found.items():
            assert (number, count) == (BAD + 2, 1), case
            assert any(waits) == (late and rank == 1), case


def queries(standin):
    """Returns how often each of the last steps asks whether numbers have arrived."""
    weight, optimizer = make("muon")
    asked = []
    query = standin.Event.query

    def counted(event):
        asked[-1] += 1
        return query(event)

    standin.Event.query = counted
    for _ in range(6):
        asked.append(0)
        step(weight, optimizer, 1)
    return asked


def test_a_step_asks_once():
    assert on_accelerator(2, queries) == [[0, 0, 1, 1, 1, 1]] * 2


def loaded_in_parts(standin):
    """Loads parts of the state after the bad step; returns what is raised before and after each."""
    found = {}
    for case in CASES:
        weight, optimizer = make(case)
        app, folder = {"w": weight, "optimizer": optimizer}, folder_of_all()
        for number in range(1, BAD + 1):
            step(weight, optimizer, number)
            if number == 1:
                checkpoint.save(f"{folder}/1", app)
        raised = []

        def ask(weight=weight, optimizer=optimizer, folder=folder, raised=raised):
            raised.append(bool(error_of(optimizer.state_dict)))
            raised.append(bool(error_of(lambda: checkpoint.save(f"{folder}/weights", {"w": weight}))))
            shutil.rmtree(f"{folder}/weights", ignore_errors=True)
            dist.barrier()

        ask()
        checkpoint.load(f"{folder}/1", {"optimizer": optimizer}, strict=checkpoint.Strictness(unexpected="ignore"))
        ask()
        checkpoint.load(f"{folder}/1", {"w": weight}, strict=checkpoint.Strictness(unexpected="ignore"))
        ask()
        for _ in range(3):
            step(weight, optimizer, 1)
        checkpoint.save(f"{folder}/2", app)
        found[case] = raised
        dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)
    return found


def test_a_load_of_the_optimizer_alone_leaves_the_failure_to_the_parameters():
    for found in on_accelerator(2, loaded_in_parts):
        for case, raised in found.items():
            assert raised == [True] * 4 + [False] * 2, case


def loaded_after_a_save_in_the_background(standin, waits, whole):
    """Loads after the bad step was saved in the background; returns what is raised from then on."""
    found = []
    for stage in ("now", "lazy"):
        weight, optimizer = make("muon")
        app, folder = {"w": weight, "optimizer": optimizer}, folder_of_all()
        for number in range(1, BAD + 1):
            step(weight, optimizer, number)
            if number == 1:
                checkpoint.save(f"{folder}/1", app)
        pending = checkpoint.async_save(f"{folder}/{BAD}", app, stage=stage)
        if waits:
            pending.done.wait(60)
        parts = app if whole else {"optimizer": optimizer}
        checkpoint.load(f"{folder}/1", parts, strict=checkpoint.Strictness(unexpected="ignore"))
        pending.done.wait(60)
        silenced = pending.is_reported
        dist.barrier()

        def save(folder=folder, app=app):
            checkpoint.async_save(f"{folder}/4", app).result(60)

        raised = [bool(error_of(lambda w=weight, o=optimizer: step(w, o, 1))) for _ in range(3)]
        found.append([silenced, *raised, bool(error_of(save)), bool(error_of(pending.result))])
        checkpoint.load(f"{folder}/1", app)
        dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)
    return found


@pytest.mark.parametrize("waits", [False, True])
def test_a_load_silences_the_failed_save_of_the_state_that_it_has_replaced(waits):
    assert (
        on_accelerator(2, loaded_after_a_save_in_the_background, waits, True)
        == [[[True, False, False, False, False, True]] * 2] * 2
    )


def test_a_load_of_a_part_silences_no_failed_save():
    assert (
        on_accelerator(2, loaded_after_a_save_in_the_background, True, False)
        == [[[False, False, True, False, True, True]] * 2] * 2
    )


def restored_from_nothing(standin):
    """Restores where there is no checkpoint, after a save in the background has failed."""
    weight, optimizer = make("muon")
    folder = folder_of_all()
    manager = checkpoint.Manager(folder, stage="now")
    for number in range(1, BAD + 1):
        step(weight, optimizer, number)
    app = {"w": weight, "optimizer": optimizer}
    manager.save(BAD, app)
    raised = [error_of(lambda: manager.restore(app)), error_of(lambda: manager.restore(app))]
    manager.close()
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    return [bool(each) for each in raised]


def test_a_restore_of_nothing_silences_nothing():
    assert on_accelerator(2, restored_from_nothing) == [[True, False]] * 2


def on_the_second_device(standin):
    """Defers numbers of device 1 while device 0 is the current one; returns what the check gets."""
    from shardopt.runtime.deferred_checks import DeferredChecks

    standin.C.late(True)
    numbers, seen, deferred = torch.ones(3, device="standin:1"), [], DeferredChecks()
    with standin.device(1):
        numbers.add_(1)
    assert standin.C.current_device() == 0
    deferred.defer(numbers, lambda arrived: seen.append(arrived.tolist()))
    deferred.settle()
    standin.C.late(False)
    return seen


def test_numbers_are_waited_for_on_their_own_device():
    assert on_accelerator(1, on_the_second_device) == [[[2.0, 2.0, 2.0]]]


def loaded_while_unsettled(standin):
    """Loads right after the bad step, while its checks are on their way; returns whether all is as it was saved."""
    found = []
    for case in ("muon", "adafactor"):
        weight, optimizer = make(case)
        app, folder = {"w": weight, "optimizer": optimizer}, folder_of_all()
        for number in range(1, BAD + 1):
            step(weight, optimizer, number)
            if number == 1:
                checkpoint.save(f"{folder}/1", app)
        checkpoint.load(f"{folder}/1", app)
        step(weight, optimizer, 1)
        checkpoint.save(f"{folder}/2", app)
        found.append(float(weight.full_tensor().cpu().isfinite().all()))
        dist.barrier()
        shutil.rmtree(folder, ignore_errors=True)
    return found


def test_a_load_drops_what_is_not_looked_at():
    assert on_accelerator(2, loaded_while_unsettled) == [[1.0, 1.0]] * 2


def refusals_of_a_plain_gradient(standin):
    """Returns what five steps raise, of which the second has a bad gradient of a plain parameter on rank 1."""
    found = {}
    for case in ("muon", "lamb"):
        weight, _ = make(case)
        plain = nn.Parameter(torch.ones(8, 8))  # where gradients can be sparse
        optimizer, raised = shardopt.keyed(case, {"w": weight, "plain": plain}, lr=0.1), []
        for number in range(5):
            weight.grad, plain.grad = torch.full_like(weight, 0.1), torch.full_like(plain, 0.1)
            if number == 1 and dist.get_rank() == 1:
                plain.grad = plain.grad.to_sparse()
            raised.append(error_of(optimizer.step))
        found[case] = raised
    return found


def test_a_plain_gradient_that_one_rank_refuses_is_told_to_all_that_share_others():
    other, own = on_accelerator(2, refusals_of_a_plain_gradient)
    for case, raised in other.items():
        assert [bool(each) for each in raised] == [False, False, False, True, False], case
        assert [bool(each) for each in own[case]] == [False, True, False, True, False], case
        assert "plain.grad: found torch.sparse_coo" in own[case][1] and raised[3] == own[case][3]
        assert "w.grad: found no fault in it, but" in raised[3] and "another parameter's" in raised[3]
