"""`strop doctor`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strop.cli.arguments import Json
from strop.cli.output import Output

if TYPE_CHECKING:
    from strop.run.doctor import DeviceUse, Diagnosis, Holding

Clean = Annotated[
    bool,
    typer.Option(
        "--clean",
        help="Only clean up what your dead runs left on this machine, and list it.",
    ),
]


def doctor(context: typer.Context, json: Json = False, clean: Clean = False) -> None:
    """Diagnose this machine: hardware, software, GPU users; measure its speed for `strop plan`."""
    from strop.hardware import clear_leftovers
    from strop.run.doctor import diagnose

    output: Output = context.obj
    if clean:
        cleared = clear_leftovers()
        if json:
            output.give_json([asdict(one) for one in cleared])
            return
        for one in cleared:
            output.give(str(one))
        if not cleared:
            output.give("dead runs have left nothing")
        return
    found = diagnose(Path.cwd() / "runs")
    if json:
        output.give_json(asdict(found))
        return
    output.give_table(("machine", "found"), _machine_rows(found))
    checks = [(check.name, "ok" if check.is_ok else "no", check.detail) for check in found.checks]
    output.give_table(("check", "ok?", "detail"), checks)
    if found.devices:
        columns = ("GPU", "index", "name", "free", "of", "in use by")
        output.give_table(columns, [_device_row(use) for use in found.devices])
    if found.holdings:
        columns = ("lease", "run", "attempt", "state", "GPUs", "processes")
        output.give_table(columns, [_holding_row(holding) for holding in found.holdings])
    disks = [(disk.path, str(disk).partition(": ")[2]) for disk in found.disks]
    output.give_table(("disk", "detail"), disks)
    if any(holding.state == "dead" for holding in found.holdings):
        output.say("dead runs have left something; `strop doctor --clean` ends exactly that")
    for pid, lease_id in found.strays.items():
        output.say(
            f"process {pid} carries lease {lease_id}, which is not there; end it yourself if it is old"
        )


def _machine_rows(found: Diagnosis) -> list[tuple[str, object]]:
    machine, speed = found.machine, found.calibration
    return [
        ("processor", machine.cpu_name),
        ("cores", f"{machine.num_physical_cores} physical, {machine.num_logical_cpus} logical"),
        ("memory", f"{_gigabytes(machine.memory_bytes)}, {_gigabytes(machine.free_memory_bytes)} free"),
        ("fast bf16", "yes" if machine.has_fast_bf16 else "no"),
        ("GPUs", ", ".join(gpu.name for gpu in machine.gpus) or "none"),
        ("product, float32", f"{speed.gemm_fp32_gflops:.0f} GFLOP/s with {speed.num_threads} threads"),
        ("product, bfloat16", f"{speed.gemm_bf16_gflops:.0f} GFLOP/s with {speed.num_threads} threads"),
        ("copy", f"{speed.copy_gb_per_s:.1f} GB/s"),
        ("ports", f"{len(found.ports)} are listened on"),
    ]


def _device_row(use: DeviceUse) -> tuple[object, ...]:
    device = use.device
    used_by = [*([f"held by {use.holder}"] if use.holder else []), *use.users]
    return (
        device.uuid,
        f"{device.gpu.index}, a MIG slice" if device.is_slice else device.gpu.index,
        device.gpu.name,
        _gigabytes(device.free_memory_bytes),
        _gigabytes(device.memory_bytes),
        "; ".join(used_by) or "nobody",
    )


def _holding_row(holding: Holding) -> tuple[object, ...]:
    lease = holding.lease
    return (
        lease.lease_id,
        lease.run,
        lease.attempt,
        holding.state.value,
        ", ".join(lease.gpus) or "none",
        ", ".join(map(str, holding.processes)) or "none",
    )


def _gigabytes(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 1e9:.1f} GB"
