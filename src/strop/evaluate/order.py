"""How hard each example is for a model, as a file that a curriculum can follow."""

from __future__ import annotations

import json
from pathlib import Path

from strop.evaluate.result import EvalResult, refuse_invalid
from strop.io import write_bytes_atomically


def write_order(result: EvalResult, path: Path) -> None:
    """Write the solved share of each example as JSON lines, the easiest first.

    The first line says task, version, split and model. Each further one has `example_id`, `solved_frac`
    (in [0, 1]) and `num_samples`, the judged rollouts behind it: sampled ones where there are any,
    greedy ones otherwise. Ties stand in the order of their ids. Examples that could not be judged have
    `solved_frac` null and stand last: left out, their ids would not match the task's.

    Raises: CheckRefused if the result is invalid; StoreError if the file cannot be written.
    """
    refuse_invalid(result)
    score = result.greedy if result.sampled is None else result.sampled
    header = {
        "task": result.task,
        "task_version": result.task_version,
        "split": result.split.value,
        "model_digest": result.model_digest,
        "num_examples": result.num_examples,
    }

    def rank(example_id: str) -> tuple[bool, float, str]:
        solved_frac = score.by_example[example_id].solved_frac
        return solved_frac is None, -(solved_frac or 0.0), example_id

    rows = [
        {
            "example_id": example_id,
            "solved_frac": score.by_example[example_id].solved_frac,
            "num_samples": score.by_example[example_id].num_judged,
        }
        for example_id in sorted(score.by_example, key=rank)
    ]
    text = "".join(json.dumps(line) + "\n" for line in (header, *rows))
    write_bytes_atomically(path, text.encode())
