"""A class whose `Outcome` says nothing of `is_correct` passed its check and could not be trained."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from tests.fixtures.commands import Run, folder, run

__all__ = ["folder", "run"]

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
    accepted = "train.accept=weights: random; verifier: no verdicts; audit: no verdicts"
    ended = run("train", "run.toml", accepted)
    assert ended.code != 0
    assert not list((folder / "runs").glob("*/checkpoints/step-*"))
    assert "checkpoint" not in ended.err.splitlines()[-1]
