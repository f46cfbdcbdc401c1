"""`strop plan RUN.toml [key=value ...] [--on SITE]` and `strop explain [KEY] [RUN.toml]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strop.cli.arguments import Json, Overrides, RunFile, takes
from strop.cli.output import Output
from strop.io.notices import tell

if TYPE_CHECKING:
    from strop.cli.submit import SubmitArguments
    from strop.launch.contract import JobRequest
    from strop.plan.estimate import TimeEstimate
    from strop.plan.plan import Plan, PlannedPrompt, PlannedValue, Price, Room
    from strop.plan.rollouts import Judging
    from strop.spec import ResolvedSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanArguments:
    """Arguments of `strop plan`: the run, its site or hardware, and the amount of output."""

    run_file: RunFile
    overrides: Overrides = None
    on: Annotated[
        str | None, typer.Option(metavar="SITE", help="Also show what would be submitted to this site.")
    ] = None
    hardware: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Plan for these accelerators: h100, l4, ... or a TOML file."),
    ] = None
    measure: Annotated[
        bool, typer.Option("--measure", help="First measure the speed of this model here; about 20 s, once.")
    ] = False
    fetch: Annotated[
        bool,
        typer.Option(
            "--fetch", help="First fetch config.json and tokenizer of models that are elsewhere; no weights."
        ),
    ] = False
    everything: Annotated[
        bool,
        typer.Option("--all", help="Show everything: each setting and its source, and what would be sent."),
    ] = False
    json: Json = False


@takes(PlanArguments)
def plan(context: typer.Context, args: PlanArguments) -> None:
    """Show what a run would do and cost: prompt, limits, memory, time. No network without --fetch."""
    from strop.cli.submit import SubmitArguments, prepare, read_arguments, submit_request
    from strop.plan.planning import make_plan
    from strop.spec import load_spec

    output: Output = context.obj
    overrides = args.overrides or []
    if args.on is not None:
        from strop.launch.options import read_site_words

        overrides, _ = read_site_words(overrides)
    resolved = load_spec(args.run_file, overrides)
    if args.fetch:
        _fetch(output, resolved)
    if args.measure:
        _measure(output, resolved)
    accelerator = None
    if args.hardware is not None:
        from strop.hardware.accelerators import find_accelerator

        accelerator = find_accelerator(args.hardware)
    request = target = None
    if args.on is not None:
        from strop.launch.target import describe_target

        job_args = SubmitArguments(run_file=args.run_file, overrides=args.overrides, on=args.on, dry_run=True)
        request = read_arguments(job_args)
        target = describe_target(request, accelerator)
        # The request has settings that follow from the site, such as the GPUs of its instances.
        resolved = request.resolved
    planned = make_plan(resolved, accelerator=accelerator, target=target)
    if args.json:
        job = {} if request is None else {"job": _plan_job(output, request, job_args)}
        output.give_json(asdict(planned) | job)
    elif args.everything:
        show_plan(output, planned)
    else:
        show_screen(output, planned)
        if request is not None:
            # Planned only for its refusals.
            _plan_job(output, request, job_args)
    for notice in planned.notices:
        tell(notice)
    for unknown in planned.unknown:
        output.say(f"unknown: {unknown}")
    for warning in planned.warnings:
        output.say(f"warning: training would be refused: {warning}")
    if request is not None and args.everything and not args.json:
        launcher, request = prepare(output, request, job_args)
        submit_request(output, launcher, request, job_args)


def _plan_job(output: Output, request: JobRequest, job_args: SubmitArguments) -> Any:
    """Return the plan that would be submitted, in the form of the dry run's JSON."""
    from json import loads

    from strop.cli.submit import prepare
    from strop.launch.job_dir import plan_to_json

    launcher, request = prepare(output, request, job_args)
    return loads(plan_to_json(launcher.plan(request)))


def _fetch(output: Output, resolved: ResolvedSpec) -> None:
    """Fetch the descriptions of the run's models whose tokenizers are not on this machine."""
    from strop.plan.known import describe_model
    from strop.spec.judge import role_judges
    from strop.store import follow_store
    from strop.store.models import fetch_description

    spec = resolved.spec
    judges = [judge.judge_model for judge in role_judges(spec.task)]
    with follow_store(spec.store):
        for uri in dict.fromkeys([spec.model.uri, *spec.frozen_models.values(), *judges]):
            description = None if uri is None else describe_model(uri)
            if uri is not None and (description is None or not description.has_tokenizer):
                output.say(f"fetched what describes {uri} into {fetch_description(uri)}")


def _measure(output: Output, resolved: ResolvedSpec) -> None:
    """Measure this machine with the run's model, which must be on it."""
    from strop.errors import ConfigError
    from strop.run.doctor import measure_machine
    from strop.run.training import set_threads
    from strop.store.models import find_model

    uri = resolved.spec.model.uri
    model_dir = find_model(uri)
    if model_dir is None:
        raise ConfigError(
            f"--measure needs the model {uri}, which is not on this machine",
            allowed="a model that is here",
            next_step=f"fetch it with `strop model get {uri}`, or leave --measure out",
        )
    set_threads(resolved.spec.placement.threads)
    speeds = measure_machine(resolved.spec, model_dir)
    output.say(
        f"{speeds.source}: {speeds.learn_frac:.0%} of a product's speed in learning,"
        f" {speeds.decode_frac:.0%} in decoding"
    )


def show_screen(output: Output, planned: Plan) -> None:
    """Print the essentials of a plan on one screen."""
    import shutil

    from strop.cli.output import PLAIN_WIDTH
    from strop.view.plan_screen import describe_plan

    for line in describe_plan(planned, width=shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns):
        output.give(line)


def show_plan(output: Output, planned: Plan) -> None:
    """Print a plan as tables, the prompt first."""
    if planned.prompt is not None:
        _show_prompt(output, planned.prompt)
    schedule = planned.schedule
    seen = "unknown"
    if schedule.num_epochs is not None:
        seen = f"{schedule.num_train_examples}, seen {schedule.num_epochs:.3g} times"
    several = schedule.steps_per_batch
    each = f", each of {several} optimizer steps" if several > 1 else ""
    rows = [("steps", f"{schedule.steps}{each}")]
    if schedule.rollouts_per_step:
        shown = f"{schedule.rollouts_per_step} of {schedule.prompts_per_step} prompts"
        rows += [("rollouts per step", shown), ("training examples", seen)]
    if schedule.given_per_step:
        seen = "unknown"
        if schedule.num_given_epochs is not None:
            seen = f"{schedule.given}, seen {schedule.num_given_epochs:.3g} times"
        kind = schedule.given_kind
        rows += [(f"{kind} per step", str(schedule.given_per_step)), (kind, seen)]
    output.give_table(
        ("schedule", "planned"),
        [
            *rows,
            ("evaluations", f"{schedule.num_evals} on {schedule.num_eval_examples or 'all'} examples"),
            ("checkpoints", str(schedule.num_checkpoints)),
        ],
        title=_describe_model(planned),
    )
    for title, values in (
        ("limit", planned.limits),
        ("algorithm", planned.algorithm),
        ("optimizer", planned.optimizer),
    ):
        _show_values(output, title, values)
    if planned.memory is not None:
        _show_room(output, "memory", planned.memory)
    if planned.roles:
        _show_roles(output, planned)
    if planned.disk is not None:
        _show_room(output, "disk", planned.disk)
    if planned.time is not None:
        _show_time(output, planned, planned.time)
    if planned.judging is not None:
        _show_judging(output, planned.judging)
    if planned.price is not None:
        _show_price(output, planned.price)


def _describe_model(planned: Plan) -> str:
    size = "" if planned.num_params is None else f", {planned.num_params / 1e9:.3g} billion parameters"
    source = "" if planned.model_path or planned.model_source is None else f" ({planned.model_source})"
    return f"{planned.name}: {planned.model_path or planned.model_uri}{size}{source}"


def _show_prompt(output: Output, prompt: PlannedPrompt) -> None:
    from strop.view import make_harmless

    if prompt.counts:
        output.give(f"--- of the data: {prompt.counts}")
    output.give(f"--- first prompt, {prompt.num_tokens} tokens, {prompt.prompt_format} format")
    output.give(make_harmless(prompt.text))
    stops = ", ".join(map(repr, prompt.stops))
    output.give(
        f"--- a reply ends at {stops}; prompts have {prompt.tokens_mean:.1f} tokens on average, at most"
        f" {prompt.tokens_max} (the first {prompt.num_measured} measured)"
        + ("" if prompt.num_too_long is None else f"; {prompt.num_too_long} leave no room for a reply")
    )


def _show_values(output: Output, title: str, values: Sequence[PlannedValue]) -> None:
    from strop.spec.display import show_value

    rows = [
        (value.name, value.value if isinstance(value.value, str) else show_value(value.value), value.origin)
        for value in values
    ]
    output.give_table((title, "value", "from"), rows)


def _show_room(output: Output, title: str, room: Room) -> None:
    there = "unknown" if room.available_bytes is None else f"{room.available_bytes / 1e9:.1f} GB"
    rows = [(part.name, f"{part.amount / 1e9:.2f} GB") for part in room.parts]
    rows.append(("together", f"{room.needed_bytes / 1e9:.2f} GB of {there}"))
    output.give_table((title, "estimate"), rows)


def _show_roles(output: Output, planned: Plan) -> None:
    rows = []
    for role in planned.roles:
        there = "" if role.available_bytes is None else f" of {role.available_bytes / 1e9:.1f} GB"
        largest = max(role.parts, key=lambda part: part.amount, default=None)
        most = "the program" if largest is None else f"{largest.name}, {largest.amount / 1e9:.2f} GB"
        rows.append((role.role, role.count, f"{role.needed_bytes / 1e9:.2f} GB{there}", most))
    output.give_table((f"role on {planned.hardware}", "processes", "memory of one", "most of it"), rows)


def _show_time(output: Output, planned: Plan, time: TimeEstimate) -> None:
    from strop.view.terminal import describe_duration

    rows = [(part.name, describe_duration(part.amount)) for part in time.step_parts]
    rows += [
        ("one step", f"{describe_duration(time.step_s)}, {time.scored_tokens_per_s:,.0f} tokens/s"),
        ("one evaluation", describe_duration(time.eval_s)),
        ("the whole run", describe_duration(time.total_s)),
        ("slowest", f"{time.bottleneck}: {time.bottleneck_role}"),
    ]
    if time.relief is not None:
        rows.append(("would help", f"{time.relief.setting}: {describe_duration(time.relief.step_s)} a step"))
    output.give_table(("time", "estimate"), rows)
    speeds = time.speeds
    mark = "measured" if speeds.is_measured else "assumed"
    assumed: list[tuple[str, str, str]] = [
        (f"speed ({mark})", f"{speeds.gflops:.0f} GFLOP/s, {speeds.copy_gb_per_s:.1f} GB/s", speeds.source)
    ]
    assumed += [(f"{guess.name} (assumed)", f"{guess.value:g}", guess.why) for guess in planned.assumptions]
    output.give_table(("the estimate rests on", "value", "because"), assumed)


def _show_judging(output: Output, judging: Judging) -> None:
    from strop.view.terminal import describe_duration

    rows = []
    if judging.programs_in_run:
        rows.append(("programs run", f"{judging.programs_per_step:,.0f}", f"{judging.programs_in_run:,.0f}"))
    if judging.limit_step_s is not None:
        longest = describe_duration(judging.limit_step_s)
        rows.append(("their time, if each ran into its limit", longest, ""))
    if judging.calls_in_run:
        tokens = f"{judging.read_tokens_in_run:,.0f} read, {judging.written_tokens_in_run:,.0f} written"
        rows.append(
            ("questions to a judge", f"{judging.calls_per_step:,.0f}", f"{judging.calls_in_run:,.0f}")
        )
        rows.append(("tokens of the judge", "", tokens))
    output.give_table(("judging", "a step", "the run and its evaluations"), rows)


def _show_price(output: Output, price: Price) -> None:
    from strop.view.terminal import describe_usd

    amounts = (
        ("one step", price.step_usd),
        ("the whole run", price.run_usd),
        ("at most, by the job's time limit", price.limit_usd),
    )
    title = f"price of {price.num_gpus} GPUs at {price.usd_per_gpu_hour:g} USD an hour each"
    rows = [(name, "unknown" if usd is None else describe_usd(usd)) for name, usd in amounts]
    output.give_table((title, "estimate"), rows)


def explain(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY [RUN.toml [key=value ...]]]",
            help="A setting such as optimizer.lr, or a section such as train; and a run whose value and its"
            " origin are shown, too.",
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also list the expert settings, and why each exists.")
    ] = False,
) -> None:
    """Explain a setting: meaning, allowed values, origin of its value. Without KEY: list them."""
    from strop.spec import Explanation, all_keys, load_spec
    from strop.spec import explain as explain_setting
    from strop.spec.base import DEFAULT
    from strop.spec.display import show_value

    output: Output = context.obj
    words = words or []
    key, run_file = words[0] if words else None, words[1] if len(words) > 1 else None

    def explain_key(name: str) -> Explanation:
        path = tuple(name.split("."))
        if path[0] != "sites":
            return explain_setting(name, resolved)
        from strop.launch.sites import explain_site

        return explain_site(path)

    resolved = load_spec(run_file, words[2:]) if run_file is not None else None
    explanation = explain_key(key) if key is not None else None
    if explanation is None or explanation.keys:
        explained = [explain_key(name) for name in (explanation.keys if explanation else all_keys())]
        everyday = [
            entry for entry in explained if entry.reason is None or entry.origin not in (None, DEFAULT)
        ]
        # A section of only expert settings, such as `tripwires`, shows them.
        listed = explained if everything or not everyday else everyday
        columns = ["setting", "type", "default", *(("value", "origin") if resolved else ())]
        columns += ["an expert setting because"] if everything else []

        def row(entry: Explanation) -> tuple[str, ...]:
            own = (show_value(entry.value) if entry.origin else "-", entry.origin or "-") if resolved else ()
            reason = (entry.reason or "-",) if everything else ()
            return (entry.key, entry.type, entry.default, *own, *reason)

        if explanation is not None:
            output.give(explanation.description)
        output.give_table(columns, list(map(row, listed)))
        if len(listed) < len(explained):
            command = " ".join(["strop explain", *([key] if key else []), "--all"])
            output.give(f"{len(explained) - len(listed)} expert settings more: {command}")
        return
    output.give(f"{explanation.key}: {explanation.description}")
    output.give(f"  allowed  {explanation.allowed}")
    output.give(f"  default  {explanation.default}")
    if explanation.reason is not None:
        output.give(f"  expert   it exists because {explanation.reason}")
    if explanation.origin is not None:
        output.give(f"  value    {show_value(explanation.value)} ({explanation.origin})")
    elif resolved is not None:
        output.give(f"  value    none: task {resolved.spec.task.name} has no such setting")
