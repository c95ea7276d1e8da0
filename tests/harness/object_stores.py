"""Object stores in processes of their own (`object_server.py`), and how tests and their ranks reach them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]  # has no type hints
import pytest

from tests.harness import azurite_app
from tests.harness.azurite_app import ACCOUNT, KEY

_ROOT = Path(__file__).resolve().parents[2]


_NO_KEY = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}


def require_server(protocol: str) -> None:
    """Skips a test whose server is not installed."""
    if protocol == "az" and azurite_app.program() is None:
        pytest.skip("Azurite is not installed (npm install --prefix out/azurite azurite@3.35.0)")


class Server:
    """A server that is running; what it is told, and tells, is described in `object_server.py`."""

    def __init__(self, protocol: str, port: int) -> None:
        self.protocol, self.endpoint = protocol, f"http://127.0.0.1:{port}"

    def options(self) -> dict[str, Any]:
        """Returns the options of fsspec's file system; s3fs with no retries of its own."""
        if self.protocol == "gs":
            return {"endpoint_url": self.endpoint, "token": _NO_KEY}
        if self.protocol == "az":
            endpoint = f"BlobEndpoint={self.endpoint}/{ACCOUNT}"
            return {"connection_string": f"AccountName={ACCOUNT};AccountKey={KEY};{endpoint}"}
        config = {"retries": {"total_max_attempts": 1, "mode": "legacy"}}
        return {"endpoint_url": self.endpoint, "key": "test", "secret": "test", "config_kwargs": config}

    def new_root(self) -> str:
        """Makes a bucket of its own; returns a URL in it."""
        name = f"b-{uuid.uuid4().hex}"
        self.make_bucket(name)
        return f"{self.protocol}://{name}/run"

    def make_bucket(self, name: str) -> None:
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")).close()

    def reached(self) -> AbstractContextManager[None]:
        """Makes the server that of its protocol in this process, for as long as the block lasts."""
        return reached(self.options(), self.protocol)

    def plan(self, *faults: dict[str, Any]) -> None:
        body = json.dumps(faults).encode()
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/-/plan", body, method="PUT")).close()

    def log(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.endpoint}/-/log") as answer:
            return dict(json.loads(answer.read()))


@contextmanager
def object_server(protocol: str = "s3") -> Iterator[Server]:
    """A server of "s3", "gs" or "az", for as long as the block lasts."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("object_server.py")), protocol]
    environment = {**os.environ, "S3_UPLOAD_PART_MIN_SIZE": "1024"}  # so that parts of tests may be small
    with subprocess.Popen(
        command, cwd=_ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield Server(protocol, int(process.stdout.readline()))
        finally:
            process.stdin.close()
            process.terminate()


@contextmanager
def object_servers() -> Iterator[Callable[[str], Server]]:
    """Gives the server of a protocol, which begins when it is first asked for, for as long as the block lasts."""
    with ExitStack() as stack:

        @functools.cache
        def server(protocol: str) -> Server:
            require_server(protocol)
            return stack.enter_context(object_server(protocol))

        yield server


@contextmanager
def reached(options: dict[str, Any], protocol: str = "s3") -> Iterator[None]:
    """fsspec's configuration in this process, for as long as the block lasts."""
    before = dict(fsspec.config.conf)
    fsspec.config.conf[protocol] = options
    try:
        yield
    finally:
        fsspec.config.conf.clear()
        fsspec.config.conf.update(before)
