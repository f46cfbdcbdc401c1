"""`[environment]`: the table of a task whose attempts have turns, read, written, explained and refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.environments.guess_number import GuessNumberSpec
from strop.errors import ConfigError
from strop.spec.description import explain, write_spec
from strop.spec.reader import load_spec
from strop.spec.task import UserEnvironmentSpec

OWN = """
class Own:
    def __init__(self, settings: "Settings"): ...
    def examples(self, split): return [{"a": split}]
    def reset(self, example, seed): return "Go."
    def step(self, text): return "On."
    def score(self): return 0.0

import dataclasses

@dataclasses.dataclass
class Settings:
    level: int = 3
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_it_is_read_and_written_under_its_own_name(tmp_path: Path) -> None:
    file = write(tmp_path / "run.toml", 'name = "x"\n[environment]\nname = "guess-number"\nmax_turns = 3\n')
    resolved = load_spec(file, ["environment.max_value=30", "task.max_attempt_tokens=5"])
    section = resolved.spec.task
    assert isinstance(section, GuessNumberSpec)
    assert (section.max_turns, section.max_value, section.max_attempt_tokens) == (3, 30, 5)
    written = write_spec(resolved)
    assert "[environment]" in written
    assert "[task]" not in written
    assert load_spec(write(tmp_path / "again.toml", written)).spec == resolved.spec


def test_a_file_has_one_of_the_two_tables(tmp_path: Path) -> None:
    text = 'name = "x"\n[environment]\nname = "guess-number"\n[task]\nname = "arithmetic"\n'
    file = write(tmp_path / "run.toml", text)
    with pytest.raises(
        ConfigError, match=r"both a task \(.*run.toml:4\) and an environment \(.*run.toml:2\)"
    ):
        load_spec(file)


def test_a_class_of_the_users_has_settings_of_its_own_and_those_of_environments(tmp_path: Path) -> None:
    own = write(tmp_path / "own.py", OWN)
    words = ["name=x", f"environment.name={own}:Own", "environment.level=5", "environment.max_turns=2"]
    resolved = load_spec(None, words)
    section = resolved.spec.task
    assert isinstance(section, UserEnvironmentSpec)
    assert (section.max_turns, section.inspect().values) == (2, {"level": 5})
    assert load_spec(write(tmp_path / "again.toml", write_spec(resolved))).spec == resolved.spec
    with pytest.raises(ConfigError, match="judge_limit_s"):
        load_spec(None, [*words, "environment.judge_limit_s=3"])


def test_its_settings_are_explained() -> None:
    assert "Most replies in an attempt" in explain("environment.max_turns").description
    assert "task.max_observation_chars" in explain("environment").keys


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["environment.name=guess"], "task.name='guess'"),
        (["environment.name=guess-number", "environment.max_turns=0"], "task.max_turns=0"),
        (["environment.name=guess-number", "environment.prompt_template={game}"], "in its own words"),
        (["environment.name=guess-number", "environment.min_value=3"], "no setting of task 'guess-number'"),
        (["environment.name=arithmetic", "environment.max_turns=3"], "no setting of task 'arithmetic'"),
        (
            ["task.name=mixture", "task.parts.a.name=guess-number", "task.parts.b.name=arithmetic"],
            "an environment is no part of another task",
        ),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_spec(None, ["name=x", *words])
