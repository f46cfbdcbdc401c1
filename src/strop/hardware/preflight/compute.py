"""Level b: whether each GPU multiplies, and gives back what was copied to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from strop.hardware.allocation import RoleDevices
from strop.hardware.findings import Finding
from strop.hardware.preflight.probes import FOLDER_NAME, await_probes, start_probe
from strop.hardware.preflight.request import PreflightRequest
from strop.hardware.visible_devices import VISIBLE_DEVICES

CHECKSUM = 32_212_178_127
"""What `gpu_probe` prints if all is well: the weighted sum of its product."""
PROBE_LIMIT_S = 60.0
"""Importing torch from a cold network disk takes most of it."""


def check_compute(request: PreflightRequest, *, limit_s: float = PROBE_LIMIT_S) -> list[Finding]:
    """Let every GPU of the allocation compute at once, each in a process that sees it alone.

    A process that sees one device works with slices too, of which it could not use a second.
    """
    if request.allocation is None or not request.num_gpus:
        return []
    named = [pair for role in request.allocation.roles.values() for pair in _list_devices(role)]
    probes = []
    for number, (_, variables) in enumerate(named):
        words = ["--device", request.device]
        log_path = request.run_path / FOLDER_NAME / f"{request.node}-gpu-{number}.log"
        probes.append(start_probe(f"{__package__}.gpu_probe", words, log_path, variables))
    answers = await_probes(probes, limit_s)
    return [
        finding
        for (uuid, _), answer in zip(named, answers, strict=True)
        for finding in _judge(uuid, answer, limit_s)
    ]


def _list_devices(role: RoleDevices) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield each device of a role by UUID, or by what it is called, and the variables that show it alone."""
    for number, entry in enumerate(role.visible.ids):
        uuid = role.uuids[number] if role.uuids else entry
        yield uuid, {**role.variables, VISIBLE_DEVICES: entry}


def _judge(uuid: str, answer: dict[str, Any] | None, limit_s: float) -> Iterator[Finding]:
    next_step = "exclude this node and tell its administrators"
    if answer is None or "error" in answer:
        said = f"it did not answer within {limit_s:g} s" if answer is None else answer["error"]
        yield Finding(
            code="gpu_compute",
            given=f"a small product could not be computed: {said}",
            allowed="a GPU that computes",
            next_step=next_step,
            where=uuid,
        )
    elif answer["checksum"] != CHECKSUM:
        yield Finding(
            code="gpu_checksum",
            given=f"a product of known numbers has the checksum {answer['checksum']}",
            allowed=f"{CHECKSUM}, which is exact in float32",
            next_step=next_step,
            where=uuid,
        )
    elif not answer["is_copied"]:
        yield Finding(
            code="gpu_copy",
            given="16 MiB came back from the GPU with other bytes",
            allowed="the bytes that went there",
            next_step=next_step,
            where=uuid,
        )
