"""The command `shardopt`: looks into checkpoints, verifies and rewrites them, without a job.

    shardopt show URL [KEY]      of a checkpoint, or the root of a run
    shardopt verify URL
    shardopt reshard SRC DST --world-size N

URL is a path, or anything that fsspec opens. Exit status: 0, 1 where something is wrong, 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from shardopt import checkpoint
from shardopt.errors import ShardoptError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    args = _parser().parse_args(arguments)
    try:
        status: int = args.run(args)
    except ShardoptError as error:
        print(f"shardopt: {error}", file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shardopt", description="Looks into checkpoints, verifies and rewrites them.")
    commands = parser.add_subparsers(required=True)
    show = commands.add_parser(
        "show",
        help="list what a checkpoint holds, or print one tensor or value of it; or list the checkpoints of a run",
    )
    show.add_argument("url")
    show.add_argument("key", nargs="?")
    show.set_defaults(run=_show)
    verify = commands.add_parser("verify", help="read all of a checkpoint and check every checksum")
    verify.add_argument("url")
    verify.set_defaults(run=_verify)
    reshard = commands.add_parser("reshard", help="write a checkpoint as another number of ranks would have")
    reshard.add_argument("src")
    reshard.add_argument("dst")
    reshard.add_argument("--world-size", type=int, required=True, metavar="N")
    reshard.add_argument("--drop-per-rank", action="store_true", help="leave out values that each rank has for itself")
    reshard.set_defaults(run=_reshard)
    return parser


def _show(args: argparse.Namespace) -> int:
    if args.key is None and _show_run(args.url):
        return 0
    with checkpoint.open(args.url) as reader:
        if args.key is not None:
            print(reader.read(args.key))
            return 0
        stored = reader.manifest
        print(f"{reader.url}: saved by {stored.world_size} ranks as {stored.save_id}, {len(stored.files)} files")
        keys = reader.keys()
        for key in keys:
            if key in stored.tensors:
                info = reader.info(key)
                boxes = f"  in {len(info.boxes)} parts" if len(info.boxes) > 1 else ""
                tied = f"  tied to {info.tied_to}" if info.tied_to is not None else ""
                print(f"{key}  {str(info.dtype).removeprefix('torch.')} {list(info.shape)}{boxes}{tied}")
            else:
                print(f"{key}  = {reader.read(key)!r}")
        for key in stored.per_rank:
            print(f"{key}  a value of each rank")
    return 0


def _show_run(url: str) -> bool:
    """Lists the checkpoints of a run; returns whether there is one at `url`."""
    manager = checkpoint.Manager(url) if not os.path.isfile(url) else None
    steps, aside = (manager.steps(), manager.set_aside()) if manager is not None else ([], {})
    if manager is None or not (steps or aside):
        return False
    branches = f", on branch {manager.branch}" if manager.branch else ""
    print(f"{url}: a run of {len(steps)} checkpoints{branches}")
    for step in steps:
        newest = f"  the newest, in {os.path.basename(manager.path(step))}" if step == steps[-1] else ""
        print(f"step {step}{newest}")
    for branch, aside_steps in sorted(aside.items()):
        print(f"set aside, of branch {branch}: step {', '.join(map(str, aside_steps))}")
    return True


def _verify(args: argparse.Namespace) -> int:
    with checkpoint.progress_bar("verifying") as progress:
        report = checkpoint.verify(args.url, progress=progress)
    for problem in report.problems:
        print(problem, file=sys.stderr)
    for name in report.remains:
        print(f"{report.url}/{name}: a data file of another save, which torch's own reader takes too", file=sys.stderr)
    verdict = "every byte is as it was written" if report.ok else f"damaged in {len(report.problems)} places"
    print(f"{report.url}: {report.tensors} tensors, {report.files} files, {report.bytes_read:,} bytes: {verdict}")
    return 0 if report.ok else 1


def _reshard(args: argparse.Namespace) -> int:
    with checkpoint.progress_bar("resharding") as progress:
        report = checkpoint.reshard(
            args.src,
            args.dst,
            world_size=args.world_size,
            drop_per_rank=args.drop_per_rank,
            progress=progress,
        )
    print(
        f"{report.url}: {report.tensors} tensors, {report.bytes_total:,} bytes, as {args.world_size} ranks write them"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
