"""A server of S3 on loopback, and a proxy before it that fails as networks do."""

from __future__ import annotations

import http.client
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from trajstore.store.storage.remote_path import RemotePath, _store, location

BUCKET = "bucket"

Fault = Callable[[str, str, int], str | None]
"""Of method, path and number of a request: a status, ``cut``, ``lose``, ``slow``, or None."""


def copied(run: Path, address: str) -> RemotePath:
    """A local run, copied to an address."""
    far = location(address)
    assert isinstance(far, RemotePath)
    for file in run.rglob("*"):
        if file.is_file():
            (far / file.relative_to(run).as_posix()).write_bytes(file.read_bytes())
    return far


@contextmanager
def s3_server() -> Iterator[str]:
    """Address of a server with one empty bucket."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        address = f"http://{host}:{port}"
        request = urllib.request.Request(f"{address}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request).close()
        yield address
    finally:
        server.stop()


@contextmanager
def to_s3(address: str, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """While the environment says that S3 is there."""
    with patch.context() as now:
        now.setenv("AWS_ACCESS_KEY_ID", "test")
        now.setenv("AWS_SECRET_ACCESS_KEY", "test")
        now.setenv("AWS_REGION", "us-east-1")
        now.setenv("AWS_ENDPOINT_URL", address)
        _store.cache_clear()
        yield
    _store.cache_clear()


class Answers(BaseHTTPRequestHandler):
    """Keeps its connections, and says nothing of them."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two packets

    def answer(
        self, status: int, headers: Mapping[str, str], data: bytes = b"", length: object = None
    ) -> None:
        """Answer a request; `length` is what it says of the data, if that is something else."""
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        return


@contextmanager
def faulty(address: str, fault: Fault) -> Iterator[tuple[str, list[str]]]:
    """Address of a proxy before a server, and the requests that it saw."""
    seen: list[str] = []
    count = threading.Lock()
    target = address.removeprefix("http://")

    class Handler(Answers):
        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with count:
                number = len(seen)
                seen.append(f"{self.command} {self.path}")
            wrong = fault(self.command, self.path, number)
            self.close_connection = wrong in ("cut", "lose")
            if wrong == "cut":
                return
            if wrong is not None and wrong.isdigit():
                self.answer(int(wrong), {})
                return
            server = http.client.HTTPConnection(target)
            # Under its own name: the request is signed with it.
            server.request(self.command, self.path, body, dict(self.headers))
            answer = server.getresponse()
            data = answer.read()
            server.close()
            if wrong == "lose":  # carried out, and nobody hears of it
                return
            if wrong == "slow":
                time.sleep(0.2)  # the fault itself: slower than the store, faster than a timeout
            headers = {name.lower(): value for name, value in answer.getheaders()}
            length = headers.pop("content-length", 0)
            for name in ("connection", "transfer-encoding"):
                headers.pop(name, None)
            self.answer(answer.status, headers, data, length if self.command == "HEAD" else None)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = forward  # noqa: N815

    with serving(Handler) as address:
        yield address, seen


@contextmanager
def web_server(
    folder: Path, token: str = "", ranges: str = "bytes="
) -> Iterator[tuple[str, list[str]]]:
    """Address of a server of files, in ranges, that lists nothing; and the requests that it saw.

    With a token it answers nobody who does not say it; to ranges that begin otherwise than
    `ranges`, with the whole file.
    """
    seen: list[str] = []

    class Handler(Answers):
        def do_GET(self) -> None:
            seen.append(f"{self.command} {self.path}")
            file = folder / self.path.strip("/")
            if token and self.headers.get("Authorization") != f"Bearer {token}":
                self.answer(401, {})
                return
            if not file.is_file():
                self.answer(404, {})
                return
            data = whole = file.read_bytes()
            headers = {"Last-Modified": "Sun, 22 Nov 2026 00:00:00 GMT"}
            asked = re.match(ranges, self.headers.get("Range", ""))
            if asked:
                first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
                start = int(first) if first else max(len(whole) - int(last), 0)
                stop = int(last) + 1 if first and last else len(whole)
                data = whole[start:stop]
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(whole)}"
            self.answer(206 if asked else 200, headers, data)

        do_HEAD = do_GET  # noqa: N815

    with serving(Handler) as address:
        yield address, seen


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Address of a server that answers so."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *arguments: Any) -> None:
            return  # a client that has gone

    server = Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        _store.cache_clear()
