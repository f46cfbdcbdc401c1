"""`strop sample MODEL --task NAME` or `strop sample MODEL --prompt TEXT`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from strop.cli.arguments import AskSettings, Json, ModelName, SplitName
from strop.cli.output import Output

if TYPE_CHECKING:
    from strop.rollout import Rollout


def sample(
    context: typer.Context,
    model: ModelName,
    settings: AskSettings = None,
    task: Annotated[str | None, typer.Option(help="Task name; see `strop tasks ls`.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Prompt to use instead of a task.")] = None,
    num: Annotated[int, typer.Option(min=1, help="Number of examples, from the first.")] = 4,
    split: Annotated[SplitName, typer.Option(help="Split of the task.")] = SplitName.HELD_OUT,
    json: Json = False,
) -> None:
    """Show exact prompts, the replies of a model, and their rewards."""
    if (task is None) == (prompt is None):
        raise typer.BadParameter("give one of --task NAME and --prompt TEXT")
    from strop.rollout import Split
    from strop.run.inference import open_model, read_asking, read_prompt_asking, sample_prompt, sample_task
    from strop.tasks.failures import find_causes, find_failures, sum_up

    output: Output = context.obj
    words = settings or ()
    asking = read_prompt_asking(words) if task is None else read_asking(task, words, Split(split))
    opened = open_model(model)
    if opened.notice:
        output.say(opened.notice)
    if prompt is not None:
        said = sample_prompt(asking, opened, prompt)
        found = [
            {
                "prompt": said.prompt,
                "reply": said.completion.text,
                "finish_reason": said.completion.finish_reason.value,
            }
        ]
    else:
        rollouts = sample_task(asking, opened, num)
        if causes := find_causes(find_failures(rollout.outcome for rollout in rollouts)):
            output.say(f"strop: {sum_up(causes, len(rollouts))}")
        found = [describe_rollout(rollout) for rollout in rollouts]
    if json:
        output.give_json(found)
    else:
        show_samples(output, found)


def describe_rollout(rollout: Rollout) -> dict[str, Any]:
    """Return what a person wants to see of a rollout."""
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


def show_samples(output: Output, found: list[dict[str, Any]]) -> None:
    """Print prompts and replies as they are, and the rest of each in a line below."""
    from strop.view import make_harmless

    for number, entry in enumerate(found, start=1):
        output.give(f"--- {number} of {len(found)}: prompt")
        output.give(make_harmless(entry["prompt"]).rstrip("\n"))
        output.give("--- reply")
        output.give("(none)" if entry["reply"] is None else make_harmless(entry["reply"]))
        facts = {key: value for key, value in entry.items() if key not in ("prompt", "reply", "trace")}
        shown = [f"{key} {value}" for key, value in facts.items() if value is not None]
        output.give(f"--- {make_harmless(', '.join(shown))}\n")
