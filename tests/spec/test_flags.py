"""Which value wins where a file, an override and a flag speak of one setting (slurm.md, 4.6)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.errors import ConfigError
from strop.spec import ResolvedSpec, load_spec
from strop.spec.description import explain
from strop.spec.reader import Flag

SMALL = 'name = "x"\ntask.name = "arithmetic"\n'
FILE, OVERRIDE, FLAG = 5, 6, 7
DEFAULT = 3
"""Of job.max_requeue; all four are different."""


def resolve(
    folder: Path,
    *,
    file: object = None,
    override: object = None,
    flag: object = None,
    key: str = "max_requeue",
) -> ResolvedSpec:
    lines = "" if file is None else f"[job]\n{key} = {file}\n"
    (folder / "run.toml").write_text(SMALL + lines)
    overrides = [] if override is None else [f"job.{key}={override}"]
    flags = [] if flag is None else [Flag(key=f"job.{key}", value=flag, name="--max-requeue")]
    return load_spec(folder / "run.toml", overrides, flags)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Row of the table; file, override, flag; what is used; what is ignored, strongest first; refused by --strict.
ROWS = [
    (1, (None, None, None), DEFAULT, (), False),
    (2, (FILE, None, None), FILE, (), False),
    (3, (None, OVERRIDE, None), OVERRIDE, (), False),
    (4, (FILE, OVERRIDE, None), OVERRIDE, (FILE,), False),
    (5, (None, None, FLAG), FLAG, (), False),
    (6, (FILE, None, FLAG), FLAG, (FILE,), True),
    (7, (None, OVERRIDE, FLAG), FLAG, (OVERRIDE,), True),
    (8, (FILE, OVERRIDE, FLAG), FLAG, (OVERRIDE, FILE), True),
]


@pytest.mark.parametrize(("row", "given_values", "used", "ignored", "is_strict"), ROWS)
def test_each_row_of_the_table(
    folder: Path,
    row: int,
    given_values: tuple[int | None, int | None, int | None],
    used: int,
    ignored: tuple[int, ...],
    is_strict: bool,
) -> None:
    file, override, flag = given_values
    resolved = resolve(folder, file=file, override=override, flag=flag)
    assert resolved.spec.job.max_requeue == used
    assert len(resolved.conflicts) == (1 if ignored else 0)
    for conflict in resolved.conflicts:
        assert (conflict.key, conflict.value) == ("job.max_requeue", used)
        assert tuple(value for value, _ in conflict.ignored) == ignored
        assert conflict.has_flag is is_strict


def test_a_conflict_names_every_value_and_its_place(folder: Path) -> None:
    resolved = resolve(folder, file=FILE, override=OVERRIDE, flag=FLAG)
    place = f"{folder / 'run.toml'}:4"
    assert str(resolved.conflicts[0]) == (
        f"conflict: job.max_requeue: using 7 (--max-requeue), ignoring 6 (override) and 5 ({place})"
    )


def test_the_output_folder_behind_the_flags_is_an_override_of_an_owned_setting(folder: Path) -> None:
    (folder / "run.toml").write_text(SMALL)
    flag = Flag(key="output.dir", value="/a", name="--output-dir")
    resolved = load_spec("run.toml", ["output.dir=/b"], [flag])
    assert resolved.spec.output.dir == "/a"
    assert [str(one) for one in resolved.conflicts] == [
        "conflict: output.dir: using '/a' (--output-dir), ignoring '/b' (override)"
    ]


def test_an_explicit_none_beats_a_value_and_stays_none(folder: Path) -> None:
    resolved = resolve(folder, file=2, override='"none"', key="cpus")
    assert resolved.spec.job.cpus is None
    assert [(one.value, one.ignored[0][0]) for one in resolved.conflicts] == [(None, 2)]


# The GPU split is one group.


def split(folder: Path, file: dict[str, object], flags: dict[str, object], *overrides: str) -> ResolvedSpec:
    lines = "".join(f"{name} = {str(value).lower()}\n" for name, value in file.items())
    (folder / "run.toml").write_text(SMALL + "[job]\n" + lines)
    named = [
        Flag(key=f"job.{name}", value=value, name="--" + name.replace("_", "-"))
        for name, value in flags.items()
    ]
    return load_spec("run.toml", overrides, named)


def test_cfg_2_flags_for_both_halves_beat_the_file(folder: Path) -> None:
    # The measured failure: a file with 4 and flags of 2 and 2 became 4 and 2.
    resolved = split(folder, {"train_gpus": 4}, {"train_gpus": 2, "infer_gpus": 2})
    assert resolved.spec.job.gpu_roles == {"infer": 2, "train": 2}
    assert [(one.key, one.value, one.ignored[0][0]) for one in resolved.conflicts] == [
        ("job.train_gpus", 2, 4)
    ]


def test_one_flag_of_the_group_brings_the_defaults_of_the_rest(folder: Path) -> None:
    resolved = split(folder, {"train_gpus": 4}, {"infer_gpus": 2})
    assert resolved.spec.job.gpu_roles == {"infer": 2, "train": 1}
    assert str(resolved.conflicts[0]) == (
        "conflict: job.train_gpus: using 1 (default beside --infer-gpus), ignoring 4 (run.toml:4)"
    )
    assert resolved.conflicts[0].has_flag


def test_gpus_for_the_learner_alone_leave_no_split(folder: Path) -> None:
    resolved = split(folder, {"train_gpus": 4, "infer_gpus": 1}, {"gpus": 2})
    assert resolved.spec.job.gpu_roles == {"train": 2}
    # Beside --gpus there is no half of one GPU: both are unset.
    assert [(one.key, one.value) for one in resolved.conflicts] == [
        ("job.infer_gpus", None),
        ("job.train_gpus", None),
    ]


def test_flags_keep_the_limits_of_the_settings(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        split(folder, {}, {"single_gpu": True, "train_gpus": 2})
    assert "job.train_gpus=2 (--train-gpus)" in str(caught.value)


# Every setting of a job with two values that differ from its default.
CHOICES: dict[str, tuple[object, ...]] = {
    "nodes": (2, 3, 4),
    "cpus_per_gpu": (4, 5, 6),
    "cpus": (2, 3, 4),
    "max_requeue": (5, 6, 7),
    "grace_s": (30.0, 31.0, 32.0),
    "max_silence_s": (60.0, 61.0, 62.0),
    "train_gpus": (1, 2, 3),
    "infer_gpus": (1, 2, 3),
}
layer = st.dictionaries(st.sampled_from(sorted(CHOICES)), st.integers(0, 2))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(base=layer, file=layer, override=layer, flag=layer)
def test_cfg_2_the_winner_is_the_one_that_explain_names(
    folder: Path, base: dict[str, int], file: dict[str, int], override: dict[str, int], flag: dict[str, int]
) -> None:
    def lines(values: dict[str, int]) -> str:
        return "".join(f"{key} = {CHOICES[key][index]}\n" for key, index in values.items())

    (folder / "base.toml").write_text(SMALL + "[job]\n" + lines(base))
    (folder / "run.toml").write_text('extends = "base.toml"\n[job]\n' + lines(file))
    resolved = load_spec(
        "run.toml",
        [f"job.{key}={CHOICES[key][index]}" for key, index in override.items()],
        [Flag(key=f"job.{key}", value=CHOICES[key][index], name=f"--{key}") for key, index in flag.items()],
    )
    has_split = bool(flag.keys() & {"train_gpus", "infer_gpus"})
    for key in CHOICES:
        found = explain(f"job.{key}", resolved)
        assert found.value == getattr(resolved.spec.job, key)
        is_of_group = key in {"train_gpus", "infer_gpus"}
        if key in flag:
            assert (found.origin, found.value) == (f"--{key}", CHOICES[key][flag[key]])
        elif is_of_group and has_split:
            assert (str(found.origin).startswith("default beside --"), found.value) == (True, None)
        elif key in override:
            assert (found.origin, found.value) == ("override", CHOICES[key][override[key]])
        elif key in file:
            assert str(found.origin).startswith("run.toml:")
            assert found.value == CHOICES[key][file[key]]
        elif key in base:
            assert str(found.origin).startswith("base.toml:")
        else:
            assert found.origin == "default"
        losers = [CHOICES[key][values[key]] for values in (override, {**base, **file}) if key in values]
        effective = 1 if is_of_group and has_split and found.value is None else found.value
        reported = [one for one in resolved.conflicts if one.key == f"job.{key}"]
        assert bool(reported) == any(value != effective for value in losers)
