"""Rehearse a preemption with the real signal, while a failure costs minutes and not a night.

A drill passes with every proof, in this order: a complete checkpoint newer than the signal, an attempt that
ended with 75, a next attempt that resumed from that step, steps trained since, and a curve equal to an
undisturbed one. The last proof compares with the run of `--against`, or with a finished run of the same spec
next to it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.errors import EXIT_INTERRUPTED, CheckRefused, StoreError
from strop.launch.attempts import read_attempts
from strop.launch.contract import AttemptRecord, JobRef, JobState
from strop.launch.job_dir import job_path_of, read_plan
from strop.launch.launcher import Launcher, require_trial
from strop.record import list_runs
from strop.record.files import DirectoryRecord, RecordFiles, find_checkpoints

_OF_TIME = ("seconds_", "loop_", "_per_s", "_bytes")
"""Parts of the names of metrics that differ from run to run: times, rates, memory."""
_POLL_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """One check of a drill."""

    name: str
    is_given: bool | None
    """None if there was nothing to compare with."""
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillReport:
    """The result of a drill."""

    signal: str
    proofs: tuple[Proof, ...]

    @property
    def has_passed(self) -> bool:
        """Whether no proof failed."""
        return all(proof.is_given is not False for proof in self.proofs)

    @property
    def first_missing(self) -> Proof | None:
        """The first proof that failed."""
        return next((proof for proof in self.proofs if proof.is_given is False), None)


def drill(
    launcher: Launcher,
    ref: JobRef,
    *,
    trial: int = 0,
    num_steps: int = 2,
    against: Path | None = None,
    restart_limit_s: float = 600.0,
    say: Callable[[str], None] = lambda text: None,
) -> DrillReport:
    """Preempt a running job and watch it resume.

    `num_steps`: how many steps the next attempt must train. `restart_limit_s`: time for the scheduler to
    start that attempt.

    Raises: ConfigError if there is no such trial; CheckRefused if the job is not running, or has no start
        record; StoreError if a place does not answer, or there is no run at `against`.
    """
    require_trial(ref, trial)
    status = next(status for status in launcher.status([ref]) if status.trial == trial)
    if status.state is not JobState.RUNNING:
        raise CheckRefused(
            f"job {ref.job_id} is {status.state.value}",
            allowed="a drill of a running job",
            next_step="wait until `strop status` says running",
        )
    plan = read_plan(job_path_of(ref.home))
    # Read before the signal: a mistake costs nothing yet.
    other, undisturbed = _read_undisturbed(ref, plan.spec_digest, against)
    record = launcher.backend.open_record(ref, trial)
    drilled = _Drilled(record, num_steps)
    if not drilled.attempts:
        raise CheckRefused(
            f"job {ref.job_id} has left no start record in {record.describe('attempts')}",
            allowed="a drill of a job whose agent has begun",
            next_step="look at `strop status` again in a moment",
        )
    signal_name = launcher.backend.preempt(ref, trial)
    say(f"sent {signal_name} at step {drilled.last_step}")
    proofs: list[Proof] = []
    for prove, limit_s in (
        (drilled.find_checkpoint, plan.grace_s),
        (drilled.find_end, plan.grace_s),
        (drilled.find_next, restart_limit_s),
        (drilled.find_steps, restart_limit_s),
    ):
        deadline = time.monotonic() + limit_s
        while not (proof := prove()).is_given and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        proofs.append(proof)
        say(f"{proof.name}: {proof.detail}")
        if not proof.is_given:
            return DrillReport(signal=signal_name, proofs=tuple(proofs))
    proofs.append(_compare_curves(record, other, undisturbed))
    say(f"{proofs[-1].name}: {proofs[-1].detail}")
    return DrillReport(signal=signal_name, proofs=tuple(proofs))


class _Drilled:
    """The preempted trial: its record before the signal, and proofs that are tried repeatedly."""

    def __init__(self, record: RecordFiles, num_steps: int) -> None:
        self.attempts = read_attempts(record)
        self.last_step = max(_read_metrics(record), default=0)
        self._record = record
        self._num_steps = num_steps
        self._checkpoints = frozenset(find_checkpoints(record))
        self._saved_step: int | None = None
        """The newest checkpoint when the end of the attempt was seen."""

    def find_checkpoint(self) -> Proof:
        """Look for a checkpoint since the signal."""
        steps = find_checkpoints(self._record)
        new = [step for step in steps if step not in self._checkpoints]
        if new:
            return Proof(name="newer checkpoint", is_given=True, detail=f"step {new[-1]} was saved")
        # An attempt that is signalled just after a checkpoint has nothing newer to save.
        last = self.last_step
        if self._next_attempt() is None:
            # Once the next attempt runs, the last step is no longer this attempt's.
            last = max(last, *_read_metrics(self._record), 0)
        is_at_one = self._end_code() == EXIT_INTERRUPTED and bool(steps) and steps[-1] >= last
        detail = f"step {last} had been saved just before" if is_at_one else "no checkpoint since the signal"
        return Proof(name="newer checkpoint", is_given=is_at_one, detail=detail)

    def find_end(self) -> Proof:
        """Look for the verdict of the preempted attempt."""
        code, attempt = self._end_code(), self.attempts[-1].name
        if code is not None and self._saved_step is None:
            self._saved_step = max(find_checkpoints(self._record), default=None)
        detail = (
            f"attempt {attempt} ended with {code}"
            if code is not None
            else f"attempt {attempt} has no verdict"
        )
        return Proof(name="orderly end", is_given=code == EXIT_INTERRUPTED, detail=detail)

    def find_next(self) -> Proof:
        """Look for the step that the next attempt resumed from."""
        step = self._resumed_step()
        if self._next_attempt() is None or step is None:
            return Proof(name="next attempt", is_given=False, detail="no attempt has gone on since")
        detail = f"went on from step {step}, and {self._saved_step} had been saved"
        return Proof(name="next attempt", is_given=step == self._saved_step, detail=detail)

    def find_steps(self) -> Proof:
        """Look for steps trained since."""
        start, last = self._resumed_step() or 0, max(_read_metrics(self._record), default=0)
        try:
            state = json.loads(self._record.read("run.json") or b"{}")
        except ValueError:
            state = {}
        is_given = last - start >= self._num_steps or state.get("finished_at") is not None
        return Proof(
            name="steps since", is_given=is_given, detail=f"{last - start} trained after step {start}"
        )

    def _end_code(self) -> int | None:
        """Return the exit code of the preempted attempt, or None."""
        name = self.attempts[-1].name
        return next((item.exit_code for item in read_attempts(self._record) if item.name == name), None)

    def _next_attempt(self) -> AttemptRecord | None:
        number = self.attempts[-1].number
        return next((item for item in read_attempts(self._record) if item.number > number), None)

    def _resumed_step(self) -> int | None:
        """Return the step that the next attempt resumed from, or None."""
        following = self._next_attempt()
        if following is None or following.started_at is None:
            return None
        events = _read_lines(self._record, "events.jsonl")
        resumes = [event for event in events if event.get("kind") == "resume"]
        since = [event for event in resumes if float(event.get("at", 0.0)) >= following.started_at]
        return int(since[0]["step"]) if since else None


def compare_metrics(
    drilled: Mapping[int, Mapping[str, Any]], undisturbed: Mapping[int, Mapping[str, Any]]
) -> str | None:
    """Return the first difference of two curves over their common steps, or None if they are equal."""
    for step in sorted(drilled.keys() & undisturbed.keys()):
        values, expected = drilled[step], undisturbed[step]
        for name in sorted(values.keys() & expected.keys()):
            if not any(part in name for part in _OF_TIME) and values[name] != expected[name]:
                return f"step {step}: {name} is {values[name]!r}, and undisturbed {expected[name]!r}"
    return None


def _read_undisturbed(
    ref: JobRef, spec_digest: str, path: Path | None
) -> tuple[Path | None, dict[int, dict[str, Any]]]:
    """Return a run to compare with and its metrics: `path`, else a finished run of this spec by the job."""
    if path is None:
        for run in list_runs(Path(ref.home).parent):
            is_same = run.state.spec_digest == spec_digest and run.is_finished
            if is_same and run.state.num_attempts == 1 and run.path != Path(ref.home):
                path = run.path
                break
        else:
            return None, {}
    record = DirectoryRecord(path)
    if record.read("metrics.jsonl") is None:
        raise StoreError(
            f"{path} is no run to compare with: it has no metrics.jsonl",
            allowed="the directory of an undisturbed run of the same spec",
            next_step="correct --against, or leave it out",
        )
    return path, _read_metrics(record)


def _compare_curves(
    record: RecordFiles, other: Path | None, undisturbed: Mapping[int, Mapping[str, Any]]
) -> Proof:
    name = "equal curve"
    if other is None:
        detail = "there is no undisturbed run of this spec to compare with; name one with --against"
        return Proof(name=name, is_given=None, detail=detail)
    metrics = _read_metrics(record)
    num_shared = len(metrics.keys() & undisturbed.keys())
    if num_shared == 0:
        return Proof(name=name, is_given=None, detail=f"{other.name} has no step in common")
    difference = compare_metrics(metrics, undisturbed)
    detail = difference or f"{num_shared} steps are equal to those of {other.name}"
    return Proof(name=name, is_given=difference is None, detail=detail)


def _read_metrics(record: RecordFiles) -> dict[int, dict[str, Any]]:
    return {int(line["step"]): line for line in _read_lines(record, "metrics.jsonl") if "step" in line}


def _read_lines(record: RecordFiles, name: str) -> Iterator[dict[str, Any]]:
    for line in (record.read(name) or b"").splitlines():
        try:
            content = json.loads(line)
        except ValueError:
            # The last line is being written.
            return
        if isinstance(content, dict):
            yield content
