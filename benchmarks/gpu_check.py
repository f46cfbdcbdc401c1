"""Whether strop works on this machine's GPU, and how fast: one command, no network, a few minutes.

Runs with the machine's own Python (`PYTHONPATH=src python -m benchmarks.gpu_check`). Each part is a process
of its own with a time limit, so whatever one does to the device or to itself, the others' results stay. The
exit code is 0 if every check passed. Without a GPU, or with `--device cpu`, the same code runs tiny models,
and says so: its speeds mean nothing then.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.util
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NEEDED = ("torch", "numpy", "transformers", "tokenizers", "safetensors", "pydantic", "jinja2", "psutil")
"""Modules that strop imports for what is run here."""
RESULTS_DIR = Path(__file__).parent / "results"

PARTS: Mapping[str, tuple[str, str, float]] = {
    # Name: module, function, and seconds that it may take.
    "device": ("benchmarks.gpu.device", "run_device", 60.0),
    "parity": ("benchmarks.gpu.parity", "run_parity", 240.0),
    "engine": ("benchmarks.gpu.engine", "run_engine", 150.0),
    "wires": ("benchmarks.gpu.wires", "run_wires", 150.0),
    "grpo-0.5b": ("benchmarks.gpu.grpo", "run_grpo_0_5b", 150.0),
    "grpo-1.5b": ("benchmarks.gpu.grpo", "run_grpo_1_5b", 180.0),
    "memory": ("benchmarks.gpu.memory", "run_head_memory", 120.0),
    "grpo-135m": ("benchmarks.gpu.grpo", "run_grpo_real", 120.0),
}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: all of {', '.join(PARTS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--model", type=Path, help="directory of a real model, such as SmolLM2-135M-Instruct")
    parser.add_argument("--quick", action="store_true", help="one measured step, fewer sizes")
    parser.add_argument("--out", type=Path, help="result file (default: gpu-<name>-<date>.json in results)")
    parsed = parser.parse_args(arguments)
    unknown = sorted(set(parsed.parts) - set(PARTS))
    if unknown:
        parser.error(f"unknown {', '.join(unknown)}. Allowed: {', '.join(PARTS)}.")
    return parsed


def missing_modules() -> list[str]:
    """Return which of the needed modules this Python lacks; nothing is imported."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def choose_parts(parsed: argparse.Namespace) -> list[str]:
    """Return the parts to run: those asked for, or all that can be run here."""
    if parsed.parts:
        return list(dict.fromkeys(["device", *parsed.parts]))
    return [name for name in PARTS if parsed.model or name != "grpo-135m"]


def describe(name: str, outcome: Mapping[str, Any]) -> list[str]:
    """Return what a part found as lines."""
    lines = [f"{name} ({outcome['seconds']:.0f} s)" + (f": {outcome['error']}" if outcome["error"] else "")]
    result = outcome["result"] or {"checks": [], "measures": [], "details": {}}
    if "left_out" in result["details"]:
        lines.append(f"  left out: {result['details']['left_out']}")
    lines += [
        f"  {'pass' if check['is_passed'] else 'FAIL'}  {check['name']:52} {check['found']}"
        for check in result["checks"]
    ]
    lines += [f"        {one['name']:52} {one['value']:.4g} {one['unit']}" for one in result["measures"]]
    return lines


def is_passed(outcome: Mapping[str, Any]) -> bool:
    """Whether a part ended by itself and all of its checks passed."""
    result = outcome["result"]
    return result is not None and all(check["is_passed"] for check in result["checks"])


def result_path(device_name: str) -> Path:
    """Return where a device's result of today is kept."""
    word = "".join(char if char.isalnum() else "-" for char in device_name.lower()).strip("-")
    return RESULTS_DIR / f"gpu-{word}-{dt.datetime.now(dt.UTC).date().isoformat()}.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; return 1 if one of them failed, 2 if nothing can be run."""
    parsed = parse_arguments(arguments)
    missing = missing_modules()
    if missing:
        print(
            f"this Python ({sys.executable}) lacks {', '.join(missing)}. Allowed: a Python with "
            f"{', '.join(NEEDED)}. Next: install them, or name another Python: "
            "make gpu-check GPU_PYTHON=/path/to/python3.",
            file=sys.stderr,
        )
        return 2
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Here: the check above must come first.
    from benchmarks.gpu.parts import choose_device, run_parts

    device = choose_device(parsed.device)
    if device == "cpu":
        print("no GPU is used: tiny models on the CPU, to show that the code runs; speeds mean nothing")
    begun_at = time.monotonic()
    outcomes = {}
    for name, outcome in run_parts(
        {name: PARTS[name] for name in choose_parts(parsed)},
        device=device,
        model_dir=parsed.model,
        is_quick=parsed.quick,
    ):
        outcomes[name] = outcome
        print("\n".join(describe(name, outcome)), flush=True)
    failed = [name for name, outcome in outcomes.items() if not is_passed(outcome)]
    facts = (outcomes["device"]["result"] or {"details": {}})["details"]
    document = {
        "taken_at": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "device": device,
        "is_quick": parsed.quick,
        "seconds": time.monotonic() - begun_at,
        "facts": facts,
        "parts": outcomes,
    }
    path = parsed.out or (result_path(facts.get("name", device)) if device == "cuda" else None)
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"wrote {path}")
    print(f"failed: {', '.join(failed)}" if failed else "every check passed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
