"""A task class of the user's: a task like any other, and every way in which it can be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.errors import ConfigError, StropError
from strop.rollout import Split
from strop.spec import ResolvedSpec, load_spec, write_spec
from strop.spec.description import explain
from strop.spec.parts import MixtureSpec
from strop.spec.task import UserTaskSpec
from strop.tasks import Task, build_task, build_warm_task
from tests.fixtures.judging import judge_replies as judge
from tests.fixtures.judging import run_self_test, verdict

CODE = """
from dataclasses import dataclass

@dataclass
class Settings:
    low: int = 2
    high: int = 40
    word: str | None = None

class Doubling:
    \"\"\"What is twice a number?\"\"\"

    def __init__(self, settings: Settings):
        self.settings = settings

    def examples(self, split):
        numbers = range(self.settings.low, self.settings.high)
        return [{"n": n, "answer": 2 * n} for n in numbers if (n % 5 == 0) == (split == "held_out")]

    def render(self, example):
        return f"What is 2 * {example.fields['n']}?"

    def verify(self, example, text):
        return example.answer in text.split()

    def gold_replies(self, example):
        return [example.answer]
"""


def load(tmp_path: Path, *words: str, code: str = CODE, text: str = "") -> ResolvedSpec:
    (tmp_path / "own.py").write_text(code)
    run_file = tmp_path / "run.toml"
    run_file.write_text(f'name = "own"\n[task]\nname = "own.py:Doubling"\n{text}')
    return load_spec(run_file, ["train.prompts_per_step=4", *words])


def task_of(tmp_path: Path, *words: str, code: str = CODE) -> Task:
    return build_task(load(tmp_path, *words, code=code).spec.task)


def test_a_class_is_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = task_of(tmp_path, code=f"print('loaded')\n{CODE}")
    assert (task.limits.verify_limit_s, capsys.readouterr().out) == (10.0, "")
    first = task.examples(Split.TRAIN)[0]
    assert (task.name, first.fields, first.answer) == ("Doubling", {"n": 2}, "4")
    assert [(one.role, one.text) for one in task.render(first)] == [("user", "What is 2 * 2?")]
    assert [len(task.examples(split)) for split in Split] == [31, 7]
    assert run_self_test(task, task.examples(Split.TRAIN)[:8]) == []
    found = judge(load(tmp_path).spec.task, "It is 4", "5")
    assert [(one.reward, one.is_correct) for one in found] == [(1.0, True), (0.0, False)]


NAMES = """
    def problem_of(self, example):
        return example.fields["n"] % 7
"""


def test_a_class_may_say_which_examples_pose_one_problem(tmp_path: Path) -> None:
    def task_in(name: str, code: str) -> Task:
        (tmp_path / name).mkdir()
        return task_of(tmp_path / name, code=code)

    plain, named = task_in("plain", CODE), task_in("named", CODE + NAMES)
    example = named.examples(Split.TRAIN)[1]
    assert (plain.problem_of(example), named.problem_of(example)) == (None, "Doubling 3")
    with pytest.raises(ConfigError, match=r"own\.py.*pose \{'n': 3\}.*ZeroDivisionError"):
        task_in("broken", CODE + NAMES.replace("% 7", "% 0")).problem_of(example)


def test_its_settings_are_those_of_the_run_file(tmp_path: Path) -> None:
    resolved = load(tmp_path, "task.high=12", text="low = 3\n")
    assert isinstance(resolved.spec.task, UserTaskSpec)
    assert resolved.spec.task.model_extra == {"low": 3, "high": 12, "word": None}
    found = {name: explain(f"task.{name}", resolved) for name in ("low", "high", "word")}
    assert {name: (one.value, one.origin) for name, one in found.items()} == {
        "low": (3, f"{tmp_path / 'run.toml'}:4"),
        "high": (12, "override"),
        "word": (None, "default"),
    }
    assert (found["low"].type, found["low"].default, found["word"].type) == ("integer", "2", "text or none")
    assert {"task.low", "task.high"} <= set(explain("task", resolved).keys)
    # What is written reads back to the same, defaults of the class included.
    (tmp_path / "again.toml").write_text(write_spec(resolved))
    assert load_spec(tmp_path / "again.toml").spec == resolved.spec
    assert len(build_task(resolved.spec.task).examples(Split.TRAIN)) == 7


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("task.lo=3", ["task.lo=3 (override): own.py:Doubling has no such setting", "low, high, word"]),
        ("task.low=x", ["task.low='x' (override)", "a valid integer"]),
        ("task.low=none", ["task.low='none' (override)", "a valid integer"]),
        ("task.low=1.5", ["task.low=1.5", "a valid integer"]),
        ("task.min_words=3", ["task.min_words=3", "no such setting"]),
        ("task.judge_limit_s=0", ["task.judge_limit_s=0", "above 0"]),
        ("train.stepz=3", ["unknown key train.stepz"]),
    ],
)
def test_a_setting_that_it_does_not_take_is_refused(tmp_path: Path, word: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path, word)
    assert all(part in str(refusal.value) for part in words), str(refusal.value)


def test_a_setting_under_a_name_of_strops_own_is_refused(tmp_path: Path) -> None:
    """It was written twice into the run's record, which then could not be read, and strop's value won."""
    code = CODE.replace("word: str | None = None", "num_train: int = 9")
    with pytest.raises(ConfigError) as refusal:
        load(tmp_path, code=code)
    assert "task.num_train" in str(refusal.value)


def test_settings_of_pydantic_are_checked_by_it(tmp_path: Path) -> None:
    code = PYDANTIC + CODE.partition("word: str | None = None\n")[2]
    with pytest.raises(ConfigError, match="less than or equal to 100"):
        load(tmp_path, "task.high=101", code=code)
    resolved = load(tmp_path, "task.high=50", code=code)
    assert explain("task.high", resolved).allowed == "an integer at most 100"
    assert explain("task.high", resolved).description == "Where numbers end."
    assert len(build_task(resolved.spec.task).examples(Split.TRAIN)) == 39


PYDANTIC = """from pydantic import BaseModel, Field

class Settings(BaseModel):
    low: int = 2
    high: int = Field(default=40, le=100, description="Where numbers end.")
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("return [{", "return [] and [{", ["give its examples of train", "it has none"]),
        ("return [{", "return [3] or [{", ["an example 3"]),
        ('{"n": n,', '{"n": {1},', ["give its examples of train", "not JSON"]),
        ("numbers = range", "numbers = 1 / 0 or range", ["ZeroDivisionError", "(own.py:17)"]),
        ("example.fields['n']", "example.fields['m']", ["pose {'n': 2}", "KeyError: 'm'", "(own.py:21)"]),
        *(("return f", f"return {one} or f", ["pose {'n': 2}", one, "role"]) for one in ("5", "{'a': 1}")),
        ("return [example.answer]", "raise OSError('away')", ["pose {'n': 2}", "OSError: away"]),
        (
            "self.settings = settings",
            "raise ValueError('no')",
            ["be made with its settings", "ValueError: no"],
        ),
        ("def verify", "def judge", ["Doubling has no verify"]),
        ("class Doubling", "class Other", ["has no Doubling", "Settings, Other"]),
        ("(split ==", "('held_out' ==", ["held-out examples of own.py:Doubling are training examples too"]),
    ],
)
def test_a_class_that_cannot_be_asked_is_refused_by_line(
    tmp_path: Path, old: str, new: str, words: list[str]
) -> None:
    def use() -> None:
        task = task_of(tmp_path, code=CODE.replace(old, new, 1))
        assert task.version
        task.gold_replies(task.examples(Split.TRAIN)[0])

    with pytest.raises(StropError) as refusal:
        use()
    assert all(part in str(refusal.value) for part in words), str(refusal.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("return example.answer in", "return 'x' or", ["TypeError", "returned 'x'", "own.py:Doubling"]),
        ("return example.answer in", "return float('nan') or", ["ValueError", "returned nan"]),
        ("return example.answer in", "return 1 / 0 or", ["ZeroDivisionError", 'own.py", line 24']),
    ],
)
def test_a_judgement_that_fails_has_no_score(tmp_path: Path, old: str, new: str, words: list[str]) -> None:
    (found,) = judge(load(tmp_path, code=CODE.replace(old, new)).spec.task, "4")
    assert found.failure is not None
    assert found.reward is None
    assert all(word in f"{found.failure.kind} {found.failure.detail}" for word in words), found.failure


def test_an_outcome_of_its_own_is_taken_as_it_is(tmp_path: Path) -> None:
    code = "from strop.rollout import Outcome\n" + CODE.replace(
        "return example.answer in text.split()",
        "return Outcome(parts={'a': 0.5, 'b': 0.25}, is_correct=False, format_ok=True)",
    )
    (found,) = judge(load(tmp_path, code=code).spec.task, "4")
    assert (found.parts, found.format_ok) == ({"a": 0.5, "b": 0.25}, True)


def test_its_limits_are_those_that_it_says(tmp_path: Path) -> None:
    code = "from strop.tasks import TaskLimits\n" + CODE.replace(
        "class Doubling:",
        "class Doubling:\n    limits = TaskLimits(max_reply_tokens=64, stop_strings=('END',))\n",
    )
    limits = task_of(tmp_path, code=code).limits
    assert (limits.max_reply_tokens, limits.stop_strings) == (64, ("END",))
    assert task_of(tmp_path, "task.max_reply_tokens=65", code=code).limits.max_reply_tokens == 65


def test_the_version_covers_source_settings_and_examples(tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    other.mkdir()
    versions = [
        task_of(tmp_path).version,
        task_of(tmp_path, "task.high=39").version,
        task_of(tmp_path, code=CODE + "\n").version,
        task_of(tmp_path, "task.judge_limit_s=9").version,
    ]
    assert len(set(versions)) == 4
    assert task_of(other).version == versions[0]
    # Their names are those of settings of strop's own tasks that are not hashed.
    names = ("reward", "source", "root", "rubric", "judge_url")
    fields = "".join(f"\n    {name}: float = 0.5" for name in names)
    code = CODE.replace("high: int = 40", "high: int = 40" + fields)
    halves = task_of(tmp_path, code=code).version
    for name in names:
        assert task_of(tmp_path, f"task.{name}=0.9", code=code).version != halves, name


def test_a_run_file_is_valid_where_its_task_is_not(tmp_path: Path) -> None:
    resolved = load(tmp_path, "task.high=12")
    (tmp_path / "written.toml").write_text(write_spec(resolved))
    (tmp_path / "own.py").unlink()
    assert load_spec(tmp_path / "written.toml").spec.task == resolved.spec.task
    with pytest.raises(ConfigError, match=r"own\.py, which does not exist"):
        build_task(resolved.spec.task)


def test_it_is_a_part_like_any_other(tmp_path: Path) -> None:
    load(tmp_path)
    part: dict[str, Any] = {"name": f"{tmp_path / 'own.py'}:Doubling", "high": 12}
    mixture = build_task(
        MixtureSpec(name="mixture", parts={"own": part, "sums": {"name": "arithmetic", "num_held_out": 4}})
    )
    assert {example.task for example in mixture.examples(Split.HELD_OUT)} == {"Doubling", "arithmetic"}
    with pytest.raises(ValueError, match=r"task\.parts\.own\.lo.*no such setting"):
        MixtureSpec(name="mixture", parts={"own": {**part, "lo": 3}})


def test_those_that_judge_make_no_examples(tmp_path: Path) -> None:
    made = tmp_path / "made"
    code = CODE.replace(
        "numbers = range",
        f"with open({str(made)!r}, 'a') as file:\n            file.write(split)\n        numbers = range",
    )
    spec = load(tmp_path, code=code).spec.task
    assert [one.reward for one in judge(spec, "4", "5")] == [1.0, 0.0]
    # Once for each split, by whoever asks; not in the processes of the judge.
    assert made.read_text() == "trainheld_out"


def test_an_edit_does_not_reach_a_task_that_was_made(tmp_path: Path) -> None:
    spec = load(tmp_path).spec.task
    begun, made = build_warm_task(spec), build_task(spec)
    example = begun.examples(Split.TRAIN)[0]
    (tmp_path / "own.py").write_text(CODE.replace("example.answer in", "example.answer not in"))
    # What a process forked now does when it first judges.
    assert verdict(begun, example, "4").is_correct
    assert verdict(made, example, "4").is_correct
    (tmp_path / "own.py").write_text(CODE + "\n\n")
    late = build_task(spec)
    (tmp_path / "own.py").write_text(CODE)
    for use in (lambda: verdict(late, example, "4"), lambda: late.examples(Split.TRAIN)):
        with pytest.raises(ConfigError, match=r"own\.py was edited since it was looked at"):
            use()
