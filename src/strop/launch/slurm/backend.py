"""Slurm as a backend: its own programs on a login node, and the checks before a submission.

Covered: submission without another job's variables, one query for many jobs, cancelling and
preempting single trials of an array. Not covered: clusters reached by ssh or REST.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from strop.errors import CheckRefused, StoreError
from strop.hardware.findings import Finding, Severity, find_refusal
from strop.launch.contract import JobPlan, JobRef, JobRequest, SchedulerStatus
from strop.launch.job_dir import has_ref, job_path_of, read_ref
from strop.launch.slurm.options import SlurmSite
from strop.launch.slurm.queries import ClientReply, answer_for, ask_client, clean_environment, list_jobs
from strop.launch.slurm.script import (
    SCRIPT_NAME,
    is_array,
    plan_hash_in,
    require_fit,
    require_writable,
    write_script,
)
from strop.launch.slurm.states import ReportedJob, read_state
from strop.record.files import DirectoryRecord, LogSource, RecordFiles

_ACCEPTED = re.compile(r"^(?P<id>\d+)(?:;(?P<cluster>\S+))?$", re.MULTILINE)
_ACCOUNT_VARIABLES = ("SBATCH_ACCOUNT", "SLURM_ACCOUNT")
# Slurm's messages to strop's codes; the first match counts.
_REFUSALS = (
    ("dependency", "dependency"),
    ("invalid partition", "partition"),
    ("invalid account", "account"),
    ("invalid qos", "qos"),
    ("invalid generic resource", "gpus"),
    ("invalid feature", "constraint"),
    ("reservation", "reservation"),
    ("time limit", "time"),
    ("memory", "memory"),
    ("node name", "nodes"),
    ("node configuration", "resources"),
    ("node count", "nodes"),
)
_QUESTIONS = {
    "partition": "sinfo -o '%P %G %l'",
    "gpus": "sinfo -o '%P %N %G'",
    "resources": "sinfo -o '%P %D %G %c %m'",
    "account": "sacctmgr show assoc user=$USER format=account",
    "qos": "sacctmgr show qos format=name",
    "constraint": "sinfo -o '%N %f'",
    "reservation": "scontrol show reservation",
    "nodes": "sinfo -N",
    "time": "sinfo -o '%P %l'",
}


class SlurmBackend:
    """Implements `Backend` for one cluster."""

    name = "slurm"

    def __init__(self, profile: SlurmSite, *, site: str = "slurm") -> None:
        self.profile = profile
        self.site = site

    def render(self, plan: JobPlan, request: JobRequest) -> JobPlan:
        """Add the batch script and the command that submits it. Pure.

        Raises: ConfigError for an unknown setting, or one that Slurm cannot take.
        """
        options = request.site.profile
        assert isinstance(options, SlurmSite)  # The launcher chooses the backend by this very class.
        require_writable(options)
        require_fit(plan)
        script = write_script(plan, options)
        array = is_array(plan)
        # Escaped, so that Slurm finds no pattern in the path.
        escaped = plan.home.replace("%", "%%")
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
                f"--output={escaped}/job/slurm-{'%A_%a' if array else '%j'}.out",
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
        """Run `sbatch --test-only`, and check what it does not: folders, interpreter, image."""
        return probe_plan(plan, environ=_submit_environment(plan, os.environ))

    def submit(self, plan: JobPlan) -> JobRef:
        """Submit the script. A silent controller may have accepted it, so the job is looked up then.

        Raises: CheckRefused with sbatch's message; StoreError if the controller does not answer.
        """
        try:
            reply = ask_client(plan.argv, environ=_submit_environment(plan, os.environ))
        except StoreError:
            accepted = self.recover(plan)
            if accepted is not None:
                return accepted
            raise
        job = _ACCEPTED.search(reply.output)
        if reply.code or job is None:
            raise CheckRefused(
                f"sbatch refused {plan.name} with exit code {reply.code}: {reply.message}",
                allowed="a request that the cluster can meet",
                next_step=f"change it, or read {plan.home}/job/{SCRIPT_NAME}",
            )
        details = {"is_array": is_array(plan)} | ({"cluster": job["cluster"]} if job["cluster"] else {})
        return plan.refer_to(job["id"], details)

    def recover(self, plan: JobPlan) -> JobRef | None:
        """Return the newest job of this plan's home except that of its reference file, or None.

        Raises: StoreError if the controller does not answer.
        """
        noted = read_ref(job_path_of(plan.home)).job_id if has_ref(Path(plan.home)) else None
        jobs = [
            job
            for job in list_jobs()
            if job.work_path == plan.home
            and plan_hash_in(job.comment) == plan.plan_hash
            and not job.component
            and job.base_id != noted
        ]
        return self._ref_of(max(jobs, key=lambda job: int(job.base_id))) if jobs else None

    def poll(self, refs: Sequence[JobRef]) -> Mapping[tuple[str, int], SchedulerStatus]:
        """Return the status by job id and trial, in one query; forgotten jobs are missing.

        Raises: StoreError if it does not answer.
        """
        return answer_for([ref.job_id for ref in refs]) if refs else {}

    def open_record(self, ref: JobRef, trial: int) -> RecordFiles:
        """Return the trial's directory, which this machine shares with the cluster's nodes."""
        home = Path(ref.home)
        return DirectoryRecord(home / "members" / str(trial) if ref.details.get("is_array") else home)

    def open_logs(self, ref: JobRef, trial: int) -> LogSource | None:
        """Return None: logs are in the record."""
        return None

    def stop(self, ref: JobRef, trial: int | None, *, grace_s: float) -> None:
        """Cancel: the cluster sends TERM now and KILL after its KillWait, or without a grace KILL at once.

        An ended or unknown job is no error. Raises: StoreError if the controller does not answer;
        CheckRefused if it refuses.
        """
        how = () if grace_s > 0 else ("--signal=KILL",)
        argv = ("scancel", *how, _target(ref, trial))
        _require(ask_client(argv), shlex.join(argv))

    def list_tagged(self) -> Iterator[JobRef]:
        """Yield this user's jobs with strop's tag that have not ended.

        Raises: StoreError if the controller does not answer.
        """
        base_ids: set[str] = set()
        for job in list_jobs():
            is_ours = plan_hash_in(job.comment) is not None and not job.component
            if is_ours and job.base_id not in base_ids and not read_state(job.state)[0].is_terminal:
                base_ids.add(job.base_id)
                yield self._ref_of(job)

    def _ref_of(self, job: ReportedJob) -> JobRef:
        return JobRef(
            name=job.name,
            site=self.site,
            backend=self.name,
            home=job.work_path,
            job_id=job.base_id,
            plan_hash=plan_hash_in(job.comment) or "",
            submitted_at=job.submitted_at or time.time(),
            # Only in a job of one trial is the home the trial's directory.
            details={"is_array": (Path(job.work_path) / "members").is_dir()},
        )


def _submit_environment(plan: JobPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return sbatch's environment: no variables of another job, but the account of the user's shell."""
    account = next((environ[name] for name in _ACCOUNT_VARIABLES if environ.get(name)), None)
    variables = {} if plan.details.get("account") or account is None else {"SBATCH_ACCOUNT": account}
    return clean_environment(environ, secrets=plan.environment.secrets) | variables


def _target(ref: JobRef, trial: int | None) -> str:
    return f"{ref.job_id}_{trial}" if trial is not None and ref.details.get("is_array") else ref.job_id


def _require(reply: ClientReply, what: str) -> None:
    if reply.code:
        raise CheckRefused(
            f"{what} failed with {reply.code}: {reply.message}",
            allowed="a job of yours on this cluster",
            next_step="look at it with squeue",
        )


# Checks without effects. `sbatch --test-only` checks partitions, counts of GPUs and nodes, types and memory,
# but not folders, and an account only with a database (Slurm 22.05).


def probe_plan(plan: JobPlan, *, environ: Mapping[str, str]) -> list[Finding]:
    """Return all findings about a plan, without effects; a check that cannot run is a finding too."""
    findings = [*_check_request(plan, environ), *_check_account(plan, environ)]
    home = Path(plan.home)
    # The submission creates the folder and that of the logs: Slurm starts no job whose log it cannot open.
    nearest = next(path for path in (home, *home.parents) if path.exists())
    if not home.is_absolute():
        problem = f"run folder {home} is relative"
        findings.append(_missing("home", problem, "an absolute path", "give --output-dir"))
    elif not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        why = f"{nearest} is {'not writable' if nearest.is_dir() else 'a file'}"
        problem, allowed = (
            f"run folder {home} cannot be made: {why}",
            "a folder on a disk that the nodes share",
        )
        findings.append(_missing("home", problem, allowed, "give another --output-dir"))
    image = str(plan.details.get("image") or "")
    is_file = bool(image) and (image.endswith((".sqsh", ".sif")) or image.startswith(("/", "./")))
    if image and image.endswith(".sqsh") and "/" not in image:
        problem, allowed = (
            f"image {image} would be read as a name in a registry",
            "a path with a slash for a file",
        )
        findings.append(_missing("image", problem, allowed, f"write ./{image}, or the whole path"))
    elif is_file and not Path(image).exists():
        problem = f"image {image} is not here"
        findings.append(_missing("image", problem, "a file that the nodes see", "build or copy it"))
    elif image and not is_file:
        problem = f"whether the nodes can get image {image} is not seen from here"
        findings.append(_unknown("image", problem, "try one node"))
    elif not image and shutil.which(plan.python) is None:
        problem, allowed = f"interpreter {plan.python} is not here", "one that login node and nodes share"
        findings.append(
            _missing("python", problem, f"{allowed}, with strop installed", "set python in the site profile")
        )
    return findings


def _check_request(plan: JobPlan, environ: Mapping[str, str]) -> list[Finding]:
    # The script goes through standard input, because its folder does not exist yet.
    argv = ("sbatch", "--test-only", "--export=ALL", "--chdir=/", "--output=/dev/null")
    try:
        reply = ask_client(argv, environ=environ, stdin=plan.files[SCRIPT_NAME])
    except StoreError as error:
        return [find_refusal("scheduler", error, severity=Severity.UNKNOWN)]
    if reply.code == 0:
        return []
    lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in reply.errors.splitlines()]
    words = "; ".join(filter(None, lines)) or f"exit code {reply.code}"
    if "presently disabled" in words and "--dependency=" in plan.files[SCRIPT_NAME]:
        # Slurm says no more than this if the other job has failed already.
        words = f"a dependency can never be met ({words})"
    code = next((code for pattern, code in _REFUSALS if pattern in words.lower()), "scheduler")
    question = _QUESTIONS.get(code)
    return [
        Finding(
            code=code,
            given=f"sbatch would refuse {plan.name}: {words}",
            allowed="what the cluster has" + (f", as {question} says" if question else ""),
            next_step="change the option of the job, or the site profile",
        )
    ]


def _check_account(plan: JobPlan, environ: Mapping[str, str]) -> list[Finding]:
    account = plan.details.get("account")
    if not account or shutil.which("sacctmgr", path=environ.get("PATH")) is None:
        return []
    argv = ("sacctmgr", "-n", "-P", "show", "assoc", f"user={plan.user}", "format=account")
    try:
        reply = ask_client(argv, environ=environ)
    except StoreError as error:
        return [find_refusal("account", error, severity=Severity.UNKNOWN)]
    if reply.code:
        problem = f"whether account {account} exists is unknown: {reply.message}"
        return [_unknown("account", problem, "go on")]
    accounts = sorted(set(reply.output.split()))
    if account in accounts:
        return []
    return [
        Finding(
            code="account",
            given=f"account {account} is none of user {plan.user}",
            allowed=", ".join(accounts) or "none at all",
            next_step="name one of these with site.account",
        )
    ]


def _missing(code: str, problem: str, allowed: str, next_step: str) -> Finding:
    return Finding(code=code, given=problem, allowed=allowed, next_step=next_step)


def _unknown(code: str, problem: str, next_step: str) -> Finding:
    return Finding(
        code=code, given=problem, allowed="an answer", next_step=next_step, severity=Severity.UNKNOWN
    )
