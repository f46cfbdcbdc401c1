"""An engine with scripted replies that keeps the whole contract.

Ships with strop, so that loops and environments can be tried without a model. Replies end at
stop tokens, stop strings and the token budget like real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from strop.engine.contract import Completion, GenerationRequest, ReplyScore, WeightReceipt, WeightUpdate
from strop.errors import EngineError, WeightMismatch
from strop.rollout import FinishReason, IntArray
from strop.tokenizer import Tokenizer

_LOGPROB_NATS = -0.5
"""Every token of a scripted reply is this likely, so that `generate` and `score` agree by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedReply:
    """The engine's next reply."""

    text: str
    ends: bool = True
    """Whether the terminator follows the text; without it the reply runs into the token budget."""
    is_aborted: bool = False
    """Whether the engine aborts the reply."""


Script = Sequence[str | ScriptedReply | Exception] | Callable[[GenerationRequest], str | ScriptedReply]


class DummyEngine:
    """Replies with the script's lines in the order of the requests, or with a function of the request.

    A string is a reply that ends by itself; an exception is raised. A list that has run out raises
    EngineError. Only a function gives equal requests equal replies, as the contract demands.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        script: Script,
        *,
        found_digest: str | None = None,
        likelihood: Callable[[str, str], float] | None = None,
    ) -> None:
        """`likelihood` maps prompt and reply, as texts, to the log-probability of each token in nats."""
        self._tokenizer = tokenizer
        self._likelihood = likelihood or (lambda prompt, reply: _LOGPROB_NATS)
        self._script = script
        self._found_digest = found_digest
        self._is_closed = False
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.requests: list[GenerationRequest] = []
        """Every request so far, in order."""
        self.receipts: list[WeightReceipt] = []
        """Every applied weight update, in order."""
        self.policy_version = 0
        """The policy version of replies."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Answer with the next line.

        Raises: EngineError if the script has run out or the engine is closed; a scripted exception.
        """
        self._require_open()
        line = self._take_line(request)
        self.requests.append(request)
        version = self.policy_version
        self._num_running += 1
        self._idle.clear()
        try:
            # Yield once, so that replies overlap as in a real engine.
            await asyncio.sleep(0)
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()
        if isinstance(line, Exception):
            raise line
        reply = ScriptedReply(text=line) if isinstance(line, str) else line
        if reply.is_aborted:
            ids, text, reason = self._tokenizer.encode(reply.text), reply.text, FinishReason.ABORT
        else:
            ids, text, reason = self._stop(request, self._unroll(reply, request.max_tokens))
        return Completion(
            token_ids=ids,
            logprobs=np.full(len(ids), _LOGPROB_NATS, dtype=np.float32),
            text=text,
            finish_reason=reason,
            policy_version=version,
        )

    async def score(self, prompt_ids: IntArray, reply_ids: IntArray, temperature: float) -> ReplyScore:
        """Return the scripted log-probability for every token, whatever the temperature."""
        self._require_open()
        nats = self._likelihood(self._tokenizer.decode(prompt_ids), self._tokenizer.decode(reply_ids))
        logprobs = np.full(len(reply_ids), nats, dtype=np.float32)
        return ReplyScore(logprobs=logprobs, policy_version=self.policy_version)

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        """Apply the version; no weights are read.

        Raises: WeightMismatch if the engine was made with another `found_digest`.
        """
        self._require_open()
        await self._idle.wait()
        digest = update.digest if self._found_digest is None else self._found_digest
        if digest != update.digest:
            raise WeightMismatch(
                f"weights of version {update.version} have digest {digest}",
                allowed=f"the promised digest {update.digest}",
                next_step="publish the weights again; the engine still serves the old ones",
            )
        self.policy_version = update.version
        receipt = WeightReceipt(version=update.version, digest=digest)
        self.receipts.append(receipt)
        return receipt

    async def close(self) -> None:
        """Refuse everything from now on."""
        self._is_closed = True

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineError(
                "a request to an engine that is closed",
                allowed="requests before close",
                next_step="build a new engine",
            )

    def _take_line(self, request: GenerationRequest) -> str | ScriptedReply | Exception:
        if callable(self._script):
            return self._script(request)
        if len(self.requests) >= len(self._script):
            prompt = self._tokenizer.decode(request.prompt_ids)
            raise EngineError(
                f"the script of {len(self._script)} replies has run out at the prompt {prompt!r}",
                allowed="one line for each request",
                next_step="lengthen the script, or pass a function of the request",
            )
        return self._script[len(self.requests)]

    def _unroll(self, reply: ScriptedReply, num_tokens: int) -> IntArray:
        """Return exactly `num_tokens` ids, as if nothing stopped the sampling."""
        ids = self._tokenizer.encode(reply.text)
        if reply.ends:
            ids = np.append(ids, np.int32(self._tokenizer.eos_id))
        elif not len(ids):
            ids = self._tokenizer.encode(".")
        missing = max(0, num_tokens - len(ids))
        return np.concatenate([ids, np.repeat(ids[-1:], missing)])[:num_tokens].astype(np.int32)

    def _stop(self, request: GenerationRequest, ids: IntArray) -> tuple[IntArray, str, FinishReason]:
        """Cut the ids where a real engine would; return ids, text and reason."""
        for index, token_id in enumerate(ids.tolist()):
            if token_id in request.stop_token_ids:
                return ids[: index + 1], self._tokenizer.decode(ids[:index]), FinishReason.EOS
            if not request.stop_strings:
                continue
            text = self._tokenizer.decode(ids[: index + 1])
            starts = [start for stop in request.stop_strings if (start := text.find(stop)) >= 0]
            if starts:
                return ids[: index + 1], text[: min(starts)], FinishReason.STOP_STRING
        return ids, self._tokenizer.decode(ids), FinishReason.LENGTH
