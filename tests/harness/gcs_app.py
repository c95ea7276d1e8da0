"""GCS's XML API as a WSGI application in memory: what object_store (obstore) asks of it, and nothing else.

Writes are atomic, conditions on generations are kept, listings come in pages, and parts of uploads are of any size.
Signatures are not looked at.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import threading
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qs, quote, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

_PAGE = 50  # so that tests see several pages


@dataclass
class _Object:
    data: bytes
    generation: int
    modified: str = field(default_factory=lambda: formatdate(usegmt=True))

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data).hexdigest()}"'


class Gcs:
    """The application; buckets are made by a PUT."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[str, dict[str, _Object]] = {}
        self._uploads: dict[str, tuple[str, dict[int, bytes]]] = {}  # by name: the bucket, and the parts by number
        self._generations = itertools.count(1)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        bucket, _, key = unquote(environ.get("REQUEST_URI", environ["PATH_INFO"]).partition("?")[0])[1:].partition("/")
        query = {name: values[0] for name, values in parse_qs(environ["QUERY_STRING"], keep_blank_values=True).items()}
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        with self._lock:
            status, headers, data = self._answer(method, bucket, key, query, environ, body)
        if method == "HEAD":
            start_response(status, list(headers.items()))
            return []
        start_response(status, [*headers.items(), ("Content-Length", str(len(data)))])
        return [data]

    def _answer(
        self, method: str, bucket: str, key: str, query: dict[str, str], environ: dict[str, Any], body: bytes
    ) -> tuple[str, dict[str, str], bytes]:
        if not key and method == "PUT":
            self._buckets.setdefault(bucket, {})
            return "200 OK", {}, b""
        if bucket not in self._buckets:
            return _error("404 Not Found", "NoSuchBucket")
        objects = self._buckets[bucket]
        if not key and "uploads" in query:
            return (
                "200 OK",
                {},
                b"".join(
                    b"<UploadId>%s</UploadId>" % name.encode()
                    for name, (place, _) in self._uploads.items()
                    if place == bucket
                ),
            )
        if not key:
            return (
                self._list(objects, query) if method == "GET" else _error("405 Method Not Allowed", "MethodNotAllowed")
            )
        if "uploads" in query or "uploadId" in query:
            return self._upload(bucket, method, key, query, body)
        if method == "PUT":
            return self._put(objects, key, body, environ.get("HTTP_X_GOOG_IF_GENERATION_MATCH"))
        if key not in objects:
            return _error("404 Not Found", "NoSuchKey")
        found = objects[key]
        if method == "DELETE":
            del objects[key]
            return "204 No Content", {}, b""
        return _get(found, environ.get("HTTP_RANGE"), method)

    def _put(
        self, objects: dict[str, _Object], key: str, body: bytes, match: str | None
    ) -> tuple[str, dict[str, str], bytes]:
        now = objects[key].generation if key in objects else 0
        if match is not None and int(match) != now:
            return _error("412 Precondition Failed", "PreconditionFailed")
        objects[key] = _Object(body, next(self._generations))
        return "200 OK", {"ETag": objects[key].etag, "x-goog-generation": str(objects[key].generation)}, b""

    def _upload(
        self, bucket: str, method: str, key: str, query: dict[str, str], body: bytes
    ) -> tuple[str, dict[str, str], bytes]:
        if "uploads" in query:
            name = uuid.uuid4().hex
            self._uploads[name] = (bucket, {})
            text = f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
            return "200 OK", {}, text.encode()
        name = query["uploadId"]
        if name not in self._uploads:
            return _error("404 Not Found", "NoSuchUpload")
        parts = self._uploads[name][1]
        if method == "PUT":
            parts[int(query["partNumber"])] = body
            return "200 OK", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}, b""
        if method == "DELETE":
            del self._uploads[name]
            return "204 No Content", {}, b""
        wanted = [
            (int(part.findtext("PartNumber") or 0), (part.findtext("ETag") or "").strip('"'))
            for part in _without_namespaces(body).iter("Part")
        ]
        if any(number not in parts or hashlib.md5(parts[number]).hexdigest() != tag for number, tag in wanted):
            return _error("400 Bad Request", "InvalidPart")
        _, headers, _ = self._put(self._buckets[bucket], key, b"".join(parts[number] for number, _ in wanted), None)
        del self._uploads[name]
        text = f"<CompleteMultipartUploadResult><ETag>{escape(headers['ETag'])}</ETag></CompleteMultipartUploadResult>"
        return "200 OK", headers, text.encode()

    def _list(self, objects: dict[str, _Object], query: dict[str, str]) -> tuple[str, dict[str, str], bytes]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = max(base64.b64decode(query.get("continuation-token", "")).decode(), query.get("start-after", ""))
        entries: dict[str, _Object | None] = {}
        for key in sorted(objects):
            if key.startswith(prefix):
                head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
                entries[f"{prefix}{head}{delimiter}" if cut else key] = None if cut else objects[key]
        names = [name for name in entries if name > after]
        page, rest = names[:_PAGE], names[_PAGE:]
        parts = [f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(bool(rest)).lower()}</IsTruncated>"]
        if rest:
            parts.append(
                f"<NextContinuationToken>{base64.b64encode(page[-1].encode()).decode()}</NextContinuationToken>"
            )
        for name in page:
            found = entries[name]
            if found is None:
                parts.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
            else:
                parts.append(
                    f"<Contents><Key>{escape(name)}</Key><Size>{len(found.data)}</Size><ETag>{escape(found.etag)}</ETag>"
                    "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                )
        return "200 OK", {}, f"<ListBucketResult>{''.join(parts)}</ListBucketResult>".encode()


def _get(found: _Object, wanted: str | None, method: str) -> tuple[str, dict[str, str], bytes]:
    headers = {"ETag": found.etag, "Last-Modified": found.modified, "x-goog-generation": str(found.generation)}
    size = len(found.data)
    if wanted is None:
        return "200 OK", headers | ({"Content-Length": str(size)} if method == "HEAD" else {}), found.data
    first, _, last = wanted.removeprefix("bytes=").partition("-")
    begin, end = int(first), min(int(last) + 1 if last else size, size)
    if begin >= size:
        return _error("416 Requested Range Not Satisfiable", "InvalidRange")
    return "206 Partial Content", headers | {"Content-Range": f"bytes {begin}-{end - 1}/{size}"}, found.data[begin:end]


def _error(status: str, code: str) -> tuple[str, dict[str, str], bytes]:
    return status, {}, f"<?xml version='1.0'?><Error><Code>{quote(code)}</Code></Error>".encode()


def _without_namespaces(body: bytes) -> ElementTree.Element:
    root = ElementTree.fromstring(body)
    for each in root.iter():
        each.tag = each.tag.rpartition("}")[2]
    return root
