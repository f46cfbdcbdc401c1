"""`strop eval MODEL --task NAME[,NAME ...] --split NAME [key=value ...]` and `strop eval PLACE --rescore`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strop.cli.arguments import AskSettings, Json, NamedModel, takes
from strop.cli.output import Output
from strop.errors import EXIT_FAILED
from strop.rollout import Split

if TYPE_CHECKING:
    from strop.evaluate import EvalResult, Summary
    from strop.evaluate.harness import HarnessResult
    from strop.evaluate.result import PartScores
    from strop.evaluate.stored import ScoreRow, StoredBaseline
    from strop.rollout import Rollout
    from strop.run.evaluation import EvalRequest, StoredRescored

CHANGES_SHOWN = 20
CHANGED = ("example", "reply", "before", "now", "compared")
"""Rewards before and now; none of a reply that could not be judged."""
COLUMNS = (
    "task",
    "replies",
    "accuracy",
    "95% interval",
    "format ok",
    "cut",
    "verifier errors",
    "timed out",
    "unscored",
    "rollouts",
)


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Options of `strop eval`."""

    # Required below, unless a file names it.
    model: NamedModel = None
    settings: AskSettings = None
    task: Annotated[
        str | None, typer.Option(help="Task name, or several separated by commas; see `strop tasks ls`.")
    ] = None
    # Required below: a score without its split has no meaning (EVA-1).
    split: Annotated[Split | None, typer.Option(help="Split of the task.")] = None
    config: Annotated[
        Path | None,
        typer.Option(metavar="EVAL.toml", help="Run file with task and settings; held-out examples."),
    ] = None
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="With --config and a run as MODEL: evaluate each checkpoint as it appears.",
        ),
    ] = False
    num_examples: Annotated[
        int | None,
        typer.Option(
            "--num-examples", "--limit", min=1, help="Number of examples, from the first. Default: all."
        ),
    ] = None
    num_samples: Annotated[
        int | None,
        typer.Option(
            "--num-samples", "--samples", min=1, help="Sampled replies per example, besides the greedy one."
        ),
    ] = None
    pass_at: Annotated[
        str | None, typer.Option(help="Values of k for pass@k, such as 1,4,8; up to --num-samples.")
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for results and replies. Default: a new one in evals/."),
    ] = None
    rescore: Annotated[
        bool,
        typer.Option(
            "--rescore",
            help="Score the kept replies of an evaluation (its result or folder, in place of MODEL) again"
            " with the current task; nothing is generated.",
        ),
    ] = False
    write_order: Annotated[
        Path | None, typer.Option(help="Also write how often each example was solved (JSONL).")
    ] = None
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]PLACE",
            help="Stored result, folder of results, run or model to compare with in the table. Repeatable.",
        ),
    ] = None
    harness: Annotated[
        str | None, typer.Option(help="Evaluate with this harness, in its own environment: lm-eval.")
    ] = None
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="With --config: processes that share the work. Default: one for each group of GPUs."
        ),
    ] = None
    node: Annotated[str | None, typer.Option(hidden=True, help="K/N: which node of a job this is.")] = None
    part: Annotated[str | None, typer.Option(hidden=True, help="K/N: evaluate only this share.")] = None
    confirm_run_unsafe_code: Annotated[
        bool,
        typer.Option(
            "--confirm-run-unsafe-code",
            help="With --harness: allow it to run model-written code without a sandbox.",
        ),
    ] = False
    json: Json = False


@takes(EvalOptions)
def evaluate(context: typer.Context, options: EvalOptions) -> None:
    """Measure how often a model solves tasks, with 95% intervals. Repeat the command to resume."""
    from strop.evaluate import refuse_invalid, write_order
    from strop.run.baselines import read_baselines
    from strop.run.evaluation import evaluate_here
    from strop.run.inference import open_model, read_setups

    output: Output = context.obj
    if options.rescore:
        if options.model is None:
            raise typer.BadParameter("--rescore takes a result of `strop eval`, a shard, or a folder of them")
        _rescore(output, Path(options.model), options.settings or (), is_json=options.json)
        return
    if options.config is not None:
        _evaluate_by_file(output, options, options.config)
        return
    if options.model is None:
        raise typer.BadParameter("Missing argument 'MODEL', or --config EVAL.toml with model.uri")
    if options.workers is not None or options.part is not None or options.node is not None:
        raise typer.BadParameter("--workers takes --config EVAL.toml, which says what is evaluated")
    if options.follow:
        raise typer.BadParameter("--follow takes --config EVAL.toml, which says what is evaluated")
    if options.task is None:
        raise typer.BadParameter("Missing option '--task', or --config EVAL.toml")
    tasks = [name.strip() for name in options.task.split(",")]
    if options.harness is not None:
        show_harness(output, options, tasks)
        return
    if options.split is None:
        raise typer.BadParameter("Missing option '--split', or --config EVAL.toml")
    split = options.split
    if options.write_order is not None and len(tasks) > 1:
        raise typer.BadParameter("--write-order takes one task of strop's own")
    stored = read_baselines(options.baseline or (), tasks, split, by_harness=False, out_dir=options.out)
    setups = read_setups(tasks, options.settings or (), split)
    request = _read_request(options)
    opened = open_model(options.model)
    results = [stored.result for stored in evaluate_here(setups, opened, request, say=output.say)]
    show_results(output, results, is_json=options.json)
    if stored:
        _say_stored(output, options, results, stored)
    # After the results were shown, because the numbers explain the refusal.
    if len(results) == 1:
        refuse_invalid(results[0])
    _exit_if_invalid(output, results)
    if options.write_order is not None:
        write_order(results[0], options.write_order)


def _evaluate_by_file(output: Output, options: EvalOptions, path: Path) -> None:
    """Evaluate a model, or the checkpoints of a run as they appear, with the settings of a file."""
    from strop.run.following import follow_run
    from strop.run.shares import FileEvaluation, evaluate_file

    defaults = EvalOptions(model=options.model, config=path)
    free = {
        "follow",
        "settings",
        "out",
        "json",
        "workers",
        "part",
        "node",
        "confirm_run_unsafe_code",
        "baseline",
    }
    extra = [
        name for name in vars(defaults) if name not in free and vars(options)[name] != vars(defaults)[name]
    ]
    given_beside = ("settings", "out", "baseline")
    extra += [name for name in given_beside if options.follow and vars(options)[name]]
    if extra:
        words = ", ".join(
            "settings" if name == "settings" else f"--{name.replace('_', '-')}" for name in extra
        )
        raise typer.BadParameter(f"--config says everything itself: leave {words} out")
    if options.follow:
        if options.model is None:
            raise typer.BadParameter("--follow takes a run as MODEL")
        follow_run(Path(options.model).absolute(), path, say=output.say)
        return
    request = FileEvaluation(
        path=path,
        model=options.model,
        out_dir=None if options.out is None else options.out.absolute(),
        may_run_code=options.confirm_run_unsafe_code,
        num_workers=options.workers,
        node=_read_share(options.node, "--node") or (0, 1),
        part=_read_share(options.part, "--part"),
        baselines=options.baseline or (),
        words=options.settings or (),
    )
    evaluated = evaluate_file(request, say=output.say)
    if evaluated.own:
        show_results(output, evaluated.own, is_json=options.json)
    elif options.json and evaluated.harness:
        output.give_json([result.model_dump(mode="json") for result in evaluated.harness])
    is_beside = evaluated.harness or any(row.baseline is not None for row in evaluated.rows)
    if is_beside and not options.json:
        show_beside(output, evaluated.rows)
    if evaluated.table is not None:
        output.say(f"table: {evaluated.table}")
    _exit_if_invalid(output, evaluated.own)


def _exit_if_invalid(output: Output, results: Sequence[EvalResult]) -> None:
    invalid = [result for result in results if not result.is_valid]
    for result in invalid:
        output.say(f"strop: {result.task}: {result.verdict}")
    if invalid:
        raise typer.Exit(EXIT_FAILED)


def show_beside(output: Output, rows: Sequence[ScoreRow]) -> None:
    """Print all scores next to the stored ones."""
    from strop.evaluate.stored import COLUMNS as TABLE_COLUMNS
    from strop.evaluate.stored import show_row

    is_beside = any(row.baseline is not None for row in rows)
    output.give_table(
        TABLE_COLUMNS, [show_row(row) for row in rows], title="beside baselines" if is_beside else "scores"
    )
    for row in rows:
        if row.note:
            of = f" ({row.baseline_of})" if row.baseline_of else ""
            output.say(f"{row.task} {row.metric}{of}: {row.note}")


def _say_stored(
    output: Output,
    options: EvalOptions,
    results: Sequence[EvalResult | HarnessResult],
    stored: Sequence[StoredBaseline],
) -> None:
    """Print results next to the baselines of the command line, and write them."""
    from strop.evaluate.stored import list_rows, write_table
    from strop.run.evaluation import EVALS_ROOT

    rows = list_rows(results, stored)
    if not options.json:
        show_beside(output, rows)
    if stored:
        name = f"{results[0].model_digest[:8]}-step-{results[0].step:06d}"
        output.say(f"table: {write_table(rows, options.out or EVALS_ROOT, name)}")


def _read_share(text: str | None, name: str) -> tuple[int, int] | None:
    """Read `K/N`."""
    if text is None:
        return None
    first, _, number = text.partition("/")
    if not (first.isdecimal() and number.isdecimal() and int(first) < int(number)):
        raise typer.BadParameter(f"{name} takes K/N with K below N, not {text}")
    return int(first), int(number)


def show_harness(output: Output, options: EvalOptions, tasks: list[str]) -> None:
    """Evaluate by lm-eval and print its numbers."""
    from strop.run.baselines import read_baselines
    from strop.run.harness import evaluate_by_harness
    from strop.run.inference import open_model

    assert options.model is not None
    if options.harness != "lm-eval":
        raise typer.BadParameter(f"--harness takes lm-eval, not {options.harness}")
    own = {"--split": options.split, "--write-order": options.write_order}
    if given := [name for name, value in own.items() if value is not None]:
        raise typer.BadParameter(f"{given[0]} is for strop's own tasks: leave it or --harness out")
    stored = read_baselines(
        options.baseline or (), tasks, Split.HELD_OUT, by_harness=True, out_dir=options.out
    )
    results = evaluate_by_harness(
        tasks,
        options.settings or (),
        open_model(options.model),
        _read_request(options),
        may_run_code=options.confirm_run_unsafe_code,
        say=output.say,
    )
    _say_stored(output, options, results, stored)
    if options.json:
        output.give_json([result.model_dump(mode="json") for result in results])


def _read_request(options: EvalOptions) -> EvalRequest:
    from strop.run.evaluation import EvalRequest

    return EvalRequest(
        num_examples=options.num_examples,
        num_samples=options.num_samples,
        pass_at=read_counts(options.pass_at),
        out_dir=options.out,
    )


def read_counts(text: str | None) -> tuple[int, ...]:
    """Read whole numbers separated by commas."""
    try:
        return tuple(sorted({int(part) for part in text.split(",")})) if text else ()
    except ValueError as error:
        raise typer.BadParameter(f"--pass-at takes numbers with commas between them, not {text}") from error


def show_results(output: Output, results: Sequence[EvalResult], *, is_json: bool) -> None:
    """Print results: one as an object or several as a list, or all in one table."""
    if is_json:
        from strop.evaluate import dump_result

        values = [dump_result(result) for result in results]
        output.give_json(values[0] if len(values) == 1 else values)
        return
    rows: list[tuple[object, ...]] = []
    for result in results:
        scored: dict[str, EvalResult | PartScores] = {result.full_name: result}
        scored |= {f"{result.full_name}/{label}": part for label, part in result.parts.items()}
        for name, part in scored.items():
            rows += [_score_row(name, kind, score) for kind, score in part.scores.items()]
            for k, estimate in part.pass_at_k.items():
                interval = f"{estimate.low:.1%} to {estimate.high:.1%}"
                rest = ["-"] * (len(COLUMNS) - 4)
                rows.append((name, f"pass@{k}", percent(estimate.value), interval, *rest))
    first = results[0]
    title = f"{len(results)} tasks, examples of {first.split.value}, step {first.step}"
    if len(results) == 1:
        title = f"{first.full_name}, {first.num_examples} examples of {first.split.value}, step {first.step}"
    output.give_table(COLUMNS, rows, title=title)
    for result in results:
        if result.truncation_suspect:
            cut = max(score.truncated_frac or 0.0 for score in result.scores.values())
            output.give(
                f"{result.full_name}: truncation suspect: {percent(cut)} of replies were cut at"
                f" {result.max_reply_tokens} tokens, and might have been right with more room"
            )
        if result.audit == "red":
            shows = f"`strop audit {result.task}` with its settings, or `strop audit RUN.toml`, shows why"
            output.give(f"{result.full_name}: unaudited: its audit is red; {shows}")
        elif result.audit is None:
            attack = f"`strop audit {result.task}` with its settings attacks its judge"
            output.say(f"{result.full_name}: not audited; {attack}")


def _score_row(task: str, name: str, score: Summary) -> tuple[object, ...]:
    return (
        task,
        name,
        percent(score.accuracy),
        f"{score.low:.1%} to {score.high:.1%}",
        percent(score.format_ok_frac),
        percent(score.truncated_frac),
        percent(score.verifier_error_frac),
        percent(score.timed_out_frac),
        score.num_unscored,
        score.num_rollouts,
    )


def percent(share: float | None) -> str:
    """Format a share; None becomes a dash."""
    return "-" if share is None else f"{share:.1%}"


def _rescore(output: Output, place: Path, settings: Sequence[str], *, is_json: bool) -> None:
    """Score stored replies again with the current task; nothing is generated."""
    from strop.run.evaluation import find_kept, rescore_kept

    rescored = []
    for folder in find_kept(place):
        stored = rescore_kept(folder, settings)
        output.say(f"{stored.result.full_name}: {stored.path}")
        rescored.append(stored)
    if is_json:
        output.give_json(
            [
                {
                    "path": str(stored.path),
                    "result": stored.result.model_dump(mode="json"),
                    "changes": [
                        dict(zip(CHANGED, _changed_row(*pair), strict=True)) for pair in stored.changed
                    ],
                }
                for stored in rescored
            ]
        )
        return
    for stored in rescored:
        _show_rescored(output, stored)


def _show_rescored(output: Output, stored: StoredRescored) -> None:
    result, changes = stored.result, stored.changed
    title = f"{result.full_name}, {result.num_examples} examples of {result.split.value}, step {result.step}"
    scores: dict[str, Summary] = {**result.scores}
    for label, part in result.parts.items():
        scores |= {f"{label}: {name}": score for name, score in part.scores.items()}
    rows = [
        (name, percent(score.accuracy), f"{score.low:.1%} to {score.high:.1%}", score.num_unscored)
        for name, score in scores.items()
    ]
    output.give_table(("replies", "accuracy", "95% interval", "unscored"), rows, title=title)
    output.give(f"judged by version {result.task_version}, replies of version {result.replies_version}")
    if not result.is_valid:
        output.give(result.verdict)
    output.give(f"{len(changes)} verdicts changed")
    if changes:
        output.give_table(CHANGED, [_changed_row(*pair) for pair in changes[:CHANGES_SHOWN]])
    if len(changes) > CHANGES_SHOWN:
        output.give(f"and {len(changes) - CHANGES_SHOWN} more; --json lists all")


def _changed_row(before: Rollout, after: Rollout) -> tuple[object, ...]:
    kind = "greedy" if before.sampling.temperature == 0.0 else f"sample {before.sample_index}"
    extracted = after.outcome.extracted
    return before.example.example_id, kind, before.outcome.reward, after.outcome.reward, extracted
