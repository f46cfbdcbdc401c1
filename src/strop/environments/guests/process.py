"""The client of a process that `host.serve` serves, in another Python. It imports the standard library alone.

A request is a connection to the process's Unix socket: one line of JSON, `{"do", ...}`, and one line back.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import select
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

_LINE_BYTES = 1 << 28
_END_S = 5.0


class Process:
    """A process that serves an object; usable from any thread and event loop, until this process ends."""

    def __init__(self, argv: list[str], settings: Mapping[str, Any], limit_s: float, **options: Any) -> None:
        """Start it, with further options of `Popen`, and make the object with these arguments.

        Raises: RuntimeError with its error; OSError if the process ends, or has not begun in time.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="strop-guest-")
        self._path = f"{self._folder.name}/socket"
        pipe = subprocess.PIPE
        # In another session, out of reach of the terminal's signals: this process ends it.
        self.process = subprocess.Popen(
            [*argv, self._path], stdin=pipe, stdout=pipe, start_new_session=True, **options
        )
        atexit.register(self.end)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with ExitStack() as failed:
            failed.callback(self.end)
            self.process.stdin.write(json.dumps(settings).encode() + b"\n")
            self.process.stdin.flush()
            if not select.select([self.process.stdout], [], [], limit_s)[0]:
                raise TimeoutError(f"it has not begun after {limit_s:g} s")
            _read(self.process.stdout.readline())
            failed.pop_all()

    def ask(self, do: str, **arguments: Any) -> Any:
        """Call a method and wait. Raises: RuntimeError with its error; OSError if the process has ended."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._path)
            connection.sendall(_line(do, arguments))
            with connection.makefile("rb") as answer:
                return _read(answer.readline())

    async def do(self, do: str, **arguments: Any) -> Any:
        """Call a method; a cancellation cancels it there too. Raises: as `ask`."""
        reader, writer = await asyncio.open_unix_connection(self._path, limit=_LINE_BYTES)
        try:
            writer.write(_line(do, arguments))
            return _read(await reader.readline())
        finally:
            writer.close()

    def end(self) -> None:
        """End the process."""
        atexit.unregister(self.end)
        try:
            # It ends with its input.
            self.process.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        self._folder.cleanup()


def _line(do: str, arguments: Mapping[str, Any]) -> bytes:
    return json.dumps({**arguments, "do": do}).encode() + b"\n"


def _read(line: bytes) -> Any:
    if not line:
        raise ConnectionResetError("its process has ended")
    answer = json.loads(line)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["found"]
