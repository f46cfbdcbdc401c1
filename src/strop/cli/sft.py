"""`strop sft RUN.toml [key=value ...] [--new] [--from URI]`."""

from __future__ import annotations

import typer

from strop.cli.arguments import FromMirror, NewRun, Overrides, RunFile
from strop.cli.train import run_to_end, take_up_mirror


def sft(
    context: typer.Context,
    run_file: RunFile,
    overrides: Overrides = None,
    new: NewRun = False,
    from_uri: FromMirror = None,
) -> None:
    """Fine-tune a model on demonstrations alone (train.terms = "sft"); all else as in `strop train`."""
    from strop.launch.terms import require_sft
    from strop.spec import load_spec

    resolved = load_spec(run_file, overrides or ())
    require_sft(resolved)
    if from_uri is not None:
        resolved = take_up_mirror(context.obj, from_uri, resolved, is_new=new)
    run_to_end(context.obj, resolved, is_new=new)
