"""The types of jobs, and the seam that backends implement.

A *plan* is everything that will be submitted, made without effects. A *job* is a plan that a scheduler
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
    """The state of a job. A name that no table knows is `unknown`, which ends nothing and starts nothing."""

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
    """Its time limit ended it, and nothing will start it again."""
    UNKNOWN = "unknown"
    """No source answers."""

    @property
    def is_terminal(self) -> bool:
        """Whether nothing more happens by itself."""
        return self in _TERMINAL


_TERMINAL = {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT}


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeSnapshot:
    """The working tree as it is, uncommitted edits and untracked files included. Made by `snapshot`."""

    project_path: Path
    files: tuple[str, ...]
    """Paths in it, sorted."""
    sha256: str
    """Over names, modes and contents."""
    size_bytes: int
    commit: str | None
    """HEAD; None without git."""
    diffstat: str
    """Output of `git diff --stat` against the commit, with the names of untracked files."""


class VariableSource(StrEnum):
    """Where an environment variable of a job comes from, the later over the earlier."""

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
    """Name of every variable and secret to the place of its value."""
    secrets: tuple[str, ...] = ()
    """Names alone; values are read when the job is submitted, and kept in a 0600 file until it ends."""
    secret_roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Roles that get a secret; one that is not named here is for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolePlan:
    """One process of a job on a node."""

    name: str
    argv: tuple[str, ...]
    """`{run}`, `{job}`, `{code}` and `{node}` in a word stand for the directories of trial, job and code,
    and the node's number."""
    gpus: Mapping[str, int] = field(default_factory=dict)
    """How many GPUs of its node it gets, by what they are for: `infer`, `train`."""
    nodes: str = "first"
    """`first`: node 0 of the main part; `all`: every node of it; `others`: all of them but node 0; `2-3`:
    nodes 2 and 3 of it; `cpu`: the nodes of the CPU part."""
    must_succeed: bool = True
    """Whether its end with 0 is a success of the job. An early end of a sidecar is always a failure."""
    is_awaited: bool = False
    """Whether the job ends only after it, and does not fail with it: an evaluator. Its refusal (2, 76) still
    ends the job, which would lack its evaluation from the start."""
    may_be_lost: bool = False
    """Whether the job goes on after its failure, a refusal (2, 76) excepted, if the other roles do: a node
    that lends engines to a run."""

    @property
    def num_gpus(self) -> int:
        """GPUs of its node in all."""
        return sum(self.gpus.values())


def is_place(nodes: str, node: int, part: str) -> bool:
    """Whether `RolePlan.nodes` means a node, by its number over both parts; `part` is `main` or `cpu`."""
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
    """Whether it requests all GPUs of its nodes."""
    cpus_per_gpu: int | None = None
    cpus: int | None = None
    memory: str | None = None
    gpu_type: str | None = None
    time_limit_s: float | None = None
    num_cpu_nodes: int = 0
    """Nodes without GPUs beside them, for sidecars."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """Everything that a plan is made of: after this nothing is read any more."""

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
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of this one backend, by field of its model: partition, dependency, instance type, ..."""
    conflicts: tuple[str, ...] = ()
    """Values that others override, as sentences."""
    env_file: Path | None = None
    """The file of variables that `environment` was gathered with: its secrets are read again."""
    num_past: int = 0
    """Number of attempts of earlier jobs in this directory, which this one goes on in."""
    evaluation: EvalFile | None = None
    """The file of `job.eval_config` with what it extends; None where there is none."""
    run_file: str = ""
    """As the user named it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """Everything that is submitted. Equal requests give equal plans, byte by byte."""

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
    """Over everything that decides what is run, without time and place of the submission."""
    code_sha256: str | None
    spec_digest: str
    user: str
    submitted_at: float
    environment: JobEnvironment
    profile: Mapping[str, Any] = field(default_factory=dict)
    """The site's profile at that time: the job stays reachable if the file changes later."""
    max_requeue: int = 3
    grace_s: float = 120.0
    """How long before its end a job gets a signal."""
    num_past: int = 0
    """The number of this job's first attempt: earlier jobs in its directory had that many."""
    follows: str = ""
    """The job of this run that ended before; empty for the first one."""
    start_step: int | None = None
    """The newest checkpoint when it was submitted; None: there was none, so any one is newer."""
    num_resubmitted: int = 0
    """How often the run has been resubmitted automatically; at most `max_requeue`."""
    preflight: str = "quick"
    max_silence_s: float | None = None
    """A job without any output for so long is ended, with the stacks of its roles."""
    gpu_hours: float | None = None
    """At most; None without a time limit."""
    cost_usd: float | None = None
    """At most; None without a price in the site profile."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name below `job/` to content: the files that the backend gives to its scheduler."""
    argv: tuple[str, ...] = ()
    """The command that submits the job; () where it is a call of an API."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Values of this one backend: the request to an API, an image. JSON values."""
    conflicts: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()

    def refer_to(self, job_id: str, details: Mapping[str, Any] | None = None) -> JobRef:
        """Return the reference to this plan's job, which its scheduler knows as `job_id`."""
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
    """The scheduler's own."""
    plan_hash: str
    submitted_at: float
    details: Mapping[str, Any] = field(default_factory=dict)
    """Values of this one backend, for example a store's URI or a cluster. JSON values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerStatus:
    """The scheduler's status of one trial. A scheduler that does not answer gives none."""

    state: JobState
    raw: str
    """Its own words, unchanged."""
    reason: str = ""
    num_restarts: int = 0
    nodes: str = ""
    since: float | None = None
    """Unix seconds of the last change, where it is known."""
    is_saved: bool = False
    """Whether the job itself reported to its scheduler that it saved its state and wants to be requeued."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """The job's own record of one attempt: it outlives the scheduler's memory."""

    name: str
    number: int
    """From the plan's `num_past`; it grows with the scheduler's count of restarts."""
    started_at: float | None = None
    """Unix seconds; None while no agent of the first node has written its start record."""
    ended_at: float | None = None
    exit_code: int | None = None
    """All nodes' codes combined; None while it runs, or where it was killed before it could write one."""
    signal: str = ""
    """The signal that asked it to stop, if any."""
    nodes: tuple[str, ...] = ()
    cause: str = ""
    """Which role ended it, how, and its last lines."""


class StatusSource(StrEnum):
    """The source of a state, the earlier over the later."""

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
    """How old the state is; above 0 only for a last known one."""
    is_silent: bool = False
    """Whether a source that could know it did not answer."""
    is_saved: bool = False
    """Whether it ended with 75: its state saved, to be requeued."""


class Backend(Protocol):
    """One kind of site. All other behaviour of jobs is written once, in `launcher`."""

    name: str

    def render(self, plan: JobPlan, request: JobRequest) -> JobPlan:
        """Add this backend's files, argv and details. Pure: no disk, network, clock or random.

        Raises: ConfigError for what can be known to be impossible.
        """

    def probe(self, plan: JobPlan) -> list[Finding]:
        """Return what would stop the job, reading only: names, rights, images, disk space."""

    def submit(self, plan: JobPlan) -> JobRef:
        """Submit a prepared job to the scheduler: the one call that starts something.

        Its directory exists with everything in `job/`. Raises: CheckRefused with the scheduler's own words.
        """

    def recover(self, plan: JobPlan) -> JobRef | None:
        """Return the newest job that an earlier, killed `submit` of this plan left, or None."""

    def poll(self, refs: Sequence[JobRef]) -> Mapping[tuple[str, int], SchedulerStatus]:
        """Return the scheduler's status by job id and trial, by one query; forgotten jobs are missing.

        Raises: StoreError if it does not answer.
        """

    def open_record(self, ref: JobRef, trial: int) -> RecordFiles:
        """Return the files of the trial's own record."""

    def open_logs(self, ref: JobRef, trial: int) -> LogSource | None:
        """Return logs that are elsewhere than in the record's files; None: they are there."""

    def stop(self, ref: JobRef, trial: int | None, *, grace_s: float) -> None:
        """Ask for an end by TERM; with a grace of 0 by KILL. `trial` None: all. Returns at once.

        Raises: StoreError if the scheduler does not answer.
        """

    def preempt(self, ref: JobRef, trial: int) -> str:
        """Send the signal that a preemption sends; return its name. For drills."""

    def list_tagged(self) -> Iterator[JobRef]:
        """Yield the jobs of this user that carry our tag, also those whose directory is gone."""


@runtime_checkable
class Renewable(Protocol):
    """Optional capability: the scheduler requeues no ended job, so the run's next job is a submission."""

    def renew(self, plan: JobPlan, *, submitted_at: float) -> JobPlan:
        """Return the plan of the next job in the same directory: a new name, all else as it was. Pure."""

    def find_saved_step(self, ref: JobRef) -> int | None:
        """Return the newest whole checkpoint that a run's next job would go on from, None if there is none.

        Raises: StoreError if its place does not answer.
        """


@runtime_checkable
class Preparing(Protocol):
    """Optional capability: options ask for work before a plan, as building an image, or for a run here."""

    def prepare(
        self, request: JobRequest, say: Callable[[str], None], *, is_dry_run: bool, is_awaited: bool
    ) -> JobRequest | int:
        """Return the request to plan and submit; or the exit code of a job that ran here instead.

        Raises: ConfigError for options that contradict each other; what the work itself raises.
        """
