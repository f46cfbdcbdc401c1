"""The GPUs of attempts whose sandboxes have some, from the beginning of an attempt to its end."""

from __future__ import annotations

import os
from fractions import Fraction

from strop.hardware.gpu_pool import GpuLease, GpuPool
from strop.hardware.visible_devices import SANDBOX_DEVICES, DeviceForm, parse_visible_devices
from strop.rollout import FailureOwner
from strop.spec.sandboxing import GpuSettings
from strop.tasks.failures import AttemptFailed

_pools: dict[str, GpuPool] = {}
"""By what the variable says."""


def find_pool() -> GpuPool:
    """Return the GPUs that this process has for sandboxes, as STROP_SANDBOX_DEVICES names them.

    Raises: ConfigError if the variable cannot be read.
    """
    text = os.environ.get(SANDBOX_DEVICES, "")
    if text not in _pools:
        given = parse_visible_devices(text, SANDBOX_DEVICES)
        _pools[text] = GpuPool(given.ids, has_slices=given.form is DeviceForm.MIG_UUID)
    return _pools[text]


def require_gpus(section: object) -> None:
    """Refuse attempts whose GPUs this process does not have. Raises: CheckRefused."""
    if isinstance(section, GpuSettings) and section.sandbox_gpus:
        find_pool().require(section.sandbox_gpus)


NO_GPUS = GpuLease(pool=GpuPool(()), share=Fraction(0), names=(), waited_s=0.0)


async def lease_gpus(section: object) -> GpuLease:
    """Return the GPUs of an attempt once they are free; `NO_GPUS` where its section asks for none.

    Raises: AttemptFailed if none was free in time.
    """
    if not isinstance(section, GpuSettings) or not section.sandbox_gpus:
        return NO_GPUS
    asked: GpuSettings = section
    pool, limit_s = find_pool(), asked.gpu_wait_s
    try:
        return await pool.lease(asked.sandbox_gpus, limit_s=limit_s)
    except TimeoutError as error:
        detail = f"no GPU was free for {limit_s:g} s; {pool.num_waiting} other attempts wait for one"
        raise AttemptFailed(FailureOwner.INFRA, "no_gpu", detail) from error
