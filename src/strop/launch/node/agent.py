"""One node of one attempt, from its lease to its exit code.

The order is: folders and log, fence, leftovers of dead runs, lease, start record, code, preflight,
environment, roles, end. The exit code is written last, after all processes have ended: once it exists, the
node is free. A kill of the agent kills its roles; processes that outlive them carry the lease's id, and the
next agent of this user on the machine ends them.

Messages go to `<node>/agent.log` and to standard error.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import print_exception
from typing import Any, TextIO

from strop.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    CheckRefused,
    NodeRefused,
    StropError,
)
from strop.hardware import clear_leftovers
from strop.hardware.allocation import Allocation, lease_gpus
from strop.hardware.leases import Lease, end_processes
from strop.hardware.leftovers import MEMORY_PREFIX, clear_directories, own_dir
from strop.hardware.preflight import PreflightRequest, require_ready
from strop.hardware.process import become_subreaper, reap_orphans
from strop.io.atomic import write_bytes_atomically
from strop.launch.attempts import read_attempts
from strop.launch.contract import JobPlan, Need, RolePlan, is_place
from strop.launch.environment import read_environment
from strop.launch.job_dir import CODE_NAME, read_plan
from strop.launch.node.environment import (
    NodeTask,
    Workplace,
    build_environment,
    request_devices,
    require_names,
)
from strop.launch.node.roles import (
    NodeEnd,
    PeerWatch,
    Role,
    StallWatch,
    StopRequest,
    start_roles,
    watch_roles,
)
from strop.launch.snapshot import unpack_code
from strop.record import RunDir, point_latest
from strop.record.fence import raise_fence
from strop.record.files import DirectoryRecord
from strop.record.run_dir import STATE_NAME

MIN_FREE_BYTES = 256 << 20
"""Free bytes on the run's disk, enough for the logs of the attempt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Node:
    """The context of an agent while its roles run."""

    task: NodeTask
    plan: JobPlan
    roles: tuple[RolePlan, ...]
    """The roles on this node."""
    log: TextIO

    def say(self, text: str) -> None:
        """Write a message to the log and to standard error."""
        _say(self.task, self.log, text)


def _say(task: NodeTask, log: TextIO, text: str) -> None:
    stamp = time.strftime("%H:%M:%S", time.gmtime())
    for stream in (log, sys.stderr):
        # A full disk takes no line, and the end is still recorded.
        with suppress(OSError):
            print(f"{stamp} node {task.node}: {text}", file=stream, flush=True)


def run_node(task: NodeTask) -> int:
    """Run one node of an attempt to its end; return its exit code, which is also in `exit/<node>`.

    Raises no StropError: it becomes an exit code and a cause on disk.
    """
    stop = StopRequest(grace_s=task.grace_s, term_grace_s=task.term_grace_s)
    stop.install()
    task.log_path.mkdir(parents=True, exist_ok=True)
    task.exit_path.parent.mkdir(exist_ok=True)
    log_path = task.log_path / "agent.log"
    with (
        log_path.open("a", encoding="utf-8", errors="backslashreplace") as log,
        _EndRecord(task, log, stop) as record,
    ):
        record.end = _run(task, log, stop)
    return record.end.exit_code


class _EndRecord:
    """Writes an exit code to disk in any case, because peers and schedulers wait for it."""

    def __init__(self, task: NodeTask, log: TextIO, stop: StopRequest) -> None:
        self.end = NodeEnd(exit_code=EXIT_FAILED, cause="", role="agent")
        self._task = task
        self._log = log
        self._stop = stop

    def __enter__(self) -> _EndRecord:
        """Begin."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        """Write the node's end. An exception becomes its cause and is not raised."""
        if isinstance(error, StropError):
            self.end = NodeEnd(exit_code=error.exit_code, cause=str(error), role="agent")
        elif error is not None:
            print_exception(error, file=self._log)
            cause = (
                f"unexpected {type(error).__name__} in the agent: {error}; the traceback is in"
                f" {self._task.log_path / 'agent.log'}"
            )
            self.end = NodeEnd(exit_code=EXIT_FAILED, cause=cause, role="agent")
        if self.end.cause:
            _say(self._task, self._log, self.end.cause)
        task, end = self._task, self.end
        # First the cause, last the exit code.
        _write_json(
            task.attempt_path / f"end-{task.node}.json",
            {
                "node": task.node,
                "exit_code": end.exit_code,
                "role": end.role,
                "cause": end.cause,
                "is_node_at_fault": isinstance(error, NodeRefused),
                "signal": self._stop.signal_name,
                "ended_at": time.time(),
            },
        )
        write_bytes_atomically(task.exit_path, str(end.exit_code).encode())
        return error is None or isinstance(error, Exception)


def _run(task: NodeTask, log: TextIO, stop: StopRequest) -> NodeEnd:
    plan = read_plan(task.job_path)
    earlier = [one for one in read_attempts(DirectoryRecord(task.trial_path)) if one.number < task.number]
    if any(one.exit_code == EXIT_DONE for one in earlier):
        # Schedulers start jobs again that have succeeded, after a loss of their first node for example.
        _say(task, log, "an earlier attempt has finished this run")
        return NodeEnd(exit_code=EXIT_DONE, cause="")
    roles = tuple(role for role in plan.roles if is_place(role.nodes, task.node, task.part))
    node = _Node(task=task, plan=plan, roles=roles, log=log)
    become_subreaper()
    if task.node == 0:
        raise_fence(task.trial_path, task.number, task.attempt)
        point_latest(task.trial_path, task.attempt)
    if ended := clear_leftovers():
        node.say(f"dead runs had left processes, which were ended: {', '.join(map(str, ended))}")
    with ExitStack() as undo:
        try:
            request = request_devices(plan, node.roles, os.environ)
            lease, allocation = undo.enter_context(lease_gpus(request))
        except CheckRefused as refusal:
            raise NodeRefused(str(refusal)) from refusal
        for notice in allocation.notices:
            node.say(notice)
        _write_start(node, allocation, lease)
        try:
            with own_dir(Path(tempfile.gettempdir()) / f"{MEMORY_PREFIX}{lease.lease_id}") as work_path:
                return _run_roles(node, allocation, lease, work_path, stop)
        finally:
            ended, surviving = end_processes({lease.lease_id})
            if ended:
                node.say(
                    f"ended {len(ended)} processes that the roles had left: {', '.join(map(str, ended))}"
                )
            for path in clear_directories():
                node.say(f"removed {path}, whose process had ended")
            if surviving:
                names = ", ".join(map(str, surviving))
                node.say(f"processes {names} did not end, and are left to the next agent")


def _run_roles(
    node: _Node, allocation: Allocation, lease: Lease, work_path: Path, stop: StopRequest
) -> NodeEnd:
    task, plan = node.task, node.plan
    (work_path / "tmp").mkdir()
    code_path = Path(plan.details.get("project_path") or task.trial_path)
    if plan.code_sha256 is not None:
        code_path = work_path / "code"
        unpack_code(task.job_path / CODE_NAME, code_path, plan.code_sha256)
    check_node(plan, task, allocation, node.say)
    if stop.signal_name:
        # Stopped before anything began: the last attempt's checkpoint is the state.
        return NodeEnd(exit_code=EXIT_INTERRUPTED, cause="")
    place = Workplace(
        task=task,
        plan=plan,
        allocation=allocation,
        lease=lease.variables,
        work_path=work_path,
        code_path=code_path,
    )
    environments = {}
    for planned in node.roles:
        job_variables = read_environment(task.job_path, planned.name)
        environments[planned.name] = build_environment(
            planned, place, job_variables=job_variables, environ=os.environ
        )
        require_names(planned, environments[planned.name], list(plan.environment.variables))
    filled = [_fill(role, task, code_path) for role in node.roles]
    roles = start_roles(filled, task.log_path, environments, cwd=code_path)
    node.say(f"started {', '.join(f'{role.name} (process {role.child.pid})' for role in roles)}")
    return _watch(node, roles, stop)


def _watch(node: _Node, roles: list[Role], stop: StopRequest) -> NodeEnd:
    is_sidecar = not any(role.plan.need is Need.SUCCESS for role in roles)
    names = [role.name for role in roles]
    # Sidecars may be silent while the run goes on, and their node may not see the run's record.
    stall = None if is_sidecar else StallWatch(node.plan, node.task, names)
    with PeerWatch(node.task, is_sidecar=is_sidecar) as peers:

        def check() -> NodeEnd | None:
            reap_orphans([role.child.pid for role in roles])
            return peers.check() or (stall.check() if stall else None)

        end = watch_roles(roles, stop, check=check, say=node.say)
    if end.exit_code == EXIT_DONE and not is_sidecar and _is_unfinished(node.task.trial_path):
        # Code that the run calls can end its process with any exit code.
        cause = (
            f"role {end.role} ended with exit code 0, and the run's record has no end: its steps are not done"
        )
        return replace(end, exit_code=EXIT_FAILED, cause=cause)
    return end


def _is_unfinished(trial_path: Path) -> bool:
    """Whether a trial has a run's record, and the run is not finished."""
    return (trial_path / STATE_NAME).is_file() and not RunDir.open(trial_path).is_finished


def _fill(role: RolePlan, task: NodeTask, code_path: Path) -> RolePlan:
    """Replace the names in `RolePlan.argv`; a command may contain other braces, unlike for str.format."""
    places = {"run": task.trial_path, "job": task.job_path, "code": code_path, "logs": task.log_path}
    words = tuple(word.replace("{node}", str(task.node)) for word in role.argv)
    for name, path in places.items():
        words = tuple(word.replace(f"{{{name}}}", str(path)) for word in words)
    return replace(role, argv=words)


def check_node(
    plan: JobPlan,
    task: NodeTask,
    allocation: Allocation,
    say: Callable[[str], None],
) -> None:
    """Run the preflight of this node at the plan's level.

    Raises: NodeRefused naming problem and node, CheckRefused for a fault of the job (both exit code 76).
    """
    if plan.preflight == "none":
        return
    request = PreflightRequest(
        run_path=task.trial_path,
        allocation=allocation if allocation.roles else None,
        computes=plan.preflight == "compute",
        node=host_name(),
        disk_need_bytes=MIN_FREE_BYTES,
        num_nodes=plan.resources.num_nodes if task.part == "main" else 1,
    )
    for finding in require_ready(request):
        say(f"{finding.code}: {finding}")


def host_name() -> str:
    """Return the scheduler's name of this node, else its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _write_start(node: _Node, allocation: Allocation, lease: Lease) -> None:
    """Write this node's start record."""
    task = node.task
    _write_json(
        task.attempt_path / f"agent-{task.node}.json",
        {
            "attempt": task.attempt,
            "number": task.number,
            "node": task.node,
            "num_nodes": task.num_nodes,
            "part": task.part,
            "host": host_name(),
            "pid": os.getpid(),
            "lease": lease.lease_id,
            "started_at": time.time(),
            "roles": [role.name for role in node.roles],
            "devices": allocation.record(),
            "code_sha256": node.plan.code_sha256,
            "python": sys.version.split()[0],
        },
    )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_bytes_atomically(path, json.dumps(content, indent=1).encode())
