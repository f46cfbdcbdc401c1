"""Trackers of a run: an observer that hands the news to a thread for each tracker.

Training never waits for a tracker: the news are queued. One that raises is dropped, with a notice, and one
that hangs is left behind at the end; neither harms the run. `trackers/NAME.json` has the tracker's id of the
run and the last step that was sent: where the run is resumed, it is resumed there, and what it lacks is sent.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue

from strop.io.atomic import write_bytes_atomically
from strop.io.redaction import is_secret, redact
from strop.record import Event, EventKind, RunDir
from strop.record.fence import GRACE_VARIABLE
from strop.record.files import DirectoryRecord
from strop.rollout import Rollout
from strop.spec import TrackersSpec
from strop.train.observer import EvalSummary, Observer
from strop.view import trackers
from strop.view.live import LiveRun
from strop.view.terminal import ALARM_KINDS
from strop.view.trackers import Row, TrackedRun, Tracker
from strop.view.watching import summarize

FOLDER = "trackers"
"""Folder of the run directory with each tracker's progress and files."""
STOP_LIMIT_S = 10.0
"""Limit for sending the rest of a stopped or failed run: the next attempt sends what is missing."""
MAX_TEXT_CHARS = 8000
"""Longest part of a prompt or a reply that is sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """A tracker's progress with a run."""

    id: str | None = None
    """Its id of the run; None: it has not been started there."""
    step: int = 0
    """The last step whose metrics were sent."""
    eval_step: int = -1


def sent_path(run_path: Path, name: str) -> Path:
    """Return the file of a tracker's progress."""
    return run_path / FOLDER / f"{name}.json"


def read_sent(path: Path) -> Sent:
    """Return a tracker's progress; none if it was never started."""
    try:
        return Sent(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return Sent()


class Sender(threading.Thread):
    """Sends a run's news to one tracker. `error` says why it ended before the run did."""

    def __init__(self, name: str, run: RunDir, first_step: int, spec: TrackersSpec) -> None:
        super().__init__(name=f"tracker-{name}", daemon=True)
        self.tracker_name = name
        self.error: str | None = None
        self.news: SimpleQueue[Mapping[str, float] | EvalSummary | Event | str] = SimpleQueue()
        """Metrics of a step, an evaluation, an event, or the word with which the run ended."""
        self.sent = read_sent(sent_path(run.path, name))
        self._run_dir, self._first_step, self._spec = run, first_step, spec
        self._record = LiveRun(key=name, record=DirectoryRecord(run.path))

    def run(self) -> None:
        """Start the tracker, send what it lacks and what comes, and finish."""
        try:
            tracker = self._start()
            self._record.read_metrics()
            for line in self._record.metrics:
                if line["step"] <= self._first_step:
                    self._send_step(tracker, line)
            for result in self._record.read_results():
                if result.step <= self._first_step and result.greedy.accuracy is not None:
                    self._send_eval(tracker, summarize(result, result.greedy.accuracy))
            while not isinstance(news := self.news.get(), str):
                if isinstance(news, EvalSummary):
                    self._send_eval(tracker, news)
                elif isinstance(news, Event):
                    tracker.table(trackers.EVENTS, news.step, [describe_event(news)])
                else:
                    self._send_step(tracker, news)
            tracker.finish(cause=news)
        except BaseException as error:
            # A tracker is another's code, and no run ends with it. Its message may quote a key.
            values = [value for name, value in os.environ.items() if is_secret(name, value)]
            self.error = redact(f"{type(error).__name__}: {error}", values)

    def _start(self) -> Tracker:
        folder = self._run_dir.path / FOLDER / self.tracker_name
        folder.mkdir(parents=True, exist_ok=True)
        facts = self._run_dir.state.facts
        shown = {key: value for key, value in facts.items() if isinstance(value, str | int | float)}
        adapter, _ = trackers.KINDS[self.tracker_name]
        if not adapter.keeps_later:
            first = self._first_step
            sent = self.sent
            self.sent = replace(sent, step=min(sent.step, first), eval_step=min(sent.eval_step, first))
        tracker = adapter(
            TrackedRun(
                name=self._run_dir.path.name,
                spec=self._spec,
                folder=folder,
                config={**self._record.read_spec(), "facts": shown},
                first_step=self._first_step,
                id=self.sent.id,
            )
        )
        self._save(replace(self.sent, id=tracker.id))
        return tracker

    def _send_step(self, tracker: Tracker, metrics: Mapping[str, float]) -> None:
        step = int(metrics["step"])
        if step <= self.sent.step:
            return
        every = self._spec.rollouts_every
        if every and (step == 1 or step % every == 0):
            run = self._record
            rows = run.choose_rows(step) if step in run.rollout_steps() else []
            if rows:
                rollouts = (run.read_row(step, row["key"]).rollout for row in rows)
                tracker.table(trackers.ROLLOUTS, step, list(map(describe_rollout, rollouts)))
        # Last: what is killed before the step is noted as sent sends it again, and numbers would be twice.
        values = {trackers.name_metric(name): float(v) for name, v in metrics.items() if name != "step"}
        tracker.log(step, values)
        self._save(replace(self.sent, step=step))

    def _send_eval(self, tracker: Tracker, summary: EvalSummary) -> None:
        if summary.step <= self.sent.eval_step:
            return
        values = {"accuracy": summary.greedy_accuracy, "accuracy_low": summary.greedy_low}
        values["accuracy_high"] = summary.greedy_high
        if summary.sampled_accuracy is not None:
            values["sampled_accuracy"] = summary.sampled_accuracy
        if summary.invalid_cause is None:
            tracker.log(summary.step, {f"eval/{name}": value for name, value in values.items()})
        self._save(replace(self.sent, eval_step=summary.step))

    def _save(self, sent: Sent) -> None:
        self.sent = sent
        path = sent_path(self._run_dir.path, self.tracker_name)
        write_bytes_atomically(path, json.dumps(asdict(sent)).encode())


def describe_event(event: Event) -> Row:
    """Return an event as a row of a table."""
    shown = {"kind": event.kind.value, "cause": event.cause, "detail": event.detail}
    return {**shown, "is_alarm": float(event.kind in ALARM_KINDS)}


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
    """Forwards every call to another observer, and hands it to the trackers."""

    def __init__(self, spec: TrackersSpec, observer: Observer) -> None:
        """Raises: CheckRefused if a tracker cannot start here."""
        trackers.require_trackers(spec)
        self._spec, self._observer = spec, observer
        self._run_dir: RunDir | None = None
        self._senders: list[Sender] = []
        self._step = 0

    def open_run(self, run_dir: RunDir) -> None:
        """Take the run's directory. Call it before the run starts."""
        self._run_dir = run_dir

    def on_start(self, *, run: str, first_step: int, num_steps: int) -> None:
        """Start the trackers, and forward the call."""
        self._step = first_step
        for name in self._spec.use:
            assert self._run_dir is not None
            sender = Sender(name, self._run_dir, first_step, self._spec)
            sender.start()
            self._senders.append(sender)
        self._observer.on_start(run=run, first_step=first_step, num_steps=num_steps)

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """Forward the call and queue the numbers; say which tracker has failed."""
        self._step = int(metrics["step"])
        self._hand_out(metrics)
        self._observer.on_step(metrics)
        for sender in [sender for sender in self._senders if sender.error is not None]:
            self._report(sender)

    def on_event(self, event: Event) -> None:
        """Forward the call, and queue the event."""
        self._hand_out(event)
        self._observer.on_event(event)

    def on_eval(self, summary: EvalSummary) -> None:
        """Forward the call, and queue the result."""
        self._hand_out(summary)
        self._observer.on_eval(summary)

    def on_end(self, *, cause: str) -> None:
        """Let the trackers send the rest within the limit, and forward the call."""
        limit_s = self._spec.finish_limit_s
        if cause != "done":
            # After a signal, at most a quarter of the launcher's grace.
            limit_s = min(limit_s, STOP_LIMIT_S, float(os.environ.get(GRACE_VARIABLE, "inf")) / 4)
        deadline = time.monotonic() + limit_s
        self._hand_out(cause)
        for sender in list(self._senders):
            sender.join(max(deadline - time.monotonic(), 0.0))
            if sender.is_alive():
                sender.error = f"it had not taken all {limit_s:g} s after the end"
            if sender.error is not None:
                self._report(sender)
        self._senders.clear()
        self._observer.on_end(cause=cause)

    def _hand_out(self, news: Mapping[str, float] | EvalSummary | Event | str) -> None:
        for sender in self._senders:
            sender.news.put(news)

    def _report(self, sender: Sender) -> None:
        """Record that a tracker got no more, once, and leave it."""
        self._senders.remove(sender)
        assert self._run_dir is not None
        event = Event(
            kind=EventKind.NOTICE,
            step=self._step,
            cause="tracker_failed",
            detail=f"{sender.tracker_name} has the steps up to {sender.sent.step}: {sender.error}. The record"
            " has all; what it lacks is sent where the run is resumed",
        )
        self._run_dir.events.append(event)
        self._observer.on_event(event)
