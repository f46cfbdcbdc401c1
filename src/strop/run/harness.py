"""Evaluating a model by a foreign harness, on the examples of our own tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from strop.errors import ConfigError, explain_refusal
from strop.evaluate.accuracy import refuse_trained
from strop.evaluate.harness import (
    LM_EVAL,
    HarnessJob,
    HarnessResult,
    find_protocol,
    refuse_small_model,
    refuse_unconfirmed_code,
    run_harness,
)
from strop.policy.footprint import read_model_size
from strop.rollout import Split
from strop.run.evaluation import EVALS_ROOT, EvalWish
from strop.run.inference import OpenedModel, read_askings, read_trained_ids
from strop.spec.task import TaskSpec
from strop.store.python_environment import ensure_environment
from strop.tasks import build_task


def evaluate_by_harness(
    names: Sequence[str],
    words: Sequence[str],
    split: Split,
    model: OpenedModel,
    wish: EvalWish,
    *,
    may_run_code: bool = False,
    say: Callable[[str], None],
) -> list[HarnessResult]:
    """Run lm-eval on tasks by the harness's names; its environment is made on first use.

    `words` are settings of our tasks behind them, as `read_askings` takes them. `may_run_code`: the user
    accepts that the harness runs what the model wrote in no sandbox.
    Raises: ConfigError for what the pinned protocol does not take, and for code that nobody accepted;
        CheckRefused if the examples were trained on, or the model is too small; StoreError if the
        environment cannot be made; EngineError if the harness fails.
    """
    if split is not Split.HELD_OUT or wish.num_samples or wish.pass_at or wish.pass_threshold is not None:
        raise ConfigError(
            explain_refusal(
                "--harness lm-eval with samples, pass@k, a threshold or the training split",
                allowed="its pinned protocol: greedy replies to held-out examples",
                next_step="leave them out, or leave --harness out",
            )
        )
    if len(set(names)) < len(names):
        raise ConfigError(
            explain_refusal(
                f"a task is named twice in {','.join(names)}",
                allowed="each task once",
                next_step="name it once: its result is one file",
            )
        )
    protocols = [find_protocol(name) for name in names]
    for protocol in protocols:
        refuse_unconfirmed_code(protocol, is_confirmed=may_run_code)
    own_tasks = list(dict.fromkeys(protocol.own_task for protocol in protocols))
    askings = dict(zip(own_tasks, read_askings(own_tasks, words, split), strict=True))
    jobs = []
    trained_ids = read_trained_ids(model.run_path)
    for protocol in protocols:
        asking = askings[protocol.own_task]
        _refuse_prompting(asking.spec.task)
        task = build_task(asking.spec.task.model_copy(update=dict(protocol.own_settings)))
        refuse_trained(task, split, task.examples(split), trained_ids)
        jobs.append(
            HarnessJob(
                protocol=protocol,
                task=task,
                model_path=model.path,
                model_digest=model.digest,
                step=model.step,
                dtype=asking.spec.model.dtype,
                max_positions=read_model_size(model.path).max_positions,
                num_examples=wish.num_examples,
            )
        )
    for job in jobs:
        refuse_small_model(job)
    python = ensure_environment(LM_EVAL, say=say)
    out_dir = wish.out_dir or EVALS_ROOT / f"lm-eval-{model.digest[:8]}"
    return [run_harness(job, Path(out_dir), python=python) for job in jobs]


def _refuse_prompting(task: TaskSpec) -> None:
    """Refuse settings that the harness, which asks in its own words, would not hear of."""
    if task.prompting:
        raise ConfigError(
            explain_refusal(
                f"--harness lm-eval with {' and '.join(f'task.{name}' for name in task.prompting)}",
                allowed="its pinned protocol, which has prompts and stop strings of its own",
                next_step="leave the settings out, or leave --harness out",
            )
        )
