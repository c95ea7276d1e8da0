"""From other formats into shards of any kind, saved in ours, and converted back: every tensor and value is the same.

Both ends are read by those whose format it is: torch and safetensors. Tensors are compared by a digest of their bytes.
"""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import shardopt
from shardopt import checkpoint
from tests.distributed.test_sources import LAYERS, make_model, train
from tests.harness import run_ranks

RANKS_STAY = True

STYLES = ("fsdp", "hsdp", "tp", "plain", "stages")
FORMATS = {style: ("dcp", "flattened", "huggingface", "torch") for style in STYLES}
FORMATS["stages"] = FORMATS["stages"][1:]  # groups of several stages are one value in DCP, that of the first alone
BACK = {"dcp": "dcp", "flattened": "dcp", "huggingface": "huggingface", "torch": "torch"}
EXTRA = {"seen": 12, "rates": [0.1, 0.2], "nested": {"done": True, "name": "x", "none": None}}
ADDED = {"algorithm", "given"}  # what keyed optimizers note with the options of a group


def model_of(style, seed):
    """A model in one of the styles; of "stages" each rank has some of the layers."""
    if style != "stages":
        return make_model(style, seed)
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = make_model("plain", seed)
    mine = [name for number, name in enumerate(LAYERS) if number * size // len(LAYERS) == rank]
    return torch.nn.ModuleDict({name: whole[int(name)] for name in mine})


def step_in(style, model, optimizer):
    if style != "stages":
        train(model, optimizer, 0, 3)
        return
    for step in range(3):
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(10 * step + number)
            parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
        optimizer.step()


def write(root, styles):
    """Saves a run of each style in each format, by torch."""
    for style in styles:
        model = model_of(style, 0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, amsgrad=True)
        step_in(style, model, optimizer)
        for name in FORMATS[style]:
            path = Path(root, style, name)
            path.mkdir(parents=True, exist_ok=True)
            whole = name == "torch" and style != "stages"
            options = StateDictOptions(
                flatten_optimizer_state_dict=name == "flattened", full_state_dict=whole, cpu_offload=whole
            )
            weights, state = get_state_dict(model, optimizer, options=options)
            app = {"model": weights, "optim": state, "step": 3, "extra": EXTRA}
            if name == "torch":
                save_files(path, app, style)
            elif name == "huggingface":
                writer = dcp.HuggingFaceStorageWriter(path=str(path), save_distributed=True)
                dcp.save(tensors_in(app), storage_writer=writer)
            else:
                dcp.save(app, checkpoint_id=path)
    dist.barrier()


def save_files(path, app, style):
    """One file; of stages a numbered set, whose first has the options of all."""
    if style != "stages":
        if dist.get_rank() == 0:
            torch.save(app, path / "model.pt")
        return
    names = [None] * dist.get_world_size()
    (group,) = app["optim"].pop("param_groups")
    dist.all_gather_object(names, group["params"])
    if dist.get_rank() == 0:
        app["optim"]["param_groups"] = [{**group, "params": [name for each in names for name in each]}]
    else:
        del app["step"], app["extra"]
    torch.save(app, path / f"model-{dist.get_rank() + 1:05d}-of-{dist.get_world_size():05d}.pt")


def through_ours(out, trips):
    """Loads each source into a run of a style, and saves that; then converts it back, all ranks together."""
    for number, (source, name, style) in enumerate(trips):
        model = model_of(style, 1)
        optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=0.9, amsgrad=True)
        app = {"model": model, "optim": optimizer}
        strict = checkpoint.Strictness(missing="ignore")  # files of tensors alone have no options
        if name != "huggingface":
            app |= {"step": 0, "extra": {"seen": 0, "rates": [], "nested": {"done": False, "name": "", "none": 0}}}
            strict = True
        checkpoint.load(source, app, init_state=True, strict=strict)
        assert app.get("step", 3) == 3 and app.get("extra", EXTRA) == EXTRA
        checkpoint.save(f"{out}/{number}-ours", app, durable=False)
        back = f"{out}/{number}" + ("/model.pt" if name == "torch" else "")
        Path(out, str(number)).mkdir(exist_ok=True)
        select = "." if name == "huggingface" else None  # state of optimizers, too
        checkpoint.convert(f"{out}/{number}-ours", back, BACK[name], select=select, durable=False)


def contents(path, name):
    """All tensors, as dtype, shape and digest, and all plain values of a checkpoint, by key; read by its own library.

    Groups of optimizers stand by parameter, as their positions and their order say nothing to those who go by names.
    """
    path, state = Path(path), {}
    if name == "torch":
        for file in sorted(path.iterdir()):
            merge(state, torch.load(file, weights_only=True))
    elif (path / "model.safetensors").exists():
        state = load_file(path / "model.safetensors")
    else:
        reader = dcp.HuggingFaceStorageReader(str(path)) if name == "huggingface" else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that it reads in a single process
            state = _load_state_dict_from_keys(checkpoint_id=None if reader else path, storage_reader=reader)
    flat = dict(leaves(state))
    groups = [flat.pop(key) for key in [*flat] if key == "optim.param_groups"]
    for group in groups[0] if groups else []:
        for parameter in group.pop("params"):
            for option, value in group.items():
                key = f"optim.param_groups.{parameter}.{option}"
                assert option in ADDED or flat.setdefault(key, value) == value, key  # both forms, where there are both
    return {key: value for key, value in flat.items() if ADDED.isdisjoint(key.split("."))}


def merge(state, other):
    for name, value in other.items():
        if isinstance(value, dict) and name in state:
            merge(state[name], value)
        else:
            assert name not in state
            state[name] = value


def leaves(node, at=""):
    if isinstance(node, dict):
        for name, child in node.items():
            yield from leaves(child, f"{at}.{name}" if at else str(name))
    elif isinstance(node, torch.Tensor):
        data = node.contiguous().reshape(-1).view(torch.uint8).numpy()
        yield at, (node.dtype, tuple(node.shape), xxhash.xxh3_128_hexdigest(data))
    else:
        yield at, node


def tensors_in(app):
    return {f"model.{name}": tensor for name, tensor in app["model"].items()} | {
        f"optim.state.{name}.{entry}": tensor
        for name, entries in app["optim"]["state"].items()
        for entry, tensor in entries.items()
    }


def check(out, trips):
    compared = 0
    for number, (source, name, style) in enumerate(trips):
        before, after = contents(source, name), contents(f"{out}/{number}", name)
        assert len(before) >= 35, source  # 7 parameters, with 4 tensors of state each
        assert after == before, (source, style)
        compared += len(before)
        assert checkpoint.verify(f"{out}/{number}-ours").ok
    return compared


def test_round_trips(tmp_path):
    run_ranks(3, write, f"{tmp_path}/from", ["fsdp", "stages"])
    trips = [
        (f"{tmp_path}/from/{was}/{name}", name, now)
        for was, now in (("fsdp", "hsdp"), ("stages", "tp"))
        for name in FORMATS[was]
    ]
    run_ranks(2, through_ours, str(tmp_path), trips)
    check(tmp_path, trips)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Runs of 1 to 4 ranks of every style in every format."""
    root, found = tmp_path_factory.mktemp("sources"), []
    for writers in (1, 2, 3, 4):
        run_ranks(writers, write, f"{root}/{writers}", STYLES, deadline_seconds=600)
        found += [(f"{root}/{writers}/{style}/{name}", name) for style in STYLES for name in FORMATS[style]]
    return found


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_any_ranks_and_styles(sources, tmp_path, ranks, style):
    trips = [(source, name, style) for source, name in sources]
    run_ranks(ranks, through_ours, str(tmp_path), trips, deadline_seconds=3600)
    print(f"{len(trips)} round trips, {check(tmp_path, trips)} tensors and values")
