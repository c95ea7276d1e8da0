"""The examples of frameworks as jobs of the tests: a function for each way to train, which ranks import and call.

FSDP2 under Accelerate wants a GPU: `shard` has it take CPUs for one, which is all that these jobs change.
"""

import contextlib
import functools
import importlib.util
import itertools
import logging
import os
import signal
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

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


def be_quiet():
    warnings.resetwarnings()  # of the frameworks, which are not these tests'
    warnings.simplefilter("ignore")


def shard(accelerator):
    from accelerate import DistributedType
    from accelerate.state import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin

    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=False, auto_wrap_policy="NO_WRAP", reshard_after_forward=True
    )
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState().distributed_type = DistributedType.FSDP  # of which every new AcceleratorState takes it


def shard_trainer(trainer):
    shard(trainer.accelerator)
    trainer.is_fsdp_enabled = True


def newest(folder):
    """The newest whole checkpoint of ModelCheckpoint's, as `ckpt_path="last"` would look for it."""
    saved = [path for path in Path(folder).glob("*.ckpt") if (path / "manifest.json").exists()]
    return max(saved, key=lambda path: int(path.stem.rpartition("=")[2]), default=None)


def train(framework, out, **options):
    """Trains one of the examples on this rank; returns what it gives."""
    be_quiet()
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
    if "fsdp2" in framework:
        accelerator = getattr(trained, "accelerator", trained)
        assert accelerator.distributed_type == "FSDP" and accelerator.is_fsdp2
        assert all(isinstance(each, DTensor) for model in accelerator._models for each in model.parameters())
    history = getattr(getattr(trained, "state", None), "log_history", None)
    return [(line["step"], line["loss"]) for line in history if "loss" in line] if history else None


def run_and_tell(framework, out, rank, at):
    """As `run`; one rank sends itself SIGTERM in the forward of a step."""
    from integrations.task import Network

    forward, calls = Network.forward, []

    @functools.wraps(forward)  # a Trainer asks for its signature
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
    fully_shard(model.network)
    model = model if within else model.network
    no_decay = [] if len(groups) == 1 else [{"match": "^(0|3).weight$"}]
    optimizer = shardopt.keyed("adamw", model.named_parameters(), groups=no_decay, weight_decay=0.0, lr=0.5)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # as the framework's has one: it adds an option
    app = {"model": model, "optimizer": optimizer}
    checkpoint.load(url, app, init_state=True, strict=checkpoint.Strictness(unexpected="ignore"))
    batch = Sums()[0]
    network = model.network if within else model
    network(batch["inputs"], batch["labels"])["loss"].backward()
    optimizer.step()
    return optimizer.param_groups[0]["lr"]


def save_in_plain_torch(url, within):
    """Trains a few steps in a program of torch alone, and saves; `within` a module that has the network."""
    from integrations.task import Network, Sums

    import shardopt
    from shardopt import checkpoint

    network = Network()
    model = torch.nn.ModuleDict({"network": network}) if within else network
    optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=0.3)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for i in range(3):
        batch = Sums()[i]
        network(batch["inputs"], batch["labels"])["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpoint.save(url, {"model": model, "optimizer": optimizer, "step": 3})


def start_from(framework, out, url):
    """Begins from a checkpoint of another program; saves model and optimizer as they are before the first step."""
    from shardopt import checkpoint
    from shardopt.integrations.run import TrainingRun

    be_quiet()

    class Seen(BaseException):
        pass

    made, begin = TrainingRun.__init__, TrainingRun.begin

    def making(run, root, **options):
        made(run, root, start_from=url, **options)

    def beginning(run, app):
        begin(run, app)
        checkpoint.save(f"{out}/seen", {"model": app["model"], "optimizer": app["optimizer"]})
        raise Seen

    TrainingRun.__init__, TrainingRun.begin = making, beginning
    try:
        if framework.startswith("accelerate"):
            from integrations import fit_accelerate

            accelerator = fit_accelerate.prepare(shard if "fsdp2" in framework else lambda _: None)[0]
            app = {name: value for name, value in accelerator.app().items() if name in ("model", "optimizer")}
            checkpoint.load(url, app, init_state=True, strict=checkpoint.Strictness(unexpected="ignore"))
            checkpoint.save(f"{out}/seen", app)
        else:
            train(framework, out)
    except Seen:
        pass


def restore(framework, out, seen):
    """Resumes; saves model and optimizer as they are after the restore, and trains no step."""
    from shardopt import checkpoint

    class Seen(BaseException):
        pass

    restore = checkpoint.Manager.restore

    def restoring(manager, app, **options):
        restore(manager, app, **options)
        checkpoint.save(seen, {"model": app["model"], "optimizer": app["optimizer"]})
        raise Seen

    checkpoint.Manager.restore = restoring
    with contextlib.suppress(Seen):
        train(framework, out)


def save_states(folder, sharded, times):
    """Accelerate's own calls: trains and saves states under automatic names; returns them, and the next loss."""
    from accelerate.utils import ProjectConfiguration
    from integrations import fit_accelerate

    be_quiet()
    naming = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator, model, optimizer, schedule, loader = fit_accelerate.prepare(
        shard if sharded else lambda _: None, project_config=naming
    )
    if times == 0:
        accelerator.load_state()
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for i in range(times + 1):
        loss = model(**next(batches))["loss"]
        if i == times:
            return float(accelerator.reduce(loss.detach(), "mean")), optimizer.param_groups[0]["lr"]
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        accelerator.save_state()


def save_states_after(folder):
    """Saves in a directory with states of another program, at first beside one that hides what it needs.

    Returns the names of the states after both saves.
    """
    from accelerate.utils import ProjectConfiguration

    from shardopt.checkpoint.storage import LocalStorage
    from shardopt.integrations import accelerate

    def program(path=None):
        naming = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
        accelerator, model = accelerate.Accelerator(cpu=True, project_config=naming), torch.nn.Linear(2, 1)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if path is not None:
            accelerator.load_state(path)
        return accelerator

    def refuse(self, name, *args):
        if self.url.endswith("theirs"):
            raise PermissionError(13, "Permission denied")
        return read(self, name, *args)

    be_quiet()
    first = program()
    paths = [first.save_state() for _ in range(3)]
    second, read = program(paths[-1]), LocalStorage.read
    second.save_state(os.path.join(folder, "checkpoints", "theirs"))
    LocalStorage.read = refuse
    second.save_state()
    beside = second._saved()
    LocalStorage.read = read
    second.save_state()
    return beside, second._saved()


def schedule_by_ranks(folder):
    """Saves, or loads, with a schedule that Accelerate has go by the number of ranks."""
    from shardopt.integrations.accelerate import Accelerator

    be_quiet()
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5))
    (accelerator.load_state if os.path.isdir(folder) else accelerator.save_state)(folder)


def accumulate(folder, by_steps):
    """Trains 9 batches with 3 to a step, and saves after steps or after batches; returns log lines, and the steps."""
    from shardopt import checkpoint
    from shardopt.integrations.accelerate import Accelerator

    be_quiet()
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("shardopt").addHandler(handler)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    manager = checkpoint.Manager(folder)
    manager.restore(accelerator.app())
    for batch in range(9):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
        if not by_steps or accelerator.sync_gradients:
            manager.save(batch, accelerator.app())
    return lines, manager.steps()


def tell_of_epochs(folder, batches):
    """Loops over an epoch of so many batches, with 2 to a step; then loads a folder of Accelerate's own."""
    from torch.utils.data import DataLoader

    from shardopt.integrations.accelerate import Accelerator
    from shardopt.integrations.loader import ResumableLoader

    be_quiet()
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("shardopt").addHandler(handler)
    logging.getLogger("shardopt").setLevel(logging.INFO)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    own = accelerator.prepare(DataLoader(torch.ones(batches, 1)))
    loader = ResumableLoader(range(batches), batch_size=1)
    for _ in own:
        accelerator.app({"data": loader})["accelerator"].state_dict()
    Path(folder, "old").mkdir()
    for name in ("model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"):
        Path(folder, "old", name).touch()
    try:
        accelerator.load_state(f"{folder}/old")
    except Exception as error:
        lines.append(type(error).__name__)
    return lines


def prepare_stateful_loader():
    """Prepares a loader that Accelerate gives a state, in which a load would not find its place."""
    from accelerate import DataLoaderConfiguration

    from shardopt.integrations.accelerate import Accelerator

    be_quiet()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    accelerator.prepare(torch.utils.data.DataLoader([1.0, 2.0]))


def app_under_tensor_parallelism():
    """Returns the samples of a loader that both ranks of tensor parallelism share; others are refused."""
    from accelerate import ParallelismConfig

    from shardopt.errors import OptionError
    from shardopt.integrations.accelerate import Accelerator
    from shardopt.integrations.loader import ResumableLoader

    be_quiet()
    accelerator = Accelerator(cpu=True)
    accelerator.state.parallelism_config = ParallelismConfig(tp_size=2)  # which Accelerate takes on accelerators alone
    other = ResumableLoader(torch.arange(16), batch_size=4, shuffle=False)
    for pass_on in (accelerator.register_for_checkpointing, lambda loader: accelerator.app({"data": loader})):
        with pytest.raises(OptionError, match=r"rank: found rank \d of 2; required rank 0 of 1"):
            pass_on(other)
    loader = ResumableLoader(torch.arange(16), batch_size=4, shuffle=False, rank=0, ranks=1)
    accelerator.register_for_checkpointing(loader)
    assert accelerator.app()["registered"] == [loader]
    return [batch.tolist() for batch in loader]
