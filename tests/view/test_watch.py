"""What the loop tells becomes lines, once each and in its words."""

from __future__ import annotations

import io

from strop.record import Event, EventKind
from strop.train import EvalSummary, Observer
from strop.view import PlainProgress, TerminalObserver


def watch() -> tuple[Observer, io.StringIO]:
    stream = io.StringIO()
    return TerminalObserver(PlainProgress(stream)), stream


def test_a_run_from_start_to_end() -> None:
    observer, stream = watch()
    summary = EvalSummary(
        step=0,
        num_examples=200,
        greedy_accuracy=0.305,
        greedy_low=0.245,
        greedy_high=0.372,
        sampled_accuracy=None,
    )
    observer.on_start(run="runs/arithmetic-20260528-202640", first_step=0, num_steps=2)
    observer.on_eval(summary)
    observer.on_step({"step": 1, "reward_mean": 0.5, "seconds_step": 3.0})
    observer.on_end(cause="done")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "arithmetic-20260528-202640: 2 steps"
    assert lines[1] == ("step 0: held-out accuracy 30.5% greedy (95% interval 24.5% to 37.2%, 200 examples)")
    assert lines[2].startswith("step 1/2  reward  0.500")
    # One step of 3 s is left.
    assert lines[2].endswith("left 3.0 s")
    assert lines[3:] == ["ended: done"]


def test_trouble_is_an_alarm_and_routine_is_silent() -> None:
    observer, stream = watch()
    for kind in EventKind:
        observer.on_event(Event(kind=kind, step=4, cause="cause", detail="why"))
    assert stream.getvalue().splitlines() == [
        "step 4: cause: why",
        "step 4: cause: why",
        "alarm: step 4: cause: why",
        "alarm: step 4: cause: why",
        "step 4: cause: why",
    ]
