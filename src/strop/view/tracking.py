"""Send a run to trackers: an observer in the training process, and a follower process for each tracker.

A follower is a niced process that reads the growing run directory and sends the news to one tracker. The
record is the queue: training never waits, a slow tracker loses nothing, and one that hangs, raises or crashes
its process does not harm the run. `trackers/NAME.json` records how far a tracker is; the next follower, of
this attempt or a later one, continues from there.
"""

from __future__ import annotations

import json
import os
import sys
import time
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from strop.errors import CorruptRecord
from strop.evaluate import read_result
from strop.hardware import ChildProcess, spawn, terminate
from strop.hardware.process import step_back
from strop.io.atomic import write_bytes_atomically
from strop.io.redaction import is_secret, redact
from strop.record import Event, EventKind, RunDir
from strop.record.fence import GRACE_VARIABLE
from strop.record.files import DirectoryRecord, LineFollower
from strop.rollout import Rollout
from strop.spec import TrackersSpec
from strop.store.policy import is_offline
from strop.train.observer import EvalSummary, Observer
from strop.view.run_record import choose_at_step
from strop.view.terminal import ALARM_KINDS
from strop.view.trackers import (
    EVENTS,
    KINDS,
    ROLLOUTS,
    Row,
    Sent,
    TrackedRun,
    Tracker,
    name_metric,
    require_trackers,
)

FOLDER = "trackers"
"""Folder of the run directory with each tracker's progress and files."""
LOOK_EVERY_S = 0.5
NICENESS = 5
"""A follower hardly computes after its start; with a higher value, other processes would starve it."""
STOP_LIMIT_S = 10.0
"""Limit for sending the rest of a stopped or failed run: the next attempt sends what is missing."""
RESTART_AFTER_S = 30.0
"""Pause before an ended follower is restarted; it doubles each time."""
MAX_TEXT_CHARS = 8000
"""Longest part of a prompt or a reply that is sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowOrder:
    """The arguments of a follower. Keys are not among them: it inherits the environment."""

    name: str
    run_path: str
    attempt_path: str
    first_step: int
    project: str
    is_offline: bool
    rollouts_every: int | None

    @property
    def folder(self) -> Path:
        """The folder of the tracker's own files."""
        return Path(self.run_path) / FOLDER / self.name

    @property
    def sent_path(self) -> Path:
        """The file of the tracker's progress."""
        return sent_path(Path(self.run_path), self.name)


def sent_path(run_path: Path, name: str) -> Path:
    """Return the file of a tracker's progress."""
    return run_path / FOLDER / f"{name}.json"


def read_sent(path: Path) -> Sent:
    """Return a tracker's progress; none if it was never started."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return Sent()
    return Sent(**{**content, "evaluations": tuple(content["evaluations"])})


class Follower:
    """Sends a growing run to one tracker."""

    def __init__(self, order: FollowOrder, tracker: Tracker) -> None:
        self._order, self._tracker = order, tracker
        self._run_path = Path(order.run_path)
        # These logs only grow: an attempt cuts them back before it trains.
        self._record = DirectoryRecord(self._run_path)
        self._metrics = LineFollower(self._record, "metrics.jsonl")
        self._events = LineFollower(self._record, "events.jsonl")
        self._sent = read_sent(order.sent_path)
        self._task = ""

    def follow(self) -> None:
        """Start the tracker, send everything until the attempt has ended, and finish.

        Raises: as the tracker; StoreError or CorruptRecord if the record cannot be read.
        """
        run = RunDir.open(self._run_path)
        self._order.folder.mkdir(parents=True, exist_ok=True)
        settings = tomllib.loads(run.spec_path.read_text(encoding="utf-8"))
        self._task = str(run.state.facts.get("task") or settings.get("task", {}).get("name"))
        facts = {key: value for key, value in run.state.facts.items() if isinstance(value, str | int | float)}
        tracked = TrackedRun(
            name=self._run_path.name,
            project=self._order.project,
            folder=self._order.folder,
            config={**settings, "facts": facts},
            first_step=self._order.first_step,
            is_offline=self._order.is_offline,
        )
        self._save(self._tracker.start(tracked, self._sent))
        cause = None
        while cause is None:
            # Read first, so that everything recorded before the end is sent.
            attempt = json.loads((Path(self._order.attempt_path) / "attempt.json").read_bytes())
            cause = str(attempt["cause"]) if "ended_at" in attempt else None
            self._send_news()
            if cause is None:
                time.sleep(LOOK_EVERY_S)
        self._tracker.finish(cause=cause)

    def _send_news(self) -> None:
        for line in self._metrics.read_records()[1]:
            step = int(line.pop("step"))
            if step > self._sent.step:
                self._tracker.log(step, {name_metric(name): float(value) for name, value in line.items()})
                self._save(replace(self._sent, step=step))
            every = self._order.rollouts_every
            if every and (step == 1 or step % every == 0) and step > self._sent.rollouts_step:
                chosen = choose_at_step(self._record, step)
                if chosen is not None:
                    self._tracker.table(ROLLOUTS, step, list(map(describe_rollout, chosen.rollouts)))
                self._save(replace(self._sent, rollouts_step=step))
        for path in sorted((self._run_path / "eval").glob("*.json")):
            if path.name not in self._sent.evaluations:
                self._send_evaluation(path)
        self._send_events()

    def _send_evaluation(self, path: Path) -> None:
        try:
            result = read_result(path)
        except CorruptRecord:
            return
        place = "eval" if result.task == self._task else f"eval/{result.task}"
        score, values = result.greedy, {}
        if score.accuracy is not None and result.is_valid:
            values = {"accuracy": score.accuracy, "accuracy_low": score.low, "accuracy_high": score.high}
            if result.sampled is not None and result.sampled.accuracy is not None:
                values["sampled_accuracy"] = result.sampled.accuracy
        if values:
            self._tracker.log(result.step, {f"{place}/{name}": value for name, value in values.items()})
        self._save(replace(self._sent, evaluations=(*self._sent.evaluations, path.name)))

    def _send_events(self) -> None:
        """Send new events, grouped by step."""
        by_step: dict[int, list[Row]] = {}
        at = self._sent.at
        for line in self._events.read_records()[1]:
            if line["at"] > self._sent.at:
                shown = {key: str(line[key]) for key in ("kind", "cause", "detail")}
                is_alarm = float(EventKind(line["kind"]) in ALARM_KINDS)
                by_step.setdefault(line["step"], []).append({**shown, "is_alarm": is_alarm})
                at = max(at, float(line["at"]))
        for step, rows in by_step.items():
            self._tracker.table(EVENTS, step, rows)
        if by_step:
            self._save(replace(self._sent, at=at))

    def _save(self, sent: Sent) -> None:
        self._sent = sent
        write_bytes_atomically(self._order.sent_path, json.dumps(asdict(sent)).encode())


def describe_rollout(rollout: Rollout) -> Row:
    """Return a rollout as a row of a table: prompt and reply cut, several turns with their roles."""
    later = rollout.turns[1:]
    reply = later[0].text if len(later) == 1 else "\n\n".join(f"[{turn.role}]\n{turn.text}" for turn in later)
    outcome = rollout.outcome
    return {
        # An attempt whose environment failed has no turns.
        "prompt": rollout.turns[0].text[:MAX_TEXT_CHARS] if rollout.turns else "",
        "reply": reply[:MAX_TEXT_CHARS],
        "reward": outcome.reward,
        "is_correct": None if outcome.is_correct is None else float(outcome.is_correct),
        "example": rollout.example.example_id,
        "tokens": float(rollout.num_sampled_tokens),
    }


class TrackingObserver:
    """Forwards every call to another observer, and supervises the followers."""

    def __init__(self, spec: TrackersSpec, observer: Observer) -> None:
        """Raises: CheckRefused if a tracker cannot start here."""
        require_trackers(spec)
        self._spec, self._observer = spec, observer
        self._run_dir: RunDir | None = None
        self._followers: list[_FollowerProcess] = []
        self._step = 0

    def open_run(self, run_dir: RunDir) -> None:
        """Take the run's directory, which records notices on the followers. Call it before the run starts."""
        self._run_dir = run_dir

    def on_start(self, *, run: str, first_step: int, num_steps: int) -> None:
        """Start the followers, and forward the call."""
        self._step = first_step
        attempt_path = (Path(run) / "latest").resolve()
        for name in self._spec.use:
            order = FollowOrder(
                name=name,
                run_path=str(Path(run).absolute()),
                attempt_path=str(attempt_path),
                first_step=first_step,
                project=self._spec.project,
                is_offline=self._spec.offline or is_offline(),
                rollouts_every=self._spec.rollouts_every,
            )
            self._followers.append(_FollowerProcess(order=order, child=start_follower(order)))
        self._observer.on_start(run=run, first_step=first_step, num_steps=num_steps)

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """Forward the call, and restart ended followers, without waiting."""
        self._step = int(metrics["step"])
        self._observer.on_step(metrics)
        for follower in self._followers:
            exit_code = follower.child.poll()
            if exit_code is None:
                continue
            if not follower.num_ends:
                self._announce(
                    "tracker_failed",
                    f"{follower.order.name} ended with {exit_code}, and is started again; its last line:"
                    f" {follower.child.tail(1)}",
                )
            if follower.ended_at is None:
                follower.ended_at, follower.num_ends = time.monotonic(), follower.num_ends + 1
            if time.monotonic() - follower.ended_at >= RESTART_AFTER_S * 2 ** (follower.num_ends - 1):
                follower.child, follower.ended_at = start_follower(follower.order), None

    def on_event(self, event: Event) -> None:
        """Forward the call."""
        self._observer.on_event(event)

    def on_eval(self, summary: EvalSummary) -> None:
        """Forward the call."""
        self._observer.on_eval(summary)

    def on_end(self, *, cause: str) -> None:
        """Let the followers send the rest within the limit, end them, and forward the call."""
        limit_s = self._spec.finish_limit_s
        if cause != "done":
            # After a signal, at most a quarter of the launcher's grace.
            limit_s = min(limit_s, STOP_LIMIT_S, float(os.environ.get(GRACE_VARIABLE, "inf")) / 4)
        deadline = time.monotonic() + limit_s
        for follower in self._followers:
            if follower.child.poll() and cause == "done":
                # One more try: the cause of its failure may have passed.
                follower.child = start_follower(follower.order)
        for follower in self._followers:
            exit_code = follower.child.wait(max(deadline - time.monotonic(), 0.0))
            terminate(follower.child, 0.0)
            if exit_code != 0:
                self._report_missing(follower, exit_code, limit_s)
        self._followers.clear()
        self._observer.on_end(cause=cause)

    def _report_missing(self, follower: _FollowerProcess, exit_code: int | None, limit_s: float) -> None:
        assert self._run_dir is not None
        steps = [int(line["step"]) for line in self._run_dir.metrics.read()]
        num_missing = sum(step > read_sent(follower.order.sent_path).step for step in steps)
        lacking = f"the numbers of {num_missing} of {len(steps)} steps" if num_missing else "what came last"
        why = (
            f"it had not taken all {limit_s:g} s after the end"
            if exit_code is None
            else f"it ended with {exit_code}; its last line: {follower.child.tail(1)}"
        )
        self._announce(
            "tracker_incomplete",
            f"{follower.order.name} may lack {lacking}: {why}. The record has it, and it is sent where the"
            " run goes on",
        )

    def _announce(self, cause: str, detail: str) -> None:
        event = Event(kind=EventKind.NOTICE, step=self._step, cause=cause, detail=detail)
        if self._run_dir is not None:
            self._run_dir.events.append(event)
        self._observer.on_event(event)


@dataclass(kw_only=True, slots=True)
class _FollowerProcess:
    """A follower's process and its ends."""

    order: FollowOrder
    child: ChildProcess
    num_ends: int = 0
    ended_at: float | None = None
    """Monotonic time; None while it runs."""


def start_follower(order: FollowOrder) -> ChildProcess:
    """Start a follower at a lower priority than the trainer."""
    log_path = Path(order.attempt_path) / f"tracker-{order.name}.log"
    child = spawn([sys.executable, "-m", "strop.view.tracking", json.dumps(asdict(order))], log_path)
    step_back(child.pid, by=NICENESS)
    return child


class _Redacting:
    """A stream that writes whole lines, with the environment's credentials removed."""

    def __init__(self, stream: TextIO, values: tuple[str, ...]) -> None:
        self._stream, self._values, self._rest = stream, values, ""

    def write(self, text: str) -> int:
        """Write the complete lines."""
        whole, end, self._rest = (self._rest + text).rpartition("\n")
        self._stream.write(redact(whole, self._values) + end)
        self._stream.flush()
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main(words: list[str]) -> None:
    """Follow a run; the one argument is a `FollowOrder` as JSON."""
    values = tuple(value for name, value in os.environ.items() if is_secret(name, value))
    # Packages may print credentials, and the log is mirrored.
    sys.stdout, sys.stderr = (_Redacting(stream, values) for stream in (sys.stdout, sys.stderr))
    order = FollowOrder(**json.loads(words[0]))
    Follower(order, KINDS[order.name].adapter()).follow()


if __name__ == "__main__":
    main(sys.argv[1:])
