"""Compares settings of one rival, to find the ones it is fastest with.

`python -m benchmarks.try_settings trl grpo-32-forced '{}' '{"attention": "eager"}'`

One worker at a time, so this is no comparison between systems: it prints the best of a few steps
after the warm-up of each setting, in wall and in processor seconds. Processor seconds are the
steadier figure where other programs run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES, Case
from benchmarks.harness import Arm, ArmFailed, ArmProcess, Protocol, Record
from benchmarks.machine import load_average
from benchmarks.prompts import make_prompts, write_prompts
from benchmarks.rivals import rival_arm, strop_arm
from benchmarks.run import MODEL
from strop.store import get_model


def try_one(arm: Arm, case: Case, protocol: Protocol) -> list[Record]:
    """Run the warm-ups and the steps of one arm; return all records.

    Raises: ArmFailed if the worker ends early, for example because a setting is refused.
    """
    num_steps = protocol.num_warm_ups + protocol.num_pairs
    with tempfile.TemporaryDirectory(prefix="strop-bench-") as folder:
        work_dir = Path(folder)
        write_prompts(work_dir / "prompts.json", make_prompts(case, num_steps))
        worker = ArmProcess(arm, case, protocol, work_dir)
        try:
            worker.wait_until_ready()
            return [worker.step() for _ in range(num_steps)]
        finally:
            worker.close()


def _describe(settings: dict[str, Any], records: Sequence[Record]) -> str:
    best = min(records, key=lambda record: float(record["step_s"]))
    parts = {name: best.get(name) for name in ("step_s", "cpu_s", "t_gen", "t_learn", "tok_per_s")}
    shown = "  ".join(f"{name} {value:.2f}" for name, value in parts.items() if value is not None)
    memory_gb = max(int(record["peak_bytes"]) for record in records) / 1e9
    return f"{json.dumps(settings)}: {shown}  peak {memory_gb:.1f} GB  load {load_average():.1f}"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.try_settings", description=__doc__)
    parser.add_argument("arm", help="trl, vllm-compiled, vllm-eager or strop")
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("settings", nargs="+", help="JSON tables, one for each try")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--warm-ups", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default=MODEL)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Try each setting in turn; print one line each."""
    parsed = parse_arguments(arguments)
    protocol = Protocol(
        model_dir=Path(get_model(parsed.model).path),
        num_pairs=parsed.steps,
        num_warm_ups=parsed.warm_ups,
        threads=parsed.threads,
    )
    arm = strop_arm() if parsed.arm == "strop" else rival_arm(parsed.arm, parsed.threads)
    for text in parsed.settings:
        settings = {**arm.settings, **json.loads(text)}
        try:
            records = try_one(dataclasses.replace(arm, settings=settings), CASES[parsed.case], protocol)
        except ArmFailed as error:
            print(f"{text}: refused\n{error}", flush=True)
            continue
        print(_describe(settings, records[parsed.warm_ups :]), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
