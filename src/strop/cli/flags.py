"""Options of the command line that are settings of the run file too, as the reader takes them."""

from __future__ import annotations

from pathlib import Path

from strop.spec.reader import Flag

_SETTINGS = {
    "gpus": "job.gpus",
    "train_gpus": "job.train_gpus",
    "infer_gpus": "job.infer_gpus",
    "eval_gpus": "job.eval_gpus",
    "nodes": "job.nodes",
    "cpus_per_gpu": "job.cpus_per_gpu",
    "cpus": "job.cpus",
    "mem": "job.memory",
    "time": "job.time_limit",
    "max_requeue": "job.max_requeue",
    "grace": "job.grace_s",
    "job_name": "name",
}
"""Option to setting."""
_PATHS = {"output_dir": "output.dir", "eval_config": "job.eval_config"}
"""Relative to where the command was given."""
_GPUS = ("gpus", "train_gpus", "infer_gpus", "eval_gpus")
"""A text where a backend may take a list of GPUs instead of a number."""


def to_flags(args: object) -> tuple[Flag, ...]:
    """Return the settings that a command's arguments give; an option that it does not have gives none."""
    settings = _SETTINGS | _PATHS
    named = {name: getattr(args, name, None) for name in settings}
    for name in _GPUS:
        if isinstance(text := named[name], str) and text.isdecimal():
            named[name] = int(text)
    flags = [
        Flag(
            key=settings[name],
            value=str(Path(value).absolute()) if name in _PATHS else value,
            name=f"--{name.replace('_', '-')}",
        )
        for name, value in named.items()
        if value is not None
    ]
    if getattr(args, "single_gpu", False):
        flags.append(Flag(key="job.single_gpu", value=True, name="--single-gpu"))
    if not getattr(args, "requeue", True):
        flags.append(Flag(key="job.max_requeue", value=0, name="--no-requeue"))
    return tuple(flags)
