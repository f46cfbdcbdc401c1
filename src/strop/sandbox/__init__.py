"""Runs untrusted programs in private places with limits; their results are values.

`choose_backend` finds the backend that reaches a level of isolation on this host, or refuses; its
`create` returns a fresh `Sandbox`, whose `exec` runs a program, whose `start` and `open_shell` follow one,
and whose `isolation` says what was reached. What a program does wrong is a value in `ExecResult`; what the
sandbox does wrong raises. `tasks` judges what ran; `runtime` serves sandboxes to other machines.
"""

from strop.sandbox.choose import choose_backend, make_backend
from strop.sandbox.contract import (
    ExecKind,
    ExecResult,
    FrozenBy,
    Guard,
    Isolation,
    IsolationLevel,
    Limits,
    Mount,
    Sandbox,
    SandboxBackend,
    SandboxSpec,
    SandboxStats,
    Snapshot,
)
from strop.sandbox.following import Job, JobOutput, Shell, ShellResult

__all__ = [
    "ExecKind",
    "ExecResult",
    "FrozenBy",
    "Guard",
    "Isolation",
    "IsolationLevel",
    "Job",
    "JobOutput",
    "Limits",
    "Mount",
    "Sandbox",
    "SandboxBackend",
    "SandboxSpec",
    "SandboxStats",
    "Shell",
    "ShellResult",
    "Snapshot",
    "choose_backend",
    "make_backend",
]
