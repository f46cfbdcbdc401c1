"""Record the model calls of a program with exact token ids, as the turns of a rollout.

A program sends the whole conversation with each call. A call whose messages begin with those of an earlier
call and its reply continues the ids sampled then; messages are compared by value, because clients rewrite
JSON and drop thinking. Any other call begins a new sample: a new conversation, an edited history, a branch.
No sampled token is trained twice, and a reply that no client received not at all.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from strop.engine import Completion
from strop.environments.extending import PromptCache, spoken_turn, take_apart
from strop.errors import ConfigError
from strop.rollout import CONVERSATION, RESTART, FinishReason, IntArray, Message, Turn
from strop.tasks.prompt import pose
from strop.tasks.tool_calls import Spoken
from strop.tokenizer import Tokenizer

_SEED_BITS = 31


class CallTooLong(Exception):
    """The prompt of a call leaves no room in the context."""


class CallsUsedUp(Exception):
    """The attempt's token budget is used up."""


@dataclass(kw_only=True, slots=True, eq=False)
class Call:
    """One answered call."""

    messages: tuple[Message, ...]
    """The program's messages, without tools and thinking."""
    said: Message
    """The reply, as a message of the history."""
    spoken: Spoken
    prompt: Turn
    """The text behind the parent's reply; without a parent, the whole prompt."""
    prompt_ids: IntArray
    """The whole prompt."""
    reply: Turn
    parent: Call | None
    is_delivered: bool = True
    """Whether the client received the reply."""
    children: list[Call] = field(default_factory=list)


Sample = Callable[[IntArray, int, int, tuple[str, ...]], Awaitable[Completion]]
"""(prompt ids, largest number of tokens, id of the random stream, texts that end the reply) -> reply."""


class Recorder:
    """Calls the model for one rollout's program, and records the calls. Calls may overlap."""

    def __init__(
        self,
        prompts: PromptCache,
        sample: Sample,
        *,
        max_reply_tokens: int,
        max_positions: int | None,
        max_tokens: int | None = None,
    ) -> None:
        """`max_tokens`: the budget of sampled tokens of all calls together."""
        self._prompts = prompts
        self._sample = sample
        self._max_reply_tokens = max_reply_tokens
        self.max_positions = max_positions
        """The model's context length; None: unknown."""
        self._max_tokens = max_tokens
        self._calls: list[Call] = []
        self._by_history: dict[tuple[Any, ...], Call] = {}
        """Each call by the keys of its messages and its reply."""
        self._times_asked: Counter[bytes] = Counter()
        self._num_asked = 0
        self._num_sampled = 0
        self._num_reserved = 0
        self._released = asyncio.Condition()
        self.refusal: CallTooLong | CallsUsedUp | None = None
        """Why the newest call was refused; None if it was not."""
        self.refused_request: str | None = None
        """What the newest request asked for, if it could not be served; None after an answered one."""
        self.num_format_errors = 0
        """Replies with a call that cannot be read, or without the form that their request asked for."""
        self.is_sealed = False
        """Whether the attempt is over; then no call is answered."""
        self.is_late = False
        """Whether the program was stopped at its time limit."""

    @property
    def num_calls(self) -> int:
        """Calls that were answered."""
        return len(self._calls)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._prompts.tokenizer

    async def ask(
        self,
        messages: Sequence[Message],
        tools: tuple[str, ...] = (),
        max_tokens: int | None = None,
        *,
        is_one_call: bool = False,
        stop: tuple[str, ...] = (),
    ) -> Call:
        """Sample a reply to a conversation.

        `tools` are functions in the form of OpenAI's chat API, as JSON. `is_one_call`: the program gets only
        the first tool call of a reply; the ids stay unchanged. `stop`: texts that end the reply.
        Raises: CallTooLong, CallsUsedUp; ConfigError if the template cannot render the messages; EngineError.
        """
        posed = _pose(messages, tools)
        parent, prompt, prompt_ids = self._continue(posed, tools)
        num_tokens = await self._reserve(len(prompt_ids), max_tokens)
        self._num_asked += 1
        digest = hashlib.blake2b(prompt_ids.tobytes(), digest_size=8).digest()
        number = self._times_asked[digest].to_bytes(8, "little")
        self._times_asked[digest] += 1
        stream = hashlib.blake2b(digest + number, digest_size=8).digest()
        try:
            seed = int.from_bytes(stream, "little") % 2**_SEED_BITS
            completion = await self._sample(prompt_ids, num_tokens, seed, stop)
            self._num_sampled += len(completion.token_ids)
        finally:
            async with self._released:
                self._num_reserved -= num_tokens
                self._released.notify_all()
        spoken = take_apart(self._prompts, completion, tools, self._num_asked, prompt.text)
        is_cut = completion.finish_reason is FinishReason.LENGTH
        if is_cut or (spoken.mistakes and not spoken.calls):
            # A reply that was cut has no calls: one that looks complete may have gone on. The program gets
            # the text of calls that it cannot get as calls.
            bare = take_apart(self._prompts, completion, (), self._num_asked, prompt.text)
            spoken = replace(bare, mistakes=spoken.mistakes)
        if is_one_call:
            spoken = replace(spoken, calls=spoken.calls[:1])
        call = Call(
            messages=_without_reasoning(posed),
            said=Message(role="assistant", content=spoken.content, tool_calls=spoken.calls),
            spoken=spoken,
            prompt=prompt,
            prompt_ids=prompt_ids,
            reply=spoken_turn(completion),
            parent=parent,
        )
        self._by_history[tools, *map(_key, (*call.messages, call.said))] = call
        self._calls.append(call)
        if parent is not None:
            parent.children.append(call)
        return call

    def turns(self) -> tuple[Turn, ...]:
        """Return all calls as the turns of a rollout, one conversation after the other, by first call."""
        turns: list[Turn] = []
        kept = [call for call in self._calls if call.is_delivered or call.children]
        is_placed: set[int] = set()
        for first in kept:
            call: Call | None = first
            while call is not None and id(call) not in is_placed:
                is_placed.add(id(call))
                prompt = call.prompt
                if call is first and call.parent is not None:
                    # A branch: the shared prefix is context here.
                    text = self._prompts.tokenizer.decode(call.prompt_ids)
                    prompt = Turn(role=CONVERSATION, text=text, token_ids=call.prompt_ids)
                if not turns:
                    prompt = replace(prompt, role="prompt")
                turns += [prompt, call.reply]
                call = next((child for child in call.children if child in kept), None)
        return tuple(turns)

    async def _reserve(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """Reserve the tokens of a reply and return their number; waits for running calls to release some.

        Raises: CallTooLong, CallsUsedUp.
        """
        num_tokens = min(max_tokens or self._max_reply_tokens, self._max_reply_tokens)
        if self.max_positions is not None:
            room = self.max_positions - num_prompt_tokens
            if room < 1:
                self.refusal = CallTooLong(
                    f"This model's maximum context length is {self.max_positions} tokens, and the messages"
                    f" have {num_prompt_tokens}"
                )
                raise self.refusal
            num_tokens = min(num_tokens, room)
        if self._max_tokens is not None:
            async with self._released:
                await self._released.wait_for(
                    lambda: not self._num_reserved or self._count_left() >= num_tokens
                )
            num_tokens = min(num_tokens, self._count_left())
            if num_tokens < 1:
                self.refusal = CallsUsedUp(f"the attempt has had its {self._max_tokens} tokens")
                raise self.refusal
        self._num_reserved += num_tokens
        self.refusal = self.refused_request = None
        return num_tokens

    def _count_left(self) -> int:
        """Return how many tokens of the attempt's budget are neither sampled nor reserved."""
        assert self._max_tokens is not None
        return self._max_tokens - self._num_sampled - self._num_reserved

    def _continue(
        self, messages: tuple[Message, ...], tools: tuple[str, ...]
    ) -> tuple[Call | None, Turn, IntArray]:
        """Return the parent call, the new prompt text, and the ids of the whole prompt."""
        keys, bare = tuple(map(_key, messages)), _without_reasoning(messages)
        role = CONVERSATION
        for length in range(len(keys) - 1, 0, -1):
            parent = self._by_history.get((tools, *keys[:length]))
            if parent is None:
                continue
            role = RESTART
            new = self._prompts.extend(parent.messages, parent.reply, parent.said.tool_calls, bare[length:])
            if new is not None:
                text, new_ids = new
                whole = np.concatenate([parent.prompt_ids, parent.reply.token_ids, new_ids])
                return parent, Turn(role="prompt", text=text, token_ids=new_ids), whole
        try:
            text, ids = self._prompts.render(messages)
        except ConfigError:
            # Clients send back the model's thinking; many templates cannot render it.
            text, ids = self._prompts.render(bare)
        return None, Turn(role=role, text=text, token_ids=ids), ids


def _pose(messages: Sequence[Message], tools: tuple[str, ...]) -> tuple[Message, ...]:
    """Add the tools to the first user message, or to the first message if there is none."""
    posed = list(messages)
    if tools:
        at = next((index for index, message in enumerate(posed) if message.role == "user"), 0)
        posed[at : at + 1] = pose([posed[at]], tools=tools)
    return tuple(posed)


def _without_reasoning(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return tuple(replace(message, reasoning=None) for message in messages)


def _key(message: Message) -> tuple[Any, ...]:
    """Return the parts of a message that must be equal for a later call to continue from it."""
    calls = tuple(
        (call.name, json.dumps(json.loads(call.arguments), sort_keys=True)) for call in message.tool_calls
    )
    return message.role, message.text.strip(), calls
