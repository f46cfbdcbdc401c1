"""Parse CUDA_VISIBLE_DEVICES, and divide the visible GPUs among roles.

The variable has five forms: unset, where CUDA sees every GPU; empty or a word for none; indices, whose
meaning depends on CUDA_DEVICE_ORDER; UUIDs of GPUs; UUIDs of MIG slices, in a new and an old spelling.
An entry is a name, never a number. Source: CUDA C Programming Guide, 'CUDA Environment Variables', and
the MIG User Guide, 'Device Enumeration'.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from strop.errors import CheckRefused, ConfigError

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
INFER_DEVICES, JUDGE_DEVICES = "STROP_INFER_DEVICES", "STROP_JUDGE_DEVICES"
ENV_DEVICES = "STROP_ENV_DEVICES"
PART_DEVICES = {"infer": INFER_DEVICES, "judge": JUDGE_DEVICES, "env": ENV_DEVICES}
"""From a part of a run to the variable with its devices, set for the process that starts these roles. A
learner's devices are in CUDA_VISIBLE_DEVICES."""
_NONE_WORDS = {"", "-1", "NoDevFiles"}
"""Schedulers write the last one for a job without GPUs."""


class DeviceForm(StrEnum):
    """The form of device names."""

    UNSET = "unset"
    """The variable is not set: CUDA sees every GPU."""
    NONE = "none"
    """No device is visible."""
    INDEX = "index"
    GPU_UUID = "UUID of a GPU"
    MIG_UUID = "UUID of a MIG slice"


_FORMS = {
    DeviceForm.INDEX: re.compile(r"\d+"),
    DeviceForm.GPU_UUID: re.compile(r"GPU-[0-9A-Za-z-]+"),
    # Until driver 470 a slice was named by its GPU and two numbers.
    DeviceForm.MIG_UUID: re.compile(r"MIG-(?:GPU-[0-9A-Za-z-]+/\d+/\d+|[0-9A-Za-z-]+)"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class VisibleDevices:
    """The devices that a process sees, in its order."""

    form: DeviceForm
    ids: tuple[str, ...] = ()

    @property
    def text(self) -> str | None:
        """The variable's value; None if it must not be set."""
        return None if self.form is DeviceForm.UNSET else ",".join(self.ids)


def parse_visible_devices(text: str | None, variable: str = VISIBLE_DEVICES) -> VisibleDevices:
    """Parse a variable's value; None if it is not set.

    Raises: ConfigError for an entry of unknown form, for mixed forms, and for a repeated entry: CUDA would
        silently drop the rest.
    """
    if text is None:
        return VisibleDevices(form=DeviceForm.UNSET)
    ids = tuple(word.strip() for word in text.split(","))
    if len(ids) == 1 and ids[0] in _NONE_WORDS:
        return VisibleDevices(form=DeviceForm.NONE)
    forms = {
        next((form for form, pattern in _FORMS.items() if pattern.fullmatch(entry)), None) for entry in ids
    }
    form = forms.pop()
    if form is None or forms or len({*ids}) < len(ids):
        raise ConfigError(
            f"{variable}={text} has an entry that is no name of a GPU, one twice, or names of several forms",
            allowed="indices, or UUIDs of GPUs, or UUIDs of MIG slices, each once",
            next_step="correct the variable, or unset it to see every GPU",
        )
    return VisibleDevices(form=form, ids=ids)


def part_variables(shares: Mapping[str, VisibleDevices]) -> dict[str, str]:
    """Return the variables of a process for the devices of its learner, engine, judges and environments."""
    own = shares.get("train") or shares.get("infer")
    # A learner's process must not see its engine's devices, unless both share them.
    variables = {VISIBLE_DEVICES: (own.text if own else None) or ""}
    others = {part: share for part, share in shares.items() if part in PART_DEVICES and share is not own}
    return variables | {PART_DEVICES[part]: share.text or "" for part, share in others.items()}


def share_out(visible: VisibleDevices, wanted: Mapping[str, int]) -> dict[str, VisibleDevices]:
    """Give each role its number of the visible devices, in the order of `wanted`.

    Devices beyond the sum stay unused.
    Raises: CheckRefused if there are fewer, or if one role would use several slices together: a process sees
        at most one slice, and NCCL does not connect them.
    """
    total = sum(wanted.values())
    if len(visible.ids) < total:
        by_role = ", ".join(f"{role} {number}" for role, number in wanted.items())
        raise CheckRefused(
            f"{count_gpus(total)} asked for ({by_role}), {VISIBLE_DEVICES} is {visible.text or visible.form}",
            allowed="as many visible GPUs as the roles ask for",
            next_step="ask for fewer, or for a job with more",
        )
    together = [role for role, number in wanted.items() if number > 1]
    if visible.form is DeviceForm.MIG_UUID and together:
        raise CheckRefused(
            f"{', '.join(together)} is to use several MIG slices together",
            allowed="one slice for a role: a process sees one at most, and NCCL connects none",
            next_step="give each role one slice, or ask for whole GPUs",
        )
    shares, first = {}, 0
    for role, number in wanted.items():
        ids = visible.ids[first : first + number]
        shares[role] = VisibleDevices(form=visible.form if ids else DeviceForm.NONE, ids=ids)
        first += number
    return shares


def count_gpus(number: int) -> str:
    """Format a number of GPUs with its verb, for a message."""
    return "1 GPU is" if number == 1 else f"{number} GPUs are"
