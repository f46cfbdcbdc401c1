"""How often a model solves a task: greedy and sampled, by the rollouts that training uses too.

The task renders, stops, limits and judges; nothing here can word a prompt or read an answer. Solved
is what the outcome's `is_correct` says, so a partial reward is not a solved example. A rollout that
could not be judged is unscored: it counts neither as solved nor as wrong, and a result with too many
of them is invalid. A prompt that leaves no room for a reply is the environment's to judge.

Cut replies: what a task's own budget cuts was too long by the task's word, and counts as it was
judged. What a smaller budget cuts, whether these settings or the run file's `task.max_reply_tokens`
lowered it, says something about the budget; above a small share the result is then invalid.

Left out on purpose: other harnesses, several tasks at once, and any default for the split.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from strop.engine.contract import Engine
from strop.environments import RolloutPlan, SingleTurn, run_groups
from strop.errors import CheckRefused, ConfigError, EngineError, explain_refusal
from strop.evaluate.result import EvalResult, Score, Validity, digest_examples
from strop.evaluate.statistics import clustered_interval
from strop.rollout import Example, Rollout, Sampling, Split
from strop.tasks import PromptFormat, Task, resolve_prompt_format
from strop.tasks.judging import Judge
from strop.tokenizer import Tokenizer

PLAIN = Sampling()
GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSettings:
    """How a task is evaluated."""

    run_seed: int
    step: int
    """Optimizer steps behind the model; part of the names of the random streams."""
    split: Split
    """No default: a score without its split has no meaning."""
    prompt_format: PromptFormat | str = PromptFormat.AUTO
    """Like training, or the score is of another model in effect."""
    num_examples: int | None = None
    """Examples used, from the first. None: all."""
    num_samples: int | None = None
    """Sampled rollouts per example, beside the greedy one. None: greedy only."""
    max_reply_tokens: int | None = None
    """Reply budget. None: the task's own; more than that is refused."""
    sampling: Sampling = PLAIN
    """Distribution of the sampled rollouts."""
    max_truncated_frac: float = 0.05
    """Share of replies cut by a budget below the task's own, above which a result is invalid."""
    max_unscored_frac: float = 0.02
    """Share of rollouts that could not be judged, above which a result is invalid."""


async def evaluate_task(
    *,
    task: Task,
    engine: Engine,
    tokenizer: Tokenizer,
    settings: EvalSettings,
    model_digest: str,
    trained_ids: Collection[str] = frozenset(),
    judge: Judge | None = None,
) -> EvalResult:
    """Attempt every example greedily and, if asked for, several times by sampling.

    All rollouts are in flight at once; the engine admits as many as it can serve.
    `trained_ids` are the example ids that the run has trained on or may train on. Without a `judge`,
    replies are judged in this process.

    Raises: CheckRefused if examples called held-out are among the trained ones; ConfigError if the
        settings ask for more examples, tokens or fewer than there are; EngineError if the engine
        changed its weights in between.
    """
    budget = _resolve_budget(task, settings)
    examples = _choose_examples(task, settings)
    _refuse_trained(task, settings.split, examples, trained_ids)
    prompt_format = resolve_prompt_format(tokenizer, settings.prompt_format)
    plans_P_G = [_plan_example(example, budget, prompt_format, settings) for example in examples]
    groups = await run_groups(partial(SingleTurn, task, judge), engine, tokenizer, plans_P_G)
    greedy = _score([group.rollouts[:1] for group in groups], 1)
    sampled = None
    if settings.num_samples is not None:
        sampled = _score([group.rollouts[1:] for group in groups], settings.num_samples)
    scores = [greedy] if sampled is None else [greedy, sampled]
    return EvalResult(
        task=task.name,
        task_version=task.version,
        split=settings.split,
        step=settings.step,
        model_digest=model_digest,
        policy_version=_single_version([rollout for group in groups for rollout in group.rollouts]),
        tokenizer_digest=tokenizer.digest,
        prompt_format=prompt_format.value,
        num_examples=len(examples),
        examples_digest=digest_examples([example.example_id for example in examples]),
        run_seed=settings.run_seed,
        max_reply_tokens=budget,
        sampling=settings.sampling,
        num_samples=settings.num_samples,
        greedy=greedy,
        sampled=sampled,
        validity=_judge_validity(scores, settings, is_budget_cut=budget < task.limits.own_reply_tokens),
    )


def _resolve_budget(task: Task, settings: EvalSettings) -> int:
    own = task.limits.max_reply_tokens
    budget = own if settings.max_reply_tokens is None else settings.max_reply_tokens
    if not 1 <= budget <= own:
        raise ConfigError(
            explain_refusal(
                f"a reply budget of {budget} tokens for task {task.name}",
                allowed=f"1 to {own}, the task's own limit",
                next_step="leave the budget out to use the task's own",
            )
        )
    return budget


def _choose_examples(task: Task, settings: EvalSettings) -> Sequence[Example]:
    available = task.examples(settings.split)
    wanted = len(available) if settings.num_examples is None else settings.num_examples
    if not 1 <= wanted <= len(available):
        raise ConfigError(
            explain_refusal(
                f"{wanted} examples of the {settings.split.value} split of task {task.name}",
                allowed=f"1 to {len(available)}",
                next_step="leave the number out to use all",
            )
        )
    if settings.num_samples is not None and settings.num_samples < 1:
        raise ConfigError(
            explain_refusal(
                f"{settings.num_samples} sampled rollouts per example",
                allowed="1 or more, or none for greedy rollouts only",
                next_step="leave the number out, or raise it",
            )
        )
    return available[:wanted]


def _refuse_trained(
    task: Task, split: Split, examples: Sequence[Example], trained_ids: Collection[str]
) -> None:
    if split is Split.TRAIN:
        return
    trained = frozenset(trained_ids)
    overlap = [example.example_id for example in examples if example.example_id in trained]
    if overlap:
        raise CheckRefused(
            explain_refusal(
                f"{len(overlap)} of {len(examples)} examples of task {task.name} called {split.value} were"
                f" trained on, the first is {overlap[0]}",
                allowed="held-out examples that no step has trained on",
                next_step="evaluate them as split train, or mend the task's splits",
            )
        )


def _plan_example(
    example: Example, budget: int, prompt_format: PromptFormat, settings: EvalSettings
) -> list[RolloutPlan]:
    """Plan the greedy rollout of an example, then its sampled ones."""
    wanted = [(0, GREEDY)]
    wanted += [(sample_index, settings.sampling) for sample_index in range(settings.num_samples or 0)]
    return [
        RolloutPlan(
            example=example,
            step=settings.step,
            sample_index=sample_index,
            run_seed=settings.run_seed,
            sampling=sampling,
            max_reply_tokens=budget,
            prompt_format=prompt_format,
        )
        for sample_index, sampling in wanted
    ]


def _score(rollouts_P_G: Sequence[Sequence[Rollout]], num_samples: int) -> Score:
    """Summarise the rollouts of one kind."""
    judged_P_G = [[rollout for rollout in rollouts_G if _is_judged(rollout)] for rollouts_G in rollouts_P_G]
    solved_P_G = [[bool(rollout.outcome.is_correct) for rollout in judged_G] for judged_G in judged_P_G]
    judged = [rollout for judged_G in judged_P_G for rollout in judged_G]
    outcomes = [rollout.outcome for rollout in judged]
    num_rollouts = sum(len(rollouts_G) for rollouts_G in rollouts_P_G)
    interval = clustered_interval(solved_P_G)
    return Score(
        accuracy=interval.estimate if judged else None,
        low=interval.low,
        high=interval.high,
        num_samples=num_samples,
        num_rollouts=num_rollouts,
        num_unscored=num_rollouts - len(judged),
        truncated_frac=_mean([outcome.truncated for outcome in outcomes]),
        cut_unsolved_frac=_mean([outcome.truncated and not outcome.is_correct for outcome in outcomes]),
        format_ok_frac=_mean([o.format_ok for o in outcomes if o.format_ok is not None]),
        reply_tokens_mean=_mean([rollout.num_sampled_tokens for rollout in judged]),
        reward_mean=_mean([outcome.reward for outcome in outcomes if outcome.reward is not None]),
        solved_frac_by_example={
            rollouts_G[0].example.example_id: _mean(solved_G)
            for rollouts_G, solved_G in zip(rollouts_P_G, solved_P_G, strict=True)
        },
    )


def _is_judged(rollout: Rollout) -> bool:
    """Whether a rollout is known to be right or wrong."""
    return rollout.outcome.is_scored and rollout.outcome.is_correct is not None


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _single_version(rollouts: Sequence[Rollout]) -> int:
    versions = {
        turn.policy_version
        for rollout in rollouts
        for turn in rollout.turns
        if turn.is_sampled and turn.policy_version is not None
    }
    if not versions:
        kinds = sorted({r.outcome.failure.kind for r in rollouts if r.outcome.failure is not None})
        raise EngineError(
            explain_refusal(
                f"none of {len(rollouts)} rollouts brought a reply; their failures: {', '.join(kinds)}",
                allowed="an engine that answers with the version it serves",
                next_step="mend the cause and evaluate again",
            )
        )
    if len(versions) > 1:
        raise EngineError(
            explain_refusal(
                f"one evaluation was served by the policy versions {sorted(versions)}",
                allowed="one version for all rollouts",
                next_step="evaluate while no weights are published",
            )
        )
    return versions.pop()


def _judge_validity(scores: Sequence[Score], settings: EvalSettings, *, is_budget_cut: bool) -> Validity:
    for score in scores:
        if score.num_unscored > settings.max_unscored_frac * score.num_rollouts:
            return Validity.UNSCORED
        truncated_frac = score.truncated_frac or 0.0
        if is_budget_cut and truncated_frac > settings.max_truncated_frac:
            return Validity.TRUNCATION
    return Validity.VALID
