"""A directory as a read-only S3 bucket on loopback, that sends so many bytes a second in all, to whomever they go.

    python -m benchmarks.s3_files FOLDER BYTES_PER_SECOND

It prints its port, and ends with its input. Only what readers ask for is answered: lists, heads, and ranges of objects.
There is no TLS and no signature is checked, so that what is measured is the rate, and the client's own work.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: str
    rate: Rate

    def log_message(self, *unused: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve(with_body=False)

    def do_GET(self) -> None:
        self._serve(with_body=True)

    def _serve(self, with_body: bool) -> None:
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
def served(folder: str, bytes_per_second: float) -> Iterator[dict[str, object]]:
    """Serves a directory in a process of its own; yields s3fs's options for it."""
    command = [sys.executable, "-m", "benchmarks.s3_files", folder, str(bytes_per_second)]
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
