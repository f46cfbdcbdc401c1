"""`POST /inference/v1/generate`: token ids in, token ids out, in the form of vLLM's server.

It serves programs that render their own prompts, as verifiers' can. Of `sampling_params` only `max_tokens`
and `stop` are used; the run's sampling applies. Stop ids other than the model's are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from strop.agents.dialect import ModelRequest, Refused, read_limit, read_stop
from strop.environments.recording import Call
from strop.rollout import FinishReason

_REFUSED = ("logit_bias", "allowed_token_ids", "bad_words", "structured_outputs", "min_tokens")
_UNKNOWN = ("features", "content_parts")


class Generate:
    """The dialect of ids."""

    def __init__(self, stop_token_ids: Collection[int]) -> None:
        self._stop_token_ids = frozenset(stop_token_ids)

    def read(self, body: Any) -> ModelRequest:
        """Read a request. Raises: Refused; LookupError, TypeError, ValueError, AttributeError."""
        ids = body["token_ids"]
        if not ids or not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            raise ValueError("token_ids are not ids, one or more")
        params = body.get("sampling_params") or {}
        refused = [name for name in _REFUSED if params.get(name)]
        refused += [name for name in _UNKNOWN if body.get(name)]
        if params.get("n") not in (None, 1):
            refused.append("n")
        stops = set(params.get("stop_token_ids") or ()) - self._stop_token_ids
        if refused or stops:
            names = ", ".join(refused) or f"stop_token_ids {sorted(stops)}"
            raise Refused(400, f"{names}: other replies than the policy's", "unsupported_value")
        return ModelRequest(
            body=body,
            messages=(),
            tools=(),
            max_tokens=read_limit(params, "max_tokens"),
            token_ids=np.asarray(ids, dtype=np.int32),
            stop=read_stop(params),
        )

    def answer(self, request: ModelRequest, calls: Sequence[Call]) -> dict[str, Any]:
        """Return ids and log-probabilities, those of the end token included."""
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

    def stream(self, request: ModelRequest, calls: Sequence[Call]) -> str:
        """Refuse the request: ids have no stream. Raises: Refused."""
        raise Refused(400, "there is no stream of ids", "unsupported_value")
