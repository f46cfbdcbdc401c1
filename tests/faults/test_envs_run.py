"""`strop envs run` ended in a traceback where a class's code failed, and full marks were not right."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from tests.fixtures.commands import Run

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


SERVER = """
import json, sys
print("WARNING: KeyError: an old one (old.py:3)", file=sys.stderr, flush=True)
tool = {"name": "note", "description": "", "inputSchema": {"type": "object", "properties": {"text": {}}}}
answers = {
    "initialize": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "serverInfo": {"name": "x", "version": "1"},
    },
    "tools/list": {"tools": [tool]},
}
for line in sys.stdin:
    asked = json.loads(line)
    if asked["method"] == "tools/call":
        raise RuntimeError("the store is gone")
    if "id" in asked:
        answer = {"jsonrpc": "2.0", "id": asked["id"], "result": answers[asked["method"]]}
        print(json.dumps(answer), flush=True)
"""


@pytest.mark.parametrize(("said", "cause"), [("", "broken reset"), ("/note text=a\n", "the store is gone")])
def test_a_failure_of_a_reset_or_an_mcp_server_is_one_line(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch, said: str, cause: str
) -> None:
    """An MCP server's old log was named as the cause."""
    text = WORLD.format(look="return 'seen'", score="return 1.0")
    text = text if said else text.replace('return "Go."', 'raise ValueError("broken reset")')
    (folder / "world.py").write_text(text)
    (folder / "server.py").write_text(SERVER)
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    ended = run(
        *("envs", "run", "world.py:World"),
        *([f'mcp_servers=["{sys.executable} server.py"]'] if said else []),
    )
    shown = (ended.out + ended.err).splitlines()
    assert not any("Traceback" in line for line in shown)
    (line,) = (line for line in shown if cause in line)
    assert "an old one" not in line


HEAD = """
from strop.rollout import Message, Outcome, Split, make_example
from strop.tasks import TaskLimits

"""
TASK = """
class Own:
    limits = TaskLimits(max_reply_tokens=8, max_reward=2.0)

    def examples(self, split):
        first = 0 if split is Split.TRAIN else 100
        return [make_example("own", {"n": n}, str(n)) for n in range(first, first + 4)]

    def render(self, example):
        return (Message(role="user", content=f"Say {example.fields['n']}."),)

    def verify(self, example, text):
        parts = {"said": float(example.answer in text), "alone": float(text == example.answer)}
        return Outcome(parts=parts, OTHERS)

    def gold_replies(self, example):
        return (example.answer,)
"""
ENVIRONMENT = """
class Own:
    max_turns = 1
    limits = TaskLimits(max_reply_tokens=8, max_reward=2.0)

    def examples(self, split):
        return [{"n": n} for n in (range(4) if split == "train" else [100])]

    def reset(self, example, seed):
        self.answer = str(example.fields["n"])
        return f"Say {self.answer}."

    def step(self, text):
        self.text = text

    def score(self):
        parts = {"said": float(self.answer in self.text), "alone": float(self.text == self.answer)}
        return Outcome(parts=parts, OTHERS)
"""


@pytest.mark.parametrize("own", [TASK, ENVIRONMENT], ids=["task", "environment"])
@pytest.mark.parametrize(
    ("others", "reply", "verdict"),
    [
        ("format_ok=True", "100", "score: 2, right"),
        ("format_ok=True", "100!", "score: 1, not right"),
        ("is_correct='!' in text", "100!", "score: 1, right"),
        ("is_correct=False", "100", "score: 2, not right"),
    ],
)
def test_full_marks_are_right_unless_the_class_says_otherwise(
    own: str, others: str, reply: str, verdict: str, run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = HEAD + own.replace("OTHERS", others)
    (folder / "own.py").write_text(
        text.replace("'!' in text", "'!' in self.text") if own is ENVIRONMENT else text
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{reply}\n"))
    ended = run("envs", "run", "own.py:Own", "seed=0")
    assert ended.code == 0, ended.err
    assert verdict in ended.out


def test_a_run_that_kept_nothing_promises_no_checkpoint(run: Run, folder: Path) -> None:
    (folder / "own.py").write_text(
        HEAD + TASK.replace("OTHERS", "").replace('"said": float(', '"said": None and (')
    )
    settings = folder / "run.toml"
    settings.write_text(settings.read_text().replace('"arithmetic"', '"own.py:Own"'))
    accepted = "train.accept=weights: random; audit: no verdicts"
    ended = run("train", "run.toml", accepted)
    assert ended.code != 0
    assert not list((folder / "runs").glob("*/checkpoints/step-*"))
    assert "checkpoint" not in ended.err.splitlines()[-1]
