"""What a terminal shows of a run, at every width, when it is resized, and of text that means harm."""

from __future__ import annotations

import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from strop.record import Event, EventKind
from strop.train import EvalSummary, Observer
from strop.view import PlainProgress, TerminalObserver, make_harmless, open_progress
from strop.view.display import Frame, RichProgress
from strop.view.terminal import StepLines, describe_duration
from tests.view.screen import Screen

WIDTHS = (40, 60, 80, 100, 120, 200)


def metrics(step: int) -> dict[str, float]:
    return {
        "reward_mean": step / 40,
        "accuracy": step / 50,
        "zero_variance_frac": 0.375,
        "scored_tokens_per_s": 1234.4,
        "seconds_step": 9.0,
    }


class Watched:
    """A run on a terminal whose clock stands still."""

    def __init__(self, width: int = 100, *, num_steps: int = 40) -> None:
        self.screen = Screen(width)
        self.console = Console(file=self.screen, width=width, height=24, force_terminal=True)
        self.clock = 0.0
        self.progress = RichProgress(self.console, now=lambda: self.clock)
        self.progress.begin("demo", num_steps=num_steps)

    def show(self) -> list[str]:
        self.progress.refresh()
        return self.screen.show()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Watched()


def test_a_screen_by_hand(watched: Watched) -> None:
    for step in range(1, 13):
        watched.progress.step(step, metrics(step))
    watched.progress.stage("step 13")
    watched.clock = 7.0
    # 28 steps left at 9 s each: 4 min 12 s; the curve rises evenly from the lowest block to the highest.
    assert watched.show() == [
        "demo: 40 steps",
        "step 12/40  ███████░░░░░░░░░░░░░░░░░  30%  demo",
        "accuracy 24.0%  ▁▂▂▃▄▄▅▅▆▇▇█  2.0% to 24.0% in 12 steps",
        "reward 0.300  zero-variance 38%  tokens/s 1,234  took 9.0 s",
        "left 4 min 12 s  step 13 for 7.0 s  (28 steps of 9.0 s, mean of the last 10)",
    ]
    watched.progress.end("ended: done")
    assert watched.show()[1:] == [
        "step 12/40  ███████░░░░░░░░░░░░░░░░░  30%  demo",
        "accuracy 24.0%  ▁▂▂▃▄▄▅▅▆▇▇█  2.0% to 24.0% in 12 steps",
        "reward 0.300  zero-variance 38%  tokens/s 1,234  took 9.0 s",
        "ended: done",
    ]
    assert not watched.screen.is_cursor_hidden


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_the_terminal_and_the_most_important_stays(width: int) -> None:
    watched = Watched(width, num_steps=2000)
    for step in range(1, 301):
        watched.progress.step(step, metrics(step))
    watched.progress.stage("step 301")
    watched.progress.note("truncation: 95% of replies were cut " * 9, is_alarm=True)
    shown = watched.show()[-5:]
    assert all(len(row) < width for row in shown)
    assert shown[0].startswith("step 300/2000  █")
    assert shown[1].startswith("accuracy 600.0%  ")
    # Of the last steps as many as there is room for, and the scale is that of these.
    curve = shown[1].split("  ")[1]
    assert len(curve) >= min(width // 2, 20) - 1
    assert curve[0] == "▁"
    assert curve[-1] == "█"
    if "in" in shown[1]:
        assert shown[1].endswith(f"{(301 - len(curve)) / 50:.1%} to 600.0% in {len(curve)} steps")
    assert shown[3].startswith("left 4 h 15 min")
    assert shown[4].startswith("! alarm: truncation: 95%")
    assert shown[4].endswith("...")


def test_a_run_is_drawn_in_place_and_notes_stand_above(watched: Watched) -> None:
    watched.progress.note("gate passed")
    for step in range(1, 41):
        watched.progress.step(step, metrics(step))
        if step % 20 == 0:
            watched.progress.note(f"step {step}: held-out accuracy")
        if step == 30:
            watched.progress.note("drift is high", is_alarm=True)
            watched.progress.note("drift is higher", is_alarm=True)
    assert [row for row in watched.show() if not row.startswith(("reward", "accuracy", "starting"))] == [
        "demo: 40 steps",
        "  gate passed",
        "  step 20: held-out accuracy",
        "! drift is high",
        "! drift is higher",
        "  step 40: held-out accuracy",
        "step 40/40  ████████████████████████  100%  demo",
        "! alarm 2: drift is higher",
    ]


def test_no_colour_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch, watched: Watched) -> None:
    watched.progress.note("an alarm", is_alarm=True)
    assert watched.screen.has_colour
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Watched()
    plain.progress.step(1, metrics(1))
    plain.progress.note("an alarm", is_alarm=True)
    assert "! an alarm" in plain.show()
    assert not plain.screen.has_colour


@pytest.mark.parametrize(
    "hostile",
    [
        "\x1b[2J\x1b[H\x1b]0;title\x07gone",
        "over\rwritten\nsecond line\u2028third",
        "abc\u202edef\u200b",
        "x" * 1_000_000,
        "漢字" * 400_000,
        "e\u0301" * 5000,
        "\x9b31mred",
        "[red]a bracket",
    ],
)
def test_hostile_text_stays_text_and_on_its_line(hostile: str) -> None:
    watched = Watched(80)
    watched.progress.stage(hostile)
    watched.progress.step(1, metrics(1))
    watched.progress.note(hostile, is_alarm=True)
    # The screen refuses control characters and codes that it does not know; an alarm stays in sight.
    shown = watched.show()
    assert shown[-1].startswith("! alarm: ")
    # Square brackets are text, not markup.
    assert ("[red]" in shown[-1]) == ("[red]" in hostile)
    assert all(cell_len(row) < 80 for row in shown[-5:])
    # As a line above it may take some rows, and not thousands.
    assert len(shown) < 80


def test_a_run_whose_rewards_are_missing_shows_what_it_has() -> None:
    frame = Frame("demo", num_steps=3, step=0, now=lambda: 0.0)
    assert frame.describe(100) == [
        "step 0/3  ░░░░░░░░░░░░░░░░░░░░░░░░  0%  demo",
        "starting for 0.0 s",
    ]
    frame.add_step(1, {"num_sft_tokens": 16.0, "loss": 1.25, "seconds_step": 2.0})
    frame.add_step(2, {"num_sft_tokens": 16.0, "loss": 0.25, "seconds_step": 4.0})
    assert frame.describe(100)[1] == "loss 0.2500  █▁  0.2500 to 1.2500 in 2 steps"
    frame = Frame("demo", num_steps=3, step=0, now=lambda: 0.0)
    for step, accuracy in ((1, 0.5), (2, None), (3, 0.5)):
        frame.add_step(step, {} if accuracy is None else {"accuracy": accuracy})
    assert frame.describe(100)[1] == "accuracy 50.0%  ▄ ▄  50.0% to 50.0% in 3 steps"


def plain() -> tuple[PlainProgress, io.StringIO]:
    stream = io.StringIO()
    return PlainProgress(stream), stream


def test_a_step_line_by_hand() -> None:
    progress, stream = plain()
    progress.begin("demo", num_steps=40)
    progress.step(12, metrics(12))
    # 28 steps left at 9 s each: 252 s = 4 min 12 s. The share 0.375 is shown without digits: 38 %.
    assert stream.getvalue() == (
        "demo: 40 steps\n"
        "step 12/40  reward  0.300  accuracy  24.0%  zero-variance  38%  tokens/s  1,234  took   9.0 s"
        "  left 4 min 12 s\n"
    )


def test_an_absent_metric_is_a_dash_and_never_0() -> None:
    progress, stream = plain()
    progress.begin("demo", num_steps=40)
    progress.step(1, {})
    progress.step(2, metrics(2))
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


def test_escape_codes_in_a_note_are_shown_and_not_obeyed() -> None:
    progress, stream = plain()
    progress.note("bad reply: '\x1b[2J\nsecond line'", is_alarm=True)
    progress.end("done \x1b[2J")
    assert stream.getvalue() == "alarm: bad reply: '\u241b[2J second line'\ndone \u241b[2J\n"


def test_a_pipe_gets_plain_lines_and_a_terminal_does_not() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    class AsciiTerminal(Terminal):
        encoding = "ascii"

    assert isinstance(open_progress(io.StringIO()), PlainProgress)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        assert isinstance(open_progress(Terminal()), RichProgress)
        assert isinstance(open_progress(AsciiTerminal()), PlainProgress)
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
