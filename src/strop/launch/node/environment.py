"""The task of an agent (`NodeTask`), and the environment of each of its roles.

The launcher's own variables override all others: devices, the attempt, caches for this role alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from strop.errors import CheckRefused
from strop.hardware.allocation import DEVICE_ORDER, PCI_BUS_ID, Allocation, GpuRequest
from strop.hardware.ports import (
    ADDRESS_VARIABLE,
    NAMES_VARIABLE,
    NODE_VARIABLE,
    NUM_NODES_VARIABLE,
)
from strop.hardware.visible_devices import VISIBLE_DEVICES, part_variables
from strop.io import user_cache_dir
from strop.launch.backends import BACKENDS
from strop.launch.contract import JobPlan, RolePlan
from strop.launch.options import SiteOptions
from strop.launch.secrets import RAY_TOKEN_NAME
from strop.record.fence import (
    ATTEMPT_VARIABLE,
    GRACE_VARIABLE,
    NUMBER_VARIABLE,
    RAY_ADDRESS,
    RAY_TOKEN_PATH,
)
from strop.spec.layout import PARTS
from strop.user_code import MOVED_VARIABLE

RAY_PORT = 6379
"""Ray's own."""
TERM_GRACE_S = 25.0
"""Seconds after SIGTERM: schedulers kill after 30 s by default."""
_CACHES = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
_DISTRIBUTED = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Never inherited: a job may be submitted from inside another job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeTask:
    """One node of one attempt of one trial."""

    job_path: Path
    """`<home>/job`."""
    trial_path: Path
    """The run's directory."""
    attempt: str
    """Name of the attempt's folder."""
    number: int
    """From 0: the number of earlier attempts of the trial."""
    node: int
    """From 0, over both parts; node 0 is the first of the main part."""
    num_nodes: int
    part: Literal["main", "cpu"] = "main"
    grace_s: float = 120.0
    """Seconds between the announcement of an end and that end."""
    term_grace_s: float = TERM_GRACE_S
    """Seconds between SIGTERM and the kill that follows."""
    address: str = "127.0.0.1"
    """The address by which other nodes reach node 0."""
    ray_port: int = RAY_PORT
    """The port there of the head of the run's Ray cluster, if it has several nodes."""
    has_shared_disk: bool = True
    """Whether all nodes see the run's directory."""

    @property
    def attempt_path(self) -> Path:
        """The attempt's folder."""
        return self.trial_path / "attempts" / self.attempt

    @property
    def log_path(self) -> Path:
        """The folder of this node's logs."""
        return self.attempt_path / str(self.node)

    @property
    def exit_path(self) -> Path:
        """The file of this node's exit code, which is written last."""
        return self.attempt_path / "exit" / str(self.node)


def request_devices(plan: JobPlan, roles: Sequence[RolePlan], environ: Mapping[str, str]) -> GpuRequest:
    """Return the GPUs that this node's roles need, by `ROLE/part`, in the order of `PARTS`."""
    numbers = {f"{role.name}/{part}": number for role in roles for part, number in role.gpus.items()}
    ordered = sorted(numbers.items(), key=lambda item: PARTS.index(item[0].partition("/")[2]))
    return GpuRequest(
        wanted=dict(ordered),
        inherited=environ.get(VISIBLE_DEVICES),
        is_granted=_kind_of(plan).device_grant == "named",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Workplace:
    """The values that the roles of one node and attempt share."""

    task: NodeTask
    plan: JobPlan
    allocation: Allocation
    lease: Mapping[str, str]
    """Variables that mark processes as belonging to this attempt."""
    work_path: Path
    """A temporary folder that is removed with the lease."""
    code_path: Path


def build_environment(
    role: RolePlan, place: Workplace, *, job_variables: Mapping[str, str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the whole environment of a role.

    `job_variables`: the job's variables and this role's secrets.
    """
    task, work_path = place.task, place.work_path
    kept = {name: value for name, value in environ.items() if name not in _DISTRIBUTED}
    variables = kept | dict(job_variables)
    # Before XDG_CACHE_HOME changes: models and the login of the hub stay where they are.
    home = variables.get("XDG_CACHE_HOME") or os.path.join(variables.get("HOME", "/"), ".cache")
    variables.setdefault("HF_HOME", os.path.join(home, "huggingface"))
    variables.setdefault("STROP_CACHE", str(user_cache_dir()))
    cache_path = work_path / "cache" / role.name
    variables |= {name: str(cache_path / name.lower()) for name in _CACHES}
    variables |= {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "TMPDIR": str(work_path / "tmp"),
        ATTEMPT_VARIABLE: task.attempt,
        NUMBER_VARIABLE: str(task.number),
        GRACE_VARIABLE: f"{min(task.grace_s, task.term_grace_s):g}",
        NODE_VARIABLE: str(task.node),
        NUM_NODES_VARIABLE: str(task.num_nodes),
        ADDRESS_VARIABLE: task.address,
        NAMES_VARIABLE: ",".join(sorted(job_variables)),
        **place.lease,
    }
    if (token_path := task.job_path / RAY_TOKEN_NAME).exists():
        variables |= {RAY_ADDRESS: f"{task.address}:{task.ray_port}", RAY_TOKEN_PATH: str(token_path)}
        variables["RAY_AUTH_MODE"] = "token"
    came_from = place.plan.details.get("submitted_from")
    if place.plan.code_sha256 is not None and came_from:
        # The run file names user code by its old path, and the submitted copy runs instead.
        variables[MOVED_VARIABLE] = f"{came_from}:{place.code_path}"
    folders = [str(place.code_path / "src")] if (place.code_path / "src").is_dir() else []
    variables["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [variables.get("PYTHONPATH")])])
    return variables | _device_variables(role, place)


def require_names(role: RolePlan, variables: Mapping[str, str], names: Sequence[str]) -> None:
    """Refuse to start a role without a variable of its plan (LAU-4).

    Raises: CheckRefused naming role and variables.
    """
    missing = [name for name in names if name not in variables]
    if missing:
        raise CheckRefused(
            f"role {role.name} would start without {', '.join(missing)}",
            allowed="every variable and secret that the job names",
            next_step="submit again: the file with their values is gone",
        )


def _kind_of(plan: JobPlan) -> type[SiteOptions]:
    return BACKENDS.get(plan.backend, SiteOptions)


def _device_variables(role: RolePlan, place: Workplace) -> dict[str, str]:
    allocated = place.allocation.roles
    of_role = {
        part: allocated[f"{role.name}/{part}"] for part in role.gpus if f"{role.name}/{part}" in allocated
    }
    if not of_role:
        # If the job has been assigned GPUs, a role that requested none must not see any.
        is_fenced = _kind_of(place.plan).device_grant != "none" or place.allocation.uuids
        return {VISIBLE_DEVICES: "", DEVICE_ORDER: PCI_BUS_ID} if is_fenced else {}
    if "eval" in of_role:
        return {**of_role["eval"].variables, "OMP_NUM_THREADS": "1"}
    shares = {part: devices.visible for part, devices in of_role.items()}
    return {**part_variables(shares), DEVICE_ORDER: PCI_BUS_ID, "OMP_NUM_THREADS": "1"}
