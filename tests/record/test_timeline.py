"""The timeline places what was measured, in lines of bounded size that survive what other logs survive."""

from __future__ import annotations

import json
from pathlib import Path

from strop.record.timeline import ENVIRONMENTS, LEARNER, MAX_GROUP_SPANS, VERIFIER, Timeline


class Clocks:
    """A monotonic clock, and one on the wall that somebody may set."""

    def __init__(self) -> None:
        self.now, self.ahead = 100.0, 1_764_000_000.0

    def open(self, path: Path) -> Timeline:
        return Timeline(path, clock=lambda: self.now, wall=lambda: self.now + self.ahead)


def test_spans_are_placed_on_the_wall_clock(tmp_path: Path) -> None:
    clocks = Clocks()
    timeline = clocks.open(tmp_path / "timeline.jsonl")
    with timeline.span(LEARNER, "learn"):
        clocks.now += 1.5
        # Set while the span lasts: it is none the longer.
        clocks.ahead += 3600.0
    timeline.add(ENVIRONMENTS, "group", 100.25, 101.0, {"number": 7, "example": "ab", "status": "trained"})
    timeline.add(VERIFIER, "verify", 100.0, 100.0001)
    timeline.write(12)
    begun_at = 1_764_003_700.0
    assert timeline.read_lines() == [
        {
            "step": 12,
            "spans": [
                {"lane": "learner", "name": "learn", "start": begun_at, "end": begun_at + 1.5},
                {
                    "lane": "environments",
                    "name": "group",
                    "start": begun_at + 0.25,
                    "end": begun_at + 1.0,
                    "detail": {"number": 7, "example": "ab", "status": "trained"},
                },
            ],
        }
    ]


def test_a_line_has_what_was_added_since_the_last(tmp_path: Path) -> None:
    timeline = Clocks().open(tmp_path / "timeline.jsonl")
    timeline.write(0)
    assert not timeline.path.exists()
    for step in (1, 2, 2):
        timeline.add(LEARNER, f"span of {step}", 0.0, 1.0)
        timeline.write(step)
    lines = [(line["step"], [span["name"] for span in line["spans"]]) for line in timeline.read_lines()]
    assert lines == [(1, ["span of 1"]), (2, ["span of 2"]), (2, ["span of 2"])]
    assert timeline.truncate_after(1) == 2
    assert [line["step"] for line in timeline.read_lines()] == [1]


def test_a_line_stays_small_however_many_groups_a_step_has(tmp_path: Path) -> None:
    timeline = Clocks().open(tmp_path / "timeline.jsonl")
    for number in range(1_000_000, 1_000_000 + 3 * MAX_GROUP_SPANS):
        detail = {"number": number, "example": "0123456789abcdef", "status": "trained"}
        timeline.add(ENVIRONMENTS, "group", 0.0, float(1 + number % 997), detail)
    for number in range(128):
        timeline.add(f"engine {number}", "generate", 0.123, 1.234)
    for number in range(32):
        timeline.add(VERIFIER, "verify", float(number), number + 0.5)
    for name in ("wait", "learn", "sync", "record", "evaluate", "checkpoint"):
        timeline.add(LEARNER, name, 0.0, 1.0)
    timeline.write(123_456)
    (text,) = timeline.path.read_text().splitlines()
    assert len(text) < 100_000
    spans = json.loads(text)["spans"]
    groups = [span for span in spans if span["lane"] == ENVIRONMENTS]
    assert len(groups) == MAX_GROUP_SPANS
    # The longest are kept, and everything else with them.
    assert min(span["end"] - span["start"] for span in groups) > 500
    assert len(spans) == MAX_GROUP_SPANS + 128 + 32 + 6
