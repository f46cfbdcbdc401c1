"""A training of numbers, for emulator tests: deterministic, saves as strop saves, and continues exactly.

Run as `python trainee.py RUN_DIR`; what it does besides stands in variables TRAINEE_*.
"""

# ruff: noqa: T201
from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from strop.io.atomic import AtomicDirectory, is_complete, verify_directory


def setting(name: str, default: float) -> float:
    return float(os.environ.get(f"TRAINEE_{name}", default))


def advance(state: int, step: int) -> int:
    return (state * 6_364_136_223_846_793_005 + step) % 2**64


def main() -> int:
    run = Path(sys.argv[1])
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    states = [path for path in (run / "checkpoints").glob("step-*") if is_complete(path)]
    step, state = 0, 1
    if states:
        newest = max(states)
        verify_directory(newest)
        saved = json.loads((newest / "state.json").read_text())
        step, state = saved["step"], saved["state"]
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines()[:step] if metrics.exists() else []
    metrics.write_text("".join(f"{line}\n" for line in lines))
    record = {"name": "small-try", "spec_digest": "d", "created_at": 1.0}
    (run / "run.json").write_text(json.dumps(record))
    print(f"begin at step {step}", flush=True)
    if os.environ.get("TRAINEE_SECRET_PROBE"):
        print("secret is " + ("here" if os.environ.get("TOKEN") else "absent"), flush=True)
        print(f"the value is {os.environ.get('TOKEN')}", flush=True)
    while step < setting("STEPS", 6):
        step, state = step + 1, advance(state, step + 1)
        with metrics.open("a") as file:
            file.write(json.dumps({"step": step, "state": state}) + "\n")
        time.sleep(setting("STEP_S", 0.1))
        with AtomicDirectory(run / "checkpoints" / f"step-{step:06d}") as partial:
            (partial / "state.json").write_text(json.dumps({"step": step, "state": state}))
            (partial / "weights.bin").write_bytes(b"w" * int(setting("BYTES", 1000)))
        if told:
            print(f"saved step {step}", flush=True)
            return 75
    (run / "run.json").write_text(json.dumps({**record, "finished_at": 2.0}))
    print("done", flush=True)
    # Where another process is to come that far first.
    while (awaited := os.environ.get("TRAINEE_AWAIT")) and not Path(awaited).exists():
        time.sleep(0.05)
    return 0


if __name__ == "__main__":
    sys.exit(main())
