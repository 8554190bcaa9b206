"""A web server with shards that fail as real ones do, and which counts what is fetched. For tests."""

from __future__ import annotations

import io
import re
import tarfile
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image

SHARDS, EACH = 10, 12


def png(number: int) -> bytes:
    """An image whose colour is its number."""
    file = io.BytesIO()
    Image.new("RGB", (10, 10), (number % 256, number // 256, 7)).save(file, "PNG", compress_level=0)
    return file.getvalue()


def shard(numbers: range, classes: int = 2) -> bytes:
    """A tar of these images, each of the class that its number gives."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for number in numbers:
            for name, data in ((f"{number:04}.png", png(number)), (f"{number:04}.cls", b"%d" % (number % classes))):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


@cache
def _bomb() -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join(packer.compress(bytes(2**24)) for _ in range(12)) + packer.flush()


class Server:
    """Files below its URL, served in parts. `faults` says of a file how it fails from then on:

    "gone" (404), "hidden" (404 for parts, and there for who asks whether it is), "busy" (503), "stalled" (never
    answers), "trickling" (a byte now and then), "cut" (the connection breaks), "garbage" (other bytes, nothing said of
    it), "moved" (another file under its name), "endless" (chunks without end), "packed" (200 MB, gzipped),
    "dripping" (headers without end), "whole" (no parts), "denied" (403, with a text without end).
    As "NAME:2", the next two times only.
    """

    def __init__(self) -> None:
        self.files = {f"s-{k:03}.tar": shard(range(k * EACH, (k + 1) * EACH)) for k in range(SHARDS)}
        self.faults: dict[str, str] = {}
        self.fetched: list[tuple[str, int, int]] = []
        """(file, first byte, bytes) of each part asked for."""
        self.released = threading.Event()
        self._server: ThreadingHTTPServer | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/s-{{000..{SHARDS - 1:03}}}.tar"

    def start(self) -> None:
        """Begin to serve; once more under the same port as before."""
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Close the port and every connection."""
        assert self._server is not None
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self.released = threading.Event()

    def members(self) -> set[tuple[str, int]]:
        """(file, first byte) of the parts that are as long as an image."""
        return {(name, start) for name, start, size in self.fetched if size == len(png(0))}


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # answers leave whole: of two pieces, the second would wait 40 ms until the first is acknowledged

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            name = self.path.partition("?")[0].strip("/")
            part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
            fault, _, times = server.faults.get(name, "").partition(":")
            if times:
                server.faults[name] = f"{fault}:{int(times) - 1}" if int(times) > 1 else ""
            data = server.files.get(name)
            if fault == "moved" and data is not None:
                data = data[:1024] + data[:-1024]
            if data is None or fault == "gone" or (fault == "hidden" and part):
                return self._send(404, b"", {}, with_body)
            if fault == "busy":
                return self._send(503, b"busy", {}, with_body)
            if fault in ("stalled", "trickling") and part:
                return self._dawdle(fault)
            if fault == "dripping":
                return self._drip()
            if fault in ("endless", "denied") and part:
                return self._pour(403 if fault == "denied" else 206)
            headers, status = {"ETag": f'"{zlib.crc32(data):08x}"'}, 200
            if fault == "packed" and part:
                return self._send(206, _bomb(), headers | {"Content-Encoding": "gzip"}, with_body)
            if part and fault != "whole":
                first, last = int(part[1]), min(int(part[2]), len(data) - 1)
                server.fetched.append((name, first, last + 1 - first))
                if first >= len(data):
                    return self._send(416, b"", {}, with_body)
                headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
                data, status = data[first : last + 1], 206
                if fault == "garbage":
                    data = bytes(byte ^ 0x5A for byte in data)
                if fault == "cut":
                    return self._cut(data)
            return self._send(status, data, headers, with_body)

        def _dawdle(self, fault: str) -> None:
            self.send_response(206)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            while not server.released.wait(0.05):
                if fault == "trickling":
                    self.wfile.write(b"x")
                    self.wfile.flush()
            self.close_connection = True

        def _pour(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while not server.released.is_set():
                self.wfile.write(b"100000\r\n" + bytes(2**20) + b"\r\n")

        def _drip(self) -> None:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            while not server.released.wait(0.05):
                self.wfile.write(b"X: y\r\n")

        def _cut(self, data: bytes) -> None:
            self.send_response(206)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.close_connection = True

        def _send(self, status: int, data: bytes, headers: dict[str, str], with_body: bool) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(data)

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except (ConnectionError, TimeoutError):
                self.close_connection = True
            if server.released.is_set():
                self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


@contextmanager
def serving() -> Iterator[Server]:
    """A server that runs meanwhile."""
    server = Server()
    server.start()
    try:
        yield server
    finally:
        server.stop()
