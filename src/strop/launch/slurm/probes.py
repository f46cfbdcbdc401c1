"""What would stop a job, found by reading alone: Slurm's own test, and what that does not see.

`sbatch --test-only` sees partitions, counts of GPUs and nodes, types and memory. It does not see folders, and
an account only where there is a database (Slurm 22.05).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from strop.errors import StoreError
from strop.hardware.findings import Finding, Severity, find_refusal
from strop.launch.contract import JobPlan
from strop.launch.slurm.clients import Said, ask_client
from strop.launch.slurm.script import SCRIPT_NAME

# Slurm's words to ours, the first that is found.
_REFUSALS = (
    ("dependency", "dependency"),
    ("invalid partition", "partition"),
    ("invalid account", "account"),
    ("invalid qos", "qos"),
    ("invalid generic resource", "gpus"),
    ("invalid feature", "constraint"),
    ("reservation", "reservation"),
    ("time limit", "time"),
    ("memory", "memory"),
    ("node name", "nodes"),
    ("node configuration", "resources"),
    ("node count", "nodes"),
)
_QUESTIONS = {
    "partition": "sinfo -o '%P %G %l'",
    "gpus": "sinfo -o '%P %N %G'",
    "resources": "sinfo -o '%P %D %G %c %m'",
    "account": "sacctmgr show assoc user=$USER format=account",
    "qos": "sacctmgr show qos format=name",
    "constraint": "sinfo -o '%N %f'",
    "reservation": "scontrol show reservation",
    "nodes": "sinfo -N",
    "time": "sinfo -o '%P %l'",
}


def probe_plan(plan: JobPlan, *, environ: Mapping[str, str]) -> list[Finding]:
    """Return everything that speaks against a plan. Reads only; a probe that cannot run is a finding too."""
    return [
        *_ask_scheduler(plan, environ),
        *_ask_for_account(plan, environ),
        *_look_at_folders(plan),
        *_look_for_python(plan),
        *_look_for_image(plan),
    ]


def _ask_scheduler(plan: JobPlan, environ: Mapping[str, str]) -> list[Finding]:
    # The script comes by standard input: its home does not exist yet.
    argv = ("sbatch", "--test-only", "--export=ALL", "--chdir=/", "--output=/dev/null")
    try:
        said = ask_client(argv, environ=environ, given=plan.files[SCRIPT_NAME])
    except StoreError as error:
        return [find_refusal("scheduler", error, severity=Severity.UNKNOWN)]
    if said.code == 0:
        return []
    words = _refusal_in(said)
    if "presently disabled" in words and "--dependency=" in plan.files[SCRIPT_NAME]:
        # All that Slurm says where a job that was to succeed has failed already.
        words = f"a dependency can never be met ({words})"
    code = next((code for pattern, code in _REFUSALS if pattern in words.lower()), "scheduler")
    question = _QUESTIONS.get(code)
    return [
        Finding(
            code=code,
            given=f"sbatch would refuse {plan.name}: {words}",
            allowed="what the cluster has" + (f", as {question} says" if question else ""),
            next_step="change the flag, or the site profile",
        )
    ]


def _ask_for_account(plan: JobPlan, environ: Mapping[str, str]) -> list[Finding]:
    account = plan.details.get("account")
    if not account or shutil.which("sacctmgr", path=environ.get("PATH")) is None:
        return []
    argv = ("sacctmgr", "-n", "-P", "show", "assoc", f"user={plan.user}", "format=account")
    try:
        said = ask_client(argv, environ=environ)
    except StoreError as error:
        return [find_refusal("account", error, severity=Severity.UNKNOWN)]
    if said.code:
        words = said.errors.strip() or said.output.strip()
        return [_unknown("account", f"nobody can say whether account {account} exists: {words}", "go on")]
    known = sorted(set(said.output.split()))
    if account in known:
        return []
    return [
        Finding(
            code="account",
            given=f"account {account} is none of user {plan.user}",
            allowed=", ".join(known) or "none at all",
            next_step="name one of these with --account",
        )
    ]


def _look_at_folders(plan: JobPlan) -> list[Finding]:
    home = Path(plan.home)
    if not home.is_absolute():
        return [_missing("home", f"run folder {home} is relative", "an absolute path", "give --output-dir")]
    # Made at submission, with the folder of its logs: Slurm starts no job whose log it cannot open.
    nearest = next(path for path in (home, *home.parents) if path.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return []
    given = (
        f"run folder {home} cannot be made: {nearest} is {'not writable' if nearest.is_dir() else 'a file'}"
    )
    return [_missing("home", given, "a folder on a disk that the nodes share", "give another --output-dir")]


def _look_for_python(plan: JobPlan) -> list[Finding]:
    if plan.details.get("image") or shutil.which(plan.python) is not None:
        return []
    return [
        _missing(
            "python",
            f"interpreter {plan.python} is not here",
            "one that login node and nodes share, with strop installed",
            "set python in the site profile",
        )
    ]


def _look_for_image(plan: JobPlan) -> list[Finding]:
    image = plan.details.get("image")
    if not image:
        return []
    if image.endswith(".sqsh") and "/" not in image:
        given = f"image {image} would be read as a name in a registry"
        return [
            _missing("image", given, "a path with a slash for a file", f"write ./{image}, or the whole path")
        ]
    if image.endswith((".sqsh", ".sif")) or image.startswith(("/", "./")):
        if Path(image).exists():
            return []
        return [
            _missing("image", f"image {image} is not here", "a file that the nodes see", "build or copy it")
        ]
    return [
        _unknown("image", f"whether the nodes can get image {image} is not seen from here", "try one node")
    ]


def _refusal_in(said: Said) -> str:
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in said.errors.splitlines()]
    return "; ".join(filter(None, lines)) or f"exit code {said.code}"


def _missing(code: str, given: str, allowed: str, next_step: str) -> Finding:
    return Finding(code=code, given=given, allowed=allowed, next_step=next_step)


def _unknown(code: str, given: str, next_step: str) -> Finding:
    return Finding(
        code=code, given=given, allowed="an answer", next_step=next_step, severity=Severity.UNKNOWN
    )
