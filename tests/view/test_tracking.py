"""Trackers get every number of a run once, and a slow or broken one costs the run nothing."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from strop.errors import CheckRefused, ConfigError
from strop.evaluate import result_name, write_result
from strop.record import Event, EventKind, RunDir
from strop.record.rollouts import write_rollouts
from strop.record.run_dir import find_resumable
from strop.spec import TrackersSpec, load_spec
from strop.spec.output import TRACKERS
from strop.train.observer import EvalSummary
from strop.view.trackers import name_metric, require_trackers
from strop.view.tracking import (
    MAX_TEXT_CHARS,
    Sent,
    TrackingObserver,
    describe_rollout,
    read_sent,
    sent_path,
)
from tests.fixtures.jobs import wait_for
from tests.fixtures.tiny_run import Notes
from tests.view.synthetic_run import make_result, make_rollouts

KEY = "planted-key-" + "0" * 28
Calls = list[tuple[str, tuple[Any, ...]]]


def make_package(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object] = lambda: None) -> Calls:
    """Put a package in the place of tensorboardX; `act` is called for each number. Return the calls."""
    calls: Calls = []

    class SummaryWriter:
        def __init__(self, folder: str, **named: Any) -> None:
            calls.append(("open", (named["purge_step"],)))

        def add_scalar(self, *args: Any) -> None:
            act()
            calls.append(("scalar", args))

        def add_text(self, *args: Any) -> None:
            calls.append(("text", args))

        def close(self) -> None:
            calls.append(("close", ()))

        def flush(self) -> None: ...

    module: Any = ModuleType("tensorboardX")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    monkeypatch.setattr("strop.view.trackers.find_spec", lambda name: name)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    return calls


class Tracked:
    """A run with an observer whose tracker is a package that a test makes."""

    def __init__(self, folder: Path, *, first_step: int = 0, limit_s: float = 60.0, **spec: Any) -> None:
        self.notes = Notes()
        spec = {"use": ("tensorboard",), "finish_limit_s": limit_s, "rollouts_every": 2, **spec}
        self.observer = TrackingObserver(TrackersSpec(**spec), self.notes)
        made = find_resumable(folder, "tiny", "digest")
        self.run = made or RunDir.create(folder, "tiny", "", "digest", {})
        self.run.truncate_after(first_step)
        self.observer.open_run(self.run)
        self.observer.on_start(run=str(self.run.path), first_step=first_step, num_steps=9)

    def step(self, step: int) -> None:
        self.run.metrics.append(step, {"loss": 0.5, "seconds_step": 2.0})
        self.observer.on_step({"step": step, "loss": 0.5, "seconds_step": 2.0})

    def end(self, cause: str = "done") -> list[Event]:
        self.observer.on_end(cause=cause)
        self.run.release()
        return [event for event in self.run.events.read() if event.cause == "tracker_failed"]

    @property
    def sent(self) -> Sent:
        return read_sent(sent_path(self.run.path, "tensorboard"))


def scalars(calls: Calls, name: str = "train/loss") -> list[int]:
    """Return the steps of which a number was sent, in order."""
    return [args[2] for kind, args in calls if kind == "scalar" and args[0] == name]


def summary(step: int, **changes: Any) -> EvalSummary:
    fields: dict[str, Any] = {"num_examples": 9, "greedy_accuracy": 0.5, "greedy_low": 0.25}
    return EvalSummary(step=step, greedy_high=0.75, sampled_accuracy=None, **(fields | changes))


def test_a_tracker_gets_every_number_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = make_package(monkeypatch)
    tracked = Tracked(tmp_path)
    tracked.observer.on_eval(summary(0))
    for step in (1, 2, 3):
        write_rollouts(tracked.run.rollouts_path(step), make_rollouts(step, ["12", "11"]))
        tracked.step(step)
    tracked.observer.on_event(Event(kind=EventKind.TRIPWIRE, step=3, cause="zero_variance", detail="d"))
    tracked.observer.on_eval(summary(3, invalid_cause="truncation"))
    assert tracked.end() == []
    assert scalars(calls) == scalars(calls, "time/seconds_step") == [1, 2, 3]
    # What may not be believed is not sent.
    for name, value in (("accuracy", 0.5), ("accuracy_low", 0.25), ("accuracy_high", 0.75)):
        assert ("scalar", (f"eval/{name}", value, 0)) in calls
    assert scalars(calls, "eval/accuracy") == [0]
    texts = [(args[0], args[2]) for kind, args in calls if kind == "text"]
    assert texts == [("rollouts", 1), ("rollouts", 2), ("events", 3)]
    assert calls[0] == ("open", (1,))
    assert calls[-1] == ("close", ())
    assert (tracked.sent.step, tracked.sent.eval_step) == (3, 3)
    assert [line["step"] for line in tracked.notes.steps] == [1, 2, 3]
    assert tracked.notes.ends == ["done"]


def test_no_text_leaves_where_no_rollouts_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = make_package(monkeypatch)
    tracked = Tracked(tmp_path, rollouts_every=None)
    write_rollouts(tracked.run.rollouts_path(1), make_rollouts(1, ["12", "11"]))
    tracked.step(1)
    assert tracked.end() == []
    assert scalars(calls) == [1]
    assert "text" not in dict(calls)


@pytest.mark.parametrize(("sent", "steps"), [(2, [3, 4, 5]), (4, [4, 5])])
def test_a_resumed_run_is_sent_once_and_what_is_lacking_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: int, steps: list[int]
) -> None:
    make_package(monkeypatch)
    first = Tracked(tmp_path)
    for step in (1, 2, 3, 4):
        first.step(step)
    for step in (0, 3):
        result = make_result(step, num_solved=5)
        write_result(result, first.run.path / "eval" / result_name(result))
        first.observer.on_eval(summary(step))
    first.end()
    # It goes on after step 3; the tracker had heard of fewer steps before it was killed, or of more.
    path = sent_path(first.run.path, "tensorboard")
    told = (
        path.read_text().replace('"step": 4', f'"step": {sent}').replace('"eval_step": 3', '"eval_step": 0')
    )
    path.write_text(told)
    calls = make_package(monkeypatch)
    again = Tracked(tmp_path, first_step=3)
    for step in (4, 5):
        again.step(step)
    again.end()
    assert calls[0] == ("open", (4,))
    assert scalars(calls) == steps
    assert scalars(calls, "eval/accuracy") == [3]


def test_a_tracker_that_hangs_costs_the_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    make_package(monkeypatch, goes_on.wait)
    tracked = Tracked(tmp_path, limit_s=0.1)
    before = time.monotonic()
    for step in (1, 2, 3):
        tracked.step(step)
    assert time.monotonic() - before < 5.0
    (event,) = tracked.end()
    assert (event.kind, event.step) == (EventKind.NOTICE, 3)
    assert "steps up to 0" in event.detail
    # What came before is said first, and the end is still the last word.
    assert [one.cause for one in tracked.notes.events] == ["tracker_failed"]
    assert tracked.notes.ends == ["done"]
    goes_on.set()


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_tracker_that_raises_is_said_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error(f"refused: {KEY}")

    make_package(monkeypatch, fail)
    # Its package cannot be imported.
    monkeypatch.setitem(sys.modules, "mlflow.entities", None)
    tracked = Tracked(tmp_path, use=("tensorboard", "mlflow"))
    tracked.step(1)
    wait_for(lambda: all(sender.error for sender in tracked.observer._senders))
    tracked.step(2)
    tracked.step(3)
    events = tracked.end()
    details = {event.detail.split()[0]: event.detail for event in events}
    assert (len(events), set(details)) == (2, {"tensorboard", "mlflow"})
    assert error.__name__ in details["tensorboard"]
    assert [line["step"] for line in tracked.notes.steps] == [1, 2, 3]
    held = [path for path in tracked.run.path.rglob("*") if path.is_file()]
    assert not [path for path in held if KEY.encode() in path.read_bytes()]


def test_a_rollout_is_a_row_whatever_became_of_it() -> None:
    (one,) = make_rollouts(1, ["x" * (MAX_TEXT_CHARS + 1)], prompt="What?")
    row = describe_rollout(one)
    assert (row["prompt"], row["reply"], row["is_correct"]) == ("What?", "x" * MAX_TEXT_CHARS, 0.0)
    several = describe_rollout(replace(one, turns=(*one.turns, one.turns[0], one.turns[1])))
    assert str(several["reply"]).startswith("[assistant]\nxxx")
    # Its environment failed before it said anything.
    nothing = describe_rollout(replace(one, turns=()))
    assert (nothing["prompt"], nothing["reply"], nothing["tokens"]) == ("", "", 0.0)


def test_without_trackers_nothing_is_started(tmp_path: Path) -> None:
    notes = Notes()
    observer = TrackingObserver(TrackersSpec(), notes)
    observer.on_start(run=str(tmp_path), first_step=0, num_steps=1)
    observer.on_step({"step": 1})
    observer.on_end(cause="done")
    assert (notes.starts, notes.ends) == ([(str(tmp_path), 0, 1)], ["done"])
    assert list(tmp_path.iterdir()) == []


def test_metrics_are_named_as_users_of_trackers_expect() -> None:
    assert name_metric("reward_mean") == "train/reward_mean"
    assert name_metric("seconds_step") == "time/seconds_step"
    assert name_metric("peak_memory_bytes") == "system/peak_memory_bytes"
    assert name_metric("reply_tokens_mean") == "rollouts/reply_tokens_mean"
    assert name_metric("of_my_own") == "train/of_my_own"
    # A part of a mixture may be called anything; MLflow takes few signs.
    assert name_metric("accuracy_a:b\n") == "train/accuracy_a_b_"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('name = "x"\ntask.name = "arithmetic"\n')
    return path


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ('trackers.use=["comet"]', "strop knows no such tracker"),
        ('trackers.use=["wandb", "wandb"]', "named twice"),
        ("trackers.use=wandb", "a list of texts"),
        ('trackers.project="../up"', "is not allowed"),
        ("trackers.rollouts_every=0", "is not allowed"),
    ],
)
def test_bad_settings_are_refused(run_file: Path, word: str, why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        load_spec(run_file, [word])


def test_a_missing_package_is_refused_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.view.trackers.find_spec", lambda name: None)
    for name in TRACKERS:
        with pytest.raises(CheckRefused, match=rf"pip install 'strop\[{name}\]'"):
            require_trackers(TrackersSpec(use=(name,)))
    require_trackers(TrackersSpec())


def test_without_a_key_wandb_is_refused_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("strop.view.trackers.find_spec", lambda name: name)
    netrc = tmp_path / "netrc"
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(netrc))
    online = TrackersSpec(use=("wandb",))
    with pytest.raises(CheckRefused, match="export WANDB_API_KEY"):
        require_trackers(online)
    require_trackers(TrackersSpec(use=("wandb",), offline=True))
    for name, value in (("WANDB_API_KEY", "k"), ("WANDB_MODE", "offline"), ("STROP_OFFLINE", "1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            require_trackers(online)
    netrc.write_text("machine api.wandb.ai login user password k\n")
    netrc.chmod(0o600)
    require_trackers(online)
    # A login at another server is none.
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    with pytest.raises(CheckRefused, match="there is no key for it"):
        require_trackers(online)
