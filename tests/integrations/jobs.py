"""The examples of frameworks as jobs of the tests: a function for each way to train, which ranks import and call.

FSDP2 under Accelerate wants a GPU: `shard` has it take CPUs for one, which is all that these jobs change.
"""

import importlib.util
import os
import signal
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

NEEDS = {
    "lightning": "lightning",
    "lightning strategy": "lightning",
    "accelerate": "accelerate",
    "accelerate fsdp2": "accelerate",
    "trainer": "transformers",
    "trainer fsdp2": "transformers",
}


def is_installed(name):
    return importlib.util.find_spec(name) is not None


def shard(accelerator):
    from accelerate import DistributedType
    from accelerate.utils import FullyShardedDataParallelPlugin

    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=False, auto_wrap_policy="NO_WRAP", reshard_after_forward=True
    )
    accelerator.state.distributed_type = DistributedType.FSDP


def shard_trainer(trainer):
    shard(trainer.accelerator)
    trainer.is_fsdp_enabled = True


def newest(folder):
    """The newest whole checkpoint of ModelCheckpoint's, as `ckpt_path="last"` would look for it."""
    saved = [path for path in Path(folder).glob("*.ckpt") if (path / "manifest.json").exists()]
    return max(saved, key=lambda path: int(path.stem.rpartition("=")[2]), default=None)


def train(framework, out, **options):
    """Trains one of the examples on this rank; returns what it gives."""
    warnings.resetwarnings()  # of the frameworks, which are not these tests'
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    out = Path(out)
    if dist.get_rank() == 0:
        out.mkdir(exist_ok=True)
    dist.barrier()
    if framework == "lightning":
        from integrations import fit_lightning

        return fit_lightning.train(out, dist.get_world_size(), **options)
    if framework == "lightning strategy":
        from integrations import fit_lightning
        from lightning.pytorch.callbacks import ModelCheckpoint

        from shardopt.integrations.lightning_strategy import ShardoptStrategy

        saving = ModelCheckpoint(out / "checkpoints", every_n_train_steps=2, save_top_k=-1)
        path = newest(out / "checkpoints")
        return fit_lightning.train(
            out, dist.get_world_size(), ShardoptStrategy, [saving], ckpt_path=None if path is None else str(path)
        )
    if framework.startswith("accelerate"):
        from integrations import fit_accelerate

        return fit_accelerate.train(out, *([shard] if "fsdp2" in framework else []))
    from integrations import fit_trainer

    return fit_trainer.train(out, *([shard_trainer] if "fsdp2" in framework else []), **options)


def run(framework, out, **options):
    """Trains; returns the losses that a Trainer has logged, by step; None of other frameworks."""
    trained = train(framework, out, **options)
    history = getattr(getattr(trained, "state", None), "log_history", None)
    return [(line["step"], line["loss"]) for line in history if "loss" in line] if history else None


def run_and_tell(framework, out, rank, at):
    """As `run`; one rank sends itself SIGTERM in the forward of a step."""
    from integrations.task import Network

    forward, calls = Network.forward, []

    def telling(network, *inputs, **named):
        calls.append(None)
        if len(calls) == at and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(network, *inputs, **named)

    Network.forward = telling
    run(framework, out)


def load_in_plain_torch(url):
    """Loads model and optimizer of a framework's checkpoint into a program of torch alone, and trains a step."""
    from integrations.task import Network, Sums
    from torch.distributed.fsdp import fully_shard

    import shardopt
    from shardopt import checkpoint

    model = torch.nn.Module()
    model.network = Network()
    with checkpoint.open(url) as reader:
        within = any(key.startswith("model.network.") for key in sorted(reader.keys()))
        groups = {str(reader.read(key)) for key in sorted(reader.keys()) if key.startswith("optimizer.param_groups.")}
    model = model if within else model.network
    fully_shard(model)
    no_decay = [] if len(groups) == 1 else [{"match": "^(0|3).weight$"}]
    optimizer = shardopt.keyed("adamw", model.named_parameters(), groups=no_decay, weight_decay=0.0, lr=0.5)
    app = {"model": model, "optimizer": optimizer}
    checkpoint.load(url, app, init_state=True, strict=checkpoint.Strictness(unexpected="ignore"))
    batch = Sums()[0]
    network = model.network if within else model
    network(batch["inputs"], batch["labels"])["loss"].backward()
    optimizer.step()
    return optimizer.param_groups[0]["lr"]
