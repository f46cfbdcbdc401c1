"""The in-process engine: generation on the policy's weights.

One asyncio task decodes while there are requests and yields to other coroutines between tokens, so
environments continue and new requests are admitted while rows are being decoded. Requests with equal prompts
that are admitted together share one prefill, and replies to one prompt that are scored together one forward.
Finished rows are compacted away.

Weights arrive by reference (the policy's tensors) or as a safetensors file with a digest. While an update
waits, no request is admitted; depending on the update's mode the batch is finished, restarted or kept, and
the weights are changed between two tokens.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from strop.engine.contract import (
    Completion,
    GenerationRequest,
    ReplyScore,
    UpdateMode,
    Waiting,
    WaitingScore,
    WeightReceipt,
    WeightTransport,
    WeightUpdate,
    check_ids,
    check_room,
    closed,
    default_rows,
    deliver,
    fail,
    settle,
)
from strop.engine.decoding import DecodeBatch
from strop.errors import EngineError, WeightMismatch, describe_error
from strop.policy.fused_trunk import JoinedLinear
from strop.policy.kv_cache import KVCache
from strop.policy.language_model import LanguageModel
from strop.policy.scoring import score_replies
from strop.policy.weights import load_published
from strop.rollout import IntArray
from strop.tokenizer import Tokenizer

_GPU_CACHE_FRAC = 0.3
"""Share of a GPU's memory that a KV cache may take; a learner may share the GPU."""


@dataclass(slots=True, eq=False)
class _Change:
    """An update that waits to be applied between two tokens."""

    update: WeightUpdate
    receipt: asyncio.Future[WeightReceipt]


class NativeEngine:
    """Generates in this process. One instance serves one event loop at a time."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        max_num_seqs: int | None = None,
        version: int = 0,
        is_static: bool | None = None,
    ) -> None:
        """Serve a model. `is_static`: decode with static tensors, for CUDA graphs; by default on GPUs.

        Models whose sequences are computed by themselves are never decoded so.
        """
        self._model = model
        self._tokenizer = tokenizer
        is_static = model.device.type == "cuda" if is_static is None else is_static
        self._is_static = is_static and not model.is_alone
        self._max_num_seqs = max_num_seqs or default_rows(is_gpu=model.device.type == "cuda")
        self._version = version
        self._inbox: deque[Waiting] = deque()
        self._runner: asyncio.Task[None] | None = None
        self._unscored: dict[tuple[bytes, float], list[WaitingScore]] = {}
        self._scorer: asyncio.Task[None] | None = None
        self._update_lock = asyncio.Lock()
        self._change: _Change | None = None
        self._batch: DecodeBatch | None = None
        # Not with graphs: weights then change in place, and packed copies would be stale.
        self._products = None if self._is_static else PrepackedProducts.for_model(model)
        self._is_closed = False

    @property
    def version(self) -> int:
        """Version of the weights served."""
        return self._version

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one reply. See `Engine.generate`."""
        self._require_open()
        # Refused before it joins a batch.
        shape = self._model.shape
        check_room(len(request.prompt_ids), request.max_tokens, "asks for", shape.max_positions)
        check_ids(request.prompt_ids, shape.vocab_size)
        waiting = Waiting(request, asyncio.get_running_loop().create_future())
        self._inbox.append(waiting)
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())
        return await waiting.reply

    async def score(self, prompt_ids: IntArray, reply_ids: IntArray, temperature: float) -> ReplyScore:
        """Return the log-probability of each reply token. See `Engine.score`."""
        self._require_open()
        check_room(len(prompt_ids), len(reply_ids), "has a reply of", self._model.shape.max_positions)
        check_ids(np.concatenate([prompt_ids, reply_ids]), self._model.shape.vocab_size)
        waiting = WaitingScore(prompt_ids, reply_ids, asyncio.get_running_loop().create_future())
        self._unscored.setdefault((prompt_ids.tobytes(), temperature), []).append(waiting)
        if self._scorer is None or self._scorer.done():
            self._scorer = asyncio.create_task(self._score_waiting())
        return await waiting.score

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        """Serve new weights. See `Engine.update`. Updates are applied one at a time."""
        self._require_open()
        async with self._update_lock:
            if self._runner is None or self._runner.done():
                return self._apply(update)
            change = _Change(update, asyncio.get_running_loop().create_future())
            self._change = change
            try:
                return await change.receipt
            finally:
                self._change = None

    def _apply(self, update: WeightUpdate) -> WeightReceipt:
        """Take the new weights, all of them or none."""
        if update.transport is not WeightTransport.SHARED:
            self._load(update)
        self._drop_packed()
        self._version = update.version
        return WeightReceipt(version=update.version, digest=update.digest)

    def _make_change(self, batch: DecodeBatch, waiting: dict[int, Waiting]) -> None:
        """Apply a waiting update between two tokens, as soon as its mode allows."""
        change = self._change
        if change is None or change.receipt.done():
            return
        if change.update.mode is UpdateMode.RESTART and waiting:
            self._inbox.extendleft(waiting[ticket] for ticket in sorted(waiting, reverse=True))
            waiting.clear()
            batch.clear()
        if not waiting or change.update.mode is UpdateMode.CONTINUE:
            self._end_change()

    async def close(self) -> None:
        """Stop decoding; waiting requests get an EngineError, and later ones too."""
        self._is_closed = True
        for task in (self._runner, self._scorer):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._fail_all({}, None)  # A runner that had not begun has failed no request.
        self._fail_scores(None)
        self._batch = None
        self._drop_packed()

    def _drop_packed(self) -> None:
        if self._products is not None:
            self._products.invalidate()

    async def _score_waiting(self) -> None:
        """Score the waiting replies, prompt by prompt: values do not depend on other prompts."""
        try:
            await settle(lambda: sum(map(len, self._unscored.values())))
            while self._unscored:
                key = next(iter(self._unscored))
                entries = self._unscored[key]
                scores = score_replies(
                    self._model, entries[0].prompt_ids, [entry.reply_ids for entry in entries], key[1]
                )
                # Only now: if the forward fails, `_fail_scores` must still find these requests.
                del self._unscored[key]
                for entry, logprobs in zip(entries, scores, strict=True):
                    deliver(entry.score, ReplyScore(logprobs=logprobs, policy_version=self._version))
                await asyncio.sleep(0)
        except (RuntimeError, MemoryError) as error:
            self._fail_scores(error)
        finally:
            self._fail_scores(sys.exception())

    def _load(self, update: WeightUpdate) -> None:
        """Copy published tensors into the model, once their digest is proven."""
        if update.path is None or update.transport is WeightTransport.SHARED:
            path = update.path or "none"
            raise WeightMismatch(f"weight update {update.version} is by {update.transport} and names {path}")
        load_published(self._model, update.path, expected_digest=update.digest)

    async def _run(self) -> None:
        """Decode until there are no more requests."""
        waiting: dict[int, Waiting] = {}
        try:
            await settle(lambda: len(self._inbox))
            batch = self._fitting_batch([entry.request for entry in self._inbox])
            while self._inbox or waiting:
                if not waiting and not batch.fits(self._inbox[0].request):
                    await settle(lambda: len(self._inbox))
                    batch = self._fitting_batch([entry.request for entry in self._inbox])
                self._make_change(batch, waiting)
                # Left before yielding: the mode is per thread, and a learner may train in this thread.
                with torch.inference_mode():
                    # No request may join while an update waits for the batch to end.
                    if self._change is None or self._change.receipt.done():
                        self._admit(batch, waiting)
                    completions = batch.step(self._version)
                for ticket, completion in completions:
                    deliver(waiting.pop(ticket).reply, completion)
                await asyncio.sleep(0)
        except (RuntimeError, MemoryError) as error:
            self._fail_all(waiting, error)
        finally:
            # Also after a cancellation or a bug: no caller may wait for a reply that never comes.
            self._fail_all(waiting, sys.exception())
            self._end_change()

    def _end_change(self) -> None:
        """Apply an update whose batch is over, however it ended."""
        change = self._change
        if change is None or change.receipt.done():
            return
        if self._is_closed:
            change.receipt.set_exception(closed())
            return
        try:
            change.receipt.set_result(self._apply(change.update))
        except WeightMismatch as error:
            change.receipt.set_exception(error)

    def _fitting_batch(self, requests: Sequence[GenerationRequest]) -> DecodeBatch:
        """Return a batch for these requests: the previous one if its cache has the same sizes."""
        max_num_seqs = self._max_num_seqs
        if self._model.device.type == "cuda":
            # As many rows of the longest request as fit into the share of the GPU for caches.
            total_bytes = torch.cuda.get_device_properties(self._model.device).total_memory
            longest = max(len(request.prompt_ids) + request.max_tokens for request in requests)
            per_row = longest * KVCache.bytes_per_slot(self._model.shape, self._model.dtype)
            max_num_seqs = min(max_num_seqs, max(1, int(_GPU_CACHE_FRAC * total_bytes) // per_row))
        if self._batch is None or not self._batch.is_made_for(requests, max_num_seqs):
            self._batch = None  # Freed before its successor is allocated.
            self._batch = DecodeBatch(
                self._model,
                self._tokenizer,
                max_num_seqs=max_num_seqs,
                requests=requests,
                products=self._products,
                is_static=self._is_static,
            )
        return self._batch

    def _admit(self, batch: DecodeBatch, waiting: dict[int, Waiting]) -> None:
        """Move requests from the inbox into free rows, in order of arrival."""
        chosen: list[Waiting] = []
        for entry in islice(self._inbox, batch.num_admissible(len(self._inbox))):
            if not batch.fits(entry.request):
                break  # Waits until the batch is empty, when a larger cache is built.
            chosen.append(entry)
        tickets = batch.admit([entry.request for entry in chosen])
        # Only now: if the prefill fails, `_fail_all` must still find these requests.
        for ticket, entry in zip(tickets, chosen, strict=True):
            waiting[ticket] = entry
            self._inbox.popleft()

    def _fail_all(self, waiting: dict[int, Waiting], error: BaseException | None) -> None:
        """Fail every waiting request."""
        entries = [*waiting.values(), *self._inbox]
        if not entries:
            return
        self._batch = None  # Its rows have no requests any more.
        failure = closed() if self._is_closed else _failed("generation", error)
        fail([entry.reply for entry in entries], failure)
        waiting.clear()
        self._inbox.clear()

    def _fail_scores(self, error: BaseException | None) -> None:
        """Fail every waiting score."""
        failure = closed() if self._is_closed else _failed("scoring", error)
        fail([entry.score for entries in self._unscored.values() for entry in entries], failure)
        self._unscored.clear()

    def _require_open(self) -> None:
        if self._is_closed:
            raise closed()


def _failed(task: str, error: BaseException | None) -> EngineError:
    """Return the error for waiting callers, with its cause."""
    if error is None:
        return EngineError(f"{task} failed: it ended before its time")
    # Its frames hold caches, which would live as long as the error.
    traceback.clear_frames(error.__traceback__)
    failure = EngineError(f"{task} failed: {describe_error(error)}")
    failure.__cause__ = error
    return failure


class PrepackedProducts:
    """Multiplies by copies of a model's weights in the layout of the CPU's matrix kernels.

    A plain product packs the weight matrix at every call, a good part of the work at the few rows of a
    decode step. With SmolLM2-135M's matrices, the time of a product falls

    * in bf16 by 8 % at 64 rows, 23 % at 16 and 40 % at 5 (one thread of an AMD EPYC with avx512_bf16),
    * in float32 by 20 to 40 % at 64 rows, and by half at 16, at 4 and in the LM head (two threads, AVX2).

    The copies, made at first use and again when the weights change, take as many bytes as the weights.
    Layout and products are those of PyTorch (oneDNN), through the operators that its compiler uses for frozen
    models. Covered: processors that these operators support, models with fused layers.
    """

    def __init__(self) -> None:
        self._packed: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._multiply: Any = torch.ops.mkldnn._linear_pointwise

    @classmethod
    def for_model(cls, model: LanguageModel) -> PrepackedProducts | None:
        """Return products for a model, or None where packing does not apply."""
        return cls() if model.fused is not None and _can_pack(model.dtype) else None

    def invalidate(self) -> None:
        """Drop the packed copies: the weights have changed."""
        self._packed = {}

    def multiply(self, linear: JoinedLinear, x: torch.Tensor) -> torch.Tensor:
        """Return linear(x). Without gradients only."""
        packed = self._packed.get(id(linear))
        if packed is None:
            # Copies of weight and bias: half old and half new would be neither.
            bias = linear.bias()
            packed = self._packed[id(linear)] = (
                torch.ops.mkldnn._reorder_linear_weight(linear.weight),
                None if bias is None else bias.detach().clone(),
            )
        output: torch.Tensor = self._multiply(x, packed[0], packed[1], "none", [], "")
        return output


@functools.cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether the operators work here and are right, tested on a small weight: both differ by version."""
    # Small whole numbers, whose products and sums are exact in either type.
    weight = (torch.arange(16 * 32) % 7 - 3.0).view(16, 32).to(dtype)
    x = (torch.arange(3 * 32) % 5 - 2.0).view(3, 32).to(dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        product = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(product, torch.nn.functional.linear(x, weight))
