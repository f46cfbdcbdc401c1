"""Rehearsing a preemption with the real signal, while it costs minutes and not a night.

Passed is a drill only with every proof, in this order: a complete checkpoint that is newer than the signal,
an attempt that ended with 75, a next attempt that went on from that very step, steps trained since, and a
curve that equals an undisturbed one. The last proof needs a run to compare with: `--against`, or a finished
run of the same spec beside it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.errors import EXIT_INTERRUPTED, CheckRefused, explain_refusal
from strop.launch.jobs.attempts import read_attempts
from strop.launch.jobs.contract import AttemptRecord, JobRef, JobState, RecordFiles
from strop.launch.jobs.home import job_path_of, read_plan
from strop.launch.jobs.launcher import Launcher
from strop.record import list_runs
from strop.store.atomic import MANIFEST_NAME

_OF_TIME = ("seconds_", "_per_s", "_bytes")
"""In names of metrics that differ from run to run: times, and what depends on them."""
_POLL_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """One thing that a drill shows."""

    name: str
    is_given: bool | None
    """None: there was nothing to show it with."""
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DrillReport:
    """What a drill showed."""

    signal: str
    proofs: tuple[Proof, ...]

    @property
    def has_passed(self) -> bool:
        """Whether no proof is missing that could be given."""
        return all(proof.is_given is not False for proof in self.proofs)

    @property
    def first_missing(self) -> Proof | None:
        """The first proof that failed."""
        return next((proof for proof in self.proofs if proof.is_given is False), None)


def drill(
    launcher: Launcher,
    ref: JobRef,
    *,
    member: int = 0,
    num_steps: int = 2,
    against: Path | None = None,
    restart_limit_s: float = 600.0,
    say: Callable[[str], None] = lambda text: None,
) -> DrillReport:
    """Preempt a running job and watch it come back.

    `num_steps`: how many steps the next attempt must train. `restart_limit_s`: how long a scheduler may take
    to start it again.

    Raises: CheckRefused if the job is not running; StoreError if a place does not answer.
    """
    status = next(one for one in launcher.status([ref]) if one.member == member)
    if status.state is not JobState.RUNNING:
        raise CheckRefused(
            explain_refusal(
                f"job {ref.job_id} is {status.state.value}",
                allowed="a drill of a running job",
                next_step="wait until `strop status` says running",
            )
        )
    plan = read_plan(job_path_of(ref.home))
    record = launcher.backend.open_record(ref, member)
    before = _Seen.of(record)
    signal_name = launcher.backend.preempt(ref, member)
    say(f"sent {signal_name} at step {before.last_step}")
    watch = _Watch(record=record, before=before, num_steps=num_steps)
    proofs: list[Proof] = []
    for prove, limit_s in (
        (watch.find_checkpoint, plan.grace_s),
        (watch.find_end, plan.grace_s),
        (watch.find_next, restart_limit_s),
        (watch.find_steps, restart_limit_s),
    ):
        proofs.append(_wait_for(prove, limit_s))
        say(f"{proofs[-1].name}: {proofs[-1].detail}")
        if not proofs[-1].is_given:
            return DrillReport(signal=signal_name, proofs=tuple(proofs))
    proofs.append(_compare_curves(record, against or _find_undisturbed(ref, plan.spec_digest)))
    say(f"{proofs[-1].name}: {proofs[-1].detail}")
    return DrillReport(signal=signal_name, proofs=tuple(proofs))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seen:
    """How a member stood at one moment."""

    attempts: list[AttemptRecord]
    checkpoints: frozenset[int]
    last_step: int

    @classmethod
    def of(cls, record: RecordFiles) -> _Seen:
        return cls(
            attempts=read_attempts(record),
            checkpoints=frozenset(_find_checkpoints(record)),
            last_step=max(_read_metrics(record), default=0),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Watch:
    """The proofs, each asked for until it is there."""

    record: RecordFiles
    before: _Seen
    num_steps: int

    def find_checkpoint(self) -> Proof:
        """Look for a checkpoint that was not there before the signal."""
        steps = set(_find_checkpoints(self.record))
        new = sorted(steps - self.before.checkpoints)
        # At a step that had just been saved there is nothing newer to save.
        is_at_one = self._resumed_step() in self.before.checkpoints and self.before.last_step in steps
        detail = f"step {new[-1]} was saved" if new else "no checkpoint since the signal"
        if not new and is_at_one:
            detail = f"step {self.before.last_step} had been saved just before"
        return Proof(name="newer checkpoint", is_given=bool(new) or is_at_one, detail=detail)

    def find_end(self) -> Proof:
        """Look for the verdict of the attempt that was told to end."""
        mine = self.before.attempts[-1].name
        code = next((one.exit_code for one in read_attempts(self.record) if one.name == mine), None)
        detail = f"attempt {mine} ended with {code}" if code is not None else f"attempt {mine} has no verdict"
        return Proof(name="orderly end", is_given=code == EXIT_INTERRUPTED, detail=detail)

    def find_next(self) -> Proof:
        """Look for the next attempt's first word of where it goes on."""
        step, newest = self._resumed_step(), max(_find_checkpoints(self.record), default=None)
        if self._next_attempt() is None or step is None:
            return Proof(name="next attempt", is_given=False, detail="no attempt has gone on since")
        is_given = newest is not None and step in {newest, *_find_checkpoints(self.record)}
        return Proof(name="next attempt", is_given=is_given, detail=f"went on from step {step}")

    def find_steps(self) -> Proof:
        """Look for steps that were trained since."""
        start, last = self._resumed_step() or 0, max(_read_metrics(self.record), default=0)
        is_done = self.record.read("run.json") is not None and _is_finished(self.record)
        is_given = last - start >= self.num_steps or is_done
        return Proof(
            name="steps since", is_given=is_given, detail=f"{last - start} trained after step {start}"
        )

    def _next_attempt(self) -> AttemptRecord | None:
        number = self.before.attempts[-1].number
        return next((one for one in read_attempts(self.record) if one.number > number), None)

    def _resumed_step(self) -> int | None:
        """Return the step that the newest resume of the run began at, if there was one since the signal."""
        following = self._next_attempt()
        if following is None or following.started_at is None:
            return None
        events = [one for one in _read_lines(self.record, "events.jsonl") if one.get("kind") == "resume"]
        since = [one for one in events if float(one.get("at", 0.0)) >= following.started_at]
        return int(since[-1]["step"]) if since else None


def compare_metrics(
    one: Mapping[int, Mapping[str, Any]], other: Mapping[int, Mapping[str, Any]]
) -> str | None:
    """Return the first difference of two curves over the steps that both have, or None if they are equal."""
    for step in sorted(one.keys() & other.keys()):
        mine, theirs = one[step], other[step]
        for name in sorted(mine.keys() & theirs.keys()):
            if not any(part in name for part in _OF_TIME) and mine[name] != theirs[name]:
                return f"step {step}: {name} is {mine[name]!r}, and undisturbed {theirs[name]!r}"
    return None


def _compare_curves(record: RecordFiles, against: Path | None) -> Proof:
    name = "equal curve"
    if against is None:
        detail = "there is no undisturbed run of this spec to compare with; name one with --against"
        return Proof(name=name, is_given=None, detail=detail)
    mine = _read_metrics(record)
    theirs = {int(line["step"]): line for line in _parse_lines((against / "metrics.jsonl").read_bytes())}
    num_shared = len(mine.keys() & theirs.keys())
    difference = compare_metrics(mine, theirs)
    if num_shared == 0:
        return Proof(name=name, is_given=None, detail=f"{against} has no step in common")
    detail = difference or f"{num_shared} steps are equal to those of {against.name}"
    return Proof(name=name, is_given=difference is None, detail=detail)


def _find_undisturbed(ref: JobRef, spec_digest: str) -> Path | None:
    """Return a finished run of the same spec beside the job, which lived once."""
    for run in list_runs(Path(ref.home).parent):
        is_same = run.state.spec_digest == spec_digest and run.is_finished
        if is_same and run.state.num_attempts == 1 and run.path != Path(ref.home):
            return run.path
    return None


def _wait_for(prove: Callable[[], Proof], limit_s: float) -> Proof:
    deadline = time.monotonic() + limit_s
    while not (proof := prove()).is_given and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return proof


def _find_checkpoints(record: RecordFiles) -> list[int]:
    sealed = [name for name in record.list("checkpoints") if name.endswith(f"/{MANIFEST_NAME}")]
    numbers = [name.split("/")[1].removeprefix("step-") for name in sealed]
    return sorted(int(number) for number in numbers if number.isdigit())


def _is_finished(record: RecordFiles) -> bool:
    try:
        return json.loads(record.read("run.json") or b"{}").get("finished_at") is not None
    except ValueError:
        return False


def _read_metrics(record: RecordFiles) -> dict[int, dict[str, Any]]:
    return {int(line["step"]): line for line in _read_lines(record, "metrics.jsonl") if "step" in line}


def _read_lines(record: RecordFiles, name: str) -> Iterator[dict[str, Any]]:
    yield from _parse_lines(record.read(name) or b"")


def _parse_lines(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            # The last line, while it is written.
            return
