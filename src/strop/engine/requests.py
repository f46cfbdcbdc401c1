"""What no engine can serve, refused in the same words by all of them."""

from __future__ import annotations

from strop.errors import EngineError, explain_refusal
from strop.rollout import IntArray


def check_room(num_prompt: int, num_reply: int, how: str, max_positions: int) -> None:
    """Refuse a prompt and a reply that the model has no positions for.

    Raises: EngineError.
    """
    if num_prompt == 0 or num_reply < 1 or num_prompt + num_reply > max_positions:
        raise EngineError(
            explain_refusal(
                f"a request has {num_prompt} prompt tokens and {how} {num_reply}",
                allowed=f"at least one of each, and together at most {max_positions} positions",
                next_step="shorten the prompt or lower task.max_reply_tokens",
            )
        )


def check_ids(token_ids: IntArray, vocab_size: int) -> None:
    """Refuse token ids that the model has no row for.

    Raises: EngineError.
    """
    lowest, highest = int(token_ids.min()), int(token_ids.max())
    if lowest < 0 or highest >= vocab_size:
        raise EngineError(
            explain_refusal(
                f"a prompt holds token ids from {lowest} to {highest}",
                allowed=f"ids from 0 to {vocab_size - 1}",
                next_step="check that the tokenizer is the model's own",
            )
        )


def closed() -> EngineError:
    """Return the refusal of an engine that is closed."""
    return EngineError(
        explain_refusal(
            "a request to an engine that is closed",
            allowed="requests before close",
            next_step="build a new engine",
        )
    )
