"""Render messages to prompt ids.

The run file and the model decide between chat and plain text, once per run and in one place for training,
evaluation and sampling (TOK-3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from strop.errors import ConfigError, DataError
from strop.rollout import Example, IntArray, Message, Split, ToolCall
from strop.spec.task import TaskSpec
from strop.spec.template import fill, list_names
from strop.tasks.task import Task, TaskWrapper
from strop.tasks.tool_calls import (
    CallFormat,
    Spoken,
    describe_tools,
    find_format,
    find_renderer,
    list_schemas,
    read_ids,
    read_reply,
    write_call,
)
from strop.tokenizer import GUARD

if TYPE_CHECKING:
    from strop.tokenizer import Tokenizer

SYSTEM = "system"
"""Role of the system message."""
Thinking = Literal["off", "on", "model_default"]
"""The values of `task.thinking`."""


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
    thinking: Thinking = "model_default"
    """Whether a chat model is asked to think before it answers; by default as its chat template does."""
    tools: tuple[str, ...] = ()
    """Functions that the conversation may call, as JSON in the form of OpenAI's chat API."""


def pose(
    content: str, *, base: str | None = None, thinking: Thinking = "model_default"
) -> tuple[Message, ...]:
    """Return the messages that pose a problem: one user turn, with its base form beside it."""
    return (PosedMessage(role="user", content=content, base=base, thinking=thinking),)


def pose_messages(
    messages: Sequence[Message], thinking: Thinking, tools: tuple[str, ...] = ()
) -> tuple[Message, ...]:
    """Return messages whose last one poses a problem, with tools and the thinking mode."""
    *before, last = messages
    fields = {field.name: getattr(last, field.name) for field in dataclasses.fields(Message)}
    return (*before, PosedMessage(**fields, thinking=thinking, tools=tools))


def tools_of(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the tools that a conversation was posed with."""
    return _posed(messages).tools


def thinking_of(messages: Sequence[Message]) -> bool | None:
    """Return whether the model is asked to think, by the last message that was posed; None: as it does."""
    asked = _posed(messages).thinking
    return None if asked == "model_default" else asked == "on"


def _posed(messages: Sequence[Message]) -> PosedMessage:
    found = (message for message in reversed(messages) if isinstance(message, PosedMessage))
    return next(found, PosedMessage(role="user"))


@lru_cache(maxsize=16)
def find_call_format(
    tokenizer: Tokenizer, prompt_format: PromptFormat = PromptFormat.CHAT, /
) -> tuple[CallFormat, Any]:
    """Return in which form the model's chat template writes a call so that it reads as that call.

    With the form `RENDERER` comes the renderer. A model whose template writes no call, or one that nobody
    here reads, is told of tools in words, and so it is in plain text: `FENCE`.
    """
    if prompt_format is not PromptFormat.CHAT or not tokenizer.has_chat_template:
        return CallFormat.FENCE, None
    asked = Message(role="user", content="a")
    said = Message(role="assistant", tool_calls=(_PROBE_CALL,))
    try:
        prompt = tokenizer.render([asked], tools=[_PROBE_TOOL])
        whole = tokenizer.render([asked, said], tools=[_PROBE_TOOL], is_reply_next=False)
        bare = tokenizer.render([asked], tools=[_PROBE_TOOL], is_reply_next=False)
    except ConfigError:
        return CallFormat.FENCE, None
    # Some templates open a thought in the prompt that no earlier turn has.
    written = whole.removeprefix(prompt if whole.startswith(prompt) else bare)
    if (form := find_format(written, _PROBE_CALL, list_schemas([_PROBE_TOOL]))) is not None:
        return form, None
    renderer = find_renderer(tokenizer, written, _PROBE_CALL, [_PROBE_TOOL])
    return (CallFormat.FENCE, None) if renderer is None else (CallFormat.RENDERER, renderer)


def read_with_tools(
    tokenizer: Tokenizer, prompt_format: PromptFormat, text: str, reply_ids: IntArray, tools: Sequence[str]
) -> Spoken:
    """Take a reply apart, given as text and as ids. `tools`: functions in OpenAI's form, as JSON."""
    form, renderer = find_call_format(tokenizer, prompt_format)
    if tools and renderer is not None:
        return read_ids(renderer, text, reply_ids, tools)
    return read_reply(text, form if renderer is None else CallFormat.FENCE, list_schemas(tools))


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
        tokenizer.require_chat_template()
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
    if resolved is PromptFormat.CHAT:
        shown, tools = chat_form(tokenizer, messages)
        text = tokenizer.render(shown, is_thinking=thinking_of(messages), tools=tools)
        prompt_ids = tokenizer.encode(text)
    else:
        text = tokenizer.guard(_base_text(tokenizer, spell_tools(messages)))
        # As the texts began that the model was trained on, and as lm-eval begins its prompts.
        prompt_ids = np.concatenate([tokenizer.start_ids, tokenizer.encode(text)])
    if not len(prompt_ids):
        raise DataError(
            f"a prompt of {len(messages)} messages has no token",
            allowed="prompts with at least one token",
            next_step="make the task's render() return a message with content",
        )
    return text.replace(GUARD, ""), prompt_ids


def chat_form(tokenizer: Tokenizer, messages: Sequence[Message]) -> tuple[Sequence[Message], tuple[str, ...]]:
    """Return a conversation and its tools in the form of the model's chat template: see `render_prompt`."""
    tools = tools_of(messages)
    if tools and find_call_format(tokenizer, PromptFormat.CHAT)[0] is CallFormat.FENCE:
        return spell_tools(messages), ()
    return messages, tools


def spell_tools(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return a conversation for templates without tools: the problem describes them; they reply as user."""
    tools = tools_of(messages)
    return tuple(_spell(message, tools) for message in messages) if tools else tuple(messages)


def without_tools(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return a conversation that names no tools."""
    return tuple(
        dataclasses.replace(message, tools=()) if isinstance(message, PosedMessage) else message
        for message in messages
    )


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
    """Return plain text: the base form of a problem verbatim, or all contents with their line breaks.

    Raises: ConfigError for thinking, tool calls or reasoning: plain text has no form for them.
    """
    if thinking_of(messages):
        raise ConfigError(
            "task.thinking=on with a prompt in base format",
            allowed="thinking=on where the prompt is a chat",
            next_step="leave task.thinking out, or set model.prompt_format=chat with a chat model",
        )
    if any(message.tool_calls or message.reasoning is not None for message in messages):
        raise ConfigError(
            "a message with tool calls or reasoning in a prompt in base format",
            allowed="texts alone in plain text; tool calls and reasoning in a chat",
            next_step="set model.prompt_format=chat with a model whose chat template writes them",
        )
    last = messages[-1] if messages else None
    if isinstance(last, PosedMessage) and last.base is not None:
        return last.base
    return tokenizer.render_base(messages)


class Prompted(TaskWrapper):
    """A task that is asked with the system prompt and the template of its section; judged as before."""

    def __init__(self, task: Task, spec: TaskSpec) -> None:
        super().__init__(task)
        self._spec = spec
        self._checked: set[Split] = set()

    def examples(self, split: Split) -> Sequence[Example]:
        """Return the task's examples, after a check that each can be rendered.

        Raises: DataError as the task does, and like `render`; ConfigError like `render`.
        """
        examples = self._task.examples(split)
        if split not in self._checked:
            for example in examples:
                self.render(example)
            self._checked.add(split)
        return examples

    def render(self, example: Example) -> tuple[Message, ...]:
        """Pose the example with the run's template and system prompt.

        Raises: ConfigError if the template names a field that the example lacks; DataError if both the
            example and the run have a system message.
        """
        messages, template = self._task.render(example), self._spec.prompt_template
        if template is not None:
            fields = self._task.prompt_fields(example).items()
            known = {name: value for name, value in fields if isinstance(value, str | int | float)}
            if missing := [name for name in list_names(template) if name not in known]:
                raise ConfigError(
                    f"task.prompt_template names {{{missing[0]}}}, which example {example.example_id} of task"
                    f" {self.name} does not have",
                    allowed=f"texts and numbers of the example: {', '.join(sorted(known)) or 'it has none'}",
                    next_step="correct the name; '{{' and '}}' stand for braces",
                )
            text, last = fill(template, known), messages[-1]
            thinking = last.thinking if isinstance(last, PosedMessage) else "model_default"
            messages = (PosedMessage(role=last.role, content=text, base=text, thinking=thinking),)
        return with_system(messages, self._spec.system_prompt, example)


def with_system(messages: tuple[Message, ...], system: str | None, example: Example) -> tuple[Message, ...]:
    """Put the run's system message, if any, before the messages of an example.

    Raises: DataError if these have a system message already.
    """
    if system is None:
        return messages
    *before, last = messages
    if any(message.role == SYSTEM for message in before):
        raise DataError(
            f"example {example.example_id} of task {example.task} has a system message of its own,"
            " beside task.system_prompt",
            allowed="one of the two",
            next_step="leave out task.system_prompt, or take the system messages out of the data",
        )
    if isinstance(last, PosedMessage) and last.base is not None:
        last = dataclasses.replace(last, base=f"{system}\n\n{last.base}")
    return (Message(role=SYSTEM, content=system), *before, last)
