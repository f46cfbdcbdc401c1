"""The in-process engine: generation on the policy's own weights.

One asyncio task decodes while anything is asked for and gives way to other coroutines between
tokens, so environments go on and new requests are admitted while rows are being decoded. Requests
with equal prompts that are admitted together share one prefill, and replies to one prompt that are
scored together one forward. Finished rows are compacted away.

Weights arrive by reference (the policy's own tensors) or as a safetensors file with a digest.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from strop.engine.contract import (
    DEFAULT_MAX_ROWS,
    Completion,
    GenerationRequest,
    ReplyScore,
    WeightReceipt,
    WeightTransport,
    WeightUpdate,
)
from strop.engine.decoding import DecodeBatch
from strop.engine.prepacked import PrepackedProducts
from strop.engine.settling import Waiting, WaitingScore, deliver, fail, settle
from strop.errors import EngineError, WeightMismatch, explain_refusal
from strop.policy.language_model import LanguageModel
from strop.policy.scoring import score_replies
from strop.policy.weights import load_published
from strop.rollout import IntArray
from strop.tokenizer import Tokenizer


class NativeEngine:
    """Generates in this process. One instance serves one event loop at a time."""

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer, *, max_rows: int | None = None, version: int = 0
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._max_rows = max_rows or DEFAULT_MAX_ROWS
        self._version = version
        self._inbox: deque[Waiting] = deque()
        self._runner: asyncio.Task[None] | None = None
        self._unscored: dict[tuple[bytes, float], list[WaitingScore]] = {}
        self._scorer: asyncio.Task[None] | None = None
        self._update_lock = asyncio.Lock()
        self._batch: DecodeBatch | None = None
        self._products = PrepackedProducts.for_model(model)
        self._is_closed = False

    @property
    def version(self) -> int:
        """Version of the weights served."""
        return self._version

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one reply. See `Engine.generate`."""
        self._require_open()
        self._check(request)
        waiting = Waiting(request, asyncio.get_running_loop().create_future())
        self._inbox.append(waiting)
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())
        return await waiting.reply

    async def score(self, prompt_ids: IntArray, reply_ids: IntArray, temperature: float) -> ReplyScore:
        """Return the log-probability of each reply token. See `Engine.score`."""
        self._require_open()
        self._check_room(len(prompt_ids), len(reply_ids), "has a reply of")
        self._check_ids(np.concatenate([prompt_ids, reply_ids]))
        waiting = WaitingScore(prompt_ids, reply_ids, asyncio.get_running_loop().create_future())
        self._unscored.setdefault((prompt_ids.tobytes(), temperature), []).append(waiting)
        if self._scorer is None or self._scorer.done():
            self._scorer = asyncio.create_task(self._score_waiting())
        return await waiting.score

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        """Serve new weights. See `Engine.update`. Updates are applied one at a time."""
        self._require_open()
        async with self._update_lock:
            await self._wait_until_idle()
            if update.transport is WeightTransport.FILE:
                self._load_file(update)
            self._drop_packed()
            self._version = update.version
            return WeightReceipt(version=update.version, digest=update.digest)

    async def close(self) -> None:
        """Stop decoding; waiting requests get an EngineError, and later ones too."""
        self._is_closed = True
        for task in (self._runner, self._scorer):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._fail_all({}, None)  # A runner that had not begun has told nobody.
        self._fail_scores(None)
        self._batch = None
        self._drop_packed()

    def _drop_packed(self) -> None:
        if self._products is not None:
            self._products.invalidate()

    async def _wait_until_idle(self) -> None:
        while self._runner is not None and not self._runner.done():
            await asyncio.wait([self._runner])

    async def _score_waiting(self) -> None:
        """Score what waits, prompt by prompt: what else is scored changes no value."""
        try:
            await settle(lambda: sum(map(len, self._unscored.values())))
            while self._unscored:
                await self._wait_until_idle()
                key = next(iter(self._unscored))
                entries = self._unscored[key]
                found = score_replies(
                    self._model, entries[0].prompt_ids, [entry.reply_ids for entry in entries], key[1]
                )
                # Only now: whoever is in no place when a forward fails would wait for ever.
                del self._unscored[key]
                for entry, logprobs in zip(entries, found, strict=True):
                    deliver(entry.score, ReplyScore(logprobs=logprobs, policy_version=self._version))
                await asyncio.sleep(0)
        except (RuntimeError, MemoryError) as error:
            self._fail_scores(error)
        finally:
            self._fail_scores(sys.exception())

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
        self._check_room(len(request.prompt_ids), request.max_tokens, "asks for")
        self._check_ids(request.prompt_ids)

    def _check_room(self, num_prompt: int, num_reply: int, how: str) -> None:
        limit = self._model.shape.max_positions
        if num_prompt == 0 or num_reply < 1 or num_prompt + num_reply > limit:
            raise EngineError(
                explain_refusal(
                    f"a request has {num_prompt} prompt tokens and {how} {num_reply}",
                    allowed=f"at least one of each, and together at most {limit} positions",
                    next_step="shorten the prompt or lower task.max_reply_tokens",
                )
            )

    def _check_ids(self, token_ids: IntArray) -> None:
        lowest, highest = int(token_ids.min()), int(token_ids.max())
        if lowest < 0 or highest >= self._model.shape.vocab_size:
            raise EngineError(
                explain_refusal(
                    f"a prompt holds token ids from {lowest} to {highest}",
                    allowed=f"ids from 0 to {self._model.shape.vocab_size - 1}",
                    next_step="check that the tokenizer is the model's own",
                )
            )

    async def _run(self) -> None:
        """Decode until nothing is asked for any more."""
        waiting: dict[int, Waiting] = {}
        try:
            await self._decode(waiting)
        except (RuntimeError, MemoryError) as error:
            self._fail_all(waiting, error)
        finally:
            # After a cancellation or a bug too: nobody may wait for a reply that never comes.
            self._fail_all(waiting, sys.exception())

    async def _decode(self, waiting: dict[int, Waiting]) -> None:
        await settle(lambda: len(self._inbox))
        batch = self._fitting_batch([entry.request for entry in self._inbox])
        while self._inbox or waiting:
            if not waiting and not batch.fits(self._inbox[0].request):
                await settle(lambda: len(self._inbox))
                batch = self._fitting_batch([entry.request for entry in self._inbox])
            # Left before giving way: the mode is the thread's, and others train in this thread.
            with torch.inference_mode():
                self._admit(batch, waiting)
                completions = batch.step(self._version)
            for ticket, completion in completions:
                deliver(waiting.pop(ticket).reply, completion)
            await asyncio.sleep(0)

    def _fitting_batch(self, requests: Sequence[GenerationRequest]) -> DecodeBatch:
        """Return a batch for these requests, the previous one where its cache is the same."""
        if self._batch is None or not self._batch.is_made_for(requests, self._max_rows):
            self._batch = None  # Freed before its successor is allocated.
            self._batch = DecodeBatch(
                self._model,
                self._tokenizer,
                max_rows=self._max_rows,
                requests=requests,
                products=self._products,
            )
        return self._batch

    def _admit(self, batch: DecodeBatch, waiting: dict[int, Waiting]) -> None:
        """Move requests from the inbox into free rows, in the order asked."""
        chosen: list[Waiting] = []
        for entry in islice(self._inbox, batch.num_admissible(len(self._inbox))):
            if not batch.fits(entry.request):
                break  # Waits until the batch is empty, when a larger cache is built.
            chosen.append(entry)
        tickets = batch.admit([entry.request for entry in chosen])
        # Only now: whoever is in neither place when a prefill fails would wait for ever.
        for ticket, entry in zip(tickets, chosen, strict=True):
            waiting[ticket] = entry
            self._inbox.popleft()

    def _fail_all(self, waiting: dict[int, Waiting], error: BaseException | None) -> None:
        """Tell every waiting coroutine that its reply will not come."""
        entries = [*waiting.values(), *self._inbox]
        if not entries:
            return
        self._batch = None  # Its rows belong to nobody now.
        failure = _closed() if self._is_closed else EngineError(f"generation failed: {error!r}")
        fail([entry.reply for entry in entries], failure)
        waiting.clear()
        self._inbox.clear()

    def _fail_scores(self, error: BaseException | None) -> None:
        """Tell every coroutine that waits for a score that it will not come."""
        failure = _closed() if self._is_closed else EngineError(f"scoring failed: {error!r}")
        fail([entry.score for entries in self._unscored.values() for entry in entries], failure)
        self._unscored.clear()

    def _require_open(self) -> None:
        if self._is_closed:
            raise _closed()


def _closed() -> EngineError:
    return EngineError(
        explain_refusal(
            "a request to an engine that is closed",
            allowed="requests before close",
            next_step="build a new engine",
        )
    )
