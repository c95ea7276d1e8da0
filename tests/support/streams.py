"""Published weights and their followers: what an update must have made, and what it may have read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardopt import checkpoint
from shardopt.checkpoint.sources.reading.open_file import OpenFile
from shardopt.checkpoint.storage import storage_of


def named(app: Any) -> dict[str, Tensor]:
    return app.state_dict() if isinstance(app, nn.Module) else dict(app)


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements, by which NaNs are equal to themselves, and -0.0 is not 0.0."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert torch.equal(bits(found[name]), bits(each)), name
    return True


def full_load(url: str, app: Any, **options: Any) -> dict[str, Tensor]:
    """A full load of a step into memory of its own, of the shapes and dtypes of the app."""
    target = {name: torch.zeros_like(each, memory_format=torch.contiguous_format) for name, each in named(app).items()}
    checkpoint.load(url, target, **options)
    return target


def is_step(follower: checkpoint.Follower, app: Any, report: Any, step: int, **options: Any) -> bool:
    """Whether an update has brought an app to a step, with the bits of a full load of it."""
    assert report is not None and (report.step, follower.step) == (step, step)
    return same_bits(named(app), full_load(report.url, app, **options))


def copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in weights.items()}


def zeros_like(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(each) for name, each in weights.items()}


def train(weights: Mapping[str, Tensor], seed: int, share: float = 0.01) -> None:
    """Changes some elements of each tensor, of any dtype, here and there."""
    generator = torch.Generator().manual_seed(seed)
    for each in weights.values():
        flat = each.detach().view(-1)
        if not len(flat):
            continue
        places = torch.randint(len(flat), (max(int(len(flat) * share), 1),), generator=generator)
        values = torch.randint(1, 100, (len(places),), generator=generator)
        flat[places] = values.to(each.dtype) if each.dtype != torch.bool else values % 2 == 0


def files_of(root: Any, step: int) -> list[Path]:
    """The data files that a step has written."""
    return sorted(Path(root).glob(f"step-{step:08d}*/*.safetensors"))


def flip(path: Path, at: int) -> None:
    """Changes one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def place_of(path: Path, key: str) -> tuple[int, int]:
    """Where the bytes of an entry of a data file begin and end in it."""
    from shardopt.checkpoint.format.data_file import header_length, parse_header

    data = path.read_bytes()
    length = header_length(data[:8], len(data), str(path))
    entry = parse_header(data[:length], len(data), str(path))[key]
    return entry.begin, entry.end


@contextmanager
def reads_counted() -> Iterator[list[int]]:
    """The bytes of each read of what data files hold, while the context is open."""
    counted: list[int] = []
    opened = OpenFile.opened

    @contextmanager
    def counting(self: OpenFile, once: bool = False) -> Iterator[Any]:
        with opened(self, once) as read:

            def read_counted(spans: Any) -> None:
                counted.extend(span.memory.nbytes for span in spans)
                read(spans)

            yield read_counted

    OpenFile.opened = counting  # type: ignore[method-assign,assignment]  # counts, and calls the one before
    try:
        yield counted
    finally:
        OpenFile.opened = opened  # type: ignore[method-assign]  # as it was


def delta_bytes(root: Any, step: int) -> int:
    """The bytes of all deltas that a step has written, indices and changes."""
    with checkpoint.open(storage_of(f"{root}/step-{step:08d}").url) as reader:
        manifest = reader.manifest
        total = 0
        for path in files_of(root, step):
            number = next(i for i, file in enumerate(manifest.files) if file.name == path.name)
            entries = reader.source.open_file(number).entries
            total += sum(each.end - each.begin for key, each in entries.items() if key.startswith("__delta"))
    return total
