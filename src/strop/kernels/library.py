"""Compiles kernels.c for the instructions that PyTorch uses here, and caches the library.

PyTorch queries the processor, also under an emulator, and obeys ATEN_CPU_CAPABILITY; the compiler's
`-march=native` does neither. The file name in the cache is a hash of sources, flags and compiler, so machines
that share a home directory never load each other's instructions. The library uses the OpenMP runtime that
torch has loaded; therefore torch is imported first.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from strop.io.variables import user_cache_dir

_SOURCES = ("kernels.c", "rows.h")
_FLAGS = ("-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
_OF_CAPABILITY = {"AVX2": _AVX2, "AVX512": _AVX512}
"""By PyTorch's level; other processors use the base instructions of their architecture."""
_COMPILE_LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelStatus:
    """Whether the C kernels can be used here."""

    path: Path | None
    """The compiled library, or None."""
    note: str
    """The compiler, or why there is no library."""

    def describe(self) -> str:
        """Return one line for a report."""
        if self.path is not None:
            return f"compiled by {self.note}"
        return f"not compiled ({self.note}); on CPUs everything works, at two thirds of the speed"


@functools.cache
def kernel_status() -> KernelStatus:
    """Compile the kernels unless this machine's are in the cache. Takes about a second the first time."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    try:
        version = _run([*compiler, "--version"]).splitlines()[0]
        flags = (*_FLAGS, *_instruction_flags())
        path = user_cache_dir() / "kernels" / f"{_key(compiler, version, flags)}.so"
        if not path.exists():
            _compile([*compiler, *flags], path)
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        note = f"{type(error).__name__}: {error}"
        if isinstance(error, subprocess.CalledProcessError):
            lines = error.stderr.strip().splitlines() or [f"exit status {error.returncode}"]
            note = f"{shlex.join(error.cmd[:1])} failed: {lines[0]}"
        return KernelStatus(path=None, note=note)
    return KernelStatus(path=path, note=version)


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None where they cannot be built or loaded."""
    path = kernel_status().path
    if path is None:
        return None
    import torch  # noqa: F401  # Loads the OpenMP runtime that the library is to share.

    try:
        return ctypes.CDLL(str(path))
    except OSError:
        # A cache that forbids execution; only speed is lost.
        return None


def _instruction_flags() -> tuple[str, ...]:
    """Return the compiler's flags for the instructions that PyTorch has chosen in this process."""
    import torch

    level = torch.backends.cpu.get_cpu_capability()
    if level == "AVX512" and not torch.cpu.get_capabilities().get("avx512_f", False):
        # ATEN_CPU_CAPABILITY may claim more than there is.
        level = "AVX2"
    return _OF_CAPABILITY.get(level, ())


def _key(compiler: list[str], version: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    for fact in (*compiler, version, *flags, platform.machine()):
        digest.update(fact.encode() + b"\0")
    return digest.hexdigest()[:24]


def _compile(command: list[str], path: Path) -> None:
    """Compile into a temporary file and move it into place: other processes may compile too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        _run([*command, str(Path(__file__).parent / _SOURCES[0]), "-o", str(built), "-lm"])
        built.replace(path)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_LIMIT_S, check=True)
    return done.stdout
