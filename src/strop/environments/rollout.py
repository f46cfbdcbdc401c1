"""The one rollout path: reset, reply, step, ..., score, for one turn or many.

Failures on the way are attributed to an owner: the engine, the task and its world, or whom the world
names. None ever becomes a reward of 0.

Left out on purpose: what is attempted again, which is the group's decision (`groups`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from strop.engine import Completion, Engine, GenerationRequest, stream_seed
from strop.environments.choices import EncodedChoices, choose, encode_choices
from strop.environments.contract import Action, Environment
from strop.environments.extending import PromptCache, encode_next_messages, reads_as, spoken_turn, take_apart
from strop.environments.recording import CallTooLong, Recorder
from strop.errors import DataError, EngineError
from strop.rollout import (
    PROMPT_TOO_LONG,
    RESTART,
    Branch,
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
from strop.tasks.prompt import PromptFormat, tools_of
from strop.tokenizer import Tokenizer
from strop.tool_calls import CallFormat

_CLOSE_LIMIT_S = 10.0
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
    num_branches: int = 1
    """Plans of a group, one behind the other, that share their first turns; 1: none do."""
    num_shared_turns: int = 1
    """Replies that they share at least."""

    def has_room_behind(self, num_prompt_tokens: int, num_reply_tokens: int) -> bool:
        """Whether a whole reply fits behind a prompt."""
        return self.max_positions is None or num_prompt_tokens + num_reply_tokens <= self.max_positions


class Stop(StrEnum):
    """Why an attempt that is scored ended."""

    DONE = "done"
    TURNS = "turns"
    TOKENS = "tokens"
    """A reply was cut, or all replies together used up their tokens."""
    CONTEXT = "context"
    """The model has no room for another reply."""
    TIME = "time"


@dataclass(kw_only=True, slots=True)
class Attempt:
    """A rollout under way."""

    environment: Environment
    engine: Engine
    plan: RolloutPlan
    prompts: PromptCache
    clock: Callable[[], float] = time.perf_counter
    turns: list[Turn] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"generate": 0.0, "verify": 0.0})
    started_at: float = 0.0
    choice_nats: dict[str, float] = field(default_factory=dict)
    """Log-probability of each reply that could be chosen, by the name of its metric."""
    stage_owner: FailureOwner = FailureOwner.TASK
    """Whose code runs now, hence who owns a failure that names no owner."""
    history: list[Message] = field(default_factory=list)
    context_ids: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """What the policy is asked with next."""
    actions: list[Action] = field(default_factory=list)
    """What the policy has said, and the world has taken."""
    told: list[tuple[Message, ...]] = field(default_factory=list)
    """The opening, and what the world answered each time."""
    branch: Branch | None = None

    @property
    def world_seed(self) -> int:
        """What the world draws from; one for all attempts of a group."""
        plan = self.plan
        return stream_seed(plan.run_seed, plan.example.example_id, plan.step, 0, _WORLD_TURN)

    async def run(self, until: int | None = None) -> Outcome | None:
        """Walk to the score, from reset or from where it stands.

        None: `until` replies were said, and it has not ended.
        """
        if not self.turns:
            if getattr(self.environment, "max_attempt_s", None) is not None:
                self.started_at = self.clock()
            self.history = list(await self.environment.reset(self.plan.example, self.world_seed))
            self.started_at += getattr(self.environment, "waited_s", 0.0)
            self.told = [tuple(self.history)]
        ended = await self._converse(until)
        return await self._score(ended) if isinstance(ended, Stop) else ended

    async def _converse(self, until: int | None) -> Outcome | Stop | None:
        """Let the policy and the world take turns; return why they ended, or why there is no score."""
        environment = self.environment
        if (act := getattr(environment, "act", None)) is not None:
            return await self._let_act(act)
        tools = tools_of(self.history)
        if not self.turns:
            text, self.context_ids = self.prompts.render(tuple(self.history))
            self.turns.append(Turn(role="prompt", text=text, token_ids=self.context_ids))
        end = environment.max_turns if until is None else min(until, environment.max_turns)
        for turn_index in range(len(self.actions), end):
            choices = self._encode_choices()
            if (ended := self._find_end(choices, turn_index)) is not None:
                return ended
            if choices is None:
                completion = await self._generate(turn_index)
            else:
                self.context_ids, completion = choices.context_ids, await self._choose(choices)
            if completion is None:
                return Stop.TIME
            if completion.finish_reason is FinishReason.ABORT:
                return Outcome.lost(FailureOwner.ENGINE, "abort", "the engine gave up on the reply")
            spoken = take_apart(self.prompts, completion, tools, turn_index) if tools else None
            self.actions.append(
                Action(text=completion.text, finish_reason=completion.finish_reason, spoken=spoken)
            )
            result = await environment.step(self.actions[-1])
            self.told.append(result.messages)
            if result.done or completion.finish_reason is FinishReason.LENGTH:
                return Stop.DONE if result.done else Stop.TOKENS
            if turn_index + 1 < environment.max_turns:
                said = Message(role="assistant", content=completion.text)
                if spoken is not None and spoken.calls and self.prompts.call_format is not CallFormat.FENCE:
                    said = replace(said, content=spoken.content, tool_calls=spoken.calls)
                self._continue(said, result.messages)
        return Stop.TURNS if end == environment.max_turns else None

    def fork(self, plan: RolloutPlan) -> Attempt:
        """Return one that stands where this one does, with a plan of its own; its world is to be set."""
        of = self.plan.sample_index
        return replace(
            self,
            plan=plan,
            turns=list(self.turns),
            history=list(self.history),
            actions=list(self.actions),
            told=list(self.told),
            seconds=dict(self.seconds) if plan.sample_index == of else dict.fromkeys(self.seconds, 0.0),
            branch=Branch(of=of, num_turns=len(self.turns)),
        )

    async def conclude(self, walk: Awaitable[Outcome | None]) -> Rollout:
        """Await what walks this attempt, close its world, and return what came of it.

        Raises: as `run_rollout`.
        """
        try:
            with catch_failure(lambda: self.stage_owner) as caught:
                outcome = await walk or Outcome(parts={})
        finally:
            with catch_failure(FailureOwner.INFRA) as closing:
                async with asyncio.timeout(_CLOSE_LIMIT_S):
                    await self.environment.close()
        if caught.failure is not None:
            outcome = Outcome(parts={}, failure=caught.failure)
        if closing.failure is not None:
            # The score was given before and stands; the leak must be seen all the same.
            outcome = replace(outcome, metrics={**outcome.metrics, "close_failed": 1.0})
        plan = self.plan
        return Rollout(
            example=plan.example,
            step=plan.step,
            sample_index=plan.sample_index,
            turns=tuple(self.turns),
            outcome=outcome,
            sampling=Sampling(temperature=0.0) if self.choice_nats else plan.sampling,
            seconds=self.seconds,
            branch=self.branch,
        )

    def _find_end(self, choices: EncodedChoices | None, turn_index: int) -> Outcome | Stop | None:
        """Say why the policy is not asked any more; None where it is."""
        plan, num_context = self.plan, len(self.context_ids)
        num_reply_tokens = plan.max_reply_tokens if choices is None else choices.num_reply_tokens
        if not plan.has_room_behind(num_context, num_reply_tokens):
            if turn_index:
                return Stop.CONTEXT
            detail = (
                f"a prompt of {num_context} tokens and a reply of {num_reply_tokens} exceed"
                f" the model's {plan.max_positions} positions"
            )
            return Outcome.lost(FailureOwner.TASK, PROMPT_TOO_LONG, detail)
        left_tokens, left_s = self._left()
        if left_tokens < 1:
            return Stop.TOKENS
        return Stop.TIME if left_s <= 0.0 else None

    def _left(self) -> tuple[float, float]:
        """Return the tokens and the seconds that the attempt has left."""
        max_tokens = getattr(self.environment, "max_attempt_tokens", None)
        max_s = getattr(self.environment, "max_attempt_s", None)
        num_said = sum(len(turn.token_ids) for turn in self.turns if turn.is_sampled)
        left_tokens = math.inf if max_tokens is None else max_tokens - num_said
        return left_tokens, math.inf if max_s is None else max_s - (self.clock() - self.started_at)

    def _continue(self, said: Message, new_messages: Sequence[Message]) -> None:
        """Add the turn that answers the last reply, and make the conversation that much longer.

        Its ids are never rendered again, only extended. Where it cannot be shown that this gives what the
        model would be asked, they are given up and rendered anew: a new sample begins (`prefix_break`).
        """
        reply, tokenizer = self.turns[-1], self.prompts.tokenizer
        assert reply.finish_reason is not None
        extension = encode_next_messages(
            tokenizer,
            self.prompts.prompt_format,
            self.history,
            new_messages,
            reply.finish_reason,
            said.tool_calls,
        )
        self.history += [said, *new_messages]
        if extension is not None and reads_as(tokenizer, reply):
            text, new_ids = extension
            self.turns.append(Turn(role="prompt", text=text, token_ids=new_ids))
            self.context_ids = np.concatenate([self.context_ids, reply.token_ids, new_ids])
        else:
            text, self.context_ids = self.prompts.render(tuple(self.history))
            self.turns.append(Turn(role=RESTART, text=text, token_ids=self.context_ids))

    async def _generate(self, turn_index: int) -> Completion | None:
        """Sample a reply; None if it was not done in the time that is left."""
        plan = self.plan
        left_tokens, left_s = self._left()
        num_tokens = int(min(plan.max_reply_tokens, left_tokens))
        self.stage_owner = FailureOwner.ENGINE
        completion = await _in_time(self._sample(self.context_ids, num_tokens, turn_index), left_s)
        if completion is not None:
            # A reply whose parts do not fit together is the engine's failure too.
            self.turns.append(spoken_turn(completion))
        self.stage_owner = FailureOwner.TASK
        return completion

    async def _sample(self, context_ids: IntArray, num_tokens: int, stream: int) -> Completion:
        """Sample a reply; `stream` names its random stream. Raises: EngineError."""
        plan = self.plan
        stop_strings = self.environment.stop_strings
        if self.prompts.prompt_format is PromptFormat.BASE:
            stop_strings += getattr(self.environment, "base_stop_strings", ())
        request = GenerationRequest(
            prompt_ids=context_ids,
            seed=stream_seed(plan.run_seed, plan.example.example_id, plan.step, plan.sample_index, stream),
            sampling=plan.sampling,
            max_tokens=num_tokens,
            stop_token_ids=self.prompts.tokenizer.stop_token_ids,
            stop_strings=stop_strings,
        )
        started_at = self.clock()
        completion = await self.engine.generate(request)
        self.seconds["generate"] += self.clock() - started_at
        if completion.logprobs is None:
            # The turn would count as not sampled.
            raise EngineError("the engine returned a reply without log-probabilities; the rollout is masked")
        return completion

    async def _let_act(self, act: Callable[[Recorder], Awaitable[None]]) -> Outcome | Stop:
        """Have a program ask the model as it likes; what it was told and said are the turns."""
        plan = self.plan
        failures: list[Failure] = []

        async def sample(prompt_ids: IntArray, num_tokens: int, stream: int) -> Completion:
            with catch_failure(FailureOwner.ENGINE) as caught:
                completion = await self._sample(prompt_ids, num_tokens, stream)
                if completion.finish_reason is FinishReason.ABORT:
                    raise EngineError("the engine gave up on the reply")
                return completion
            assert caught.failure is not None
            # The program may well go on without this reply; the attempt is lost all the same.
            failures.append(caught.failure)
            raise EngineError(caught.failure.detail)

        recorder = Recorder(
            self.prompts,
            sample,
            max_reply_tokens=plan.max_reply_tokens,
            max_positions=plan.max_positions,
            max_tokens=getattr(self.environment, "max_attempt_tokens", None),
        )
        try:
            with catch_failure(FailureOwner.TASK) as caught:
                await act(recorder)
        finally:
            recorder.is_sealed = True
            self.turns = list(recorder.turns())
        refusal = recorder.refusal
        if caught.failure is not None and (refusal is None or not recorder.num_calls):
            failures.append(caught.failure)
        # What failed in the engine, whatever the program made of it.
        if failures:
            return Outcome(parts={}, failure=failures[0])
        if not recorder.num_calls:
            return Outcome.lost(FailureOwner.TASK, "no_call", "the program ended without asking the model")
        if refusal is not None:
            # Many programs fail then; it was the policy that left no room.
            return Stop.CONTEXT if isinstance(refusal, CallTooLong) else Stop.TOKENS
        return Stop.TIME if recorder.is_late else Stop.DONE

    def _encode_choices(self) -> EncodedChoices | None:
        """Return the replies to choose from, or None where the policy writes."""
        choices: tuple[str, ...] = getattr(self.environment, "choices", ())
        if not choices:
            return None
        prompt = self.turns[-1]
        earlier_ids = self.context_ids[: len(self.context_ids) - len(prompt.token_ids)]
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
        self.turns.append(spoken_turn(completion))
        self.choice_nats = {f"choice_{index}_nats": nats for index, nats in enumerate(chosen.nats)}
        self.stage_owner = FailureOwner.TASK
        return completion

    async def _score(self, stop: Stop) -> Outcome:
        started_at = self.clock()
        outcome = await self.environment.score()
        self.seconds["verify"] += self.clock() - started_at
        given, num_replies = outcome.turn_rewards, sum(turn.is_sampled for turn in self.turns)
        if given and (len(given) != num_replies or not all(map(math.isfinite, given))):
            raise DataError(
                f"score gave the turns' rewards {given!s:.80} in an attempt of {num_replies} replies",
                allowed="Outcome.turn_rewards with one finite number for each reply, or none",
                next_step="correct score",
            )
        metrics = {**outcome.metrics, **self.choice_nats}
        if self.environment.max_turns > 1:
            metrics |= {"num_turns": float(num_replies), f"stopped_by_{stop}": 1.0}
        if metrics:
            outcome = replace(outcome, metrics=metrics)
        is_cut = any(turn.finish_reason is FinishReason.LENGTH for turn in self.turns)
        is_cut |= stop in (Stop.TOKENS, Stop.CONTEXT, Stop.TIME)
        return replace(outcome, truncated=outcome.truncated or is_cut)


async def _in_time(completion: Awaitable[Completion], left_s: float) -> Completion | None:
    """Wait for a reply, and give it up at the end of the time; an engine's own time-out is its failure."""
    if left_s == math.inf:
        return await completion
    waiting = asyncio.ensure_future(completion)
    done, _ = await asyncio.wait([waiting], timeout=left_s)
    if done:
        return waiting.result()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    return None


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
    attempt = Attempt(environment=environment, engine=engine, plan=plan, prompts=prompts, clock=clock)
    return await attempt.conclude(attempt.run())
