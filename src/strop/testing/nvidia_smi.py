"""A fake nvidia-smi, for tests on machines without a GPU.

`install_fake_nvidia_smi` puts it into a folder for the front of PATH; the file beside it lists the GPUs, and
may be changed meanwhile. It answers strop's queries in the format of nvidia-smi: `-L`, `-q -x`,
`--query-gpu=FIELDS` and `--query-compute-apps=FIELDS` with `--format=csv,noheader,nounits`. Anything else
exits with 6, as there.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from strop.hardware.gpus import NVIDIA_SMI, Gpu
from strop.io.atomic import write_bytes_atomically
from strop.testing import nvidia_smi_answers

STATE_NAME = "fake-gpus.json"


def install_fake_nvidia_smi(
    folder: Path,
    gpus: Sequence[Gpu],
    users: Sequence[tuple[str, int, int]] = (),
    *,
    with_memory_errors: Collection[str] = (),
    working: Mapping[str, int] | None = None,
) -> Path:
    """Write the program and its state file into a folder; return the program's path.

    `users`: UUID of a GPU, process id and bytes used, for each process that computes. `with_memory_errors`:
    UUIDs of GPUs that have had an uncorrected memory error. `working`: percent of the time in which a GPU
    computes, by UUID.
    """
    state = {
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
                "utilization.gpu": "[N/A]" if gpu.has_mig else str((working or {}).get(gpu.uuid, 0)),
                "ecc.errors.uncorrected.volatile.total": str(int(gpu.uuid in with_memory_errors)),
                "slices": [[part.profile, part.uuid] for part in gpu.slices],
            }
            for gpu in gpus
        ],
        "users": [
            {"gpu_uuid": uuid, "pid": str(pid), "used_memory": _mebibytes(num_bytes)}
            for uuid, pid, num_bytes in users
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes_atomically(folder / STATE_NAME, json.dumps(state, indent=1).encode())
    program = folder / NVIDIA_SMI
    words = [sys.executable, "-I", "-S", nvidia_smi_answers.__file__, str(folder / STATE_NAME)]
    write_bytes_atomically(program, f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'.encode())
    program.chmod(0o755)
    return program


def _mebibytes(num_bytes: int | None) -> str:
    return "[N/A]" if num_bytes is None else str(num_bytes >> 20)
