"""The one rollout path: reset, reply, step, ..., score, for one turn or many.

A failure is attributed to an owner: the engine, the task with its world, or the owner that the world names.
None ever becomes a reward of 0. Retries are not decided here but by the group (`groups`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from time import perf_counter

import numpy as np

from strop.engine import Completion, Engine, GenerationRequest, stream_seed
from strop.environments.contract import Action, Environment
from strop.environments.extending import PromptCache, spoken_turn, take_apart
from strop.environments.recording import CallTooLong, Recorder
from strop.errors import DataError, EngineError
from strop.rollout import (
    PROMPT_TOO_LONG,
    RESTART,
    Example,
    Failure,
    FailureOwner,
    FinishReason,
    IntArray,
    Message,
    Outcome,
    Rollout,
    Sampling,
    Turn,
)
from strop.tasks.failures import catch_failure
from strop.tasks.prompt import PromptFormat, posed
from strop.thoughts import begun_thought
from strop.tokenizer import Tokenizer

_CLOSE_LIMIT_S = 10.0
_WORLD_TURN = -1
"""Turn number in the name of a world's random stream; replies count from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutPlan:
    """The settings of one attempt."""

    example: Example
    step: int
    """Training steps completed so far."""
    sample_index: int
    """Position inside the group, from 0."""
    run_seed: int
    sampling: Sampling
    max_reply_tokens: int
    """Tokens per reply, terminator included."""
    max_positions: int | None = None
    """The model's context length; a prompt without room for a whole reply is not attempted."""
    prompt_format: PromptFormat | str = PromptFormat.AUTO

    def has_room_behind(self, num_prompt_tokens: int) -> bool:
        """Whether a whole reply fits into the context behind a prompt."""
        return self.max_positions is None or num_prompt_tokens + self.max_reply_tokens <= self.max_positions


class Stop(StrEnum):
    """Why a scored attempt ended."""

    DONE = "done"
    TURNS = "turns"
    TOKENS = "tokens"
    """A reply was cut, or the replies used up the attempt's tokens."""
    CONTEXT = "context"
    """The context has no room for another reply."""
    TIME = "time"
    """Of a program."""


@dataclass(kw_only=True, slots=True)
class Attempt:
    """A running rollout."""

    environment: Environment
    engine: Engine
    plan: RolloutPlan
    prompts: PromptCache
    turns: list[Turn] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"generate": 0.0, "verify": 0.0})
    num_format_errors: int = 0
    """Of a program's calls."""
    stage_owner: FailureOwner = FailureOwner.TASK
    """Owner of the code that runs now, and so of a failure that names no owner."""
    history: list[Message] = field(default_factory=list)
    context_ids: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """Prompt ids of the next request."""

    async def run(self) -> Rollout:
        """Play from reset to the score, and close the environment. Raises: as `run_rollout`."""
        try:
            with catch_failure(lambda: self.stage_owner) as caught:
                outcome = await self._play()
        finally:
            with catch_failure(FailureOwner.INFRA) as closing:
                async with asyncio.timeout(_CLOSE_LIMIT_S):
                    await self.environment.close()
        if caught.failure is not None:
            outcome = Outcome(parts={}, failure=caught.failure)
        if closing.failure is not None:
            # The score was made before and stands; the leak must be seen all the same.
            outcome = replace(outcome, metrics={**outcome.metrics, "close_failed": 1.0})
        plan = self.plan
        return Rollout(
            example=plan.example,
            step=plan.step,
            sample_index=plan.sample_index,
            turns=tuple(self.turns),
            outcome=outcome,
            sampling=plan.sampling,
            seconds=self.seconds,
        )

    async def _play(self) -> Outcome:
        plan = self.plan
        # The world's seed is the same for all attempts of a group.
        seed = stream_seed(plan.run_seed, plan.example.example_id, plan.step, 0, _WORLD_TURN)
        self.history = list(await self.environment.reset(plan.example, seed))
        end = await self._converse()
        return await self._score(end) if isinstance(end, Stop) else end

    async def _converse(self) -> Outcome | Stop:
        """Let the policy and the world take turns; return why they stopped, or the outcome of a failure."""
        environment = self.environment
        if environment.is_conducted:
            return await self._let_act()
        tools = posed(self.history).tools
        text, self.context_ids = self.prompts.render(tuple(self.history))
        self.turns.append(Turn(role="prompt", text=text, token_ids=self.context_ids))
        for turn_index in range(environment.max_turns):
            if (end := self._find_end(turn_index)) is not None:
                return end
            num_tokens = int(min(self.plan.max_reply_tokens, self._left()))
            self.stage_owner = FailureOwner.ENGINE
            completion = await self._sample(self.context_ids, num_tokens, turn_index)
            # A reply whose parts do not fit together is the engine's failure too.
            self.turns.append(spoken_turn(completion))
            self.stage_owner = FailureOwner.TASK
            if completion.finish_reason is FinishReason.ABORT:
                return Outcome.lost(FailureOwner.ENGINE, "abort", "the engine gave up on the reply")
            asked = self.turns[-2].text
            spoken = take_apart(self.prompts, completion, tools, turn_index, asked) if tools else None
            # What a thought is must show, also where the prompt opened it.
            said = begun_thought(asked) + completion.text
            result = await environment.step(
                Action(text=said, finish_reason=completion.finish_reason, spoken=spoken)
            )
            if result.done or completion.finish_reason is FinishReason.LENGTH:
                return Stop.DONE if result.done else Stop.TOKENS
            if turn_index + 1 < environment.max_turns:
                reply = Message(role="assistant", content=completion.text)
                if spoken is not None and spoken.calls and self.prompts.call_reader is not None:
                    reply = replace(reply, content=spoken.content, tool_calls=spoken.calls)
                self._continue(reply, result.messages)
        return Stop.TURNS

    def _find_end(self, turn_index: int) -> Outcome | Stop | None:
        """Return why there is no further reply, or None if there is one."""
        plan, num_context = self.plan, len(self.context_ids)
        if not plan.has_room_behind(num_context):
            if turn_index:
                return Stop.CONTEXT
            detail = (
                f"a prompt of {num_context} tokens and a reply of {plan.max_reply_tokens} exceed"
                f" the model's {plan.max_positions} positions"
            )
            return Outcome.lost(FailureOwner.TASK, PROMPT_TOO_LONG, detail)
        return Stop.TOKENS if self._left() < 1 else None

    def _left(self) -> float:
        """Return the tokens that the attempt has left."""
        max_tokens = self.environment.max_attempt_tokens
        num_sampled = sum(len(turn.token_ids) for turn in self.turns if turn.is_sampled)
        return math.inf if max_tokens is None else max_tokens - num_sampled

    def _continue(self, reply: Message, new_messages: Sequence[Message]) -> None:
        """Append the last reply and the world's answer to the conversation.

        Its ids are extended and never rendered again. Where the extension cannot be shown to equal the
        rendered prompt, the whole conversation is rendered and a new sample begins (`prefix_break`).
        """
        turn = self.turns[-1]
        extension = self.prompts.extend(self.history, turn, reply.tool_calls, new_messages)
        self.history += [reply, *new_messages]
        if extension is not None:
            text, ids = extension
            self.context_ids = np.concatenate([self.context_ids, turn.token_ids, ids])
        else:
            text, ids = self.prompts.render(tuple(self.history))
            self.context_ids = ids
        role = RESTART if extension is None else "prompt"
        self.turns.append(Turn(role=role, text=text, token_ids=ids))

    async def _sample(
        self, context_ids: IntArray, num_tokens: int, stream: int, stop: tuple[str, ...] = ()
    ) -> Completion:
        """Sample a reply; `stream` names its random stream, `stop` has further stops. Raises: EngineError."""
        plan = self.plan
        stop_strings = (*self.environment.stop_strings, *stop)
        if self.prompts.prompt_format is PromptFormat.BASE:
            stop_strings += self.environment.base_stop_strings
        request = GenerationRequest(
            prompt_ids=context_ids,
            seed=stream_seed(plan.run_seed, plan.example.example_id, plan.step, plan.sample_index, stream),
            sampling=plan.sampling,
            max_tokens=num_tokens,
            stop_token_ids=self.prompts.tokenizer.stop_token_ids,
            stop_strings=stop_strings,
        )
        started_at = perf_counter()
        completion = await self.engine.generate(request)
        self.seconds["generate"] += perf_counter() - started_at
        if completion.logprobs is None:
            # Without them the turn would count as not sampled.
            raise EngineError("the engine returned a reply without log-probabilities; the rollout is masked")
        return completion

    async def _let_act(self) -> Outcome | Stop:
        """Let a program call the model as it likes; the recorded calls become the turns."""
        failures: list[Failure] = []

        async def sample(
            prompt_ids: IntArray, num_tokens: int, stream: int, stop: tuple[str, ...]
        ) -> Completion:
            with catch_failure(FailureOwner.ENGINE) as caught:
                completion = await self._sample(prompt_ids, num_tokens, stream, stop)
                if completion.finish_reason is FinishReason.ABORT:
                    raise EngineError("the engine gave up on the reply")
                return completion
            assert caught.failure is not None
            # The program may go on without this reply; the attempt is lost all the same.
            failures.append(caught.failure)
            raise EngineError(caught.failure.detail)

        recorder = Recorder(
            self.prompts,
            sample,
            max_reply_tokens=self.plan.max_reply_tokens,
            max_positions=self.plan.max_positions,
            max_tokens=self.environment.max_attempt_tokens,
        )
        try:
            with catch_failure(FailureOwner.TASK) as caught:
                await self.environment.act(recorder)
        finally:
            recorder.is_sealed = True
            self.turns = list(recorder.turns())
        refusal, refused = recorder.refusal, recorder.refused_request
        if refused is not None and not failures and (caught.failure is not None or not recorder.num_calls):
            # Whatever the program said when it gave up, this is why.
            return Outcome.lost(FailureOwner.TASK, "request_refused", f"the program's request: {refused}")
        if caught.failure is not None and (refusal is None or not recorder.num_calls):
            failures.append(caught.failure)
        # An engine failure counts however the program handled it.
        if failures:
            return Outcome(parts={}, failure=failures[0])
        if not recorder.num_calls:
            return Outcome.lost(FailureOwner.TASK, "no_call", "the program ended without asking the model")
        self.num_format_errors = recorder.num_format_errors
        if refusal is not None:
            # Many programs fail then; it was the policy that left no room.
            return Stop.CONTEXT if isinstance(refusal, CallTooLong) else Stop.TOKENS
        return Stop.TIME if recorder.is_late else Stop.DONE

    async def _score(self, stop: Stop) -> Outcome:
        started_at = perf_counter()
        outcome = await self.environment.score()
        self.seconds["verify"] += perf_counter() - started_at
        rewards, num_replies = outcome.turn_rewards, sum(turn.is_sampled for turn in self.turns)
        if rewards and (len(rewards) != num_replies or not all(map(math.isfinite, rewards))):
            raise DataError(
                f"score gave the turns' rewards {rewards!s:.80} in an attempt of {num_replies} replies",
                allowed="Outcome.turn_rewards with one finite number for each reply, or none",
                next_step="correct score",
            )
        metrics = dict(outcome.metrics)
        if self.num_format_errors:
            metrics["num_format_errors"] = float(self.num_format_errors)
        if self.environment.max_turns > 1:
            metrics |= {"num_turns": float(num_replies), f"stopped_by_{stop}": 1.0}
        is_cut = any(turn.finish_reason is FinishReason.LENGTH for turn in self.turns)
        is_cut |= stop in (Stop.TOKENS, Stop.CONTEXT, Stop.TIME)
        return replace(outcome, metrics=metrics, truncated=outcome.truncated or is_cut)


async def run_rollout(
    environment: Environment, engine: Engine, tokenizer: Tokenizer, plan: RolloutPlan
) -> Rollout:
    """Attempt one example once, and close the environment.

    A failure of the engine, the task or its world gives a rollout without a score; the turns up to the
    failure are kept.

    The turns alternate between 'prompt', with the ids that were added, and 'assistant', with the sampled ids,
    those of a stop string included; joined, they are the engine's input and output.
    A `RESTART` in place of a prompt holds the whole conversation; the turns before it were no context of
    those behind it (`Rollout.samples`).
    Raises: WeightMismatch, ConfigError and cancellation, which concern the whole run.
    """
    prompts = PromptCache(tokenizer, plan.prompt_format)
    return await Attempt(environment=environment, engine=engine, plan=plan, prompts=prompts).run()
