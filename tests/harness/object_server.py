"""An object store on loopback for tests, with faults given as data: a server behind a middleware that breaks requests.

Run as a program with "s3" (moto's), "gs" (`gcs_app.py`) or "az" (`azurite_app.py`), it serves on a free port, which it
prints. It is controlled over HTTP:

    PUT /-/plan    JSON, the faults from here on: [{"kind": "503", "match": "^PUT .*partNumber", "times": 1, …}, …]
    GET /-/log     JSON, the requests since the plan: {"requests": ["PUT /bucket/key", …], "most_at_once": 3}

Kinds: "503"; "429" (with Retry-After); "cut" (the connection ends in the middle of the answer's body); "close" (the
connection ends without an answer); "hang" (no answer for `seconds`); "lose" (a success is answered, and nothing done);
"slow" (done `seconds` later); "deaf" (done, and the connection ends without an answer); "lag" (a listing is answered as
it was when it was last asked for).
A fault strikes each distinct request that its pattern is found in `times` times, or altogether so often with `all`.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from werkzeug.serving import WSGIRequestHandler, make_server

Fault = dict[str, Any]
Environ = dict[str, Any]
StartResponse = Callable[..., Any]

_ERROR = b'<?xml version="1.0"?><Error><Code>ServiceUnavailable</Code><Message>by plan</Message></Error>'


class _Plan:
    """The faults, and what has been asked since they were given."""

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults, self.lock = list(faults), threading.Lock()
        self.requests: list[str] = []
        self.struck: Counter[tuple[int, str | None]] = Counter()
        self.at_once: Counter[str] = Counter()

    def meet(self, request: str) -> Fault | None:
        request = re.sub(r"(uploadId|blockid)=[^& ]+", r"\1=", request)  # another upload makes the same requests
        with self.lock:
            self.requests.append(request)
            for i, fault in enumerate(self.faults):
                key = (i, None if fault.get("all") else request)
                if re.search(fault.get("match", ""), request) and self.struck[key] < fault.get("times", 1):
                    self.struck[key] += 1
                    return fault
        return None

    def count(self, method: str, by: int) -> None:
        with self.lock:
            self.at_once[method] += by
            self.at_once[f"most {method}"] = max(self.at_once[f"most {method}"], self.at_once[method])


def _app_of(kind: str) -> Callable[..., Iterable[bytes]]:
    if kind != "s3":  # from beside this file, without the package, which imports torch
        module, name = {"gs": ("gcs_app", "Gcs"), "az": ("azurite_app", "Azurite")}[kind]
        app: Callable[..., Iterable[bytes]] = getattr(import_module(module), name)()
        return app
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    moto = DomainDispatcherApplication(create_backend_app)
    one_at_a_time = threading.Lock()  # moto looks, and then writes: of two at one time both would find nothing

    def atomic(environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if "HTTP_IF_NONE_MATCH" not in environ:
            return list(moto(environ, start_response))
        with one_at_a_time:
            return list(moto(environ, start_response))

    return atomic


class Middleware:
    """Answers what the tests ask of it, and hands other requests on, unless they are to fail."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self.app, self.plan = app, _Plan()
        self.listed: dict[str, tuple[str, list[tuple[str, str]], list[bytes]]] = {}  # by request: the last answer

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        method, path, query = environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"]
        if path == "/-/plan":
            self.plan = _Plan(json.loads(_body(environ)))
            return _answer(start_response, b"")
        if path == "/-/log":
            most = {key[5:]: n for key, n in self.plan.at_once.items() if key.startswith("most ")}
            log = {"requests": self.plan.requests, "most_at_once": most, "struck": sum(self.plan.struck.values())}
            return _answer(start_response, json.dumps(log).encode())
        plan = self.plan
        request = " ".join(filter(None, [method, path + (query and "?" + query), environ.get("HTTP_RANGE", "")]))
        plan.count(method, 1)
        try:
            if method == "GET" and ("list-type=" in query or "comp=list" in query):
                return self._list(request, plan.meet(request), environ, start_response)
            return self._serve(plan.meet(request), environ, start_response)
        finally:
            plan.count(method, -1)

    def _list(
        self, request: str, fault: Fault | None, environ: Environ, start_response: StartResponse
    ) -> Iterable[bytes]:
        if fault is None or fault["kind"] != "lag":
            if fault is not None:
                return self._serve(fault, environ, start_response)
            answer = self._asked(environ)
        else:
            answer = self.listed.get(request) or self._asked(environ)
        self.listed[request] = self._asked(environ)
        start_response(*answer[:2])
        return answer[2]

    def _asked(self, environ: Environ) -> tuple[str, list[tuple[str, str]], list[bytes]]:
        head: list[Any] = []
        body = list(self.app(environ, lambda *answer: head.append(answer)))
        return head[0][0], list(head[0][1]), body

    def _serve(self, fault: Fault | None, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        fault = fault or {"kind": "none"}
        kind = fault["kind"]
        if kind == "503":
            _body(environ)
            return _answer(start_response, _ERROR, "503 Service Unavailable")
        if kind == "429":
            _body(environ)
            return _answer(start_response, _ERROR, "429 Too Many Requests", [("Retry-After", "0")])
        if kind == "lose":
            tag = hashlib.md5(_body(environ)).hexdigest()
            return _answer(start_response, b"", headers=[("ETag", f'"{tag}"')])
        if kind in ("hang", "slow"):
            time.sleep(fault["seconds"])
        if kind == "deaf":
            list(self.app(environ, lambda *answer: None))
        if kind in ("close", "hang", "deaf"):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError("by plan")  # which the handler takes for a client that has gone
        body = list(self.app(environ, start_response))
        if kind == "cut" and (whole := b"".join(body)):
            return _cut(whole, environ)
        return body


def _cut(whole: bytes, environ: Environ) -> Iterable[bytes]:
    yield whole[: len(whole) // 2]
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError("by plan")


class _Quiet(WSGIRequestHandler):
    """Logs nothing, and is not upset by connections that are gone."""

    protocol_version = "HTTP/1.1"

    def log(self, type: str, message: str, *args: Any) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, AssertionError, ValueError):  # what a closed socket makes of the handler
            self.close_connection = True


def _body(environ: Environ) -> bytes:
    return bytes(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)))


def _answer(
    start_response: StartResponse, data: bytes, status: str = "200 OK", headers: Iterable[tuple[str, str]] = ()
) -> list[bytes]:
    start_response(status, [("Content-Length", str(len(data))), *headers])
    return [data]


def main() -> None:
    server = make_server(
        "127.0.0.1",
        0,
        Middleware(_app_of(sys.argv[1])),
        threaded=True,
        request_handler=_Quiet,
    )
    print(server.server_port, flush=True)

    def end_with_parent() -> None:
        sys.stdin.read()
        server.shutdown()

    threading.Thread(target=end_with_parent, daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main()
