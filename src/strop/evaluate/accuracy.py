"""Evaluate a model on a task, greedily and by sampling, with the same rollouts as training.

The task renders, stops, limits and judges; nothing here writes a prompt or parses an answer. `scoring`
decides what counts as solved, `shards` stores the replies.

Truncated replies: a reply cut at the task's own budget counts as it was judged. If these settings or the
run file's `task.max_reply_tokens` lowered the budget, a cut says something about the budget; above a small
share the result is then invalid.

The canary: an engine can be wrong in ways that no single reply shows, through unsupported parallelism, a
kernel or a number format. Its replies still parse and are scored. So a stored result of the same model is
repeated first, greedily and on its own examples; outside its interval, nothing is evaluated (EVA-4).

Left out on purpose: other harnesses, several tasks at once, and any default for the split.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from strop.engine.contract import Engine
from strop.environments import RolloutPlan, choose_environment, run_groups
from strop.errors import CheckRefused, ConfigError, EngineError
from strop.evaluate.comparison import Interval, describe_difference, list_plan_differences
from strop.evaluate.result import EvalPlan, EvalResult, digest_examples, refuse_invalid
from strop.evaluate.scoring import ExampleVerdicts, build_result, check_pass_at, give_verdicts
from strop.evaluate.shards import ShardFolder, cut_shards
from strop.io.notices import tell
from strop.record.files import Shard
from strop.rollout import Example, Sampling, Split
from strop.tasks import PromptFormat, Task, render_prompt, resolve_prompt_format
from strop.tasks.judging import Judge
from strop.tokenizer import Tokenizer

PLAIN = Sampling()
GREEDY = Sampling(temperature=0.0)
MAX_PROMPT_CHARS = 2000
"""A result stores this much of its first prompt."""
MAX_IN_FLIGHT = 8192
"""Rollouts in flight at once, in whole shards: far more than any engine decodes, with little memory."""
_SAMPLED_ONLY = frozenset({"sampling", "num_samples", "replies_version"})
"""Fields of a plan that greedy replies and their verdicts do not depend on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSettings:
    """Settings of an evaluation."""

    run_seed: int
    step: int
    """Training steps of the model; part of the names of the random streams."""
    split: Split
    """No default: a score without its split has no meaning."""
    prompt_format: PromptFormat | str = PromptFormat.AUTO
    """The same as in training; otherwise the score is effectively of another model."""
    num_examples: int | None = None
    """Examples used, from the first; the parts of a mixture take turns. None: all."""
    num_samples: int | None = None
    """Sampled rollouts per example, besides the greedy one. None: greedy only; required for choices."""
    max_reply_tokens: int | None = None
    """Reply budget. None: the task's own; a larger one is refused. A smaller budget of a mixture's part
    stays."""
    sampling: Sampling = PLAIN
    """Distribution of the sampled rollouts."""
    pass_at: tuple[int, ...] = ()
    """Each k for which pass@k is computed; up to the number of samples."""
    pass_threshold: float | None = None
    """A rollout with at least this reward counts as solved. None: the task's `is_correct` decides."""
    dtype: str | None = None
    """Number format of the served weights, for the record."""
    dtype_reason: str | None = None
    """Reason for that number format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedEvaluation:
    """A checked evaluation, ready to run."""

    plan: EvalPlan
    task: Task
    settings: EvalSettings
    examples: Sequence[Example]
    rollout_plans_P_G: Sequence[Sequence[RolloutPlan]]
    """For each example the greedy plan, then the sampled ones."""


def plan_evaluation(
    *,
    task: Task,
    tokenizer: Tokenizer,
    settings: EvalSettings,
    model_digest: str,
    trained_ids: Collection[str] = frozenset(),
    max_positions: int | None = None,
) -> PlannedEvaluation:
    """Check the settings, and plan every rollout.

    `trained_ids`: ids of all examples that the run has trained on or may train on, and the names of their
    problems (`list_names`). `max_positions`: the model's context length; a prompt without room for a
    complete reply is not attempted, and counts as not solved.

    Raises: CheckRefused if held-out examples are among the trained ones; ConfigError if the numbers of
        examples, samples or tokens are impossible, or no reward meets the threshold.
    """
    budget = _resolve_budget(task, settings)
    examples = _choose_examples(task, settings)
    check_pass_at(settings.pass_at, settings.num_samples)
    _check_threshold(task, settings.pass_threshold)
    refuse_trained(task, settings.split, examples, trained_ids)
    prompt_format = resolve_prompt_format(tokenizer, settings.prompt_format)
    budgets = [min(budget, task.limits_of(example).max_reply_tokens) for example in examples]
    compares = any(task.compares(example) for example in examples)
    if compares:
        drawn = f"{settings.num_samples or 'no'} sampled replies to an example"
        tell(f"task {task.name} compares replies: {drawn} beside each other, and the greedy one by itself")
    first_prompt, _ = render_prompt(tokenizer, task.render(examples[0]), prompt_format)
    by_part = {task.part_of(example): budget for example, budget in zip(examples, budgets, strict=True)}
    is_base = prompt_format is PromptFormat.BASE
    stops = [text for example in examples for text in task.limits_of(example).stops(is_base=is_base)]
    plan = EvalPlan(
        task=task.name,
        variant=task.variant,
        task_version=task.version,
        replies_version=task.version,
        split=settings.split,
        step=settings.step,
        model_digest=model_digest,
        dtype=settings.dtype,
        dtype_reason=settings.dtype_reason,
        tokenizer_digest=tokenizer.digest,
        prompt_format=prompt_format.value,
        num_examples=len(examples),
        examples_digest=digest_examples([example.example_id for example in examples]),
        run_seed=settings.run_seed,
        max_reply_tokens=max(budgets),
        part_reply_tokens={label: budget for label, budget in by_part.items() if label is not None},
        stop_strings=list(dict.fromkeys(stops)),
        first_prompt=first_prompt[:MAX_PROMPT_CHARS],
        sampling=settings.sampling,
        num_samples=settings.num_samples,
        pass_threshold=settings.pass_threshold,
        compares=compares,
        date=tokenizer.printed_date if prompt_format is PromptFormat.CHAT else None,
    )
    samples = [(0, GREEDY)]
    samples += [(sample_index, settings.sampling) for sample_index in range(settings.num_samples or 0)]
    rollout_plans_P_G = [
        [
            RolloutPlan(
                example=example,
                step=settings.step,
                sample_index=sample_index,
                run_seed=settings.run_seed,
                sampling=sampling,
                max_reply_tokens=example_budget,
                max_positions=max_positions,
                prompt_format=prompt_format,
            )
            for sample_index, sampling in samples
        ]
        for example, example_budget in zip(examples, budgets, strict=True)
    ]
    return PlannedEvaluation(
        plan=plan, task=task, settings=settings, examples=examples, rollout_plans_P_G=rollout_plans_P_G
    )


async def run_evaluation(
    planned: PlannedEvaluation,
    engine: Engine | None,
    tokenizer: Tokenizer,
    *,
    judge: Judge | None = None,
    folder: ShardFolder | None = None,
    on_example: Callable[[], None] = lambda: None,
) -> EvalResult:
    """Attempt every example greedily and, if the settings say so, several times by sampling.

    Replies are stored in `folder`, shard by shard; shards that exist are not attempted again. Without an
    `engine`, all must exist. Without a `judge`, replies are judged in this process. All rollouts are in
    flight at once; the engine admits as many as it can serve. `on_example` is called when all attempts of an
    example have ended.

    Raises: EngineError if the engine changed its weights meanwhile, never answered, or is missing.
    """
    shards = cut_shards(planned.plan.num_examples)
    verdicts = await _run_shards(planned, shards, engine, tokenizer, judge, folder, on_example)
    return build_result(
        planned.plan,
        [verdict for verdicts_of_shard in verdicts for verdict in verdicts_of_shard],
        pass_at=planned.settings.pass_at,
    )


async def attempt_share(
    planned: PlannedEvaluation,
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    judge: Judge | None = None,
    folder: ShardFolder,
    part: tuple[int, int],
    on_example: Callable[[], None] = lambda: None,
) -> None:
    """Attempt and store every n-th shard, beginning with the k-th: `part` is (k, n).

    Raises: like `run_evaluation`.
    """
    mine = cut_shards(planned.plan.num_examples)[part[0] :: part[1]]
    await _run_shards(planned, mine, engine, tokenizer, judge, folder, on_example)


async def _run_shards(
    planned: PlannedEvaluation,
    shards: Sequence[Shard],
    engine: Engine | None,
    tokenizer: Tokenizer,
    judge: Judge | None,
    folder: ShardFolder | None,
    on_example: Callable[[], None],
) -> list[list[ExampleVerdicts]]:
    plan, plans_P_G = planned.plan, planned.rollout_plans_P_G
    rollouts_per_shard = max((len(shard.examples) for shard in shards), default=1) * len(plans_P_G[0])
    places = asyncio.Semaphore(max(2, MAX_IN_FLIGHT // rollouts_per_shard))

    async def run(shard: Shard) -> list[ExampleVerdicts]:
        async with places:
            mine_P_G = [plans_P_G[index] for index in shard.examples]
            kept = None if folder is None else await asyncio.to_thread(folder.read, shard, mine_P_G)
            if kept is None:
                if engine is None:
                    raise EngineError(
                        f"replies of task {planned.task.name} are missing and there is no engine to give"
                        " them",
                        allowed="an engine, or a folder that holds every reply",
                        next_step="evaluate with an engine",
                    )
                groups = await run_groups(
                    choose_environment(planned.task, judge), engine, tokenizer, mine_P_G, on_group=on_example
                )
                kept = [group.rollouts for group in groups]
                if folder is not None:
                    await asyncio.to_thread(folder.write, shard, kept)
            return [give_verdicts(rollouts_G, planned.task, plan) for rollouts_G in kept]

    running = [asyncio.ensure_future(run(shard)) for shard in shards]
    try:
        return await asyncio.gather(*running)
    finally:
        for shard_run in running:
            shard_run.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _resolve_budget(task: Task, settings: EvalSettings) -> int:
    own = task.limits.max_reply_tokens
    budget = own if settings.max_reply_tokens is None else settings.max_reply_tokens
    if not 1 <= budget <= own:
        raise ConfigError(
            f"a reply budget of {budget} tokens for task {task.name}",
            allowed=f"1 to {own}, the task's own limit",
            next_step="leave the budget out to use the task's own",
        )
    return budget


def _choose_examples(task: Task, settings: EvalSettings) -> Sequence[Example]:
    available = task.examples(settings.split)
    if not available:
        raise ConfigError(
            f"task {task.name} has no examples in its {settings.split.value} split",
            allowed="a split with examples; a task for evaluation only has held_out ones",
            next_step="choose the other split",
        )
    num_examples = len(available) if settings.num_examples is None else settings.num_examples
    if not 1 <= num_examples <= len(available):
        raise ConfigError(
            f"{num_examples} examples of the {settings.split.value} split of task {task.name}",
            allowed=f"1 to {len(available)}",
            next_step="leave the number out to use all",
        )
    if settings.num_samples is not None and settings.num_samples < 1:
        raise ConfigError(
            f"{settings.num_samples} sampled rollouts per example",
            allowed="1 or more, or none for greedy rollouts only",
            next_step="leave the number out, or raise it",
        )
    by_part: dict[str | None, list[Example]] = {}
    for example in available:
        by_part.setdefault(task.part_of(example), []).append(example)
    if len(by_part) < 2:
        return available[:num_examples]
    # The parts of a mixture take turns, so that the first examples come from all of them.
    rounds = zip_longest(*by_part.values())
    return [example for one_round in rounds for example in one_round if example is not None][:num_examples]


def _check_threshold(task: Task, threshold: float | None) -> None:
    max_reward = task.limits.max_reward
    # In this form a NaN is refused, too.
    if threshold is not None and not 0.0 < threshold <= max_reward:
        raise ConfigError(
            f"a pass threshold of {threshold:g} for task {task.name}",
            allowed=f"above 0 and at most {max_reward:g}, the reward of a right reply: below, every reply"
            " passes, and above, none",
            next_step="correct it, or leave it out for the task's own word",
        )


def refuse_trained(
    task: Task, split: Split, examples: Sequence[Example], trained_ids: Collection[str]
) -> None:
    """Refuse held-out examples that were trained on.

    Raises: CheckRefused with their number, and the first one.
    """
    if split is Split.TRAIN:
        return
    trained = frozenset(trained_ids)
    overlap = [
        example.example_id
        for example in examples
        if example.example_id in trained or task.problem_of(example) in trained
    ]
    if overlap:
        raise CheckRefused(
            f"{len(overlap)} of {len(examples)} examples of task {task.name} called {split.value} were"
            f" trained on, the first is {overlap[0]}",
            allowed="held-out examples that no step has trained on",
            next_step="evaluate them as split train, or mend the task's splits",
        )


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

    The number format of the served weights may differ: the canary shows that it does no harm.
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
    differences = [
        difference
        for difference in list_plan_differences(baseline, planned.plan)
        # Results of older versions do not have all fields.
        if difference.key not in _SAMPLED_ONLY and difference.before not in (None, {})
    ]
    if differences:
        shown = "; ".join(describe_difference(difference, (" there", " now")) for difference in differences)
        raise CheckRefused(
            f"baseline_canary: the baseline cannot be repeated: {shown}",
            allowed="a valid result of this very model, with the task and the tokenizer as they were",
            next_step="evaluate the model by a setup that you trust, and give that result",
        )
    return PlannedCanary(baseline=baseline, planned=planned)


async def require_baseline(
    canary: PlannedCanary, engine: Engine, tokenizer: Tokenizer, *, judge: Judge | None = None
) -> Interval:
    """Repeat a baseline; return the measured accuracy.

    Raises: CheckRefused with the expected and the measured score, if it is outside the baseline's interval,
        or too few replies could be judged; EngineError like `run_evaluation`.
    """
    expected = canary.baseline.greedy
    measured = await run_evaluation(canary.planned, engine, tokenizer, judge=judge)
    refuse_invalid(measured)
    accuracy = measured.greedy.accuracy
    if accuracy is None or not expected.low <= accuracy <= expected.high:
        raise CheckRefused(
            f"baseline_canary: greedy accuracy of {measured.task} is {_percent(accuracy)} on"
            f" {measured.num_examples} examples, where {_percent(expected.accuracy)} is expected",
            allowed=f"{expected.low:.1%} to {expected.high:.1%}, the interval of the baseline",
            next_step="find out what the engine does otherwise: parallelism, number format, kernels;"
            " nothing was evaluated",
        )
    return Interval(estimate=accuracy, low=measured.greedy.low, high=measured.greedy.high)


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"
