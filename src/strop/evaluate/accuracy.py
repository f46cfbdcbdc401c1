"""Evaluate a model on a task, greedily and by sampling, with the same rollouts as training.

The task renders, stops, limits and judges; nothing here writes a prompt or parses an answer. `scoring`
decides what counts as solved, `shards` stores the replies. A reply cut at the task's own budget counts as it
was judged; where a smaller budget cuts more than a small share, the result is invalid.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from strop.engine.contract import Engine
from strop.environments import RolloutPlan, choose_environment, run_groups
from strop.errors import CheckRefused, ConfigError
from strop.evaluate.result import EvalPlan, EvalResult, digest_examples
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
_SHARED = ("split", "step", "run_seed", "sampling", "num_samples", "dtype")
_MAX_IN_FLIGHT = 8192
"""Rollouts in flight at once, in whole shards: far more than any engine decodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSettings:
    """Settings of an evaluation."""

    run_seed: int
    step: int
    """Training steps of the model; part of the names of the random streams."""
    split: Split
    prompt_format: PromptFormat | str = PromptFormat.AUTO
    num_examples: int | None = None
    """Examples used, from the first; the parts of a mixture take turns. None: all."""
    num_samples: int | None = None
    """Sampled rollouts per example, besides the greedy one. None: greedy only."""
    sampling: Sampling = PLAIN
    pass_at: tuple[int, ...] = ()
    """Each k for which pass@k is computed; up to the number of samples."""
    dtype: str | None = None
    """Number format of the served weights, for the record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedEvaluation:
    """A checked evaluation, ready to run."""

    plan: EvalPlan
    task: Task
    settings: EvalSettings
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

    `trained_ids`: ids of all examples that the run may train on, and the names of their problems.
    `max_positions`: the model's context length; a prompt without room for a complete reply is not attempted.

    Raises: CheckRefused if held-out examples are among the trained ones; ConfigError if the numbers of
        examples, samples or tokens are impossible.
    """
    examples = _choose_examples(task, settings)
    check_pass_at(settings.pass_at, settings.num_samples)
    refuse_trained(task, settings.split, examples, trained_ids)
    prompt_format = resolve_prompt_format(tokenizer, settings.prompt_format)
    budgets = [task.limits_of(example).max_reply_tokens for example in examples]
    compares = any(task.compares(example) for example in examples)
    if compares:
        tell(
            f"task {task.name} compares replies: the sampled ones to an example, and the greedy one by itself"
        )
    by_part = {task.part_of(example): budget for example, budget in zip(examples, budgets, strict=True)}
    is_base = prompt_format is PromptFormat.BASE
    stops = [text for example in examples for text in task.limits_of(example).stops(is_base=is_base)]
    plan = EvalPlan(
        **{name: getattr(settings, name) for name in _SHARED},
        task=task.name,
        variant=task.variant,
        task_version=task.version,
        replies_version=task.version,
        model_digest=model_digest,
        tokenizer_digest=tokenizer.digest,
        prompt_format=prompt_format.value,
        num_examples=len(examples),
        examples_digest=digest_examples([example.example_id for example in examples]),
        max_reply_tokens=max(budgets),
        part_reply_tokens={label: budget for label, budget in by_part.items() if label is not None},
        stop_strings=list(dict.fromkeys(stops)),
        first_prompt=render_prompt(tokenizer, task.render(examples[0]), prompt_format)[0][:2000],
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
    return PlannedEvaluation(plan=plan, task=task, settings=settings, rollout_plans_P_G=rollout_plans_P_G)


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

    Raises: EngineError if the engine changed its weights meanwhile, never answered, or is missing.
    """
    verdicts_P = await attempt_share(
        planned, engine, tokenizer, judge=judge, folder=folder, on_example=on_example
    )
    return build_result(planned.plan, verdicts_P, pass_at=planned.settings.pass_at)


async def attempt_share(
    planned: PlannedEvaluation,
    engine: Engine | None,
    tokenizer: Tokenizer,
    *,
    judge: Judge | None = None,
    folder: ShardFolder | None = None,
    part: tuple[int, int] = (0, 1),
    on_example: Callable[[], None] = lambda: None,
) -> list[ExampleVerdicts]:
    """Attempt every n-th shard, beginning with the k-th: `part` is (k, n).

    Replies are stored in `folder`, shard by shard; shards that exist are not attempted again. Without an
    `engine`, all must exist. Without a `judge`, replies are judged in this process. All rollouts are in
    flight at once; the engine admits as many as it can serve. `on_example` is called when all attempts of an
    example have ended.

    Raises: like `run_evaluation`.
    """
    plan, plans_P_G = planned.plan, planned.rollout_plans_P_G
    shards = cut_shards(plan.num_examples)[part[0] :: part[1]]
    rollouts_per_shard = max((len(shard.examples) for shard in shards), default=1) * len(plans_P_G[0])
    places = asyncio.Semaphore(max(2, _MAX_IN_FLIGHT // rollouts_per_shard))

    async def run(shard: Shard) -> list[ExampleVerdicts]:
        async with places:
            mine_P_G = [plans_P_G[index] for index in shard.examples]
            kept = None if folder is None else await asyncio.to_thread(folder.read, shard, mine_P_G)
            if kept is None:
                assert engine is not None
                groups = await run_groups(
                    choose_environment(planned.task, judge), engine, tokenizer, mine_P_G, on_group=on_example
                )
                kept = [group.rollouts for group in groups]
                if folder is not None:
                    await asyncio.to_thread(folder.write, shard, kept)
            return [give_verdicts(rollouts_G, planned.task, plan) for rollouts_G in kept]

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(run(shard)) for shard in shards]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [verdicts for shard_run in running for verdicts in shard_run.result()]


def _choose_examples(task: Task, settings: EvalSettings) -> Sequence[Example]:
    available = task.examples(settings.split)
    num_examples = len(available) if settings.num_examples is None else settings.num_examples
    if not 1 <= num_examples <= len(available):
        raise ConfigError(
            f"{num_examples} examples of the {settings.split.value} split of task {task.name}",
            allowed=f"1 to {len(available)}; a task for evaluation only has held_out ones",
            next_step="leave the number out to use all, or choose the other split",
        )
    by_part: dict[str | None, list[Example]] = {}
    for example in available:
        by_part.setdefault(task.part_of(example), []).append(example)
    if len(by_part) < 2:
        return available[:num_examples]
    # The parts of a mixture take turns, so that the first examples come from all of them.
    rounds = zip_longest(*by_part.values())
    return [example for one_round in rounds for example in one_round if example is not None][:num_examples]


def refuse_trained(
    task: Task, split: Split, examples: Sequence[Example], trained_ids: Collection[str]
) -> None:
    """Refuse held-out examples that were trained on. Raises: CheckRefused with their number."""
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
