"""An arm that does no work and answers at once: for testing the harness.

Settings: `step_s` and `scored_tok` are the figures it reports; `fails_at` is the step at which it
ends without an answer; `helper_s` starts a process that sleeps so long.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.arms.worker import Channel, read_order
from benchmarks.prompts import read_prompts, step_prompts


def start_helper(sleep_s: float | None) -> int | None:
    """Start a process that does nothing for a while; return its id."""
    if sleep_s is None:
        return None
    return subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({sleep_s})"]).pid


def main() -> None:
    """Serve steps until told to quit."""
    channel = Channel()
    order = read_order()
    prompts = read_prompts(order.prompts_path)
    channel.ready(helper_pid=start_helper(order.settings.get("helper_s")))
    # What a library prints must not reach the harness.
    print("noise on standard output")  # noqa: T201
    step = 0
    while True:
        channel.wait_for_step()
        if step == order.settings.get("fails_at"):
            raise SystemExit("the dummy fails here, as ordered")
        answers = [prompt.answer for prompt in step_prompts(prompts, order.case, step)]
        channel.reply(
            {
                "step_s": order.settings["step_s"],
                "scored_tok": order.settings["scored_tok"],
                "step": step,
                "answers": answers,
            }
        )
        step += 1


if __name__ == "__main__":
    main()
