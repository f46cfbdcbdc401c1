from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from strop.record import Event, EventKind, RunDir
from strop.spec import TrackersSpec
from strop.view.trackers import Row, Sent, TrackedRun
from strop.view.tracking import (
    MAX_TEXT_CHARS,
    Follower,
    FollowOrder,
    TrackingObserver,
    describe_rollout,
    read_sent,
    sent_path,
)
from tests.fixtures.records import RecordSize, make_record
from tests.fixtures.tiny_run import Notes
from tests.view.synthetic_run import make_rollouts

SIZE = RecordSize(num_steps=12, num_rollouts=8, num_reply_tokens=4, num_evaluations=3, num_examples=4)
KEY = "planted-key-" + "0" * 28


class Kept:
    """A tracker that keeps what it is told."""

    def __init__(self, *, forgets: bool = False) -> None:
        self.forgets = forgets
        self.run: TrackedRun | None = None
        self.numbers: list[tuple[int, Mapping[str, float]]] = []
        self.tables: list[tuple[str, int, Sequence[Row]]] = []
        self.causes: list[str] = []

    def start(self, run: TrackedRun, sent: Sent) -> Sent:
        self.run = run
        return replace(sent.cut_after(run.first_step) if self.forgets else sent, id="kept")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.numbers.append((step, values))

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        self.tables.append((name, step, rows))

    def finish(self, *, cause: str) -> None:
        self.causes.append(cause)

    def steps_of(self, name: str) -> list[int]:
        return [step for step, values in self.numbers if name in values]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of twelve steps that has ended; each test has what trackers have of it for itself."""
    return make_record(tmp_path_factory.mktemp("record"), SIZE).path


@pytest.fixture
def order(recorded: Path, tmp_path: Path) -> FollowOrder:
    for name in ("run.json", "spec.toml", "metrics.jsonl", "events.jsonl", "eval", "rollouts", "attempts"):
        copy = shutil.copytree if (recorded / name).is_dir() else shutil.copy
        copy(recorded / name, tmp_path / name)
    return FollowOrder(
        name="wandb",
        run_path=str(tmp_path),
        attempt_path=str(recorded / "attempts" / "1"),
        first_step=0,
        project="study",
        is_offline=True,
        rollouts_every=6,
    )


def follow(order: FollowOrder, tracker: Kept) -> Sent:
    Follower(order, tracker).follow()
    return read_sent(order.sent_path)


def test_a_tracker_gets_every_number_of_the_record_once(order: FollowOrder) -> None:
    tracker = Kept()
    sent = follow(order, tracker)
    lines = [json.loads(line) for line in (Path(order.run_path) / "metrics.jsonl").read_text().splitlines()]
    got = [(step, values) for step, values in tracker.numbers if "train/reward_mean" in values]
    assert [step for step, _ in got] == [line["step"] for line in lines]
    assert sorted(got[0][1].values()) == sorted(value for name, value in lines[0].items() if name != "step")
    assert tracker.steps_of("eval/accuracy") == [0, 6, 12]
    scores = next(values for _, values in tracker.numbers if "eval/accuracy" in values)
    assert scores["eval/accuracy_low"] <= scores["eval/accuracy"] <= scores["eval/accuracy_high"]
    samples = [(step, rows) for name, step, rows in tracker.tables if name == "rollouts"]
    assert [step for step, _ in samples] == [1, 6, 12]
    assert {"prompt", "reply", "reward", "example"} <= set(samples[0][1][0])
    happened = [row for name, _, rows in tracker.tables if name == "events" for row in rows]
    assert {row["is_alarm"] for row in happened} == {0.0, 1.0}
    assert tracker.causes == ["finished"]
    assert tracker.run is not None
    assert tracker.run.config["train"] == {"steps": 12, "group_size": 8}
    assert (sent.id, sent.step, sent.rollouts_step, len(sent.evaluations)) == ("kept", 12, 12, 3)


def test_a_run_that_goes_on_is_not_sent_twice(order: FollowOrder) -> None:
    follow(order, Kept())
    # Attempt 2 begins after step 9: the later steps were cut off and computed anew.
    again, forgetful = Kept(), Kept(forgets=True)
    order = replace(order, first_step=9)
    follow(order, again)
    assert (again.numbers, again.tables) == ([], [])
    follow(order, forgetful)
    assert forgetful.steps_of("train/reward_mean") == [10, 11, 12]
    assert forgetful.steps_of("eval/accuracy") == [12]
    assert [step for name, step, _ in forgetful.tables if name == "rollouts"] == [12]


def test_what_a_tracker_lacks_is_sent_by_the_next_follower(order: FollowOrder) -> None:
    class Broken(Kept):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            if step == 4:
                raise ConnectionError("gone")
            super().log(step, values)

    broken, healthy = Broken(), Kept()
    with pytest.raises(ConnectionError):
        follow(order, broken)
    follow(order, healthy)
    both = broken.steps_of("train/reward_mean") + healthy.steps_of("train/reward_mean")
    assert both == list(range(1, 13))


def test_no_text_leaves_where_no_rollouts_are_wanted(order: FollowOrder) -> None:
    tracker = Kept()
    follow(replace(order, rollouts_every=None), tracker)
    assert {name for name, _, _ in tracker.tables} == {"events"}


def test_a_rollout_is_a_row_whatever_became_of_it() -> None:
    (one,) = make_rollouts(1, ["x" * (MAX_TEXT_CHARS + 1)], prompt="What?")
    row = describe_rollout(one)
    assert (row["prompt"], row["reply"], row["is_correct"]) == ("What?", "x" * MAX_TEXT_CHARS, 0.0)
    several = describe_rollout(replace(one, turns=(*one.turns, one.turns[0], one.turns[1])))
    assert str(several["reply"]).startswith("[assistant]\nxxx")
    # Its environment failed before it said anything.
    nothing = describe_rollout(replace(one, turns=()))
    assert (nothing["prompt"], nothing["reply"], nothing["tokens"]) == ("", "", 0.0)


# A package in the place of tensorboardX, whose writer does what a test wants.
_PACKAGE = """
import os, time
class SummaryWriter:
    def __init__(self, *args, **named):
        pass
    def __getattr__(self, name):
        return lambda *args: None
    def add_scalar(self, *args):
        {0}
"""


class Tracked:
    """A run with an observer whose tracker is a package that a test writes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, limit_s: float) -> None:
        self._package = folder / "packages" / "tensorboardX.py"
        self._package.parent.mkdir()
        monkeypatch.syspath_prepend(str(self._package.parent))
        monkeypatch.setenv("PYTHONPATH", str(self._package.parent))
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        self.write("pass")
        self.notes = Notes()
        self.spec = TrackersSpec(use=("tensorboard",), finish_limit_s=limit_s)
        self.observer = TrackingObserver(self.spec, self.notes)
        self.run = RunDir.create(folder, "tiny", "", "digest", {})
        self.observer.open_run(self.run)
        self.attempt = self.run.begin_attempt()
        self.observer.on_start(run=str(self.run.path), first_step=0, num_steps=3)

    def write(self, action: str) -> None:
        self._package.write_text(_PACKAGE.format(action))

    def step(self, step: int) -> None:
        self.run.metrics.append(step, {"loss": 0.5})
        self.observer.on_step({"step": step, "loss": 0.5})

    def end(self, cause: str = "done") -> list[Event]:
        self.run.end_attempt(self.attempt, cause=cause, exit_code=0, step=3)
        self.observer.on_end(cause=cause)
        self.run.release()
        return [event for event in self.run.events.read() if event.cause.startswith("tracker_")]

    @property
    def sent(self) -> Sent:
        return read_sent(sent_path(self.run.path, "tensorboard"))

    @property
    def log(self) -> str:
        return (self.run.path / "latest" / "tracker-tensorboard.log").read_text()


def test_a_tracker_that_hangs_costs_the_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracked = Tracked(tmp_path, monkeypatch, limit_s=0.1)
    tracked.write("time.sleep(10**6)")
    for step in (1, 2, 3):
        tracked.step(step)
    (event,) = tracked.end()
    assert (event.kind, event.cause, event.step) == (EventKind.NOTICE, "tracker_incomplete", 3)
    assert "tensorboard may lack the numbers of 3 of 3 steps" in event.detail
    # What came before is said first, and the end is still the last word.
    assert [one.cause for one in tracked.notes.events] == ["tracker_incomplete"]
    assert [line["step"] for line in tracked.notes.steps] == [1, 2, 3]
    assert tracked.notes.ends == ["done"]


@pytest.mark.slow
def test_a_tracker_that_raises_is_started_again_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strop.view.tracking.RESTART_AFTER_S", 0.0)
    tracked = Tracked(tmp_path, monkeypatch, limit_s=600.0)
    tracked.write("raise RuntimeError('refused: ' + os.environ['WANDB_API_KEY'])")
    tracked.step(1)
    (watched,) = tracked.observer._followers
    assert watched.child.wait(60.0) == 1
    tracked.write("pass")
    tracked.step(2)
    tracked.step(3)
    (event,) = tracked.end()
    assert event.cause == "tracker_failed"
    assert "tensorboard ended with 1, and is started again" in event.detail
    # The next one sent everything, and the key is in no file.
    assert tracked.sent.step == 3
    assert "RuntimeError: refused: <redacted>" in tracked.log
    assert "RuntimeError: refused: <redacted>" in event.detail
    held = [
        path for path in tracked.run.path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()
    ]
    assert not held


def test_without_trackers_nothing_is_started(tmp_path: Path) -> None:
    notes = Notes()
    observer = TrackingObserver(TrackersSpec(), notes)
    observer.on_start(run=str(tmp_path), first_step=0, num_steps=1)
    observer.on_step({"step": 1})
    observer.on_end(cause="done")
    assert (notes.starts, notes.ends) == ([(str(tmp_path), 0, 1)], ["done"])
    assert list(tmp_path.iterdir()) == []
