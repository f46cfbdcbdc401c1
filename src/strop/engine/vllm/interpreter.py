"""Starts a program in vLLM's interpreter: `python -m strop.engine.vllm.interpreter [--python P] -- WORDS`.

Ray starts the process of a vLLM engine by it, on the engine's machine. The interpreter sees strop's modules
and no other package of this environment.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import strop
from strop.engine.vllm.environment import find_python
from strop.errors import EXIT_FAILED, ConfigError, StropError
from strop.io.variables import user_cache_dir
from strop.store.python_environment import KEEP_BYTECODE

MODULE = "strop.engine.vllm.interpreter"


def command_of(configured: str | None) -> str:
    """Return the command line by which Ray starts vLLM's interpreter, for a shell.

    `configured` is `engine.python`.
    Raises: ConfigError if this machine has no such interpreter, or it has another Ray than this one.
    """
    python = find_python(configured)
    asked = "from importlib.metadata import version; print(version('ray'))"
    found = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=False)
    if (there := found.stdout.strip()) != version("ray"):
        raise ConfigError(
            f"{python} has {f'Ray {there}' if there else 'no Ray'}",
            allowed=f"ray=={version('ray')} beside vLLM: its engine is an actor",
            next_step=f"run `make vllm-deps`, or install ray=={version('ray')} there",
        )
    given = [] if configured is None else ["--python", configured]
    return shlex.join([sys.executable, "-P", "-m", MODULE, *given, "--"])


def main() -> int:
    """Replace this process by the program; return an exit code where that fails."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--python", help="the interpreter; else the one that strop finds")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    arguments = [word for word in options.arguments if word != "--"]
    try:
        python = str(find_python(options.python))
        variables = {"PYTHONPATH": str(_make_modules()), "PYTHONSAFEPATH": "1", **KEEP_BYTECODE}
        os.execve(python, [python, *arguments], {**os.environ, **variables})
    except (StropError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED


def _make_modules() -> Path:
    """Return a folder that holds strop and nothing else."""
    source = Path(strop.__file__).parent
    folder = user_cache_dir() / "engine" / "modules" / hashlib.sha256(bytes(source)).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    link, partial = folder / "strop", folder / f".{os.getpid()}"
    if not link.exists():
        partial.symlink_to(source)
        os.replace(partial, link)
    return folder


if __name__ == "__main__":
    sys.exit(main())
