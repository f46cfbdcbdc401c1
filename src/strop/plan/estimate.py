"""Estimate how long a run takes, from sizes and speeds; and the disk space of its checkpoints. No torch.

An estimate combines known amounts (FLOP, bytes), measured speeds (`strop doctor`, `strop plan --measure`) and
a few shares that are unknown before the run. These are assumptions; each is listed with its value.

The period of a step follows from its stages: they run one after the other if every step waits for the newest
weights or the roles share a device; else the longer of generation and learning hides the shorter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from strop.plan.roles import (
    ENGINE,
    LEARNER,
    WORKER,
    Part,
    RoleCounts,
    count_roles,
    frozen_sizes,
    position_budget,
    recomputes,
)
from strop.plan.rollouts import (
    REPLY_LIMIT_FRAC,
    SIGNAL_FRAC,
    Assumption,
    Work,
    attention_flop,
    generate_s,
    judge_s,
    list_judge_assumptions,
)
from strop.plan.speeds import Speeds
from strop.policy.footprint import (
    COPY_BYTES,
    ModelSize,
    checkpoint_bytes,
    count_trained,
    learn_flop,
    prefill_flop,
    state_bytes,
)
from strop.spec import RunSpec

IMBALANCE = 1.05
"""Work of the busiest rank over the mean, after balancing."""
HASHED_BYTES_PER_S = 0.75e9
"""SHA-256 with the processor's SHA instructions, on both sides: half of 1.5 GB/s."""
DIGEST_PASSES = 10
"""Passes of a digest on the device through memory, for each byte: words, places, factors, products."""
_MIN_GAIN_FRAC = 0.05
"""Smallest share of a step that a relief must save."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Relief:
    """The change of the run file that shortens a step most."""

    setting: str
    """Words of the command line, `key=value`."""
    step_s: float
    """Seconds of a step with this setting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeEstimate:
    """The time of a run, and its bottleneck."""

    step_parts: tuple[Part, ...]
    """Seconds of each stage of one step, also of stages that others hide."""
    step_s: float
    """Seconds from one step to the next."""
    eval_s: float
    """Seconds of one evaluation."""
    total_s: float
    scored_tokens_per_s: float
    num_reply_tokens: float
    """Sampled in one step."""
    num_positions: float
    """Forwarded in one step, by all ranks."""
    bottleneck: str
    bottleneck_role: str
    relief: Relief | None
    """None: no tried setting helps enough."""
    speeds: Speeds


def list_disk_parts(spec: RunSpec, size: ModelSize, *, is_mirrored: bool) -> tuple[Part, ...]:
    """Return the disk space of checkpoints: those that are kept, one being written, one being mirrored.

    The mirror keeps a checkpoint from being pruned while it is sent.
    """
    each = float(checkpoint_bytes(size, spec.model.dtype, count_trained(size, spec.lora)))
    num_kept = spec.train.keep_checkpoints
    kept = Part(name=f"{num_kept} checkpoints and one being written", amount=(num_kept + 1) * each)
    return (kept, Part(name="one held while it is mirrored", amount=each)) if is_mirrored else (kept,)


def signal_frac(spec: RunSpec) -> float:
    """Return the share of sampled groups that is trained on; with a teacher all groups are."""
    return 1.0 if spec.has_teacher else SIGNAL_FRAC


def list_assumptions(spec: RunSpec, max_reply_tokens: int, speeds: Speeds) -> tuple[Assumption, ...]:
    """Return the assumptions of the time estimate, about the run and the hardware."""
    efficiency = speeds.efficiency
    shares = [
        Assumption(name=name, value=getattr(efficiency, name), why=why)
        for name, why in (
            ("learn_frac", f"share of the speed that learning reaches; {efficiency.source}"),
            ("decode_frac", "the same of prefill and decoding"),
            ("decode_layer_s", "seconds that a layer adds to every decode step"),
            ("update_frac", "share of the copy speed that the optimizer reaches"),
        )
    ]
    return (
        Assumption(
            name="reply_tokens_mean",
            value=REPLY_LIMIT_FRAC * max_reply_tokens,
            why=f"three quarters of the limit of {max_reply_tokens}; replies change while a model learns",
        ),
        Assumption(
            name="signal_frac",
            value=signal_frac(spec),
            why="share of groups whose rewards differ; the others are not forwarded",
        ),
        *list_judge_assumptions(spec.task),
        *shares,
    )


def estimate_time(work: Work, speeds: Speeds) -> TimeEstimate:
    """Estimate one step and the whole run, without loading and checkpoints."""
    estimate = _estimate_once(work, speeds)
    layout = work.layout or count_roles(work.spec, is_processor=speeds.is_processor)
    # Try settings that move work to more devices or let stages overlap.
    tried: dict[str, Work] = {}
    if not layout.is_shared:
        gpus = work.spec.job.gpu_roles
        names = {
            "num_engines": f"job.infer_gpus={2 * gpus['infer']}" if "infer" in gpus else "placement.engines",
            "num_learners": f"job.train_gpus={2 * gpus['train']}"
            if "infer" in gpus
            else "placement.learners",
        }
        for field_name, setting in names.items():
            number = 2 * getattr(layout, field_name)
            # Several processes of a role need Ray.
            needed = "" if work.spec.layout.kind == "ray" else "placement.kind=ray "
            word = setting if "=" in setting else f"{needed}{setting}={number}"
            tried[word] = replace(work, layout=replace(layout, **{field_name: number}))
        if work.spec.train.has_rl and work.spec.train.max_staleness == 0:
            train = work.spec.train.model_copy(update={"max_staleness": 1})
            stale = work.spec.model_copy(update={"train": train})
            tried["train.max_staleness=1"] = replace(work, spec=stale)
    step_s = {setting: _estimate_once(other, speeds).step_s for setting, other in tried.items()}
    best = min(step_s, key=lambda setting: step_s[setting], default=None)
    if best is None or step_s[best] > (1.0 - _MIN_GAIN_FRAC) * estimate.step_s:
        return estimate
    return replace(estimate, relief=Relief(setting=best, step_s=step_s[best]))


def step_period_s(seconds: Mapping[str, float], layout: RoleCounts, *, max_staleness: int) -> float:
    """Return seconds from one step to the next: at staleness 0 the stages run one after the other."""
    generate_s = seconds.get("generate", 0.0) + seconds.get("verify", 0.0)
    learn_s = seconds.get("learn", 0.0)
    sync_s = seconds.get("sync", 0.0)
    longer, shorter = max(generate_s, learn_s), min(generate_s, learn_s)
    if layout.is_shared or max_staleness == 0:
        return longer + shorter + sync_s
    return longer + sync_s


def _estimate_once(work: Work, speeds: Speeds) -> TimeEstimate:
    spec, train = work.spec, work.spec.train
    layout = work.layout or count_roles(spec, is_processor=speeds.is_processor)
    num_prompts = train.prompts_per_step if train.has_rl else 0
    num_rollouts: float = num_prompts * train.group_size
    prompt_tokens = num_prompts * work.prompt_tokens_mean
    generating_s, limit = generate_s(work, speeds, layout, num_rollouts, prompt_tokens)
    # From here on for the mean step: some steps have no rollouts.
    num_rollouts, prompt_tokens = num_rollouts * work.sampling_frac, prompt_tokens * work.sampling_frac
    reply_tokens = num_rollouts * work.reply_tokens
    # A model family that cannot share prompts reads a prompt once for each reply.
    reads = 1 if work.size.alone_because is None else train.group_size
    positions = work.signal_frac * (reads * prompt_tokens + reply_tokens) + work.offline_tokens
    scored = work.signal_frac * reply_tokens + work.offline_scored
    seconds = {
        "generate": work.sampling_frac * generating_s,
        "verify": judge_s(work, speeds, layout, num_rollouts),
        "learn": learn_s(work, speeds, layout, positions, scored),
        "sync": sync_s(work, speeds, layout),
    }
    num_eval_replies = work.num_eval_examples * (1 + (spec.eval.num_samples or 0))
    eval_s, _ = generate_s(
        work, speeds, layout, num_eval_replies, work.num_eval_examples * work.prompt_tokens_mean
    )
    eval_s += judge_s(work, speeds, layout, num_eval_replies)
    step_s = step_period_s(seconds, layout, max_staleness=train.max_staleness)
    bottleneck, role = _name_bottleneck(seconds, eval_s * work.num_evals / train.steps, limit)
    return TimeEstimate(
        step_parts=tuple(Part(name=name, amount=amount) for name, amount in seconds.items()),
        step_s=step_s,
        eval_s=eval_s,
        total_s=step_s * train.steps + eval_s * work.num_evals,
        scored_tokens_per_s=(reply_tokens + work.offline_scored) / step_s,
        num_reply_tokens=reply_tokens,
        num_positions=positions * train.epochs,
        bottleneck=bottleneck,
        bottleneck_role=role,
        relief=None,
        speeds=speeds,
    )


def _name_bottleneck(seconds: Mapping[str, float], eval_step_s: float, limit: str) -> tuple[str, str]:
    """Return the slowest stage with its bound, and its role."""
    shares = {f"{name} (every step)": amount for name, amount in seconds.items()}
    shares["evaluate"] = eval_step_s
    slowest = max(shares, key=lambda name: shares[name])
    causes = {
        "generate (every step)": (limit, ENGINE),
        "evaluate": (limit, ENGINE),
        "learn (every step)": ("arithmetic", LEARNER),
        "sync (every step)": ("the way of the weights", LEARNER),
        "verify (every step)": ("the judge", WORKER),
    }
    cause, role = causes[slowest]
    return f"{slowest}, bound by {cause}", role


def learn_s(work: Work, speeds: Speeds, layout: RoleCounts, positions: float, scored: float) -> float:
    """Return seconds of forward, backward, gathering shards, and the optimizer.

    `positions` and `scored` are those of one pass through the batch.
    """
    size, spec, efficiency = work.size, work.spec, speeds.efficiency
    num_devices = 1 if speeds.is_processor else layout.num_learners
    context = work.prompt_tokens_mean + work.reply_tokens / 2
    adapters = count_trained(size, spec.lora)
    # Frozen weights need no gradient: two thirds of the FLOP of forward and backward remain.
    share = 1.0 if adapters is None else 2 / 3
    flop = share * learn_flop(size, positions, scored) + 3.0 * attention_flop(size, positions * context)
    if recomputes(spec, size, layout, speeds.memory_bytes, work.frozen):
        flop += prefill_flop(size, positions)
    flop = spec.train.epochs * flop + _scoring_flop(work, positions, scored)
    imbalance = IMBALANCE if layout.num_learners > 1 else 1.0
    compute_s = imbalance * flop / (speeds.gflops * 1e9 * efficiency.learn_frac * num_devices)
    state = state_bytes(size, spec.model.dtype, adapters) / num_devices
    num_updates = spec.train.steps_per_batch
    update_s = num_updates * state / (speeds.copy_gb_per_s * 1e9 * efficiency.update_frac)
    if layout.num_learners == 1:
        return compute_s + update_s
    budget = position_budget(spec, size, layout, speeds.memory_bytes)
    per_update = positions / spec.train.mini_batches
    num_micro_batches = num_updates * max(-(-per_update // (budget * layout.num_learners)), 1.0)
    # Each micro-batch gathers the copies twice and scatters fp32 gradients once; a rank sends its share.
    num_trained = size.num_params if adapters is None else adapters
    moved = 2 * COPY_BYTES[spec.model.dtype] * size.num_params + 4 * num_trained
    sent = moved * (layout.num_learners - 1) / layout.num_learners
    return compute_s + update_s + num_micro_batches * sent / (speeds.link_gb_per_s * 1e9)


def _scoring_flop(work: Work, positions: float, scored: float) -> float:
    """Return the FLOP of the forward passes that only score a batch, in every step.

    They are those of reference and teacher, and of the policy if ratios start from the weights before the
    first optimizer step on a batch. The reference of pairs scores once, before the first step.
    """
    spec, context = work.spec, work.prompt_tokens_mean + work.reply_tokens / 2
    sizes = frozen_sizes(spec, work.size, work.frozen)
    scoring = [size for role, size in sizes.items() if role == "teacher" or spec.needs_reference]
    if spec.has_teacher and spec.teacher.source == "current":
        scoring.append(work.size)
    if spec.scores_start:
        scoring.append(work.size)
    return sum(
        prefill_flop(size, positions)
        + 2.0 * size.head_params * scored
        + attention_flop(size, positions * context)
        for size in scoring
    )


def sync_s(work: Work, speeds: Speeds, layout: RoleCounts) -> float:
    """Return seconds of one publication of weights; 0 in one process.

    Between GPUs of the job each engine is sent a copy, with a digest on both sides; else the copies are
    written, hashed and read.
    """
    if work.spec.layout.kind == "inline" or not work.spec.train.has_rl:
        return 0.0
    adapters = count_trained(work.size, work.spec.lora)
    num_sent = work.size.num_params if adapters is None else adapters
    num_bytes = num_sent * COPY_BYTES[work.spec.model.dtype]
    link, engine = speeds.link_gb_per_s * 1e9, work.spec.engine
    if adapters is None and work.spec.layout.has_gpus and not speeds.is_processor:
        num_receivers = layout.num_engines * (engine.tensor_parallel or 1)
        # Each of several ranks gathers the others' shards, once for the digest and once to send.
        gathered = 2 * num_bytes * (layout.num_learners - 1) / layout.num_learners
        summed = 2 * DIGEST_PASSES * num_bytes / (speeds.copy_gb_per_s * 1e9)
        return (gathered + num_receivers * num_bytes) / link + summed
    return 3.0 * num_bytes / link + num_bytes / HASHED_BYTES_PER_S
