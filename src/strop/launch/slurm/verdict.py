"""The verdict on an attempt, which its batch script asks for once all agents have ended.

    python -m strop.launch.slurm.verdict --trial DIR --job DIR --attempt NAME --number K ... NODE [NODE ...]

It writes `verdict.json`, and prints one line for the script: the exit code, and what follows. `end`; `again`:
requeue the job; `elsewhere NODES`: requeue it without these nodes, each of which refused or ran no agent.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from strop.errors import EXIT_INTERRUPTED, EXIT_REFUSED
from strop.launch.attempts import MILD, VERDICT_NAME, combine, read_exit_code, write_verdict
from strop.launch.contract import TrialPlan
from strop.launch.job_dir import ATTEMPTS_FOLDER, read_plan
from strop.launch.secrets import remove_secrets


def conclude(args: argparse.Namespace) -> str:
    """Write the verdict, remove the secrets of a job that ends, and return the line for the script."""
    plan, nodes = read_plan(args.job), list(enumerate(args.nodes))
    attempt_path = args.trial / ATTEMPTS_FOLDER / args.attempt
    codes = [read_exit_code(attempt_path / "exit" / str(node)) for node, _ in nodes]
    silent = [node for node, _ in nodes if codes[node] is None]
    killed = [node for node in silent if (attempt_path / str(node) / "agent.log").exists()]
    absent = [node for node in silent if node not in killed]
    unfit = [node for node, _ in nodes if _read(attempt_path / f"end-{node}.json").get("is_node_at_fault")]
    if len(absent) < len(nodes):
        # Agents run on other nodes, so these are at fault, and not the job.
        unfit += absent
    # A signal was Slurm's, which decides then. So it has where the job lives elsewhere by now.
    decides = args.newest_life in {"", args.life} and not args.signal
    may_follow = decides and not args.refusal and args.number < plan.num_past + plan.max_requeue
    code, word = combine(codes), "end"
    if may_follow and (killed or code == EXIT_INTERRUPTED):
        word = "again"
    elif may_follow and unfit and all(one is None or one in MILD for one in codes):
        code, word = EXIT_REFUSED, "elsewhere"
    write_verdict(
        attempt_path,
        number=args.number,
        exit_code=None if word == "elsewhere" or (killed and (word == "again" or not decides)) else code,
        signal=args.signal,
        started_at=args.began,
        ended_at=time.time(),
        nodes=tuple(args.nodes),
        cause="\n".join(_explain(args, killed, absent)),
    )
    # A silent controller may be starting the job again.
    if decides and args.newest_life and word == "end" and all(map(_is_over, plan.trials)):
        remove_secrets(args.job)
    return " ".join([str(code), word, ",".join(args.nodes[node] for node in sorted(unfit))]).strip()


def _explain(args: argparse.Namespace, killed: list[int], absent: list[int]) -> list[str]:
    """Return the causes that no agent could write."""
    causes = [f"no other node can run it: {args.refusal.strip()}"] if args.refusal else []
    if killed:
        causes.append(f"the agent on {', '.join(args.nodes[node] for node in killed)} was killed")
    if absent:
        names = ", ".join(args.nodes[node] for node in absent)
        causes.append(f"no agent began on {names}: read the role `scheduler` of `strop logs`")
    return causes


def _is_over(trial: TrialPlan) -> bool:
    """Whether a trial has ended, and does not live again."""
    verdicts = [_read(path) for path in (Path(trial.path) / ATTEMPTS_FOLDER).glob(f"*/{VERDICT_NAME}")]
    newest = max(verdicts, key=lambda found: found.get("number", -1), default={})
    return newest.get("exit_code") not in {None, EXIT_INTERRUPTED}


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def main(arguments: list[str] | None = None) -> int:
    """Conclude one attempt."""
    parser = argparse.ArgumentParser(prog="strop.launch.slurm.verdict")
    parser.add_argument("--trial", type=Path, required=True, help="the run's directory")
    parser.add_argument("--job", type=Path, required=True, help="the folder of what was submitted")
    parser.add_argument("--attempt", required=True, help="name of the attempt's folder")
    parser.add_argument("--number", type=int, required=True, help="number of earlier attempts of it")
    parser.add_argument("--began", type=float, required=True, help="Unix seconds")
    parser.add_argument("--signal", default="", help="what the script heard")
    parser.add_argument("--life", required=True, help="how often Slurm had started the job again")
    parser.add_argument("--newest-life", default="", help="how often it has by now; empty: it is silent")
    parser.add_argument("--refusal", default="", help="what sbatch says of the job without its bad nodes")
    parser.add_argument("nodes", nargs="+", help="names, in the order of their numbers")
    sys.stdout.write(f"{conclude(parser.parse_args(arguments))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
