"""A store that takes what is sent to it at a fixed rate.

`python -m benchmarks.throttled_store ADDRESS RATE MD5` stands before a small S3 server at ADDRESS, which
gets all small requests. Parts of large objects are taken at RATE bytes per second over all connections,
thrown away unread, and answered with the MD5 that all of them have, as is a question for the whole: a real
store is another machine, and what it does with bytes must not be counted as the sender's cost. Prints its
own address. Standard library only; Linux only.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CHUNK_BYTES = 1 << 18
COUNT_PATH = "/taken-bytes"


class ThrottledStore(ThreadingHTTPServer):
    """The server; its threads share one rate."""

    daemon_threads = True

    def __init__(self, backend: str, bytes_per_s: float, part_md5: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.backend = backend.removeprefix("http://")
        self.part_md5 = part_md5
        self.etags: dict[str, str] = {}
        """Of large objects whose parts were joined, by path."""
        self.num_bytes = 0
        """Taken of large objects so far."""
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, num_bytes: int) -> None:
        """Wait as long as so many bytes need."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_s
            wait_s = self._free_at - now
            self.num_bytes += num_bytes
        time.sleep(wait_s)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a sender that is stopped or killed is part of the measurement."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ThrottledStore

    def do_PUT(self) -> None:
        if "partNumber=" in self.path:
            self.take_part()
        else:
            self.forward()

    def do_POST(self) -> None:
        if "uploadId=" in self.path:
            joined = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            num_parts = joined.count(b"<PartNumber>")
            md5s = bytes.fromhex(self.server.part_md5) * num_parts
            md5 = hashlib.md5(md5s, usedforsecurity=False).hexdigest()
            self.server.etags[self.path.partition("?")[0]] = f'"{md5}-{num_parts}"'
            text = "<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"
            self.answer(200, [("Content-Type", "application/xml")], text.encode())
        else:
            self.forward()

    def do_GET(self) -> None:
        if self.path == COUNT_PATH:
            self.answer(200, [], str(self.server.num_bytes).encode())
        else:
            self.forward()

    def do_HEAD(self) -> None:
        if etag := self.server.etags.get(self.path):
            self.answer(200, [("ETag", etag)], b"")
        else:
            self.forward()

    def do_DELETE(self) -> None:
        self.forward()

    def take_part(self) -> None:
        left_bytes = int(self.headers["Content-Length"])
        assert isinstance(self.rfile, io.BufferedReader)
        # What came together with the head is in the reader's own buffer.
        left_bytes -= len(self.rfile.read(min(left_bytes, len(self.rfile.peek()))))
        untouched = bytearray(CHUNK_BYTES)
        while left_bytes:
            # The kernel throws them away, uncopied.
            num_bytes = self.connection.recv_into(untouched, min(left_bytes, CHUNK_BYTES), socket.MSG_TRUNC)
            if not num_bytes:
                self.close_connection = True
                return
            self.server.take(num_bytes)
            left_bytes -= num_bytes
        self.answer(200, [("ETag", f'"{self.server.part_md5}"')], b"")

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        with closing(http.client.HTTPConnection(self.server.backend, timeout=60)) as connection:
            connection.request(self.command, self.path, body=body, headers=headers)
            reply = connection.getresponse()
            data = reply.read()
        kept = {"etag", "content-type", "last-modified", "x-amz-meta-strop-sha256"}
        headers_out = [(name, value) for name, value in reply.getheaders() if name.lower() in kept]
        length = reply.getheader("Content-Length") if self.command == "HEAD" else None
        self.answer(reply.status, headers_out, data, length=length)

    def answer(
        self, status: int, headers: Sequence[tuple[str, str]], data: bytes, *, length: str | None = None
    ) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent."""


def main(words: Sequence[str]) -> None:
    """Serve until killed."""
    os.nice(19)
    server = ThrottledStore(words[0], float(words[1]), words[2])
    print(f"Running on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
