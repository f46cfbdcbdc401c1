"""Scores that others can repeat: lm-eval 0.4.13 in its own process, on the examples of one of our tasks.

The protocol is pinned: the harness's own prompt, few-shot examples, stops and filters; greedy, seed 42,
and a budget that cuts no solution. The rows are those of our task, so what the harness scores can be
told apart by example id. Nothing is fetched: the process is offline.

Tried: lm_eval 0.4.13 with the `hf` model on CPU. Not covered: other engines.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from strop.errors import EngineError, explain_refusal
from strop.evaluate.harness.environment import LM_EVAL
from strop.evaluate.harness.result import HarnessJob, HarnessResult, read_output
from strop.evaluate.harness.staging import (
    harness_command,
    harness_variables,
    stage_rows,
    too_few_positions,
    write_code_metric,
    write_task_files,
)
from strop.hardware.process import spawn, terminate
from strop.io import write_bytes_atomically

_GRACE_S = 5.0
_POLL_S = 3600.0


def run_harness(job: HarnessJob, out_dir: Path, *, python: Path) -> HarnessResult:
    """Run the harness and write `lm-eval-<task>-step-N.json`, its log and its samples into a folder.

    `python` is the interpreter of the harness's environment.
    Raises: DataError if the harness cannot ask an example; EngineError if it fails; CorruptRecord if it
        says something else than expected; CheckRefused if prompts were cut; StoreError if the disk fails.
    """
    stem = out_dir / f"lm-eval-{job.protocol.task}-step-{job.step:06d}"
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="strop-lm-eval-") as name:
        work_dir = Path(name)
        data_digest = stage_rows(job, work_dir)
        names = write_task_files(job.protocol, work_dir, LM_EVAL.path)
        if job.protocol.runs_code:
            write_code_metric(work_dir)
        _run(job, work_dir, stem.with_suffix(".log"), python)
        output = read_output(job, work_dir / "out", names, data_digest)
    if output.longest_prompt_tokens + job.protocol.max_reply_tokens > job.max_positions:
        raise too_few_positions(job, f"and a prompt of {output.longest_prompt_tokens} tokens")
    write_bytes_atomically(stem.with_suffix(".samples.jsonl"), output.samples)
    text = json.dumps(output.result.model_dump(mode="json"), indent=1)
    write_bytes_atomically(stem.with_suffix(".json"), (text + "\n").encode())
    return output.result


def _run(job: HarnessJob, work_dir: Path, log_path: Path, python: Path) -> None:
    child = spawn(harness_command(job, work_dir, python), log_path, harness_variables(work_dir), cwd=work_dir)
    try:
        while (exit_code := child.wait(_POLL_S)) is None:
            pass
    finally:
        terminate(child, _GRACE_S)
    if exit_code:
        raise EngineError(
            explain_refusal(
                f"lm-eval ended with {exit_code} on {job.protocol.task}: {child.tail(5)}",
                allowed="a run that ends with 0",
                next_step=f"read {log_path}",
            )
        )
