"""The in-process engine: generation on the policy's own weights.

One asyncio task decodes while anything is asked for and gives way to other coroutines between
tokens, so environments go on and new requests are admitted while rows are being decoded. Requests
with equal prompts that are admitted together share one prefill. Finished rows are compacted away.

Weights arrive by reference (the policy's own tensors) or as a safetensors file with a digest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from strop.engine.contract import Completion, GenerationRequest, WeightReceipt, WeightTransport, WeightUpdate
from strop.engine.decoding import DecodeBatch
from strop.errors import EngineError, WeightMismatch, explain_refusal
from strop.policy.language_model import LanguageModel
from strop.policy.scoring import score_reply
from strop.policy.weights import load_published
from strop.rollout import FloatArray, IntArray
from strop.tokenizer import Tokenizer

DEFAULT_MAX_ROWS = 128
"""Rows decoded at once. Past 64 rows a CPU decode step is bound by arithmetic, not by memory."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request and the coroutine that waits for it."""

    request: GenerationRequest
    reply: asyncio.Future[Completion]


class NativeEngine:
    """Generates in this process. One instance serves one event loop at a time."""

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer, *, max_rows: int | None = None, version: int = 0
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._max_rows = max_rows or DEFAULT_MAX_ROWS
        self._version = version
        self._inbox: deque[_Waiting] = deque()
        self._runner: asyncio.Task[None] | None = None
        self._update_lock = asyncio.Lock()
        self._batch: DecodeBatch | None = None

    @property
    def version(self) -> int:
        """Version of the weights served."""
        return self._version

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one reply. See `Engine.generate`."""
        self._check(request)
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._inbox.append(waiting)
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())
        return await waiting.reply

    async def score(self, prompt_ids: IntArray, reply_ids: IntArray, temperature: float) -> FloatArray:
        """Return the log-probability of each reply token. See `Engine.score`."""
        await self._wait_until_idle()
        return score_reply(self._model, prompt_ids, reply_ids, temperature)

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        """Serve new weights. See `Engine.update`. Updates are applied one at a time."""
        async with self._update_lock:
            await self._wait_until_idle()
            if update.transport is WeightTransport.FILE:
                self._load_file(update)
            self._version = update.version
            return WeightReceipt(version=update.version, digest=update.digest)

    async def close(self) -> None:
        """Stop decoding; waiting requests get an EngineError."""
        if self._runner is not None and not self._runner.done():
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        self._batch = None

    async def _wait_until_idle(self) -> None:
        while self._runner is not None and not self._runner.done():
            await asyncio.wait([self._runner])

    def _load_file(self, update: WeightUpdate) -> None:
        """Copy published tensors into the model, once their digest is proven."""
        if update.path is None:
            raise WeightMismatch(
                explain_refusal(
                    f"weight update {update.version} is by file and names none",
                    allowed="an absolute path to a safetensors file",
                    next_step="publish it again",
                )
            )
        load_published(self._model, Path(update.path), expected_digest=update.digest)

    def _check(self, request: GenerationRequest) -> None:
        """Refuse what cannot be generated, before anything else waits on it."""
        total = len(request.prompt_ids) + request.max_tokens
        limit = self._model.shape.max_positions
        if len(request.prompt_ids) == 0 or request.max_tokens < 1 or total > limit:
            raise EngineError(
                explain_refusal(
                    f"a request has {len(request.prompt_ids)} prompt tokens and asks for {request.max_tokens}",
                    allowed=f"at least one of each, and together at most {limit} positions",
                    next_step="shorten the prompt or lower task.max_reply_tokens",
                )
            )

    async def _run(self) -> None:
        """Decode until nothing is asked for any more."""
        await self._let_requests_gather()
        waiting: dict[int, _Waiting] = {}
        try:
            batch = self._fitting_batch([entry.request for entry in self._inbox])
            with torch.inference_mode():
                while self._inbox or batch.num_live:
                    self._admit(batch, waiting)
                    for ticket, completion in batch.step(self._version):
                        _answer(waiting.pop(ticket).reply, completion)
                    await asyncio.sleep(0)
        except (RuntimeError, MemoryError, asyncio.CancelledError) as error:
            self._batch = None
            self._fail_all(waiting, error)
            if isinstance(error, asyncio.CancelledError):
                raise

    async def _let_requests_gather(self) -> None:
        """Give coroutines that were started together the time to ask, so they share a batch.

        This also makes batch composition, and with it every rounded value, the same in each run.
        """
        previous = -1
        while previous != len(self._inbox):
            previous = len(self._inbox)
            for _ in range(4):
                await asyncio.sleep(0)

    def _fitting_batch(self, requests: Sequence[GenerationRequest]) -> DecodeBatch:
        """Return a batch for these requests, the previous one where its cache is the same."""
        if self._batch is None or not self._batch.is_made_for(requests, self._max_rows):
            self._batch = None  # Freed before its successor is allocated.
            self._batch = DecodeBatch(
                self._model, self._tokenizer, max_rows=self._max_rows, requests=requests
            )
        return self._batch

    def _admit(self, batch: DecodeBatch, waiting: dict[int, _Waiting]) -> None:
        """Move requests from the inbox into free rows, in the order asked."""
        chosen: list[_Waiting] = []
        for _ in range(batch.num_admissible(len(self._inbox))):
            if not batch.fits(self._inbox[0].request):
                break  # Waits until the batch is empty, when a larger cache is built.
            chosen.append(self._inbox.popleft())
        if not chosen and batch.num_live == 0 and self._inbox:
            raise EngineError(
                explain_refusal(
                    "a request outgrew the running batch's cache",
                    allowed="requests as long as the longest that started the batch",
                    next_step="ask again; a larger cache is built then",
                )
            )
        tickets = batch.admit([entry.request for entry in chosen])
        waiting.update(zip(tickets, chosen, strict=True))

    def _fail_all(self, waiting: dict[int, _Waiting], error: BaseException) -> None:
        """Tell every waiting coroutine that its reply will not come."""
        failure = EngineError(f"generation failed: {type(error).__name__}: {error}")
        for entry in [*waiting.values(), *self._inbox]:
            if not entry.reply.done():
                entry.reply.set_exception(failure)
        self._inbox.clear()


def _answer(reply: asyncio.Future[Completion], completion: Completion) -> None:
    """Deliver a reply, unless the one who asked has gone."""
    if not reply.done():
        reply.set_result(completion)
