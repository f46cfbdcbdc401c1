"""`strop sft RUN.toml [key=value ...] [--new] [--from URI] [--gpus N]`."""

from __future__ import annotations

import typer

from strop.cli.options import takes
from strop.cli.train import TrainArguments, train_as_given


@takes(TrainArguments)
def sft(context: typer.Context, given: TrainArguments) -> None:
    """Fine-tune a model on demonstrations alone (train.terms = "sft"); all else as in `strop train`."""
    train_as_given(context.obj, given, is_sft=True)
