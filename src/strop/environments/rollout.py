"""The one rollout path: reset, reply, step, ..., score, for one turn or many.

Failures on the way are attributed to an owner: the engine, the task and its world, or whom the world
names. None ever becomes a reward of 0.

What the engine sampled stays as it is, and only new text is encoded: rendering a reply again can give other
ids than were sampled (TOK-5). The chat template is asked only for the text between a reply and the next one,
with a stand-in for the reply, and it must write the stand-in right behind the prompt that the reply answered.
The reply's ids must read as its text. Where either fails, everything is rendered anew, and a new training
sample begins there.

A single-turn task is the world `SingleTurn`; `ENVIRONMENTS` at the end names the worlds there are, and
`choose_environment` alone chooses among them.
Left out on purpose: retries, which are the loop's decision.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import numpy as np

from strop.engine import Completion, Engine, GenerationRequest, stream_seed
from strop.environments.choices import EncodedChoices, choose, encode_choices
from strop.environments.contract import Action, Environment, StepResult
from strop.errors import ConfigError, DataError, EngineError
from strop.rollout import (
    PROMPT_TOO_LONG,
    RESTART,
    Example,
    Failure,
    FailureOwner,
    FinishReason,
    Group,
    IntArray,
    Message,
    Outcome,
    Rollout,
    Sampling,
    Turn,
)
from strop.tasks import Task, choices_of, limits_of
from strop.tasks.contract import within_bounds
from strop.tasks.failures import catch_failure
from strop.tasks.judging import InlineJudge, Judge
from strop.tasks.prompt import PromptFormat, render_prompt, resolve_prompt_format
from strop.tokenizer import Tokenizer

_CLOSE_LIMIT_S = 10.0
_STAND_IN = "reply"
_WORLD_TURN = -1
"""Turn number in the name of a world's random stream; replies count from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutPlan:
    """One attempt that is wanted."""

    example: Example
    step: int
    """Steps completed now."""
    sample_index: int
    """Position inside the group, from 0."""
    run_seed: int
    sampling: Sampling
    max_reply_tokens: int
    """Tokens per reply, terminator included."""
    max_positions: int | None = None
    """Tokens that the model can look at; a prompt without room for a whole reply is not attempted."""
    prompt_format: PromptFormat | str = PromptFormat.AUTO

    def has_room_behind(self, num_prompt_tokens: int, num_reply_tokens: int) -> bool:
        """Whether a whole reply fits behind a prompt."""
        return self.max_positions is None or num_prompt_tokens + num_reply_tokens <= self.max_positions


class PromptCache:
    """Renders and encodes each opening once; shared by the rollouts of a group."""

    def __init__(self, tokenizer: Tokenizer, prompt_format: PromptFormat | str) -> None:
        self.tokenizer = tokenizer
        self.prompt_format = resolve_prompt_format(tokenizer, prompt_format)
        """Chat or base."""
        self._prompts: dict[tuple[Message, ...], tuple[str, IntArray]] = {}

    def render(self, messages: tuple[Message, ...]) -> tuple[str, IntArray]:
        """Return the prompt as text and as ids; the same array object for equal messages."""
        if messages not in self._prompts:
            self._prompts[messages] = render_prompt(self.tokenizer, messages, self.prompt_format)
        return self._prompts[messages]


@dataclass(kw_only=True, slots=True)
class _Attempt:
    """A rollout under way."""

    environment: Environment
    engine: Engine
    plan: RolloutPlan
    prompts: PromptCache
    clock: Callable[[], float]
    turns: list[Turn] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"generate": 0.0, "verify": 0.0})
    choice_nats: dict[str, float] = field(default_factory=dict)
    """Log-probability of each reply that could be chosen, by the name of its metric."""
    stage_owner: FailureOwner = FailureOwner.TASK
    """Whose code runs now, hence who owns a failure that names no owner."""

    async def run(self) -> Outcome:
        """Walk from reset to score."""
        plan = self.plan
        world_seed = stream_seed(plan.run_seed, plan.example.example_id, plan.step, 0, _WORLD_TURN)
        history = list(await self.environment.reset(plan.example, world_seed))
        text, context_ids = self.prompts.render(tuple(history))
        self.turns.append(Turn(role="prompt", text=text, token_ids=context_ids))
        for turn_index in range(self.environment.max_turns):
            choices = self._encode_choices(context_ids)
            num_reply_tokens = plan.max_reply_tokens if choices is None else choices.num_reply_tokens
            if not plan.has_room_behind(len(context_ids), num_reply_tokens):
                detail = (
                    f"a prompt of {len(context_ids)} tokens and a reply of {num_reply_tokens} exceed"
                    f" the model's {plan.max_positions} positions"
                )
                return Outcome.lost(FailureOwner.TASK, PROMPT_TOO_LONG, detail)
            if choices is None:
                completion = await self._generate(context_ids, turn_index)
            else:
                context_ids, completion = choices.context_ids, await self._choose(choices)
            if completion.finish_reason is FinishReason.ABORT:
                return Outcome.lost(FailureOwner.ENGINE, "abort", "the engine gave up on the reply")
            result = await self.environment.step(
                Action(text=completion.text, finish_reason=completion.finish_reason)
            )
            is_last = turn_index + 1 == self.environment.max_turns
            if result.done or is_last or completion.finish_reason is FinishReason.LENGTH:
                break
            context_ids = self._continue(context_ids, history, result.messages)
            history += [Message(role="assistant", content=completion.text), *result.messages]
        return await self._score()

    def _continue(
        self, context_ids: IntArray, history: Sequence[Message], new_messages: Sequence[Message]
    ) -> IntArray:
        """Add the turn that answers the last reply; return the ids of the whole conversation.

        They are never rendered again, only extended. Where it cannot be shown that this gives what the
        model would be asked, they are given up and rendered anew: a new sample begins (`prefix_break`).
        """
        reply, tokenizer = self.turns[-1], self.prompts.tokenizer
        assert reply.finish_reason is not None
        extension = encode_next_messages(
            tokenizer, self.prompts.prompt_format, history, new_messages, reply.finish_reason
        )
        if extension is not None and reads_as(tokenizer, reply):
            text, new_ids = extension
            self.turns.append(Turn(role="prompt", text=text, token_ids=new_ids))
            return np.concatenate([context_ids, reply.token_ids, new_ids])
        spoken = Message(role="assistant", content=reply.text)
        text, new_ids = self.prompts.render((*history, spoken, *new_messages))
        self.turns.append(Turn(role=RESTART, text=text, token_ids=new_ids))
        return new_ids

    async def _generate(self, context_ids: IntArray, turn_index: int) -> Completion:
        plan = self.plan
        stop_strings = self.environment.stop_strings
        if self.prompts.prompt_format is PromptFormat.BASE:
            # As `PlainlyStopped` says: in plain text a world may have further ones.
            stop_strings += getattr(self.environment, "base_stop_strings", ())
        request = GenerationRequest(
            prompt_ids=context_ids,
            seed=stream_seed(
                plan.run_seed, plan.example.example_id, plan.step, plan.sample_index, turn_index
            ),
            sampling=plan.sampling,
            max_tokens=plan.max_reply_tokens,
            stop_token_ids=self.prompts.tokenizer.stop_token_ids,
            stop_strings=stop_strings,
        )
        self.stage_owner = FailureOwner.ENGINE
        started_at = self.clock()
        completion = await self.engine.generate(request)
        self.seconds["generate"] += self.clock() - started_at
        if completion.logprobs is None:
            # The turn would count as not sampled.
            raise EngineError("the engine returned a reply without log-probabilities; the rollout is masked")
        self.turns.append(_spoken(completion))
        self.stage_owner = FailureOwner.TASK
        return completion

    def _encode_choices(self, context_ids: IntArray) -> EncodedChoices | None:
        """Return the replies to choose from, or None where the policy writes."""
        # As `Choosing` says. Asked at every turn, where `isinstance` of a protocol takes ten times as long.
        choices: tuple[str, ...] = getattr(self.environment, "choices", ())
        if not choices:
            return None
        prompt = self.turns[-1]
        earlier_ids = context_ids[: len(context_ids) - len(prompt.token_ids)]
        found = encode_choices(self.prompts.tokenizer, prompt.text, choices, self.prompts.prompt_format)
        self.turns[-1] = replace(prompt, token_ids=found.context_ids)
        return replace(found, context_ids=np.concatenate([earlier_ids, found.context_ids]))

    async def _choose(self, choices: EncodedChoices) -> Completion:
        """Take the likeliest of the given replies as what the policy said."""
        self.stage_owner = FailureOwner.ENGINE
        started_at = self.clock()
        chosen = await choose(self.engine, choices)
        self.seconds["generate"] += self.clock() - started_at
        completion = Completion(
            token_ids=chosen.token_ids,
            logprobs=chosen.score.logprobs,
            text=chosen.text,
            finish_reason=FinishReason.CHOSEN,
            policy_version=chosen.score.policy_version,
        )
        self.turns.append(_spoken(completion))
        self.choice_nats = {f"choice_{index}_nats": nats for index, nats in enumerate(chosen.nats)}
        self.stage_owner = FailureOwner.TASK
        return completion

    async def _score(self) -> Outcome:
        started_at = self.clock()
        outcome = await self.environment.score()
        self.seconds["verify"] += self.clock() - started_at
        metrics = {**outcome.metrics, **self.choice_nats}
        if metrics:
            outcome = replace(outcome, metrics=metrics)
        is_cut = any(turn.finish_reason is FinishReason.LENGTH for turn in self.turns)
        return replace(outcome, truncated=outcome.truncated or is_cut)


async def run_rollout(
    environment: Environment,
    engine: Engine,
    tokenizer: Tokenizer,
    plan: RolloutPlan,
    *,
    prompts: PromptCache | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Rollout:
    """Attempt one example once, and close the environment.

    A failure of the engine, the task or its world gives a rollout without a score; its turns up to
    there are kept. A chosen reply is recorded as greedy: nothing was drawn.

    The turns alternate: 'prompt' with the ids that were added, 'assistant' with the
    ids that were sampled, those of a stop string among them; all joined are what the engine saw and said.
    A `RESTART` in place of a prompt holds everything anew, and what stands before it was not seen with
    what follows (`Rollout.samples`).
    Units: `clock` counts seconds.
    Raises: WeightMismatch, ConfigError and cancellation, which concern the whole run.
    """
    prompts = prompts or PromptCache(tokenizer, plan.prompt_format)
    attempt = _Attempt(environment=environment, engine=engine, plan=plan, prompts=prompts, clock=clock)
    try:
        with catch_failure(lambda: attempt.stage_owner) as caught:
            outcome = await attempt.run()
    finally:
        close_failure = await _close(environment)
    if caught.failure is not None:
        outcome = Outcome(parts={}, failure=caught.failure)
    if close_failure is not None:
        # The score was given before and stands; the leak must be seen all the same.
        outcome = replace(outcome, metrics={**outcome.metrics, "close_failed": 1.0})
    return Rollout(
        example=plan.example,
        step=plan.step,
        sample_index=plan.sample_index,
        turns=tuple(attempt.turns),
        outcome=outcome,
        sampling=Sampling(temperature=0.0) if attempt.choice_nats else plan.sampling,
        seconds=attempt.seconds,
    )


def _spoken(completion: Completion) -> Turn:
    """Return a reply as the turn that it is."""
    return Turn(
        role="assistant",
        text=completion.text,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        policy_version=completion.policy_version,
        finish_reason=completion.finish_reason,
        segments=completion.segments,
    )


async def _close(environment: Environment) -> Failure | None:
    with catch_failure(lambda: FailureOwner.INFRA) as caught:
        async with asyncio.timeout(_CLOSE_LIMIT_S):
            await environment.close()
    return caught.failure


async def run_group(
    make_environment: Callable[[], Environment],
    engine: Engine,
    tokenizer: Tokenizer,
    plans: Sequence[RolloutPlan],
) -> Group:
    """Attempt one example several times at once; the prompt is rendered and encoded once.

    The rollouts stand in the order of the plans. For a task: `choose_environment(task)`.
    Raises: DataError if there is no plan or the plans differ in example or prompt format; else
        like `run_rollout`, after the other rollouts were cancelled.
    """
    if len({(plan.example.example_id, str(plan.prompt_format)) for plan in plans}) != 1:
        num_examples = len({plan.example.example_id for plan in plans})
        raise DataError(
            f"a group of {len(plans)} plans for {num_examples} different examples or prompt formats"
        )
    prompts = PromptCache(tokenizer, plans[0].prompt_format)
    running = [
        asyncio.ensure_future(run_rollout(make_environment(), engine, tokenizer, plan, prompts=prompts))
        for plan in plans
    ]
    try:
        rollouts = await asyncio.gather(*running)
    finally:
        # Where one ended the run, the others must not go on behind it.
        for rollout in running:
            rollout.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return Group(example=plans[0].example, rollouts=tuple(rollouts))


async def run_groups(
    make_environment: Callable[[], Environment],
    engine: Engine,
    tokenizer: Tokenizer,
    plans_P_G: Sequence[Sequence[RolloutPlan]],
    *,
    on_group: Callable[[], None] | None = None,
) -> list[Group]:
    """Attempt several examples at once, each several times; groups stand in the order of the plans.

    `on_group` is called whenever a group is done, so that a watcher sees long stages move.
    Raises: like `run_group`, after every other group was cancelled.
    """

    async def run(plans_G: Sequence[RolloutPlan]) -> Group:
        group = await run_group(make_environment, engine, tokenizer, plans_G)
        if on_group is not None:
            on_group()
        return group

    running = [asyncio.ensure_future(run(plans_G)) for plans_G in plans_P_G]
    try:
        return await asyncio.gather(*running)
    finally:
        # Not a task group: it would wrap the one exception that ended the run in a group.
        for group in running:
            group.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def reads_as(tokenizer: Tokenizer, reply: Turn) -> bool:
    """Whether a reply's ids are its text, before the terminator or the stop string that ended it."""
    is_ended = reply.finish_reason is FinishReason.EOS
    said = tokenizer.decode(reply.token_ids[:-1] if is_ended else reply.token_ids)
    is_stopped = reply.finish_reason is FinishReason.STOP_STRING
    return said.startswith(reply.text) if is_stopped else said == reply.text


def encode_next_messages(
    tokenizer: Tokenizer,
    prompt_format: PromptFormat,
    history: Sequence[Message],
    new_messages: Sequence[Message],
    finish_reason: FinishReason,
) -> tuple[str, IntArray] | None:
    """Return text and ids that stand between the last reply and the next one.

    `history` holds all messages up to the last reply, which is not among them; `prompt_format` is
    resolved. A terminator that the policy sampled is not repeated. None if the template writes the
    history differently once a reply follows, so that the ids cannot be extended.
    """
    if prompt_format is PromptFormat.BASE:
        text = "\n\n" + tokenizer.render_base(new_messages)
        return text, tokenizer.encode(text)
    before = tokenizer.render(history)
    stand_in = Message(role="assistant", content=_STAND_IN)
    full, _ = render_prompt(tokenizer, (*history, stand_in, *new_messages), prompt_format)
    if not full.startswith(before + _STAND_IN):
        return None
    text = full[len(before) + len(_STAND_IN) :]
    if finish_reason is FinishReason.EOS:
        terminator = tokenizer.token_text(tokenizer.eos_id)
        if not text.startswith(terminator):
            return None
        text = text[len(terminator) :]
    return text, tokenizer.encode(text)


class SingleTurn:
    """One question, one reply. A missing reply is judged as an empty one."""

    max_turns = 1

    def __init__(self, task: Task, judge: Judge | None = None) -> None:
        self._task = task
        self._judge = judge or InlineJudge(task)
        self._example: Example | None = None
        self._reply: Action | None = None
        self.stop_strings = task.limits.stop_strings
        self.base_stop_strings = task.limits.base_stop_strings
        self.choices: tuple[str, ...] = ()

    async def reset(self, example: Example, seed: int) -> tuple[Message, ...]:
        """Pose the example; the seed has nothing to decide here."""
        self._example = example
        self._reply = None
        limits = limits_of(self._task, example)
        self.stop_strings, self.base_stop_strings = limits.stop_strings, limits.base_stop_strings
        self.choices = choices_of(self._task, example)
        return self._task.render(example)

    async def step(self, action: Action) -> StepResult:
        """Keep the reply; the attempt is over."""
        if self._example is None or self._reply is not None:
            when = "before reset" if self._example is None else "after its end"
            raise DataError(f"{self._task.name}: step called {when}")
        self._reply = action
        return StepResult(messages=(), done=True)

    async def score(self) -> Outcome:
        """Have the reply judged; a score that the task cannot give is a failure of the task's."""
        if self._example is None:
            raise DataError(f"{self._task.name}: score called before reset")
        outcome = await self._judge.judge(self._example, "" if self._reply is None else self._reply.text)
        return within_bounds(outcome, limits_of(self._task, self._example))

    async def close(self) -> None:
        """Hold nothing, release nothing."""


EnvironmentFactory = Callable[[Task, Judge | None], Environment]
"""Makes one attempt. Its examples are the task's; without a judge, replies are judged in this process."""

SINGLE_TURN = "single-turn"
ENVIRONMENTS: Mapping[str, EnvironmentFactory] = MappingProxyType({SINGLE_TURN: SingleTurn})


def choose_environment(
    task: Task, judge: Judge | None = None, *, name: str = SINGLE_TURN
) -> Callable[[], Environment]:
    """Return the constructor of the environment in which a run attempts the examples of a task.

    Raises: ConfigError if there is none of this name.
    """
    if name not in ENVIRONMENTS:
        raise ConfigError(
            f"the environment {name!r}",
            allowed=", ".join(ENVIRONMENTS),
            next_step="correct the name",
        )
    return partial(ENVIRONMENTS[name], task, judge)
