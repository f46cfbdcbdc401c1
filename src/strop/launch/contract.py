"""The types of jobs, and the seam that backends implement.

A *plan* holds everything to submit, and is made without effects. A *job* is a plan that a scheduler
accepted; it has one *trial*, or one for each combination of a sweep. An *attempt* is one start of a
trial: after a preemption the same job is requeued. Each node of an attempt has one *agent*, which starts
the *roles*. The job directory is the field `home`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    # An agent of a node, a supervisor and a watcher start with each job, and have no use for run files.
    from strop.hardware.findings import Finding
    from strop.launch.options import Site
    from strop.record.files import LogSource, RecordFiles
    from strop.spec import ResolvedSpec
    from strop.spec.eval_file import EvalFile


class JobState(StrEnum):
    """The state of a job. An unrecognized state is `unknown`, which neither ends nor starts anything."""

    QUEUED = "queued"
    """Accepted, without resources yet."""
    STARTING = "starting"
    """Has resources; its first node has not written its start record."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Stopped from outside, and waiting to be requeued."""
    SUCCEEDED = "succeeded"
    """Every agent ended with 0. Being stopped is never success."""
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    """Ended by its time limit, and not requeued."""
    UNKNOWN = "unknown"
    """No source knows the state."""

    @property
    def is_terminal(self) -> bool:
        """Whether the state is final unless a user acts."""
        return self in _TERMINAL


_TERMINAL = {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT}


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeSnapshot:
    """The working tree with uncommitted edits and untracked files. Made by `snapshot`."""

    project_path: Path
    files: tuple[str, ...]
    """Relative paths, sorted."""
    sha256: str
    """Over names, modes and contents."""
    size_bytes: int
    commit: str | None
    """HEAD; None without git."""
    diffstat: str
    """Output of `git diff --stat` against the commit, with the names of untracked files."""


class VariableSource(StrEnum):
    """The source of a job's environment variable; a later member overrides an earlier one."""

    SITE = "site profile"
    DOTENV = ".env"
    SUBMITTER = "environment of the submitter"
    FLAG = "flag"
    LAUNCHER = "launcher"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEnvironment:
    """The variables that every role of a job gets, and the names of its secrets."""

    variables: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    """Variable or secret name to the source of its value."""
    secrets: tuple[str, ...] = ()
    """Only names; the values are read at submission and kept in a 0600 file until the job ends."""
    secret_roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Secret to the roles that get it; a secret without an entry goes to every role."""


class Need(StrEnum):
    """What the end of a role means for its job. Exit codes 2 and 76 always end the job."""

    SUCCESS = "success"
    """The job is done when every such role has exited with 0, and fails with it."""
    PRESENCE = "presence"
    """A sidecar: the job fails with it, and an early exit with 0 is a failure too."""
    NOTHING = "nothing"
    """The job goes on without it: a node that only adds engines to a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolePlan:
    """One process of a job on a node."""

    name: str
    argv: tuple[str, ...]
    """`{run}`, `{job}`, `{code}`, `{logs}` and `{node}` are replaced by the directories of trial, job and
    code, of the node's logs, and by the node's number."""
    gpus: Mapping[str, int] = field(default_factory=dict)
    """GPUs of its node by purpose: `infer`, `train`."""
    nodes: str = "first"
    """`first`: node 0 of the main part; `all`: every node of it; `others`: all of them but node 0; `2-3`:
    nodes 2 and 3 of it; `cpu`: the nodes of the CPU part."""
    need: Need = Need.SUCCESS

    @property
    def num_gpus(self) -> int:
        """All its GPUs of the node."""
        return sum(self.gpus.values())


def is_place(nodes: str, node: int, part: str) -> bool:
    """Whether `RolePlan.nodes` includes a node, numbered over both parts; `part` is `main` or `cpu`."""
    if part == "cpu" or nodes == "cpu":
        return part == nodes
    first, hyphen, last = nodes.partition("-")
    if hyphen:
        return int(first) <= node <= int(last)
    return nodes in {"all", "others" if node else "first"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialPlan:
    """One run of a job: the only one, or one combination of a sweep."""

    index: int
    path: str
    """Its run directory, absolute as the site sees it."""
    overrides: tuple[str, ...] = ()
    """The settings of the sweep, as `key=value`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """The resources that a job requests."""

    num_nodes: int = 1
    gpus_per_node: int = 0
    is_whole_node: bool = False
    """Whether the job requests all GPUs of its nodes."""
    cpus_per_gpu: int | None = None
    cpus: int | None = None
    memory: str | None = None
    gpu_type: str | None = None
    time_limit_s: float | None = None
    num_cpu_nodes: int = 0
    """Additional nodes without GPUs, for sidecars."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """All inputs of a plan: planning reads nothing else."""

    resolved: ResolvedSpec
    site: Site
    command: str
    """`train`, `sft` or `eval`."""
    resources: Resources
    roles: tuple[RolePlan, ...]
    environment: JobEnvironment
    snapshot: CodeSnapshot | None
    project_path: Path
    home: str
    """The job's directory, absolute as the site sees it."""
    python: str
    """The interpreter on the site."""
    user: str
    submitted_at: float
    """Unix seconds; an argument, so that equal requests give equal plans."""
    sweep: tuple[tuple[str, ...], ...] = ()
    """One tuple of overrides for each trial; () for a single run."""
    env_file: Path | None = None
    """The file of variables behind `environment`; its secrets are read again at submission."""
    num_past: int = 0
    """Number of attempts of earlier jobs in this directory, if the job resumes in it."""
    evaluation: EvalFile | None = None
    """The file of an evaluation with its bases; None for a training or a service."""
    run_file: str = ""
    """As the user named it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """Everything to submit. Equal requests give equal plans, byte by byte."""

    name: str
    site: str
    backend: str
    command: str
    home: str
    trials: tuple[TrialPlan, ...]
    resources: Resources
    roles: tuple[RolePlan, ...]
    python: str
    plan_hash: str
    """Over `asked`."""
    code_sha256: str | None
    spec_digest: str
    user: str
    submitted_at: float
    environment: JobEnvironment
    profile: Mapping[str, Any] = field(default_factory=dict)
    """The site's profile at submission: the job stays reachable if the file changes later."""
    max_requeue: int = 3
    grace_s: float = 120.0
    """Seconds between the signal and the end of a job."""
    num_past: int = 0
    """The number of this job's first attempt: how many earlier jobs in its directory had."""
    follows: str = ""
    """The previous job of this run; empty for the first one."""
    start_step: int | None = None
    """The newest checkpoint at submission; None if there was none, so that any one is newer."""
    num_resubmitted: int = 0
    """Automatic resubmissions of the run so far; at most `max_requeue`."""
    preflight: str = "quick"
    max_silence_s: float | None = None
    """A job without output for so long is ended, after its roles have written their stacks."""
    gpu_hours: float | None = None
    """Upper bound; None without a time limit."""
    cost_usd: float | None = None
    """Upper bound; None without a price in the site profile."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name below `job/` to content: the backend's files for its scheduler."""
    argv: tuple[str, ...] = ()
    """The command that submits the job; () if an API call does."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Values of the backend, such as an API request or an image. JSON values."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Everything that determines the run, not the time and place of the submission. JSON values; of variables
    digests."""
    notices: tuple[str, ...] = ()

    def refer_to(self, job_id: str, details: Mapping[str, Any] | None = None) -> JobRef:
        """Return the reference to this plan's job with its scheduler's id."""
        return JobRef(
            name=self.name,
            site=self.site,
            backend=self.backend,
            home=self.home,
            job_id=job_id,
            plan_hash=self.plan_hash,
            submitted_at=self.submitted_at,
            details=details or {},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRef:
    """A job that a scheduler accepted. Kept as `job/ref.json`."""

    name: str
    site: str
    backend: str
    home: str
    job_id: str
    """The scheduler's id."""
    plan_hash: str
    submitted_at: float
    details: Mapping[str, Any] = field(default_factory=dict)
    """Values of the backend, such as a store's URI or a cluster. JSON values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerStatus:
    """The scheduler's status of one trial."""

    state: JobState
    raw: str
    """The scheduler's wording, unchanged."""
    reason: str = ""
    num_restarts: int = 0
    nodes: str = ""
    since: float | None = None
    """Unix seconds of the last change, if known."""
    is_saved: bool = False
    """Whether the job reported to its scheduler that its state is saved and it can be requeued."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """The record that the job itself wrote of one attempt: it outlives the scheduler's memory."""

    name: str
    number: int
    """From the plan's `num_past` on, one more with each restart by the scheduler."""
    started_at: float | None = None
    """Unix seconds; None until the agent of the first node has written its start record."""
    ended_at: float | None = None
    exit_code: int | None = None
    """All nodes' codes combined; None while the attempt runs, or if it was killed before it wrote one."""
    signal: str = ""
    """The signal that requested a stop, or empty."""
    nodes: tuple[str, ...] = ()
    cause: str = ""
    """The role that ended it, how, and that role's last lines."""


class StatusSource(StrEnum):
    """Where a status came from, in order of precedence."""

    RECORD = "record"
    SCHEDULER = "scheduler"
    LAST_KNOWN = "last known"
    NOTHING = "nothing"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus:
    """The status of one trial of a job."""

    ref: JobRef
    trial: int
    state: JobState
    reason: str
    source: StatusSource
    attempt: AttemptRecord | None = None
    nodes: str = ""
    since: float | None = None
    age_s: float = 0.0
    """The state's age; above 0 only for a last known one."""
    is_silent: bool = False
    """Whether a source that may know the state did not answer."""
    is_saved: bool = False
    """Whether it exited with 75: its state is saved, and it can be requeued."""


class Backend(Protocol):
    """One kind of site. Behaviour that all backends share is in `launcher`."""

    name: str

    def render(self, plan: JobPlan, request: JobRequest) -> JobPlan:
        """Add this backend's files, argv and details. Pure: no disk, network, clock or random.

        Raises: ConfigError for a plan that cannot work.
        """

    def probe(self, plan: JobPlan) -> list[Finding]:
        """Find obstacles to the job without changing anything: names, rights, images, disk space."""

    def submit(self, plan: JobPlan) -> JobRef:
        """Submit a prepared job, whose directory is complete: the only call that starts something.

        Raises: CheckRefused with the scheduler's message.
        """

    def recover(self, plan: JobPlan) -> JobRef | None:
        """Return the newest job that an earlier, interrupted `submit` of this plan started, or None."""

    def poll(self, refs: Sequence[JobRef]) -> Mapping[tuple[str, int], SchedulerStatus]:
        """Return the scheduler's status by job id and trial, by one query; forgotten jobs are missing.

        Raises: StoreError if it does not answer.
        """

    def open_record(self, ref: JobRef, trial: int) -> RecordFiles:
        """Return the files of the trial's own record."""

    def open_logs(self, ref: JobRef, trial: int) -> LogSource | None:
        """Return the source of logs that are no files of the record; None if they are."""

    def stop(self, ref: JobRef, trial: int | None, *, grace_s: float) -> None:
        """Send TERM, or KILL with a grace of 0, to one trial or (None) to all. Does not wait.

        Raises: StoreError if the scheduler does not answer.
        """

    def list_tagged(self) -> Iterator[JobRef]:
        """Yield this user's jobs with strop's tag, including those whose directory is gone."""


@runtime_checkable
class Renewable(Protocol):
    """Optional capability: ended jobs are not requeued, so the run's next job is a new submission."""

    def renew(self, plan: JobPlan, *, submitted_at: float) -> JobPlan:
        """Return the plan of the next job in the same directory, changed only in its name. Pure."""

    def find_saved_step(self, ref: JobRef) -> int | None:
        """Return the newest complete checkpoint for a run's next job to resume from, or None.

        Raises: StoreError if its store does not answer.
        """


@runtime_checkable
class Preparing(Protocol):
    """Optional capability: work before planning, such as building an image, or a run on this machine."""

    def prepare(
        self, request: JobRequest, say: Callable[[str], None], *, is_dry_run: bool, is_awaited: bool
    ) -> JobRequest | int:
        """Return the request to plan and submit, or the exit code of a job that ran on this machine instead.

        Raises: ConfigError for options that contradict each other; the errors of the work itself.
        """
