"""What is written reads back, and what each setting says of itself."""

from __future__ import annotations

import pickle
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.errors import ConfigError
from strop.spec import (
    EvalSpec,
    OptimizerSpec,
    OutputSpec,
    ResolvedSpec,
    RunSpec,
    TripwireSpec,
    all_keys,
    explain,
    load_spec,
    spec_digest,
    write_spec,
)
from strop.spec.schema import near_keys, section_names
from strop.tasks.generated import ArithmeticSpec, ReasoningGymSpec
from strop.tasks.rows.judged_rows import PresetSpec

SMALL = 'name = "x"\n[task]\nname = "arithmetic"\n'


def read_back(folder: Path, spec: RunSpec) -> RunSpec:
    path = folder / "spec.toml"
    path.write_text(write_spec(ResolvedSpec(spec=spec, origins={})))
    return load_spec(path).spec


@pytest.mark.parametrize(
    "task",
    [
        ArithmeticSpec(max_reply_tokens=7),
        PresetSpec(name="gsm8k", num_train=None, num_held_out=3),
        ReasoningGymSpec(name="reasoning-gym", dataset="none", config={}),
        ReasoningGymSpec(
            name="reasoning-gym",
            dataset='"\\\n\x7f\u2028é😀',
            config={"a b.c": {"": [True, 1, 1.0, "none", {"deep": []}]}, "z": {}},
        ),
    ],
    ids=lambda task: f"{task.name}-{len(str(task))}",
)
def test_every_task_survives_writing_and_reading(tmp_path: Path, task: Any) -> None:
    spec = RunSpec(name="x", task=task, output=OutputSpec(root="/r"))
    back = read_back(tmp_path, spec)
    assert back == spec
    # 1 == 1.0 == True in Python; their texts differ.
    assert repr(back) == repr(spec)


def test_no_value_survives_where_the_default_is_a_value(tmp_path: Path) -> None:
    spec = RunSpec(
        name="x",
        task=ArithmeticSpec(),
        eval=EvalSpec(num_samples=None),
        tripwires=TripwireSpec(max_drift_nats=None),
        output=OutputSpec(root="/r"),
    )
    back = read_back(tmp_path, spec)
    assert back.eval.num_samples is None
    assert back.tripwires.max_drift_nats is None
    assert back == spec


def test_the_written_file_names_every_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(SMALL + "max_value = 9\nnum_held_out = 9\n")
    resolved = load_spec("run.toml", ["train.steps=3"])
    lines = write_spec(resolved).splitlines()
    assert "max_value = 9  # run.toml:4" in lines
    assert "steps = 3  # override" in lines
    assert 'every = "none"  # default' in lines
    # Every setting of this task is there: the reader of the file needs no defaults.
    written = tomllib.loads(write_spec(resolved))
    flat = {
        f"{key}.{name}" if isinstance(table, dict) else key
        for key, table in written.items()
        for name in (table if isinstance(table, dict) else [key])
    }
    assert flat == set(resolved.origins)


def test_a_resolved_spec_can_be_sent_to_another_process(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(SMALL)
    resolved = load_spec(tmp_path / "run.toml")
    assert pickle.loads(pickle.dumps(resolved)) == resolved


def test_the_digest_changes_with_what_is_asked_and_not_with_where_it_is_written() -> None:
    spec = RunSpec(name="x", task=ArithmeticSpec())
    same = RunSpec(name="x", task=ArithmeticSpec(), output=OutputSpec(root="/elsewhere"))
    other = RunSpec(name="x", task=ArithmeticSpec(), optimizer=OptimizerSpec(lr=2e-5))
    assert spec_digest(spec) == spec_digest(same)
    assert spec_digest(spec) != spec_digest(other)
    assert len(spec_digest(spec)) == 64


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)
FREE = st.recursive(
    st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    config=st.dictionaries(TEXTS, FREE, max_size=4),
    lr=st.floats(min_value=0, max_value=1, exclude_min=True),
    every=st.none() | st.integers(1, 10**7),
)
def test_any_spec_survives_writing_and_reading(
    tmp_path: Path, config: dict[str, Any], lr: float, every: int | None
) -> None:
    spec = RunSpec(
        name="x",
        task=ReasoningGymSpec(name="reasoning-gym", dataset="d", config=config),
        optimizer=OptimizerSpec(lr=lr),
        eval=EvalSpec(every=every),
        output=OutputSpec(root="/r"),
    )
    back = read_back(tmp_path, spec)
    assert repr(back) == repr(spec)
    assert spec_digest(back) == spec_digest(spec)


@pytest.fixture
def run_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(
        'name = "x"\n[task]\nname = "reasoning-gym"\ndataset = "d"\n[task.config]\nlow = 1\n'
    )
    return "run.toml"


@pytest.mark.parametrize(
    ("key", "type_text", "default", "allowed"),
    [
        ("train.steps", "integer", "40", "an integer from 1 to 10000000"),
        (
            "algorithm.zero_variance",
            "choice or none",
            '"none"',
            "'skip', 'keep', 'drop', 'resample'; or \"none\"",
        ),
        ("algorithm.clip_low", "number or none", '"none"', 'a number above 0, at most 1; or "none"'),
        (
            "eval",
            "section",
            "every setting its own",
            "a table of every, num_examples, num_samples, baselines",
        ),
    ],
)
def test_a_setting_without_a_run(key: str, type_text: str, default: str, allowed: str) -> None:
    known = explain(key)
    assert (known.key, known.type, known.default, known.allowed) == (key, type_text, default, allowed)
    assert (known.value, known.origin) == (None, None)


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
    assert explain("task.min_value", resolved).origin is None


def test_a_setting_that_differs_between_tasks(run_path: str) -> None:
    assert "; gsm8k, " in (explain("task.num_held_out").default or "")
    assert explain("task.num_held_out", load_spec(run_path)).default == "100"


def test_a_task_is_chosen_among_all() -> None:
    known = explain("task.name")
    assert known.allowed.startswith("'arithmetic', 'guess-number', 'verifiers', ")
    assert known.default == "required"
    assert "'gsm8k': Grade-school word problems" in known.description


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
