"""`POST /inference/v1/generate`: token ids in, token ids out, as vLLM's server has it.

For programs that render their prompts by themselves, as those of verifiers do. The run's sampling is used
whatever `sampling_params` says, but for `max_tokens`; other ends of a reply than the model's are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from strop.agents.dialect import Asked, Refused, read_limit
from strop.environments.recording import Call
from strop.rollout import FinishReason

_REFUSED = ("stop", "logit_bias", "allowed_token_ids", "bad_words", "structured_outputs", "min_tokens")
_UNKNOWN = ("features", "content_parts")


class Generate:
    """The dialect of ids."""

    def __init__(self, stop_token_ids: Collection[int]) -> None:
        self._stop_token_ids = frozenset(stop_token_ids)

    def read(self, body: Any) -> Asked:
        """Read a request. Raises: Refused; LookupError, TypeError, ValueError, AttributeError."""
        ids = body["token_ids"]
        if not ids or not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids):
            raise ValueError("token_ids are not ids, one or more")
        params = body.get("sampling_params") or {}
        given = [name for name in _REFUSED if params.get(name)]
        given += [name for name in _UNKNOWN if body.get(name)]
        if params.get("n") not in (None, 1):
            given.append("n")
        others = set(params.get("stop_token_ids") or ()) - self._stop_token_ids
        if given or others:
            what = ", ".join(given) or f"stop_token_ids {sorted(others)}"
            raise Refused(400, f"{what}: other replies than the policy's", "unsupported_value")
        return Asked(
            body=body,
            messages=(),
            tools=(),
            max_tokens=read_limit(params, "max_tokens"),
            token_ids=np.asarray(ids, dtype=np.int32),
        )

    def answer(self, asked: Asked, calls: Sequence[Call]) -> dict[str, Any]:
        """Return ids and log-probabilities, the end of the reply among them."""
        (call,) = calls
        reply = call.reply
        assert reply.logprobs is not None
        ids = reply.token_ids.tolist()
        content = [
            {"token": f"token_id:{token_id}", "logprob": value}
            for token_id, value in zip(ids, reply.logprobs.tolist(), strict=True)
        ]
        is_cut = reply.finish_reason is FinishReason.LENGTH
        return {
            "request_id": f"generate-{id(call):x}",
            "choices": [
                {
                    "index": 0,
                    "token_ids": ids,
                    "logprobs": {"content": content},
                    "finish_reason": "length" if is_cut else "stop",
                }
            ],
            "prompt_token_ids": call.prompt_ids.tolist(),
        }

    def stream(self, asked: Asked, calls: Sequence[Call]) -> str:
        """Refuse: ids come in one answer. Raises: Refused."""
        raise Refused(400, "there is no stream of ids", "unsupported_value")
