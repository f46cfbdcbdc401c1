"""OpenHands' agent server, injected read-only with its Python into sandboxes whose image has none."""

from __future__ import annotations

import re
import secrets
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

from strop.runtime.contract import StartRequest
from strop.sandbox.contract import Mount
from strop.store.python_environment import PythonEnvironment

_AGENT_WORDS = ("openhands-agent-server", "openhands.agent_server", "agent-server")
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


def is_agent_server(request: StartRequest) -> bool:
    """Whether a command starts OpenHands' agent server, which is injected where an image lacks it."""
    return any(word.rpartition("/")[2] in _AGENT_WORDS for word in request.command)


def server_environment(request: StartRequest, key: str, scratch: str) -> dict[str, str]:
    """Return the environment of a server: the client's variables, and those that the service sets."""
    folder = f"{scratch}/.agent-server"
    return {
        "OH_ENABLE_VSCODE": "false",
        "OH_PRELOAD_TOOLS": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        **request.environment,
        "OH_BASH_EVENTS_DIR": f"{folder}/bash_events",
        "OH_CONVERSATIONS_PATH": f"{folder}/conversations",
        # The path of a socket is limited to 107 bytes.
        "TMUX_TMPDIR": "/tmp",
        "OH_SESSION_API_KEYS_0": key,
        "SESSION_API_KEY": key,
        # Without it the server encrypts its files with the session key.
        "OH_SECRET_KEY": secrets.token_urlsafe(32),
    }


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
