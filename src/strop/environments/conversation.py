"""Extending a conversation's ids: what the engine sampled stays as it is, only new text is encoded.

Rendering a reply again can give other ids than were sampled (TOK-5). Here the chat template is asked
only for the text between a reply and the next one, with a stand-in for the reply, and it must write
the stand-in right behind the prompt that the reply answered. The reply's ids must read as its text.
Where either fails, the caller renders everything anew, and a new training sample begins there.
"""

from __future__ import annotations

from collections.abc import Sequence

from strop.rollout import FinishReason, IntArray, Message, Turn
from strop.tasks.prompt import PromptFormat, render_prompt
from strop.tokenizer import Tokenizer

_STAND_IN = "reply"


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
