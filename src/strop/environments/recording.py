"""What a program that asks the model has seen and said: exact ids of every call, as the turns of a rollout.

A program sends the whole conversation with each call. A call whose messages begin with those of an earlier
one and its reply goes on behind the ids that were sampled then; they are matched by value, for clients write
JSON anew and leave thinking out. Any other call begins a sample of its own: a new conversation, an edited
history, a branch. No sampled token is trained twice, and a reply that no client received not at all.
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
from strop.environments.extending import PromptCache, encode_next_messages, reads_as, spoken_turn, take_apart
from strop.errors import ConfigError
from strop.rollout import RESTART, FinishReason, IntArray, Message, ToolCall, Turn
from strop.tasks.prompt import pose_messages
from strop.tokenizer import Tokenizer
from strop.tool_calls import CallFormat, Spoken

_SEED_BITS = 31


class CallTooLong(Exception):
    """A call for which the model has no room."""


class CallsUsedUp(Exception):
    """A call beyond the tokens that an attempt may have."""


@dataclass(kw_only=True, slots=True, eq=False)
class Call:
    """One call, answered."""

    messages: tuple[Message, ...]
    """All that the program sent, but for the tools and what the model thought."""
    said: Message
    """The reply, as history."""
    spoken: Spoken
    prompt: Turn
    """What was added behind the parent's reply; everything where there is no parent."""
    prompt_ids: IntArray
    """Everything that the model was asked with."""
    reply: Turn
    parent: Call | None
    is_delivered: bool = True
    """Whether the client was there to get the reply."""
    children: list[Call] = field(default_factory=list)


Sample = Callable[[IntArray, int, int], Awaitable[Completion]]
"""(prompt ids, tokens at most, name of the random stream) -> reply."""


class Recorder:
    """Asks the model for one rollout's program. Calls may overlap."""

    def __init__(
        self,
        prompts: PromptCache,
        sample: Sample,
        *,
        max_reply_tokens: int,
        max_positions: int | None,
        max_tokens: int | None = None,
    ) -> None:
        """`max_tokens`: sampled in all calls together."""
        self._prompts = prompts
        self._sample = sample
        self._max_reply_tokens = max_reply_tokens
        self.max_positions = max_positions
        """Tokens that the model can look at; None: unknown."""
        self._max_tokens = max_tokens
        self._calls: list[Call] = []
        self._by_history: dict[tuple[Any, ...], Call] = {}
        """Each call by the values of its messages with the reply behind them."""
        self._times_asked: Counter[bytes] = Counter()
        self._num_asked = 0
        self._num_said = 0
        self._num_set_aside = 0
        self._given_back = asyncio.Condition()
        self.refusal: CallTooLong | CallsUsedUp | None = None
        """Why the newest call was refused: the policy has used up its room. None where it was not."""
        self.is_sealed = False
        """Whether the attempt is over, so that no call is answered any more."""
        self.is_late = False
        """Whether the program was ended at its time."""

    @property
    def num_calls(self) -> int:
        """Calls that were answered."""
        return len(self._calls)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return self._prompts.tokenizer

    async def ask(
        self,
        messages: Sequence[Message],
        tools: tuple[str, ...] = (),
        max_tokens: int | None = None,
        *,
        is_one_call: bool = False,
    ) -> Call:
        """Sample a reply to a conversation.

        `tools` are functions in the form of OpenAI's chat API, as JSON. `is_one_call`: of the calls of tools
        in a reply the program gets the first alone; the ids stay as they are.
        Raises: CallTooLong, CallsUsedUp; ConfigError if the model cannot be asked so; EngineError.
        """
        posed = _pose(messages, tools)
        parent, prompt, prompt_ids = self._continue(posed, tools)
        completion = await self._complete(prompt_ids, max_tokens)
        spoken = take_apart(self._prompts, completion, tools, self._num_asked)
        if completion.finish_reason is FinishReason.LENGTH:
            # A reply that was cut has no calls: what looks whole may have gone on.
            spoken = replace(spoken, calls=())
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
        return self._keep(call)

    async def ask_ids(self, prompt_ids: IntArray, max_tokens: int | None = None) -> Call:
        """Sample a reply to a prompt that the program rendered.

        One that begins with an earlier prompt and its reply goes on from these.
        Raises: as `ask`.
        """
        wholes = [(call, np.concatenate([call.prompt_ids, call.reply.token_ids])) for call in self._calls]
        known = [
            (call, len(whole))
            for call, whole in wholes
            if len(whole) < len(prompt_ids) and np.array_equal(whole, prompt_ids[: len(whole)])
        ]
        parent, length = max(known, key=lambda one: one[1], default=(None, 0))
        new_ids = prompt_ids[length:]
        text = self._prompts.tokenizer.decode(new_ids, with_special=True)
        completion = await self._complete(prompt_ids, max_tokens)
        return self._keep(
            Call(
                messages=(),
                said=Message(role="assistant", content=completion.text),
                spoken=Spoken(content=completion.text),
                prompt=Turn(role=RESTART if parent is None else "prompt", text=text, token_ids=new_ids),
                prompt_ids=prompt_ids,
                reply=spoken_turn(completion),
                parent=parent,
            )
        )

    async def _complete(self, prompt_ids: IntArray, max_tokens: int | None) -> Completion:
        """Sample a reply. Raises: as `ask`."""
        wanted = await self._take_room(len(prompt_ids), max_tokens)
        self._num_asked += 1
        digest = hashlib.blake2b(prompt_ids.tobytes(), digest_size=8).digest()
        stream = hashlib.blake2b(
            digest + self._times_asked[digest].to_bytes(8, "little"), digest_size=8
        ).digest()
        self._times_asked[digest] += 1
        try:
            seed = int.from_bytes(stream, "little") % 2**_SEED_BITS
            completion = await self._sample(prompt_ids, wanted, seed)
            self._num_said += len(completion.token_ids)
        finally:
            async with self._given_back:
                self._num_set_aside -= wanted
                self._given_back.notify_all()
        return completion

    def _keep(self, call: Call) -> Call:
        self._calls.append(call)
        if call.parent is not None:
            call.parent.children.append(call)
        return call

    def turns(self) -> tuple[Turn, ...]:
        """Return everything as the turns of a rollout: one conversation behind the other, by first call."""
        turns: list[Turn] = []
        kept = [call for call in self._calls if call.is_delivered or call.children]
        is_placed: set[int] = set()
        for first in kept:
            call: Call | None = first
            while call is not None and id(call) not in is_placed:
                is_placed.add(id(call))
                prompt = replace(call.prompt, role="prompt" if call is not first or not turns else RESTART)
                if call is first and call.parent is not None:
                    # A branch: what it shares with the others is context here.
                    text = self._prompts.tokenizer.decode(call.prompt_ids, with_special=True)
                    prompt = replace(prompt, text=text, token_ids=call.prompt_ids)
                turns += [prompt, call.reply]
                call = next((child for child in call.children if child in kept), None)
        return tuple(turns)

    async def _take_room(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """Return how many tokens a reply may have, and set them aside; others under way may be waited for.

        Raises: CallTooLong, CallsUsedUp.
        """
        wanted = min(max_tokens or self._max_reply_tokens, self._max_reply_tokens)
        if self.max_positions is not None:
            room = self.max_positions - num_prompt_tokens
            if room < 1:
                self.refusal = CallTooLong(
                    f"This model's maximum context length is {self.max_positions} tokens, and the messages"
                    f" have {num_prompt_tokens}"
                )
                raise self.refusal
            wanted = min(wanted, room)
        if self._max_tokens is not None:
            async with self._given_back:
                await self._given_back.wait_for(
                    lambda: not self._num_set_aside or self._count_left() >= wanted
                )
            wanted = min(wanted, self._count_left())
            if wanted < 1:
                self.refusal = CallsUsedUp(f"the attempt has had its {self._max_tokens} tokens")
                raise self.refusal
        self._num_set_aside += wanted
        self.refusal = None
        return wanted

    def _count_left(self) -> int:
        """Return how many tokens are neither sampled nor set aside, of those that an attempt may have."""
        assert self._max_tokens is not None
        return self._max_tokens - self._num_said - self._num_set_aside

    def _continue(
        self, messages: tuple[Message, ...], tools: tuple[str, ...]
    ) -> tuple[Call | None, Turn, IntArray]:
        """Return the call that this one goes on from, what is new, and the ids of everything."""
        keys, bare = tuple(map(_key, messages)), _without_reasoning(messages)
        for length in range(len(keys) - 1, 0, -1):
            parent = self._by_history.get((tools, *keys[:length]))
            if parent is not None and (new := self._extend(parent, bare[length:])) is not None:
                text, new_ids = new
                whole = np.concatenate([parent.prompt_ids, parent.reply.token_ids, new_ids])
                return parent, Turn(role="prompt", text=text, token_ids=new_ids), whole
        try:
            text, ids = self._prompts.render(messages)
        except ConfigError:
            # Clients send back what the model thought; many templates have no place for it.
            text, ids = self._prompts.render(bare)
        return None, Turn(role=RESTART, text=text, token_ids=ids), ids

    def _extend(self, parent: Call, new_messages: tuple[Message, ...]) -> tuple[str, IntArray] | None:
        tokenizer, prompt_format = self._prompts.tokenizer, self._prompts.prompt_format
        calls: tuple[ToolCall, ...] = parent.said.tool_calls
        if self._prompts.call_format is CallFormat.FENCE:
            calls = ()
        reason = parent.reply.finish_reason
        if reason is None or not reads_as(tokenizer, parent.reply):
            return None
        return encode_next_messages(tokenizer, prompt_format, parent.messages, new_messages, reason, calls)


def _pose(messages: Sequence[Message], tools: tuple[str, ...]) -> tuple[Message, ...]:
    """Return messages of which the first that is a user's, or else the first, says which tools there are."""
    if not tools:
        return tuple(messages)
    places = [index for index, message in enumerate(messages) if message.role == "user"]
    place = places[0] if places else 0
    return (
        *messages[:place],
        *pose_messages([messages[place]], "model_default", tools),
        *messages[place + 1 :],
    )


def _without_reasoning(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return tuple(replace(message, reasoning=None) for message in messages)


def _key(message: Message) -> tuple[Any, ...]:
    """Return what of a message must be equal for the next call to go on from it."""
    calls = tuple(
        (call.name, json.dumps(json.loads(call.arguments), sort_keys=True)) for call in message.tool_calls
    )
    return message.role, message.text.strip(), calls
