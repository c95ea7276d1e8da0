"""Pages of `shardopt report`: bytes of the file, time until something is seen, and frames a second while it scrolls.

    python -m benchmarks.report_pages [--steps 1000] [--tensors 10000] [--folder /tmp]

A run on three branches, with a mirror, a tier and a stream; and a checkpoint of many tensors in layers, alone, and with
`--values --against` an earlier one. The browser is Debian's chromium without a display; without it, sizes alone are
measured.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import write_table
from shardopt import checkpoint
from shardopt.checkpoint import Mirror, Tier
from shardopt.cli import main as shell
from tests.support.browser import browser, complaints, lacking, look

WIDTHS = (1280, 390)
ROUNDS = 3

# Scrolls the page, or a grid where there is one, by a screen in 60 frames; returns the seconds of each frame.
_SCROLL = """
const done = arguments[0], times = [];
const grids = [...document.querySelectorAll('.grid')], grid = grids[grids.length - 1];
let before = performance.now();
function frame(now) {
  times.push((now - before) / 1000);
  before = now;
  if (times.length > 61) return done(times.slice(1));
  if (grid) grid.scrollTop += 30;
  window.scrollBy(0, 30);
  requestAnimationFrame(frame);
}
requestAnimationFrame(frame);
"""
_PAINTED = "return performance.getEntriesByName('first-contentful-paint').map((each) => each.startTime / 1000)"


def run_of(root: Path, steps: int) -> list[str]:
    """Saves a run, and a stream beside it; returns what the verb takes."""
    app: dict[str, Any] = {"w": torch.zeros(64), "step": 0}
    places: list[Tier | Mirror] = [Tier(str(root / "tier"), every=1, keep_last=2), Mirror(root / "mirror")]
    first = steps // 3
    with checkpoint.Manager(root / "run", destinations=places) as manager:
        for branch in range(3):
            if branch:
                manager.restore(app, step=first * branch - first // 4)
            for step in range(max(first * branch - first // 4, 0) + 1, first * (branch + 1) + 1):
                app["step"] = step
                manager.save(step, app, metrics={"loss": 1 / step})
    with checkpoint.Publisher(root / "stream", durable=False) as publisher:
        for step in (1, 2, 3):
            publisher.publish(step, {"w": app["w"] + step}).result()
    return [str(root / "run"), str(root / "mirror"), str(root / "stream")]


def tensors_of(root: Path, tensors: int) -> list[list[str]]:
    """Saves a checkpoint, and one in which a layer has grown; returns what the verb takes."""
    layers = max(tensors // 12, 1)
    app = {f"model.layers.{i}.w{j}": torch.randn(8, 8) / 50 for i in range(layers) for j in range(12)}
    checkpoint.save(root / "earlier", app, durable=False)
    for j in range(12):
        app[f"model.layers.{layers // 2}.w{j}"] *= 300
    checkpoint.save(root / "later", app, durable=False)
    later = str(root / "later")
    return [[later], [later, "--values", "--against", str(root / "earlier")]]


def measured(page: Path) -> list[str]:
    """Returns the seconds until the first picture, and frames a second, at each width; medians."""
    if lacking():
        return ["not measured"] * (1 + len(WIDTHS))
    painted: list[float] = []
    frames: dict[int, list[float]] = {width: [] for width in WIDTHS}
    with browser() as driver:
        driver.set_script_timeout(60)
        for _ in range(ROUNDS):
            for width in WIDTHS:
                look(driver, page, width)
                time.sleep(0.5)  # the browser notes what it painted a little later
                painted += driver.execute_script(_PAINTED)
                frames[width].append(1 / statistics.mean(driver.execute_async_script(_SCROLL)))
        assert complaints(driver) == []
    return [f"{statistics.median(painted):.2f} s", *(f"{statistics.median(frames[width]):.0f}" for width in WIDTHS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        root = Path(folder)
        plain, compared = tensors_of(root, given.tensors)
        cases = {
            f"a run of {given.steps:,} steps, three branches, mirror, tier, stream": run_of(root, given.steps),
            f"a checkpoint of {given.tensors:,} tensors": plain,
            "the same with --values --against": compared,
        }
        for name, arguments in cases.items():
            page = root / "report.html"
            begin = time.process_time()
            if shell(["report", *arguments, "-o", str(page)]) != 0:
                raise SystemExit(f"no report of {name}")
            seconds = time.process_time() - begin
            rows.append([name, f"{page.stat().st_size / 1e6:.2f} MB", f"{seconds:.1f} s", *measured(page)])
    frames = [f"frames a second at {width} px" for width in WIDTHS]
    header = ["report of", "file", "processor time to write it", "first picture", *frames]
    notes = (
        f"Chromium without a display, drawn by the processor. Medians of {ROUNDS}. A display would show at most 60 "
        "frames a second."
    )
    print(write_table("report_pages", "Pages of reports", header, rows, notes))


if __name__ == "__main__":
    main()
