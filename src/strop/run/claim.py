"""What a training on this machine holds while it runs: its lease, its GPU, and a clean place to start from.

Under an agent all of this is the agent's, whose lease the training inherits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from strop.hardware import clear_leftovers, find_inherited
from strop.hardware.allocation import Allocation, GpuRequest, lease_gpus
from strop.hardware.findings import Finding, Severity, require_none
from strop.hardware.gpus import read_gpus
from strop.hardware.preflight import PreflightRequest, run_preflight
from strop.hardware.torch_build import read_torch_build
from strop.hardware.visible_devices import INFER_DEVICES, VISIBLE_DEVICES, DeviceForm, parse_visible_devices
from strop.io.variables import set_variables

_ROLE = "train"
"""Learner and engine together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What was found and taken."""

    notices: tuple[str, ...] = ()
    devices: Mapping[str, object] = field(default_factory=dict)
    """For the start record; empty where an agent keeps its own."""


@contextmanager
def claim_machine(
    run_path: Path, attempt: str, *, need_bytes: int, wanted: Mapping[str, int] | None = None
) -> Iterator[Claim]:
    """Clear what dead runs of this user left, and hold GPUs for a training, if it uses any.

    `need_bytes` is what must be free on each. `wanted`: how many GPUs generation (`infer`) and the learner
    (`train`) get; without it both share the first one that torch sees. Every process that is started
    meanwhile carries the lease's id, and sees these GPUs alone.
    Raises: CheckRefused naming the run or the processes that have the GPUs; ConfigError if
        CUDA_VISIBLE_DEVICES cannot be read; StoreError if leases cannot be kept.
    """
    if find_inherited() is not None:
        yield Claim()
        return
    cleared = [f"a dead run had left something: {one}" for one in clear_leftovers()]
    inherited = os.environ.get(VISIBLE_DEVICES)
    shares = dict(wanted or {_ROLE: 1 if _uses_gpu(inherited) else 0})
    needs = dict.fromkeys(shares, need_bytes)
    request = GpuRequest(wanted=shares, inherited=inherited, need_bytes=needs)
    held, allocation = lease_gpus(run_path.name, attempt, request)
    with held, set_variables(held.variables):
        warnings: list[str] = []
        if allocation.uuids:
            asked = PreflightRequest(
                run_path=run_path,
                allocation=allocation,
                gpu_need_bytes=needs,
                own_lease_id=held.lease.lease_id,
            )
            found = [_judge(finding, inherited) for finding in run_preflight(asked)]
            warnings = [str(finding) for finding in require_none(found)]
        # Early enough: CUDA reads its variable when it is first used.
        with set_variables(_device_variables(allocation)):
            notices = (*cleared, *allocation.notices, *warnings)
            yield Claim(notices=notices, devices=allocation.record())


def _uses_gpu(inherited: str | None) -> bool:
    """Whether torch would compute on a GPU here."""
    if parse_visible_devices(inherited).form is DeviceForm.NONE or not read_gpus():
        return False
    build = read_torch_build()
    return build is not None and (build.cuda or build.hip) is not None


def _judge(finding: Finding, inherited: str | None) -> Finding:
    """Let a person who names a GPU share it: that is then a warning."""
    if finding.code != "foreign_process" or inherited is None:
        return finding
    next_step = f"nothing, if that is meant: {VISIBLE_DEVICES} names this GPU"
    return replace(finding, next_step=next_step, severity=Severity.WARNING)


def _device_variables(allocation: Allocation) -> dict[str, str]:
    """Return what lets this process and its children see the GPUs of the allocation alone."""
    roles = allocation.roles
    variables = dict(roles[_ROLE].variables) if allocation.uuids else {}
    if variables and "infer" in roles:
        variables[INFER_DEVICES] = roles["infer"].visible.text or ""
    return variables
