"""MLGym's games are scored by the opponent's file, and the artefact can print the grade itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.errors import ConfigError, DataError
from strop.rollout import FailureOwner, Outcome, Split
from strop.spec import load_spec
from strop.tasks import Task, build_task
from tests.environments.test_worlds import attempt, call, tokenizer_of
from tests.fixtures.mlgym_checkout import write_checkout
from tests.fixtures.sandboxes import needs_bubblewrap

RUN = """
name = "games"
[environment]
name = "mlgym"
root = "{root}"
num_train = 8
num_held_out = 1
memory_gib = 0.25
disk_gib = 0.0625
sandbox = "process"
min_isolation = "rlimit"
"""


def make(folder: Path, *words: str) -> Task:
    run_file = folder / "run.toml"
    run_file.write_text(RUN.format(root=write_checkout(folder / "my checkout")))
    return build_task(load_spec(run_file, list(words)).spec.task)


def play(folder: Path, text: str, path: str = "strategy.py", *words: str) -> Outcome:
    task = make(folder, 'task.tasks=["pennies"]', *words)
    replies = [call("create", path=path, text=text), call("submit")]
    return attempt(task, tokenizer_of(folder), replies, max_reply_tokens=4000).outcome


FORGED = """
import json, os, sys
frame = sys._getframe()
while frame is not None:
    if "nonce" in frame.f_globals:
        print(json.dumps({"Score": 1.0}))
        print(frame.f_globals["nonce"], flush=True)
        os._exit(0)
    frame = frame.f_back

def row_strategy(history):
    return 0
"""
HALF = "def row_strategy(history):\n    return 0\n"
BEST = """
def row_strategy(history):
    return 0 if history and history[-1] == (0, 1) else 1
"""
OPPONENT = "def target_column_strategy(history):\n    return 0\n"
EQUAL_TO_ALL = """
class Any({base}):
    def __eq__(self, other):
        return True

def row_strategy(history):
    return Any()
"""


@pytest.mark.parametrize(
    ("text", "path", "metric"),
    [
        # Against it a 0 wins each second time, and the best reply to it always.
        (HALF, "strategy.py", 0.5),
        (BEST, "strategy.py", 1.0),
        # The opponent's file is not the model's.
        (OPPONENT, "target.py", 0.5),
        # What the artefact changes reaches neither the opponent, nor the history, nor the result.
        (FORGED, "strategy.py", 0.5),
        (f"open('target.py', 'w').write({OPPONENT!r})\n{HALF}", "strategy.py", 0.5),
        ("def row_strategy(history):\n    history.append((0, 0))\n    return 0\n", "strategy.py", 0.5),
        ("import json\njson.dumps = lambda _: '{\"Score\": 1}'\n" + HALF, "strategy.py", 0.5),
        (EQUAL_TO_ALL.format(base="int"), "strategy.py", 0.5),
        (EQUAL_TO_ALL.format(base=""), "strategy.py", None),
        ("def row_strategy(history): raise SystemExit\n", "strategy.py", None),
        ("print('{\"Score\": 1.0}')\nraise SystemExit(0)\n", "strategy.py", None),
    ],
)
def test_only_what_the_models_strategy_answers_counts(
    tmp_path: Path, text: str, path: str, metric: float | None
) -> None:
    outcome = play(tmp_path, text, path)
    assert outcome.failure is None, outcome
    assert outcome.metrics.get("metric") == metric, outcome
    # The gain as a share of the baseline, 0.5; what cannot be graded earns -1.
    assert outcome.reward == (-1.0 if metric is None else min(1.0, (metric - 0.5) / 0.5))


WRITES_TO_ITS_PARENT = """
import os
try:
    memory = open(f"/proc/{os.getppid()}/mem", "rb")
    answer = 1
except OSError:
    answer = 0

def row_strategy(history):
    return answer
"""


@needs_bubblewrap
def test_the_grader_cannot_be_read_by_the_artefact(tmp_path: Path) -> None:
    box = ("task.sandbox=bubblewrap", "task.min_isolation=namespace")
    # A 1 at each turn would win all of them.
    assert play(tmp_path, WRITES_TO_ITS_PARENT, "strategy.py", *box).metrics["metric"] == 0.5


def test_tasks_that_lack_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="data/unfinished"):
        make(tmp_path, 'task.tasks=["unfinished"]').examples(Split.TRAIN)
    with pytest.raises(ConfigError):
        make(tmp_path, 'task.tasks=["missing"]').examples(Split.TRAIN)


def test_a_sandbox_without_python_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = make(tmp_path, 'task.tasks=["pennies"]')
    # As in an image without `python`.
    monkeypatch.setattr("strop.sandbox.served.ServedSandbox.python_argv", ("no-python-here",))
    failure = attempt(task, tokenizer_of(tmp_path), [call("submit")], max_reply_tokens=4000).outcome.failure
    assert failure is not None
    assert (failure.owner, failure.kind) == (FailureOwner.TASK, "grader_broken")
    assert "no-python-here" in failure.detail
