"""Leases of the GPUs that an attempt's sandboxes see."""

from __future__ import annotations

import os
from fractions import Fraction

from strop.hardware.gpu_pool import GpuLease, GpuPool
from strop.hardware.visible_devices import SANDBOX_DEVICES, DeviceForm, parse_visible_devices
from strop.rollout import FailureOwner
from strop.spec.sandboxing import GpuSettings
from strop.tasks.failures import AttemptFailed

_pools: dict[str, GpuPool] = {}
"""Pool by the value of STROP_SANDBOX_DEVICES."""


def find_pool() -> GpuPool:
    """Return the pool of this process's sandbox GPUs, as STROP_SANDBOX_DEVICES lists them.

    Raises: ConfigError if the variable cannot be parsed.
    """
    text = os.environ.get(SANDBOX_DEVICES, "")
    if text not in _pools:
        devices = parse_visible_devices(text, SANDBOX_DEVICES)
        _pools[text] = GpuPool(devices.ids, has_slices=devices.form is DeviceForm.MIG_UUID)
    return _pools[text]


def require_gpus(section: object) -> None:
    """Refuse attempts that need more GPUs than this process has. Raises: CheckRefused."""
    if isinstance(section, GpuSettings) and section.sandbox_gpus:
        find_pool().require(section.sandbox_gpus)


WAIT_LIMIT_S = 3600.0
"""Longest wait of an attempt for its GPUs: others may hold theirs for hours."""
NO_GPUS = GpuLease(pool=GpuPool(()), share=Fraction(0), names=(), waited_s=0.0)


async def lease_gpus(section: object) -> GpuLease:
    """Wait for the GPUs of an attempt and lease them; `NO_GPUS` if its section asks for none.

    Raises: AttemptFailed if none was free in time.
    """
    if not isinstance(section, GpuSettings) or not section.sandbox_gpus:
        return NO_GPUS
    settings: GpuSettings = section
    pool = find_pool()
    try:
        return await pool.lease(settings.sandbox_gpus, limit_s=WAIT_LIMIT_S)
    except TimeoutError as error:
        detail = f"no GPU was free for {WAIT_LIMIT_S:g} s; {pool.num_waiting} other attempts wait for one"
        raise AttemptFailed(FailureOwner.INFRA, "no_gpu", detail) from error
