"""`strop doctor`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from strop.cli.arguments import Json
from strop.cli.output import Output


def doctor(context: typer.Context, json: Json = False) -> None:
    """Say what this machine has and lacks, and measure its speed for `strop plan`."""
    from strop.launch.doctor import diagnose

    output: Output = context.obj
    found = diagnose(Path.cwd() / "runs")
    if json:
        output.give_json(asdict(found))
        return
    machine, speed = found.machine, found.calibration
    memory = "unknown" if machine.memory_bytes is None else f"{machine.memory_bytes / 1e9:.1f} GB"
    rows: list[tuple[str, object]] = [
        ("processor", machine.cpu_name),
        ("cores", f"{machine.num_physical_cores} physical, {machine.num_logical_cpus} logical"),
        ("memory", memory),
        ("fast bf16", "yes" if machine.has_fast_bf16 else "no"),
        ("GPUs", ", ".join(gpu.name for gpu in machine.gpus) or "none"),
        ("product, float32", f"{speed.gemm_fp32_gflops:.0f} GFLOP/s with {speed.num_threads} threads"),
        ("product, bfloat16", f"{speed.gemm_bf16_gflops:.0f} GFLOP/s with {speed.num_threads} threads"),
        ("copy", f"{speed.copy_gb_per_s:.1f} GB/s"),
    ]
    output.give_table(("machine", "found"), rows)
    checks = [(check.name, "ok" if check.is_ok else "no", check.detail) for check in found.checks]
    output.give_table(("check", "ok?", "detail"), checks)
