"""`strop envs run` ended in a traceback where the environment's code failed."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tests.fixtures.commands import Run, folder, run

__all__ = ["folder", "run"]

WORLD = """
import sys

class World:
    max_turns = 3

    def examples(self, split):
        return [{{"goal": number + 100 * (split == "train")}} for number in range(1, 21)]

    def reset(self, example, seed):
        return "Go."

    def look(self) -> str:
        "Look."
        {look}

    def score(self):
        {score}
"""


@pytest.mark.parametrize(
    ("look", "score", "kind"),
    [
        ("raise ValueError('broken')", "return 1.0", "ValueError"),
        # A coroutine, which alone can be ended at its limit.
        ("import asyncio; return asyncio.sleep(60)", "return 1.0", "tool_timeout"),
        ("return object()", "return 1.0", "no_text"),
        ("sys.exit(0)", "return 1.0", "SystemExit"),
        ("return 'seen'", "raise KeyError('no such goal')", "KeyError"),
        ("return 'seen'", "return object()", "TypeError"),
        ("return 'seen'", "return 1.0", ""),
    ],
)
def test_a_failure_of_the_environment_is_one_line_and_no_score(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch, look: str, score: str, kind: str
) -> None:
    (folder / "world.py").write_text(WORLD.format(look=look, score=score))
    monkeypatch.setattr("sys.stdin", io.StringIO("/look\n"))
    ended = run("envs", "run", "world.py:World", "tool_limit_s=1")
    lines = ended.out.splitlines()
    assert ended.code == (1 if kind else 0), ended.err
    assert "Traceback" not in ended.out + ended.err
    assert [line for line in lines if line.startswith("no score")] == [
        line for line in lines if kind and f"task, {kind}" in line
    ]
    assert lines[-1].startswith("score: -" if kind else "score: 1, right, num_tool_calls 1")
