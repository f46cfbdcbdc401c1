"""The parts of a plan as data, and the values that take effect in a run, with their origins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from strop.algorithm import Aggregation, build_algorithm
from strop.algorithm.corrections import CORRECTIONS, Correction
from strop.hardware import Machine
from strop.hardware.accelerators import Accelerator
from strop.plan.estimate import TimeEstimate
from strop.plan.known import KnownModel
from strop.plan.roles import Part, RoleMemory, count_rows
from strop.plan.rollouts import Assumption, Judging
from strop.plan.speeds import Speeds
from strop.policy.footprint import DEFAULT_MICRO_BATCH_POSITIONS
from strop.policy.objective import lr_at
from strop.spec import ResolvedSpec
from strop.spec.base import DEFAULT
from strop.spec.train import TrainSpec
from strop.tasks import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """The price and the time limit of a job."""

    num_gpus: int
    """Paid GPUs of all nodes together."""
    usd_per_gpu_hour: float | None
    """None: unknown."""
    time_limit_s: float | None
    """None: no limit."""

    @property
    def usd_per_hour(self) -> float | None:
        """Price of the whole job; None: unknown."""
        return None if self.usd_per_gpu_hour is None else self.num_gpus * self.usd_per_gpu_hour


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The hardware of a job on a site."""

    site: str
    machine: Machine
    """One node."""
    accelerator: Accelerator | None
    """Of each learner rank and engine replica; None: the devices of `machine`."""
    unknown: str
    """Why memory and time are unknown, and `accelerator` is only a name; '' if they are known."""
    free_disk_bytes: int | None
    """On the disk of the run's directory; None: unknown."""
    is_here: bool
    """Whether it is this machine, so that its measured speeds apply."""
    rate: Rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """The price of a run on a site. None: unknown."""

    num_gpus: int
    usd_per_gpu_hour: float
    step_usd: float | None
    run_usd: float | None
    """All steps and evaluations, without start, loading and checkpoints."""
    limit_usd: float | None
    """Upper bound by the job's time limit."""


def price_run(rate: Rate, time: TimeEstimate | None) -> Price | None:
    """Return the price of a run; None without a known price per GPU."""
    per_hour = rate.usd_per_hour
    if rate.usd_per_gpu_hour is None or per_hour is None or not rate.num_gpus:
        return None

    def of(seconds: float | None) -> float | None:
        return None if seconds is None else per_hour * seconds / 3600.0

    return Price(
        num_gpus=rate.num_gpus,
        usd_per_gpu_hour=rate.usd_per_gpu_hour,
        step_usd=of(time.step_s if time else None),
        run_usd=of(time.total_s if time else None),
        limit_usd=of(rate.time_limit_s),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedValue:
    """A value that takes effect, and its origin."""

    name: str
    value: Any
    origin: str
    """'default', 'run.toml:7', 'override', or in words how it was derived."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPrompt:
    """The first training prompt, exactly as the model reads it."""

    text: str
    num_tokens: int
    prompt_format: str
    stops: tuple[str, ...]
    """Terminators and stop strings."""
    example_id: str
    num_measured: int
    tokens_mean: float
    tokens_max: int
    """Mean and longest of the measured training prompts."""
    counts: str = ""
    """How many rows reading the task's data left out, for people."""
    num_too_long: int | None
    """Measured prompts after which a full reply does not fit; None if the model is unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The amounts of training, evaluation and checkpoints."""

    steps: int
    steps_per_batch: int
    """Optimizer steps per batch."""
    prompts_per_step: int
    rollouts_per_step: int
    num_train_examples: int | None
    num_epochs: float | None
    """Passes over the training examples. None: their number is unknown, or the run has no rollouts."""
    given_kind: str
    """Kind of offline data: 'demonstrations' or 'pairs'; '' without any."""
    given_per_step: int
    """Demonstrations or pairs in a step."""
    given: str | None
    """How many there are, and how many rows were dropped. None: unknown, or no offline data."""
    num_given_epochs: float | None
    """Passes over them."""
    num_evals: int
    num_eval_examples: int | None
    num_checkpoints: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The needed and the available memory or disk space."""

    parts: tuple[Part, ...]
    needed_bytes: float
    available_bytes: int | None
    """None: unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The plan of a run. `unknown` gives the reason for each None."""

    name: str
    task: str
    model_uri: str
    model_path: str | None
    """Its local folder."""
    model_source: str | None
    """The origin of its sizes, for people."""
    num_params: int | None
    prompt: PlannedPrompt | None
    limits: tuple[PlannedValue, ...]
    schedule: Schedule
    algorithm: tuple[PlannedValue, ...]
    optimizer: tuple[PlannedValue, ...]
    memory: Room | None
    """Memory of the machine, if its roles share it; host memory if they have accelerators."""
    roles: tuple[RoleMemory, ...]
    """Peak memory of one process of each role; () if the model is unknown."""
    hardware: str
    """Name of the device that the plan is for."""
    disk: Room | None
    time: TimeEstimate | None
    """None if the model or the hardware is unknown."""
    judging: Judging | None
    """Cost of judging beside its time; None if only rules judge, or time is None."""
    price: Price | None
    """None without a site, or if the site's profile has no price."""
    assumptions: tuple[Assumption, ...]
    warnings: tuple[str, ...]
    """Reasons for which the gate would refuse the run, and exceeded memory or disk."""
    unknown: tuple[str, ...]
    notices: tuple[str, ...]


# The values of a run that take effect, with their origins: limits, the loss, the optimizer.
_OF_CORRECTION = ("correction", "correction_cap", "max_sequence_tokens")
_NORMALIZERS = {
    Aggregation.TOKEN_MEAN: "1 / scored tokens of the {part}",
    Aggregation.SEQ_MEAN: "1 / ({rollouts} rollouts x scored tokens of the rollout)",
    Aggregation.CONST: "1 / ({rollouts} rollouts x {limit} tokens of reply limit)",
}


def list_limits(
    resolved: ResolvedSpec,
    task: Task,
    model: KnownModel | None,
    machine: Machine,
    speeds: Speeds,
    *,
    num_positions: int | None,
    place: str,
) -> tuple[PlannedValue, ...]:
    """Return the effective limits where several settings apply (SMP-2), and derived values.

    `num_positions`: of a micro-batch; None: unknown. `place`: words for the machine with the cores.
    """
    spec = resolved.spec
    values = [
        _effective(
            resolved, "task.max_reply_tokens", task.limits.max_reply_tokens, f"the limit of task {task.name}"
        ),
        _effective(
            resolved,
            "train.micro_batch_tokens",
            num_positions or spec.train.micro_batch_tokens or DEFAULT_MICRO_BATCH_POSITIONS,
            "strop's own" if speeds.is_processor else f"memory of one {speeds.device}",
        ),
        _effective(
            resolved,
            "engine.max_num_seqs",
            spec.engine.max_num_seqs or count_rows(spec, is_gpu=not speeds.is_processor),
            "rollouts of a step",
        ),
        PlannedValue(
            name="placement.kind",
            value=resolved.spec.layout.describe(),
            origin=resolved.origins.get(
                "placement.kind", "nodes and GPUs of the job, engine.kind, staleness"
            ),
        ),
        _effective(
            resolved,
            "placement.threads",
            spec.placement.threads or machine.num_physical_cores,
            f"cores of {place}",
        ),
    ]
    if model is not None:
        size, source = model.size, "config.json"
        because = size.alone_because
        layout = "packed, prompts shared" if because is None else f"each by itself: {because}"
        values += [
            PlannedValue(name="positions of the model", value=size.max_positions, origin=source),
            PlannedValue(name="sequences", value=layout, origin=f"{source}; proven when it is loaded"),
        ]
    return tuple(values)


def _effective(resolved: ResolvedSpec, key: str, value: Any, derived_from: str) -> PlannedValue:
    """Return the effective value of a setting that may be none, with its origin."""
    section, name = key.split(".")
    is_set = getattr(getattr(resolved.spec, section), name) is not None
    origin = resolved.origins.get(key, DEFAULT) if is_set else derived_from
    return PlannedValue(name=key, value=value, origin=origin)


def list_terms(resolved: ResolvedSpec, limit: int) -> tuple[PlannedValue, ...]:
    """Return the settings of the loss that take effect."""
    train = resolved.spec.train
    terms = with_origins(resolved, "train", {"terms": train.terms})
    if train.terms == "distill":
        return (*terms, *_plan_distillation(resolved))
    rl = _plan_algorithm(resolved, limit) if train.has_rl else ()
    if train.terms == "dpo":
        return (*terms, *with_origins(resolved, "dpo", resolved.spec.dpo.model_dump()))
    if not train.has_sft:
        return (*terms, *rl)
    weight = PlannedValue(
        name="weight of a demonstrated token",
        value="weight of its row / sum of weight x trained tokens over the step's rows",
        origin="strop's own",
    )
    return (*terms, *rl, *with_origins(resolved, "sft", resolved.spec.sft.model_dump()), weight)


def _plan_distillation(resolved: ResolvedSpec) -> tuple[PlannedValue, ...]:
    """Return the settings of a teacher's loss, which uses no rewards."""
    spec = resolved.spec
    is_sampled = spec.teacher.form == "sampled"
    unread = {"divergence"} if is_sampled else set()
    teacher = with_origins(resolved, "teacher", spec.teacher.model_dump(exclude=unread))
    cap = spec.algorithm.correction_cap or CORRECTIONS[spec.algorithm.correction].cap
    return (
        PlannedValue(
            name="weight of a token",
            value=_NORMALIZERS[Aggregation.TOKEN_MEAN].format(part=_part_of_step(spec.train)),
            origin="strop's own",
        ),
        *teacher,
        *(_plan_correction(resolved, CORRECTIONS[spec.algorithm.correction], cap) if is_sampled else ()),
        *with_origins(resolved, "sampling", spec.sampling.model_dump()),
    )


def _plan_correction(resolved: ResolvedSpec, correction: Correction, cap: float) -> tuple[PlannedValue, ...]:
    """Return the correction that is applied, and the settings that it reads."""
    spec, name = resolved.spec.algorithm, "algorithm.correction"
    if correction.name != spec.correction:
        origin = "ratios start at the engine's own value (algorithm.mode = 'bypass')"
        return (PlannedValue(name=name, value=correction.name, origin=origin),)
    applied = with_origins(resolved, "algorithm", {"correction": correction.name})
    if correction.name == "none":
        return applied
    if correction.level == "sum":
        limit = {"max_sequence_tokens": spec.max_sequence_tokens}
        applied = (*applied, *with_origins(resolved, "algorithm", limit))
    return (*applied, _effective(resolved, f"{name}_cap", cap, f"{correction.name}'s own"))


def list_optimizer(resolved: ResolvedSpec) -> tuple[PlannedValue, ...]:
    """Return the settings of the optimizer that take effect."""
    optimizer, train = resolved.spec.optimizer, resolved.spec.train
    values = with_origins(resolved, "optimizer", optimizer.model_dump())
    if optimizer.schedule == "constant":
        return values
    num = train.num_optimizer_steps
    last = PlannedValue(
        name="lr of the last optimizer step",
        value=f"{lr_at(optimizer, num - 1, num):.3g}",
        origin=f"number {num} of the run",
    )
    return (*values, last)


def _part_of_step(train: TrainSpec) -> str:
    return "step" if train.mini_batches == 1 else "mini-batch"


def _plan_algorithm(resolved: ResolvedSpec, limit: int) -> tuple[PlannedValue, ...]:
    spec = resolved.spec
    algorithm = build_algorithm(spec.algorithm, spec.reference, spec.train)
    own = f"{algorithm.name}'s own"
    prompts = spec.train.prompts_per_step // spec.train.mini_batches
    normalizer = _NORMALIZERS[algorithm.aggregation].format(
        part=_part_of_step(spec.train),
        rollouts=prompts * spec.train.group_size,
        limit=limit,
    )
    over_batch = {
        "none": "",
        "spread": ", then over the spread of the batch",
        "whiten": ", then whitened over all tokens of the batch",
    }
    formula = f"{algorithm.advantage.__name__}{over_batch[algorithm.over_batch]}"
    advantage = PlannedValue(name="algorithm.advantage", value=formula, origin=own)
    if spec.algorithm.advantage is not None:
        advantage = replace(advantage, origin=resolved.origins.get(advantage.name, DEFAULT))
    # Settings without effect are left out.
    unused = set() if algorithm.loss.has_range else {"clip_low", "clip_high"}
    derived = [
        PlannedValue(name="weight of a token", value=normalizer, origin=own),
        advantage,
        *(
            _effective(resolved, f"algorithm.{name}", getattr(algorithm, name), own)
            for name in ("mode", "clip_low", "clip_high", "zero_variance", "overlong")
            if name not in unused
        ),
        *_plan_correction(resolved, algorithm.correction, algorithm.correction_cap),
    ]
    if algorithm.reward_kl_beta:
        beta = resolved.origins.get("reference.kl_beta", DEFAULT)
        penalty = f"{algorithm.reward_kl_beta:g} x log-ratio (k1), in the reward"
        derived.append(PlannedValue(name="KL to the reference", value=penalty, origin=beta))
    shown = {value.name for value in derived} | {f"algorithm.{name}" for name in (*unused, *_OF_CORRECTION)}
    plain = with_origins(resolved, "algorithm", spec.algorithm.model_dump())
    sampling = with_origins(resolved, "sampling", spec.sampling.model_dump())
    return (*(value for value in plain if value.name not in shown), *derived, *sampling)


def with_origins(resolved: ResolvedSpec, section: str, values: dict[str, Any]) -> tuple[PlannedValue, ...]:
    """Return the values of a section with their origins."""
    keys = {f"{section}.{name}": value for name, value in values.items()}
    return tuple(
        PlannedValue(name=key, value=value, origin=resolved.origins.get(key, DEFAULT))
        for key, value in keys.items()
    )
