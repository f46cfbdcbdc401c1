"""A server inside a sandbox, started with the client's command and reached from outside through its port.

The server is the image's own, or OpenHands' agent server, mounted read-only with its Python. Each connection
to the sandbox's address is passed on to the port from inside the sandbox, which therefore needs no network.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from strop.errors import SandboxError, SandboxLost, given_of
from strop.runtime.contract import INSIDE_PORT, FailureKind, Order, StartRequest
from strop.runtime.planes import SandboxFailed, lost_as_failure
from strop.runtime.ports import splice
from strop.sandbox.contract import ExecKind, Mount
from strop.sandbox.following import Job
from strop.sandbox.local import LocalSandbox
from strop.store.python_environment import PythonEnvironment

_AGENT_WORDS = ("openhands-agent-server", "openhands.agent_server", "agent-server")
_OPENED_AT_ONCE = 32
"""A sandbox refuses more than 64: strangers would then have its owner refused."""
_LOG_BYTES = 16 << 10
_SHOWN_LINES = 40
_LIBRARIES = "/.strop-libraries"
_OF_GLIBC = frozenset({"libc", "libm", "libdl", "librt", "libpthread", "libresolv", "libutil"})
"""The image's own are used: parts of one glibc do not work with those of another."""
_VERSION = "1.58.0"
"""Newer versions require packages that some mirrors do not have yet; the protocol is the same."""
OPENHANDS = PythonEnvironment(
    name=f"openhands-{_VERSION}",
    folder="runtime",
    version=(3, 12),
    pip_steps=(
        tuple(f"openhands-{part}=={_VERSION}" for part in ("workspace", "sdk", "agent-server", "tools")),
    ),
    # Compiles its modules, so that a server starts in 10 s of processor time instead of 17. No price look-up.
    first_program="import os; os.environ['LITELLM_LOCAL_MODEL_COST_MAP'] = 'True'"
    "\nimport openhands.agent_server.api",
)


class ServerPlane:
    """A server that runs in a sandbox."""

    def __init__(self, sandbox: LocalSandbox, job: Job, port: int, note_use: Callable[[], None]) -> None:
        self._sandbox = sandbox
        self._note_use = note_use
        self._port = port
        self._log = b""
        self._opening = asyncio.Semaphore(_OPENED_AT_ONCE)
        self._end = asyncio.create_task(job.wait())
        # `wait_ended` raises its error. If nobody waits, asyncio would log it.
        self._end.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._reading = asyncio.create_task(self._read_log(job))

    @classmethod
    async def start(
        cls,
        sandbox: LocalSandbox,
        order: Order,
        argv: Sequence[str],
        env: Mapping[str, str],
        note_use: Callable[[], None],
    ) -> ServerPlane:
        """Start a server. `env` overrides the environment of the order; bytes of clients call `note_use`."""
        port = INSIDE_PORT
        if sandbox.isolation.network == "host":
            # All such sandboxes share the node's ports.
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = int(probe.getsockname()[1])
            argv = [str(port) if word == str(INSIDE_PORT) else word for word in argv]
        env = {**server_environment(order, sandbox.scratch), **env}
        cwd = await find_working_dir(sandbox, order.request)
        return cls(sandbox, await sandbox.start(argv, env=env, cwd=cwd), port, note_use)

    async def connect(self) -> asyncio.Protocol:
        """Connect to the server's port inside the sandbox."""
        try:
            async with self._opening:
                connection = await self._sandbox.connect(self._port)
        except SandboxError as error:
            raise ConnectionError(given_of(error)) from error
        return await splice(self._note_use, connection)

    async def wait_ended(self) -> SandboxFailed:
        """Return when the server has ended, or the sandbox is lost."""
        try:
            result = await asyncio.shield(self._end)
        except SandboxLost as lost:
            return lost_as_failure(lost.kind, self._sandbox.client.lost_why)
        with suppress(SandboxLost):
            await self._reading
        if result.kind is ExecKind.OOM:
            kind, cause = FailureKind.TASK_OOM, "its server was killed for memory"
        elif result.kind is ExecKind.NOT_STARTED:
            kind = FailureKind.IMAGE_ERROR
            cause = f"its command cannot be started: {result.stderr.decode(errors='replace').strip()}"
        else:
            how = f"exit code {result.exit_code}" if result.signal is None else f"signal {result.signal}"
            kind, cause = FailureKind.AGENT_ERROR, f"its server ended with {how} ({result.kind.value})"
        return SandboxFailed(kind, cause, exit_code=result.exit_code, log_tail=self.log_tail())

    def log_tail(self) -> str:
        """Return the server's last lines, of both streams as they came."""
        lines = self._log.decode(errors="replace").splitlines()
        return "\n".join(lines[-_SHOWN_LINES:])

    async def close(self, why: str) -> None:
        """Stop reading; the sandbox ends the server."""
        tasks = (self._end, self._reading)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_log(self, job: Job) -> None:
        with suppress(SandboxLost):
            while (output := await job.read()) is not None:
                self._log = (self._log + output.stdout + output.stderr)[-_LOG_BYTES:]


def is_agent_server(request: StartRequest) -> bool:
    """Whether a command starts OpenHands' agent server, which is injected where an image lacks it."""
    return any(word.rpartition("/")[2] in _AGENT_WORDS for word in request.command)


def server_environment(order: Order, scratch: str) -> dict[str, str]:
    """Return the environment of a server: the client's variables, and those that the service sets."""
    folder = f"{scratch}/.agent-server"
    return {
        "OH_ENABLE_VSCODE": "false",
        "OH_PRELOAD_TOOLS": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        **order.request.environment,
        "OH_BASH_EVENTS_DIR": f"{folder}/bash_events",
        "OH_CONVERSATIONS_PATH": f"{folder}/conversations",
        # The path of a socket is limited to 107 bytes.
        "TMUX_TMPDIR": "/tmp",
        "OH_SESSION_API_KEYS_0": order.session_api_key,
        "SESSION_API_KEY": order.session_api_key,
        # Without it the server encrypts its files with the session key.
        "OH_SECRET_KEY": secrets.token_urlsafe(32),
    }


async def find_working_dir(sandbox: LocalSandbox, request: StartRequest) -> str:
    """Return the working directory of a request, created if it is missing; `/` if that fails."""
    wanted = request.working_dir
    if wanted == "/":
        return wanted
    made = await sandbox.exec(["mkdir", "-p", wanted], wall_limit_s=30.0)
    return wanted if made.exit_code == 0 else "/"


def injected_mounts(backend: str, image: str | None) -> tuple[Mount, ...]:
    """Return the mounts of OpenHands' agent server and its Python, below a root that every user may enter.

    Their own folders may be in a home that an image closes. A `process` sandbox has no other paths. Runs ldd
    once.
    """
    folders = {"server": str(OPENHANDS.path), "python": str(_base_of(OPENHANDS.python))}
    libraries = find_libraries() if image is not None else {}
    return (
        *(
            Mount(host_path=path, inside_path=path if backend == "process" else f"/.strop-{name}")
            for name, path in folders.items()
        ),
        *(Mount(host_path=path, inside_path=f"{_LIBRARIES}/{name}") for name, path in libraries.items()),
    )


@cache
def find_libraries() -> dict[str, str]:
    """Return the host's libraries that the injected Python needs beside glibc: an image may lack them."""
    base = _base_of(OPENHANDS.python)
    modules = [path for path in base.glob("lib/python*/lib-dynload/*.so") if "tkinter" not in path.name]
    words = ["ldd", str(OPENHANDS.python), *map(str, modules), *map(str, OPENHANDS.path.rglob("*.so"))]
    told = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    own = (str(base), str(OPENHANDS.path))
    return {
        name: path
        for name, path in re.findall(r"(\S+) => (/\S+)", told)
        if not path.startswith(own) and name.partition(".so")[0] not in _OF_GLIBC
    }


def injected_argv(
    request: StartRequest, find_mount: Callable[[str], str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command of the injected server, with the client's arguments, and its environment.

    `find_mount` maps a mounted path to its path inside. The base Python is started by its path, with explicit
    paths of its libraries and packages: the links of the virtual environment and the paths in its scripts may
    not exist inside.
    """
    base = _base_of(OPENHANDS.python)
    executable = OPENHANDS.python.resolve()
    python = f"{find_mount(str(base))}/{executable.relative_to(base)}"
    folder = next(OPENHANDS.path.glob("lib/python*/site-packages")).relative_to(OPENHANDS.path)
    packages = f"{find_mount(str(OPENHANDS.path))}/{folder}"
    words = list(request.command)
    first = next((number for number, word in enumerate(words) if word.startswith("--")), len(words))
    code = (
        f"import gc, os, site; del os.environ['LD_LIBRARY_PATH']; site.addsitedir({packages!r});"
        # Modules never become garbage.
        " gc.disable(); from openhands.agent_server.__main__ import main; gc.freeze(); gc.enable(); main()"
    )
    return [python, "-B", "-c", code, *words[first:]], {
        "LD_LIBRARY_PATH": f"{find_mount(str(base))}/lib:{_LIBRARIES}"
    }


def _base_of(python: Path) -> Path:
    """Return the base installation of a virtual environment's interpreter."""
    return python.resolve().parent.parent
