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
            folder = folder_of_all()
            with checkpoint.Manager(folder) as manager:
                for number in range(1, BAD + 1):
                    step(weight, optimizer, number)
                if end == "state_dict":
                    raised.append(error_of(optimizer.state_dict))
                    optimizer.load_state_dict(optimizer.state_dict())
                if end == "weights":
                    raised.append(error_of(lambda manager=manager, weight=weight: manager.save(BAD, {"w": weight})))
                    assert manager.steps() == []
                if end == "close":
                    raised.append(error_of(manager.close))
            raised.append(error_of(lambda weight=weight, optimizer=optimizer: step(weight, optimizer, BAD + 1)))
            shutil.rmtree(folder, ignore_errors=True)
            dist.barrier()
    return raised


def test_what_else_looks_at_a_step_that_lacked_a_gradient():
    """A step raises once more what a save has raised, and nothing after a load."""
    for raised in on_accelerator(2, other_ends):
        assert [bool(each) for each in raised] == [True, False, True, True, True, True] * 2


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
