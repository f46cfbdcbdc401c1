"""Names with dots or capitals were refused, a name had no default, and a judge's 500 lost the reply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.rollout import Split
from strop.spec import load_spec
from tests.fixtures.commands import Run
from tests.fixtures.judge_server import judge_server, scored
from tests.fixtures.judged import judge_task
from tests.fixtures.judging import verdict


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ('name = "qwen3-1.7B-mixed"', "qwen3-1-7b-mixed"),
        ('name = "Größe 2"', "gr-e-2"),
        (f'name = "{"a" * 50}"', "a" * 40),
        ("", "my-run-3"),
    ],
)
def test_a_runs_name_is_made_of_what_is_given(folder: Path, run: Run, line: str, name: str) -> None:
    text = (folder / "run.toml").read_text().replace('name = "tiny"', line)
    (folder / "My_Run.3.toml").write_text(text)
    ended = run("plan", "My_Run.3.toml", "--json")
    assert ended.code == 0, ended.err
    assert load_spec(folder / "My_Run.3.toml").spec.name == name


def test_a_name_without_letters_is_refused(folder: Path, run: Run) -> None:
    assert run("plan", "run.toml", 'name="..."').code == 2


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_judge_that_fails_once_is_asked_again(tmp_path: Path, status: int) -> None:
    answers: list[Any] = [(status, "later"), scored(1.0)]
    with judge_server(lambda question: answers.pop(0)) as server:
        task = judge_task(tmp_path, server.url)
        assert verdict(task, task.examples(Split.TRAIN)[0], "word-0").reward == 1.0
