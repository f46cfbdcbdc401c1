"""A run's work, and how long an engine takes to generate replies. No torch.

A decode step computes one token of every row, and reads weights and cache once: the longer of the two sets
its time, and every layer adds an overhead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from strop.plan.roles import RoleCounts, count_rows
from strop.plan.speeds import Speeds
from strop.policy.footprint import COPY_BYTES, ModelSize, cache_bytes, decode_flop, prefill_flop
from strop.spec import RunSpec

REPLY_LIMIT_FRAC = 0.75
SIGNAL_FRAC = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What the time of a run depends on."""

    spec: RunSpec
    size: ModelSize
    prompt_tokens_mean: float
    max_reply_tokens: int
    num_eval_examples: int
    num_evals: int
    given_tokens: float = 0.0
    """Tokens of the demonstrations or pairs of one step, prompts included."""
    given_scored: float = 0.0
    """Those of them that the loss counts."""
    reply_tokens_mean: float | None = None
    """None: assumed from the limit."""
    sampling_frac: float = 1.0
    """Share of the steps that sample; distillation shows demonstrations in the others."""
    signal_frac: float = SIGNAL_FRAC
    shared_frac: float = 0.0
    """Share of an attempt's tokens that `train.branches` rollouts have in common."""
    layout: RoleCounts | None = None
    """None: as the run file says."""
    num_cores: int = 2
    """Of the machine on which programs are judged."""
    frozen: Mapping[str, ModelSize] = field(default_factory=dict)
    """Sizes of the reference and the teacher by role; one that is not given counts like the policy."""

    @property
    def reply_tokens(self) -> float:
        """Mean tokens of a reply."""
        assumed = REPLY_LIMIT_FRAC * self.max_reply_tokens
        return assumed if self.reply_tokens_mean is None else self.reply_tokens_mean

    @property
    def new_frac(self) -> float:
        """Tokens that are sampled per token of the rollouts: what several share is sampled once."""
        return 1.0 - self.shared_frac * (1.0 - 1.0 / self.spec.train.branches)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeSpeed:
    """How long one engine takes for what."""

    prefill_token_s: float
    token_s: float
    """Of arithmetic for one token of one reply."""
    read_s: float
    """Of reading the weights and the cache of all rows, in every decode step."""
    overhead_s: float
    """Of every decode step beside that."""
    rows: int
    """Replies decoded at once."""


def decode_speed(work: Work, speeds: Speeds, layout: RoleCounts) -> DecodeSpeed:
    """Return the speed of one engine among those of the layout. Those on one processor share it."""
    size, dtype, known = work.size, work.spec.model.dtype, speeds.efficiency
    num_sharing = layout.num_engines if speeds.is_processor else 1
    rows = count_rows(work.spec, layout.num_engines, is_gpu=not speeds.is_processor)
    rate = speeds.gflops * 1e9 * known.decode_frac / num_sharing
    context = work.prompt_tokens_mean + work.reply_tokens / 2
    read = size.num_params * COPY_BYTES[dtype] + cache_bytes(size, dtype, rows, int(context))
    return DecodeSpeed(
        prefill_token_s=prefill_flop(size, 1.0) / rate,
        token_s=(decode_flop(size, 1.0) + attention_flop(size, context)) / rate,
        read_s=num_sharing * read / (speeds.copy_gb_per_s * 1e9),
        overhead_s=size.num_layers * known.decode_layer_s,
        rows=rows,
    )


def generate_s(
    work: Work, speeds: Speeds, layout: RoleCounts, num_rollouts: float, prompt_tokens: float
) -> tuple[float, str]:
    """Return seconds to generate replies, and whether arithmetic or memory sets them."""
    if not num_rollouts:
        return 0.0, "arithmetic"
    speed = decode_speed(work, speeds, layout)
    reply_tokens = num_rollouts * work.reply_tokens / layout.num_engines
    rows = min(-(-num_rollouts // layout.num_engines), speed.rows)
    # Some reply is as long as its limit, and all rows wait for it.
    num_steps = max(reply_tokens / rows, work.max_reply_tokens)
    compute_s, read_s = reply_tokens * speed.token_s, num_steps * speed.read_s
    limit = "arithmetic" if compute_s >= read_s else "memory bandwidth"
    prefill_s = prompt_tokens / layout.num_engines * speed.prefill_token_s
    return prefill_s + max(compute_s, read_s) + num_steps * speed.overhead_s, limit


def attention_flop(size: ModelSize, num_pairs: float) -> float:
    """FLOP of scores and weighted sums: 4 per layer, head value and (query, key) pair."""
    return 4.0 * size.num_layers * size.num_heads * size.head_width * num_pairs
