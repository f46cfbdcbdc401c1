"""A program that answers as nvidia-smi does, about GPUs that are not there.

For tests and rehearsals on machines without a GPU. `install_fake_nvidia_smi` puts it into a folder for the
front of PATH; the file beside it says which GPUs there are, and may be changed while others ask.
Answered are the questions that strop asks, in the form of nvidia-smi: `-L`, `--query-gpu=FIELDS` and
`--query-compute-apps=FIELDS` with `--format=csv,noheader,nounits`. Anything else ends with 6, as there.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from strop.hardware import fake_answers
from strop.hardware.gpus import NVIDIA_SMI, Gpu
from strop.store.atomic import write_bytes_atomically

STATE_NAME = "fake-gpus.json"


class Fault(StrEnum):
    """What is wrong with a GPU that is not there."""

    CHECKSUM = "checksum"
    """It multiplies wrongly."""
    HANG = "hang"
    """It does not answer."""
    SLOW = "slow"
    """Its node reduces far below the speed of the others."""
    ECC = "ecc"
    """It has an uncorrected memory error."""


def install_fake_nvidia_smi(
    folder: Path,
    gpus: Sequence[Gpu],
    users: Sequence[tuple[str, int, int]] = (),
    *,
    faults: Mapping[str, Sequence[Fault]] | None = None,
) -> Path:
    """Write the program and what it knows into a folder; return the program's path.

    `users`: UUID of a GPU, process id and bytes used, for each process that computes. `faults`: what is
    wrong, by UUID; probes of a preflight do as if it were so.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / STATE_NAME
    write_bytes_atomically(state, json.dumps(_to_state(gpus, users, faults or {}), indent=1).encode())
    program = folder / NVIDIA_SMI
    words = [sys.executable, "-I", "-S", fake_answers.__file__, str(state)]
    write_bytes_atomically(program, f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'.encode())
    program.chmod(0o755)
    return program


def find_rehearsal() -> Path | None:
    """Return the state file of the fake that stands in for nvidia-smi here; None where it is the real one."""
    program = shutil.which(NVIDIA_SMI)
    state = None if program is None else Path(program).with_name(STATE_NAME)
    return state if state is not None and state.exists() else None


def read_faults(state: Path) -> dict[str, tuple[Fault, ...]]:
    """Return what is wrong with which GPU."""
    faults = json.loads(state.read_text())["faults"]
    return {uuid: tuple(map(Fault, found)) for uuid, found in faults.items()}


def _to_state(
    gpus: Sequence[Gpu], users: Sequence[tuple[str, int, int]], faults: Mapping[str, Sequence[Fault]]
) -> dict[str, Any]:
    return {
        "gpus": [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "name": gpu.name,
                "memory.total": _mebibytes(gpu.memory_bytes),
                "memory.free": _mebibytes(gpu.free_memory_bytes),
                "mig.mode.current": "Enabled" if gpu.has_mig else "Disabled",
                "driver_version": gpu.driver_version or "[N/A]",
                "compute_cap": "[N/A]" if gpu.compute_capability is None else str(gpu.compute_capability),
                "ecc.errors.uncorrected.volatile.total": str(int(Fault.ECC in faults.get(gpu.uuid, ()))),
                "slices": [[part.profile, part.uuid] for part in gpu.slices],
            }
            for gpu in gpus
        ],
        "users": [
            {"gpu_uuid": uuid, "pid": str(pid), "used_memory": _mebibytes(num_bytes)}
            for uuid, pid, num_bytes in users
        ],
        "faults": {uuid: list(found) for uuid, found in faults.items()},
    }


def _mebibytes(num_bytes: int | None) -> str:
    return "[N/A]" if num_bytes is None else str(num_bytes >> 20)
