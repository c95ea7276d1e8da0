"""An S3 server in a process of its own (`s3_server.py`), and how file systems of tests and their ranks reach it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]  # has no type hints

_ROOT = Path(__file__).resolve().parents[2]


class S3:
    """A server that is running; what it is told, and tells, is described in `s3_server.py`."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"

    def options(self, **more: Any) -> dict[str, Any]:
        """Returns s3fs's options for it; without the client's own retries, so that those above it are tested."""
        config = {"retries": {"total_max_attempts": 1, "mode": "legacy"}, **more}
        return {"endpoint_url": self.endpoint, "key": "test", "secret": "test", "config_kwargs": config}

    def new_root(self) -> str:
        """Makes a bucket of its own; returns a URL in it."""
        name = f"b-{uuid.uuid4().hex}"
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")).close()
        return f"s3://{name}/run"

    def plan(self, *faults: dict[str, Any]) -> None:
        body = json.dumps(faults).encode()
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/-/plan", body, method="PUT")).close()

    def log(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.endpoint}/-/log") as answer:
            return dict(json.loads(answer.read()))


@contextmanager
def s3_server() -> Iterator[S3]:
    """A server, for as long as the block lasts."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("s3_server.py"))]
    environment = {**os.environ, "S3_UPLOAD_PART_MIN_SIZE": "1024"}  # so that parts of tests may be small
    with subprocess.Popen(
        command, cwd=_ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield S3(int(process.stdout.readline()))
        finally:
            process.stdin.close()
            process.terminate()


@contextmanager
def reached(options: dict[str, Any]) -> Iterator[None]:
    """fsspec's configuration in this process, for as long as the block lasts; no file system is kept from before."""
    before = dict(fsspec.config.conf)
    fsspec.config.conf["s3"] = options
    try:
        yield
    finally:
        fsspec.config.conf.clear()
        fsspec.config.conf.update(before)
