"""What to see first on one GPU: independent sections, each of which prints a table within minutes.

    python -m benchmarks.on_gpu                        # on CUDA, some minutes a section; use the GPU for nothing else
    python -m benchmarks.on_gpu --section steps saves  # some of them
    python -m benchmarks.on_gpu --device standin       # in small, on the tests' simulated accelerator

A section that fails prints why, and the others run. On CUDA the tables are written to `out/on_gpu.md` as well: what is
to be kept goes from there to `results/on_gpu.md`.
`--folder` is where checkpoints go: the disk that training would use.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import shardopt
from benchmarks import launches
from benchmarks.device import MODEL, STANDIN, Place, Rows, apart, lacking, module_of, refusing_waits
from benchmarks.on_gpu_saves import saves, threads
from benchmarks.peers import RESULTS, hardware
from shardopt import checkpoint
from shardopt.algorithms.row_wise import row_rules
from shardopt.optim.backward import InBackwardOptimizer

TESTS = (
    "algorithms/test_code_kernels.py",
    "optim/test_row_kernels.py",
    "optim/test_averaging.py",
    "data/test_random_state.py",
)
CONTRACTS = [
    "-p",
    "tests.accelerator.plugin",
    *(f"tests/contract/test_{name}.py" for name in ("optimizer_contract", "optimizer_loading", "storage")),
]
ON_GPU = [f"tests/unit/{name}" for name in (*TESTS, "checkpoint/saving/test_async_save.py")]
SIZES = {False: (MODEL[False], (60, 1024), (2000, 32)), True: (MODEL[True], (3, 16), (4, 4))}
ROWS = {False: (4_000_000, 1 << 18), True: (500, 50)}  # of a table, and touched


def give_gradients(parameters: Any) -> None:
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)


def tests(at: Place) -> Rows:
    """Do the tests pass that need a GPU? On the stand-in: those of its own folder, collected."""
    yield "tests", "result"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    if at.kind == STANDIN:
        given = [["tests/accelerator", "--collect-only"]]
    else:
        given = [["tests/accelerator"], ON_GPU, ["tests/unit/ranks/test_ranks.py", "-k", "nccl or cuda"], CONTRACTS]
    for arguments in given:
        run = subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            cwd=RESULTS.parents[1],
            timeout=1200,
            env=os.environ | {"DEVICE": at.kind},  # that of the plugin, which makes it the default
        )
        lines = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        yield " ".join(arguments), "; ".join([*lines, (run.stdout.splitlines() or [run.stderr[-200:]])[-1]])


def waits(at: Place) -> Rows:
    """Does a step make the host wait for the device?"""
    yield "step", "waits"
    names = list(launches.PEERS)[:: 8 if at.small else 1]
    makers: dict[str, Callable[[nn.Module], Any]] = {name: partial(optimizer_of, name) for name in names}
    makers["clipping by norm"] = lambda model: clipped(shardopt.keyed("adamw", model.named_parameters()))
    for name, make in makers.items():
        model = at.layers(2, 64)
        optimizer = make(model)
        for _ in range(2):
            give_gradients(model.parameters())
            optimizer.step()
        give_gradients(model.parameters())
        yield name, what_waits(at, optimizer.step)


def what_waits(at: Place, call: Callable[[], Any]) -> str:
    try:
        with refusing_waits(at.kind):
            call()
    except RuntimeError as error:
        return str(error).splitlines()[0][:90]
    return "for nothing"


def optimizer_of(name: str, model: nn.Module) -> Any:
    algorithm, options = launches.PEERS[name]
    named = {key: each for key, each in model.named_parameters() if each.ndim > 1 or algorithm != "Muon"}
    return shardopt.keyed(algorithm, named, **options)


def clipped(optimizer: Any) -> Any:
    return shardopt.GradientClippingOptimizer(optimizer, shardopt.GradientClipping.NORM, 1.0)


def count_launches(at: Place) -> Rows:
    """How many kernels and copies does a step launch, for each parameter, and how many whatever their number?"""
    yield "algorithm", "host waits", "launches for each parameter", "fixed launches of a step"
    names = list(launches.PEERS)[:: 8 if at.small else 1]
    yield from map(tuple, launches.measure(at.kind, names, (2, 4) if at.small else launches.COUNTS))


def stored(at: Place) -> Rows:
    """Is the state at the call what a save in the background stores, while training continues?"""
    yield "stage", "save", "parameters as at the call"
    for stage in ("now", "lazy"):
        model = at.layers(*MODEL[at.small])
        optimizer = shardopt.keyed("adamw", model.named_parameters(), lr=1e-4)  # with more, all is soon NaN
        inputs = torch.randn(64, MODEL[at.small][1]).to(at.kind)
        app = {"model": model, "optimizer": optimizer}

        def step(model: nn.Module = model, optimizer: Any = optimizer, inputs: Tensor = inputs) -> None:
            model(inputs).square().mean().backward()
            optimizer.step()

        for number in range(2):
            step()
            wanted = [parameter.detach().clone() for parameter in model.parameters()]
            pending = checkpoint.async_save(f"{at.folder}/{stage}-{number}", app, stage=stage)
            for _ in range(4):
                step()
            pending.result(300)
            checkpoint.load(f"{at.folder}/{stage}-{number}", app)
            same = all(map(torch.equal, wanted, model.parameters()))
            yield stage, number + 1, same and bool(wanted[0].isfinite().all())
            shutil.rmtree(f"{at.folder}/{stage}-{number}")


def steps(at: Place) -> Rows:
    """What does a step take, beside torch's foreach and fused?"""
    yield "parameters", "optimizer", "ms on the device", "ms in the call"
    keyed = partial(shardopt.keyed, "adamw")
    makers: dict[str, Callable[[Any], Any]] = {
        "torch AdamW, foreach": lambda named: torch.optim.AdamW([each for _, each in named], foreach=True),
        "torch AdamW, fused": lambda named: torch.optim.AdamW([each for _, each in named], fused=True),
        "keyed AdamW": keyed,
        "keyed AdamW, foreach": lambda named: keyed(named, foreach=True),
        "keyed AdamW, fused": lambda named: keyed(named, fused=True),
        "keyed AdamW, clipped": lambda named: clipped(keyed(named)),
        "bf16 state": lambda named: keyed(named, state_dtype="bfloat16"),
        "8-bit state": lambda named: keyed(named, state_dtype="uint8"),
        **{name: partial(shardopt.keyed, name) for name in ("Adafactor", "LAMB", "LARS")},
    }
    for (count, width), (name, make) in itertools.product(SIZES[at.small], makers.items()):
        if at.kind == STANDIN and name.endswith("fused"):
            continue  # torch has no fused kernels for it
        model = at.layers(count, width)
        give_gradients(model.parameters())
        device, call = at.seconds(make(list(model.named_parameters())).step)
        size = sum(parameter.numel() for parameter in model.parameters())
        yield f"{2 * count} tensors, {size / 1e6:.1f} M", name, f"{device * 1e3:.2f}", f"{call * 1e3:.2f}"


def rows(at: Place) -> Rows:
    """Which part of the card's bandwidth do row-wise updates of touched rows reach?"""
    yield "moments", "touched rows", "µs", "of the bandwidth of a copy"
    count, most = ROWS[at.small]
    columns = 64
    big = torch.zeros((1 << 12) if at.small else (1 << 28), device=at.kind)
    copied, _ = at.seconds(big.clone)
    options = {"lr": 0.1, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-8, "betas": (0.9, 0.999), "maximize": False}
    for rule, elements in ((row_rules.ADAGRAD, 3), (row_rules.ADAM, 5)):
        table = torch.zeros(count, columns, device=at.kind)
        state = {rule.moments: torch.zeros(count, 1, device=at.kind)}
        state |= {name: torch.zeros_like(table) for name in rule.others}
        for touched in (most // 10, most):
            index = torch.randperm(count, device="cpu")[:touched].sort().values.to(at.kind)
            gradients = torch.randn(touched, columns).to(at.kind)
            numbers = rule.numbers(options, 1.0)
            update = partial(row_rules.update_rows, rule, table, index, gradients, state, numbers)
            seconds, _ = at.seconds(update)
            needed = touched * (elements * columns * 4 + 2 * 4 + 8)
            share = needed / seconds / (2 * big.nbytes / copied)
            yield rule.moments, f"{touched:,}", f"{seconds * 1e6:.1f}", f"{share:.0%}"


def graphs(at: Place) -> Rows:
    """Can a step be captured as a CUDA graph, and be replayed around a save?"""
    yield "what", "holds"
    if at.kind == STANDIN:
        yield "the stand-in has no graphs", ""
        return
    model, inputs = at.layers(4, 256), torch.randn(16, 256, device=at.kind)
    optimizer = shardopt.keyed("adamw", model.named_parameters(), capturable=True, foreach=True)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    side = at.module.Stream()
    side.wait_stream(at.module.current_stream())
    with at.module.stream(side):
        for _ in range(3):
            step()
    at.module.current_stream().wait_stream(side)
    graph = at.module.CUDAGraph()
    with at.module.graph(graph):
        step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    graph.replay()
    yield "a replay moves parameters", not torch.equal(before[0], next(model.parameters()))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    pending = checkpoint.async_save(f"{at.folder}/graph", {"model": model})
    graph.replay()
    pending.result(60)
    checkpoint.load(f"{at.folder}/graph", {"model": model})
    yield "a save before a replay has the state at its call", all(map(torch.equal, before, model.parameters()))


def memory(at: Place) -> Rows:
    """What is the peak of a training step, as the allocator counts?"""
    yield "optimizer", "peak, GB", "weights, GB", "peak / weights"
    makers: dict[str, Callable[[nn.Module], Any]] = {
        "keyed AdamW": lambda model: shardopt.keyed("adamw", model.named_parameters()),
        "AdamW in backward": lambda model: shardopt.in_backward(model, "adamw"),
        "8-bit state": lambda model: shardopt.keyed("adamw", model.named_parameters(), state_dtype="uint8"),
        "Adafactor": lambda model: shardopt.keyed("Adafactor", model.named_parameters()),
    }
    for name, make in makers.items():
        peak, weights = peak_of(at, make)
        yield name, f"{peak / 1e9:.3f}", f"{weights / 1e9:.3f}", f"{peak / weights:.2f}"


def peak_of(at: Place, make: Callable[[nn.Module], Any]) -> tuple[int, int]:
    """The peak of two training steps, and the weights, in bytes; nothing of them is left."""
    gc.collect()
    at.module.empty_cache()
    if at.kind != STANDIN:  # which counts since the process began
        at.module.reset_peak_memory_stats()
    model = at.layers(*MODEL[at.small])
    inputs = torch.randn(64, MODEL[at.small][1]).to(at.kind)
    optimizer = make(model)
    for _ in range(2):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, InBackwardOptimizer):
        optimizer.stop()  # until then its hooks keep the model
    return at.module.max_memory_allocated(), sum(parameter.nbytes for parameter in model.parameters())


SECTIONS: dict[str, Callable[[Place], Rows]] = {
    **{each.__name__: each for each in (tests, waits, stored, steps, saves, threads, rows, graphs, memory)},
    "launches": count_launches,
}


def run(kind: str, small: bool, names: list[str], folder: str) -> list[tuple[str, str, bool]]:
    """Runs sections; returns of each its name, its table, and whether it has failed."""
    warnings.filterwarnings("ignore")
    module_of(kind)
    found = []
    for name in names:
        begin, failed = time.perf_counter(), False
        lines = [f"## {name}", "", (SECTIONS[name].__doc__ or "").strip(), ""]

        def tell(line: str, lines: list[str] = lines) -> None:
            print(line, flush=True)
            lines.append(line)

        print("\n".join(lines), flush=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            try:
                for number, row in enumerate(SECTIONS[name](Place(kind, small, own))):
                    tell("| " + " | ".join(map(str, row)) + " |")
                    if not number:
                        tell("|" + "---|" * len(row))
            except Exception:
                failed = True
                tell(f"\n```text\n{traceback.format_exc(limit=-4).rstrip()}\n```")
        tell(f"\n{time.perf_counter() - begin:.0f} s.\n")
        found.append((name, "\n".join(lines), failed))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", STANDIN), default="cuda")
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--small", action="store_true", help="as on the stand-in")
    arguments = parser.parse_args()
    kind = arguments.device
    if lacking(kind):
        raise SystemExit(lacking(kind))
    # The stand-in in a process of its own, as that has it until it ends.
    call = partial(apart, run) if kind == STANDIN else run
    found = call(kind, arguments.small or kind == STANDIN, arguments.section, arguments.folder)
    if kind != STANDIN:
        head = f"# Seen on a GPU\n\n{time.strftime('%Y-%m-%d')}, {hardware()}"
        text = "\n\n".join([head, *(text for _, text, _ in found)])
        out = RESULTS.parents[1] / "out" / "on_gpu.md"
        out.parent.mkdir(exist_ok=True)
        out.write_text(text)
    failed = [name for name, _, failed in found if failed]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
