"""A known score of the same model, measured again before new ones are believed (EVA-4).

An engine can be wrong in ways that no single reply shows: a parallelism it cannot do, a kernel, a number
format. What it then says still parses and is scored. So a stored baseline is repeated first, greedily
and on its own examples; outside its interval, nothing is evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.engine.contract import Engine
from strop.errors import CheckRefused
from strop.evaluate.accuracy import EvalSettings, PlannedEvaluation, plan_evaluation, run_evaluation
from strop.evaluate.comparison import Interval, describe_difference, list_plan_differences
from strop.evaluate.result import EvalResult, refuse_invalid
from strop.tasks import Task
from strop.tasks.judging import Judge
from strop.tokenizer import Tokenizer

CHECK_NAME = "baseline_canary"
_OF_OTHERS = frozenset({"sampling", "num_samples", "replies_version"})
"""What the greedy replies and their verdicts do not depend on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCanary:
    """A baseline that this model, task and tokenizer can repeat."""

    baseline: EvalResult
    planned: PlannedEvaluation


def plan_canary(
    baseline: EvalResult,
    *,
    task: Task,
    tokenizer: Tokenizer,
    model_digest: str,
    max_positions: int | None = None,
) -> PlannedCanary:
    """Plan to repeat the greedy replies of a baseline.

    The number format that the weights are served in may differ: that it does no harm is part of what is
    shown.
    Raises: CheckRefused if the baseline is invalid, or of another model, task or protocol.
    """
    refuse_invalid(baseline)
    planned = plan_evaluation(
        task=task,
        tokenizer=tokenizer,
        settings=EvalSettings(
            run_seed=baseline.run_seed,
            step=baseline.step,
            split=baseline.split,
            prompt_format=baseline.prompt_format,
            num_examples=baseline.num_examples,
            max_reply_tokens=min(baseline.max_reply_tokens, task.limits.max_reply_tokens),
            pass_threshold=baseline.pass_threshold,
            dtype=baseline.dtype,
        ),
        model_digest=model_digest,
        max_positions=max_positions,
    )
    different = [
        found
        for found in list_plan_differences(baseline, planned.plan)
        # Results of before these fields were stored have none or nothing there.
        if found.key not in _OF_OTHERS and found.before not in (None, {})
    ]
    if different:
        shown = "; ".join(describe_difference(found, (" there", " now")) for found in different)
        raise CheckRefused(
            f"{CHECK_NAME}: the baseline cannot be repeated: {shown}",
            allowed="a valid result of this very model, with the task and the tokenizer as they were",
            next_step="evaluate the model by a setup that you trust, and give that result",
        )
    return PlannedCanary(baseline=baseline, planned=planned)


async def require_baseline(
    canary: PlannedCanary, engine: Engine, tokenizer: Tokenizer, *, judge: Judge | None = None
) -> Interval:
    """Repeat a baseline; return what was measured.

    Raises: CheckRefused with the expected and the measured score, if the one is outside the other's
        interval, or too little of it could be judged; EngineError like `run_evaluation`.
    """
    expected = canary.baseline.greedy
    measured = await run_evaluation(canary.planned, engine, tokenizer, judge=judge)
    refuse_invalid(measured)
    accuracy = measured.greedy.accuracy
    if accuracy is None or not expected.low <= accuracy <= expected.high:
        raise CheckRefused(
            f"{CHECK_NAME}: greedy accuracy of {measured.task} is {_percent(accuracy)} on"
            f" {measured.num_examples} examples, where {_percent(expected.accuracy)} is expected",
            allowed=f"{expected.low:.1%} to {expected.high:.1%}, the interval of the baseline",
            next_step="find out what the engine does otherwise: parallelism, number format, kernels;"
            " nothing was evaluated",
        )
    return Interval(estimate=accuracy, low=measured.greedy.low, high=measured.greedy.high)


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"
