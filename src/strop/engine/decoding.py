"""Token-by-token decoding of a batch of requests: admission, steps, stops, compaction.

What a model remembers of the sequences is in `policy.kv_cache`.

Shapes: n live rows, V vocabulary, D hidden width.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from strop.engine.contract import Completion, GenerationRequest, StopStrings
from strop.engine.sampler import Draw, draw, draw_on_device, require_finite, temperature_kinds, uniform_stream
from strop.policy.fused_trunk import Products
from strop.policy.kv_cache import CachedRows, KVCache, Rows, open_rows
from strop.policy.language_model import LanguageModel
from strop.rollout import FinishReason, VersionSegment
from strop.tokenizer import Tokenizer

_PREFILL_POSITIONS = 4096
"""Prompt positions prefilled in one forward, so that its activations stay small."""
_ADMIT_FRAC = 0.125
"""Rows are compacted and admitted once this share of the batch is free."""
SLOT_STEP = 128
"""Slots are rounded up to multiples of this."""
_ROW_COUNTS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(slots=True, eq=False)
class _Row:
    """One sequence being decoded."""

    ticket: int
    request: GenerationRequest
    uniforms: NDArray[np.float64]
    stops: StopStrings | None
    token_ids: NDArray[np.int32] = field(init=False)
    logprobs: NDArray[np.float32] = field(init=False)
    length: int = 0
    finish: FinishReason | None = None
    segments: list[VersionSegment] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = np.empty(self.request.max_tokens, dtype=np.int32)
        self.logprobs = np.empty(self.request.max_tokens, dtype=np.float32)

    def take(self, token_id: int, logprob: float, version: int) -> None:
        """Record one sampled token and decide whether the reply ends with it."""
        if not self.segments or self.segments[-1].version != version:
            self.segments.append(VersionSegment(start=self.length, version=version))
        self.token_ids[self.length] = token_id
        self.logprobs[self.length] = logprob
        self.length += 1
        if token_id in self.request.stop_token_ids:
            self.finish = FinishReason.EOS
        elif self.stops is not None and self.stops.is_completed(self.token_ids[: self.length]):
            self.finish = FinishReason.STOP_STRING
        elif self.length == self.request.max_tokens:
            self.finish = FinishReason.LENGTH

    def complete(self, tokenizer: Tokenizer) -> Completion:
        """Return the reply, which has ended."""
        assert self.finish is not None
        token_ids = self.token_ids[: self.length].copy()
        text = tokenizer.decode(token_ids[:-1] if self.finish is FinishReason.EOS else token_ids)
        return Completion(
            token_ids=token_ids,
            logprobs=self.logprobs[: self.length].copy(),
            text=text if self.stops is None else self.stops.cut(text),
            finish_reason=self.finish,
            policy_version=self.segments[0].version,
            segments=tuple(self.segments) if len(self.segments) > 1 else (),
        )


class DecodeBatch:
    """Rows that are decoded together."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        max_num_seqs: int,
        requests: Sequence[GenerationRequest],
        products: Products | None = None,
        is_static: bool = False,
    ) -> None:
        """Make the rows. With `is_static`, steps run over tensors that never move, as GPUs need it."""
        self._device = model.device
        self._tokenizer = tokenizer
        self._max_tokens = max(_num_tokens(request) for request in requests)
        self._is_static = is_static
        rows, slots = _plan_cache(requests, max_num_seqs, is_static=is_static)
        self._states: Rows
        self._static: StaticStep | None = None
        if is_static:
            cached = CachedRows(model, max_num_seqs=rows, num_slots=slots, may_use_kernels=False)
            self._states, self._static = cached, StaticStep(model, cached.cache)
        else:
            self._states = open_rows(model, max_num_seqs=rows, num_slots=slots, products=products)
        self._rows: list[_Row] = []
        self._tickets = itertools.count()
        self._prefilled: list[tuple[_Row, torch.Tensor]] = []

    @property
    def num_live(self) -> int:
        """Rows admitted and not yet answered."""
        return len(self._rows)

    def fits(self, request: GenerationRequest) -> bool:
        """Whether the cache has slots for this request."""
        return _num_tokens(request) <= self._max_tokens

    def is_made_for(self, requests: Sequence[GenerationRequest], max_num_seqs: int) -> bool:
        """Whether a new batch for these requests would have the very same cache.

        Only then may the cache be used again: kernels may round differently on other strides, and a
        resumed run, whose cache is new, has to see the values of the uninterrupted one.
        """
        planned = _plan_cache(requests, max_num_seqs, is_static=self._is_static)
        return planned == (self._states.max_num_seqs, self._states.num_slots)

    def num_admissible(self, num_waiting: int) -> int:
        """How many waiting requests to admit now; 0 while too few rows are free to be worth it."""
        free = self._states.max_num_seqs - len(self._rows)
        wanted = min(free, num_waiting)
        worthwhile = max(1, int(self._states.max_num_seqs * _ADMIT_FRAC))
        return wanted if wanted >= min(worthwhile, num_waiting) else 0

    def admit(self, requests: Sequence[GenerationRequest]) -> list[int]:
        """Prefill requests and give each a row. Returns a ticket for each."""
        rows = [
            _Row(
                ticket=next(self._tickets),
                request=request,
                uniforms=uniform_stream(request.seed, request.max_tokens + 1),
                stops=StopStrings(self._tokenizer, request.stop_strings) if request.stop_strings else None,
            )
            for request in requests
        ]
        by_prompt: dict[bytes, list[_Row]] = {}
        for row in rows:
            by_prompt.setdefault(row.request.prompt_ids.tobytes(), []).append(row)
        # Distinct prompts, each computed once, in forwards of bounded size.
        chunks: list[list[list[_Row]]] = []
        num_positions = 0
        for shared in by_prompt.values():
            length = len(shared[0].request.prompt_ids)
            if not chunks or num_positions + length > _PREFILL_POSITIONS:
                chunks.append([])
                num_positions = 0
            chunks[-1].append(shared)
            num_positions += length
        for chunk in chunks:
            prompts = [shared[0].request.prompt_ids for shared in chunk]
            logits = self._states.begin(prompts, [len(shared) for shared in chunk])
            for index, shared in enumerate(chunk):
                self._rows += shared
                self._prefilled += [(row, logits[index]) for row in shared]
        return [row.ticket for row in rows]

    def clear(self) -> None:
        """Drop every row unanswered; the caller submits the requests again."""
        self._states.keep([])
        self._rows, self._prefilled = [], []

    def step(self, version: int) -> list[tuple[int, Completion]]:
        """Sample one token for every live row under the weights of `version`. Returns the replies that ended.

        Keys and values of earlier versions stay where the weights change in between: the log-probability
        of a token is that of the state that sampled it.
        """
        fresh, drawn = self._draw_next()
        for row, token_id, logprob in zip(fresh, drawn.token_ids, drawn.logprobs, strict=True):
            if row.finish is None:
                row.take(int(token_id), float(logprob), version)
        ended = [row for row in fresh if row.finish is not None]
        if ended:
            # Rows from the back fill the holes; the rest stay where they are.
            is_live = [row.finish is None for row in self._rows]
            num_live = sum(is_live)
            kept = list(range(num_live))
            from_back = [index for index in range(num_live, len(is_live)) if is_live[index]]
            holes = [index for index in kept if not is_live[index]]
            for hole, index in zip(holes, from_back, strict=True):
                kept[hole] = index
            self._states.keep(kept)
            self._rows = [self._rows[index] for index in kept]
        return [(row.ticket, row.complete(self._tokenizer)) for row in ended]

    def _draw_next(self) -> tuple[list[_Row], Draw]:
        """Draw the next token of rows: of fresh prefills if there are any, else of all."""
        rows = [row for row, _ in self._prefilled] or list(self._rows)
        if not rows:
            return [], Draw(token_ids=np.zeros(0, np.int64), logprobs=np.zeros(0, np.float32))
        samplings = [row.request.sampling for row in rows]
        uniforms = np.array([row.uniforms[row.length] for row in rows])
        if self._prefilled:
            logits = torch.stack([logits for _, logits in self._prefilled])
            self._prefilled = []
            return rows, draw(logits, samplings, uniforms)
        last = np.array([row.token_ids[row.length - 1] for row in rows], dtype=np.int64)
        positions = np.array([len(row.request.prompt_ids) + row.length - 1 for row in rows])
        if self._static is not None and not any(sampling.is_truncated for sampling in samplings):
            temperatures = np.array([sampling.temperature for sampling in samplings])
            drawn = self._static.draw(last, positions, uniforms, temperatures)
            require_finite(drawn)
            return rows, drawn
        token_ids = torch.from_numpy(last).to(self._device)
        logits = self._states.step(token_ids, torch.from_numpy(positions).to(self._device))
        return rows, draw(logits, samplings, uniforms)


def _num_tokens(request: GenerationRequest) -> int:
    return len(request.prompt_ids) + request.max_tokens


def _plan_cache(
    requests: Sequence[GenerationRequest], max_num_seqs: int, *, is_static: bool
) -> tuple[int, int]:
    """Return (rows, time slots) of the cache for a batch that these requests start.

    Static steps round slots up, so that the next batch finds the same cache and its graphs.
    """
    longest = max(_num_tokens(request) for request in requests)
    if is_static:
        longest = -(-longest // (2 * SLOT_STEP)) * 2 * SLOT_STEP
    return min(max_num_seqs, len(requests)), longest


@dataclass(frozen=True, slots=True)
class _Form:
    """The parameters that decide which kernels a step starts."""

    num_rows: int
    width: int
    kinds: tuple[bool, bool]
    """Of the temperatures, as `temperature_kinds` tells them."""


class StaticStep:
    """Decodes one token for the first rows of one cache, over tensors that never move.

    Below some three billion parameters a step's kernels take less time than starting them one by one. Here
    everything that a step needs from the host arrives in one copy, everything it answers leaves in one, and
    between them lies a function of tensors: forward, KV write, sampling. A GPU captures it once for each
    number of rows and slots that occurs, both rounded up, and replays it as one graph; elsewhere the same
    function is called as it is. Rows beyond the live ones decode nothing that anyone reads, in slots that an
    admission overwrites. A graph reads weights where they lie, so weights may be changed in place and in no
    other way.
    """

    def __init__(self, model: LanguageModel, cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        self._captures = model.device.type == "cuda"
        self._graphs: dict[_Form, torch.cuda.CUDAGraph] = {}
        # In fp64, which holds ids, lengths and log-probabilities exactly.
        sizes = {"dtype": torch.float64, "device": model.device}
        self._inputs = torch.zeros(4, cache.max_num_seqs, **sizes)  # type: ignore[call-overload]
        """Newest token, tokens stored, uniform and temperature of each row."""
        self._outputs = torch.zeros(2, cache.max_num_seqs, **sizes)  # type: ignore[call-overload]
        """Token drawn and its log-probability."""
        self._sent = torch.zeros(4, cache.max_num_seqs, dtype=torch.float64, pin_memory=self._captures)
        self._received = torch.zeros(2, cache.max_num_seqs, dtype=torch.float64, pin_memory=self._captures)

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    def draw(
        self,
        token_ids_n: NDArray[np.int64],
        lengths_n: NDArray[np.int64],
        uniforms_n: NDArray[np.float64],
        temperatures_n: NDArray[np.float64],
    ) -> Draw:
        """Feed each row its newest token and draw the next one, from whole distributions."""
        num_rows = len(token_ids_n)
        width = -(-(int(lengths_n.max()) + 1) // SLOT_STEP) * SLOT_STEP
        form = _Form(
            num_rows=min(next((c for c in _ROW_COUNTS if c >= num_rows), num_rows), self._cache.max_num_seqs),
            width=min(width, self._cache.num_slots),
            kinds=temperature_kinds(np.unique(temperatures_n).tolist()),
        )
        sent = self._sent.numpy()
        sent[:, num_rows : form.num_rows] = 0.0
        sent[:, :num_rows] = (token_ids_n, lengths_n, uniforms_n, temperatures_n)
        self._inputs.copy_(self._sent, non_blocking=True)
        self._run(form)
        self._received.copy_(self._outputs, non_blocking=True)
        if self._captures:
            torch.cuda.current_stream().synchronize()
        self._cache.advance()
        token_ids, logprobs = self._received.numpy()[:, :num_rows]
        return Draw(token_ids=token_ids.astype(np.int64), logprobs=logprobs.astype(np.float32))

    def _compute(self, form: _Form) -> None:
        """Decode one token of each row from `_inputs` into `_outputs`. Twice is the same as once."""
        token_ids, lengths, uniforms, temperatures = self._inputs[:, : form.num_rows]
        positions = lengths.long()
        window = self._cache.window(positions, form.width)
        hidden = self._model.trunk(token_ids.long(), positions, window)
        logits = self._model.logits(hidden)
        drawn, logprobs = draw_on_device(logits, uniforms, temperatures.float(), form.kinds)
        self._outputs[0, : form.num_rows] = drawn.double()
        self._outputs[1, : form.num_rows] = logprobs.double()

    def _run(self, form: _Form) -> None:
        """Replay the graph of a form, captured when it first occurs; without graphs, compute."""
        if self._captures and form not in self._graphs:
            self._capture(form)
        if form in self._graphs:
            self._graphs[form].replay()
        else:
            self._compute(form)

    def _capture(self, form: _Form) -> None:
        """Record the step of one form; go without graphs from now on if that fails."""
        # Once beforehand, on a stream of its own as PyTorch asks: libraries allocate, layers are compiled.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._compute(form)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        try:
            # Only this thread is held to what a capture allows: a learner may be at work in another.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                self._compute(form)
        except RuntimeError as error:
            self._captures = False
            lines = str(error).strip().splitlines() or [""]
            warnings.warn(
                f"decode steps are started kernel by kernel from now on: {form.num_rows} rows could not be "
                f"captured as a graph ({type(error).__name__}: {lines[0]})",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        self._graphs[form] = graph
