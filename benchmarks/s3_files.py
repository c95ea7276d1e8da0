"""A directory as an S3 bucket on loopback, that sends and takes so many bytes a second in all, after some latency.

    python -m benchmarks.s3_files FOLDER BYTES_PER_SECOND [LATENCY_SECONDS]

It prints its port, and ends with its input. Only what checkpoints ask for is answered: lists, heads, ranges, writes in
one request or in parts, copies, removals. There is no TLS and no signature is checked, so that what is measured is
the rate, and the client's own work. `GET /-/requests` gives how many requests there were.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"
_AT_ONCE_BYTES = 256 * 1024


class Rate:
    """Deals out so many bytes a second to all that ask."""

    def __init__(self, bytes_per_second: float) -> None:
        self._seconds = 1 / bytes_per_second
        self._next = 0.0
        self._lock = threading.Lock()

    def wait(self, nbytes: int) -> None:
        with self._lock:
            self._next = end = max(self._next, time.monotonic()) + nbytes * self._seconds
        time.sleep(max(0.0, end - time.monotonic()))


class Upload:
    """Parts of one file, written as they come to the places that they have if all are as long as the first one.

    So completing an upload costs the same for any number of bytes, as in a store. Of a client with parts of several
    lengths (DCP's) it writes them again.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self._descriptor = os.open(os.path.dirname(path), os.O_TMPFILE | os.O_RDWR, 0o644)  # no name until complete
        self._lock = threading.Lock()
        self._parts: dict[int, memoryview] = {}

    def put(self, number: int, data: memoryview) -> None:
        with self._lock:
            self._parts[number] = data
            first = self._parts.get(1)
            placed = dict(self._parts) if number == 1 else {number: data}
        if first is not None:  # else it writes those that came before it
            for each, part in placed.items():
                self._write(part, (each - 1) * first.nbytes)

    def complete(self) -> None:
        parts = [self._parts[number] for number in sorted(self._parts)]
        if len({part.nbytes for part in parts[:-1]}) > 1:
            ends = itertools.accumulate(part.nbytes for part in parts)
            for part, end in zip(parts, ends, strict=True):
                self._write(part, end - part.nbytes)
            os.ftruncate(self._descriptor, sum(part.nbytes for part in parts))
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        # By linkat, which os.link takes where it gets a directory: link would make another link to the link in /proc.
        os.link(f"/proc/self/fd/{self._descriptor}", self._path, src_dir_fd=self._descriptor)
        os.close(self._descriptor)

    def _write(self, part: memoryview, place: int) -> None:
        while part.nbytes:
            written = os.pwrite(self._descriptor, part, place)
            place, part = place + written, part[written:]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    folder: str
    rate: Rate
    latency_seconds = 0.0
    uploads: ClassVar[dict[str, Upload]] = {}
    numbers: ClassVar[Iterator[int]] = itertools.count()
    requests: ClassVar[list[str]] = []

    def log_message(self, *unused: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve(with_body=False)

    def do_GET(self) -> None:
        if self.path == "/-/requests":
            self._answer(200, json.dumps(self.requests).encode(), "application/json")
            self.requests.clear()
        else:
            self._serve(with_body=True)

    def do_DELETE(self) -> None:
        self._begin()
        if "uploadId" not in self.path and os.path.exists(path := self._path()):
            os.unlink(path)
        self._answer(204, b"", "application/xml")

    def do_POST(self) -> None:
        self._begin()
        self._body()
        name = re.search(r"uploadId=([^&]*)", self.path)
        if name is None:
            name_of_new = str(next(self.numbers))
            self.uploads[name_of_new] = Upload(self._path())
            text = f"<InitiateMultipartUploadResult><UploadId>{name_of_new}</UploadId></InitiateMultipartUploadResult>"
        else:
            self.uploads.pop(name[1]).complete()
            text = "<CompleteMultipartUploadResult><ETag>0</ETag></CompleteMultipartUploadResult>"
        self._answer(200, text.encode(), "application/xml")

    def do_PUT(self) -> None:
        self._begin()
        data, part = self._body(), re.search(r"partNumber=(\d+)", self.path)
        name = re.search(r"uploadId=([^&]*)", self.path)
        path = self._path()
        if part is not None and name is not None:
            self.uploads[name[1]].put(int(part[1]), data)
        elif self.headers.get("If-None-Match") and os.path.exists(path):
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>", "application/xml")
            return
        elif source := self.headers.get("x-amz-copy-source"):
            shutil.copyfile(os.path.join(self.folder, unquote(source).lstrip("/").partition("/")[2]), path)
            body = b'<CopyObjectResult><ETag>"0"</ETag></CopyObjectResult>'
            self._answer(200, body, "application/xml")
            return
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(data)
        self.send_response(200)
        self.send_header("ETag", '"0"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _begin(self) -> None:
        self.requests.append(f"{self.command} {self.path}")
        time.sleep(self.latency_seconds)

    def _path(self) -> str:
        return os.path.join(self.folder, unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2])

    def _body(self) -> memoryview:
        """Reads a request's body, in chunks or whole."""
        encodings = self.headers.get("Transfer-Encoding", "") + self.headers.get("Content-Encoding", "")
        if "chunked" in encodings:
            return self._chunked()
        memory = bytearray(int(self.headers.get("Content-Length") or 0))
        view = memoryview(memory)
        while view.nbytes:
            nbytes = self.rfile.readinto(view[:_AT_ONCE_BYTES])
            self.rate.wait(nbytes)
            view = view[nbytes:]
        return memoryview(memory)

    def _chunked(self) -> memoryview:
        """Reads a body of chunks, as HTTP or AWS sends them; what follows the last one is of no interest."""
        parts = []
        while size := int(self.rfile.readline().split(b";")[0].strip() or b"0", 16):
            parts.append(self.rfile.read(size))
            self.rate.wait(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return memoryview(b"".join(parts))

    def _serve(self, with_body: bool) -> None:
        self._begin()
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        path = os.path.join(self.folder, key)
        if bucket == BUCKET and not key and with_body:
            self._list({name: values[0] for name, values in parse_qs(url.query).items()})
        elif bucket == BUCKET and key and os.path.isfile(path):
            self._send(path, with_body)
        else:
            body = b"<Error><Code>NoSuchKey</Code><Message>no such key</Message></Error>"
            self._answer(404, body if with_body else b"", "application/xml")

    def _list(self, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        found, prefixes = [], set()
        for directory, _, names in os.walk(self.folder):
            for name in names:
                key = os.path.relpath(os.path.join(directory, name), self.folder)
                rest = key.removeprefix(prefix)
                if not key.startswith(prefix):
                    continue
                if delimiter and delimiter in rest:
                    prefixes.add(prefix + rest.split(delimiter)[0] + delimiter)
                else:
                    size = os.path.getsize(os.path.join(directory, name))
                    found.append(
                        f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                        f'<ETag>"0"</ETag><Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>'
                    )
        common = [f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in sorted(prefixes)]
        body = (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(found) + len(common)}</KeyCount>"
            f"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{''.join(found + common)}</ListBucketResult>"
        )
        self._answer(200, body.encode(), "application/xml")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send(self, path: str, with_body: bool) -> None:
        size = os.path.getsize(path)
        begin, end, asked = 0, size, self.headers.get("Range")
        if asked and with_body:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last) + 1 if last else size, size)
            if begin >= size:
                self._answer(416, b"<Error><Code>InvalidRange</Code></Error>", "application/xml")
                return
        self.send_response(206 if asked and with_body else 200)
        if asked and with_body:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Content-Type", "binary/octet-stream")
        self.send_header("Last-Modified", formatdate(os.path.getmtime(path), usegmt=True))
        self.send_header("ETag", '"0"')
        self.end_headers()
        self.wfile.flush()
        if not with_body:
            return
        with open(path, "rb", buffering=0) as file:
            for at in range(begin, end, _AT_ONCE_BYTES):
                nbytes = min(_AT_ONCE_BYTES, end - at)
                self.rate.wait(nbytes)
                self.connection.sendfile(file, at, nbytes)


@contextmanager
def served(folder: str, bytes_per_second: float, latency_seconds: float = 0.0) -> Iterator[dict[str, object]]:
    """Serves a directory in a process of its own; yields s3fs's options for it."""
    command = [sys.executable, "-m", "benchmarks.s3_files", folder, str(bytes_per_second), str(latency_seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"
            yield {"endpoint_url": endpoint, "key": "test", "secret": "test"}
        finally:
            process.stdin.close()
            process.terminate()


def main() -> None:
    Handler.folder, Handler.rate = sys.argv[1], Rate(float(sys.argv[2]))
    Handler.latency_seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_port, flush=True)

    def end_with_input() -> None:
        sys.stdin.read()
        server.shutdown()

    threading.Thread(target=end_with_input, daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
