"""The backend of this machine: a job is a supervisor that outlives the terminal."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from strop.errors import CheckRefused, ConfigError, StoreError, StropError
from strop.hardware import clear_leftovers
from strop.hardware.allocation import GpuRequest, allocate_gpus
from strop.hardware.findings import Finding, Severity, find_refusal
from strop.hardware.process import find_descendants, list_running, start_detached
from strop.hardware.visible_devices import VISIBLE_DEVICES
from strop.launch.contract import JobPlan, JobRef, JobRequest, JobState, SchedulerStatus
from strop.launch.environment import clean_inherited
from strop.launch.job_dir import job_path_of, read_plan
from strop.launch.local.supervisor_files import answer_trials, forget_orders, order_end, read_identity
from strop.record.files import DirectoryRecord, LogSource, RecordFiles

KILL_LIMIT_S = 10.0
START_LIMIT_S = 20.0
"""Longest time until a supervisor has written its identity."""
_POLL_S = 0.02


class LocalBackend:
    """Implements `Backend` for this machine. GPUs are chosen at the start; there is no queue."""

    name = "local"

    def render(self, plan: JobPlan, request: JobRequest) -> JobPlan:
        """Add the supervisor's command. Sidecars run on the same node.

        Raises: ConfigError for several nodes.
        """
        if plan.resources.num_nodes > 1:
            raise ConfigError(
                f"job.nodes={plan.resources.num_nodes} at {plan.site}, which is one machine",
                allowed="one node here",
                next_step="set job.nodes=1, or name another site with --on",
            )
        if devices := request.site.profile.of_job().get("devices"):
            plan = replace(plan, details={**plan.details, "devices": list(devices)})
        roles = tuple(replace(role, nodes="first") if role.nodes == "cpu" else role for role in plan.roles)
        # The supervisor runs outside of what wraps its agents.
        python = sys.executable if plan.profile.get("wrap") else plan.python
        argv = (python, "-m", "strop.launch.local.supervisor", "--job", str(job_path_of(plan.home)))
        return replace(plan, argv=argv, roles=roles)

    def probe(self, plan: JobPlan) -> list[Finding]:
        """Check that the interpreter exists and the GPUs are free, because no queue waits for them."""
        findings = []
        setting, program = "python", plan.python
        if wrap := plan.profile.get("wrap"):
            setting, program = "wrap", wrap[0]
        if shutil.which(program) is None:
            findings = [
                Finding(
                    code=setting,
                    given=f"{program} is no program of this machine",
                    allowed="the interpreter of an environment that has strop, or what runs one",
                    next_step=f"correct `{setting}` in the site profile, or remove it",
                    severity=Severity.ERROR,
                )
            ]
        requested = {f"{role.name} {part}": num for role in plan.roles for part, num in role.gpus.items()}
        if requested:
            devices = plan.details.get("devices")
            inherited = ",".join(devices) if devices else os.environ.get(VISIBLE_DEVICES)
            try:
                allocate_gpus(GpuRequest(wanted=requested, inherited=inherited))
            except StropError as error:
                findings.append(find_refusal("gpus", error))
        return findings

    def submit(self, plan: JobPlan) -> JobRef:
        """Start the detached supervisor, and wait until it has written its identity."""
        job_path, job_id = job_path_of(plan.home), f"local-{secrets.token_hex(4)}"
        before = read_identity(job_path)
        forget_orders(job_path)
        environ = clean_inherited(os.environ, secrets=plan.environment.secrets)
        if plan.details.get("devices"):
            environ[VISIBLE_DEVICES] = ",".join(plan.details["devices"])
        python = shutil.which(plan.argv[0]) or plan.argv[0]
        argv = [python, *plan.argv[1:], "--job-id", job_id]
        started = start_detached(argv, job_path / "supervisor.log", environ, cwd=Path(plan.home))
        deadline = time.monotonic() + START_LIMIT_S
        while read_identity(job_path) == before and started is not None and started.is_alive():
            if time.monotonic() > deadline:
                # A refused job must not begin later.
                started.send(signal.SIGKILL)
                break
            time.sleep(_POLL_S)
        # It may have begun, and even ended, since the last check.
        if read_identity(job_path) == before:
            words = (job_path / "supervisor.log").read_text(errors="replace")[-2000:]
            raise CheckRefused(
                f"the supervisor of {plan.name} did not start: {words or 'it printed nothing'}",
                allowed="an environment in which `python -m strop.cli --version` works",
                next_step="mend the environment, then submit again",
            )
        return plan.refer_to(job_id)

    def recover(self, plan: JobPlan) -> JobRef | None:
        """Return the job whose supervisor has started in this directory."""
        supervisor = read_identity(job_path_of(plan.home))
        return None if supervisor is None else plan.refer_to(supervisor.job_id)

    def poll(self, refs: Sequence[JobRef]) -> Mapping[tuple[str, int], SchedulerStatus]:
        """Check whether each job's supervisor is alive. Jobs of other machines are left out."""
        answers: dict[tuple[str, int], SchedulerStatus] = {}
        for ref in refs:
            supervisor = read_identity(job_path_of(ref.home))
            if supervisor is None or not supervisor.is_here:
                continue
            state, raw, reason = JobState.RUNNING, "alive", ""
            if supervisor.cancelled_by:
                state, raw = JobState.CANCELLED, supervisor.cancelled_by
            elif not supervisor.process.is_alive():
                state, raw = JobState.FAILED, "gone"
                pid = supervisor.process.pid
                reason = f"its supervisor, process {pid}, has gone; submit it again with --resume"
            answer = SchedulerStatus(state=state, raw=raw, reason=reason, nodes=supervisor.host)
            answers |= answer_trials(ref, answer)
        return answers

    def open_record(self, ref: JobRef, trial: int) -> RecordFiles:
        """Return the trial's directory."""
        return DirectoryRecord(Path(read_plan(job_path_of(ref.home)).trials[trial].path))

    def open_logs(self, ref: JobRef, trial: int) -> LogSource | None:
        """Return None: logs are files of the record."""
        return None

    def stop(self, ref: JobRef, trial: int | None, *, grace_s: float) -> None:
        """Send TERM to the supervisor; without a grace kill it and all its processes.

        The supervisor ends one trial of several, and the others go on.
        """
        if trial is not None and len(read_plan(job_path_of(ref.home)).trials) > 1:
            order_end(job_path_of(ref.home), trial, grace_s=grace_s)
            return
        if grace_s > 0.0:
            self._signal(ref, signal.SIGTERM)
            return
        supervisor = read_identity(job_path_of(ref.home))
        descendants = find_descendants(supervisor.process.pid) if supervisor else []
        self._signal(ref, signal.SIGKILL)
        # Its agent dies with it; processes that the roles started in other sessions do not.
        deadline = time.monotonic() + KILL_LIMIT_S
        while list_running(descendants) and time.monotonic() < deadline:
            clear_leftovers()
            time.sleep(0.05)

    def list_tagged(self) -> Iterator[JobRef]:
        """Yield nothing: a job of this machine does not exist without its directory."""
        return iter(())

    def _signal(self, ref: JobRef, number: signal.Signals) -> None:
        supervisor = read_identity(job_path_of(ref.home))
        if supervisor is None or not supervisor.is_here:
            raise StoreError(
                f"job {ref.name} runs on {supervisor.host if supervisor else 'no machine yet'}",
                allowed="signals to jobs of this machine",
                next_step="run the command there",
            )
        supervisor.process.send(number)
