"""Commands of a sandbox that are followed while they run, from the side that asks."""

from __future__ import annotations

import asyncio
from typing import Any

from strop.sandbox.capture import unread
from strop.sandbox.client import Answer, Client
from strop.sandbox.contract import ExecKind, ExecResult
from strop.sandbox.following import JobOutput


class ServedJob:
    """A command that was started; see `Job`."""

    def __init__(self, client: Client, number: int, end: asyncio.Future[Answer]) -> None:
        self._client = client
        self._number = number
        self._end = end
        # A job that nobody waits for is no error when its sandbox ends.
        end.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._positions = (0, 0)

    async def read(self) -> JobOutput | None:
        """Return output that came since; see `Job.read`."""
        if not self._end.done():
            request = {"op": "output", "job": self._number, "positions": self._positions}
            number, answer = self._client.begin(request)
            try:
                await asyncio.wait({answer, self._end}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._client.forget(number)
            if answer.done() and not answer.exception() and "has_ended" not in answer.result()[0]:
                header, body = answer.result()
                num_bytes = header["stdout_bytes"]
                return self._advance(header["omitted"], (body[:num_bytes], body[num_bytes:]))
        header, body = await asyncio.shield(self._end)
        num_bytes = header["stdout_bytes"]
        streams = ((body[:num_bytes], header["stdout_total"]), (body[num_bytes:], header["stderr_total"]))
        found = [
            unread(kept[:head], kept[head:], total, position)
            for (kept, total), head, position in zip(streams, header["heads"], self._positions, strict=True)
        ]
        output = self._advance([gone for gone, _ in found], (found[0][1], found[1][1]))
        return output if output.stdout or output.stderr else None

    def _advance(self, omitted: list[int], data: tuple[bytes, bytes]) -> JobOutput:
        stdout, stderr = (
            position + gone + len(part)
            for position, gone, part in zip(self._positions, omitted, data, strict=True)
        )
        self._positions = (stdout, stderr)
        return JobOutput(stdout=data[0], stderr=data[1], stdout_omitted=omitted[0], stderr_omitted=omitted[1])

    async def write(self, data: bytes) -> bool:
        """Write to its standard input; see `Job.write`."""
        if self._end.done():
            await self._end
            return False
        header, _ = await self._client.ask({"op": "input", "job": self._number}, data)
        return bool(header["is_open"])

    async def close_stdin(self) -> None:
        """Let its standard input end; see `Job.close_stdin`."""
        self._client.tell({"op": "input_end", "job": self._number})

    async def signal(self, number: int) -> None:
        """Send a signal to its process group; see `Job.signal`."""
        self._client.tell({"op": "signal", "job": self._number, "number": int(number)})

    async def stop(self) -> ExecResult:
        """End it and all that it started; see `Job.stop`."""
        self._client.tell({"op": "end", "job": self._number})
        return await self.wait()

    async def wait(self) -> ExecResult:
        """Wait for its end; see `Job.wait`."""
        return as_result(*await asyncio.shield(self._end))


def as_result(header: dict[str, Any], output: bytes) -> ExecResult:
    """Return the result that a supervisor's last word on a command tells."""
    return ExecResult(**result_fields(header, output))


def result_fields(header: dict[str, Any], output: bytes) -> dict[str, Any]:
    """Return the fields of an `ExecResult`, by name."""
    num_bytes = header["stdout_bytes"]
    kind = ExecKind(header["kind"])
    why = header["why"].encode() if kind is ExecKind.NOT_STARTED else b""
    return {
        "kind": kind,
        "exit_code": header["exit_code"],
        "signal": header["signal"],
        "stdout": output[:num_bytes],
        "stderr": output[num_bytes:] + why,
        "stdout_total": header["stdout_total"],
        "stderr_total": header["stderr_total"] + len(why),
        "oom_kills": header["oom_kills"],
        "duration_s": header["duration_s"],
        "cpu_s": header["cpu_s"],
    }
