"""The main facts of a plan on one screen; `strop plan --all` shows the rest."""

from __future__ import annotations

from collections.abc import Iterator

from strop.plan.plan import Plan
from strop.view.display import cut
from strop.view.terminal import describe_duration, describe_usd, make_harmless, to_one_line

_LABEL_CELLS = 10


def describe_plan(planned: Plan, *, width: int) -> list[str]:
    """Return the lines of the screen, 18 at most, none wider than `width` cells."""
    rows = _list_rows(planned, width - _LABEL_CELLS)
    return [cut(f"{label:{_LABEL_CELLS}}{to_one_line(text)}", width) for label, text in rows]


def _list_rows(planned: Plan, room: int) -> Iterator[tuple[str, str]]:
    values = {value.name: value.value for value in (*planned.limits, *planned.algorithm, *planned.optimizer)}
    size = "" if planned.num_params is None else f", {planned.num_params / 1e9:.3g} billion parameters"
    dtype = f", {values['model.dtype']}" if "model.dtype" in values else ""
    yield "run", planned.name
    yield "model", f"{planned.model_uri}{size}{dtype}"
    if planned.model_source is not None and planned.model_path is None:
        yield "", f"sizes from {planned.model_source}"
    yield "task", _describe_examples(planned)
    yield "learns by", _describe_learning(planned, values)
    yield from _describe_prompt(planned, values, room)
    yield "runs on", f"{planned.hardware}: {values.get('placement.kind', '')}".rstrip(": ")
    yield from _describe_time(planned)
    yield from _describe_rooms(planned)
    yield "cost", _describe_cost(planned)
    num_warnings = len(planned.warnings)
    yield "warnings", f"{num_warnings}, below: training would be refused" if num_warnings else "none"
    yield "more", "every limit, what the loss is made of, and what the estimate rests on: --all"


def _describe_examples(planned: Plan) -> str:
    schedule = planned.schedule
    parts = [planned.task]
    if schedule.rollouts_per_step and schedule.num_epochs is not None:
        parts.append(f"{schedule.num_train_examples} examples, seen {schedule.num_epochs:.3g} times")
    if schedule.given_per_step and schedule.num_given_epochs is not None:
        parts.append(f"{schedule.given}, seen {schedule.num_given_epochs:.3g} times")
    parts.append(f"{schedule.num_evals} evaluations on {schedule.num_eval_examples or 'all'} examples")
    return "; ".join(parts)


def _describe_learning(planned: Plan, values: dict[str, object]) -> str:
    schedule = planned.schedule
    objective = str(values.get("algorithm.name") or values.get("train.terms") or "")
    each = f", each of {schedule.steps_per_batch} optimizer steps" if schedule.steps_per_batch > 1 else ""
    sampled = f" of {schedule.prompts_per_step} prompts, {schedule.rollouts_per_step} replies"
    offline = f" of {schedule.given_per_step} {schedule.given_kind}"
    batch = (sampled if schedule.rollouts_per_step else "") + (offline if schedule.given_per_step else "")
    return f"{objective}, learning rate {values.get('optimizer.lr')}; {schedule.steps} steps{batch}{each}"


def _describe_prompt(planned: Plan, values: dict[str, object], room: int) -> Iterator[tuple[str, str]]:
    prompt = planned.prompt
    if prompt is None:
        return
    limit = values.get("task.max_reply_tokens")
    lengths = f"{prompt.tokens_mean:.1f} tokens on average, at most {prompt.tokens_max}"
    yield "prompts", f"{lengths}, {prompt.prompt_format} format; a reply has at most {limit}"
    # Beginning and end: prompts differ at their end, where the reply begins.
    text = make_harmless(prompt.text).replace("\n", "\\n")
    half = 2 * room
    if len(text) <= half:
        shown = [text[start : start + room] for start in range(0, len(text), room)]
    else:
        shown = [text[: room - 3] + "...", "..." + text[3 - room :]]
    for index, line in enumerate(shown):
        yield ("" if index else "the first"), line


def _describe_time(planned: Plan) -> Iterator[tuple[str, str]]:
    time = planned.time
    if time is None:
        yield "time", "unknown; why is said below"
        return
    parts = ", ".join(
        f"{part.name} {describe_duration(part.amount)}"
        for part in time.step_parts
        if part.amount >= 0.01 * time.step_s
    )
    mark = "by measured speeds" if time.speeds.is_measured else "by assumed speeds"
    yield "time", f"{describe_duration(time.total_s)}, {mark}"
    step, evaluation = describe_duration(time.step_s), describe_duration(time.eval_s)
    yield "one step", f"{step} ({parts}); one evaluation {evaluation}"
    yield "slowest", f"{time.bottleneck}: {time.bottleneck_role}"
    if time.relief is not None:
        yield "", f"{time.relief.setting} would help: {describe_duration(time.relief.step_s)} a step"


def _describe_rooms(planned: Plan) -> Iterator[tuple[str, str]]:
    def describe(needed_bytes: float, available_bytes: int | None) -> str:
        available = "unknown" if available_bytes is None else f"{available_bytes / 1e9:.1f} GB"
        return f"{needed_bytes / 1e9:.1f} GB of {available}"

    if planned.memory is not None:
        yield "memory", describe(planned.memory.needed_bytes, planned.memory.available_bytes)
    elif planned.roles:
        roles = (f"{role.role} {describe(role.needed_bytes, role.available_bytes)}" for role in planned.roles)
        yield "memory", ", ".join(roles)
    if planned.disk is not None:
        yield "disk", describe(planned.disk.needed_bytes, planned.disk.available_bytes)


def _describe_cost(planned: Plan) -> str:
    price = planned.price
    if price is None or price.run_usd is None:
        return "no price is known: --on SITE, with usd_per_gpu_hour in its profile"
    limit = ""
    if price.limit_usd is not None:
        limit = f", at most {describe_usd(price.limit_usd)} by the job's time limit"
    return f"{describe_usd(price.run_usd)} for {price.num_gpus} GPUs{limit}"
