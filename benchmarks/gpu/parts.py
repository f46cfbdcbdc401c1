"""Running each part of the check in a process of its own, within a time limit."""

from __future__ import annotations

import dataclasses
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

# Loaded here once: processes that are forked then need not load it again.
import transformers  # noqa: F401

from benchmarks.gpu.device import DevicePeaks
from benchmarks.gpu.result import Setting

_TAIL_LINES = 15
_STOP_LIMIT_S = 10.0


def choose_device(asked: str | None) -> str:
    """Return 'cuda' or 'cpu': what is asked for, or what there is."""
    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def run_parts(
    parts: Mapping[str, tuple[str, str, float]], *, device: str, model_dir: Path | None, is_quick: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run parts one after the other; yield each one's outcome when it ends.

    An outcome holds `seconds`, `error` (None if it ended by itself), `log` (its last lines of stderr, on
    errors) and `result` (None on errors).
    """
    peaks: dict[str, Any] | None = None
    for name, (module, function, limit_s) in parts.items():
        with tempfile.TemporaryDirectory(prefix="strop-gpu-") as folder:
            order = {
                "module": module,
                "function": function,
                "device": device,
                "is_quick": is_quick,
                "model_dir": None if model_dir is None else str(model_dir),
                "peaks": peaks,
                "limit_s": limit_s,
                "folder": folder,
            }
            outcome = _run_part(order, limit_s)
        if name == "device" and outcome["result"] is not None:
            names = {field.name for field in dataclasses.fields(DevicePeaks)}
            peaks = {key: value for key, value in outcome["result"]["details"].items() if key in names}
        yield name, outcome


def _run_part(order: dict[str, Any], limit_s: float) -> dict[str, Any]:
    # CUDA does not survive a fork; on a CPU forking saves loading everything again for each part.
    if order["device"] == "cuda":
        process: Any = multiprocessing.get_context("spawn").Process(target=_work, args=(order,))
    else:
        process = multiprocessing.get_context("fork").Process(target=_work, args=(order,))
    begun_at = time.monotonic()
    process.start()
    process.join(limit_s)
    error = None
    if process.is_alive():
        error = f"stopped after its limit of {limit_s:.0f} s"
        process.kill()
        process.join(_STOP_LIMIT_S)
    elif process.exitcode != 0:
        error = f"ended with code {process.exitcode}"
    result_path, log_path = Path(order["folder"]) / "result.json", Path(order["folder"]) / "log"
    log = log_path.read_text(errors="replace") if log_path.exists() else ""
    if error is not None:
        print("\n".join(log.splitlines()[-_TAIL_LINES:]), file=sys.stderr)
    return {
        "seconds": time.monotonic() - begun_at,
        "error": error,
        # Warnings too: a path that was given up is told there.
        "log": log.splitlines()[-60:],
        "result": json.loads(result_path.read_text()) if error is None else None,
    }


def _work(order: dict[str, Any]) -> None:
    """Run one part in this process; its traceback, if any, goes to the log."""
    folder = Path(order["folder"])
    log = (folder / "log").open("w", buffering=1)
    # Both: libraries write to the descriptor, Python to its own stream.
    os.dup2(log.fileno(), 2)
    sys.stderr = log
    setting = Setting(
        device=torch.device(order["device"]),
        is_quick=order["is_quick"],
        work_dir=folder,
        model_dir=None if order["model_dir"] is None else Path(order["model_dir"]),
        peaks=None if order["peaks"] is None else DevicePeaks(**order["peaks"]),
        limit_s=order["limit_s"],
    )
    if setting.device.type == "cpu":
        torch.set_num_threads(1)  # Tiny models gain nothing from more.
    run = getattr(importlib.import_module(order["module"]), order["function"])
    found = dataclasses.asdict(run(setting))
    (folder / "result.json").write_text(json.dumps(found))
