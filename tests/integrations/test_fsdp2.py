"""Whether FSDP2 is on: parameters are DTensors. On CPUs Accelerate and the Trainer take DDP, and do not say so."""

import pytest
import torch.distributed as dist
from compare_runs import compare_losses, read_losses
from torch.distributed.tensor import DTensor

from tests.harness import run_ranks
from tests.integrations import jobs

FRAMEWORKS = [
    pytest.param(name, marks=pytest.mark.skipif(not jobs.is_installed(needs), reason=f"{needs} is not installed"))
    for name, needs in (("accelerate", "accelerate"), ("trainer", "transformers"))
]
DEADLINE_SECONDS = 140.0


def is_sharded(framework, out, forced):
    """Asks for FSDP2 as the pages do, or as these tests force it; whether all parameters are DTensors, and the type."""
    jobs.be_quiet()
    if framework == "accelerate":
        from accelerate import FullyShardedDataParallelPlugin
        from integrations import fit_accelerate

        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
        options = {} if forced else {"fsdp_plugin": plugin}
        accelerator, *_ = fit_accelerate.prepare(jobs.shard if forced else lambda _: None, **options)
    else:
        options = {"max_steps": 1} if forced else {"max_steps": 1, "fsdp": True}
        accelerator = jobs.train("trainer fsdp2" if forced else "trainer", out, **options).accelerator
    (model,) = accelerator._models
    return all(isinstance(each, DTensor) for each in model.parameters()), str(accelerator.distributed_type)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_asked_for_on_cpus_it_is_silently_off(tmp_path, framework):
    """As the pages say. Once this fails, a version of the framework shards on CPUs: then say so there."""
    found = run_ranks(2, is_sharded, framework, str(tmp_path), False, deadline_seconds=DEADLINE_SECONDS)
    assert found == [(False, "DistributedType.MULTI_CPU")] * 2


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_in_these_tests_it_is_on(tmp_path, framework):
    found = run_ranks(2, is_sharded, framework, str(tmp_path), True, deadline_seconds=DEADLINE_SECONDS)
    assert found == [(True, "DistributedType.FSDP")] * 2


def resume(framework, out, stop):
    """Trains to the end, or until a rank is interrupted in a step."""
    if stop is None:
        jobs.train(framework, out)
        return
    from integrations.task import Network

    forward, calls = Network.forward, []

    def ending(network, inputs, labels):
        calls.append(None)
        if len(calls) > stop:
            raise KeyboardInterrupt
        return forward(network, inputs, labels)

    Network.forward = ending
    with pytest.raises(KeyboardInterrupt):
        jobs.train(framework, out)
    dist.barrier()


@pytest.mark.parametrize("framework", FRAMEWORKS[:1])
def test_a_run_under_ddp_resumes_under_fsdp2_and_back(tmp_path, framework):
    reference = tmp_path / "whole"
    run_ranks(2, resume, framework, str(reference), None, deadline_seconds=DEADLINE_SECONDS)
    for first, then in ((framework, f"{framework} fsdp2"), (f"{framework} fsdp2", framework)):
        run = tmp_path / first
        run_ranks(2, resume, first, str(run), 7, deadline_seconds=DEADLINE_SECONDS)
        assert max(record.step for record in read_losses(run)) == 7
        run_ranks(2, resume, then, str(run), None, deadline_seconds=DEADLINE_SECONDS)
        assert max(record.step for record in read_losses(run)) == 15
        assert compare_losses(reference, run).holds(1e-5)
