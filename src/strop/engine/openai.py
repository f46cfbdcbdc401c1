"""Any server that speaks OpenAI's completions, as an engine for evaluation. Never for training.

Prompts are sent as token ids, so the server's template and tokenizer are not used. Replies are read as token
ids where the server returns them (vLLM does); elsewhere the text is encoded again, and refused where the
number of ids is not the number of log-probabilities. The weights that it serves, and the temperature of its
log-probabilities, cannot be verified: that suffices to judge texts and to choose among replies, not to train.

The key of a server that wants one is read from `STROP_ENGINE_KEY`.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np

from strop.engine.contract import (
    DEFAULT_MAX_ROWS,
    Completion,
    GenerationRequest,
    ReplyScore,
    StopStrings,
    WeightReceipt,
    WeightUpdate,
    closed,
)
from strop.errors import ConfigError, EngineError
from strop.rollout import FinishReason, IntArray
from strop.tokenizer import Tokenizer

KEY_VARIABLE = "STROP_ENGINE_KEY"
_MAX_SEED = 2**63
_REPLY_LIMIT_S = 3600.0
_SHOWN_CHARACTERS = 300


class OpenAiEngine:
    """Generates and scores by a server. One instance serves one event loop. `version` is a label.

    Raises: ConfigError if httpx is not installed.
    """

    def __init__(
        self, url: str, tokenizer: Tokenizer, *, model: str, version: int = 0, max_num_seqs: int | None = None
    ) -> None:
        """`url` ends before `/completions`; `model` is preferred among the models that the server has."""
        require_server_part("httpx")
        import httpx

        key = os.environ.get(KEY_VARIABLE)
        self._url = url
        self._tokenizer = tokenizer
        self._model = model
        self._version = version
        self._is_vllm = False
        self._choosing = asyncio.Lock()
        self._is_chosen = False
        self._places = asyncio.Semaphore(max_num_seqs or DEFAULT_MAX_ROWS)
        self._is_closed = False
        self._client = httpx.AsyncClient(
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(_REPLY_LIMIT_S, connect=30.0),
            limits=httpx.Limits(max_connections=None),
        )

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one reply. See `Engine.generate`.

        Raises: EngineError also for top-k, which only vLLM's servers take.
        """
        await self._find_model()
        sampling = request.sampling
        call: dict[str, Any] = {
            "model": self._model,
            "prompt": request.prompt_ids.tolist(),
            "max_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": request.seed % _MAX_SEED,
            "logprobs": 1,
        }
        if request.stop_strings:
            call["stop"] = list(request.stop_strings)
        if self._is_vllm:
            call |= {"stop_token_ids": sorted(request.stop_token_ids), "return_token_ids": True}
            # The text is then complete if a server is too old to return ids.
            call |= {"top_k": sampling.top_k or 0, "include_stop_str_in_output": True}
        elif sampling.top_k is not None:
            raise self._unusable(f"sampling.top_k={sampling.top_k} is no setting of its completions")
        choice = await self._ask(call)
        values = (choice.get("logprobs") or {}).get("token_logprobs")
        token_ids = choice.get("token_ids")
        if token_ids is None:
            token_ids = self._tokenizer.encode(str(choice.get("text", ""))).tolist()
        if not values or None in values or len(values) != len(token_ids):
            raise self._unusable(
                f"it gave {len(values or ())} log-probabilities and {len(token_ids)} token ids of a reply"
            )
        finish = self._read_finish(request, choice, token_ids)
        is_eos = finish is FinishReason.EOS and token_ids[-1] in request.stop_token_ids
        text = self._tokenizer.decode(token_ids[:-1] if is_eos else token_ids)
        if request.stop_strings:
            text = StopStrings(self._tokenizer, request.stop_strings).cut(text)
        return Completion(
            token_ids=np.array(token_ids, np.int32),
            logprobs=np.minimum(np.array(values, np.float32), np.float32(0.0)),
            text=text,
            finish_reason=finish,
            policy_version=self._version,
        )

    async def score(self, prompt_ids: IntArray, reply_ids: IntArray, temperature: float) -> ReplyScore:
        """Return the log-probability of each reply token. See `Engine.score`.

        Raises: EngineError also for a temperature other than 1, and from a server that does not echo.
        """
        if temperature not in (0.0, 1.0):
            raise self._unusable(f"a reply is to be scored at temperature {temperature:g}, not 1")
        await self._find_model()
        token_ids = [*prompt_ids.tolist(), *reply_ids.tolist()]
        call = {"model": self._model, "prompt": token_ids, "max_tokens": 1, "echo": True, "logprobs": 1}
        choice = await self._ask({**call, "temperature": 0.0})
        values = ((choice.get("logprobs") or {}).get("token_logprobs") or [])[len(prompt_ids) :]
        values = values[: len(reply_ids)]
        if len(values) != len(reply_ids) or None in values:
            raise self._unusable("it gives no log-probabilities of a text that it is given (echo)")
        return ReplyScore(logprobs=np.array(values, np.float32), policy_version=self._version)

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        """Refuse: strop does not own this server's weights. Raises: EngineError."""
        raise self._unusable(f"weight update {update.version} was published to it")

    async def close(self) -> None:
        """Drop every connection."""
        self._is_closed = True
        await self._client.aclose()

    async def _find_model(self) -> None:
        """List the server's models and choose one, at the first call."""
        if self._is_closed:
            raise closed()
        async with self._choosing:
            if self._is_chosen:
                return
            answer = await self._exchange("models", None)
            listed = {str(entry["id"]): entry for entry in answer.get("data", []) if "id" in entry}
            chosen = self._model if self._model in listed else next(iter(listed), None)
            if chosen is None or (len(listed) > 1 and chosen != self._model):
                raise ConfigError(
                    f"the server at {self._url} has no model {self._model}",
                    allowed=f"one of {', '.join(sorted(listed)) or 'none'}, or a server with one model",
                    next_step="name it behind the # of the address",
                )
            self._model = chosen
            self._is_vllm = listed[chosen].get("owned_by") == "vllm"
            self._is_chosen = True

    async def _ask(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the first choice of the server's answer."""
        async with self._places:
            answer = await self._exchange("completions", call)
        choices = answer.get("choices") or []
        if not choices or not isinstance(choices[0], dict):
            raise self._unusable("its answer has no choices")
        choice: dict[str, Any] = choices[0]
        return choice

    async def _exchange(self, path: str, call: dict[str, Any] | None) -> dict[str, Any]:
        import httpx

        try:
            address = f"{self._url.rstrip('/')}/{path}"
            exchange = self._client.get(address) if call is None else self._client.post(address, json=call)
            response = await exchange
        except httpx.HTTPError as error:
            raise self._unusable(f"it did not answer /{path} ({error!r})") from error
        answer: Any = None
        with suppress(ValueError):
            answer = response.json()
        if not response.is_success or not isinstance(answer, dict):
            text = response.text[:_SHOWN_CHARACTERS]
            raise self._unusable(f"it answered /{path} with status {response.status_code}: {text}")
        return answer

    def _read_finish(
        self, request: GenerationRequest, choice: dict[str, Any], token_ids: list[int]
    ) -> FinishReason:
        match choice.get("finish_reason"):
            case "length":
                return FinishReason.LENGTH
            case "stop" if request.stop_strings and token_ids[-1] not in request.stop_token_ids:
                return FinishReason.STOP_STRING
            case "stop":
                return FinishReason.EOS
        return FinishReason.ABORT

    def _unusable(self, flaw: str) -> EngineError:
        return EngineError(
            f"the server at {self._url} cannot be used so: {flaw}",
            allowed="a server of OpenAI's /models and /completions that takes token ids and gives"
            " log-probabilities, for evaluation",
            next_step="read the server's log, or evaluate the model's own files",
        )


def require_server_part(module: str, user: str = "a server") -> None:
    """Check that a module of the `server` extra is installed, which `user` needs.

    Raises: ConfigError naming the extra if it is missing.
    """
    try:
        import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{user} needs the Python module {module!r}, which is missing",
            allowed="an installation with the server extra",
            next_step="run `pip install strop[server]`",
        ) from error
