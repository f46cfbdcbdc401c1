"""The words of jobs, and the seam that backends keep.

A *plan* is everything that will be sent, made without effects. A *job* is a plan that a scheduler accepted;
it has one *member*, or one for each combination of a sweep. An *attempt* is one life of a member: after a
preemption the same job lives again. Each node of an attempt has one *agent*, which starts the *roles*.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from strop.hardware.findings import Finding
from strop.record.files import LogSource, RecordFiles
from strop.spec import ResolvedSpec
from strop.spec.eval_file import EvalFile
from strop.spec.site import Site


class JobState(StrEnum):
    """Where a job stands. A name that no table knows is `unknown`, which ends nothing and starts nothing."""

    QUEUED = "queued"
    """Accepted, without resources yet."""
    STARTING = "starting"
    """Has resources; its first node has not written its start record."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Stopped from outside, and waiting to live again."""
    SUCCEEDED = "succeeded"
    """Every agent ended with 0. Being stopped is never success."""
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    """Its time limit ended it, and nothing will start it again."""
    UNKNOWN = "unknown"
    """No source gives an answer."""

    @property
    def is_terminal(self) -> bool:
        """Whether nothing more happens by itself."""
        return self in _TERMINAL


_TERMINAL = {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.TIMEOUT}


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeSnapshot:
    """The working tree as it is, uncommitted edits and untracked files included. Made by `jobs.snapshot`."""

    project_path: Path
    files: tuple[str, ...]
    """Paths in it, sorted."""
    sha256: str
    """Over names, modes and contents."""
    size_bytes: int
    commit: str | None
    """HEAD; None without git."""
    diffstat: str
    """What differs from the commit, as `git diff --stat` says it, untracked files named."""


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
    """Name of every variable and secret to where its value comes from."""
    secrets: tuple[str, ...] = ()
    """Names alone; values are read when the job is handed over, and kept in a 0600 file until it ends."""
    secret_roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Roles that get a secret; one that is not named here is for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolePlan:
    """One process of a job on a node."""

    name: str
    argv: tuple[str, ...]
    """`{run}`, `{job}` and `{code}` in a word stand for the member's directory, the job's, and the code's."""
    gpus: Mapping[str, int] = field(default_factory=dict)
    """How many GPUs of its node it gets, by what they are for: `infer`, `train`."""
    nodes: str = "first"
    """`first`: node 0 of the main part; `all`: every node of it; `others`: all of them but node 0; `cpu`: the
    nodes of the CPU part."""
    must_succeed: bool = True
    """Whether its end with 0 is a success of the job. A companion's early end is always a failure."""
    is_awaited: bool = False
    """Whether the job ends only after it, and takes no harm from its failure: an evaluator. That it refuses
    (2, 76) ends the job: it would go on without what was asked for from its beginning."""
    may_be_lost: bool = False
    """Whether the other roles decide if the job goes on after its failure, a refusal (2, 76) excepted: a node
    that lends engines to a run."""

    @property
    def num_gpus(self) -> int:
        """GPUs of its node in all."""
        return sum(self.gpus.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberPlan:
    """One run of a job: the only one, or one combination of a sweep."""

    index: int
    path: str
    """Its run directory, absolute as the site sees it."""
    overrides: tuple[str, ...] = ()
    """What the sweep sets, as `key=value`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What a job asks of its site."""

    num_nodes: int = 1
    gpus_per_node: int = 0
    is_whole_node: bool = False
    """Whether it asks for all GPUs of its nodes."""
    cpus_per_gpu: int | None = None
    cpus: int | None = None
    memory: str | None = None
    gpu_type: str | None = None
    time_limit_s: float | None = None
    num_cpu_nodes: int = 0
    """Nodes without GPUs beside them, for companions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """All that a plan is made of. Nothing is read any more once this exists."""

    resolved: ResolvedSpec
    site: Site
    command: str
    """`train` or `sft`."""
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
    """Unix seconds; handed in, so that equal requests give equal plans."""
    sweep: tuple[tuple[str, ...], ...] = ()
    """One tuple of overrides for each member; () for a single run."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What flags say to this one backend: partition, dependency, instance type, ..."""
    conflicts: tuple[str, ...] = ()
    """Values that lost against others, as sentences."""
    env_file: Path | None = None
    """The file of variables that `environment` was gathered with: its secrets are read once more."""
    num_past: int = 0
    """How often an earlier job lived in this home, which this one goes on in."""
    evaluation: EvalFile | None = None
    """The file of `job.eval_config` with what it extends; None where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """What would be sent. Equal requests give equal plans, byte by byte."""

    name: str
    site: str
    backend: str
    command: str
    home: str
    members: tuple[MemberPlan, ...]
    resources: Resources
    roles: tuple[RolePlan, ...]
    python: str
    plan_hash: str
    """Over everything that decides what is run; not over time and place of the submission."""
    code_sha256: str | None
    spec_digest: str
    user: str
    submitted_at: float
    environment: JobEnvironment
    profile: Mapping[str, Any] = field(default_factory=dict)
    """The site's profile at that time: later changes of the file do not make the job unreachable."""
    max_requeue: int = 3
    grace_s: float = 120.0
    """How long before its end a job is told."""
    num_past: int = 0
    """The number of this job's first attempt: how often earlier jobs lived in its home."""
    follows: str = ""
    """The job of this run that ended before; empty for the first one."""
    start_step: int | None = None
    """The checkpoint that there was when it was submitted; None: none, so any one is newer."""
    num_resubmitted: int = 0
    """How often the run has been submitted again without a person; at most `max_requeue`."""
    preflight: str = "quick"
    max_silence_s: float | None = None
    """After which a job in which nothing moves is ended with the stacks of its roles."""
    gpu_hours: float | None = None
    """At most; None without a time limit."""
    cost_usd: float | None = None
    """At most; None without a price in the site profile."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name below `job/` to content: what the backend hands to its scheduler."""
    argv: tuple[str, ...] = ()
    """The one command that hands the job over; () where it is a call of an API."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What only this backend knows: the request to an API, an image. JSON values."""
    conflicts: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


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
    """What only this backend knows, for example a store's URI or a cluster. JSON values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a scheduler says of one member now. A scheduler that gives no answer gives none of these."""

    state: JobState
    raw: str
    """Its own words, unchanged."""
    reason: str = ""
    num_restarts: int = 0
    nodes: str = ""
    since: float | None = None
    """Unix seconds of the last change, where it is known."""
    is_saved: bool = False
    """Whether the job told its scheduler itself that it saved its state and wants to live again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """What a job itself wrote of one attempt: it outlives the scheduler's memory."""

    name: str
    number: int
    """From the plan's `num_past`; it grows with the scheduler's count of restarts."""
    started_at: float | None = None
    """Unix seconds; None while no agent of the first node has written its start record."""
    ended_at: float | None = None
    exit_code: int | None = None
    """All nodes' codes combined; None while it lives, or where it was killed before it could say."""
    signal: str = ""
    """The signal that it was told to stop with, if any."""
    nodes: tuple[str, ...] = ()
    cause: str = ""
    """Which role ended it, how, and its last words."""


class StatusSource(StrEnum):
    """What a state was read from, the earlier over the later."""

    RECORD = "record"
    SCHEDULER = "scheduler"
    LAST_KNOWN = "last known"
    NOTHING = "nothing"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus:
    """Where one member of a job stands."""

    ref: JobRef
    member: int
    state: JobState
    reason: str
    source: StatusSource
    attempt: AttemptRecord | None = None
    nodes: str = ""
    since: float | None = None
    age_s: float = 0.0
    """How old the answer is; above 0 for one that is only the last known."""
    is_silent: bool = False
    """Whether a source that could have known did not answer."""
    is_saved: bool = False
    """Whether it ended with 75: its state saved, to live again."""


class Backend(Protocol):
    """What one kind of site does. All other behaviour of jobs is written once, in `launcher`."""

    name: str

    def complete(self, plan: JobPlan, request: JobRequest) -> JobPlan:
        """Add what this backend sends: files, argv, details. Pure: no disk, network, clock or random.

        Raises: ConfigError for what can be known to be impossible.
        """

    def probe(self, plan: JobPlan) -> list[Finding]:
        """Ask, reading only, what would stop the job: names, rights, images, room."""

    def hand_over(self, plan: JobPlan) -> JobRef:
        """Give a prepared job to the scheduler: the one call that starts something.

        Its home exists with everything in `job/`. Raises: CheckRefused with the scheduler's own words.
        """

    def find_accepted(self, plan: JobPlan) -> JobRef | None:
        """Return the newest job that an earlier, killed `hand_over` of this plan left, or None."""

    def ask(self, refs: Sequence[JobRef]) -> Mapping[tuple[str, int], Answer]:
        """Return what the scheduler says, by job id and member, in one query; what it forgot is missing.

        Raises: StoreError if it does not answer.
        """

    def open_record(self, ref: JobRef, member: int) -> RecordFiles:
        """Return where the member's own record is."""

    def open_logs(self, ref: JobRef, member: int) -> LogSource | None:
        """Return logs that are elsewhere than in the record's files; None: they are there."""

    def stop(self, ref: JobRef, member: int | None, *, grace_s: float) -> None:
        """Ask for an end by TERM; with a grace of 0 by KILL. `member` None: all. Returns at once.

        Raises: StoreError if the scheduler does not answer.
        """

    def preempt(self, ref: JobRef, member: int) -> str:
        """Send the very signal that a preemption sends; return its name. For drills."""

    def list_tagged(self) -> Iterator[JobRef]:
        """Yield the jobs of this user that carry our tag, also those whose home is gone."""


@runtime_checkable
class Renewable(Protocol):
    """What a backend has besides whose scheduler starts no ended job again: that is our submission then."""

    def renew(self, plan: JobPlan, *, submitted_at: float) -> JobPlan:
        """Return the plan of the next job in the same home: a new name, all else as it was. Pure."""

    def find_saved_step(self, ref: JobRef, member: int) -> int | None:
        """Return the newest whole checkpoint that a next job would go on from, None if there is none.

        Raises: StoreError if its place does not answer.
        """
