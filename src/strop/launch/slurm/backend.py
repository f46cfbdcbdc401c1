"""The seam of backends, kept by Slurm's own programs on a login node.

Covered: submission without what another job left in the environment, one query for many jobs, cancelling and
preempting single members of an array, requeueing from outside. Not covered: clusters reached by ssh or REST.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from strop.errors import CheckRefused, StoreError, explain_refusal
from strop.hardware.findings import Finding
from strop.launch.contract import Answer, JobPlan, JobRef, JobRequest, JobState
from strop.launch.home import has_ref, job_path_of, read_ref
from strop.launch.slurm.clients import Said, ask_client, clean_environment
from strop.launch.slurm.options import (
    fit_plan,
    is_array,
    plan_hash_in,
    read_options,
)
from strop.launch.slurm.outputs import SeenJob
from strop.launch.slurm.probes import probe_plan
from strop.launch.slurm.queries import answer_for, list_jobs
from strop.launch.slurm.script import SCRIPT_NAME, write_script
from strop.launch.slurm.states import read_state
from strop.record.files import DirectoryRecord, LogSource, RecordFiles
from strop.spec.site import SlurmSite

_ACCEPTED = re.compile(r"^(?P<id>\d+)(?:;(?P<cluster>\S+))?$", re.MULTILINE)
_ACCOUNT_VARIABLES = ("SBATCH_ACCOUNT", "SLURM_ACCOUNT")


class SlurmBackend:
    """Jobs of one cluster."""

    name = "slurm"

    def __init__(self, profile: SlurmSite, *, site: str = "slurm") -> None:
        self.profile = profile
        self.site = site

    def complete(self, plan: JobPlan, request: JobRequest) -> JobPlan:
        """Add the batch script and the command that submits it. Pure.

        Raises: ConfigError for a setting that is none, or that Slurm could not be given.
        """
        options = read_options(request, self.profile)
        plan = fit_plan(plan, options)
        script = write_script(plan, options, self.profile)
        array = is_array(plan)
        notices = list(plan.notices)
        if plan.resources.time_limit_s is None:
            notices.append(
                "no time limit is asked for, so the partition's own counts, and its end may come unannounced"
            )
        return replace(
            plan,
            files={**plan.files, SCRIPT_NAME: script},
            argv=(
                *("sbatch", "--parsable", "--export=ALL"),
                f"--chdir={plan.home}",
                f"--output={_escape_pattern(plan.home)}/job/slurm-{'%A_%a' if array else '%j'}.out",
                f"{plan.home}/job/{SCRIPT_NAME}",
            ),
            details={
                **plan.details,
                "is_array": array,
                "account": options.account,
                "image": options.container_image,
            },
            notices=tuple(notices),
        )

    def probe(self, plan: JobPlan) -> list[Finding]:
        """Ask `sbatch --test-only`, and look for what that does not see: folders, interpreter, image."""
        return probe_plan(plan, environ=_submit_environment(plan, os.environ))

    def hand_over(self, plan: JobPlan) -> JobRef:
        """Submit the script. A silent controller may have taken it all the same, so it is looked for.

        Raises: CheckRefused with sbatch's own words; StoreError if nobody answers.
        """
        try:
            said = ask_client(plan.argv, environ=_submit_environment(plan, os.environ))
        except StoreError:
            accepted = self.find_accepted(plan)
            if accepted is not None:
                return accepted
            raise
        found = _ACCEPTED.search(said.output)
        if said.code or found is None:
            raise CheckRefused(
                explain_refusal(
                    f"sbatch refused {plan.name} with exit code {said.code}: {_words(said)}",
                    allowed="a request that the cluster can meet",
                    next_step=f"change it, or read {plan.home}/job/{SCRIPT_NAME}",
                )
            )
        details = {"is_array": is_array(plan)} | ({"cluster": found["cluster"]} if found["cluster"] else {})
        return self._ref(plan.name, plan.home, found["id"], plan.plan_hash, plan.submitted_at, details)

    def find_accepted(self, plan: JobPlan) -> JobRef | None:
        """Return the newest job in this plan's home that nobody has noted yet, or None.

        Raises: StoreError if the controller does not answer.
        """
        noted = read_ref(job_path_of(plan.home)).job_id if has_ref(Path(plan.home)) else None
        found = [
            job
            for job in list_jobs()
            if job.work_path == plan.home
            and plan_hash_in(job.comment) == plan.plan_hash
            and not job.component
            and job.base_id != noted
        ]
        return self._ref_of(max(found, key=lambda job: int(job.base_id))) if found else None

    def ask(self, refs: Sequence[JobRef]) -> Mapping[tuple[str, int], Answer]:
        """Return what the controller says, by job id and member, in one query; what it forgot is missing.

        Raises: StoreError if it does not answer.
        """
        return answer_for([ref.job_id for ref in refs]) if refs else {}

    def open_record(self, ref: JobRef, member: int) -> RecordFiles:
        """Return the member's directory, which the cluster's nodes and this one share."""
        home = Path(ref.home)
        return DirectoryRecord(home / "members" / str(member) if ref.details.get("is_array") else home)

    def open_logs(self, ref: JobRef, member: int) -> LogSource | None:
        """Return None: logs are in the record."""
        return None

    def stop(self, ref: JobRef, member: int | None, *, grace_s: float) -> None:
        """Cancel: the cluster sends TERM now, and KILL after its own KillWait; without a grace KILL at once.

        A job that has ended, or that nobody knows, is no error. Raises: StoreError if the controller does not
        answer; CheckRefused if it says no.
        """
        how = () if grace_s > 0 else ("--signal=KILL",)
        argv = ("scancel", *how, _target(ref, member))
        _require(ask_client(argv), shlex.join(argv))

    def preempt(self, ref: JobRef, member: int) -> str:
        """Send the signal that announces a preemption to the steps, as `--signal` does."""
        target = _target(ref, member)
        argv = ("scancel", f"--signal={self.profile.signal}", target)
        _require(ask_client(argv), shlex.join(argv))
        return f"SIG{self.profile.signal}"

    def requeue(self, ref: JobRef, member: int = 0) -> None:
        """Let a failed member live again from outside: a node that vanished could not do it itself.

        Raises: CheckRefused unless it has failed or ran out of time: Slurm itself would run a completed job
        again, and kill a running one. StoreError if the controller does not answer.
        """
        answer = self.ask([ref]).get((ref.job_id, member))
        if answer is None or answer.state not in (JobState.FAILED, JobState.TIMEOUT):
            found = "unknown to the cluster" if answer is None else f"{answer.state} ({answer.raw})"
            raise CheckRefused(
                explain_refusal(
                    f"job {_target(ref, member)} is {found}",
                    allowed="requeueing a job that failed or ran out of time, and that Slurm still knows",
                    next_step="submit the run again, and it goes on from its last checkpoint",
                )
            )
        _require(ask_client(("scontrol", "requeue", _target(ref, member))), "scontrol requeue")

    def list_tagged(self) -> Iterator[JobRef]:
        """Yield this user's jobs that carry our tag and are not over.

        Raises: StoreError if the controller does not answer.
        """
        seen: set[str] = set()
        for job in list_jobs():
            is_ours = plan_hash_in(job.comment) is not None and not job.component
            if is_ours and job.base_id not in seen and not read_state(job.state)[0].is_terminal:
                seen.add(job.base_id)
                yield self._ref_of(job)

    def _ref_of(self, job: SeenJob) -> JobRef:
        plan_hash = plan_hash_in(job.comment) or ""
        # A job of one member is the only one whose home is the member's own.
        details = {"is_array": (Path(job.work_path) / "members").is_dir()}
        submitted_at = job.submitted_at or time.time()
        return self._ref(job.name, job.work_path, job.base_id, plan_hash, submitted_at, details)

    def _ref(
        self,
        name: str,
        home: str,
        job_id: str,
        plan_hash: str,
        submitted_at: float,
        details: Mapping[str, object],
    ) -> JobRef:
        return JobRef(
            name=name,
            site=self.site,
            backend=self.name,
            home=home,
            job_id=job_id,
            plan_hash=plan_hash,
            submitted_at=submitted_at,
            details=details,
        )


def _submit_environment(plan: JobPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what sbatch gets: nothing of another job, and the account that the user's shell names."""
    account = next((environ[name] for name in _ACCOUNT_VARIABLES if environ.get(name)), None)
    named = {} if plan.details.get("account") or account is None else {"SBATCH_ACCOUNT": account}
    return clean_environment(environ, secrets=plan.environment.secrets) | named


def _target(ref: JobRef, member: int | None) -> str:
    return f"{ref.job_id}_{member}" if member is not None and ref.details.get("is_array") else ref.job_id


def _escape_pattern(path: str) -> str:
    """Return a path in which Slurm finds no pattern."""
    return path.replace("%", "%%")


def _words(said: Said) -> str:
    return (said.errors.strip() or said.output.strip()) or "no word"


def _require(said: Said, what: str) -> None:
    if said.code:
        raise CheckRefused(
            explain_refusal(
                f"{what} failed with {said.code}: {_words(said)}",
                allowed="a job of yours on this cluster",
                next_step="look at it with squeue",
            )
        )
