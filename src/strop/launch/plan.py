"""What a run would do and cost, said before anything happens.

Pure: no torch, no network, no writes. What is not on this disk is named as unknown, never fetched
and never guessed. Every value has its origin, and every number that is not measured says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from strop.algorithm import Aggregation, build_algorithm
from strop.hardware import Calibration, Machine, describe_machine, free_disk_bytes, read_calibration
from strop.launch.estimate import (
    Assumption,
    Part,
    TimeEstimate,
    Work,
    choose_speeds,
    count_rows,
    estimate_time,
    list_assumptions,
    list_disk_parts,
    split_memory,
)
from strop.launch.local_data import read_task_offline, require_trainable_here, training_examples_here
from strop.launch.locate import find_model
from strop.policy.footprint import DEFAULT_MICRO_BATCH_POSITIONS, ModelSize, read_model_size
from strop.rollout import Example, Split
from strop.spec import ResolvedSpec, RunSpec
from strop.spec.base import DEFAULT
from strop.store import follow_store
from strop.store.model_files import check_model_dir
from strop.store.policy import find_mirror_root
from strop.tasks import (
    PromptFormat,
    Task,
    describe_counts,
    limits_of,
    render_prompt,
    resolve_prompt_format,
)
from strop.tokenizer import Tokenizer
from strop.train.demonstrations import Demonstrations
from strop.train.sft_source import count_imitated_positions, read_demonstrations

NUM_MEASURED_PROMPTS = 200
"""Training prompts that are rendered for their length, from the first."""
_NORMALIZERS = {
    Aggregation.TOKEN_MEAN: "1 / scored tokens of the step",
    Aggregation.SEQ_MEAN: "1 / ({rollouts} rollouts x scored tokens of the rollout)",
    Aggregation.CONST: "1 / ({rollouts} rollouts x {limit} tokens of reply limit)",
    Aggregation.GROUP_TOKEN_MEAN: "1 / ({prompts} groups x scored tokens of the group)",
    Aggregation.SEQ_SUM: "1 / {rollouts} rollouts",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedValue:
    """A value that takes effect, and where it comes from."""

    name: str
    value: Any
    origin: str
    """'default', 'run.toml:7', 'override', or in words from what it is derived."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPrompt:
    """The first training prompt, exactly as the model will be asked."""

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
    """What reading the task's data counted, for people."""
    num_too_long: int | None
    """Measured prompts that leave no room for a reply; None where the model is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How much is trained, evaluated and kept."""

    steps: int
    prompts_per_step: int
    rollouts_per_step: int
    num_train_examples: int | None
    num_epochs: float | None
    """Passes over the training examples. None: their number is unknown, or they are not trained on."""
    rows_per_step: int
    """Demonstrations in a step; 0 where nothing is imitated."""
    demonstrations: str | None
    """How many there are, and what became of the others. None: not known or not asked for."""
    num_sft_epochs: float | None
    """Passes over the demonstrations."""
    num_evals: int
    num_eval_examples: int | None
    num_checkpoints: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What is needed of memory or disk, and what there is."""

    parts: tuple[Part, ...]
    needed_bytes: float
    available_bytes: int | None
    """None: unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A run before it runs. None stands where `unknown` says why."""

    name: str
    model_uri: str
    model_path: str | None
    num_params: int | None
    prompt: PlannedPrompt | None
    limits: tuple[PlannedValue, ...]
    schedule: Schedule
    algorithm: tuple[PlannedValue, ...]
    optimizer: tuple[PlannedValue, ...]
    memory: Room | None
    disk: Room | None
    time: TimeEstimate | None
    assumptions: tuple[Assumption, ...]
    warnings: tuple[str, ...]
    """What the gate would refuse."""
    unknown: tuple[str, ...]
    notices: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    """What this disk says about the run."""

    model_path: Path | None
    size: ModelSize | None
    train: Sequence[Example] | None
    held_out: Sequence[Example] | None
    demonstrations: Demonstrations | None
    unknown: tuple[str, ...]


def make_plan(
    resolved: ResolvedSpec, *, cache_dir: Path | None = None, machine: Machine | None = None
) -> Plan:
    """Plan a run on this machine.

    Raises: ConfigError or DataError for what is here and cannot work, as training would.
    """
    spec = resolved.spec
    with follow_store(spec.store):
        task, known = _look(spec, cache_dir)
        is_mirrored = find_mirror_root(spec.store) is not None
    machine = machine or describe_machine()
    prompt = _plan_prompt(spec, task, known)
    calibration = read_calibration(cache_dir)
    schedule = _plan_schedule(spec, known)
    limit = task.limits.max_reply_tokens
    memory = disk = time = None
    if known.size is not None:
        parts = split_memory(
            spec,
            known.size,
            limit,
            prompt.tokens_max if prompt else None,
            imitated_positions=_imitated_positions(spec, known),
        )
        memory = _room(parts, machine.memory_bytes)
        checkpoints = list_disk_parts(spec, known.size, is_mirrored=is_mirrored)
        disk = _room(checkpoints, free_disk_bytes(_output_path(spec)))
    if known.size is not None and prompt is not None and spec.train.has_sft == bool(known.demonstrations):
        time = _plan_time(spec, prompt, known, schedule, machine, calibration, limit)
    return Plan(
        name=spec.name,
        model_uri=spec.model.uri,
        model_path=str(known.model_path) if known.model_path else None,
        num_params=known.size.num_params if known.size else None,
        prompt=prompt,
        limits=_plan_limits(resolved, task, known.size, machine),
        schedule=schedule,
        algorithm=_plan_terms(resolved, limit),
        optimizer=_with_origins(resolved, "optimizer", spec.optimizer.model_dump()),
        memory=memory,
        disk=disk,
        time=time,
        assumptions=list_assumptions(limit),
        warnings=(*_warn_of_prompts(spec, prompt, known.size, limit), *_warn(memory, disk)),
        unknown=known.unknown,
        notices=resolved.notices,
    )


def _look(spec: RunSpec, cache_dir: Path | None) -> tuple[Task, _Known]:
    """Read what is on this disk of the model and the data."""
    unknown = []
    model_path = find_model(spec.model.uri, cache_dir)
    size = None
    if model_path is None:
        unknown.append(
            f"prompt, memory, disk and time: model {spec.model.uri} is not on this machine;"
            f" `strop model get {spec.model.uri}` fetches it"
        )
    else:
        check_model_dir(model_path)
        size = read_model_size(model_path)
    task, missing = read_task_offline(spec.task)
    train = held_out = None
    if missing:
        unknown.append(
            f"prompt and time: the data of task {spec.task.name} is not on this machine; training fetches"
            f" {' and '.join(missing)}, or task.source names a local copy"
        )
    else:
        require_trainable_here(task)
        train = training_examples_here(task) if spec.train.has_rl else None
        held_out = task.examples(Split.HELD_OUT)
    demonstrations = _find_demonstrations(spec, task, model_path)
    if spec.train.has_sft and demonstrations is None and model_path is not None:
        unknown.append(f"demonstrations and time: sft.source={spec.sft.source} is not on this machine")
    return task, _Known(
        model_path=model_path,
        size=size,
        train=train,
        held_out=held_out,
        demonstrations=demonstrations,
        unknown=tuple(unknown),
    )


def _find_demonstrations(spec: RunSpec, task: Task, model_path: Path | None) -> Demonstrations | None:
    """Read what the run imitates, where both it and the tokenizer are here."""
    source = spec.sft.source
    if source is None or model_path is None or not Path(source).exists():
        return None
    return read_demonstrations(spec, task, model_path)


def _imitated_positions(spec: RunSpec, known: _Known) -> int:
    """Return the positions of the largest micro-batch of demonstrations; a full one if they are unknown."""
    if spec.train.has_sft and known.demonstrations is None:
        return spec.train.micro_batch_tokens or DEFAULT_MICRO_BATCH_POSITIONS
    return count_imitated_positions(spec, known.demonstrations)


def _output_path(spec: RunSpec) -> Path:
    return Path(spec.output.dir or spec.output.root)


def _room(parts: tuple[Part, ...], available_bytes: int | None) -> Room:
    return Room(parts=parts, needed_bytes=sum(part.amount for part in parts), available_bytes=available_bytes)


def _plan_prompt(spec: RunSpec, task: Task, known: _Known) -> PlannedPrompt | None:
    """Render the first training prompt, and measure some more."""
    asked = known.train if spec.train.has_rl else known.held_out
    if known.model_path is None or asked is None:
        return None
    tokenizer = Tokenizer.load(known.model_path)
    prompt_format = resolve_prompt_format(tokenizer, spec.model.prompt_format)
    measured = asked[:NUM_MEASURED_PROMPTS]
    rendered = [render_prompt(tokenizer, task.render(example), prompt_format) for example in measured]
    lengths = [len(token_ids) for _, token_ids in rendered]
    terminators = [tokenizer.token_text(token_id) for token_id in sorted(tokenizer.stop_token_ids)]
    return PlannedPrompt(
        text=rendered[0][0],
        num_tokens=lengths[0],
        prompt_format=prompt_format.value,
        stops=(
            *terminators,
            *limits_of(task, measured[0]).stops(is_base=prompt_format is PromptFormat.BASE),
        ),
        example_id=measured[0].example_id,
        counts=describe_counts(task),
        num_measured=len(lengths),
        tokens_mean=fmean(lengths),
        tokens_max=max(lengths),
        num_too_long=None
        if known.size is None
        else sum(
            length + limits_of(task, example).max_reply_tokens > known.size.max_positions
            for example, length in zip(measured, lengths, strict=True)
        ),
    )


def _plan_schedule(spec: RunSpec, known: _Known) -> Schedule:
    train, every, found = spec.train, spec.eval.every, known.demonstrations
    num_prompts = train.prompts_per_step if train.has_rl else 0
    rows_per_step = spec.sft.rows_per_step if train.has_sft else 0
    num_train = len(known.train) if known.train is not None else None
    # Before the first step, at every multiple, and after the last; once where two coincide.
    steps = {0, train.steps} | set(range(every, train.steps, every) if every else ())
    num_eval_examples = spec.eval.num_examples
    if num_eval_examples is None and known.held_out is not None:
        num_eval_examples = len(known.held_out)
    return Schedule(
        steps=train.steps,
        prompts_per_step=num_prompts,
        rollouts_per_step=num_prompts * train.rollouts_per_prompt,
        num_train_examples=num_train,
        num_epochs=train.steps * num_prompts / num_train if num_train and num_prompts else None,
        rows_per_step=rows_per_step,
        demonstrations=found.describe() if found else None,
        num_sft_epochs=train.steps * rows_per_step / len(found.members) if found else None,
        num_evals=len(steps),
        num_eval_examples=num_eval_examples,
        num_checkpoints=-(-train.steps // train.checkpoint_every),
    )


def _plan_limits(
    resolved: ResolvedSpec, task: Task, size: ModelSize | None, machine: Machine
) -> tuple[PlannedValue, ...]:
    """Return the one limit that takes effect where several could (SMP-2), and what is derived."""
    spec = resolved.spec
    values = [
        _effective(
            resolved, "task.max_reply_tokens", task.limits.max_reply_tokens, f"the limit of task {task.name}"
        ),
        _effective(
            resolved,
            "train.micro_batch_tokens",
            spec.train.micro_batch_tokens or DEFAULT_MICRO_BATCH_POSITIONS,
            "strop's own",
        ),
        _effective(
            resolved, "engine.max_rows", spec.engine.max_rows or count_rows(spec), "rollouts of a step"
        ),
        _effective(
            resolved,
            "placement.threads",
            spec.placement.threads or machine.num_physical_cores,
            "cores of this machine",
        ),
    ]
    if size is not None:
        values.append(
            PlannedValue(name="positions of the model", value=size.max_positions, origin="config.json")
        )
    return tuple(values)


def _effective(resolved: ResolvedSpec, key: str, value: Any, derived_from: str) -> PlannedValue:
    """Return a value whose setting may be none, with the origin of what takes effect."""
    section, name = key.split(".")
    is_given = getattr(getattr(resolved.spec, section), name) is not None
    origin = resolved.origins.get(key, DEFAULT) if is_given else derived_from
    return PlannedValue(name=key, value=value, origin=origin)


def _plan_terms(resolved: ResolvedSpec, limit: int) -> tuple[PlannedValue, ...]:
    """Return what the loss is made of."""
    train = resolved.spec.train
    terms = _with_origins(resolved, "train", {"terms": train.terms})
    rl = _plan_algorithm(resolved, limit) if train.has_rl else ()
    if not train.has_sft:
        return (*terms, *rl)
    weight = PlannedValue(
        name="weight of a demonstrated token",
        value="weight of its row / sum of weight x trained tokens over the step's rows",
        origin="strop's own",
    )
    return (*terms, *rl, *_with_origins(resolved, "sft", resolved.spec.sft.model_dump()), weight)


def _plan_algorithm(resolved: ResolvedSpec, limit: int) -> tuple[PlannedValue, ...]:
    spec = resolved.spec
    algorithm = build_algorithm(spec.algorithm)
    own = f"{algorithm.name}'s own"
    prompts = spec.train.prompts_per_step
    normalizer = _NORMALIZERS[algorithm.aggregation].format(
        rollouts=prompts * spec.train.rollouts_per_prompt, limit=limit, prompts=prompts
    )
    derived = [
        PlannedValue(name="weight of a token", value=normalizer, origin=own),
        PlannedValue(name="advantage", value=algorithm.advantage.__name__, origin=own),
        *(
            _effective(resolved, f"algorithm.{name}", getattr(algorithm, name), own)
            for name in ("clip_low", "clip_high", "zero_variance")
        ),
    ]
    shown = {value.name for value in derived}
    plain = _with_origins(resolved, "algorithm", spec.algorithm.model_dump())
    sampling = _with_origins(resolved, "sampling", spec.sampling.model_dump())
    return (*(value for value in plain if value.name not in shown), *derived, *sampling)


def _with_origins(resolved: ResolvedSpec, section: str, values: dict[str, Any]) -> tuple[PlannedValue, ...]:
    keys = {f"{section}.{name}": value for name, value in values.items()}
    return tuple(
        PlannedValue(name=key, value=value, origin=resolved.origins.get(key, DEFAULT))
        for key, value in keys.items()
    )


def _plan_time(
    spec: RunSpec,
    prompt: PlannedPrompt,
    known: _Known,
    schedule: Schedule,
    machine: Machine,
    calibration: Calibration | None,
    limit: int,
) -> TimeEstimate:
    assert known.size is not None
    work = Work(
        spec=spec,
        size=known.size,
        prompt_tokens_mean=prompt.tokens_mean,
        max_reply_tokens=limit,
        num_eval_examples=schedule.num_eval_examples or 0,
        num_evals=schedule.num_evals,
        imitated_tokens=schedule.rows_per_step * _mean_tokens(known.demonstrations),
    )
    return estimate_time(work, choose_speeds(spec, machine, calibration))


def _mean_tokens(found: Demonstrations | None) -> float:
    return fmean(member.num_tokens for member in found.members) if found else 0.0


def _warn_of_prompts(
    spec: RunSpec, prompt: PlannedPrompt | None, size: ModelSize | None, limit: int
) -> tuple[str, ...]:
    """Say whether more prompts are too long than the gate would allow."""
    if prompt is None or size is None or not prompt.num_too_long:
        return ()
    if prompt.num_too_long <= spec.task.max_too_long_frac * prompt.num_measured:
        return ()
    warning = (
        f"a prompt of {prompt.tokens_max} tokens and a reply of {limit} exceed the model's"
        f" {size.max_positions} positions, and so do {prompt.num_too_long} of {prompt.num_measured} measured"
        " prompts; lower task.max_reply_tokens, or raise task.max_too_long_frac to leave them out"
    )
    return (warning,)


def _warn(memory: Room | None, disk: Room | None) -> tuple[str, ...]:
    """Say for what there is no room, as far as it can be known now."""
    warnings = []
    for name, room in (("memory", memory), ("disk", disk)):
        if room is None or room.available_bytes is None or room.needed_bytes <= room.available_bytes:
            continue
        warnings.append(
            f"{name}: {room.needed_bytes / 1e9:.1f} GB are needed and {room.available_bytes / 1e9:.1f} GB"
            " are there"
        )
    return tuple(warnings)
