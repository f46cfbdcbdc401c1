"""Incidents of the group on configuration, and those of other groups that a run file refuses.

Each test is named after the incident of the same id; its docstring says what had happened.
"""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.errors import ConfigError
from strop.spec import AlgorithmSpec, all_keys, explain, load_spec, spec_digest, write_spec
from strop.spec.schema import find_settings

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "strop"
SMALL = 'name = "x"\n[task]\nname = "arithmetic"\n'


def refusal(path: Path, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_spec(path, overrides)
    return caught.value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SMALL + "[train]\nprompt_per_step = 4\n", "unknown key train.prompt_per_step (@:5)"),
        (SMALL + "[verifier]\nstrict = true\n", "unknown key verifier (@:4)"),
        (
            SMALL + "[train]\nsteps = 1\nsteps = 2\n",
            "@:6 cannot be read as TOML: a key or table is written twice",
        ),
        (SMALL + "[train]\nsteps = 1\n[train]\nseed = 2\n", "@:6 cannot be read as TOML: a key or table is"),
        (SMALL + "[train]\nsteps = '40'\n", "train.steps='40' (@:5) is not allowed. Allowed: an integer"),
    ],
)
def test_cfg_1_unknown_duplicate_and_mistyped_keys_are_refused(tmp_path: Path, text: str, words: str) -> None:
    """Incident: unknown keys were ignored and of two blocks in one file the last won silently."""
    path = tmp_path / "run.toml"
    path.write_text(text)
    error = refusal(path)
    assert words.replace("@", str(path)) in str(error)
    assert error.exit_code == 2
    assert [item.name for item in tmp_path.iterdir()] == ["run.toml"]


def test_cfg_1_a_misspelt_key_is_answered_with_the_nearest_and_with_all(tmp_path: Path) -> None:
    """Incident: as above; a message without names sends people to the source."""
    path = tmp_path / "run.toml"
    path.write_text(SMALL + "[eval]\nevry = 3\n")
    assert str(refusal(path)).endswith(
        "Allowed: every, num_examples, num_samples, baselines in eval. Next: did you mean eval.every?"
    )


# Settings with two values each that are allowed beside all others here; None is one of them.
CHOICES: dict[str, tuple[object, ...]] = {
    "seed": (1, 2, 3),
    "train.steps": (10, 20, 30),
    "eval.every": (None, 5, 6),
    "eval.num_samples": (None, 2, 3),
    "optimizer.lr": (1e-4, 2e-4, 3e-4),
    "tripwires.on_alarm": ("warn", "stop", "stop-on-collapse"),
    "tripwires.max_stall_s": (None, 1.5),
    "task.config.low": (1, 2, 3),
}
LAYER = st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in CHOICES.items()})


def toml_line(key: str, value: object) -> str:
    if value is None:
        return f'{key} = "none"\n'
    return f'{key} = "{value}"\n' if isinstance(value, str) else f"{key} = {value}\n"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(base=LAYER, file=LAYER, override=LAYER)
def test_cfg_2_the_winner_over_all_sources_is_what_explain_says(
    tmp_path: Path, base: dict[str, object], file: dict[str, object], override: dict[str, object]
) -> None:
    """Incident: file values beat flags, an explicit null vanished, and no test ever set both.

    The order: default, extended file, file, override. Checked against a loop over plain dicts.
    """
    head = 'name = "x"\ntask.name = "reasoning-gym"\ntask.dataset = "d"\n'
    (tmp_path / "base.toml").write_text(head + "".join(toml_line(*item) for item in base.items()))
    path = tmp_path / "run.toml"
    path.write_text('extends = "base.toml"\n' + "".join(toml_line(*item) for item in file.items()))
    resolved = load_spec(path, [f"{key}={'none' if v is None else v}" for key, v in override.items()])
    for key in CHOICES:
        said = explain(key, resolved)
        if key in override:
            expected: tuple[object, str | None] = (override[key], "override")
        elif key in file:
            expected = (file[key], f"{path}:{2 + list(file).index(key)}")
        elif key in base:
            expected = (base[key], f"{tmp_path / 'base.toml'}:{4 + list(base).index(key)}")
        elif key == "task.config.low":
            expected = (None, None)
        else:
            expected = (find_settings(tuple(key.split(".")))[0].info.default, "default")
        assert (said.value, said.origin) == expected
    again = tmp_path / "again.toml"
    again.write_text(write_spec(resolved))
    assert repr(load_spec(again).spec) == repr(resolved.spec)


def test_cfg_2_contradicting_overrides_are_refused_and_equal_ones_are_fine(tmp_path: Path) -> None:
    """Incident: of two conflicting overrides one was dropped silently."""
    path = tmp_path / "run.toml"
    path.write_text(SMALL)
    error = refusal(path, "train.steps=3", "seed=1", "train.steps=4")
    assert "override train.steps=3 and override train.steps=4 contradict each other" in str(error)
    # 1 and true are equal in Python and not in a run file.
    assert "contradict" in str(refusal(path, "train.steps=1", "train.steps=true"))
    assert load_spec(path, ["train.steps=3", "train={steps = 3}"]).spec.train.steps == 3


@pytest.mark.parametrize("overrides", [("optimizer.lr=nan",), ("optimizer.lr=nan", "optimizer.lr=nan")])
def test_a_nan_is_refused_as_one_and_does_not_contradict_itself(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """Incident: NaN does not equal NaN, so one override was said to contradict itself."""
    path = tmp_path / "run.toml"
    path.write_text(SMALL)
    error = str(refusal(path, *overrides))
    assert error.startswith("optimizer.lr=nan (override) is not allowed. Allowed: a number above 0")
    assert "contradict" not in error


def test_cfg_3_every_public_setting_has_a_reader() -> None:
    """Incident: settings that were parsed, documented, and read by nothing."""
    files = [path for path in SOURCE.rglob("*.py") if path.parent.name != "spec" or path.name == "layout.py"]
    read = set(re.findall(r"\.(\w+)", "".join(path.read_text() for path in files)))
    assert {key for key in all_keys() if key.rpartition(".")[2] not in read} == set()


@pytest.mark.parametrize("name", find_settings(("algorithm", "name"))[0].choices)
def test_cfg_3_every_choice_of_algorithm_can_be_built(name: typing.Any) -> None:
    """Incident: a loss variant that the configuration offered raised NameError when reached."""
    from strop.algorithm.building import build_algorithm

    assert build_algorithm(AlgorithmSpec(name=name)).name == name


def test_cfg_3_a_data_set_smaller_than_a_step_is_refused(tmp_path: Path) -> None:
    """Incident: floor division trained none of 4 examples at batch 8, and said nothing."""
    path = tmp_path / "run.toml"
    path.write_text('name = "x"\n[task]\nname = "reverse-text"\nnum_train = 4\n')
    message = str(refusal(path))
    assert "train.prompts_per_step=8 (default)" in message
    assert "Allowed: 1 to 4. Next: set train.prompts_per_step to 4" in message
    # 10 examples at 8 per step: steps are counted, not passes over the data, so none is cut off.
    assert load_spec(path, ["task.num_train=10"]).spec.train.prompts_per_step == 8


def test_cfg_5_a_run_file_means_the_same_from_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Incident: relative paths failed in workers that were started elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "run.toml"
    text = 'name = "x"\n[task]\nname = "gsm8k"\nsource = "./data"\n[model]\nuri = "../m"\n'
    path.write_text(text + '[output]\nroot = "runs"\n')
    monkeypatch.chdir(tmp_path)
    here = load_spec("run.toml").spec
    monkeypatch.chdir(tmp_path / "elsewhere")
    there = load_spec("../run.toml").spec
    assert here == there
    assert here.output.root == str(tmp_path / "runs")
    # Without output.root, runs go to the current folder; what is asked for stays the same.
    path.write_text(text)
    assert spec_digest(load_spec(path).spec) == spec_digest(here)
    assert load_spec(path).spec.output.root == str(tmp_path / "elsewhere/runs")


@pytest.mark.parametrize(
    "name", sorted(set(find_settings(("algorithm", "name"))[0].choices) - {"reinforce_pp"})
)
def test_opt_4_a_group_of_one_is_refused(tmp_path: Path, name: str) -> None:
    """Incident: the default group size 1 made all advantages zero; seen after ten empty batches."""
    path = tmp_path / "run.toml"
    path.write_text(SMALL)
    message = str(refusal(path, "train.group_size=1", f"algorithm.name={name}"))
    assert message == (
        f"train.group_size=1 (override) and algorithm.name='{name}' (override): every advantage"
        " would be zero, because a rollout is compared with the others of its prompt."
        " Allowed: 2 rollouts per prompt or more, or algorithm.advantage = 'rpp'. Next: set"
        " train.group_size to 8."
    )
    assert load_spec(path, ["train.group_size=2"]).spec.train.group_size == 2


CANARY = "Zq7Zq7Zq7Zq7Zq7Zq7Zq7Zq7"


@pytest.mark.parametrize(
    ("override", "form"),
    [
        (f"model.uri=hf_{CANARY}", "a model hub token"),
        ("model.uri=AKIA" + "Q7" * 8, "an AWS access key"),
        (f"name=sk-{CANARY}", "an API key"),
        (f"task.source=https://ada:{CANARY}@example.org/data", "a password in an address"),
        (f"task.config.api_key={CANARY}", "a credential by its name"),
        (f"task.config.list=[{{x = 'ghp_{CANARY}'}}]", "a GitHub token"),
        (f"hf_{CANARY}=1", "a model hub token"),
        (f"unknown.key=glpat-{CANARY}", "a GitLab token"),
    ],
)
def test_sec_4_a_credential_in_a_run_file_is_refused_and_not_repeated(
    tmp_path: Path, override: str, form: str
) -> None:
    """Incident: tokens in saved configurations and arguments."""
    path = tmp_path / "run.toml"
    path.write_text(SMALL)
    assert f"override holds {form}" in str(refusal(path, override))
    assert CANARY not in str(refusal(path, override))
    assert "Q7Q7" not in str(refusal(path, override))
