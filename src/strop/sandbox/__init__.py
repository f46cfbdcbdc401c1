"""Run untrusted programs in isolation, under limits.

`choose_backend` finds the backend that reaches a level of isolation on this host, or refuses. Its `create`
returns a fresh `Sandbox`: `exec` runs a program to its end, `start` and `open_shell` follow one that runs,
and `isolation` records the isolation reached. A failure of the program is a value in `ExecResult`; a failure
of the sandbox raises. `tasks` judges the results; `runtime` serves sandboxes to other machines.
"""

from strop.sandbox.choose import choose_backend, make_backend
from strop.sandbox.contract import (
    ExecKind,
    ExecResult,
    Guard,
    Isolation,
    IsolationLevel,
    JobOutput,
    Limits,
    Mount,
    SandboxSpec,
    SandboxStats,
    ShellResult,
)
from strop.sandbox.served import ServedJob as Job
from strop.sandbox.served import ServedSandbox as Sandbox
from strop.sandbox.served import ServedShell as Shell

__all__ = [
    "ExecKind",
    "ExecResult",
    "Guard",
    "Isolation",
    "IsolationLevel",
    "Job",
    "JobOutput",
    "Limits",
    "Mount",
    "Sandbox",
    "SandboxSpec",
    "SandboxStats",
    "Shell",
    "ShellResult",
    "choose_backend",
    "make_backend",
]
