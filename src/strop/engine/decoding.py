"""Token-by-token decoding of a batch of requests: admission, steps, sampling, stops, compaction.

KV caches and other states of the sequences are in `policy.kv_cache`.

Shapes: n live rows, V vocabulary, B blocks of the vocabulary.
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
from strop.errors import EngineError
from strop.kernels import calls
from strop.policy.fused_trunk import Products
from strop.policy.kv_cache import CachedRows, KVCache, Rows, open_rows
from strop.policy.language_model import LanguageModel
from strop.rollout import FinishReason, Sampling, VersionSegment
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
        """Record one sampled token; set `finish` if the reply ends with it."""
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
        """Return the finished reply."""
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
        """With `is_static`, steps run over tensors that never move, as CUDA graphs need them."""
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
        """Admitted rows that are not finished."""
        return len(self._rows)

    def fits(self, request: GenerationRequest) -> bool:
        """Whether the cache has slots for this request."""
        return _num_tokens(request) <= self._max_tokens

    def is_made_for(self, requests: Sequence[GenerationRequest], max_num_seqs: int) -> bool:
        """Whether a new batch for these requests would have a cache of the same sizes.

        Only then may the cache be used again: kernels may round differently on other strides, and a
        resumed run, whose cache is new, must get the values of the uninterrupted one.
        """
        planned = _plan_cache(requests, max_num_seqs, is_static=self._is_static)
        return planned == (self._states.max_num_seqs, self._states.num_slots)

    def num_admissible(self, num_waiting: int) -> int:
        """How many waiting requests to admit now; 0 while too few rows are free."""
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
        """Sample one token for every live row under the weights of `version`. Returns the finished replies.

        When the weights change, keys and values of earlier versions stay: the log-probability of a token is
        that of the state that sampled it.
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
        """Draw the next token of freshly prefilled rows if there are any, else of all."""
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
    """Return (rows, slots) of the cache for a batch that these requests start."""
    longest = max(_num_tokens(request) for request in requests)
    if is_static:
        # Rounded up, so that the next batch can reuse the cache and its graphs.
        longest = -(-longest // (2 * SLOT_STEP)) * 2 * SLOT_STEP
    return min(max_num_seqs, len(requests)), longest


@dataclass(frozen=True, slots=True)
class _Form:
    """The parameters that decide which kernels a step starts."""

    num_rows: int
    width: int
    kinds: tuple[bool, bool]
    """The `temperature_kinds` of the rows."""


class StaticStep:
    """Decodes one token for the first rows of one cache, over tensors that never move.

    Below some three billion parameters a step's kernels take less time than starting them one by one. Here
    all inputs arrive from the host in one copy, all outputs leave in one, and between them is a function of
    tensors: forward, KV write, sampling. A GPU captures it once for each number of rows and slots, both
    rounded up, and replays it as one graph; elsewhere the function is called. Rows beyond the live ones
    decode garbage, in slots that an admission overwrites. A graph reads weights at their addresses, so
    weights may only be changed in place.
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
        if self._captures and form not in self._graphs:
            self._capture(form)
        if form in self._graphs:
            self._graphs[form].replay()
        else:
            self._compute(form)
        self._received.copy_(self._outputs, non_blocking=True)
        if self._captures:
            torch.cuda.current_stream().synchronize()
        self._cache.advance()
        token_ids, logprobs = self._received.numpy()[:, :num_rows]
        return Draw(token_ids=token_ids.astype(np.int64), logprobs=logprobs.astype(np.float32))

    def _compute(self, form: _Form) -> None:
        """Decode one token of each row from `_inputs` into `_outputs`. Idempotent."""
        token_ids, lengths, uniforms, temperatures = self._inputs[:, : form.num_rows]
        positions = lengths.long()
        window = self._cache.window(positions, form.width)
        hidden = self._model.trunk(token_ids.long(), positions, window)
        logits = self._model.logits(hidden)
        drawn, logprobs = draw_on_device(logits, uniforms, temperatures.float(), form.kinds)
        self._outputs[0, : form.num_rows] = drawn.double()
        self._outputs[1, : form.num_rows] = logprobs.double()

    def _capture(self, form: _Form) -> None:
        """Record the step of one form as a graph; if that fails, use no graphs from now on."""
        # A warm-up on another stream, as PyTorch requires: libraries allocate, layers are compiled.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._compute(form)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        try:
            # The restrictions of a capture hold for this thread alone: a learner may compute in another.
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


# Sampling: one uniform number per row and position decides the token by inverse CDF, so a reply depends on
# its seed alone and not on its batch. The CDF has two levels (block sums, then one block), so the vocabulary
# is read once.

_BLOCK = 256


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Draw:
    """Tokens drawn for n rows."""

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]


def uniform_stream(seed: int, length: int) -> NDArray[np.float64]:
    """Return the numbers in [0, 1) that decide a reply's tokens, one per position."""
    return np.random.Generator(np.random.Philox(key=seed)).random(length)


def draw(logits_n_V: torch.Tensor, samplings: Sequence[Sampling], uniforms_n: NDArray[np.float64]) -> Draw:
    """Draw one token per row. Greedy rows ignore their uniform and report log-probabilities at temperature 1.

    Raises: EngineError if a drawn token's log-probability is not finite, as with weights that are not.
    """
    is_truncated = any(sampling.is_truncated and sampling.temperature != 0.0 for sampling in samplings)
    if calls.can_run(logits_n_V.device, logits_n_V.dtype) and not is_truncated:
        temperatures = torch.tensor([sampling.temperature for sampling in samplings], dtype=torch.float32)
        token_ids, logprobs = calls.draw_tokens(
            logits_n_V.contiguous(), torch.from_numpy(uniforms_n), temperatures
        )
        drawn = Draw(token_ids=token_ids.numpy(), logprobs=logprobs.numpy())
    else:
        drawn = draw_plain(logits_n_V, samplings, uniforms_n)
    require_finite(drawn)
    return drawn


def require_finite(drawn: Draw) -> None:
    """Raises: EngineError if a drawn log-probability is not finite."""
    if not np.isfinite(drawn.logprobs).all():
        raise EngineError(
            "the logits of a next token are not finite",
            allowed="finite logits, or -inf for tokens that must not be drawn",
            next_step="check the weights; the run resumes from its last checkpoint",
        )


def draw_plain(
    logits_n_V: torch.Tensor, samplings: Sequence[Sampling], uniforms_n: NDArray[np.float64]
) -> Draw:
    """Draw like `draw`, in plain PyTorch: on any device, and from truncated distributions."""
    device = logits_n_V.device
    values = [sampling.temperature for sampling in samplings]
    temperatures = torch.tensor(values, dtype=torch.float32, device=device)
    is_scaled, has_greedy = temperature_kinds(values)
    probs = _probabilities(logits_n_V, temperatures if is_scaled else None)
    for row, sampling in enumerate(samplings):
        if sampling.is_truncated and sampling.temperature != 0.0:
            probs[row] = truncate(probs[row], sampling)
    uniforms = torch.from_numpy(uniforms_n).to(device)
    chosen, logprobs = _choose(probs, uniforms, logits_n_V, temperatures if has_greedy else None)
    return Draw(token_ids=chosen.cpu().numpy(), logprobs=logprobs.cpu().numpy())


def temperature_kinds(temperatures: Sequence[float]) -> tuple[bool, bool]:
    """Return whether any logits must be divided, and whether a row is greedy."""
    is_scaled = any(temperature not in (0.0, 1.0) for temperature in temperatures)
    return is_scaled, any(temperature == 0.0 for temperature in temperatures)


def draw_on_device(
    logits_n_V: torch.Tensor,
    uniforms_n: torch.Tensor,
    temperatures_n: torch.Tensor,
    kinds: tuple[bool, bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw like `draw_plain` from whole distributions, without synchronising. Returns ids and logprobs.

    Shapes: uniforms (n,) fp64, temperatures (n,) fp32; `kinds` are their `temperature_kinds`.
    """
    is_scaled, has_greedy = kinds
    probs = _probabilities(logits_n_V, temperatures_n if is_scaled else None)
    return _choose(probs, uniforms_n, logits_n_V, temperatures_n if has_greedy else None)


def _choose(
    probs_n_V: torch.Tensor,
    uniforms_n: torch.Tensor,
    logits_n_V: torch.Tensor,
    temperatures_n: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return drawn ids and their log-probabilities; the likeliest id where a temperature is 0."""
    chosen = inverse_cdf(probs_n_V, uniforms_n)
    if temperatures_n is not None:
        chosen = torch.where(temperatures_n == 0.0, logits_n_V.argmax(dim=-1), chosen)
    return chosen, probs_n_V.gather(1, chosen[:, None]).squeeze(1).log()


def _probabilities(logits_n_V: torch.Tensor, temperatures_n: torch.Tensor | None) -> torch.Tensor:
    """Return the distribution of each row, at 1 for temperatures of 0. Shapes: (n, V), fp32."""
    if temperatures_n is not None:
        scale = torch.where(temperatures_n == 0.0, 1.0, temperatures_n)
        # In fp32, as the divisors are: one pass from bf16.
        logits_n_V = logits_n_V / scale[:, None]
    return torch.softmax(logits_n_V, dim=-1, dtype=torch.float32)


def truncate(probs_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Keep the top-k, then the top-p tokens, and renormalise. Shapes: (V,) to (V,).

    Ties are broken by token id, so that the support is reproducible. The most probable token always
    stays. Top-p keeps the smallest set whose mass, after top-k renormalisation, reaches `top_p`.
    """
    order = torch.argsort(probs_V, descending=True, stable=True)
    kept = order[: sampling.top_k] if sampling.top_k is not None else order
    mass = probs_V[kept].double()
    mass = mass / mass.sum()
    # A token stays if the mass before it has not yet reached top_p.
    stays = (mass.cumsum(0) - mass) < sampling.top_p
    stays[0] = True
    truncated = torch.zeros_like(probs_V)
    truncated[kept[stays]] = (mass[stays] / mass[stays].sum()).to(probs_V.dtype)
    return truncated


def inverse_cdf(probs_n_V: torch.Tensor, uniforms_n: torch.Tensor) -> torch.Tensor:
    """Return the first token whose cumulated probability exceeds u times the total.

    Strictly exceeds, so that u = 0 cannot pick a token of probability 0; at the top end rounding is
    caught by the last token with positive probability.
    """
    num_rows, vocab = probs_n_V.shape
    missing = -vocab % _BLOCK
    # Padding by 0 would copy the whole vocabulary of every row.
    padded = torch.nn.functional.pad(probs_n_V, (0, missing)) if missing else probs_n_V
    blocks = padded.view(num_rows, -1, _BLOCK)
    block_mass = blocks.sum(dim=-1).double().cumsum(dim=-1)
    target = uniforms_n[:, None] * block_mass[:, -1:]
    block = _first_above(block_mass, target).clamp(max=block_mass.shape[1] - 1)
    before = torch.where(block > 0, block_mass.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    inside = blocks[torch.arange(num_rows, device=block.device), block].double().cumsum(dim=-1)
    chosen = block * _BLOCK + _first_above(inside, target - before[:, None])
    # NaN compares false, so rows of NaN run over the end; `draw` refuses their log-probabilities.
    return chosen.clamp(max=vocab - 1)


def _first_above(cumulated: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the first index above target, or the last that still added mass. Shapes: (n, m) to (n,)."""
    above = torch.searchsorted(cumulated, target.clamp(min=0.0).contiguous(), right=True)[:, 0]
    last_with_mass = torch.searchsorted(cumulated, cumulated[:, -1:].contiguous())[:, 0]
    return torch.minimum(above, last_with_mass)
