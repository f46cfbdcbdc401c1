"""`strop doctor`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strop.cli.arguments import Json
from strop.cli.output import Output

if TYPE_CHECKING:
    from strop.run.doctor import Diagnosis

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
    for columns, rows in _tables(found):
        if rows:
            output.give_table(columns, rows)
    if any(holding.state == "dead" for holding in found.holdings):
        output.say("dead runs have left something; `strop doctor --clean` ends exactly that")
    for pid, lease_id in found.strays.items():
        output.say(
            f"process {pid} carries lease {lease_id}, which is not there; end it yourself if it is old"
        )


def _tables(found: Diagnosis) -> list[tuple[tuple[str, ...], list[tuple[object, ...]]]]:
    """Return columns and rows of what is shown."""
    machine, speed = found.machine, found.calibration
    facts: list[tuple[object, ...]] = [
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
    devices: list[tuple[object, ...]] = [
        (
            use.device.uuid,
            f"{use.device.gpu.index}, a MIG slice" if use.device.is_slice else use.device.gpu.index,
            use.device.gpu.name,
            _gigabytes(use.device.free_memory_bytes),
            _gigabytes(use.device.memory_bytes),
            "; ".join([*([f"held by {use.holder}"] if use.holder else []), *use.users]) or "nobody",
        )
        for use in found.devices
    ]
    leases: list[tuple[object, ...]] = [
        (
            one.lease.lease_id,
            one.lease.run,
            one.lease.attempt,
            one.state.value,
            ", ".join(one.lease.gpus) or "none",
            ", ".join(map(str, one.processes)) or "none",
        )
        for one in found.holdings
    ]
    return [
        (("machine", "found"), facts),
        (
            ("check", "ok?", "detail"),
            [(check.name, "ok" if check.is_ok else "no", check.detail) for check in found.checks],
        ),
        (("GPU", "index", "name", "free", "of", "in use by"), devices),
        (("lease", "run", "attempt", "state", "GPUs", "processes"), leases),
        (("disk", "detail"), [(disk.path, str(disk).partition(": ")[2]) for disk in found.disks]),
    ]


def _gigabytes(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 1e9:.1f} GB"
