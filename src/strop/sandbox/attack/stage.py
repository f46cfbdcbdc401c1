"""The surroundings of an attack: a fresh sandbox, the control sandbox beside it, and the bait on the host."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from strop.errors import SandboxError, SandboxLost
from strop.sandbox.attack.bait import Bait
from strop.sandbox.contract import ExecKind, ExecResult, Isolation
from strop.sandbox.family import find_descendants, process_states
from strop.sandbox.linux import read_file, read_or_empty
from strop.sandbox.served import ServedSandbox

if TYPE_CHECKING:
    from strop.sandbox.choose import Backend

T = TypeVar("T")
WALL_LIMIT_S = 20.0
"""Limit of an attack that ends by itself."""
_LOOK_EVERY_S = 0.005
_GONE_WITHIN_S = 2.0
PRELUDE = """
import ctypes, json, os, signal, socket, sys, time
TOKEN = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
def attempt(work, *arguments):
    try:
        return work(*arguments)
    except (OSError, MemoryError) as error:
        return None
def ready():
    # The suite finds the process from outside by its name.
    with open("/proc/self/comm", "w") as file:
        file.write(TOKEN)
def hold():
    ready()
    time.sleep(600)
"""
"""The beginning of every Python attack."""


class Stage:
    """The surroundings of one attack, with the facts that it needs from outside."""

    def __init__(self, backend: Backend, sandbox: ServedSandbox, control: Control, bait: Bait) -> None:
        self.backend = backend
        """For attacks on the creation of a sandbox."""
        self.sandbox = sandbox
        self.control = control
        self.bait = bait
        self.token = f"atk{secrets.token_hex(5)}"
        """A unique word of this attack, short enough for a process's name."""
        self._own = frozenset(self.processes())

    @property
    def isolation(self) -> Isolation:
        """The record of the attacked sandbox."""
        return self.sandbox.isolation

    def python_argv(self, code: str, *words: str) -> list[str]:
        """Return the command of a Python attack; `words` are its arguments behind the token."""
        return [*self.sandbox.python_argv, "-c", PRELUDE + code, self.token, *words]

    async def python(self, code: str, *words: str, wall_limit_s: float = WALL_LIMIT_S) -> ExecResult:
        """Run a Python attack to its end."""
        return await self.sandbox.exec(self.python_argv(code, *words), wall_limit_s=wall_limit_s)

    async def shell(self, script: str, *, wall_limit_s: float = WALL_LIMIT_S) -> ExecResult:
        """Run a shell attack to its end; `$0` is the token."""
        return await self.sandbox.exec(["/bin/sh", "-c", script, self.token], wall_limit_s=wall_limit_s)

    async def measure(self, script: str) -> str:
        """Run a command of the suite in the attacked sandbox and return its output."""
        result = await self.sandbox.exec(["/bin/sh", "-c", script], wall_limit_s=WALL_LIMIT_S)
        return result.stdout.decode(errors="replace")

    @asynccontextmanager
    async def held(self, code: str, *words: str) -> AsyncIterator[tuple[list[int], ExecResult | None]]:
        """Run a Python attack until it is ready, and keep it running for the block.

        Yields its processes on the host, and None; or no process and the result, if it ended before.
        """
        running = asyncio.create_task(self.python(code, *words))
        try:
            while True:
                pids = self.named()
                if pids or running.done():
                    break
                await asyncio.sleep(_LOOK_EVERY_S)
            yield pids, running.result() if running.done() else None
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError, SandboxError):
                await running
            await self.survivors()

    async def sample(self, running: asyncio.Task[ExecResult], look: Callable[[list[int]], T]) -> list[T]:
        """Sample the attack's processes until it has ended."""
        samples = []
        while not running.done():
            samples.append(look(self.strays()))
            await asyncio.wait({running}, timeout=2 * _LOOK_EVERY_S)
        return samples

    def processes(self) -> list[int]:
        """Return all processes of this host in the sandbox or serving it."""
        return find_descendants(self.sandbox.supervisor_pid)

    def strays(self) -> list[int]:
        """Return the running processes that started after the stage was made."""
        states = process_states(self.processes())
        return [pid for pid, state in states.items() if pid not in self._own and state != "Z"]

    def named(self) -> list[int]:
        """Return the attack's processes that have reported ready."""
        return [pid for pid in self.strays() if read_or_empty(f"/proc/{pid}/comm").strip() == self.token]

    async def survivors(self) -> int:
        """Return the number of the attack's processes that are left after a grace period."""
        deadline = time.monotonic() + _GONE_WITHIN_S
        while True:
            left = len(self.strays())
            if left == 0 or time.monotonic() > deadline:
                return left
            await asyncio.sleep(_LOOK_EVERY_S)

    async def is_alive(self) -> str:
        """Return "alive" if the attacked sandbox still runs commands, else the kind of its loss."""
        try:
            result = await self.sandbox.exec(["/bin/echo", "alive"], wall_limit_s=WALL_LIMIT_S)
        except SandboxLost as error:
            return error.kind
        return "alive" if (result.kind, result.stdout) == (ExecKind.EXITED, b"alive\n") else result.kind.value


CONTROL = """
import threading
word, folder = sys.argv[1:3]
size = 4096
segment = libc.shmget(0, size, 0o1666)
libc.shmat.restype = ctypes.c_void_p
address = libc.shmat(segment, None, 0)
if address not in (None, ctypes.c_void_p(-1).value):
    ctypes.memmove(address, word.encode(), len(word))
visits = os.open(f"{folder}/visits", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
def listen(family, address):
    listener = socket.socket(family)
    listener.bind(address)
    listener.listen(16)
    def serve():
        while True:
            caller, _ = listener.accept()
            os.write(visits, caller.recv(4096) + b"\\n")
            caller.close()
    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()
addresses = [listen(socket.AF_INET, ("127.0.0.1", 0)), listen(socket.AF_UNIX, "\\0" + word).decode()]
with open(f"{folder}/secret", "w") as file:
    file.write(word)
os.chmod(f"{folder}/secret", 0o600)
with open("addresses.part", "w") as file:
    json.dump(addresses, file)
os.rename("addresses.part", "addresses")
hold()
"""


class Control:
    """A sandbox beside the attacked ones, with a process, files, shared memory and listeners."""

    def __init__(self, sandbox: ServedSandbox, running: asyncio.Task[ExecResult], word: str) -> None:
        self.sandbox = sandbox
        self.word = word
        """Its secret, in its command line, a file and shared memory."""
        self.addresses: list[object] = []
        self._running = running

    def processes(self) -> list[int]:
        """Return all processes of this host in it or serving it."""
        return find_descendants(self.sandbox.supervisor_pid)

    def doors(self) -> list[list[object]]:
        """Return its listeners, as `Door.words`."""
        kinds = (socket.AF_INET, socket.AF_UNIX)
        return [
            ["other", int(kind), int(socket.SOCK_STREAM), address]
            for kind, address in zip(kinds, self.addresses, strict=True)
        ]

    async def disturbance(self) -> str:
        """Describe a change in the sandbox; empty if there is none."""
        if self._running.done():
            return "the process of the other sandbox has ended"
        try:
            if (await self.sandbox.read("secret")) != self.word.encode():
                return "a file of the other sandbox was changed"
        except SandboxError as error:
            return f"the other sandbox does not answer: {error.kind}"
        return ""

    async def answer_s(self) -> float:
        """Return the duration of a command in seconds."""
        begun = time.perf_counter()
        await self.sandbox.exec(["/bin/true"], wall_limit_s=WALL_LIMIT_S)
        return time.perf_counter() - begun

    async def visits(self, token: str) -> bool:
        """Return whether a token arrived at its listeners."""
        # Earlier bytes are in the kernel's queue, so they arrive before those of this call.
        await self.sandbox.exec(
            [*self.sandbox.python_argv, "-c", _CALL, self.sandbox.scratch, repr(self.addresses)],
            wall_limit_s=WALL_LIMIT_S,
        )
        return token.encode() in await self.sandbox.read("visits")


_CALL = """
import ast, socket, sys, time
for address in ast.literal_eval(sys.argv[2]):
    with socket.socket(socket.AF_INET if isinstance(address, list) else socket.AF_UNIX) as caller:
        caller.connect(tuple(address) if isinstance(address, list) else address)
        caller.send(b"own call")
        caller.recv(1)
"""


@asynccontextmanager
async def control_beside(sandbox: ServedSandbox) -> AsyncIterator[Control]:
    """Fill a sandbox with targets that other sandboxes must not reach, for the block."""
    word = f"atk{secrets.token_hex(5)}"
    argv = [*sandbox.python_argv, "-c", PRELUDE + CONTROL, word, sandbox.scratch]
    running = asyncio.create_task(sandbox.exec(argv, wall_limit_s=3600.0))
    control = Control(sandbox, running, word)
    try:
        while not control.addresses:
            if running.done():
                raise SandboxError(
                    f"the sandbox beside the attacks does not run: {running.result()}",
                    allowed="a sandbox with a Python that has sockets and threads",
                    next_step="look at its output",
                    kind="control",
                )
            with suppress(SandboxError):
                control.addresses = json.loads(await sandbox.read("addresses"))
            await asyncio.sleep(_LOOK_EVERY_S)
        yield control
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError, SandboxError):
            await running


def parent_of(pid: int) -> int:
    """Return the parent of a running process."""
    return int(read_file(f"/proc/{pid}/stat").rpartition(")")[2].split()[1])


def peak_bytes(pid: int) -> int:
    """Return the peak memory of a process; 0 if it is gone."""
    lines = read_or_empty(f"/proc/{pid}/status").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
