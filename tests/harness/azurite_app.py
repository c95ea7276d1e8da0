"""Azurite, Microsoft's own simulation of Azure's blobs, as a WSGI application: a proxy before it.

It is a program of Node: `npm install --prefix out/azurite azurite@3.35.0`, or $AZURITE names its `azurite-blob`.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import hmac
import http.client
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from email.utils import formatdate
from pathlib import Path
from typing import Any

ACCOUNT = "devstoreaccount1"
# Of the emulator, and known to everybody.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_ROOT = Path(__file__).resolve().parents[2]
_KILLED_WITH_PARENT = 1  # PR_SET_PDEATHSIG, of Linux
_NOT_SENT_ON = {"connection", "transfer-encoding", "keep-alive", "content-length"}


def program() -> str | None:
    """Returns the path of Azurite; None if it, or Node, is not there."""
    path = os.environ.get("AZURITE", str(_ROOT / "out/azurite/node_modules/.bin/azurite-blob"))
    return path if shutil.which("node") and os.path.exists(path) else None


class Azurite:
    """The application, which starts the program. A PUT of a container's path alone makes the container."""

    def __init__(self) -> None:
        found = program()
        assert found is not None
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self._port = taken.getsockname()[1]
        switches = ["--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--disableTelemetry"]
        subprocess.Popen(
            [found, "--blobPort", str(self._port), *switches],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: ctypes.CDLL(None).prctl(_KILLED_WITH_PARENT, signal.SIGKILL),
        )
        end = time.monotonic() + 60
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self._port)).close()
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, uri = environ["REQUEST_METHOD"], environ["REQUEST_URI"]
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        headers = {name[5:].replace("_", "-"): value for name, value in environ.items() if name.startswith("HTTP_")} | {
            name.replace("_", "-"): environ[name] for name in ("CONTENT_TYPE", "CONTENT_LENGTH") if environ.get(name)
        }
        if method == "PUT" and uri.count("/") == 1:  # the tests' way to make a container
            uri, headers = f"/{ACCOUNT}{uri}?restype=container", _signed(uri[1:])
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        try:
            connection.request(method, uri, body if body or method == "PUT" else None, headers)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        sent = [(name, value) for name, value in answer.getheaders() if name.lower() not in _NOT_SENT_ON]
        length = answer.getheader("Content-Length") if method == "HEAD" else str(len(data))
        if length is not None:
            sent.append(("Content-Length", length))
        start_response(f"{answer.status} {answer.reason}", sent)
        return [data]


def _signed(container: str) -> dict[str, str]:
    """Returns the headers of a request that makes a container, signed by its account's key."""
    date, version = formatdate(usegmt=True), "2021-12-02"
    lines = ["PUT", *[""] * 11, f"x-ms-date:{date}", f"x-ms-version:{version}"]
    lines += [f"/{ACCOUNT}/{ACCOUNT}/{container}", "restype:container"]
    digest = hmac.new(base64.b64decode(KEY), "\n".join(lines).encode(), hashlib.sha256).digest()
    signature = base64.b64encode(digest).decode()
    authorization = f"SharedKey {ACCOUNT}:{signature}"
    return {"x-ms-date": date, "x-ms-version": version, "Authorization": authorization, "Content-Length": "0"}
