"""What a terminal shows of a run, at every width, when it is resized, and of text that means harm."""

from __future__ import annotations

import pytest
from rich.cells import cell_len
from rich.console import Console

from strop.view.display import ASCII_LEVELS, Frame, RichProgress, cut, draw_curve, fit
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
    """A run on a terminal whose clock stands still, of a width that can be changed."""

    def __init__(self, width: int = 100, *, encoding: str = "utf-8", num_steps: int = 40) -> None:
        self.screen = Screen(width, encoding=encoding)
        self.console = Console(file=self.screen, width=width, height=24, force_terminal=True)
        self.clock = 0.0
        self.progress = RichProgress(self.console, now=lambda: self.clock)
        self.progress.begin("demo", num_steps=num_steps)

    def resize(self, width: int) -> None:
        self.screen.resize(width)
        self.console.width = width

    def show(self) -> list[str]:
        region = self.progress._region
        if region is not None:
            region.refresh()
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


def test_a_terminal_that_is_resized_holds_no_rest_of_an_earlier_drawing(watched: Watched) -> None:
    for step in range(1, 31):
        watched.progress.step(step, metrics(step))
    watched.progress.note("a note")
    for number, width in enumerate((60, 41, 150, 40, 100), start=31):
        watched.resize(width)
        watched.progress.step(number, metrics(number))
        shown = watched.show()
        assert all(len(row) < width for row in shown)
        for begin in ("demo: 40 steps", "  a note", f"step {number}/40", "accuracy", "reward", "left"):
            assert sum(row.startswith(begin) for row in shown) == 1, shown
        assert len(shown) == 6


def test_an_encoding_without_blocks_gets_signs_of_ascii() -> None:
    watched = Watched(encoding="ascii")
    for step in range(1, 9):
        watched.progress.step(step, metrics(step))
    shown = watched.show()
    assert shown[1].startswith("step 8/40  ####--------------------  20%")
    assert f"  {ASCII_LEVELS}  " in shown[2]


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
    assert all(cell_len(row) < 80 for row in shown[-5:])
    # As a line above it may take some rows, and not thousands.
    assert len(shown) < 80


def test_a_run_whose_rewards_are_missing_shows_what_it_has() -> None:
    frame = Frame("demo", num_steps=3, step=0, now=lambda: 0.0)
    assert frame.describe(100, has_blocks=True) == [
        "step 0/3  ░░░░░░░░░░░░░░░░░░░░░░░░  0%  demo",
        "starting for 0.0 s",
    ]
    frame.add_step(1, {"num_sft_tokens": 16.0, "loss": 1.25, "seconds_step": 2.0})
    frame.add_step(2, {"num_sft_tokens": 16.0, "loss": 0.25, "seconds_step": 4.0})
    assert frame.describe(100, has_blocks=True)[1] == "loss 0.2500  █▁  0.2500 to 1.2500 in 2 steps"
    frame = Frame("demo", num_steps=3, step=0, now=lambda: 0.0)
    for step, accuracy in ((1, 0.5), (2, None), (3, 0.5)):
        frame.add_step(step, {} if accuracy is None else {"accuracy": accuracy})
    assert frame.describe(100, has_blocks=True)[1] == "accuracy 50.0%  ▄ ▄  50.0% to 50.0% in 3 steps"


def test_a_curve_and_its_cuts_by_hand() -> None:
    assert draw_curve([0.0, 1.0, None, 0.5, 1.0]) == "▁█ ▅█"
    assert draw_curve([2.0, 2.0]) == "▄▄"
    assert draw_curve([]) == ""
    assert draw_curve([0, 1, 2, 3, 4, 5, 6, 7], levels=ASCII_LEVELS) == "_.-=+*%#"
    assert fit(["step 1", "a longer part", "b"], 10) == "step 1"
    assert fit(["step 1", "", "ab"], 10) == "step 1  ab"
    assert [cut("abcdef", width) for width in (6, 5, 3, 1)] == ["abcdef", "ab...", "...", "."]
    assert cell_len(cut("漢字漢字", 6)) <= 6
