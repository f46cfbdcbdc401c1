"""Requests and jobs of the tests here: real plans of fake roles."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strop.launch.attempts import read_attempts
from strop.launch.contract import (
    AttemptRecord,
    JobEnvironment,
    JobRef,
    JobRequest,
    JobState,
    JobStatus,
    Resources,
    RolePlan,
)
from strop.launch.launcher import Launcher
from strop.launch.options import Site
from strop.launch.slurm.backend import SlurmBackend
from strop.launch.slurm.options import SlurmSite
from strop.spec import load_spec
from tests.fixtures.waiting import wait_until

ROLE = Path(__file__).with_name("role.py")
LIMIT_S = 300.0
"""For one thing that a cluster does: ample, as other work may keep the machine busy."""
TIME_LIMIT_S = 900.0
"""Of jobs that are to end by themselves, or are ended."""
_SPEC = """
name = "{name}"
[model]
uri = "example/model"
[task]
name = "arithmetic"
[train]
steps = 1
[job]
preflight = "none"
max_requeue = {max_requeue}
grace_s = {grace_s}
"""


def a_role(*words: str, name: str = "train", nodes: str = "first", gpus: int = 0, **more: Any) -> RolePlan:
    """A fake role with the arguments of `role.py`."""
    argv = (sys.executable, str(ROLE), "{run}", *words)
    return RolePlan(name=name, argv=argv, nodes=nodes, gpus={"train": gpus} if gpus else {}, **more)


def a_request(
    root: Path,
    *roles: RolePlan,
    name: str = "run",
    max_requeue: int = 3,
    grace_s: float = 120.0,
    profile: SlurmSite | None = None,
    **changes: Any,
) -> JobRequest:
    """A request whose home is `root/<name>-1`."""
    root.mkdir(parents=True, exist_ok=True)
    spec_path = root / "run.toml"
    spec_path.write_text(_SPEC.format(name=name, max_requeue=max_requeue, grace_s=grace_s))
    site = Site(name="cluster", profile=profile or SlurmSite()).changed(**changes.pop("options", {}))
    request = JobRequest(
        resolved=load_spec(spec_path),
        site=site,
        command="train",
        resources=Resources(time_limit_s=TIME_LIMIT_S),
        roles=roles or (a_role(),),
        environment=JobEnvironment(),
        snapshot=None,
        project_path=root,
        home=str(root / f"{name}-1"),
        python=sys.executable,
        user="someone",
        submitted_at=1.7e9,
    )
    return replace(request, **changes)


@dataclass(frozen=True, kw_only=True)
class LoginNode:
    """A login node of the cluster, with a folder that everybody sees."""

    root: Path
    python: str
    """What nodes run agents with."""
    launcher: Launcher
    backend: SlurmBackend

    def request(self, *roles: RolePlan, **more: Any) -> JobRequest:
        """A request from this node."""
        return a_request(self.root, *roles, profile=self.backend.profile, python=self.python, **more)

    def submit(self, *roles: RolePlan, **more: Any) -> JobRef:
        """Submit a job."""
        return self.launcher.submit(self.request(*roles, **more)).ref

    def status(self, ref: JobRef) -> JobStatus:
        """The state of a job of one trial."""
        return self.launcher.status([ref])[0]

    def attempts(self, ref: JobRef, trial: int) -> list[AttemptRecord]:
        """What a trial wrote of its attempts."""
        return read_attempts(self.backend.open_record(ref, trial))

    def wait_for(
        self, ref: JobRef, *states: JobState, limit_s: float = LIMIT_S, trial: int = 0, attempt: int = 0
    ) -> JobStatus:
        """Wait until a trial is in one of these states, in this attempt or a later one."""
        deadline = time.monotonic() + limit_s
        while True:
            status = self.launcher.status([ref])[trial]
            number = status.attempt.number if status.attempt else 0
            if status.state in states and number >= attempt:
                return status
            log = "".join(path.read_text() for path in Path(ref.home).glob("job/slurm-*.out"))
            assert time.monotonic() < deadline, f"{status}\n{log}"
            time.sleep(0.5)

    def wait_for_step(self, ref: JobRef, *, trial: str = ".", attempt: int = 0) -> None:
        """Wait until the role of an attempt counts steps: it hears signals, and has something to save."""
        folder = Path(ref.home) / trial
        self.wait_until(lambda: list(folder.glob(f"counts-*-{attempt}-0")))

    def let_go(self, ref: JobRef, *trials: str) -> None:
        """Let held roles end, in all their lives."""
        for trial in trials or (".",):
            (Path(ref.home) / trial / "go").touch()

    def wait_until(self, what: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        """Wait until something is so."""
        wait_until(what, limit_s=limit_s, every_s=0.2)


def verdict(login: LoginNode, ref: JobRef, number: int = 0) -> dict[str, Any]:
    """What the batch shell wrote of an attempt; agents have ended some moments earlier."""
    path = Path(ref.home) / f"attempts/{ref.job_id}-{number}/verdict.json"
    login.wait_until(path.exists)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def slurm_log(ref: JobRef) -> str:
    """What the batch shell of every attempt of a job wrote."""
    return "".join(path.read_text() for path in sorted(Path(ref.home).glob("job/slurm-*.out")))


def seen(ref: JobRef, attempt: str, node: int = 0, trial: str = ".") -> dict[str, Any]:
    """What a role found around it."""
    path = Path(ref.home) / trial / f"seen-{attempt}-{node}.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def gpus(number: int, nodes: int = 1, **more: Any) -> Resources:
    """GPUs for a job that is to end by itself, or is ended."""
    return Resources(num_nodes=nodes, gpus_per_node=number, cpus_per_gpu=1, time_limit_s=TIME_LIMIT_S, **more)


ALL_ENDS: Sequence[JobState] = tuple(state for state in JobState if state.is_terminal)
