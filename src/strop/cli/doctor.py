"""`strop doctor`: this machine's resources, and tests of its sandboxes."""

from __future__ import annotations

import os
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
        help="Only remove what your dead runs and killed sandboxes left on this machine, and the secrets of"
        " ended jobs.",
    ),
]


Sandboxes = Annotated[
    bool,
    typer.Option(
        "--sandboxes",
        help="Instead try every kind of sandbox: its isolation, its speed, and how to improve it. Fails if"
        " one breaks a promise.",
    ),
]


def doctor(
    context: typer.Context, json: Json = False, clean: Clean = False, sandboxes: Sandboxes = False
) -> None:
    """Diagnose this machine: hardware, software, GPU users; measure its speed for `strop plan`."""
    from strop.hardware import clear_leftovers
    from strop.launch.sites import list_run_roots
    from strop.launch.status import clear_secrets
    from strop.run.doctor import diagnose
    from strop.sandbox.janitor import clear_abandoned

    output: Output = context.obj
    if sandboxes:
        _diagnose_sandboxes(output, is_json=json)
        return
    if clean:
        cleared = clear_leftovers()
        homes = clear_secrets([Path("runs"), *list_run_roots(Path.cwd(), os.environ)], os.environ)
        abandoned = clear_abandoned()
        if json:
            of_jobs = [{"home": str(home), "removed": ["secrets"]} for home in homes]
            ended = [{"ended": pid} for pid in cleared]
            output.give_json([*ended, *of_jobs, *({"sandbox": line} for line in abandoned)])
            return
        for line in abandoned:
            output.give(line)
        for pid in cleared:
            output.give(f"ended process {pid} of a dead run")
        for home in homes:
            output.give(f"job {home} had ended; removed its secrets")
        if not cleared and not homes and not abandoned:
            output.give("dead runs have left nothing")
        return
    diagnosis = diagnose(Path.cwd() / "runs")
    if json:
        output.give_json(asdict(diagnosis))
        return
    for columns, rows in _tables(diagnosis):
        if rows:
            output.give_table(columns, rows)


def _tables(diagnosis: Diagnosis) -> list[tuple[tuple[str, ...], list[tuple[object, ...]]]]:
    """Return the columns and rows of each table."""
    machine, speed = diagnosis.machine, diagnosis.calibration
    facts: list[tuple[object, ...]] = [
        ("processor", machine.cpu_name),
        ("cores", f"{machine.num_physical_cores} physical, {machine.num_logical_cpus} logical"),
        ("memory", f"{_gigabytes(machine.memory_bytes)}, {_gigabytes(machine.free_memory_bytes)} free"),
        ("fast bf16", "yes" if machine.has_fast_bf16 else "no"),
        ("GPUs", ", ".join(gpu.name for gpu in machine.gpus) or "none"),
        ("product, float32", f"{speed.gemm_fp32_gflops:.0f} GFLOP/s with {speed.num_threads} threads"),
        ("product, bfloat16", f"{speed.gemm_bf16_gflops:.0f} GFLOP/s with {speed.num_threads} threads"),
        ("copy", f"{speed.copy_gb_per_s:.1f} GB/s"),
    ]
    devices: list[tuple[object, ...]] = [
        (
            use.device.uuid,
            f"{use.device.index}, a MIG slice" if use.device.is_slice else use.device.index,
            use.device.name,
            _gigabytes(use.device.free_memory_bytes),
            _gigabytes(use.device.memory_bytes),
            "; ".join([*([f"held by {use.holder}"] if use.holder else []), *map(str, use.device.users)])
            or "nobody",
        )
        for use in diagnosis.devices
    ]
    return [
        (("machine", "found"), facts),
        (
            ("check", "ok?", "detail"),
            [(check.name, "ok" if check.is_ok else "no", check.detail) for check in diagnosis.checks],
        ),
        (("GPU", "index", "name", "free", "of", "in use by"), devices),
        (("disk", "detail"), [(disk.path, str(disk).partition(": ")[2]) for disk in diagnosis.disks]),
    ]


def _gigabytes(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 1e9:.1f} GB"


def _diagnose_sandboxes(output: Output, *, is_json: bool) -> None:
    """Try every kind of sandbox on this machine: its isolation and speed. Fails if one breaks a promise."""
    import asyncio

    from strop.sandbox.doctor import diagnose_sandboxes

    diagnosis = asyncio.run(diagnose_sandboxes())
    broken = [backend for backend in diagnosis.backends if backend.broken]
    if is_json:
        output.give_json(asdict(diagnosis))
        raise typer.Exit(1 if broken else 0)
    rows: list[tuple[object, ...]] = []
    for backend in diagnosis.backends:
        if backend.isolation is None:
            rows.append((backend.name, "none", *[None] * 9))
            continue
        reached = backend.isolation
        guards = [guard.value for guard in (reached.memory, reached.pids, reached.cpu, reached.disk)]
        times = [
            f"{seconds * 1000:.0f} ms" for seconds in (backend.start_s, backend.command_s, backend.stop_s)
        ]
        network = reached.network + (" or a list" if backend.has_list else "")
        probes = f"all but {', '.join(backend.not_held)}" if backend.not_held else "all"
        rows.append((backend.name, reached.level.word, probes, *guards, network, *times))
    limits = ("memory", "processes", "CPU time", "disk")
    output.give_table(
        ("backend", "level", "holds probes", *limits, "network", "start", "command", "stop"), rows
    )
    output.give_table(("this host", "has"), list(diagnosis.facts.items()))
    for backend in diagnosis.backends:
        if backend.refusal:
            output.say(f"{backend.name}: {backend.refusal}")
    for sentence in diagnosis.advice:
        output.say(f"for more: {sentence}")
    for backend in broken:
        output.say(f"{backend.name} does not hold what its record promises: {', '.join(backend.broken)}")
    raise typer.Exit(1 if broken else 0)
