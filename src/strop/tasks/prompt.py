"""From messages to the exact ids that the model is asked with; resolved once for a run.

Whether a prompt is written as a chat or as plain text follows from the run file and the model, in
one place for training, evaluation and sampling (TOK-3).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from strop.errors import ConfigError, DataError, explain_refusal
from strop.rollout import IntArray, Message
from strop.tokenizer import Tokenizer


class PromptFormat(StrEnum):
    """How messages become a prompt; the values of `model.prompt_format`."""

    AUTO = "auto"
    """Chat where the model has a chat template, base where it has none."""
    CHAT = "chat"
    """The model's own chat template."""
    BASE = "base"
    """Plain text, for models without chat training."""


def resolve_prompt_format(tokenizer: Tokenizer, prompt_format: PromptFormat | str) -> PromptFormat:
    """Decide between chat and base.

    Raises: ConfigError if chat is asked of a model without a chat template, or the name is unknown.
    """
    if prompt_format not in {format_.value for format_ in PromptFormat}:
        raise ConfigError(
            explain_refusal(
                f"model.prompt_format={prompt_format}",
                allowed=", ".join(PromptFormat),
                next_step="set model.prompt_format=auto",
            )
        )
    wanted = PromptFormat(prompt_format)
    if wanted is PromptFormat.AUTO:
        return PromptFormat.CHAT if tokenizer.has_chat_template else PromptFormat.BASE
    if wanted is PromptFormat.CHAT:
        tokenizer.require_chat_template()
    return wanted


def render_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], prompt_format: PromptFormat | str
) -> tuple[str, IntArray]:
    """Return the prompt as text and as ids.

    Raises: ConfigError like `resolve_prompt_format`; DataError if no token is left to ask with.
    """
    resolved = resolve_prompt_format(tokenizer, prompt_format)
    chat = resolved is PromptFormat.CHAT
    text = tokenizer.render(messages) if chat else tokenizer.render_base(messages)
    prompt_ids = tokenizer.encode(text)
    if not len(prompt_ids):
        raise DataError(
            explain_refusal(
                f"a prompt of {len(messages)} messages has no token",
                allowed="prompts with at least one token",
                next_step="make the task's render() return a message with content",
            )
        )
    return text, prompt_ids
