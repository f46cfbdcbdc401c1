"""`python -m strop.launch.node --trial DIR --job DIR --attempt NAME --number K --node I --num-nodes N`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path

from strop.launch.attempts import SIGNAL_BASE
from strop.launch.node.agent import run_node
from strop.launch.node.environment import RAY_PORT, TERM_GRACE_S, NodeTask


def main(arguments: list[str] | None = None) -> int:
    """Run the agent of one node; return its exit code."""
    parser = argparse.ArgumentParser(prog="strop.launch.node", description=__doc__)
    parser.add_argument("--trial", type=Path, required=True, help="the run's directory")
    parser.add_argument("--job", type=Path, required=True, help="the folder of what was submitted")
    parser.add_argument("--attempt", required=True, help="name of the attempt's folder")
    parser.add_argument("--number", type=int, required=True, help="number of earlier attempts of it")
    parser.add_argument("--node", type=int, default=0, help="index of this node, from 0")
    parser.add_argument("--node-variable", help="environment variable with this index")
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--part", choices=("main", "cpu"), default="main")
    parser.add_argument("--grace", type=float, default=120.0, help="seconds after the announcement of an end")
    parser.add_argument("--term-grace", type=float, default=TERM_GRACE_S, help="seconds after SIGTERM")
    parser.add_argument("--address", default="127.0.0.1", help="of node 0, as other nodes reach it")
    parser.add_argument("--ray-port", type=int, default=RAY_PORT, help="of Ray's head, on node 0")
    parser.add_argument("--tied", action="store_true", help="end at once when standard input ends")
    args = parser.parse_args(arguments)
    if args.tied:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    node = int(os.environ[args.node_variable]) if args.node_variable else args.node
    return run_node(
        NodeTask(
            job_path=args.job,
            trial_path=args.trial,
            attempt=args.attempt,
            number=args.number,
            node=node,
            num_nodes=args.num_nodes,
            part=args.part,
            grace_s=args.grace,
            term_grace_s=args.term_grace,
            address=args.address,
            ray_port=args.ray_port,
        )
    )


def _end_with_parent() -> None:
    # Without a first byte nothing is connected to standard input, and its end says nothing.
    if os.read(0, 1):
        os.read(0, 1)
        os._exit(SIGNAL_BASE + signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
