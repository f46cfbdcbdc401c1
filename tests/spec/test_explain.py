from __future__ import annotations

from pathlib import Path

import pytest

from strop.errors import ConfigError
from strop.spec import all_keys, explain, load_spec
from strop.spec.schema import near_keys, section_names


@pytest.fixture
def run_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(
        'name = "x"\n[task]\nname = "reasoning-gym"\ndataset = "d"\n[task.config]\nlow = 1\n'
    )
    return "run.toml"


def test_a_setting_without_a_run() -> None:
    known = explain("train.steps")
    assert (known.key, known.type, known.default) == ("train.steps", "integer", "40")
    assert known.allowed == "an integer from 1 to 10000000"
    assert known.description == "Number of steps of the run, one batch each."
    assert (known.value, known.origin, known.keys) == (None, None, ())


def test_a_choice_that_may_be_left_open() -> None:
    known = explain("algorithm.zero_variance")
    assert known.type == "choice or none"
    assert known.default == '"none"'
    assert known.allowed == "'skip', 'keep', 'drop', 'resample'; or \"none\""


def test_a_number_with_open_limits() -> None:
    assert explain("algorithm.clip_low").allowed == 'a number above 0, at most 1; or "none"'


def test_a_setting_in_a_run(run_path: str) -> None:
    resolved = load_spec(run_path, ["train.steps=7"])
    assert (explain("train.steps", resolved).value, explain("train.steps", resolved).origin) == (
        7,
        "override",
    )
    assert explain("task.dataset", resolved).origin == "run.toml:4"
    assert explain("seed", resolved).origin == "default"
    low = explain("task.config.low", resolved)
    assert (low.type, low.value, low.origin) == ("any", 1, "run.toml:6")
    absent = explain("task.config.high", resolved)
    assert (absent.value, absent.origin) == (None, None)
    # A setting of another task is explained, and has no value here.
    assert explain("task.min_words", resolved).origin is None


def test_a_setting_that_differs_between_tasks(run_path: str) -> None:
    known = explain("task.num_held_out")
    assert known.default == (
        "arithmetic, reverse-text, guess-number, verifiers, reasoning-gym, mlgym,"
        " openenv: 100; dummy: 4; gsm8k, math, math500, deepscaler, aime, mmlu,"
        " mbpp, humaneval, apps, repo-repair, harbor, ifeval, ifbench, rlvr-ifeval, if-multi, llm-judge,"
        ' sft-jsonl, rlvr-mixed, rows, FILE.py:CLASS, FILE.py:ENVIRONMENT: "none"'
    )
    assert explain("task.num_held_out", load_spec(run_path)).default == "100"


def test_a_task_is_chosen_among_all() -> None:
    known = explain("task.name")
    assert known.allowed.startswith("'arithmetic', 'dummy', 'reverse-text', 'guess-number', 'verifiers', ")
    assert known.default == "required"
    assert "'gsm8k': Grade-school word problems" in known.description


def test_a_section_lists_its_settings() -> None:
    known = explain("eval")
    names = ("every", "num_examples", "num_samples", "baselines")
    assert (known.type, known.keys) == ("section", tuple(f"eval.{name}" for name in names))
    assert known.allowed == f"a table of {', '.join(names)}"


@pytest.mark.parametrize("key", [*all_keys(), *section_names(), "extends"])
def test_every_key_is_explained(key: str) -> None:
    known = explain(key)
    assert known.key == key
    assert known.description
    assert known.allowed


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("train.step", "train.steps"),
        ("trian.steps", "train.steps"),
        ("lr", "optimizer.lr"),
        ("train.lr", "optimizer.lr"),
        ("optimiser", "optimizer"),
        ("max_replay_tokens", "task.max_reply_tokens"),
        ("extend", "extends"),
        ("tripwires.max_drift", "tripwires.max_drift_nats"),
    ],
)
def test_near_matches_by_hand(key: str, near: str) -> None:
    assert near_keys(tuple(key.split(".")))[0] == near
    with pytest.raises(ConfigError, match=rf"unknown key '{key}'\. Allowed: .+ Next: did you mean {near}"):
        explain(key)


@pytest.mark.parametrize("key", ["", "zzzzzz", "a b", "train.steps.x", "task.config.a.b", "=", "x\ny"])
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="unknown key"):
        explain(key)
