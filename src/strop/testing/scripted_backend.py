"""A scripted scheduler, for tests and as an example of a backend.

Each accepted job is a file in a folder, so that several processes can share the scheduler. It starts nothing:
a test writes the agents' files (`begin_attempt`, `end_attempt`) and sets the scheduler's answers (`answer`).
Covered: refusal, silence, forgotten jobs, an acceptance whose submitter is killed, an end by TERM, by KILL
or by neither, a record that does not answer, logs elsewhere. Not covered: time; no state changes by itself.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from strop.errors import CheckRefused, ConfigError, StoreError
from strop.hardware.findings import Finding
from strop.io.atomic import write_bytes_atomically
from strop.launch.attempts import write_verdict
from strop.launch.build_request import tag_of
from strop.launch.contract import Backend, JobPlan, JobRef, JobRequest, JobState, SchedulerStatus
from strop.launch.job_dir import ATTEMPTS_FOLDER, has_plan, job_path_of, read_plan
from strop.launch.options import KIND_HELP, CliFlag, SiteOptions
from strop.record.files import DirectoryRecord, LogSource, RecordFiles, find_checkpoints

_REF = TypeAdapter(JobRef)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of a backend's method."""

    verb: str
    detail: str = ""


class FakeSite(SiteOptions):
    """Sites of the scripted scheduler, as an example of a backend's options."""

    backend: Literal["fake"] = Field(default="fake", description=KIND_HELP)
    folder: str = Field(description="Folder of its jobs.")
    lane: Annotated[str | None, CliFlag()] = Field(default=None, description="Lane to wait in.")
    bid: Annotated[int | None, CliFlag()] = Field(
        default=None, ge=1, exclude=True, description="Bid for a place."
    )

    def open(self, site: str) -> Backend:
        """Return the backend."""
        return FakeBackend(Path(self.folder))


class FakeBackend:
    """A `Backend` over a folder. Its attributes are its script, and may be changed at any time."""

    name = "fake"

    def __init__(self, folder: Path) -> None:
        self.calls: list[Call] = []
        self.findings: list[Finding] = []
        """The findings of `probe`."""
        self.refusal = ""
        """Text with which a submission is refused; empty: it is accepted."""
        self.is_silent = False
        """Whether the scheduler answers no call."""
        self.is_record_silent = False
        self.ends_at = "TERM"
        """The signal that ends a job: `TERM`, `KILL`, or empty for none."""
        self.after_accepting: Callable[[], None] = lambda: None
        """Called between the acceptance and the return of `submit`, for example to kill the submitter."""
        self.on_preempt: Callable[[], None] = lambda: None
        self.logs: LogSource | None = None
        self._folder = folder
        self._answers: dict[tuple[str, int], SchedulerStatus | None] = {}

    # The contract.

    def render(self, plan: JobPlan, request: JobRequest) -> JobPlan:
        """Add a script and a command. Raises: ConfigError for more GPUs than a node of the site has."""
        self.calls.append(Call(verb="render"))
        has, wants = request.site.profile.gpus_per_node, plan.resources.gpus_per_node
        if wants > has:
            raise ConfigError(
                f"{wants} GPUs per node are asked for, and nodes of {plan.site} have {has}",
                allowed=f"0 to {has}",
                next_step="ask for fewer",
            )
        agent = (plan.python, "-m", "strop.launch.node", "--job", str(job_path_of(plan.home)))
        script = f"#!/bin/sh\nexec {shlex.join(agent)}\n"
        lane = getattr(request.site.profile.with_options(request.options), "lane", None)
        words = (f"--lane={lane}",) if lane else ()
        argv = ("fake-submit", tag_of(plan.plan_hash), *words, str(job_path_of(plan.home) / "job.sh"))
        return replace(plan, files={"job.sh": script}, argv=argv)

    def probe(self, plan: JobPlan) -> list[Finding]:
        """Return the scripted findings."""
        self.calls.append(Call(verb="probe", detail=plan.home))
        return list(self.findings)

    def submit(self, plan: JobPlan) -> JobRef:
        """Accept a job, or refuse it with `refusal`."""
        self.calls.append(Call(verb="submit", detail=plan.home))
        self._require_answer()
        if not has_plan(Path(plan.home)):
            raise StoreError(
                f"{plan.home} is no home of a job yet",
                allowed="a home that has been filled before anything is handed over",
                next_step="fill it first",
            )
        if self.refusal:
            raise CheckRefused(self.refusal)
        ref = self._accept(plan)
        self.after_accepting()
        return ref

    def recover(self, plan: JobPlan) -> JobRef | None:
        """Return the newest job with this plan's hash and home."""
        self.calls.append(Call(verb="recover", detail=plan.home))
        self._require_answer()
        refs = [ref for ref in self.list_tagged() if (ref.plan_hash, ref.home) == (plan.plan_hash, plan.home)]
        return refs[-1] if refs else None

    def poll(self, refs: Sequence[JobRef]) -> Mapping[tuple[str, int], SchedulerStatus]:
        """Return the scripted answer for each trial; by default an accepted job waits."""
        self.calls.append(Call(verb="poll", detail=" ".join(ref.job_id for ref in refs)))
        self._require_answer()
        waiting = SchedulerStatus(state=JobState.QUEUED, raw="WAITING")
        statuses: dict[tuple[str, int], SchedulerStatus] = {}
        for ref in refs:
            for trial in read_plan(job_path_of(ref.home)).trials:
                answer = self._answers.get((ref.job_id, trial.index), waiting)
                if answer is not None:
                    statuses[ref.job_id, trial.index] = answer
        return statuses

    def open_record(self, ref: JobRef, trial: int) -> RecordFiles:
        """Return the trial's directory, or one that does not answer."""
        path = Path(read_plan(job_path_of(ref.home)).trials[trial].path)
        return SilentRecord(path) if self.is_record_silent else DirectoryRecord(path)

    def open_logs(self, ref: JobRef, trial: int) -> LogSource | None:
        """Return the scripted logs; None: they are files of the record."""
        return self.logs

    def stop(self, ref: JobRef, trial: int | None, *, grace_s: float) -> None:
        """End the job, if the order is `ends_at`."""
        order = "TERM" if grace_s > 0.0 else "KILL"
        self.calls.append(Call(verb="stop", detail=order))
        self._require_answer()
        if order == self.ends_at:
            ended = SchedulerStatus(state=JobState.CANCELLED, raw="CANCELLED")
            for planned in read_plan(job_path_of(ref.home)).trials:
                if trial in {None, planned.index}:
                    self._answers[ref.job_id, planned.index] = ended

    def preempt(self, ref: JobRef, trial: int) -> str:
        """Call `on_preempt`."""
        self.calls.append(Call(verb="preempt", detail=ref.job_id))
        self._require_answer()
        self.on_preempt()
        return "SIGUSR2"

    def list_tagged(self) -> Iterator[JobRef]:
        """Yield all accepted jobs, oldest first."""
        paths = sorted(self._folder.glob("*.json"), key=lambda path: int(path.stem))
        for path in paths:
            yield _REF.validate_json(path.read_bytes())

    # The script.

    def answer(self, ref: JobRef, answer: SchedulerStatus | None, *, trial: int = 0) -> None:
        """Set the scheduler's answer from now on; None: it has forgotten the job."""
        self._answers[ref.job_id, trial] = answer

    def begin_attempt(self, ref: JobRef, number: int = 0, *, trial: int = 0, num_nodes: int = 1) -> Path:
        """Write the first files of an attempt's agents; return the attempt's folder."""
        run = Path(read_plan(job_path_of(ref.home)).trials[trial].path)
        path = run / ATTEMPTS_FOLDER / f"{ref.job_id}-{number}"
        path.mkdir(parents=True, exist_ok=True)
        for node in range(num_nodes):
            record = {
                "attempt": path.name,
                "number": number,
                "node": node,
                "num_nodes": num_nodes,
                "host": f"node{node}",
                "started_at": time.time(),
            }
            write_bytes_atomically(path / f"agent-{node}.json", json.dumps(record).encode())
        return path

    def end_attempt(self, attempt_path: Path, exit_code: int | None, *, signal: str = "") -> None:
        """Write an attempt's verdict."""
        write_verdict(
            attempt_path,
            number=int(attempt_path.name.rpartition("-")[2]),
            exit_code=exit_code,
            signal=signal,
            started_at=time.time(),
            ended_at=time.time(),
            nodes=("node0",),
        )

    def count(self, verb: str) -> int:
        """Return how often a verb was called."""
        return sum(call.verb == verb for call in self.calls)

    def _accept(self, plan: JobPlan) -> JobRef:
        self._folder.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            path = self._folder / f"{number}.json"
            ref = plan.refer_to(f"fake-{number}")
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                number += 1
                continue
            with os.fdopen(descriptor, "w") as file:
                json.dump(asdict(ref), file)
            return ref

    def _require_answer(self) -> None:
        if self.is_silent:
            raise StoreError(
                "the scheduler does not answer", allowed="one that does", next_step="ask again in a minute"
            )


class FakeOnceBackend(FakeBackend):
    """A `Renewable` backend: its scheduler does not restart ended jobs."""

    def renew(self, plan: JobPlan, *, submitted_at: float) -> JobPlan:
        """Return the plan with the command of its next job."""
        self.calls.append(Call(verb="renew", detail=plan.follows))
        return replace(plan, argv=(*plan.argv[:2], f"next-after-{plan.follows}"))

    def find_saved_step(self, ref: JobRef) -> int | None:
        """Return the newest checkpoint of the run's directory."""
        return max(find_checkpoints(self.open_record(ref, 0)), default=None)


class SilentRecord(DirectoryRecord):
    """A record that cannot be read."""

    def read(self, name: str) -> bytes | None:
        """Raise: StoreError."""
        raise self._failed(name, OSError(110, "Connection timed out"))

    def read_from(self, name: str, offset: int) -> bytes:
        """Raise: StoreError."""
        raise self._failed(name, OSError(110, "Connection timed out"))

    def version(self, name: str) -> str | None:
        """Raise: StoreError."""
        raise self._failed(name, OSError(110, "Connection timed out"))

    def list(self, prefix: str) -> list[str]:
        """Raise: StoreError."""
        raise self._failed(prefix, OSError(110, "Connection timed out"))
