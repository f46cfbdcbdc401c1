"""A setting of a user's class is left out of its task's version if a built-in task has one of that name."""

from __future__ import annotations

from pathlib import Path

from strop.spec import load_spec
from strop.tasks import build_task

CODE = """
from dataclasses import dataclass

@dataclass
class Settings:
    reward: float = 0.5
    source: str = "a"
    rubric: str = "a"

class Own:
    def __init__(self, settings: Settings):
        self.settings = settings

    def examples(self, split):
        return [dict(n=n, answer=str(n)) for n in range(20) if (n % 4 == 0) == (split == "held_out")]

    def render(self, example):
        return f"Say {example.fields['n']}."

    def verify(self, example, text):
        return self.settings.reward * (text == example.answer)
"""
CHANGES = ("reward=0.9", "source=b", "rubric=b", "judge_limit_s=9.0")


def version_of(folder: Path, *words: str) -> str:
    return build_task(load_spec(folder / "run.toml", list(words)).spec.task).version


def test_two_values_of_a_users_setting_are_two_versions(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CODE)
    (tmp_path / "run.toml").write_text('name = "own"\n[task]\nname = "own.py:Own"\n')
    versions = {change: version_of(tmp_path, f"task.{change}") for change in CHANGES}
    usual = version_of(tmp_path)
    assert len({usual, *versions.values()}) == 1 + len(CHANGES), versions
    assert version_of(tmp_path, "task.reward=0.5") == usual


def test_a_path_or_service_of_a_built_in_task_is_no_part_of_its_version(tmp_path: Path) -> None:
    rows = '{"question": "1 + 1?", "answer": "#### 2"}\n{"question": "1 + 2?", "answer": "#### 3"}\n'
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.jsonl").write_text(rows)
        (tmp_path / folder / "test.jsonl").write_text(rows.replace("1 +", "2 +"))
    (tmp_path / "run.toml").write_text('name = "own"\n[task]\nname = "gsm8k"\nsource = "./here"\n')
    here = version_of(tmp_path)
    assert version_of(tmp_path, f"task.source={tmp_path / 'there'}", "task.max_too_long_frac=0.5") == here
    assert version_of(tmp_path, "task.reward=contains") != here
