"""The lines a person watches: right numbers, aligned, harmless, and flushed."""

from __future__ import annotations

import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from strop.record import Event, EventKind
from strop.train import EvalSummary, Observer
from strop.view import PlainProgress, TerminalObserver, make_harmless, open_progress
from strop.view.display import RichProgress
from strop.view.terminal import StepLines, describe_duration

METRICS = {
    "reward_mean": 0.5,
    "accuracy": 0.25,
    "zero_variance_frac": 0.375,
    "scored_tokens_per_s": 1234.4,
    "seconds_step": 9.0,
}


def plain() -> tuple[PlainProgress, io.StringIO]:
    stream = io.StringIO()
    return PlainProgress(stream), stream


def rich() -> tuple[RichProgress, io.StringIO]:
    stream = io.StringIO()
    return RichProgress(
        Console(file=stream, force_terminal=True, width=120, color_system="truecolor")
    ), stream


def test_a_step_line_by_hand() -> None:
    progress, stream = plain()
    progress.begin("demo", num_steps=40)
    progress.step(12, METRICS)
    # 28 steps left at 9 s each: 252 s = 4 min 12 s. The share 0.375 is shown without digits: 38 %.
    assert stream.getvalue() == (
        "demo: 40 steps\n"
        "step 12/40  reward  0.500  accuracy  25.0%  zero-variance  38%  tokens/s  1,234  took   9.0 s"
        "  left 4 min 12 s\n"
    )


def test_an_absent_metric_is_a_dash_and_never_0() -> None:
    progress, stream = plain()
    progress.begin("demo", num_steps=40)
    progress.step(1, {})
    progress.step(2, METRICS)
    first, second = stream.getvalue().splitlines()[1:]
    assert "reward      -" in first
    assert first.endswith("left -")
    assert first.index("tokens/s") == second.index("tokens/s")


def test_the_time_left_follows_the_last_ten_steps() -> None:
    lines = StepLines(100)
    for step in range(1, 11):
        lines.columns(step, {"seconds_step": 100.0})
    for step in range(11, 21):
        columns = dict(lines.columns(step, {"seconds_step": 2.0}))
    # The ten slow steps are forgotten: 80 steps at 2 s = 160 s.
    assert columns["left"] == "2 min 40 s"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0.0 s"),
        (8.44, "8.4 s"),
        (59.96, "1 min 00 s"),
        (185.0, "3 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7800.0, "2 h 10 min"),
    ],
)
def test_durations_by_hand(seconds: float, shown: str) -> None:
    assert describe_duration(seconds) == shown


@pytest.mark.parametrize("make", [plain, rich])
def test_escape_codes_in_a_note_are_shown_and_not_obeyed(make: object) -> None:
    assert callable(make)
    progress, stream = make()
    progress.begin("demo", num_steps=2)
    progress.stage("reply \x1b[2J")
    progress.note("bad reply: '\x1b[2J\nsecond line [red]'", is_alarm=True)
    progress.end("done \x1b[2J")
    text = stream.getvalue()
    assert "\x1b[2J" not in text
    # One line, and square brackets are text, not markup.
    assert "bad reply: '\u241b[2J second line [red]'" in text
    assert "done \u241b[2J" in text


def test_an_alarm_is_told_apart_without_colour() -> None:
    progress, stream = plain()
    progress.note("evaluated: 31 %")
    progress.note("drift is high", is_alarm=True)
    assert stream.getvalue() == "evaluated: 31 %\nalarm: drift is high\n"


def test_a_pipe_gets_plain_lines_and_a_terminal_does_not() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert isinstance(open_progress(io.StringIO()), PlainProgress)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        assert isinstance(open_progress(Terminal()), RichProgress)
        patch.setenv("TERM", "dumb")
        assert isinstance(open_progress(Terminal()), PlainProgress)


def test_a_run_that_only_imitates_shows_its_loss_in_place_of_rewards() -> None:
    lines = StepLines(3)
    columns = dict(lines.columns(1, {"num_sft_tokens": 16.0, "loss": 1.25, "seconds_step": 2.0}))
    assert list(columns) == ["step", "loss", "tokens/s", "took", "left"]
    assert columns["loss"] == " 1.2500"
    pairs = dict(lines.columns(1, {"num_pairs": 4.0, "loss": 0.69, "pair_accuracy": 0.75}))
    assert (pairs["loss"], pairs["pairs right"]) == (" 0.6900", " 75%")
    assert "reward" not in pairs
    # Beside rollouts the rewards stay: the sum of both losses says little.
    mixed = dict(lines.columns(2, {"num_sft_tokens": 16.0, "loss": 1.25, "reward_mean": 0.5}))
    assert "loss" not in mixed
    assert mixed["reward"] == " 0.500"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, \u00fcber 12\n\tnext", "plain, \u00fcber 12\n\tnext"),
        ("\x1b[2Jgone", "\u241b[2Jgone"),
        ("\x1b]0;title\x07", "\u241b]0;title\u2407"),
        ("over\rwritten", "over\u240dwritten"),
        ("dos\r\nline", "dos\nline"),
        ("c1 \x9b2J", "c1 <U+009B>2J"),
        ("\x7f", "\u2421"),
        ("abc\u202edef", "abc<U+202E>def"),
        ("zero\u200bwidth", "zero<U+200B>width"),
        ("half \ud800 pair", "half <U+D800> pair"),
    ],
)
def test_harmful_characters_become_visible(text: str, shown: str) -> None:
    assert make_harmless(text) == shown


@given(st.text(alphabet=st.characters(codec=None)))
def test_nothing_that_controls_is_left(text: str) -> None:
    shown = make_harmless(text)
    left = {c for c in shown if unicodedata.category(c) in ("Cc", "Cs")} - {"\n", "\t"}
    assert not left
    shown.encode("utf-8")
    assert make_harmless(shown) == shown


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
