"""Token ids of a growing conversation: its opening, and the ids between a reply and the next one.

Sampled ids are never changed, and only new text is encoded: rendering a reply again can give other ids than
were sampled (TOK-5). The chat template renders only the text between a reply and the next one, with a
stand-in for the reply, and must write the stand-in right behind the prompt that the reply answered.
The reply's ids must decode to its text. If either fails, the caller renders the whole conversation again, and
a new training sample begins there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from strop.engine import Completion
from strop.rollout import FinishReason, IntArray, Message, ToolCall, Turn
from strop.tasks.prompt import (
    PromptFormat,
    find_reader,
    posed,
    render_prompt,
    resolve_prompt_format,
    shown_form,
)
from strop.tasks.tool_calls import CallReader, Spoken, name_calls, text_reader
from strop.thoughts import begun_thought
from strop.tokenizer import GUARD, Tokenizer

_STAND_IN = "reply"
_read_fences = text_reader("fence")


class PromptCache:
    """Renders and encodes each opening once; shared by the rollouts of a group."""

    def __init__(self, tokenizer: Tokenizer, prompt_format: PromptFormat | str) -> None:
        self.tokenizer = tokenizer
        self.prompt_format = resolve_prompt_format(tokenizer, prompt_format)
        """Chat or base."""
        self._prompts: dict[tuple[Message, ...], tuple[str, IntArray]] = {}

    @property
    def call_reader(self) -> CallReader | None:
        """What reads the model's own calls; None: it is told in words how to write them."""
        return find_reader(self.tokenizer, self.prompt_format)

    def render(self, messages: tuple[Message, ...]) -> tuple[str, IntArray]:
        """Return the prompt as text and as ids; the same array object for equal messages."""
        if messages not in self._prompts:
            self._prompts[messages] = render_prompt(self.tokenizer, messages, self.prompt_format)
        return self._prompts[messages]

    def extend(
        self,
        history: Sequence[Message],
        reply: Turn,
        calls: tuple[ToolCall, ...],
        new_messages: Sequence[Message],
    ) -> tuple[str, IntArray] | None:
        """Return what follows a reply to `history`; None if its ids cannot be extended."""
        if reply.finish_reason is None or not reads_as(self.tokenizer, reply):
            return None
        calls = () if self.call_reader is None else calls
        return encode_next_messages(
            self.tokenizer, self.prompt_format, history, new_messages, reply.finish_reason, calls
        )


def reads_as(tokenizer: Tokenizer, reply: Turn) -> bool:
    """Whether a reply's ids decode to its text, up to the terminator or the stop string that ended it."""
    is_ended = reply.finish_reason is FinishReason.EOS
    decoded = tokenizer.decode(reply.token_ids[:-1] if is_ended else reply.token_ids)
    is_stopped = reply.finish_reason is FinishReason.STOP_STRING
    return decoded.startswith(reply.text) if is_stopped else decoded == reply.text


def encode_next_messages(
    tokenizer: Tokenizer,
    prompt_format: PromptFormat,
    history: Sequence[Message],
    new_messages: Sequence[Message],
    finish_reason: FinishReason,
    calls: tuple[ToolCall, ...] = (),
) -> tuple[str, IntArray] | None:
    """Return text and ids between the last reply and the next one.

    `history` holds all messages before the last reply; `calls` are the tool calls of that reply;
    `prompt_format` is resolved. A terminator that the policy sampled is not repeated. None if the template
    renders the history differently once a reply follows, so that the ids cannot be extended.
    """
    if prompt_format is PromptFormat.BASE:
        spelled, _ = shown_form(tokenizer, (*history, *new_messages), prompt_format)
        text = "\n\n" + tokenizer.render_base(spelled[len(history) :])
        return text, tokenizer.encode(tokenizer.guard(text))
    stand_in = Message(role="assistant", content=_STAND_IN, tool_calls=calls)
    whole, tools = shown_form(tokenizer, (*history, stand_in, *new_messages), prompt_format)
    before = tokenizer.render(whole[: len(history)], tools=tools)
    full = tokenizer.render(whole, is_thinking=posed(history).is_thinking, tools=tools)
    terminator = tokenizer.token_text(tokenizer.turn_end_id)
    if calls:
        # Between the stand-in and its terminator the template writes the calls in its own syntax.
        spoken = tokenizer.render(whole[: len(history) + 1], tools=tools, is_reply_next=False)
        end = spoken.rfind(terminator)
        if end < len(before) or not spoken.startswith(before) or not full.startswith(spoken[:end]):
            return None
        text = full[end:]
    elif full.startswith(before + _STAND_IN):
        text = full[len(before) + len(_STAND_IN) :]
    else:
        return None
    if finish_reason is FinishReason.EOS:
        if not text.startswith(terminator):
            return None
        text = text[len(terminator) :]
    return text.replace(GUARD, ""), tokenizer.encode(text)


def spoken_turn(completion: Completion) -> Turn:
    """Return a completion as a turn."""
    return Turn(
        role="assistant",
        text=completion.text,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        policy_version=completion.policy_version,
        finish_reason=completion.finish_reason,
        segments=completion.segments,
    )


def take_apart(
    prompts: PromptCache, completion: Completion, tools: tuple[str, ...], turn: int, prompt: str
) -> Spoken:
    """Parse thinking, prose and calls of a reply to a prompt, whose end may open the thinking.

    `tools` are functions in the form of OpenAI's chat API, as JSON; the ids of calls contain `turn`.
    """
    said, read = begun_thought(prompt) + completion.text, prompts.call_reader or _read_fences
    spoken = read(said, completion.token_ids, tools)
    return replace(spoken, calls=name_calls(spoken.calls, turn))
