"""Plan a run before it starts: what it does, what it needs, how long it takes, what it costs.

Pure: no torch, no network, no writes. Files that are not on this disk are named and never fetched; lengths
that depend on them are assumed (`known`). Every value has its origin, and every assumed number is listed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from strop.algorithm.building import find_idle_settings
from strop.hardware import Gpu, Machine, describe_machine, free_disk_bytes, read_calibration
from strop.hardware.accelerators import Accelerator
from strop.hardware.calibrate import read_efficiency
from strop.hardware.number_format import AUTO, NumberFormat, settle_format
from strop.plan.estimate import TimeEstimate, estimate_time, list_assumptions, list_disk_parts, signal_frac
from strop.plan.known import (
    NUM_MEASURED_PROMPTS,
    Known,
    KnownModel,
    Lengths,
    find_frozen,
    read_known,
    settle_lengths,
    training_examples_here,
)
from strop.plan.plan import (
    Plan,
    PlannedPrompt,
    PlannedValue,
    Room,
    Schedule,
    Target,
    list_limits,
    list_optimizer,
    list_terms,
    price_run,
)
from strop.plan.roles import Part, RoleMemory, count_roles, list_roles, position_budget, split_memory
from strop.plan.rollouts import Judging, Work, describe_judging
from strop.plan.speeds import Speeds, choose_speeds
from strop.policy.footprint import read_model_size
from strop.record.prediction import Prediction, read_usd_per_hour
from strop.rollout import Split
from strop.spec import ResolvedSpec, RunSpec
from strop.spec.base import DEFAULT
from strop.spec.layout import settle_layout
from strop.store import follow_store
from strop.store.policy import find_mirror_root
from strop.tasks import PromptFormat, Task, describe_counts, render_prompt, resolve_prompt_format
from strop.tokenizer import Tokenizer
from strop.train.data.offline import OfflineData, count_offline_positions, find_offline_source

_HIGH_TEMPERATURE = 2.0
"""Above it a warning: hardly any reply is sensible."""


def make_plan(
    resolved: ResolvedSpec,
    *,
    cache_dir: Path | None = None,
    machine: Machine | None = None,
    accelerator: Accelerator | None = None,
    target: Target | None = None,
) -> Plan:
    """Plan a run on this machine, or with one `accelerator` for each learner rank and engine replica.

    `target`: the hardware of a job on a site, used instead of `machine` and `accelerator`.
    Raises: ConfigError or DataError for inputs that training would refuse.
    """
    calibration, efficiency = read_calibration(cache_dir), read_efficiency(cache_dir)
    if target is not None:
        machine, accelerator = target.machine, target.accelerator
        if not target.is_here:
            # These were measured on this machine.
            calibration = efficiency = None
    machine = machine or describe_machine()
    spec, number_format = settle_format(settle_layout(resolved.spec), machine, _device(machine, accelerator))
    with follow_store(spec.store):
        task, known = read_known(spec, cache_dir)
        is_mirrored = find_mirror_root(spec.store) is not None
    prompt = _plan_prompt(spec, task, known)
    speeds = choose_speeds(spec, machine, calibration, efficiency, accelerator)
    lengths = settle_lengths(spec, task, known, prompt)
    limit = _bound_attempt(task, known, lengths.prompt_max)
    needs = _estimate_needs(spec, known, lengths, limit, speeds, machine, target)
    disk = list_disk_parts(spec, known.size, is_mirrored=is_mirrored) if known.size else ()
    rooms = {
        "memory": _room(needs.memory, machine.memory_bytes),
        "disk": _room(
            disk,
            free_disk_bytes(Path(spec.output.dir or spec.output.root))
            if target is None
            else target.free_disk_bytes,
        ),
    }
    place = "this machine" if target is None or target.is_here else f"a node of {target.site}"
    return Plan(
        name=spec.name,
        task=task.name,
        model_uri=spec.model.uri,
        model_path=str(known.model.path) if known.model else None,
        model_source=known.model.source if known.model else None,
        num_params=known.size.num_params if known.size else None,
        prompt=prompt,
        limits=(
            *list_limits(
                resolved, task, known.model, machine, speeds, num_positions=needs.num_positions, place=place
            ),
            _plan_dtype(resolved, number_format),
        ),
        schedule=_plan_schedule(spec, known),
        algorithm=list_terms(resolved, task.attempt_tokens(task.limits)),
        optimizer=list_optimizer(resolved),
        memory=rooms["memory"],
        roles=needs.roles,
        hardware=speeds.device,
        disk=rooms["disk"],
        time=needs.time,
        judging=needs.judging,
        price=price_run(target.rate, needs.time) if target else None,
        assumptions=(*lengths.assumed, *list_assumptions(spec, limit, speeds)),
        warnings=tuple(
            _list_warnings(
                spec, prompt, known.model, task.limits.max_reply_tokens, rooms, needs.roles, speeds
            )
        ),
        unknown=(*known.unknown, *_list_unknown(target, needs.judging)),
        notices=(
            *resolved.notices,
            *filter(None, [find_idle_settings(spec)]),
            *([f"model.dtype: {number_format}"] if number_format.cost else []),
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Needs:
    """Memory and time; empty if the model or the hardware is unknown."""

    memory: tuple[Part, ...] = ()
    """Of the machine, if all roles share its memory."""
    roles: tuple[RoleMemory, ...] = ()
    time: TimeEstimate | None = None
    judging: Judging | None = None
    num_positions: int | None = None
    """Of a micro-batch on one rank, at most."""


def _plan_dtype(resolved: ResolvedSpec, number_format: NumberFormat) -> PlannedValue:
    is_auto = resolved.spec.model.dtype == AUTO
    origin = number_format.reason if is_auto else resolved.origins.get("model.dtype", DEFAULT)
    return PlannedValue(name="model.dtype", value=number_format.dtype, origin=origin)


def _estimate_needs(
    spec: RunSpec,
    known: Known,
    lengths: Lengths,
    limit: int,
    speeds: Speeds,
    machine: Machine,
    target: Target | None,
) -> _Needs:
    if known.size is None or (target is not None and target.unknown):
        return _Needs()
    offline, longest = count_offline_positions(spec, known.offline_data), lengths.prompt_max
    work = _plan_work(spec, lengths, known, limit, machine)
    memory: tuple[Part, ...] = ()
    if speeds.is_processor:
        memory = split_memory(
            spec, known.size, limit, longest, offline_positions=offline, frozen=known.frozen
        )
    return _Needs(
        memory=memory,
        roles=_plan_roles(spec, known, speeds, limit, longest, offline),
        time=estimate_time(work, speeds),
        judging=describe_judging(work),
        num_positions=position_budget(
            spec, known.size, count_roles(spec, is_processor=speeds.is_processor), speeds.memory_bytes
        ),
    )


def _list_unknown(target: Target | None, judging: Judging | None) -> Iterator[str]:
    """Yield messages about values that neither the site's profile nor the run file has."""
    if judging is not None and judging.served:
        yield (
            f"price of judging: {', '.join(judging.served)} reads some {judging.read_tokens_in_run:,.0f}"
            f" tokens in the run and writes {judging.written_tokens_in_run:,.0f}, at its server's price"
        )
    if target is None:
        return
    if target.unknown:
        yield target.unknown
    if target.rate.num_gpus and target.rate.usd_per_gpu_hour is None:
        yield f"price: set `usd_per_gpu_hour` in the profile of site {target.site}"


def _device(machine: Machine, accelerator: Accelerator | None) -> Gpu | Accelerator | None:
    """Return the device that the plan is for; None for the processor."""
    return accelerator or (machine.gpus[0] if machine.gpus else None)


def predict_run(
    spec: RunSpec,
    task: Task,
    model_dir: Path,
    offline_data: OfflineData | None,
    *,
    cache_dir: Path | None = None,
) -> Prediction | None:
    """Predict time and memory of a run that is about to start here; None without an example to render.

    `offline_data`: its demonstrations or pairs.
    """
    known = Known(
        model=KnownModel(path=model_dir, size=read_model_size(model_dir), source="its files"),
        train=training_examples_here(task) if spec.train.has_rl else None,
        held_out=task.examples(Split.HELD_OUT),
        offline_data=offline_data,
        unknown=(),
        frozen=find_frozen(spec, cache_dir)[0],
    )
    assert known.size is not None
    prompt = _plan_prompt(spec, task, known)
    if prompt is None:
        return None
    machine = describe_machine()
    speeds = choose_speeds(spec, machine, read_calibration(cache_dir), read_efficiency(cache_dir))
    limit = _bound_attempt(task, known, prompt.tokens_max)
    lengths = settle_lengths(spec, task, known, prompt)
    time = estimate_time(_plan_work(spec, lengths, known, limit, machine), speeds)
    positions = count_offline_positions(spec, known.offline_data)
    roles = _plan_roles(spec, known, speeds, limit, prompt.tokens_max, positions)
    is_elsewhere = spec.layout.kind == "ray"
    return Prediction(
        hardware=speeds.device,
        basis=speeds.source,
        is_measured=speeds.is_measured,
        is_overlapped=spec.train.max_staleness > 0,
        seconds={part.name: part.amount for part in time.step_parts},
        step_s=time.step_s,
        scored_tokens_per_s=time.scored_tokens_per_s,
        num_reply_tokens=time.num_reply_tokens,
        num_positions=time.num_positions,
        # The loop's own memory does not include that of an accelerator or another process.
        memory_bytes=roles[0].needed_bytes if speeds.is_processor and not is_elsewhere else 0.0,
        bottleneck=time.bottleneck,
        total_s=time.total_s,
        usd_per_hour=read_usd_per_hour(os.environ),
    )


def _room(parts: tuple[Part, ...], available_bytes: int | None) -> Room | None:
    if not parts:
        return None
    return Room(parts=parts, needed_bytes=sum(part.amount for part in parts), available_bytes=available_bytes)


def _plan_prompt(spec: RunSpec, task: Task, known: Known) -> PlannedPrompt | None:
    """Render the first training prompt, and measure the first `NUM_MEASURED_PROMPTS`."""
    examples = known.train if spec.train.has_rl else known.held_out
    if known.tokenizer_path is None or not examples:
        return None
    tokenizer = Tokenizer.load(known.tokenizer_path)
    prompt_format = resolve_prompt_format(tokenizer, spec.model.prompt_format)
    measured = examples[:NUM_MEASURED_PROMPTS]
    rendered = [render_prompt(tokenizer, task.render(example), prompt_format) for example in measured]
    lengths = [len(token_ids) for _, token_ids in rendered]
    terminators = [tokenizer.token_text(token_id) for token_id in sorted(tokenizer.stop_token_ids)]
    return PlannedPrompt(
        text=rendered[0][0],
        num_tokens=lengths[0],
        prompt_format=prompt_format.value,
        stops=(
            *terminators,
            *task.limits_of(measured[0]).stops(is_base=prompt_format is PromptFormat.BASE),
        ),
        example_id=measured[0].example_id,
        counts=describe_counts(task),
        num_measured=len(lengths),
        tokens_mean=fmean(lengths),
        tokens_max=max(lengths),
        num_too_long=None
        if known.size is None
        else sum(
            length + task.limits_of(example).max_reply_tokens > known.size.max_positions
            for example, length in zip(measured, lengths, strict=True)
        ),
    )


def _plan_schedule(spec: RunSpec, known: Known) -> Schedule:
    train, every, data = spec.train, spec.eval.every, known.offline_data
    num_prompts = train.prompts_per_step if train.has_rl else 0
    sampling_frac, offline_frac = _step_shares(spec)
    source = find_offline_source(spec)
    per_step = source.per_step if source else 0
    num_train = len(known.train) if known.train is not None else None
    # Evaluations before the first step, at every multiple, and after the last step, without duplicates.
    steps = {0, train.steps} | set(range(every, train.steps, every) if every else ())
    num_eval_examples = spec.eval.num_examples
    if num_eval_examples is None and known.held_out is not None:
        num_eval_examples = len(known.held_out)
    return Schedule(
        steps=train.steps,
        steps_per_batch=train.steps_per_batch,
        prompts_per_step=num_prompts,
        rollouts_per_step=num_prompts * train.group_size,
        num_train_examples=num_train,
        num_epochs=sampling_frac * train.steps * num_prompts / num_train
        if num_train and num_prompts
        else None,
        given_kind=source.kind if source else "",
        given_per_step=per_step,
        given=data.describe() if data else None,
        num_given_epochs=offline_frac * train.steps * per_step / len(data.lengths) if data else None,
        num_evals=len(steps),
        num_eval_examples=num_eval_examples,
        num_checkpoints=-(-train.steps // train.checkpoint_every),
    )


def _plan_roles(
    spec: RunSpec, known: Known, speeds: Speeds, limit: int, max_prompt: int | None, offline_positions: int
) -> tuple[RoleMemory, ...]:
    assert known.size is not None
    return list_roles(
        spec,
        known.size,
        count_roles(spec, is_processor=speeds.is_processor),
        limit,
        max_prompt,
        offline_positions=offline_positions,
        frozen=known.frozen,
        device_bytes=speeds.memory_bytes,
    )


def _bound_attempt(task: Task, known: Known, prompt_tokens: int | None) -> int:
    """Return the most tokens that the policy can sample in an attempt, in all turns together."""
    limit = task.attempt_tokens(task.limits)
    if known.size is None:
        return limit
    room = known.size.max_positions - (prompt_tokens or 0)
    return min(limit, max(room, task.limits.max_reply_tokens))


def _plan_work(spec: RunSpec, lengths: Lengths, known: Known, limit: int, machine: Machine) -> Work:
    assert known.size is not None
    schedule, (sampling_frac, offline_frac) = _plan_schedule(spec, known), _step_shares(spec)
    offline_rows = offline_frac * schedule.given_per_step
    return Work(
        spec=spec,
        size=known.size,
        prompt_tokens_mean=lengths.prompt_mean,
        max_reply_tokens=limit,
        num_eval_examples=lengths.num_eval_examples,
        num_evals=schedule.num_evals,
        offline_tokens=offline_rows * lengths.offline_mean,
        offline_scored=offline_rows * lengths.offline_scored,
        sampling_frac=sampling_frac,
        signal_frac=signal_frac(spec),
        num_cores=machine.num_logical_cpus,
        frozen=known.frozen,
    )


def _step_shares(spec: RunSpec) -> tuple[float, float]:
    """Return the share of steps with rollouts, and with offline data. Below 1 in distillation only."""
    if spec.train.terms != "distill":
        return 1.0, 1.0
    return spec.teacher.student_frac, 1.0 - spec.teacher.student_frac


def _list_warnings(
    spec: RunSpec,
    prompt: PlannedPrompt | None,
    model: KnownModel | None,
    limit: int,
    rooms: Mapping[str, Room | None],
    roles: tuple[RoleMemory, ...],
    speeds: Speeds,
) -> Iterator[str]:
    """Yield what the gate would refuse, and what exceeds memory or disk, as far as it is known now."""
    if model is not None and model.lacks:
        yield model.lacks
    if spec.sampling.temperature > _HIGH_TEMPERATURE:
        yield (
            f"sampling.temperature={spec.sampling.temperature:g}: replies are nearly random above"
            f" {_HIGH_TEMPERATURE:g}, and nothing is learned from them"
        )
    size, too_long = model.size if model else None, prompt.num_too_long if prompt is not None else None
    if prompt and size and too_long and too_long > spec.task.max_too_long_frac * prompt.num_measured:
        yield (
            f"a prompt of {prompt.tokens_max} tokens and a reply of {limit} exceed the model's"
            f" {size.max_positions} positions, and so do {too_long} of {prompt.num_measured} measured"
            " prompts; lower task.max_reply_tokens, or raise task.max_too_long_frac to leave them out"
        )
    for name, room in rooms.items():
        if room is not None and room.available_bytes is not None and room.needed_bytes > room.available_bytes:
            yield (
                f"{name}: {room.needed_bytes / 1e9:.1f} GB are needed and {room.available_bytes / 1e9:.1f} GB"
                " are there"
            )
    for role in roles:
        if role.available_bytes is not None and role.needed_bytes > role.available_bytes:
            largest = max(role.parts, key=lambda part: part.amount)
            yield (
                f"memory of the {role.role}: {role.needed_bytes / 1e9:.1f} GB are needed and one"
                f" {speeds.device} has {role.available_bytes / 1e9:.1f} GB;"
                f" the largest part is {largest.name}"
            )
