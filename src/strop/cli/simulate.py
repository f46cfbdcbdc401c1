"""`strop simulate RUN.toml --engines N [key=value ...]`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from strop.cli.arguments import Json, Overrides, RunFile
from strop.cli.options import takes

if TYPE_CHECKING:
    from strop.cli.output import Output
    from strop.launch.simulate import Simulation


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulateArguments:
    """What `strop simulate` takes."""

    run_file: RunFile
    overrides: Overrides = None
    engines: Annotated[int | None, typer.Option(help="Engine replicas. none = placement.engines.")] = None
    learners: Annotated[
        int | None, typer.Option(help="Ranks that share the learner's weights. none = placement.learners.")
    ] = None
    hardware: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="One for each engine and each rank: h100, l4, ..."),
    ] = None
    steps: Annotated[int, typer.Option(help="Steps.")] = 20
    stragglers: Annotated[float, typer.Option(help="Share of engines that are slow in all they do.")] = 0.0
    straggler_factor: Annotated[float, typer.Option(help="How many times slower.")] = 3.0
    failures: Annotated[float, typer.Option(help="How often one engine dies, per hour.")] = 0.0
    repair: Annotated[float, typer.Option(help="Seconds after which it answers again.")] = 60.0
    solved: Annotated[float, typer.Option(help="Mean chance that a reply is right.")] = 0.5
    sigma: Annotated[float, typer.Option(help="Spread of log-normal reply lengths.")] = 0.6
    json: Json = False


@takes(SimulateArguments)
def simulate(context: typer.Context, given: SimulateArguments) -> None:
    """Try a run's schedule on simulated engines: throughput, staleness, and what is wasted."""
    from strop.hardware.accelerators import find_accelerator
    from strop.launch.simulate import SimulationWish, simulate_run
    from strop.spec import load_spec

    output: Output = context.obj
    resolved = load_spec(given.run_file, given.overrides or ())
    placement = resolved.spec.placement
    wish = SimulationWish(
        num_engines=placement.engines if given.engines is None else given.engines,
        num_learners=(placement.learners or 1) if given.learners is None else given.learners,
        num_steps=given.steps,
        straggler_frac=given.stragglers,
        straggler_factor=given.straggler_factor,
        failures_per_hour=given.failures,
        repair_s=given.repair,
        solved_frac=given.solved,
        reply_sigma=given.sigma,
    )
    accelerator = None if given.hardware is None else find_accelerator(given.hardware)
    found = simulate_run(resolved, wish, accelerator=accelerator)
    if given.json:
        output.give_json(asdict(found))
    else:
        show_simulation(output, found)


def show_simulation(output: Output, found: Simulation) -> None:
    """Print what came of a simulation as tables."""
    from strop.view.terminal import describe_duration

    rows = [
        ("steps", f"{found.num_steps} in {describe_duration(found.simulated_s)} of simulated time"),
        ("one step, median", describe_duration(found.step_s)),
        *((f"... {stage}", describe_duration(seconds)) for stage, seconds in found.seconds.items()),
        ("scored tokens", f"{found.scored_tokens_per_s:,.0f}/s"),
        ("engines", f"{found.num_engines}, busy {found.engine_busy_frac:.0%} of the time"),
        ("rows of the engines", f"{found.engine_rows_frac:.0%} taken"),
        ("learner", f"{found.num_learners} ranks, busy {found.learner_busy_frac:.0%}"),
        ("tokens wasted", f"{found.wasted_token_frac:.1%}"),
        ("rollouts lost", str(found.num_lost_rollouts)),
    ]
    output.give_table(("simulated", "value"), rows)
    output.give_table(
        ("staleness of a group, steps", "share"),
        [(str(age), f"{share:.1%}") for age, share in found.staleness.items()],
    )
    output.give_table(("groups", "number"), list(found.fates.items()))
    if found.engine_events:
        output.give_table(("engines", "times"), list(found.engine_events.items()))
