"""An engine that takes the time of a real one and computes nothing.

For trying schedules and routers at any size: it keeps the whole contract, on the event loop's clock, which
may be real or simulated (`strop.testing.virtual_time`). Rows are decoded together, one token each per step;
a step takes longer the more rows there are. Prefills and updates delay the decoding. A prompt that another
row holds is not prefilled again. Rows beyond the engine's limits, or whose tokens do not fit into the cache,
wait in the order of their arrival.

The length of a reply depends only on the request's seed. An engine's failures (slow, dead, silent) depend
only on the engine's seed.

Left out: chunked prefill, preemption of rows when the cache overflows, and the meaning of tokens.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from strop.engine.contract import (
    Completion,
    GenerationRequest,
    ReplyScore,
    UpdateMode,
    WeightReceipt,
    WeightUpdate,
    closed,
)
from strop.errors import EngineError, EngineLost
from strop.rollout import FinishReason, IntArray, VersionSegment

_LOGPROB_NATS = -0.5
_TOKEN_ID = 1
_NORMAL = NormalDist()
_TOLERANCE_TOKENS = 1e-6
_MASK = 2**64 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedSpeed:
    """Durations in an engine, and lengths of replies."""

    median_reply_tokens: float = 500.0
    reply_sigma: float = 0.6
    """Spread of log-normal reply lengths: 0.6 means that one reply in six is longer than 1.8 medians."""
    prefill_tokens_per_s: float = 20_000.0
    step_base_s: float = 0.010
    """Base duration of a decode step: the weights are read once, whatever the rows."""
    step_row_s: float = 0.00005
    """Additional duration for each row."""
    max_num_seqs: int = 256
    max_cache_tokens: int = 500_000
    """Tokens of prompts and replies that fit into the cache."""
    update_s: float = 0.5
    """Duration of an update, after all rows have ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedTrouble:
    """Failures of an engine."""

    straggler_frac: float = 0.0
    """Probability that this engine is slow."""
    straggler_factor: float = 3.0
    mean_life_s: float = math.inf
    """Mean of the exponential time after which it dies."""
    repair_s: float = math.inf
    """Time from a death until the engine answers again."""
    silent_frac: float = 0.0
    """Share of silent deaths: requests are never answered."""


@dataclass(slots=True, eq=False)
class _Row:
    """A request and its progress."""

    arrival: int
    request: GenerationRequest
    reply: asyncio.Future[Completion]
    num_tokens: int
    prompt: int
    """Equal for equal prompts."""
    start: float = 0.0
    """The engine's decode steps at the row's begin."""
    end: float = math.inf
    segments: list[VersionSegment] = field(default_factory=list)

    def __lt__(self, other: _Row) -> bool:
        return (self.end, self.arrival) < (other.end, other.arrival)


class SimulatedEngine:
    """Answers after the time that a real engine would need. One instance serves one event loop."""

    def __init__(
        self,
        *,
        speed: SimulatedSpeed | None = None,
        trouble: SimulatedTrouble | None = None,
        seed: int = 0,
        version: int = 0,
        say: Callable[[GenerationRequest], str] | None = None,
    ) -> None:
        """Draw the engine's failures from `seed`. `say` returns the text of a reply (default: empty)."""
        self._speed = speed or SimulatedSpeed()
        self._trouble = trouble or SimulatedTrouble()
        self._random = random.Random(seed)
        self._say = say or (lambda request: "")
        is_slow = self._random.random() < self._trouble.straggler_frac
        self._slowness = self._trouble.straggler_factor if is_slow else 1.0
        self._version = version
        self._rows: list[_Row] = []
        """A heap by the step at which they end."""
        self._waiting: deque[_Row] = deque()
        self._prompts: Counter[int] = Counter()
        self._cache_tokens = 0
        self._num_arrived = 0
        self._steps = 0.0
        """Decode steps done, with the fraction of the running step."""
        self._held_s = 0.0
        """Remaining delay of the decoding."""
        self._counted_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._fate: asyncio.TimerHandle | None = None
        self._idle: asyncio.Event = asyncio.Event()
        self._idle.set()
        self._update_lock = asyncio.Lock()
        self._admits = True
        self._is_dead = self._is_silent = self._is_closed = False
        self._speaks = asyncio.Event()
        self._speaks.set()
        self.num_sampled_tokens = 0
        """Tokens of all finished replies."""

    @property
    def version(self) -> int:
        """Version of the weights served."""
        return self._version

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one reply. See `Engine.generate`."""
        self._require_alive()
        loop = asyncio.get_running_loop()
        self._num_arrived += 1
        # The request's seed says how many tokens the reply has. It is spread over 64 bits by
        # the finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
        mixed = (request.seed + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        uniform = ((mixed ^ (mixed >> 31)) + 0.5) / 2**64
        deviation = _NORMAL.inv_cdf(min(max(uniform, 1e-12), 1 - 1e-12))
        length = self._speed.median_reply_tokens * math.exp(self._speed.reply_sigma * deviation)
        row = _Row(
            arrival=self._num_arrived,
            request=request,
            reply=loop.create_future(),
            num_tokens=max(1, min(request.max_tokens, round(length))),
            prompt=hash(request.prompt_ids.tobytes()),
        )
        self._waiting.append(row)
        self._move()
        try:
            return await row.reply
        except asyncio.CancelledError:
            if row in self._waiting:
                self._waiting.remove(row)
            elif row in self._rows:
                self._count()
                self._rows.remove(row)
                heapq.heapify(self._rows)
                self._release(row)
                self._move()
            raise

    async def score(self, prompt_ids: IntArray, reply_ids: IntArray, temperature: float) -> ReplyScore:
        """Return the log-probability of each reply token, after a prefill. See `Engine.score`."""
        self._require_alive()
        num_tokens = len(prompt_ids) + len(reply_ids)
        await asyncio.sleep(self._slowness * num_tokens / self._speed.prefill_tokens_per_s)
        await self._require_voice()
        logprobs = np.full(len(reply_ids), _LOGPROB_NATS, np.float32)
        return ReplyScore(logprobs=logprobs, policy_version=self._version)

    async def update(self, update: WeightUpdate) -> WeightReceipt:
        """Serve new weights. See `Engine.update`. Updates are applied one at a time."""
        self._require_alive()
        async with self._update_lock:
            self._admits = False
            try:
                await self._require_voice()
                if update.mode is UpdateMode.DRAIN:
                    await self._idle.wait()
                    await self._require_voice()
                else:
                    # The rows stay, but make no progress.
                    self._count()
                    self._held_s += self._slowness * self._speed.update_s
                    self._set_timer()
                await asyncio.sleep(self._slowness * self._speed.update_s)
                await self._require_voice()
                self._version = update.version
                self._count()
                if update.mode is UpdateMode.RESTART:
                    self._restart_rows()
                for row in self._rows:
                    # The remaining tokens are of the new version.
                    start = min(int(self._steps - row.start), row.num_tokens - 1)
                    if row.segments[-1].start == start:
                        row.segments.pop()
                    row.segments.append(VersionSegment(start=start, version=self._version))
            finally:
                self._admits = True
                self._move()
        return WeightReceipt(version=update.version, digest=update.digest)

    async def close(self) -> None:
        """Stop decoding; waiting requests get an EngineError, and later ones too."""
        self._is_closed = True
        if self._fate is not None:
            self._fate.cancel()
        self._fail_all(closed())

    def _step_s(self) -> float:
        return self._slowness * (self._speed.step_base_s + self._speed.step_row_s * len(self._rows))

    def _count(self) -> None:
        """Count the decode steps since the last call."""
        now = asyncio.get_running_loop().time()
        passed_s = now - self._counted_at
        self._counted_at = now
        held_s = min(self._held_s, passed_s)
        self._held_s -= held_s
        if self._rows:
            self._steps += (passed_s - held_s) / self._step_s()

    def _move(self) -> None:
        """Finish rows that have ended, begin waiting rows that fit, and set the timer for the next end."""
        if self._is_dead:
            return
        self._count()
        while self._rows and self._rows[0].end <= self._steps + _TOLERANCE_TOKENS:
            self._finish(heapq.heappop(self._rows))
        while self._waiting and self._admits:
            row = self._waiting[0]
            num_tokens = len(row.request.prompt_ids) + row.num_tokens
            is_full = self._cache_tokens + num_tokens > self._speed.max_cache_tokens
            if len(self._rows) >= self._speed.max_num_seqs or (is_full and self._rows):
                break
            self._begin(self._waiting.popleft(), num_tokens)
        if self._rows:
            self._idle.clear()
        else:
            self._idle.set()
        self._set_timer()

    def _begin(self, row: _Row, num_tokens: int) -> None:
        if not self._prompts[row.prompt]:
            prefill_s = len(row.request.prompt_ids) / self._speed.prefill_tokens_per_s
            self._held_s += self._slowness * prefill_s
        self._prompts[row.prompt] += 1
        self._cache_tokens += num_tokens
        row.start, row.end = self._steps, self._steps + row.num_tokens
        row.segments = [VersionSegment(start=0, version=self._version)]
        heapq.heappush(self._rows, row)
        # Draw the time of death once, when the engine has work.
        if self._fate is None and math.isfinite(self._trouble.mean_life_s):
            life_s = self._random.expovariate(1 / self._trouble.mean_life_s)
            self._fate = asyncio.get_running_loop().call_later(life_s, self._die)

    def _release(self, row: _Row) -> None:
        self._cache_tokens -= len(row.request.prompt_ids) + row.num_tokens
        self._prompts[row.prompt] -= 1
        if not self._prompts[row.prompt]:
            del self._prompts[row.prompt]

    def _finish(self, row: _Row) -> None:
        self._release(row)
        self.num_sampled_tokens += row.num_tokens
        if row.reply.done():
            return
        request = row.request
        is_cut = row.num_tokens == request.max_tokens or not request.stop_token_ids
        token_ids = np.full(row.num_tokens, _TOKEN_ID, np.int32)
        if not is_cut:
            token_ids[-1] = min(request.stop_token_ids)
        row.reply.set_result(
            Completion(
                token_ids=token_ids,
                logprobs=np.full(row.num_tokens, _LOGPROB_NATS, np.float32),
                text=self._say(request),
                finish_reason=FinishReason.LENGTH if is_cut else FinishReason.EOS,
                policy_version=row.segments[0].version,
                segments=tuple(row.segments) if len(row.segments) > 1 else (),
            )
        )

    def _restart_rows(self) -> None:
        for row in self._rows:
            row.start, row.end = self._steps, self._steps + row.num_tokens
            row.segments = [VersionSegment(start=0, version=self._version)]
        heapq.heapify(self._rows)

    def _set_timer(self) -> None:
        """Set the timer for the end of the next reply; an earlier timer stays, since `_move` checks again."""
        if not self._rows:
            return
        remaining = max(0.0, self._rows[0].end - self._steps)
        at = self._counted_at + self._held_s + remaining * self._step_s()
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(at, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._move()

    def _die(self) -> None:
        self._is_dead = True
        self._is_silent = self._random.random() < self._trouble.silent_frac
        if self._is_silent:
            self._speaks.clear()
        else:
            self._fail_all(_died())
        if math.isfinite(self._trouble.repair_s):
            asyncio.get_running_loop().call_later(self._trouble.repair_s, self._come_back)

    def _come_back(self) -> None:
        self._fail_all(_died())
        self._is_dead = self._is_silent = False
        self._speaks.set()
        self._fate = None

    def _fail_all(self, error: EngineError) -> None:
        rows = [*self._rows, *self._waiting]
        self._rows, self._prompts, self._cache_tokens = [], Counter(), 0
        self._waiting.clear()
        self._held_s = 0.0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for row in rows:
            if not row.reply.done():
                row.reply.set_exception(error)
        self._idle.set()

    async def _require_voice(self) -> None:
        """Hold requests while the engine is silent, then refuse them."""
        was_silent = self._is_silent
        await self._speaks.wait()
        if was_silent:
            raise _died()
        self._require_alive()

    def _require_alive(self) -> None:
        if self._is_closed:
            raise closed()
        if self._is_dead and not self._is_silent:
            raise _died()


def _died() -> EngineLost:
    return EngineLost(
        "a simulated engine has died",
        allowed="requests to engines that live",
        next_step="let a router send it to another engine",
    )
