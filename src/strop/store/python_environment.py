"""Virtual environments of foreign parts, each made once in the user's cache.

A foreign part (an evaluation harness, an engine, a rival in a benchmark) never shares an environment with
strop: results can be repeated only with exactly the versions that it pins. A stamp with the install steps is
written last, so a half-made or outdated environment is made again. No model or data set is fetched here, and
in offline mode nothing at all: an existing environment is used, a missing one is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.errors import StoreError
from strop.io.atomic import write_bytes_atomically
from strop.io.lock import FileLock
from strop.io.variables import user_cache_dir
from strop.store.policy import is_offline

STAMP_NAME = "strop-stamp.json"
KEEP_BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}
"""Variables for such an interpreter: container images often forbid Python to keep its bytecode, and then each
of vLLM's three processes compiles its packages again, 27 s of processor time instead of 13."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonEnvironment:
    """The packages that a foreign part needs."""

    name: str
    """Folder name below `folder`, and name in messages."""
    folder: str
    """Folder below the cache directory; one for each kind of part."""
    pip_steps: tuple[tuple[str, ...], ...]
    """The arguments of each `pip install`, in order."""
    uv_step: tuple[str, ...] = ()
    """Requirements that uv installs afterwards. uv itself is one of `pip_steps`."""
    left_out: tuple[str, ...] = ()
    """Packages that uv's resolution leaves out: they are installed already, or are not needed."""
    version: tuple[int, int] | None = None
    """The Python version, which must be on this host; None: that of this process."""
    nltk_data: str | None = None
    """The folder below site-packages in which a package ships nltk's data."""
    first_program: str | None = None
    """Program to run after the installation, so that its bytecode is kept: a sandbox that mounts the
    environment cannot write any."""

    @property
    def path(self) -> Path:
        """Its directory, which may not exist yet."""
        return user_cache_dir() / self.folder / self.name

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / "bin" / "python"

    @property
    def stamp(self) -> str:
        """Hash over the install steps and the interpreter's version."""
        content: list[Any] = [self.version or sys.version_info[:2], self.pip_steps, self.nltk_data]
        if self.uv_step:
            content += [self.uv_step, self.left_out]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def is_ready(self) -> bool:
        """Whether it was completed with exactly these install steps, and its interpreter still exists."""
        try:
            recorded = json.loads((self.path / STAMP_NAME).read_bytes())["stamp"]
        except (OSError, ValueError, LookupError, TypeError):
            return False
        # The interpreter is a link to the Python that made it, which may have been removed since.
        return bool(recorded == self.stamp) and self.python.exists()


def ensure_environment(environment: PythonEnvironment, *, say: Callable[[str], None]) -> Path:
    """Make an environment unless its stamp says that it is complete; return its interpreter.

    If another process is making it, wait.
    Raises: StoreError if it is missing in offline mode, no Python of its version is found, or a step fails;
        the environment then has no stamp and is made again next time.
    """
    if environment.is_ready():
        return environment.python
    if is_offline():
        raise StoreError(
            f"the environment of {environment.name} is not in {environment.path}, and offline mode"
            " forbids to make it",
            allowed="one that was made by these install steps with this Python, in the cache STROP_CACHE",
            next_step="start the same command once where pip may fetch packages, without STROP_OFFLINE"
            " and HF_HUB_OFFLINE",
        )
    environment.path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(environment.path.with_name(f"{environment.name}.lock")):
        if environment.is_ready():
            return environment.python
        say(
            f"making the environment of {environment.name} in {environment.path}; it takes"
            " some minutes and 1 to 3 GB"
        )
        _make(environment)
    return environment.python


def find_interpreter(version: tuple[int, int]) -> str:
    """Return the first interpreter of a version that starts, on PATH or in pyenv.

    Raises: StoreError if there is none.
    """
    word = f"{version[0]}.{version[1]}"
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    paths = [f"python{word}", *map(str, sorted(root.glob(f"versions/{word}*/bin/python{word}")))]
    for path in filter(None, map(shutil.which, paths)):
        # A name on PATH may be a shim that has no such version behind it.
        code = f"import sys, venv; sys.exit(sys.version_info[:2] != {version})"
        if subprocess.run([path, "-I", "-c", code], capture_output=True, check=False).returncode == 0:
            return path
    raise StoreError(
        f"no Python {word} was found on PATH or by pyenv",
        allowed=f"an interpreter python{word} that has venv",
        next_step=f"install Python {word}, or put its directory on PATH",
    )


def _make(environment: PythonEnvironment) -> None:
    """Install everything into a fresh environment, and write its stamp."""
    shutil.rmtree(environment.path, ignore_errors=True)
    python = str(environment.python)
    base = find_interpreter(environment.version) if environment.version else sys.executable
    options = [] if environment.pip_steps else ["--without-pip"]
    _run([base, "-m", "venv", *options, str(environment.path)], environment)
    for requirements in environment.pip_steps:
        _run([python, "-m", "pip", "install", "--quiet", "--no-compile", *requirements], environment)
    if environment.uv_step:
        overrides = environment.path / "overrides.txt"
        # A marker that is never true takes a package out of the resolution.
        overrides.write_text("".join(f"{name}; sys_platform == 'never'\n" for name in environment.left_out))
        command = [python, "-m", "uv", "pip", "install", "--quiet", "--python", python]
        _run([*command, "--overrides", str(overrides), *environment.uv_step], environment)
    if environment.nltk_data is not None:
        # nltk looks for its data in nltk_data of its environment.
        data = next(environment.path.glob(f"lib/python*/site-packages/{environment.nltk_data}"), None)
        if data is None:
            raise _failed(environment, f"no package has the folder {environment.nltk_data}")
        (environment.path / "nltk_data").symlink_to(data.relative_to(environment.path))
    if environment.first_program is not None:
        _run([python, "-c", environment.first_program], environment)
    write_bytes_atomically(environment.path / STAMP_NAME, json.dumps({"stamp": environment.stamp}).encode())


def _run(command: list[str], environment: PythonEnvironment) -> None:
    variables = {**os.environ, **KEEP_BYTECODE}
    try:
        subprocess.run(command, capture_output=True, text=True, errors="replace", check=True, env=variables)
    except (OSError, subprocess.CalledProcessError) as error:
        said = str(getattr(error, "stderr", ""))[-2000:]
        raise _failed(environment, f"`{' '.join(command)}` failed: {said or error}") from error


def _failed(environment: PythonEnvironment, why: str) -> StoreError:
    return StoreError(
        f"the environment of {environment.name} could not be made ({why})",
        allowed="a machine where pip finds these exact packages",
        next_step="mend what the last line names and start the same command again",
    )
