"""What the rivals need installed.

A rival never shares an environment with strop: its pins are its own, and a benchmark that bends them would
measure something nobody runs. vLLM's is that of strop's own engine.
"""

from __future__ import annotations

from strop.engine.vllm.environment import VLLM
from strop.store.python_environment import PythonEnvironment, ensure_environment

__all__ = ["TRL", "VLLM", "ensure_environment"]

TRL = PythonEnvironment(
    name="trl-1.16.0", folder="bench", pip_steps=(("torch==2.13.0",), ("trl==1.16.0", "gguf"))
)
