"""`strop eval MODEL --task NAME --split held_out|train [key=value ...]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from strop.cli.arguments import AskSettings, Json, ModelName, SplitName
from strop.cli.output import Output

if TYPE_CHECKING:
    from strop.evaluate import EvalResult


def evaluate(
    context: typer.Context,
    model: ModelName,
    task: Annotated[str, typer.Option(help="Which task; `strop tasks ls` lists them.")],
    # No default: a score without its split has no meaning (EVA-1).
    split: Annotated[SplitName, typer.Option(help="Which examples.")],
    settings: AskSettings = None,
    num_examples: Annotated[
        int | None, typer.Option(min=1, help="Examples used, from the first; all by default.")
    ] = None,
    num_samples: Annotated[
        int | None, typer.Option(min=1, help="Sampled replies per example, beside the greedy one.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure how often a model solves a task, with a 95% interval."""
    from strop.evaluate import refuse_invalid
    from strop.launch.inference import evaluate_here, open_model, read_asking
    from strop.rollout import Split

    output: Output = context.obj
    asking = read_asking(task, settings or (), Split(split))
    opened = open_model(model)
    if opened.notice:
        output.say(opened.notice)
    result = evaluate_here(asking, opened, num_examples=num_examples, num_samples=num_samples)
    if json:
        output.give_json(result.model_dump(mode="json"))
    else:
        show_result(output, result)
    # After it was shown: the numbers explain the refusal.
    refuse_invalid(result)


def show_result(output: Output, result: EvalResult) -> None:
    """Print a result as a table."""
    scores = {"greedy": result.greedy, "sampled": result.sampled}
    rows = [
        (
            name,
            "-" if score.accuracy is None else f"{score.accuracy:.1%}",
            f"{score.low:.1%} to {score.high:.1%}",
            "-" if score.truncated_frac is None else f"{score.truncated_frac:.1%}",
            score.num_unscored,
            score.num_rollouts,
        )
        for name, score in scores.items()
        if score is not None
    ]
    title = f"{result.task}, {result.num_examples} examples of {result.split.value}, step {result.step}"
    columns = ("replies", "accuracy", "95% interval", "cut", "unscored", "rollouts")
    output.give_table(columns, rows, title=title)
