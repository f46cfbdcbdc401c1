"""Render messages to prompt ids.

The run file and the model decide between chat and plain text, once per run and in one place for training,
evaluation and sampling (TOK-3).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from strop.errors import ConfigError, DataError
from strop.rollout import Example, IntArray, Message, ToolCall
from strop.spec.task import TaskSpec
from strop.spec.template import fill, list_names
from strop.tasks.tool_calls import CallReader, describe_tools, list_readers, write_call
from strop.tokenizer import GUARD

if TYPE_CHECKING:
    from strop.tokenizer import Tokenizer


class PromptFormat(StrEnum):
    """How messages become a prompt; the values of `model.prompt_format`."""

    AUTO = "auto"
    """Chat if the model has a chat template, else base."""
    CHAT = "chat"
    """The model's own chat template."""
    BASE = "base"
    """Plain text, for models without chat training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PosedMessage(Message):
    """The message that poses a problem, for a chat and in plain text."""

    base: str | None = None
    """The complete prompt for a model without chat training, verbatim; None: the content."""
    is_thinking: bool | None = None
    """Whether a chat model is asked to think before it answers; None: as its chat template does."""
    tools: tuple[str, ...] = ()
    """Functions that the conversation may call, as JSON in the form of OpenAI's chat API."""


def pose(
    asked: str | Sequence[Message],
    thinking: str = "model_default",
    *,
    base: str | None = None,
    tools: tuple[str, ...] = (),
) -> tuple[Message, ...]:
    """Return messages whose last one poses a problem; of a text, one user turn. `thinking`: as in a task."""
    is_thinking = {"on": True, "off": False}.get(thinking)
    *before, last = [Message(role="user", content=asked)] if isinstance(asked, str) else asked
    fields = {field.name: getattr(last, field.name) for field in dataclasses.fields(Message)}
    return (*before, PosedMessage(**fields, base=base, is_thinking=is_thinking, tools=tools))


def pose_example(
    spec: TaskSpec,
    example: Example,
    asked: str | Sequence[Message],
    *,
    base: str | None = None,
    tools: tuple[str, ...] = (),
) -> tuple[Message, ...]:
    """Pose an example with the template, the thinking mode and the system prompt of its section.

    `asked` and `base` are the task's own wording; a template names fields of the example.

    Raises: ConfigError if the template names a field that the example lacks; DataError if both the example
        and the run have a system message.
    """
    template, system = spec.prompt_template, spec.system_prompt
    if template is not None:
        known = {name: one for name, one in example.fields.items() if isinstance(one, str | int | float)}
        if missing := [name for name in list_names(template) if name not in known]:
            raise ConfigError(
                f"task.prompt_template names {{{missing[0]}}}, which example {example.example_id} of task"
                f" {example.task} does not have",
                allowed=f"texts and numbers of the example: {', '.join(sorted(known)) or 'it has none'}",
                next_step="correct the name; '{{' and '}}' stand for braces",
            )
        asked = base = fill(template, known)
    messages = pose(asked, spec.thinking, base=base, tools=tools)
    if system is None:
        return messages
    if any(message.role == "system" for message in messages):
        raise DataError(
            f"example {example.example_id} of task {example.task} has a system message of its own,"
            " beside task.system_prompt",
            allowed="one of the two",
            next_step="leave out task.system_prompt, or take the system messages out of the data",
        )
    return (Message(role="system", content=system), *messages)


def posed(messages: Sequence[Message]) -> PosedMessage:
    """Return the last message that posed a problem, which has the tools and the thinking mode."""
    found = (message for message in reversed(messages) if isinstance(message, PosedMessage))
    return next(found, PosedMessage(role="user"))


@lru_cache(maxsize=16)
def find_reader(tokenizer: Tokenizer, prompt_format: PromptFormat) -> CallReader | None:
    """Return what reads a call that the model's chat template writes as that call.

    None in plain text, and if the template writes no call, or one that nobody here reads: then the model is
    told in words how to call.
    """
    if prompt_format is PromptFormat.BASE:
        return None
    asked = Message(role="user", content="a")
    said = Message(role="assistant", tool_calls=(_PROBE_CALL,))
    try:
        prompt = tokenizer.render([asked], tools=[_PROBE_TOOL])
        whole = tokenizer.render([asked, said], tools=[_PROBE_TOOL], is_reply_next=False)
        bare = tokenizer.render([asked], tools=[_PROBE_TOOL], is_reply_next=False)
    except ConfigError:
        return None
    # Some templates open a thought in the prompt that no earlier turn has.
    written = whole.removeprefix(prompt if whole.startswith(prompt) else bare)
    ids, meant = tokenizer.encode(written), (_PROBE_CALL.name, json.loads(_PROBE_CALL.arguments))
    for read in list_readers(tokenizer):
        calls = read(written, ids, [_PROBE_TOOL]).calls
        if [(call.name, json.loads(call.arguments)) for call in calls] == [meant]:
            return read
    return None


_PROBE_CALL = ToolCall(name="get_weather", arguments='{"city": "Paris", "days": 3}', call_id="000000000")
_PROBE_TOOL = """
{"type": "function", "function": {"name": "get_weather", "description": "Return the weather of a city.",
 "parameters": {"type": "object", "required": ["city"], "properties": {
  "city": {"type": "string", "description": "The city."},
  "days": {"type": "integer", "description": "Days ahead."}}}}}
"""


def resolve_prompt_format(tokenizer: Tokenizer, prompt_format: PromptFormat | str) -> PromptFormat:
    """Decide between chat and base.

    Raises: ConfigError for chat with a model that has no chat template or an unfit one.
    """
    chosen = PromptFormat(prompt_format)
    if chosen is PromptFormat.AUTO:
        chosen = PromptFormat.CHAT if tokenizer.has_chat_template else PromptFormat.BASE
    if chosen is PromptFormat.CHAT:
        end_id_of(tokenizer, chosen)
    return chosen


def end_id_of(tokenizer: Tokenizer, prompt_format: PromptFormat) -> int:
    """Return the id with which a reply to a prompt of a resolved format ends.

    Raises: ConfigError if it is a chat whose template does not end a message.
    """
    return tokenizer.turn_end_id if prompt_format is PromptFormat.CHAT else tokenizer.eos_id


def render_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], prompt_format: PromptFormat | str
) -> tuple[str, IntArray]:
    """Return the prompt as text and as ids; of plain text, the ids begin with the tokenizer's start ids.

    If the chat template takes no tools, or the prompt is plain text, the message that poses the problem
    describes the tools, and their replies come from the user.

    Raises: ConfigError like `resolve_prompt_format`, or if the prompt format has no thinking switch, or no
        form for a system message, a tool's reply, a tool call or reasoning; DataError if the prompt has no
        token.
    """
    resolved = resolve_prompt_format(tokenizer, prompt_format)
    shown, tools = shown_form(tokenizer, messages, resolved)
    if resolved is PromptFormat.CHAT:
        text = tokenizer.render(shown, is_thinking=posed(messages).is_thinking, tools=tools)
        prompt_ids = tokenizer.encode(text)
    else:
        text = tokenizer.guard(_base_text(tokenizer, shown))
        # As the texts began that the model was trained on, and as lm-eval begins its prompts.
        prompt_ids = np.concatenate([tokenizer.start_ids, tokenizer.encode(text)])
    if not len(prompt_ids):
        raise DataError(
            f"a prompt of {len(messages)} messages has no token",
            allowed="prompts with at least one token",
            next_step="make the task's render() return a message with content",
        )
    return text.replace(GUARD, ""), prompt_ids


def shown_form(
    tokenizer: Tokenizer, messages: Sequence[Message], prompt_format: PromptFormat
) -> tuple[Sequence[Message], tuple[str, ...]]:
    """Return a conversation and the tools that the chat template is to be given: see `render_prompt`."""
    tools = posed(messages).tools
    if not tools or find_reader(tokenizer, prompt_format) is not None:
        return messages, tools
    return [_spell(message, tools) for message in messages], ()


def _spell(message: Message, tools: tuple[str, ...]) -> Message:
    if isinstance(message, PosedMessage):
        told = f"{describe_tools(tools)}\n\n"
        base = None if message.base is None else told + message.base
        return dataclasses.replace(message, content=told + message.text, base=base, tools=())
    if message.tool_calls:
        said = "\n".join([message.text, *map(write_call, message.tool_calls)])
        return Message(role=message.role, content=said)
    if message.role == "tool":
        return Message(role="user", content=f"{message.name} returned:\n{message.text}")
    return message


def _base_text(tokenizer: Tokenizer, messages: Sequence[Message]) -> str:
    """Return plain text: all contents with their line breaks, and the base form of a problem verbatim.

    Raises: ConfigError for thinking, tool calls or reasoning: plain text has no form for them.
    """
    asks = ["task.thinking=on"] if posed(messages).is_thinking else []
    asks += ["a message with tool calls" for message in messages if message.tool_calls]
    asks += ["a message with reasoning" for message in messages if message.reasoning is not None]
    if asks:
        raise ConfigError(
            f"{asks[0]} with a prompt in base format",
            allowed="texts alone in plain text; thinking, tool calls and reasoning in a chat",
            next_step="leave it out, or set model.prompt_format=chat with a chat model",
        )
    base = getattr(messages[-1], "base", None) if messages else None
    if base is None:
        return tokenizer.render_base(messages)
    return "\n\n".join([*(message.text for message in messages[:-1]), base])
