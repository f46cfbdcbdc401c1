"""Running Slurm's own programs, with an environment that no other job has left its traces in."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strop.errors import StoreError, explain_refusal
from strop.launch.owned import clean_inherited

# Besides what every launcher leaves out: sbatch would read the first as options, over the script's own; the
# others are the devices of the job that one submits from.
_LEFT_OUT = (
    "SBATCH_",
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Where the cluster is, and who asks."""
_ANSWER_LIMIT_S = 60.0
"""A client itself gives up on a silent controller after 9 to 18 s (Slurm 22.05)."""
_SILENCE = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Connection refused",
    "Could not establish a configuration source",
    "Zero Bytes were transmitted or received",
    "Protocol authentication error",
    "Slurm backup controller in standby mode",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What a client answered."""

    code: int
    output: str
    errors: str


def clean_environment(environ: Mapping[str, str], *, secrets: Sequence[str] = ()) -> dict[str, str]:
    """Return what a job is submitted with: nothing of another job, and none of its own secrets."""
    cleaned = clean_inherited(environ, secrets=secrets)
    kept = {name: value for name, value in cleaned.items() if not name.startswith(_LEFT_OUT)}
    return kept | {name: environ[name] for name in _KEPT if name in environ}


def ask_client(argv: Sequence[str], *, environ: Mapping[str, str] | None = None, given: str = "") -> Said:
    """Run a client program to its end, with a text as its standard input.

    Raises: StoreError if it is not there, or the controller does not answer it.
    """
    environ = clean_environment(os.environ) if environ is None else environ
    try:
        done = subprocess.run(
            list(argv),
            env=dict(environ),
            input=given,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_LIMIT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise StoreError(
            explain_refusal(
                f"{argv[0]} is not on PATH",
                allowed="a login node of the cluster, where Slurm's programs are installed",
                next_step="log in there, or load the module that brings them",
            )
        ) from error
    except subprocess.TimeoutExpired as error:
        raise _silent(argv[0], f"no answer in {_ANSWER_LIMIT_S:g} s") from error
    said = Said(code=done.returncode, output=done.stdout, errors=done.stderr)
    if said.code and any(words in said.errors for words in _SILENCE):
        raise _silent(argv[0], said.errors.strip())
    return said


def _silent(program: str, words: str) -> StoreError:
    return StoreError(
        explain_refusal(
            f"the cluster does not answer {program}: {words}",
            allowed="a controller that answers; jobs go on without it",
            next_step="ask again later, and nothing is lost in between",
        )
    )
